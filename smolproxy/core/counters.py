"""The counts of one key: requests and tokens of the last minute, tokens of the calendar periods.

Nothing is refused here (see :mod:`smolproxy.core.limiter`). The times of the minute's counts never step back; the
caller sees to that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from smolproxy.core.periods import Period

MINUTE = 60.0
_TICKS = 4  # per second: tokens that settle within one tick share an entry, so that a busy key has 241 of them at most
_KEPT = 4  # totals kept per kind of period, for a clock that steps back


class RequestWindow:
    """The requests of the last minute, each with its exact time: one is gone when 60 s have passed since."""

    __slots__ = ("_times",)

    def __init__(self, times: Iterable[float] = ()) -> None:
        self._times = deque(times)

    def count(self, at: float) -> int:
        """Return how many there were in the minute before ``at``."""
        times = self._times
        while times and times[0] + MINUTE <= at:
            times.popleft()
        return len(times)

    def add(self, at: float) -> None:
        """Count a request."""
        self._times.append(at)

    def undo(self, at: float) -> None:
        """Take back a request that was counted at ``at``, if the minute still has it."""
        times = self._times
        if times and times[-1] == at:  # the usual case, and cheap
            times.pop()
        elif times and times[0] <= at:
            times.remove(at)

    def wait(self, limit: int, at: float) -> float:
        """Return the seconds until there are fewer than ``limit``, which is reached; a minute if that is 0."""
        return self._times[self.count(at) - limit] + MINUTE - at if limit else MINUTE

    def reset(self, at: float) -> float:
        """Return the seconds until all are gone."""
        return self._times[-1] + MINUTE - at if self.count(at) else 0.0


class TokenWindow:
    """The tokens of the last minute; they are gone 60 s after they settled, or up to a quarter second later."""

    __slots__ = ("_entries", "_total")

    def __init__(self) -> None:
        self._entries: deque[list[int]] = deque()  # [tick at which they are gone, tokens]
        self._total = 0

    def total(self, at: float) -> int:
        """Return how many there were in the minute before ``at``."""
        entries = self._entries
        while entries and entries[0][0] <= at * _TICKS:
            self._total -= entries.popleft()[1]
        return self._total

    def add(self, at: float, tokens: int) -> None:
        """Count tokens that settle at ``at``."""
        if not tokens:
            return
        gone = math.ceil((at + MINUTE) * _TICKS)
        if self._entries and self._entries[-1][0] >= gone:
            self._entries[-1][1] += tokens
        else:
            self.total(at)  # also bounds the memory where nobody asks for the total
            self._entries.append([gone, tokens])
        self._total += tokens

    def wait(self, room: int, at: float) -> float | None:
        """Return the seconds until there are fewer than ``room``; None if they never are, ``room`` being below 1."""
        left = self.total(at)
        if left < room:
            return 0.0
        for gone, tokens in self._entries:
            left -= tokens
            if left < room:
                return gone / _TICKS - at
        return None

    def reset(self, at: float) -> float:
        """Return the seconds until all are gone."""
        return self._entries[-1][0] / _TICKS - at if self.total(at) else 0.0


class Spending:
    """The tokens of the current day, week and month.

    Totals are kept by the beginning of their period, the last few of each kind. So a clock that steps back over a
    boundary finds the total of the earlier period again, and that of the later one when it gets there once more. In a
    period of which nothing is known, while a later one is known, that one's total goes on: no step is a new budget.
    """

    __slots__ = ("_pending", "_periods", "_totals")

    def __init__(self) -> None:
        self._periods: Mapping[str, Period] | None = None  # those that _pending belongs to
        self._pending = 0
        self._totals: dict[str, dict[int, int]] = {}  # kind of period -> its beginning -> tokens

    def add(self, periods: Mapping[str, Period], tokens: int) -> None:
        """Count tokens in the given periods, which are always those of one moment and one object for one day."""
        if periods is not self._periods:
            self._turn(periods)
        self._pending += tokens

    def total(self, periods: Mapping[str, Period], period: str) -> int:
        """Return the tokens of one of the periods."""
        if periods is not self._periods:
            self._turn(periods)
        return self._totals[period][periods[period].start] + self._pending

    def put(self, periods: Mapping[str, Period], period: str, start: int, tokens: int) -> None:
        """Replace the total of the period of that kind which begins at ``start``."""
        self._turn(periods)
        self._totals[period][start] = tokens

    def idle(self, periods: Mapping[str, Period]) -> bool:
        """Tell whether there is no total of these periods or later ones."""
        if self._pending and self._periods is not None:
            self._turn(self._periods)
        return not any(
            start >= periods[period].start and tokens
            for period, totals in self._totals.items()
            for start, tokens in totals.items()
        )

    def _turn(self, periods: Mapping[str, Period]) -> None:
        for period, bounds in (self._periods or {}).items():
            self._totals[period][bounds.start] += self._pending
        self._pending = 0
        self._periods = periods
        for period, bounds in periods.items():
            totals = self._totals.setdefault(period, {})
            if bounds.start not in totals:
                later = [start for start in totals if start > bounds.start]
                totals[bounds.start] = totals[min(later)] if later else 0
            while len(totals) > _KEPT:
                del totals[min(start for start in totals if start != bounds.start)]
