"""Asking a server something for smolproxy's own ends: how many tokens a text has, what its slots have made.

Nothing here raises, and nothing takes long: all questions about one request share a time limit. What the answers are
good for is not decided here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple
from urllib.parse import quote
from weakref import WeakKeyDictionary

import aiohttp

from smolproxy.daemon.servers import Server

_AT_ONCE = 4  # questions to one server at a time: its HTTP threads are few
_LOOK_AGAIN = 2.0  # seconds for which an answer of /slots stands


class Slot(NamedTuple):
    """A slot that works on an answer which is not streamed.

    :param prompt: tokens of its prompt, ``None`` if the server does not tell.
    :param cached: the part of them that came from the cache.
    :param made: tokens generated so far.
    """

    prompt: int | None
    cached: int
    made: int


class _Look:
    """What a server last told of its slots.

    Each look wakes all requests that wait inside llama-server, which then notices that clients of plain ones have left
    up to a second later. So clients that leave in a row share a look; an older one tells rather less than too much.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._at = float("-inf")
        self._slots: list[Slot] = []

    async def slots(self, questions: Questions) -> list[Slot]:
        """Return the slots at work."""
        async with self._lock:
            if time.monotonic() - self._at >= _LOOK_AGAIN:
                self._at = time.monotonic()
                answer = await questions.ask("GET", f"/slots?model={quote(questions.model, safe='')}")
                self._slots = [slot for slot in map(_slot, answer) if slot] if type(answer) is list else []
            return self._slots


_looks: WeakKeyDictionary[Server, dict[str, _Look]] = WeakKeyDictionary()


class Questions:
    """Asks one server, within a time for all questions together.

    :param model: the model's real name, for servers that have several.
    :param patience: seconds.
    """

    def __init__(self, server: Server, model: str, patience: float) -> None:
        self.model = model
        self.unanswered = False  # whether one of them was not answered
        self._server = server
        self._deadline = time.monotonic() + patience
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the server's answer, ``None`` if it gave none."""
        async with self._turns:
            left = self._deadline - time.monotonic()
            if left > 0:
                try:
                    status, answer = await self._server.ask(method, path, left, body)
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
                    pass
                else:
                    if status == 200:
                        return answer
        self.unanswered = True
        return None

    async def field(self, path: str, body: Any, *names: str) -> Any:
        """Return the first of the named fields that the answer to ``body`` has, ``None`` if it has none."""
        answer = await self.ask("POST", path, body)
        return next((answer[name] for name in names if name in answer), None) if type(answer) is dict else None

    async def tokens(self, text: str, *, special: bool) -> int | None:
        """Count the tokens of a text, ``None`` if the server does not.

        :param special: count the tokens that the server puts around a prompt.
        """
        body = {"content": text, "add_special": special, "model": self.model}
        tokens = await self.field("/tokenize", body, "tokens")
        return len(tokens) if type(tokens) is list else None

    async def slots(self) -> list[Slot]:
        """Return the slots that work on plain answers now, or did within the last seconds."""
        looks = _looks.setdefault(self._server, {})
        return await looks.setdefault(self.model, _Look()).slots(self)


def _slot(value: Any) -> Slot | None:
    """Read an entry of /slots; ``None`` if it is idle, or works on a stream."""
    if type(value) is not dict or value.get("is_processing") is not True:
        return None
    params = value.get("params")
    if type(params) is dict and params.get("stream") is True:
        return None
    token = value.get("next_token")
    token = token[0] if type(token) is list and token else token  # one object in older builds
    made = token.get("n_decoded") if type(token) is dict else None
    processed, cached = value.get("n_prompt_tokens_processed"), value.get("n_prompt_tokens_cache")
    prompt = processed + cached if type(processed) is int and type(cached) is int else None
    return Slot(prompt, cached if type(cached) is int else 0, made if type(made) is int else 0)
