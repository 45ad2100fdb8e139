"""The way of one request, told from top to bottom: :meth:`Proxy.handle`.

authenticate, read and parse, resolve the model, admit, lease a server and send, relay the answer, settle. How a server
is found that answers is told in :mod:`smolproxy.daemon.sending`, how its answer is relayed in
:mod:`smolproxy.daemon.relay`.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from aiohttp import web

from smolproxy.config import Settings
from smolproxy.core import call as calls
from smolproxy.core import media
from smolproxy.core.call import Call
from smolproxy.core.caps import cap_fields
from smolproxy.core.endpoints import Endpoint
from smolproxy.core.limiter import Limiter, LimitReached
from smolproxy.core.limits import model_allowed
from smolproxy.daemon import auth, relay
from smolproxy.daemon.bodies import Bodies
from smolproxy.daemon.counting import PATIENCE
from smolproxy.daemon.directory import Directory
from smolproxy.daemon.exchange import Exchange
from smolproxy.daemon.health import Health
from smolproxy.daemon.ledger import Ledger
from smolproxy.daemon.public import model_not_found
from smolproxy.daemon.sending import LOOP_HEADER, RETRY_LATER, Sender
from smolproxy.daemon.servers import Server
from smolproxy.daemon.tasks import Tasks
from smolproxy.errors import ApiError
from smolproxy.store.keys import Key

_PRUNE = 300.0  # seconds
_OUTCOMES = {"server_timeout": "timeout", "server_error": "server_error"}


class Proxy:
    """Serves the endpoints that are forwarded.

    :param instance: a random name of this daemon.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Directory,
        ledger: Ledger,
        health: Health,
        tasks: Tasks,
        limiter: Limiter,
        instance: str,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.tasks = tasks
        self.stopping = False
        self.exchanges: dict[Any, Exchange] = {}  # by the connection that each came on
        self._leaving: set[Exchange] = set()  # their clients have gone, their rows are being made
        self._ledger = ledger
        ledger.company = self.exchanges.__len__
        self._limiter = limiter
        self._instance = instance
        self._sender = Sender(settings, health, instance)
        self._bodies = Bodies(settings.max_body_mib)

    async def handle(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """Serve one request for ``endpoint``.

        :raises ApiError: smolproxy does not serve it.
        """
        arrived = time.perf_counter()
        if request.headers.get(LOOP_HEADER) == self._instance:
            raise ApiError("loop_detected", "A server of smolproxy is smolproxy itself; its administrator can help.")
        key = await auth.user(request, self.directory)
        body = await self._bodies.read(request)
        call, fields = calls.parse(endpoint, body)
        request["model"] = call.model
        self._check_fields(key, call, fields)
        model, servers = self._resolve(call, key)
        exchange = self._admit(request, arrived, key, call, model)
        protocol = request.protocol
        self.exchanges[protocol] = exchange
        try:
            if request.transport is None or request.transport.is_closing():
                exchange.interrupt("client")
            put, drop = self._enforced(key, call, fields)
            outgoing = calls.outgoing(call, model, fields, put=put, drop=drop)
            del fields, body
            await self._sender.send(request, exchange, servers, outgoing)
            del outgoing
            return await relay.relay(self.settings, request, exchange)
        except ApiError as error:
            if error.code == "no_server_available":
                exchange.refuse()
            elif not exchange.settled:
                outcome = _OUTCOMES.get(error.code, "server_unreachable")
                if outcome == "timeout":  # the server has worked on it, if it was reached
                    await relay.settle_cut_short(exchange, error.status, outcome, PATIENCE)
                else:
                    await exchange.settle(error.status, outcome)
            raise
        except (asyncio.CancelledError, ConnectionError):
            # Failures of a server's connection have been turned into errors on the way: this one is the client's.
            if exchange.interrupted != "shutdown" or exchange.status:
                self._finish_cut_short(exchange)
                raise
            exchange.give_back()
            if not exchange.settled:
                await relay.settle_cut_short(exchange, 503, "timeout")
            raise ApiError("shutting_down", "smolproxy is shutting down.", headers=RETRY_LATER) from None
        finally:
            exchange.close()
            if self.exchanges.get(protocol) is exchange:
                del self.exchanges[protocol]

    async def prune(self) -> None:
        """Forget the counts of idle keys now and then, until cancelled."""
        while True:
            await asyncio.sleep(_PRUNE)
            self._limiter.prune(time.time())

    def client_gone(self, protocol: Any) -> None:
        """Take note that a client's connection is lost."""
        exchange = self.exchanges.get(protocol)
        if exchange is not None:
            exchange.interrupt("client")

    def _resolve(self, call: Call, key: Key) -> tuple[str, tuple[Server, ...]]:
        name = call.model or self.settings.default_model
        if not name:
            raise ApiError("invalid_request", "'model' is missing: name the model to use.", param="model")
        found = self.directory.resolve(name)
        if found is None or not model_allowed(key.limits, name, found[0]):
            known = (n for n, real, _ in self.directory.names() if model_allowed(key.limits, n, real))
            raise model_not_found(name, known)
        if not any(server.record.active for server in found[1]):
            raise ApiError(
                "no_server_available", f"All servers of the model '{name}' are disabled.", headers=RETRY_LATER
            )
        return found

    def _check_fields(self, key: Key, call: Call, fields: dict[str, Any]) -> None:
        """Refuse what a user must not ask of a server.

        :raises ApiError: 400 ``invalid_request``, 403 ``forbidden``.
        """
        if call.endpoint.generates and key.limits.max_tokens == 0:  # asked for no token, llama-server makes one
            raise ApiError("forbidden", "This key may not generate anything (max_tokens is 0).")
        if self.settings.slot_fields == "refuse":
            for name in calls.SLOT_FIELDS:
                if name in fields:
                    raise ApiError("invalid_request", f"'{name}' is not for users of a shared server.", param=name)
        found = media.forbidden_url(fields, allow_remote=self.settings.remote_media == "allow")
        if found is not None:
            raise ApiError(
                "invalid_request", f"A media URL that begins with '{found}' is not allowed here: send the data."
            )

    def _enforced(self, key: Key, call: Call, fields: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields that the key's limits and the settings put into the body, and those they take out."""
        put: dict[str, Any] = {}
        if key.limits.max_tokens is not None and call.endpoint.generates:
            put.update(cap_fields(key.limits.max_tokens, fields))
        drop = calls.SLOT_FIELDS if self.settings.slot_fields == "drop" else ()
        return put, tuple(name for name in drop if name in fields)

    def _admit(self, request: web.Request, arrived: float, key: Key, call: Call, model: str) -> Exchange:
        if self.stopping:
            raise ApiError("shutting_down", "smolproxy is shutting down.", headers=RETRY_LATER)
        if self._ledger.full:
            raise ApiError(
                "database_unavailable",
                "smolproxy cannot write its usage records and takes no more requests until it can.",
                headers={"Retry-After": "30"},
            )
        try:
            reservation = self._limiter.admit(key.id, key.limits, time.time(), estimate=call.estimate)
        except LimitReached as reached:
            headers = {"Retry-After": str(max(1, math.ceil(reached.retry_after)))}
            raise ApiError("rate_limit_exceeded", f"{reached}.", headers=headers) from None
        exchange = Exchange(request["id"], arrived, key, call, model, self._ledger, reservation)
        request["exchange"] = exchange
        return exchange

    def _finish_cut_short(self, exchange: Exchange) -> None:
        """Settle a request whose client has gone: the lease ends now, the row follows when the rest is counted."""
        exchange.give_back()
        if not exchange.settled:
            exchange.outcome = "client_disconnect"
            self._leaving.add(exchange)
            self.tasks.start(self._settle_leaving(exchange), f"settle {exchange.request_id}")

    async def _settle_leaving(self, exchange: Exchange) -> None:
        try:
            await relay.settle_cut_short(exchange, exchange.status or 499, exchange.outcome)
        finally:
            self._leaving.discard(exchange)

    def settle_all(self) -> None:
        """Settle all that is open with what is known of it, without asking or waiting: the daemon ends at once."""
        for exchange in (*self.exchanges.values(), *self._leaving):
            if not exchange.settled:
                relay.settle_at_once(exchange, exchange.status or 503, exchange.outcome or "timeout")
