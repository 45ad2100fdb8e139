"""Logging: structlog set up once, console on a terminal, JSON lines elsewhere.

No key, prompt or answer is ever logged.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, TextIO, cast

import structlog
from structlog.types import EventDict

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


# made once: json.dumps() with arguments of its own makes an encoder at every call
_encode = json.JSONEncoder(separators=(",", ":"), default=repr).encode


def _add_timestamp(_logger: Any, _method: str, event: EventDict) -> EventDict:
    event["timestamp"] = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return event


def _as_json(_logger: Any, _method: str, event: EventDict) -> str:
    return _encode(event)


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Set structlog up, and send the standard library's records of warnings the same way.

    :param level: ``debug``, ``info``, ``warning`` or ``error``.
    :param form: ``auto``, ``console`` or ``json``.
    :param stream: where to write; standard error by default.
    """
    out = sys.stderr if stream is None else stream
    number = _LEVELS[level]
    processors: list[Any] = [structlog.processors.add_log_level, _add_timestamp]
    if form == "console" or (form == "auto" and out.isatty()):
        processors.append(structlog.dev.ConsoleRenderer(colors=out.isatty()))
    else:
        processors += [structlog.processors.format_exc_info, _as_json]
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
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


class _Handler(logging.Handler):
    """Passes records of libraries (asyncio, aiohttp) on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = structlog.get_logger("smolproxy")
        method = logger.error if record.levelno >= logging.ERROR else logger.warning
        method(record.getMessage(), library=record.name, exc_info=record.exc_info or None)
