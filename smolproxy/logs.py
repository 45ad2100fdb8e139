"""Logging: structlog set up once, console on a terminal, JSON lines elsewhere.

No key, prompt or answer is ever logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Set structlog up, and send the standard library's records of warnings the same way.

    :param level: ``debug``, ``info``, ``warning`` or ``error``.
    :param form: ``auto``, ``console`` or ``json``.
    :param stream: where to write; standard error by default.
    """
    out = sys.stderr if stream is None else stream
    number = _LEVELS[level]
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "console" or (form == "auto" and out.isatty()):
        processors.append(structlog.dev.ConsoleRenderer(colors=out.isatty()))
    else:
        processors += [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(separators=(",", ":"), default=repr),
        ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [_Handler()]
    root.setLevel(max(number, logging.WARNING))


class _Handler(logging.Handler):
    """Passes records of libraries (asyncio, aiohttp) on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = structlog.get_logger("smolproxy")
        method = logger.error if record.levelno >= logging.ERROR else logger.warning
        method(record.getMessage(), library=record.name, exc_info=record.exc_info or None)
