"""Logging: structlog set up once, console on a terminal, JSON lines elsewhere.

No key, prompt or answer is ever logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, TextIO, cast

import structlog
from structlog.types import EventDict

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


# made once: json.dumps() with arguments of its own makes an encoder at every call
_encode = json.JSONEncoder(separators=(",", ":"), default=repr).encode


def _add_timestamp(_logger: Any, _method: str, event: EventDict) -> EventDict:
    event["timestamp"] = _timestamp()
    return event


def _as_json(_logger: Any, method: str, event: EventDict) -> str:
    """Render a line: all in one step, since every request makes one."""
    event["level"] = method
    event["timestamp"] = _timestamp()
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(_logger, method, event)
    return _encode(event)


def _timestamp() -> str:
    now = time.time_ns()
    return f"{_second(now // 1_000_000_000)}.{now // 1_000_000 % 1000:03d}Z"


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Set structlog up, and send the standard library's records of warnings the same way.

    :param level: ``debug``, ``info``, ``warning`` or ``error``.
    :param form: ``auto``, ``console`` or ``json``.
    :param stream: where to write; standard error by default.
    """
    out = sys.stderr if stream is None else stream
    number = _LEVELS[level]
    processors: list[Any] = [_as_json]
    if form == "console" or (form == "auto" and out.isatty()):
        renderer = structlog.dev.ConsoleRenderer(colors=out.isatty())
        processors = [structlog.processors.add_log_level, _add_timestamp, renderer]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Unfailing(out))),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [_Handler()]
    root.setLevel(max(number, logging.WARNING))


class _Unfailing:
    """A stream whose failures stop nobody: a full disk or a closed pipe must not fail a request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def flush(self) -> None:
        """Nothing is left to do."""


class _Handler(logging.Handler):
    """Passes records of libraries (asyncio, aiohttp) on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = structlog.get_logger("smolproxy")
        method = logger.error if record.levelno >= logging.ERROR else logger.warning
        method(record.getMessage(), library=record.name, exc_info=record.exc_info or None)
