"""What surrounds every request: its id, the error envelope, other spellings of a path, the access log."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog
from aiohttp import web

from smolproxy.daemon.bodies import too_large
from smolproxy.daemon.protocol import BROKEN_BODY, error_response, malformed
from smolproxy.errors import ApiError, SmolproxyError

log = structlog.get_logger("smolproxy")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SLASHES = re.compile(r"/{2,}")
# What aiohttp decodes, given the libraries; of the last two it says so itself if they are missing.
_ENCODINGS = ("", "identity", "gzip", "deflate", "br", "zstd")


def outermost(
    *, access_log: bool, max_body_mib: float, guard: Callable[[web.Request], Awaitable[None]] | None = None
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Make the one middleware: whatever happens inside, an answer with a request id comes out.

    :param guard: raises for whom the admin API does not open; ``None``: there is no admin API.
    """

    access = log.bind()  # looked up once: every request makes a line

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        request["id"] = os.urandom(12).hex()
        response: web.StreamResponse | None = None
        try:
            if request.match_info.http_exception is not None:
                if guard is not None and _SLASHES.sub("/", f"{request.path}/").startswith("/admin/"):
                    # whoever has no admin key learns nothing, not even which paths there are
                    await guard(request)
                handler = await _respell(request, handler)
            _check_encoding(request)
            response = await handler(request)
        except ApiError as error:
            request["code"] = error.code
            response = error_response(error)
        except SmolproxyError as error:
            response = error_response(ApiError(error.code, str(error)))
        except web.HTTPException as error:
            response = error_response(_of_aiohttp(error, max_body_mib))
        except BROKEN_BODY as error:
            response = error_response(malformed(error))
        except (asyncio.CancelledError, ConnectionError):
            raise  # the client has gone: there is nobody to answer
        except Exception:
            log.exception("internal error", request_id=request["id"], path=request.path)
            message = f"A fault of smolproxy; its administrator can find it under the request id {request['id']}."
            response = error_response(ApiError("internal_error", message))
        finally:
            if access_log:
                duration = round((time.perf_counter() - started) * 1000, 1)
                write = partial(_log_access, access, request, response, duration)
                exchange = request.get("exchange")
                if exchange is None or exchange.settled:
                    write()
                else:
                    exchange.log_when_settled = write
        if not response.prepared:
            response.headers["x-request-id"] = request["id"]
            response.headers["Server"] = "smolproxy"
        return response

    return middleware


def _check_encoding(request: web.Request) -> None:
    if request.headers.get("Content-Encoding", "").lower() not in _ENCODINGS:
        raise ApiError("unsupported_media_type", "The body's Content-Encoding is not supported.")


async def _respell(request: web.Request, handler: Handler) -> Handler:
    """Return the handler of the path without doubled and trailing slashes; ``handler``, if there is none."""
    raw = request.rel_url.raw_path
    path = _SLASHES.sub("/", raw)
    path = path.rstrip("/") or "/"
    if path == raw:
        return handler
    # A leading // would be read as a host: the path is put in, not parsed.
    spelled = request.clone(rel_url=request.rel_url.with_path(path, encoded=True))
    match = await request.app.router.resolve(spelled)
    if match.http_exception is not None and match.http_exception.status == 404:
        return handler
    match.add_app(request.app)
    request.match_info.clear()
    request.match_info.update(match)
    return match.handler


def _of_aiohttp(error: web.HTTPException, max_body_mib: float) -> ApiError:
    if error.status == 404:
        return ApiError("not_found", "There is nothing under this path.")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allow = ",".join(sorted(error.allowed_methods))
        return ApiError("method_not_allowed", f"{error.method} is not allowed here: {allow}.", headers={"Allow": allow})
    if error.status == 413:
        return too_large(max_body_mib)
    if 400 <= error.status < 500:
        return ApiError("invalid_request", error.text or error.reason)
    return ApiError("internal_error", error.reason)


def _log_access(access: Any, request: web.Request, response: web.StreamResponse | None, duration: float) -> None:
    status = response.status if response is not None else 499
    exchange = request.get("exchange")
    if exchange is None:
        key = request.get("key")
        access.info(
            "request",
            request_id=request["id"],
            method=request.method,
            path=request.path,
            status=status,
            ms=duration,
            key_id=None if key is None else key.id,
            model=request.get("model"),
            code=request.get("code"),
        )
        return
    usage = exchange.usage
    access.info(
        "request",
        request_id=exchange.request_id,
        method=request.method,
        path=request.path,
        status=exchange.status or status,
        ms=duration,
        key_id=exchange.key.id,
        model=exchange.model,
        server=None if exchange.server is None else exchange.server.record.name,
        outcome=exchange.outcome,
        prompt=usage.prompt,
        cached=usage.cached,
        completion=usage.completion,
    )
