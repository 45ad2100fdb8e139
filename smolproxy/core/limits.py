"""What a key may use: the limits of a key, their names, units and validation.

Counting is not done here (see :mod:`smolproxy.core.limiter`).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import date, datetime, timedelta, timezone
from fnmatch import fnmatchcase
from typing import Any

from smolproxy.core.periods import PERIODS
from smolproxy.errors import Invalid

DEFAULT_PERIOD = "month"  # of a budget whose period was never said
LARGEST = 2**53  # what every JSON reader can still tell from its neighbours

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LATEST_MS = 253_402_300_799_999  # the end of the year 9999
# One form for all Python versions: what fromisoformat() reads differs between 3.10 and 3.11.
_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[Tt ]([0-9]{2}:[0-9]{2})(:[0-9]{2})?(?:\.([0-9]{1,9}))?(?: ?([Zz]|[+-][0-9]{2}:[0-9]{2}))?)?"
)
_AGE = re.compile(r"([0-9]{1,9})([smhdw])")
_AGE_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one key; ``None`` means that there is none, 0 admits nothing.

    The field names are those of the admin API and of ``settings.key_defaults``.
    """

    rpm_limit: int | None = None  # requests per minute
    tpm_limit: int | None = None  # tokens per minute
    parallel_limit: int | None = None  # requests at once
    budget: int | None = None  # tokens per budget_period
    budget_period: str | None = None  # "day", "week" (from Monday) or "month"; None counts as DEFAULT_PERIOD
    models: tuple[str, ...] | None = None  # names or globs
    expires_at: int | None = None  # Unix time in milliseconds
    max_tokens: int | None = None  # cap on what one request may generate
    priority: int | None = None  # weight in the fair queue; larger = larger share


FIELDS = tuple(field.name for field in fields(Limits))


def parse_limits(changes: Mapping[str, object], *, now_ms: int) -> dict[str, Any]:
    """Check limits as a person gives them.

    :param changes: field -> value, by the names of :class:`Limits`; ``None`` clears. Numbers are whole (``10.0`` is
        not), from 0 up, ``priority`` from 1 up. ``models`` is an array of names and globs; an empty one admits no
        model. ``expires_at`` is a moment of the future, see :func:`parse_expiry`.
    :param now_ms: Unix time in milliseconds.
    :returns: the same fields with the values that :class:`Limits` holds.
    :raises Invalid: for the first field that is unknown or has a value it does not take; the message names it.
    """
    return {name: _parse(name, value, now_ms, ages=False) for name, value in changes.items()}


def limits_from_defaults(defaults: Mapping[str, object], now_ms: int) -> Limits:
    """Return the limits of a new key.

    :param defaults: ``settings.key_defaults``: as for :func:`parse_limits`; ``expires_at`` may be an age (``30d``).
    :param now_ms: Unix time in milliseconds, from which ages count.
    :raises Invalid: as :func:`parse_limits`.
    """
    return Limits(**{name: _parse(name, value, now_ms, ages=True) for name, value in defaults.items()})


def parse_expiry(value: object, *, now_ms: int, ages: bool = False) -> int:
    """Return the moment at which a key expires, in Unix milliseconds.

    :param value: ISO 8601 date or time, as text or (from YAML) as an object; a time without offset is UTC, a date
        its first moment. Numbers are refused: nobody could tell seconds from milliseconds.
    :param now_ms: Unix time in milliseconds.
    :param ages: also take an age from now: a whole number with ``s``, ``m``, ``h``, ``d`` or ``w``.
    :raises Invalid: if it is none of these, is not in the future, or is beyond the year 9999.
    """
    moment = None
    if ages and isinstance(value, str) and (age := _AGE.fullmatch(value)):
        moment = now_ms + int(age[1]) * _AGE_SECONDS[age[2]] * 1000
    elif isinstance(value, str):
        moment = _parse_time(value)
    elif isinstance(value, datetime):
        moment = _milliseconds(value)
    elif isinstance(value, date):
        moment = _milliseconds(datetime(value.year, value.month, value.day))
    if moment is None:
        also = ", or an age such as 30d" if ages else ""
        raise Invalid(
            f"expires_at takes an ISO 8601 date or time such as 2030-12-31 or 2030-12-31T18:00:00Z{also}, "
            f"not {_shown(value)}"
        )
    if moment <= now_ms:
        raise Invalid(f"expires_at takes a time in the future, not {_shown(value)}")
    if moment > _LATEST_MS:
        raise Invalid(f"expires_at takes a time before the year 10000, not {_shown(value)}")
    return moment


def limits_as_json(limits: Limits) -> dict[str, Any]:
    """Return every field for an answer: ``models`` as a list, ``expires_at`` as ISO 8601 in UTC, as it was given."""
    found: dict[str, Any] = {name: getattr(limits, name) for name in FIELDS}
    if limits.models is not None:
        found["models"] = list(limits.models)
    if limits.expires_at is not None:
        moment = _EPOCH + timedelta(milliseconds=limits.expires_at)
        precision = "milliseconds" if limits.expires_at % 1000 else "seconds"
        found["expires_at"] = moment.replace(tzinfo=None).isoformat(timespec=precision) + "Z"
    return found


def model_allowed(limits: Limits, asked: str, real: str) -> bool:
    """Tell whether a key may use a model.

    A name or glob of ``limits.models`` may match the name that was asked for or, if that is an alias, the model it
    stands for. So an admin may allow an alias alone, or a model under whatever name. Case counts.

    :param asked: the name in the request.
    :param real: the model's own name; equal to ``asked`` if that is no alias.
    """
    models = limits.models
    if models is None or asked in models or real in models:
        return True
    return any(fnmatchcase(asked, glob) or fnmatchcase(real, glob) for glob in models)


def unmatched_models(models: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the names and globs that match no known model or alias: worth a warning, a typing error perhaps."""
    names = list(known)
    return [glob for glob in models if not any(name == glob or fnmatchcase(name, glob) for name in names)]


def _parse(name: str, value: object, now_ms: int, *, ages: bool) -> Any:
    if name not in FIELDS:
        raise Invalid(f"no limit is called {_shown(name)}; there are {', '.join(FIELDS)}")
    if value is None:
        return None
    if name == "models":
        return _parse_models(value)
    if name == "expires_at":
        return parse_expiry(value, now_ms=now_ms, ages=ages)
    if name == "budget_period":
        if not isinstance(value, str) or value not in PERIODS:
            raise Invalid(f"budget_period takes {', '.join(PERIODS[:-1])} or {PERIODS[-1]}, not {_shown(value)}")
        return value
    least = 1 if name == "priority" else 0
    # bool is an int for Python, but not for whoever wrote `true`.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        raise Invalid(f"{name} takes a whole number from {least} to {LARGEST}, not {_shown(value)}")
    return value


def _parse_models(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise Invalid(f"models takes an array of model names or globs, not {_shown(value)}")
    for name in value:
        if not isinstance(name, str) or not name.strip() or not _storable(name):
            raise Invalid(f"models takes an array of model names or globs; {_shown(name)} is none")
    return tuple(dict.fromkeys(value))


def _storable(text: str) -> bool:
    # Half of a surrogate pair is valid in JSON, but cannot be written as UTF-8.
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _parse_time(text: str) -> int | None:
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    day, clock, seconds, fraction, zone = match.groups(default="")
    if fraction and not seconds:
        return None
    if zone in ("Z", "z", ""):
        zone = "+00:00"
    try:
        return _milliseconds(
            datetime.fromisoformat(f"{day}T{clock or '00:00'}{seconds or ':00'}.{fraction[:6]:0<6}{zone}")
        )
    except ValueError:  # the 31st of February, 25:00
        return None


def _milliseconds(moment: datetime) -> int:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _shown(value: object) -> str:
    # Bounded in length and depth: a number of 5000 digits or a list in a list in a list cannot even be printed.
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "a number of more than 30 digits"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    shown = str(value) if isinstance(value, date) else reprlib.repr(value)
    return shown if len(shown) <= 100 else shown[:97] + "..."
