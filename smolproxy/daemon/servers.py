"""A server as the daemon sees it: its ClientSession pool, what is in flight, its state.

Nothing here decides where a request goes or what an answer means.
"""

from __future__ import annotations

import asyncio
import select
import sys
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from smolproxy.config import Settings
from smolproxy.store import servers as store

# llama-server closes a connection that was idle for 5 s: let go of it before it does.
KEEP_ALIVE = 4.0

VANISHED_MODELS_STAY = 600.0
"""Seconds for which a model that a server no longer lists is still sent there."""

# A larger body is sent in pieces of this size: given at once, all of it would be copied into the connection's buffer.
_AT_ONCE = 256 * 1024  # bytes

_FOUND_DEAD = 1.0  # seconds within which a dead connection shows


class FirstByteTimeout(asyncio.TimeoutError):
    """A server that was reached did not begin its answer in time."""


class _Attempt:
    """One request on its way: is its connection a fresh one, and how long may its answer take to begin.

    :param patience: seconds from the moment when there is a connection; 0 for any.
    :param last: the connection is not used again.
    """

    def __init__(self, patience: float, *, last: bool) -> None:
        self.fresh = False
        self.last = last
        self.expired = False
        self.started = time.monotonic()
        self._patience = patience
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """There is a connection."""
        if self._patience:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._expire, asyncio.current_task())

    def stop(self) -> None:
        """The answer has begun, or the connection is not there yet."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, task: asyncio.Task[Any] | None) -> None:
        self.expired = True
        if task is not None:
            task.cancel()


_attempt: ContextVar[_Attempt | None] = ContextVar("attempt", default=None)


class _Connector(aiohttp.TCPConnector):
    """Tells the attempt whether its connection was made for it, and sees to it that no answer meets another request."""

    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        attempt = _attempt.get()
        connection = await super().connect(*args, **kwargs)
        if attempt is None:
            return connection
        while not attempt.fresh and _spoilt(connection):
            # the server has closed it, or said more than it was asked: whose answer would that be?
            connection.close()
            connection = await super().connect(*args, **kwargs)
        if attempt.last and connection.protocol is not None:
            connection.protocol.force_close()
        return connection

    async def _create_connection(self, *args: Any, **kwargs: Any) -> Any:
        # Runs in the task of the request, inside connect(), in all supported versions of aiohttp.
        attempt = _attempt.get()
        if attempt is None:
            return await super()._create_connection(*args, **kwargs)
        attempt.fresh = True
        attempt.stop()
        connection = await super()._create_connection(*args, **kwargs)
        attempt.wait()
        return connection


def _spoilt(connection: aiohttp.connector.Connection) -> bool:
    """Whether something was or is to be read on an idle connection, its end included."""
    transport, protocol = connection.transport, connection.protocol
    if transport is None or protocol is None or protocol.should_close:
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


class Server:
    """One llama-server: its record, its connections and what is known of its state.

    :param record: as stored.
    :param settings: timeouts.
    """

    def __init__(self, record: store.Server, settings: Settings) -> None:
        self.record = record
        self.in_flight = 0
        self.last_error: str | None = None
        self.ask_again = False  # for models and slots, since it has come back
        self.since = time.time()
        self.discovered: dict[str, float] = {}  # model -> when it was last listed (monotonic)
        self._told_slots: int | None = None
        self._state = "unknown"
        self._base = URL(record.url)
        self._urls: dict[str, URL] = {}
        self.authorization = f"Bearer {record.api_key}" if record.api_key else None
        self._first_byte_timeout = settings.first_byte_timeout
        self._timeout = aiohttp.ClientTimeout(total=None, connect=settings.connect_timeout or None)
        self._session = self._make_session(_Connector(limit=0, keepalive_timeout=KEEP_ALIVE))
        self._fresh_session: aiohttp.ClientSession | None = None  # made when it is needed, which is rarely

    def _make_session(self, connector: _Connector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    def __repr__(self) -> str:
        return f"<Server {self.record.name}>"

    @property
    def state(self) -> str:
        """State for selection and ``GET /admin/servers``."""
        if not self.record.active:
            return "disabled"
        if self._state == "up" and self.slots is not None and self.in_flight >= self.slots:
            return "busy"
        return self._state

    @property
    def slots(self) -> int | None:
        """Parallel sequences: as set by the administrator, else as the server told."""
        return self.record.slots or self._told_slots

    @property
    def models(self) -> tuple[str, ...]:
        """The models it serves: as listed by the administrator, else as the server told."""
        return self.record.models if self.record.listed else tuple(self.discovered)

    def set_state(self, state: str, error: str | None = None) -> bool:
        """Note a state and the error that led to it; returns whether it is another than before."""
        self.last_error = error or (None if state == "up" else self.last_error)
        if state == self._state:
            return False
        self._state = state
        self.since = time.time()
        return True

    def succeed(self, former: Server) -> None:
        """Go on with what a former pool of the same server knew, until it is asked anew."""
        self.discovered = dict(former.discovered)
        self._told_slots = former._told_slots

    def learn(self, models: list[str] | None, slots: int | None) -> bool:
        """Note what the server told of itself; returns whether its models are others than before."""
        before = self.models
        if slots is not None:
            self._told_slots = slots
        if models is not None:
            now = time.monotonic()
            kept = {name: seen for name, seen in self.discovered.items() if now - seen < VANISHED_MODELS_STAY}
            self.discovered = {**kept, **dict.fromkeys(models, now)}
        return before != self.models

    def url(self, path: str, query: str = "") -> URL:
        """Return the URL of a path at this server (cached, since parsing one is dear)."""
        key = f"{path}?{query}" if query else path
        url = self._urls.get(key)
        if url is None:
            url = URL(f"{str(self._base).rstrip('/')}{key}", encoded=True)
            if not query:
                self._urls[key] = url
        return url

    def update(self, record: store.Server) -> bool:
        """Take over a changed record; returns ``False`` if it needs another pool (URL or key are others)."""
        if (record.url, record.api_key) != (self.record.url, self.record.api_key):
            return False
        self.record = record
        return True

    async def post(
        self, url: URL, body: bytes, headers: Any, *, fresh: bool = False, last: bool = False
    ) -> aiohttp.ClientResponse:
        """Send a request; returns the answer when its head is there.

        :param fresh: on a connection that nothing was sent on before.
        :param last: the connection is not to be used again.
        :raises SendError: no answer; tells whether the connection was a fresh one.
        """
        session = self._session
        if fresh:
            if self._fresh_session is None:
                self._fresh_session = self._make_session(_Connector(limit=0, force_close=True))
            session = self._fresh_session
        attempt = _Attempt(self._first_byte_timeout, last=last)
        _attempt.set(attempt)
        attempt.wait()
        try:
            if len(body) > _AT_ONCE:
                sized = CIMultiDict(headers)
                sized["Content-Length"] = str(len(body))
                return await session.post(url, data=_pieces(body), headers=sized, allow_redirects=False)
            return await session.post(url, data=body, headers=headers, allow_redirects=False)
        except asyncio.CancelledError:
            if not attempt.expired:
                raise
            task = asyncio.current_task()
            if task is not None and sys.version_info >= (3, 11):
                task.uncancel()
            raise SendError(FirstByteTimeout(), attempt.fresh, time.monotonic() - attempt.started) from None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise SendError(error, attempt.fresh, time.monotonic() - attempt.started) from error
        finally:
            attempt.stop()
            _attempt.set(None)

    async def ask(self, method: str, path: str, timeout: float, body: Any = None) -> tuple[int, Any]:
        """Ask the server something for smolproxy itself; returns status and JSON (``None`` if it is none).

        :param timeout: seconds for all of it.
        :raises aiohttp.ClientError, asyncio.TimeoutError, OSError: no answer.
        """
        headers = {"Authorization": self.authorization} if self.authorization else {}
        async with self._session.request(
            method,
            self.url(path),
            json=body,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout),
        ) as response:
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                return response.status, None

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()
        if self._fresh_session is not None:
            await self._fresh_session.close()


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), _AT_ONCE):
        yield body[at : at + _AT_ONCE]


class SendError(Exception):
    """A request got no answer.

    :param cause: what aiohttp raised.
    :param fresh: whether its connection was made for this request.
    :param seconds: how long after it was sent.
    """

    def __init__(self, cause: BaseException, fresh: bool, seconds: float) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.fresh = fresh
        self.seconds = seconds

    @property
    def refused(self) -> bool:
        """No connection came about: the request cannot have run."""
        return isinstance(self.cause, aiohttp.ClientConnectorError) or self.timed_out_connecting

    @property
    def timed_out_connecting(self) -> bool:
        """The connection was not there in time."""
        return self.fresh and isinstance(self.cause, aiohttp.ServerTimeoutError)

    @property
    def timed_out_waiting(self) -> bool:
        """The server has the request, but its answer did not begin in time."""
        return isinstance(self.cause, FirstByteTimeout)

    @property
    def stale(self) -> bool:
        """A connection used before was found closed before any byte of an answer.

        That is found out at once. A server that gives up later has accepted the request, which may have run.
        """
        closed = isinstance(self.cause, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))
        return closed and not self.fresh and self.seconds < _FOUND_DEAD
