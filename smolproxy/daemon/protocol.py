"""The server's end of a client's connection: aiohttp's own, made to answer in smolproxy's shape and to tell its loss.

What is asked on a connection is not this module's business.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import http_exceptions, web

from smolproxy.errors import ApiError

log = structlog.get_logger("smolproxy")

BROKEN_BODY = (web.RequestPayloadError, http_exceptions.HttpProcessingError)
"""What reading a body raises that is not in its encoding or framing."""


class Protocol(web.RequestHandler):
    """One connection of a client.

    :param server: aiohttp's server object, which handles the requests.
    :param lost: called with this object when the connection is lost. aiohttp's own ways to tell differ: before 3.9 a
        handler is never cancelled, from then on on demand.
    """

    __slots__ = ("_lost",)

    def __init__(self, server: web.Server, lost: Callable[[Protocol], None]) -> None:
        # None is what aiohttp's own runner gives for no access log
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type]
        self._lost = lost

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by asyncio."""
        super().connection_lost(exc)
        self._lost(self)

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log a fault, unless it is a client's: called by aiohttp, also after a broken body has been answered."""
        if not isinstance(kwargs.get("exc_info"), BROKEN_BODY):
            super().log_exception(*args, **kwargs)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never reached a handler, or came out of it as an exception. Called by aiohttp.

        Its message is not passed on: it quotes the request, which may hold a key.
        """
        if isinstance(exc, ConnectionError):
            raise ConnectionError("nobody is left to answer")
        request_id = os.urandom(12).hex()
        if status == 400:
            error = malformed(exc)
            log.info("request", request_id=request_id, status=error.status, reason=type(exc).__name__)
        else:
            log.error("internal error", request_id=request_id, exc_info=exc)
            error = ApiError("internal_error", f"A fault of smolproxy, with the request id {request_id}.")
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun: what ends it is the end of the connection")
        response = error_response(error)
        response.headers.update({"x-request-id": request_id, "Server": "smolproxy"})
        response.force_close()
        return response


def malformed(exc: BaseException | None) -> ApiError:
    """Return the answer to what is not HTTP, or more of it than is accepted."""
    if isinstance(exc, http_exceptions.ContentEncodingError):
        return ApiError("unsupported_media_type", "The body is not in its Content-Encoding, or that is not supported.")
    if isinstance(exc, http_exceptions.LineTooLong):
        return ApiError("invalid_request", "The request line or a header is too long.")
    return ApiError("invalid_request", "The request is not valid HTTP.")


def error_response(error: ApiError) -> web.Response:
    """Return an error of smolproxy's own as an answer."""
    return web.Response(status=error.status, body=error.body(), content_type="application/json", headers=error.headers)
