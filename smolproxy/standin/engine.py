"""The pretended model: tokens, slots with their prompt caches, counters. Knows no HTTP and no JSON.

A token is a word together with the white space before it (`tokenize`), a prompt starts with one more token (BOS), as a
real one does, and an answer that stops by itself ends with one more that is counted but not shown (EOS).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from .reply import Gone

BOS = "<bos>"
WORD = re.compile(r"\s*\S+|\s+\Z")

Token = str | int
"""A piece of text; a number where the client sent token ids."""


def tokenize(text: str) -> list[Token]:
    """The tokens of a text; joined, they are the text again."""
    return list(WORD.findall(text))


def prompt_tokens(prompt: str | Sequence[Token]) -> list[Token]:
    """The tokens of a prompt: a text, token ids, or both mixed."""
    if isinstance(prompt, str):
        return [BOS, *tokenize(prompt)]
    tokens: list[Token] = []
    for at, part in enumerate(prompt):
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += tokenize(part) if at else prompt_tokens(part)
    return tokens


@dataclass
class Counters:
    """What was really processed, as llama-server's /metrics counts it: answers that were cancelled included."""

    prompt_tokens: int = 0
    """Prompt tokens processed, those from a cache left out; a prompt that several choices share counts once."""
    cached: int = 0
    """Prompt tokens taken from a cache."""
    predicted: int = 0
    """Tokens generated, added when the slot is given back."""
    prompt_seconds: float = 0.0
    predicted_seconds: float = 0.0


@dataclass
class Slot:
    """One of the sequences worked on in parallel."""

    id: int
    tokens: list[Token] = field(default_factory=list)
    """What is in its cache: the last prompt."""
    choice: Choice | None = None
    used_at: float = 0.0
    task: int = -1


@dataclass
class Choice:
    """One answer in the making."""

    index: int
    prompt: list[Token]
    limit: int
    """Tokens that may be made, at least 1."""
    first: bool = True
    """The first choice of its prompt; the others share the prompt's processing."""
    may_reuse: bool = True
    """Whether the slot's cache may be used."""
    slot: Slot | None = None
    cache_n: int = 0
    """Tokens of the prompt that came from the slot's cache."""
    prompt_ms: float = 0.0
    predicted: int = 0
    """Tokens made so far."""
    finished: bool = False
    first_at: float = 0.0
    last_at: float = 0.0

    @property
    def prompt_n(self) -> int:
        """Tokens of the prompt that were processed."""
        return len(self.prompt) - self.cache_n

    @property
    def predicted_ms(self) -> float:
        """Milliseconds from the first token to the last so far."""
        return max(0.001, round((self.last_at - self.first_at) * 1000, 3))


class Engine:
    """Slots, given out first come first served."""

    def __init__(self, slots: int, prompt_delay: float, prompt_token_delay: float, token_delay: float) -> None:
        self.slots = [Slot(number) for number in range(slots)]
        self.prompt_delay, self.prompt_token_delay, self.token_delay = prompt_delay, prompt_token_delay, token_delay
        self.counters = Counters()
        self.peak = 0
        """The most slots that were busy at once."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._tasks = 0

    @property
    def busy(self) -> int:
        """Slots at work."""
        return sum(slot.choice is not None for slot in self.slots)

    @property
    def deferred(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def work(self, choices: Sequence[Choice], gone: asyncio.Event, notice: float) -> AsyncIterator[None]:
        """Slots for the choices, all at once, their prompts processed; counted and given back however the block ends.

        Waiting for slots and prompts ends with Gone, `notice` seconds after the client has left.
        """
        await self._turn(len(choices), gone, notice)
        for choice in choices:
            self._place(choice)
        self.peak = max(self.peak, self.busy)
        self._next()
        try:
            await self._process_prompts(choices, gone, notice)
            yield
        finally:
            for choice in choices:
                self._release(choice)
            self._next()

    async def embed(self, prompts: Sequence[list[Token]], gone: asyncio.Event, notice: float) -> None:
        """Process prompts and make nothing, as many at a time as there are slots."""
        size = len(self.slots)
        for at in range(0, len(prompts), size):
            batch = [Choice(0, prompt, limit=0, may_reuse=False) for prompt in prompts[at : at + size]]
            async with self.work(batch, gone, notice):
                pass

    async def step(self, choices: Sequence[Choice]) -> list[Choice]:
        """Make the next token of every unfinished choice; returns those."""
        await asyncio.sleep(self.token_delay)
        running = [choice for choice in choices if not choice.finished]
        for choice in running:
            choice.last_at = time.perf_counter()
            if not choice.predicted:
                choice.first_at = choice.last_at
            choice.predicted += 1
        return running

    async def _turn(self, count: int, gone: asyncio.Event, notice: float) -> None:
        """Wait for so many free slots; whoever came first is first."""
        if not self._waiting and len(self.slots) - self.busy >= count:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leaving = asyncio.ensure_future(_after(gone, notice))
        self._waiting.append((count, turn))
        ready = False
        try:
            await asyncio.wait([turn, leaving], return_when=asyncio.FIRST_COMPLETED)
            ready = turn.done()
        finally:
            leaving.cancel()
            self._waiting.remove((count, turn))
            if not ready:
                self._next()
        if not ready:
            raise Gone

    def _next(self) -> None:
        """Give the first in the queue its turn, if there is room for it."""
        if self._waiting:
            count, turn = self._waiting[0]
            if not turn.done() and len(self.slots) - self.busy >= count:
                turn.set_result(None)

    def _place(self, choice: Choice) -> None:
        free = [slot for slot in self.slots if slot.choice is None]
        slot = max(free, key=lambda slot: (common(slot.tokens, choice.prompt), -slot.used_at))
        self._tasks += 1
        slot.task, slot.choice, choice.slot = self._tasks, choice, slot
        if choice.first and choice.may_reuse:
            choice.cache_n = min(common(slot.tokens, choice.prompt), len(choice.prompt) - 1)

    async def _process_prompts(self, choices: Sequence[Choice], gone: asyncio.Event, notice: float) -> None:
        began = time.perf_counter()
        work = sum(choice.prompt_n for choice in choices if choice.first)
        if delay := self.prompt_delay + work * self.prompt_token_delay:
            leaving = asyncio.ensure_future(_after(gone, notice))
            left, _ = await asyncio.wait([leaving], timeout=delay)
            leaving.cancel()
            if left:
                raise Gone
        seconds = time.perf_counter() - began
        parent = choices[0]
        for choice in choices:
            if choice.first:
                parent = choice
                self.counters.prompt_tokens += choice.prompt_n
                self.counters.cached += choice.cache_n
                self.counters.prompt_seconds += seconds
            choice.cache_n = parent.cache_n
            choice.prompt_ms = max(0.001, round(seconds * 1000, 3))
            if choice.slot is not None:
                choice.slot.tokens = choice.prompt

    def _release(self, choice: Choice) -> None:
        self.counters.predicted += choice.predicted
        self.counters.predicted_seconds += choice.predicted_ms / 1000 if choice.predicted else 0.0
        if choice.slot is not None:
            choice.slot.used_at = time.perf_counter()
            choice.slot.choice = None


def common(one: Sequence[Token], other: Sequence[Token]) -> int:
    """Length of the longest common prefix."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


async def _after(event: asyncio.Event, seconds: float) -> None:
    await event.wait()
    await asyncio.sleep(seconds)
