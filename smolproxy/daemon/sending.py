"""Sending a request until a server answers: leases, attempts, and what each failure means.

Another server, or the same again, is tried only when the request cannot have run: no connection came about, one used
before was found dead, the server refused smolproxy's key or is loading its model.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict

from smolproxy.config import Settings
from smolproxy.core import headers, selection
from smolproxy.daemon.exchange import Exchange
from smolproxy.daemon.health import Health, describe, is_loading
from smolproxy.daemon.servers import SendError, Server
from smolproxy.errors import ApiError

log = structlog.get_logger("smolproxy")

LOOP_HEADER = "x-smolproxy-via"
"""Carries the instance that a request went through, so that a server that is smolproxy itself is noticed."""

RETRY_LATER = {"Retry-After": "5"}
"""What a client is told that comes when no server can answer."""


_LOOK_AGAIN = 2.0  # seconds after which a server that loads is tried again, if no probe has found it up before


class Sender:
    """Sends requests to servers.

    :param instance: a random name of this daemon.
    """

    def __init__(self, settings: Settings, health: Health, instance: str) -> None:
        self._settings = settings
        self._health = health
        self._instance = instance
        self._turn = 0

    async def send(self, request: web.Request, exchange: Exchange, servers: Sequence[Server], body: bytes) -> None:
        """Send to one of ``servers`` after the other until one answers: ``exchange.answer`` is its answer then.

        :raises ApiError: no server answered.
        """
        tried: list[Server] = []
        fresh = False
        deadline: float | None = None
        loading: ApiError | None = None
        self._turn += 1
        while True:
            server = selection.choose(servers, self._turn, tried)
            if server is None:  # disabled meanwhile
                raise ApiError("no_server_available", "All servers of the model are disabled.", headers=RETRY_LATER)
            exchange.lease(server)
            try:
                exchange.answer = await self._post(request, exchange, server, body, fresh=fresh)
                error = await self._refusal(exchange, server, exchange.answer)
                if error is None:
                    self._health.answered(server)
                    return
                if error.code == "no_server_available":
                    loading = error
                exchange.not_sent()
            except SendError as failure:
                if failure.stale:
                    exchange.end_lease()
                    fresh = True
                    continue
                error = self._unreachable(server, failure)
                if not failure.refused:
                    raise error from failure
                exchange.not_sent()
            log.warning(
                "not answered", request_id=exchange.request_id, server=server.record.name, reason=server.last_error
            )
            tried.append(server)
            fresh = False
            if selection.choose(servers, self._turn, tried) is not None:
                continue
            if loading is None:
                raise error
            # no server of the model can answer, but one will when it has loaded
            now = time.monotonic()
            deadline = deadline or now + self._settings.loading_timeout
            if now >= deadline:
                raise loading
            with suppress(asyncio.TimeoutError):
                await self._health.wait_until_up(min(_LOOK_AGAIN, deadline - now))
            loading = None
            tried.clear()

    async def _post(
        self, request: web.Request, exchange: Exchange, server: Server, body: bytes, *, fresh: bool
    ) -> aiohttp.ClientResponse:
        sent = CIMultiDict(headers.to_server(request.headers.items()))
        sent["Content-Type"] = "application/json"
        sent["x-request-id"] = exchange.request_id
        sent[LOOP_HEADER] = self._instance
        if server.authorization is not None:
            sent["Authorization"] = server.authorization
        url = server.url(exchange.call.endpoint.path, request.rel_url.raw_query_string)
        # llama-server closes the connection after a streamed answer, although it promises to keep it
        return await server.post(url, body, sent, fresh=fresh, last=exchange.call.stream)

    def _unreachable(self, server: Server, failure: SendError) -> ApiError:
        """Note what a failure teaches of the server; return what the client is told."""
        if failure.refused:
            self._health.note(server, "down", describe(failure.cause))
        else:
            server.last_error = describe(failure.cause)
        if failure.timed_out_waiting:
            timeout = self._settings.first_byte_timeout
            message = f"The server did not begin its answer within first_byte_timeout ({timeout:g} s)."
            return ApiError("server_timeout", message)
        if failure.timed_out_connecting:
            timeout = self._settings.connect_timeout
            return ApiError("server_timeout", f"The server was not reached within connect_timeout ({timeout:g} s).")
        if failure.refused:
            return ApiError("server_unreachable", "The model's server cannot be reached.")
        if isinstance(failure.cause, aiohttp.ClientResponseError):
            return ApiError("server_error", "The model's server answered something that is not HTTP.")
        return ApiError("server_unreachable", "The model's server closed the connection without an answer.")

    async def _refusal(self, exchange: Exchange, server: Server, answer: aiohttp.ClientResponse) -> ApiError | None:
        """Return why an answer is none for a user, and the request may go to another server; ``None`` if it is one."""
        if answer.status in (401, 403):
            self._health.note(server, "wrong_key", f"answered {answer.status} to smolproxy's key")
            return ApiError("server_error", "The model's server refused smolproxy's own key.")
        if answer.status == 503 and answer.content_type == "application/json":
            exchange.peeked = await _peek(answer)
            if is_loading(503, _json_or_none(exchange.peeked)):
                exchange.peeked = b""
                self._health.note(server, "loading", "loading its model")
                message = "The model is still being loaded; try again in a moment."
                return ApiError("no_server_available", message, headers=RETRY_LATER)
        return None


async def _peek(answer: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of a body, all of it if it is short; it has to be put before what is read later."""
    data = b""
    try:
        while not answer.content.at_eof() and len(data) < 4096:
            data += await answer.content.readany()
    except (aiohttp.ClientError, OSError):
        pass  # whoever reads on will find out
    return data


def _json_or_none(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
