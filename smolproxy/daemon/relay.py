"""A server's answer on its way to the client, and what it tells of its usage on the way into the books.

Nothing is re-serialised. A slow client slows its server; what is held back at the end of an answer waits for its
usage row.
"""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict

from smolproxy.config import Settings
from smolproxy.core.headers import to_client
from smolproxy.core.meter import PlainMeter, StreamMeter
from smolproxy.core.usage import Tally, Usage
from smolproxy.daemon import counting
from smolproxy.daemon.exchange import Exchange
from smolproxy.daemon.health import describe
from smolproxy.errors import ApiError, envelope

log = structlog.get_logger("smolproxy")

HOLD = 0.02
"""Seconds that the event with the finish reason waits for the one that completes it."""

_SMALL = 256 * 1024  # bytes up to which a plain answer is read before it is sent
_MEDIA = ("audio/", "image/", "video/", "application/octet-stream")


class _Fault(Exception):
    """The server's answer broke off; the message is for the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _outcome(fault: _Fault) -> str:
    return "timeout" if fault.code in ("server_timeout", "shutting_down") else "server_error"


async def relay(settings: Settings, request: web.Request, exchange: Exchange) -> web.StreamResponse:
    """Pass the server's answer on to the client and settle the request.

    :raises ApiError: the answer is none for a user, and nothing has been sent yet.
    """
    assert exchange.answer is not None
    if exchange.answer.content_type == "text/event-stream":
        return await _Stream(settings, request, exchange, exchange.answer).run()
    return await _plain(settings, request, exchange, exchange.answer)


async def _read(settings: Settings, exchange: Exchange, upstream: aiohttp.ClientResponse) -> bytes:
    """Return the next bytes of an answer, none at its end.

    :raises _Fault: it broke off, or was silent for too long.
    """
    timeout = settings.idle_timeout
    try:
        if not timeout:
            return await upstream.content.readany()
        data = await asyncio.wait_for(upstream.content.readany(), timeout)
    except asyncio.TimeoutError:
        raise _Fault("server_timeout", f"The server was silent for longer than idle_timeout ({timeout:g} s).") from None
    except (aiohttp.ClientError, OSError) as error:
        raise _Fault("server_error", f"The server broke off its answer: {describe(error)}.") from error
    exchange.check_interrupted()
    return data


def _headers(
    settings: Settings, exchange: Exchange, upstream: aiohttp.ClientResponse, *, stream: bool
) -> CIMultiDict[str]:
    headers = CIMultiDict(to_client(upstream.headers.items(), stream=stream))
    headers["x-request-id"] = exchange.request_id
    headers["Server"] = "smolproxy"
    if stream:
        headers["Cache-Control"] = "no-cache"
        headers["X-Accel-Buffering"] = "no"
    if settings.expose_server and exchange.server is not None:
        headers["x-smolproxy-server"] = exchange.server.record.name
    return headers


async def settle_cut_short(
    exchange: Exchange, status: int, outcome: str, patience: float = counting.PATIENCE_AFTERWARDS
) -> None:
    """Settle a request that did not come to its end, with what the server had done until then.

    :param patience: seconds that finding that out may take.
    """
    usage = Usage()
    exchange.give_back()
    if exchange.server is not None and exchange.sent:
        tally = exchange.tally() if exchange.tally is not None else Tally()
        usage = await counting.settle_cut_short(exchange.server, exchange.call, exchange.model, tally, patience)
    if not exchange.settled:
        await exchange.settle(status, outcome, usage)
    exchange.log_late()


def settle_at_once(exchange: Exchange, status: int, outcome: str) -> None:
    """Settle a request with what its answer has told so far, and nothing more."""
    tally = exchange.tally() if exchange.tally is not None else Tally()
    (prompt, cached, completion), _ = tally.counts()
    source = "counted" if exchange.sent else "none"
    exchange.settle(
        status,
        outcome,
        Usage(prompt or 0, cached or 0, completion or 0, source, tally.prompt_ms, tally.predicted_ms),
    )


class _Stream:
    """Relays one event stream."""

    def __init__(
        self, settings: Settings, request: web.Request, exchange: Exchange, upstream: aiohttp.ClientResponse
    ) -> None:
        self.settings = settings
        self.request = request
        self.exchange = exchange
        self.upstream = upstream
        self.meter = StreamMeter(exchange.call)
        exchange.tally = self.meter.settle
        self.response = web.StreamResponse(
            status=upstream.status, headers=_headers(settings, exchange, upstream, stream=True)
        )

    async def run(self) -> web.StreamResponse:
        """Relay until the end, whichever it is."""
        response, meter, exchange = self.response, self.meter, self.exchange
        exchange.status = self.upstream.status
        await response.prepare(self.request)
        try:
            while data := await self._next():
                out = meter.feed(data)
                if meter.started and exchange.first_token is None:
                    exchange.first_token = time.perf_counter()
                if out:
                    await response.write(out)
                if meter.done and not exchange.settled:
                    await self._settle("server_error" if meter.error else "ok")
                    await response.write(meter.tail)
            if not exchange.settled:
                await self._end()
        except _Fault as fault:
            if not exchange.settled:
                await self._fault(fault)
        except asyncio.CancelledError:
            if exchange.interrupted != "shutdown" or exchange.settled:
                raise
            await self._fault(_Fault("shutting_down", "smolproxy is shutting down."))
        await response.write_eof()
        return response

    async def _next(self) -> bytes:
        reading = _read(self.settings, self.exchange, self.upstream)
        if not self.meter.held:
            return await reading
        try:
            data = await asyncio.wait_for(reading, HOLD)
        except asyncio.TimeoutError:
            await self.response.write(self.meter.release())
            return await _read(self.settings, self.exchange, self.upstream)
        self.exchange.check_interrupted()
        return data

    async def _end(self) -> None:
        """The server has ended its answer without saying ``[DONE]``."""
        meter = self.meter
        held, broken = (b"", b"") if meter.complete else self._open()
        rest = held + meter.close()
        if meter.done:
            rest += meter.tail
        if not meter.complete and not meter.error and self.exchange.call.endpoint.generates:
            fault = _Fault("server_error", "The server ended its answer before it was finished.")
            await self._fault(fault, held + broken)
            return
        await self._settle("server_error" if meter.error else "ok")
        if rest:
            await self.response.write(rest)

    async def _settle(self, outcome: str) -> None:
        exchange, tally = self.exchange, self.meter.settle()
        counts, source = tally.counts()
        if counts.prompt is None or not self.meter.complete:
            exchange.give_back()
            assert exchange.server is not None
            usage = await counting.settle_cut_short(
                exchange.server, exchange.call, exchange.model, tally, counting.PATIENCE
            )
        else:
            usage = Usage(
                counts.prompt, counts.cached or 0, counts.completion or 0, source, tally.prompt_ms, tally.predicted_ms
            )
        await exchange.settle(self.upstream.status, outcome, usage)

    def _open(self) -> tuple[bytes, bytes]:
        """Return the event that is held back, and what ends an event of which only a part has gone out."""
        return self.meter.release(), b"\n\n" if self.meter.broken_event else b""

    async def _fault(self, fault: _Fault, before: bytes | None = None) -> None:
        """Tell the client in the stream that it ends here, and why.

        :param before: what goes out before that; left out, what is open is ended. An event that is not complete and
            of which nothing has gone out is none for a client.
        """
        log.warning("stream broke off", request_id=self.exchange.request_id, reason=str(fault))
        self.upstream.close()
        self.response.force_close()
        before = b"".join(self._open()) if before is None else before
        await self.response.write(b"%sdata: %s\n\n" % (before, envelope(fault.code, str(fault))))
        await self._settle(_outcome(fault))


async def _plain(
    settings: Settings, request: web.Request, exchange: Exchange, upstream: aiohttp.ClientResponse
) -> web.StreamResponse:
    """Relay an answer that is not a stream."""
    meter = PlainMeter(exchange.call)
    exchange.tally = lambda: meter.settle()[0]
    try:
        body = exchange.peeked or await _read(settings, exchange, upstream)
        while not upstream.content.at_eof() and len(body) <= _SMALL:
            body += await _read(settings, exchange, upstream)
    except _Fault as fault:
        error = ApiError(fault.code, str(fault))
        upstream.close()
        await settle_cut_short(exchange, error.status, _outcome(fault), counting.PATIENCE)
        raise error from fault
    _check_form(upstream, body)
    headers = _headers(settings, exchange, upstream, stream=False)
    meter.feed(body)
    if upstream.content.at_eof():
        await _settle_plain(exchange, upstream, meter)
        return web.Response(status=upstream.status, headers=headers, body=body)

    response = web.StreamResponse(status=upstream.status, headers=headers)
    if upstream.content_length is not None and "Content-Encoding" not in upstream.headers:
        response.content_length = upstream.content_length
    exchange.status = upstream.status
    await response.prepare(request)
    held = body  # the last piece is held back until the row is written
    try:
        while data := await _read(settings, exchange, upstream):
            await response.write(held)
            meter.feed(data)
            held = data
    except _Fault as fault:
        log.warning("answer broke off", request_id=exchange.request_id, reason=str(fault))
        upstream.close()
        await settle_cut_short(exchange, upstream.status, _outcome(fault), counting.PATIENCE)
        # there is no place for an error in the middle of an answer: the connection breaks off as the server's did
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError("the server broke off its answer") from fault
    await _settle_plain(exchange, upstream, meter)
    await response.write(held)
    await response.write_eof()
    return response


async def _settle_plain(exchange: Exchange, upstream: aiohttp.ClientResponse, meter: PlainMeter) -> None:
    if not 200 <= upstream.status < 300:
        await exchange.settle(upstream.status, "server_error")
        return
    exchange.end_lease()
    assert exchange.server is not None
    tally, answer = meter.settle()
    usage = await counting.settle_plain(exchange.server, exchange.call, exchange.model, tally, answer)
    await exchange.settle(upstream.status, "ok", usage)


def _check_form(upstream: aiohttp.ClientResponse, body: bytes) -> None:
    """Refuse what is neither JSON nor media: an HTML page, an empty 200.

    :raises ApiError: 502 ``server_error``.
    """
    kind = upstream.content_type
    if body and (kind.endswith("json") or kind.startswith(_MEDIA)):
        return
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        what = f"something that is not JSON ({kind})" if body else "nothing"
        raise ApiError("server_error", f"The model's server answered {upstream.status} with {what}.") from None
