"""Times as people write them: ISO dates and times, and ages such as ``7d``. Pure: the clock is an argument."""

from __future__ import annotations

import re
from datetime import date, datetime, timedelta, timezone

from smolproxy.errors import Invalid

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE = re.compile(r"([0-9]{1,9})([smhdw])")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def parse(text: str, now_ms: int, *, end_of_day: bool = False) -> int:
    """Return a time as Unix time in milliseconds.

    :param text: an ISO date (``2026-05-31``), an ISO date and time (UTC, unless it names an offset) or an age
        (``90s``, ``30m``, ``24h``, ``7d``, ``2w``).
    :param now_ms: the present, Unix time in milliseconds.
    :param end_of_day: a date alone means the end of that day (UTC), not its start.
    :raises Invalid: if ``text`` is none of these.
    """
    text = text.strip()
    try:
        if match := _AGE.fullmatch(text):
            age = timedelta(**{_UNITS[match[2]]: int(match[1])})
            return _milliseconds(_EPOCH + timedelta(milliseconds=now_ms) - age)
        try:
            day = date.fromisoformat(text)
        except ValueError:
            # Python 3.10 does not know the Z.
            moment = datetime.fromisoformat(text[:-1] + "+00:00" if text[-1:] in ("Z", "z") else text)
            return _milliseconds(moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc))
        start = datetime(day.year, day.month, day.day, tzinfo=timezone.utc)
        return _milliseconds(start + timedelta(days=1) if end_of_day else start)
    except (ValueError, OverflowError) as error:
        raise Invalid(f"{text!r} is no time: write 2026-05-31, 2026-05-31T18:30 or an age such as 7d or 24h") from error


def short(milliseconds: int) -> str:
    """Return a Unix time in milliseconds for a table: UTC, to the second."""
    return (_EPOCH + timedelta(milliseconds=milliseconds)).strftime("%Y-%m-%d %H:%M:%S")


def _milliseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(milliseconds=1)
