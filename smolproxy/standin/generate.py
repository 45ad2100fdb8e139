"""The way of one chat or completions request: read what is asked, generate, tell it as llama-server does.

Which events carry which counts is decided here, and nowhere else; a `Reply` may ask for other ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import shapes
from .answer import Answer
from .engine import Choice, Counters, Engine, Token, prompt_tokens
from .reply import KEEP, MISSING, Gone, Pause, Reply
from .shapes import Json

DEFAULT_TOKENS = 16


class Refused(Exception):
    """The request is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", **more: int) -> None:
        self.status, self.body = status, shapes.error(status, message, kind, **more)


@dataclass
class Ask:
    """What a request asks for."""

    prompts: list[list[Token]]
    n: int
    limit: int | None
    stream: bool
    include_usage: bool
    timings_per_token: bool
    progress: bool

    @classmethod
    def parse(cls, body: Json, prompts: list[list[Token]], slots: int) -> Ask:
        """From a body; Refused where llama-server refuses."""
        n, stream_options = body.get("n", 1), body.get("stream_options")
        if not isinstance(n, int) or not 1 <= n <= slots:
            raise Refused(400, f"Field 'n': Value must be between 1 <= value <= {slots}, but got {n}")
        return cls(
            prompts,
            n,
            token_limit(body),
            stream=body.get("stream") is True,
            include_usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
            timings_per_token=body.get("timings_per_token") is True,
            progress=body.get("return_progress") is True,
        )


def check_context(prompts: list[list[Token]], n_ctx: int) -> None:
    """Refused if a prompt leaves no room for an answer."""
    for prompt in prompts:
        if (count := len(prompt)) >= n_ctx:
            message = f"request ({count} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
            raise Refused(400, message, "exceed_context_size_error", n_prompt_tokens=count, n_ctx=n_ctx)


def token_limit(body: Json) -> int | None:
    """The most tokens to make; None for no limit. 0 makes one."""
    for name in ("n_predict", "max_completion_tokens", "max_tokens"):
        if isinstance(limit := body.get(name), int):
            return None if limit < 0 else max(1, limit)
    return None


def chat_prompts(body: Json) -> list[list[Token]]:
    """The one prompt of a chat."""
    if not isinstance(body, dict) or "messages" not in body:
        raise Refused(400, "'messages' is required")
    if not isinstance(body["messages"], list):
        raise Refused(400, "Expected 'messages' to be an array")
    try:
        return [prompt_tokens(shapes.render(body))]
    except (KeyError, TypeError, AttributeError):
        raise Refused(400, "Invalid message in 'messages'") from None


def text_prompts(prompt: Any, field: str) -> list[list[Token]]:
    """The prompts of a completion or an embedding: a text, tokens, or a list of either."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and any(isinstance(part, int) for part in prompt)):
        return [prompt_tokens(prompt)]
    if isinstance(prompt, list) and prompt and all(isinstance(part, str | list) and part for part in prompt):
        return [prompt_tokens(part) for part in prompt]
    raise Refused(400, f'"{field}" must not be empty')


def deltas(reply: Reply) -> Iterator[Json]:
    """What each piece adds: the reply's script, or `tok0`, ` tok1` and so on without end."""
    for text in reply.think:
        yield {"reasoning_content": text}
    for text in reply.says or ():
        yield {"content": text}
    for index, (name, arguments) in enumerate(reply.calls):
        for at, text in enumerate(arguments):
            call: Json = {"index": index, "function": {"arguments": text}}
            if at == 0:
                call = {"index": index, "id": f"call_{index}", "type": "function"}
                call["function"] = {"name": name, "arguments": text}
            yield {"tool_calls": [call]}
    if reply.says is None and not reply.calls:
        count = 0
        while True:
            yield {"content": f"{' ' if count else ''}tok{count}"}
            count += 1


class EventWriter:
    """Sends server-sent events as a `Reply` wants them sent."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.reply = answer, answer.reply
        reply = self.reply
        self._singly = bool(reply.delay or reply.hold or reply.heartbeat or reply.cut is not None)
        self._count = 0

    async def send(self, *events: bytes) -> None:
        """Events that the real one writes at once; each on its own where the reply treats events singly."""
        if not self._singly:
            events = (b"".join(events),)
        for event in events:
            if held := self.reply.hold.get(self._count):
                await self.pause(held)
            if self.reply.delay:
                await self.pause(self.reply.delay)
            self._count += 1
            if self.reply.heartbeat:
                event = b":\n\n" + event
            await self.answer.write(event.replace(b"\n", b"\r\n") if self.reply.crlf else event)

    async def pause(self, what: Pause) -> None:
        """Wait, once all that was sent so far is out."""
        await self.answer.flush()
        await self.answer.connection.pause(what)


class Generation:
    """One request being answered."""

    def __init__(self, engine: Engine, ask: Ask, shape: shapes.Chat, answer: Answer, n_ctx: int, notice: float) -> None:
        self.engine, self.ask, self.shape, self.answer, self.notice = engine, ask, shape, answer, notice
        self.reply = answer.reply
        endless = self.reply.says is None and not self.reply.calls
        limit = ask.limit or (DEFAULT_TOKENS if endless else n_ctx)
        self.choices = [
            Choice(at * ask.n + copy, prompt, min(limit, n_ctx - len(prompt)), first=copy == 0)
            for at, prompt in enumerate(ask.prompts)
            for copy in range(ask.n)
        ]
        self._scripts = [deltas(self.reply) for _ in self.choices]

    @property
    def cost(self) -> Counters:
        """What was processed for it."""
        parents = [choice for choice in self.choices if choice.first]
        return Counters(
            sum(choice.prompt_n for choice in parents),
            sum(choice.cache_n for choice in parents),
            sum(choice.predicted for choice in self.choices),
        )

    async def run(self) -> None:
        """Generate and answer, from the first byte to the last."""
        if self.ask.stream:
            await self._stream()
        else:
            await self._whole()

    def _batches(self) -> Iterator[list[Choice]]:
        """As many prompts at a time as there are slots for."""
        size = max(1, len(self.engine.slots) // self.ask.n) * self.ask.n
        for at in range(0, len(self.choices), size):
            yield self.choices[at : at + size]

    def _next(self, choice: Choice) -> tuple[Json | None, str | None]:
        """What the token just made adds (None: it was the end), and the finish reason if it was the last."""
        delta = next(self._scripts[choice.index], None)
        finish = None
        if delta is None:
            finish = "tool_calls" if self.reply.calls else "stop"
        else:
            choice.predicted = min(choice.limit, choice.predicted + self.reply.tokens_per_piece - 1)
            if choice.predicted >= choice.limit:
                finish = "length"
        if finish:
            choice.finished = True
            finish = self.reply.finish or finish
        return delta, finish

    def _counts(self, choice: Choice, usage: bool, timings: bool) -> Json:
        """The objects with counts to put into an event or answer."""
        reply, more = self.reply, {}
        if (usage or (reply.usage_everywhere and self.ask.stream)) and reply.usage is not MISSING:
            more["usage"] = shapes.usage(choice) if reply.usage is KEEP else reply.usage
        if timings and reply.timings is not False and reply.timings is not MISSING:
            more["timings"] = shapes.timings(choice) if reply.timings is True else reply.timings
        return more

    async def _whole(self) -> None:
        connection = self.answer.connection
        said: list[list[Json]] = [[] for _ in self.choices]
        finishes = [""] * len(self.choices)
        for batch in self._batches():
            async with self.engine.work(batch, connection.gone, self.notice):
                while any(not choice.finished for choice in batch):
                    for choice in await self.engine.step(batch):
                        delta, finish = self._next(choice)
                        said[choice.index] += [delta] if delta else []
                        finishes[choice.index] = finish or ""
                    if connection.gone_at + self.notice <= asyncio.get_running_loop().time():
                        raise Gone
        shape = self.shape
        choices = [shape.choice(at, said[at], finishes[at]) for at in range(len(self.choices))]
        counts = self._counts(self.choices[0], usage=True, timings=True)
        await self.answer.whole(self.reply.status, shapes.dumps(shape.whole(choices, **counts)))

    async def _stream(self) -> None:
        writer = EventWriter(self.answer)
        for batch in self._batches():
            async with self.engine.work(batch, self.answer.connection.gone, self.notice):
                if not self.answer.started:
                    self.answer.start(self.reply.status)
                await self._prologue(writer, batch)
                while any(not choice.finished for choice in batch):
                    for choice in await self.engine.step(batch):
                        await self._tell(writer, choice)
        if self.reply.done:
            await writer.send(shapes.DONE)
        await self.answer.finish()

    async def _prologue(self, writer: EventWriter, batch: list[Choice]) -> None:
        for choice in batch:
            if not choice.first:
                continue
            if self.ask.progress:
                for processed in sorted({choice.cache_n, len(choice.prompt)}):
                    told = shapes.progress(choice, processed)
                    event = self.shape.chunk(self.shape.opening(choice.index), prompt_progress=told)
                    await writer.send(shapes.event(event))
            elif choice.index > 0:
                await writer.send(shapes.event(None))  # a quirk of the real one: each further prompt begins with a null

    async def _tell(self, writer: EventWriter, choice: Choice) -> None:
        shape, reply = self.shape, self.reply
        chat = not isinstance(shape, shapes.Text)
        opening = chat and choice.predicted == 1
        delta, finish = self._next(choice)
        events: list[Json] = []
        if opening:
            events.append(shape.chunk(shape.opening(choice.index), **self._counts(choice, usage=False, timings=False)))
        if delta is not None:
            counts = self._counts(choice, usage=False, timings=self.ask.timings_per_token)
            events.append(shape.chunk(shape.piece(choice.index, delta), **counts))
        if events:
            await writer.send(*map(shapes.event, events))
        if not finish:
            return
        apart = chat and self.ask.include_usage and not reply.usage_on_finish and reply.usage is not MISSING
        counts = self._counts(choice, usage=not chat or reply.usage_on_finish, timings=not apart)
        events = [shape.chunk(shape.closing(choice.index, finish), **counts)]
        if apart:
            events.append(shape.chunk([], **self._counts(choice, usage=True, timings=True)))
        await writer.send(*map(shapes.event, events))
