"""The few exceptions that a caller treats differently, and the error envelope that users see.

This module owns the table of error codes (SPEC: section 3). It knows nothing of aiohttp, SQLite or click.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

# code -> (HTTP status, OpenAI's error type)
CODES: dict[str, tuple[int, str]] = {
    "invalid_json": (400, "invalid_request_error"),
    "invalid_request": (400, "invalid_request_error"),
    "invalid_api_key": (401, "authentication_error"),
    "forbidden": (403, "permission_error"),
    "model_not_found": (404, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "conflict": (409, "invalid_request_error"),
    "body_too_large": (413, "invalid_request_error"),
    "unsupported_media_type": (415, "invalid_request_error"),
    "rate_limit_exceeded": (429, "rate_limit_error"),
    "internal_error": (500, "server_error"),
    "server_unreachable": (502, "server_error"),
    "server_error": (502, "server_error"),
    "no_server_available": (503, "server_error"),
    "shutting_down": (503, "server_error"),
    "database_unavailable": (503, "server_error"),
    "server_timeout": (504, "server_error"),
    "loop_detected": (508, "server_error"),
}


class SmolproxyError(Exception):
    """Something the user or administrator can put right; the message is in his words.

    The command line prints it as one line and exits with 1; the admin API answers it as an error envelope with
    the class's ``code``.
    """

    code = "invalid_request"


class Invalid(SmolproxyError):
    """A value that cannot be accepted (400)."""


class NotFound(SmolproxyError):
    """No such key, server, model or alias (404)."""

    code = "not_found"


class Conflict(SmolproxyError):
    """The name is taken (409)."""

    code = "conflict"


class DatabaseError(SmolproxyError):
    """The database file cannot be opened or used: no permission, no database, a newer schema."""

    code = "database_unavailable"


@dataclass(frozen=True)
class Problem:
    """One problem of a config file: where it is and what is wrong."""

    where: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.where}:{self.line}: {self.message}"


class ConfigError(SmolproxyError):
    """A config file with problems: all of them at once, in the order of their lines."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class ApiError(Exception):
    """An answer of smolproxy's own to a request it will not or cannot serve.

    :param code: a key of :data:`CODES`; gives the status and the type.
    :param message: for the user; never tells a server's URL.
    :param param: the field of the request that is meant, if one is.
    :param headers: further response headers, ``Retry-After`` for example.
    """

    def __init__(
        self, code: str, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def status(self) -> int:
        """HTTP status."""
        return CODES[self.code][0]

    def body(self) -> bytes:
        """The error envelope in OpenAI's shape, as JSON."""
        return envelope(self.code, self.message, self.param)


def envelope(code: str, message: str, param: str | None = None) -> bytes:
    """Return the error envelope in OpenAI's shape, as UTF-8 JSON without a newline."""
    error = {"message": message, "type": CODES[code][1], "code": code, "param": param}
    return json.dumps({"error": error}, separators=(",", ":")).encode()
