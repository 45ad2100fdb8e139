"""Answers kept and given again, for benchmarks: a body seen before costs no generating, no JSON and no slot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .answer import Answer
from .engine import Counters, Engine
from .wire import Request

MOST = 1000


@dataclass
class Tape:
    """One answer, and what making it had cost."""

    whole: bytes | None
    """The body of an answer that is no stream."""
    pieces: list[bytes]
    cost: Counters


class Tapes:
    """The answers so far, by path and body. Only answers to ordinary requests belong here: no scripted ones."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tapes: dict[tuple[str, bytes], Tape] = {}

    async def play(
        self, request: Request, answer: Answer, make: Callable[[Request, Answer], Awaitable[Counters]]
    ) -> None:
        """Answer from the tape; the first time by `make`, which tells what it cost."""
        tape = self._tapes.get((request.path, request.body))
        if tape is None:
            answer.tape = []
            cost = await make(request, answer)
            if len(self._tapes) < MOST:
                self._tapes[request.path, request.body] = Tape(answer.tape_whole, answer.tape, cost)
            return
        engine, counters = self._engine, self._engine.counters
        counters.prompt_tokens += tape.cost.prompt_tokens
        counters.cached += tape.cost.cached
        counters.predicted += tape.cost.predicted
        if tape.whole is not None:
            if seconds := engine.prompt_delay + tape.cost.predicted * engine.token_delay:
                await asyncio.sleep(seconds)
            await answer.whole(200, tape.whole)
            return
        if engine.prompt_delay:
            await asyncio.sleep(engine.prompt_delay)
        answer.start()
        for piece in tape.pieces:
            if engine.token_delay:
                await asyncio.sleep(engine.token_delay)
            await answer.write(piece)
        await answer.finish()
