"""Every option of the daemon: its name, default, unit, documentation and check, in one place.

The example config, the documentation and the validation are all made from :class:`Settings`. This module reads no file.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from datetime import date
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

# Takes a value as YAML gave it, returns it as the daemon wants it; raises ValueError("must be ...").
Check = Callable[[object], Any]

# Larger values are mistakes, and overflow timers and SQLite's integers.
LARGEST = 10**9
_LARGEST_TOKENS = 2**53  # what every JSON reader can still tell from its neighbours

# Control characters, lone surrogates, line and paragraph separators.
_NOT_ON_ONE_LINE = frozenset({"Cc", "Cs", "Zl", "Zp"})


def whole(low: int = 0, high: int = LARGEST) -> Check:
    """Return a check for a whole number from ``low`` to ``high``."""

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return check


def number(value: object) -> float:
    """Check for a number of seconds or a ratio: not negative, fractions allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number")  # noqa: TRY004 - a check has one exception
    if not 0 <= value <= LARGEST:  # nor infinite, nor not a number
        raise ValueError(f"must be a number from 0 to {LARGEST}")
    return value


def flag(value: object) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - a check has one exception
    return value


def text(value: object, longest: int = 300) -> str:
    """Check for a text of one line that is not empty: the rule for names of all kinds."""
    if not isinstance(value, str):
        raise ValueError("must be text (write it in quotes)")  # noqa: TRY004 - a check has one exception
    if not value.strip():
        raise ValueError("must not be empty")
    if len(value) > longest:
        raise ValueError(f"must have at most {longest} characters")
    if any(unicodedata.category(char) in _NOT_ON_ONE_LINE for char in value):
        raise ValueError("must not hold control characters")
    return value


def texts(value: object) -> tuple[str, ...]:
    """Check for a list of texts."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list")  # noqa: TRY004 - a check has one exception
    return tuple(map(text, value))


def choice(*allowed: str) -> Check:
    """Return a check for one of the given words."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value

    return check


def optional(check: Check) -> Check:
    """Return a check that also takes nothing (null or an empty text) and makes it None."""
    return lambda value: None if value is None or value == "" else check(value)


def timezone(value: object) -> str:
    """Check for a time zone of the tz database."""
    name = text(value)
    if name == "UTC":  # known everywhere, even where no tz database is installed
        return name
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError('must be a time zone such as "UTC" or "Europe/Berlin"') from error
    return name


def origins(value: object) -> tuple[str, ...]:
    """Check for a list of browser origins."""
    found = texts(value)
    for origin in found:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
            raise ValueError('must be a list of origins such as "https://chat.example.org" (no path), or "*"')
    return found


def expiry(value: object) -> str | date:
    """Check for an expiry: a date or time, as YAML gives it or as text, or an age."""
    return value if isinstance(value, date) else text(value)


# The limits that a new key can be given, by the names of the admin API.
KEY_DEFAULTS: Mapping[str, Check] = MappingProxyType(
    {
        "rpm_limit": optional(whole()),
        "tpm_limit": optional(whole(high=_LARGEST_TOKENS)),
        "parallel_limit": optional(whole()),
        "budget": optional(whole(high=_LARGEST_TOKENS)),
        "budget_period": optional(choice("day", "week", "month")),
        "models": lambda value: None if value is None else texts(value),
        "expires_at": optional(expiry),
        "max_tokens": optional(whole()),
        "priority": optional(whole(low=1)),
    }
)


def key_defaults(value: object) -> dict[str, Any]:
    """Check for a mapping of limits."""
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping of limits")  # noqa: TRY004 - a check has one exception
    found: dict[str, Any] = {}
    for name, limit in value.items():
        if name not in KEY_DEFAULTS:
            raise ValueError(f"must have no other names than {', '.join(KEY_DEFAULTS)}")
        try:
            found[name] = KEY_DEFAULTS[name](limit)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
    return found


def _option(default: Any, check: Check, doc: str, unit: str = "") -> Any:
    metadata = {"doc": doc, "unit": unit, "check": check}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """The options of the daemon, ``settings`` in ``config.yaml``.

    Each field's metadata has ``doc`` (one sentence), ``unit`` (empty if it has none) and ``check``.
    """

    max_body_mib: int = _option(64, whole(high=10**6), "The largest request body; 0 is unlimited.", "MiB")
    connect_timeout: float = _option(5, number, "How long connecting to a server may take; 0 is unlimited.", "seconds")
    first_byte_timeout: float = _option(
        0, number, "How long a server may take until its answer begins; 0 is unlimited.", "seconds"
    )
    idle_timeout: float = _option(
        0, number, "How long a server may be silent within an answer; 0 is unlimited.", "seconds"
    )
    drain_timeout: float = _option(
        30, number, "What open requests get to finish after SIGTERM; 0 ends them at once.", "seconds"
    )
    models_require_key: bool = _option(False, flag, "Whether /v1/models needs a key.")
    retention_days: int = _option(
        0, whole(high=10**6), "Usage rows older than this are purged, totals stay; 0 keeps every row.", "days"
    )
    log_level: str = _option(
        "info", choice("debug", "info", "warning", "error"), "What is logged: debug, info, warning or error."
    )
    log_format: str = _option(
        "auto",
        choice("auto", "console", "json"),
        "How it is logged: console, json, or auto for console on a terminal and JSON lines elsewhere.",
    )
    access_log: bool = _option(True, flag, "Whether each request is logged.")
    queue_limit: int = _option(
        1000, whole(), "How many requests may wait for a slot, per model; 0 lets none wait.", "requests"
    )
    queue_timeout: float = _option(600, number, "How long a request may wait for a slot; 0 is unlimited.", "seconds")
    heartbeat: float = _option(
        10, number, "Time between SSE comments to a stream that waits for its turn; 0 sends none.", "seconds"
    )
    loading_timeout: float = _option(
        60, number, "How long a request waits while all servers of its model load; 0 does not wait.", "seconds"
    )
    probe_interval: float = _option(5, number, "Time between health checks of a server; 0 makes none.", "seconds")
    probe_timeout: float = _option(2, number, "How long a health check may take; 0 is unlimited.", "seconds")
    affinity: bool = _option(True, flag, "Whether a conversation stays on its server, for its prompt cache.")
    affinity_slack: int = _option(
        2, whole(), "How many requests more than the idlest its server may have and still keep it.", "requests"
    )
    affinity_ratio: float = _option(
        1.5, number, "How many times as many requests as the idlest its server may have and still keep it."
    )
    expose_server: bool = _option(False, flag, "Whether answers tell the server's name in x-smolproxy-server.")
    default_model: str | None = _option(None, optional(text), "The model of requests that name none.")
    slot_fields: str = _option(
        "refuse",
        choice("refuse", "drop", "allow"),
        "What is done with id_slot and lora in a user's body: refuse (400), drop or allow.",
    )
    remote_media: str = _option(
        "refuse",
        choice("refuse", "allow"),
        "What is done with http(s) media URLs, which the server would fetch from inside the network: "
        "refuse (400) or allow; file: is always refused.",
    )
    cors_origins: tuple[str, ...] = _option((), origins, 'Origins that browsers may call from; "*" for any.')
    timezone: str = _option("UTC", timezone, "The time zone of calendar budgets.")
    key_defaults: Mapping[str, Any] = _option(
        {}, key_defaults, f"Limits of new keys, any of {', '.join(KEY_DEFAULTS)}."
    )


def options() -> Mapping[str, Field[Any]]:
    """Return the fields of :class:`Settings` by name, in order."""
    return {option.name: option for option in fields(Settings)}
