"""The endpoints of the stand-in: who may ask, which path is which, what each one answers.

Generating is `generate`'s; nothing here knows of scripts, only of the `Reply` that an answer carries.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any

from . import shapes
from .answer import Answer
from .engine import BOS, Counters, Engine, Token, prompt_tokens, tokenize
from .generate import Ask, Generation, Refused, chat_prompts, check_context, text_prompts
from .reply import KEEP, MISSING
from .tape import Tapes
from .wire import Request

GENERATING = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/embeddings": "embeddings",
}
OPEN = ("/health", "/v1/health")


class Endpoints:
    """All paths of one server."""

    def __init__(
        self,
        engine: Engine,
        models: list[str],
        n_ctx: int,
        api_key: str | None,
        notice: float,
        metrics: bool,
        replay: bool,
        dimensions: int,
    ) -> None:
        self.engine, self.models, self.n_ctx, self.api_key = engine, models, n_ctx, api_key
        self.notice, self.metrics, self.dimensions = notice, metrics, dimensions
        self._tapes = Tapes(engine) if replay else None
        self._created = int(time.time())
        self._answers = 0
        self._pieces: list[str] = ["<pad>", "<eos>", BOS]
        self._ids = {piece: id for id, piece in enumerate(self._pieces)}
        self._routes: dict[tuple[str, str], Callable[[Request, Answer], Awaitable[None]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/models"): self._models,
            ("GET", "/props"): self._props,
            ("GET", "/slots"): self._slots,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/apply-template"): self._apply_template,
            ("POST", "/v1/chat/completions/input_tokens"): self._input_tokens,
            **{("POST", path): self._generate for path in GENERATING},
        }

    async def answer(self, request: Request, answer: Answer) -> None:
        """Answer an ordinary request; Refused and Gone go up."""
        if self.api_key is not None and request.path not in OPEN:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.api_key.encode()):
                body = shapes.early_error(401, "Invalid API Key", "authentication_error")
                await answer.whole(401, shapes.dumps(body))
                return
        method = "GET" if request.method == "HEAD" else request.method
        route = self._routes.get((method, request.path))
        if route is None:
            body = shapes.early_error(404, "File Not Found", "not_found_error")
            await answer.whole(404, shapes.dumps(body))
        else:
            await route(request, answer)

    # Generating.

    async def _generate(self, request: Request, answer: Answer) -> None:
        if self._tapes is None:
            await self._work(request, answer)
        else:
            await self._tapes.play(request, answer, self._work)

    async def _work(self, request: Request, answer: Answer) -> Counters:
        body, kind = request.json, GENERATING[request.path]
        if body is None and request.body.strip() != b"null":
            raise Refused(400, "[json.exception.parse_error.101] parse error: syntax error while parsing value")
        if kind == "embeddings":
            return await self._embed(body, answer)
        prompts = chat_prompts(body) if kind == "chat" else text_prompts(_field(body, "prompt"), "prompt")
        check_context(prompts, self.n_ctx)
        ask = Ask.parse(body, prompts, slots=len(self.engine.slots))
        self._answers += 1
        asked = body.get("model")
        model = asked if asked in self.models else self.models[0]
        shape = shapes.Chat if kind == "chat" else shapes.Text
        told = shape(f"chatcmpl-{self._answers:032d}", int(time.time()), model)
        generation = Generation(self.engine, ask, told, answer, self.n_ctx, self.notice)
        await generation.run()
        return generation.cost

    async def _embed(self, body: Any, answer: Answer) -> Counters:
        if not self.dimensions:
            message = "This server does not support embeddings. Start it with `--embeddings`"
            raise Refused(501, message, "not_supported_error")
        if not isinstance(body, dict) or not ("input" in body or "content" in body):
            raise Refused(400, '"input" or "content" must be provided')
        inputs = text_prompts(body.get("input", body.get("content")), "input")
        check_context(inputs, self.n_ctx)
        await self.engine.embed(inputs, answer.connection.gone, self.notice)
        told = shapes.embeddings(self.models[0], inputs, self.dimensions, body.get("encoding_format") == "base64")
        reply = answer.reply
        if reply.usage is MISSING:
            del told["usage"]
        elif reply.usage is not KEEP:
            told["usage"] = reply.usage
        await answer.whole(reply.status, shapes.dumps(told))
        return Counters(prompt_tokens=sum(map(len, inputs)))

    # Everything else.

    async def _health(self, request: Request, answer: Answer) -> None:
        await answer.whole(200, shapes.dumps({"status": "ok"}))

    async def _models(self, request: Request, answer: Answer) -> None:
        await answer.whole(200, shapes.dumps(shapes.models(self.models, self._created, self.n_ctx)))

    async def _props(self, request: Request, answer: Answer) -> None:
        told = shapes.props(self.models[0], len(self.engine.slots), self.n_ctx, self.metrics)
        await answer.whole(200, shapes.dumps(told))

    async def _slots(self, request: Request, answer: Answer) -> None:
        await answer.whole(200, shapes.dumps([shapes.slot(slot, self.n_ctx) for slot in self.engine.slots]))

    async def _metrics(self, request: Request, answer: Answer) -> None:
        if not self.metrics:
            message = "This server does not support metrics endpoint. Start it with `--metrics`"
            raise Refused(501, message, "not_supported_error")
        text = shapes.metrics(self.engine.counters, self.engine.busy, self.engine.deferred)
        await answer.whole(200, text.encode(), "text/plain; version=0.0.4")

    async def _tokenize(self, request: Request, answer: Answer) -> None:
        content = str(_field(request.json, "content"))
        tokens = prompt_tokens(content) if request.json.get("add_special") else tokenize(content)
        ids: list[Any] = [self._id(token) for token in tokens]
        if request.json.get("with_pieces"):
            ids = [{"id": id, "piece": token} for id, token in zip(ids, tokens, strict=True)]
        await answer.whole(200, shapes.dumps({"tokens": ids}))

    async def _detokenize(self, request: Request, answer: Answer) -> None:
        known = range(len(self._pieces))
        content = "".join(self._pieces[id] if id in known else f" <{id}>" for id in _field(request.json, "tokens"))
        await answer.whole(200, shapes.dumps({"content": content}))

    async def _apply_template(self, request: Request, answer: Answer) -> None:
        chat_prompts(request.json)
        await answer.whole(200, shapes.dumps({"prompt": shapes.render(request.json)}))

    async def _input_tokens(self, request: Request, answer: Answer) -> None:
        count = len(chat_prompts(request.json)[0])
        await answer.whole(200, shapes.dumps({"input_tokens": count, "object": "response.input_tokens"}))

    def _id(self, token: Token) -> int:
        if isinstance(token, int):
            return token
        if token not in self._ids:
            self._ids[token] = len(self._pieces)
            self._pieces.append(token)
        return self._ids[token]


def _field(body: Any, name: str) -> Any:
    """A field that must be there."""
    if not isinstance(body, dict) or name not in body:
        raise Refused(400, f"[json.exception.out_of_range.403] key '{name}' not found")
    return body[name]
