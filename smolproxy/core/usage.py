"""Usage (prompt, cached, completion, source) and its readers, one per way in which a server tells it.

Counts are tokens. ``prompt`` is the whole prompt, its cached part included (SPEC: section 5). A number that a server
does not tell is ``None`` here, which is not the same as a zero that it tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """What one request used, with where the numbers come from.

    :param source: ``usage``, ``timings``, ``counted`` or ``none``.
    :param prompt_ms: time the server spent on the prompt, milliseconds, if it told.
    :param predicted_ms: time the server spent generating, milliseconds, if it told.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    source: str = "none"
    prompt_ms: float | None = None
    predicted_ms: float | None = None


class Counts(NamedTuple):
    """Token counts as one object of a server told them; ``None`` where it did not."""

    prompt: int | None
    cached: int | None
    completion: int | None


_MOST = 2**40  # no honest count reaches it, and the books add up numbers of 64 bits
_DELTA = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST else None


def _milliseconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < _MOST else None


def read_usage(value: Any) -> Counts | None:
    """Read an OpenAI ``usage`` object; ``None`` if ``value`` is none or tells nothing."""
    if type(value) is not dict:
        return None
    prompt = _count(value.get("prompt_tokens"))
    completion = _count(value.get("completion_tokens"))
    total = _count(value.get("total_tokens"))
    if completion is None and total is not None and prompt is not None:
        completion = max(0, total - prompt)
    elif prompt is None and total is not None and completion is not None:
        prompt = max(0, total - completion)
    if prompt is None and completion is None:
        return None
    details = value.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if type(details) is dict else None
    return Counts(prompt, cached, completion)


def read_timings(value: Any) -> Counts | None:
    """Read llama-server's ``timings``; its ``prompt_n`` leaves out the cached part ``cache_n``."""
    if type(value) is not dict:
        return None
    processed = _count(value.get("prompt_n"))
    cached = _count(value.get("cache_n"))
    completion = _count(value.get("predicted_n"))
    if processed is None and completion is None:
        return None
    prompt = None if processed is None else processed + (cached or 0)
    return Counts(prompt, cached, completion)


class Tally:
    """Collects what an answer tells of its usage, and settles it by the order of the sources.

    Choices are known by their index in the answer: the first ``n`` are of the first prompt, the next of the second.

    :param prompts: how many prompts the request has.
    :param choices: how many choices it asked for, of all prompts together.
    """

    __slots__ = ("_closing", "_prompts", "_riding", "_times", "_timings", "_unclosed", "choices", "deltas", "finished")

    def __init__(self, prompts: int = 1, choices: int = 1) -> None:
        self.choices = choices
        self.deltas = 0  # pieces of generated text seen
        self.finished: set[int] = set()  # choices that have told their end
        self._prompts = prompts
        self._unclosed: deque[int] = deque()  # choices that have finished, but whose usage has not come
        # Of usage and timings the last one of each choice counts, never a sum: they tell a choice's total so far.
        self._closing: dict[int, Counts] = {}  # usage that stands alone
        self._riding: dict[int, Counts] = {}  # usage told together with a choice's text
        self._timings: dict[int, Counts] = {}
        self._times: dict[int, tuple[float | None, float | None]] = {}

    @property
    def complete(self) -> bool:
        """Whether every choice has told its end."""
        return len(self.finished) >= self.choices

    @property
    def prompt_ms(self) -> float | None:
        """Time the server spent on the prompt, milliseconds; of choices side by side the longest."""
        return max((prompt for prompt, _ in self._times.values() if prompt is not None), default=None)

    @property
    def predicted_ms(self) -> float | None:
        """Time the server spent generating, milliseconds; of choices side by side the longest."""
        return max((predicted for _, predicted in self._times.values() if predicted is not None), default=None)

    def known(self, index: Any) -> int:
        """Return the index of a choice, 0 where it is none that was asked for."""
        return index if type(index) is int and 0 <= index < self.choices else 0

    def add_chunk(self, chunk: Mapping[str, Any]) -> bool:
        """Take a chunk of a stream in; return whether it has a finish reason."""
        choices = chunk.get("choices")
        index: int | None = None
        finished = False
        for choice in choices if type(choices) is list else ():
            if type(choice) is not dict:
                continue
            number = self.known(choice.get("index"))
            index = number if index is None else index
            self.deltas += _has_token(choice)
            if choice.get("finish_reason"):
                finished = True
                if number not in self.finished:
                    self.finished.add(number)
                    self._unclosed.append(number)
        alone = index is None
        if index is None:
            # llama-server tells a choice's usage when it has finished, without its index
            index = self._unclosed[0] if self._unclosed else 0
        usage, timings = chunk.get("usage"), chunk.get("timings")
        if type(usage) is dict:
            self.add_usage(usage, index, alone=alone)
            if index in self._unclosed:
                self._unclosed.remove(index)
        if "prompt_progress" not in chunk:  # while it is told, the prompt is not yet processed
            self.add_timings(timings, index)
        return finished

    def add_usage(self, value: Any, index: int = 0, *, alone: bool = True) -> None:
        """Take a usage object in.

        :param index: the choice that it belongs to, or seems to close.
        :param alone: it is not told together with a choice's text, and may tell all choices at once.
        """
        counts = read_usage(value)
        if counts is not None:
            # of a single choice the very last one counts, wherever it stands
            (self._closing if alone or self.choices == 1 else self._riding)[index] = counts

    def add_timings(self, value: Any, index: int = 0) -> None:
        """Take a timings object of the choice ``index`` in."""
        counts = read_timings(value)
        if counts is not None:
            self._timings[index] = counts
            self._times[index] = _milliseconds(value.get("prompt_ms")), _milliseconds(value.get("predicted_ms"))

    def counts(self) -> tuple[Counts, str]:
        """Return what was told and the best source that told something (``counted`` if none did)."""
        usage, timings = self._usage(), self._sum(self._timings)
        source = "usage" if usage is not None else "timings" if timings is not None else "counted"
        prompt, cached, completion = usage or Counts(None, None, None)
        if timings is not None:
            prompt = _better(prompt, timings.prompt, self._prompts)
            cached = cached if cached is not None else timings.cached
            # llama-server's usage may tell the first choice only, its timings each one
            completion = _better(completion, timings.completion, self.choices)
        if completion is None and self.deltas:
            completion, source = self.deltas, "counted"
        return Counts(prompt, cached, completion), source

    def _usage(self) -> Counts | None:
        if len(self._closing) == 1:  # one for all choices, or there is but one
            return next(iter(self._closing.values()))
        if self._closing:
            return self._sum(self._closing)
        if len(self._riding) == 1 and self.complete:
            return next(iter(self._riding.values()))
        return self._sum(self._riding)

    def _sum(self, parts: Mapping[int, Counts]) -> Counts | None:
        """Add up one count per choice: the choices of a prompt share it, each prompt has its own."""
        if not parts:
            return None
        if self.choices == 1:
            return parts.get(0)
        each = max(1, self.choices // self._prompts)  # choices of each prompt
        prompts: dict[int, int] = {}
        cached: dict[int, int] = {}
        for index, part in parts.items():
            group = index // each
            if part.prompt is not None:
                prompts[group] = max(part.prompt, prompts.get(group, 0))
            if part.cached is not None:
                # the first choice processes the prompt, the others take over its work
                cached[group] = min(part.cached, cached.get(group, part.cached))
        completions = [part.completion for part in parts.values() if part.completion is not None]
        return Counts(
            sum(prompts.values()) if len(prompts) == self._prompts else None,  # a part of it is not the whole prompt
            sum(cached.values()) if cached else None,
            sum(completions) if completions else None,
        )


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether a choice of a chunk carries generated text: content, reasoning or a tool call."""
    delta = choice.get("delta")
    if type(delta) is dict:
        return any(delta.get(name) for name in _DELTA)
    return bool(choice.get("text"))


def _better(told: int | None, other: int | None, parts: int) -> int | None:
    """Return ``told``, or ``other`` where that tells more: of several parts the first source may have left some out."""
    if told is None or other is None:
        return other if told is None else told
    return max(told, other) if parts > 1 else told
