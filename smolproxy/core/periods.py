"""Calendar periods: where a day, a week or a month begins and ends in a time zone.

This module knows no keys and counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import NamedTuple

PERIODS = ("day", "week", "month")


class Period(NamedTuple):
    """One period: ``start <= now < end``, both in Unix seconds."""

    start: int
    end: int


def period_bounds(period: str, now: float, zone: tzinfo = timezone.utc) -> Period:
    """Return the period that contains a moment.

    Periods follow each other without gap or overlap, also where daylight saving time makes a day of 23 or 25 hours,
    skips midnight or has it twice.

    :param period: ``day``, ``week`` (from Monday) or ``month``.
    :param now: Unix time in seconds.
    :param zone: the time zone whose midnights count.
    :raises ValueError: for another period.
    """
    # Whole seconds: fromtimestamp() rounds, and just before midnight it would name the next day.
    today = datetime.fromtimestamp(math.floor(now), zone).date()
    if period == "day":
        first = today
        after = first + timedelta(days=1)
    elif period == "week":
        first = today - timedelta(days=today.weekday())
        after = first + timedelta(days=7)
    elif period == "month":
        first = today.replace(day=1)
        after = (first + timedelta(days=31)).replace(day=1)
    else:
        raise ValueError(f"not a period: {period!r}")
    return Period(_midnight(first, zone), _midnight(after, zone))


def _midnight(day: date, zone: tzinfo) -> int:
    # fold=0: of two midnights the first, of none the moment at which it was skipped.
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp())


class Calendar:
    """The periods around a moment, worked out once a day.

    :param zone: the time zone whose midnights count.
    """

    __slots__ = ("_end", "_periods", "_start", "zone")

    def __init__(self, zone: tzinfo = timezone.utc) -> None:
        self.zone = zone
        self._periods: Mapping[str, Period] = {}
        self._start = self._end = 0

    def at(self, now: float) -> Mapping[str, Period]:
        """Return period name -> the one that contains ``now`` (Unix seconds); the same object all day long."""
        if not self._start <= now < self._end:
            self._periods = {period: period_bounds(period, now, self.zone) for period in PERIODS}
            self._start, self._end = self._periods["day"]
        return self._periods
