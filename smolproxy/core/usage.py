"""Usage (prompt, cached, completion, source) and its readers, one per way in which a server tells it.

Counts are tokens. ``prompt`` is the whole prompt, its cached part included (SPEC: section 5). A number that a server
does not tell is ``None`` here, which is not the same as a zero that it tells.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _milliseconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and value >= 0 else None


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


@dataclass(slots=True)
class Tally:
    """Collects what an answer tells of its usage, and settles it by the order of the sources.

    :param prompts: how many prompts the request has.
    :param choices: how many choices it asked for, of all prompts together.
    """

    prompts: int = 1
    choices: int = 1
    usages: list[Counts] | None = None  # one for each usage object that closes a choice (or the answer)
    timings: dict[int, Counts] | None = None  # the last one of each choice, by its index
    deltas: int = 0  # pieces of generated text seen
    prompt_ms: float | None = None
    predicted_ms: float | None = None

    def add_usage(self, value: Any, *, running: bool = False) -> None:
        """Take a usage object in.

        :param running: it rides on a chunk with choices, so it is a total so far which a later one replaces.
        """
        counts = read_usage(value)
        if counts is None:
            return
        if self.usages is None:
            self.usages = [counts]
        elif running or self.choices == 1:
            # usage in every chunk is a running total: the last one counts, never a sum
            self.usages[-1] = counts
        else:
            self.usages.append(counts)

    def add_timings(self, value: Any, index: int = 0) -> None:
        """Take a timings object of the choice ``index`` in; a later one of the same choice replaces it."""
        counts = read_timings(value)
        if counts is None:
            return
        if self.timings is None:
            self.timings = {}
        self.timings[index] = counts
        self.prompt_ms = _milliseconds(value.get("prompt_ms"))
        self.predicted_ms = _milliseconds(value.get("predicted_ms"))

    def counts(self) -> tuple[Counts, str]:
        """Return what was told and the best source that told something (``counted`` if none did)."""
        usage, timings = self._usage(), self._timings()
        if usage is None and timings is None:
            return Counts(None, None, self.deltas or None), "counted"
        if usage is None:
            assert timings is not None
            return timings, "timings"
        if timings is None:
            return usage, "usage"
        completion = usage.completion if usage.completion is not None else timings.completion
        if self.choices > 1 and timings.completion is not None and completion is not None:
            # llama-server's usage may tell the first choice only, its timings each one
            completion = max(completion, timings.completion)
        prompt = usage.prompt if usage.prompt is not None else timings.prompt
        if self.prompts > 1 and timings.prompt is not None and prompt is not None:
            prompt = max(prompt, timings.prompt)
        return Counts(prompt, usage.cached if usage.cached is not None else timings.cached, completion), "usage"

    def _usage(self) -> Counts | None:
        if not self.usages:
            return None
        return self._sum(self.usages) if len(self.usages) > 1 else self.usages[0]

    def _timings(self) -> Counts | None:
        if not self.timings:
            return None
        return self._sum(list(self.timings.values()))

    def _sum(self, parts: list[Counts]) -> Counts:
        """Add up one count per choice: choices of one prompt have processed it once, several prompts each their own."""
        prompts = [part.prompt for part in parts if part.prompt is not None]
        cached = [part.cached for part in parts if part.cached is not None]
        completions = [part.completion for part in parts if part.completion is not None]
        if self.prompts > 1:
            share = max(1, len(parts) // self.prompts)  # choices of each prompt
            prompt = sum(prompts) // share if prompts else None
            hit = sum(cached) // share if cached else None
        else:
            prompt = max(prompts, default=None)
            # the first choice processes the prompt, the others take over its work
            hit = min(cached, default=None)
        return Counts(prompt, hit, sum(completions) if completions else None)
