"""Connections of the stand-in: HTTP/1.1 requests read, bytes written, every close under control.

An idle connection is closed after `keep_alive` seconds, as by the HTTP server inside llama-server. Knows no path, no
model and no answer's form (`answer` has that).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from .reply import Gone, Pause

MAX_HEAD = 64 * 1024


class BadRequest(Exception):
    """What came in is not HTTP."""


@dataclass
class Request:
    """One request as it arrived."""

    method: str
    target: str
    """Path and query, as they stood in the request line."""
    version: str
    raw_headers: list[tuple[str, str]]
    connection: int
    """Number of the connection, counted from 1: tells whether two requests shared one."""
    number: int
    """Number of the request on its connection, counted from 1."""
    body: bytes = b""
    at: float = field(default_factory=time.monotonic)
    done: bool = False
    """The whole answer has been written."""
    left: bool = False
    """The client closed the connection before that."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers by lower-case name; repeated ones are joined by a comma."""
        joined: dict[str, str] = {}
        for name, value in self.raw_headers:
            name = name.lower()
            joined[name] = f"{joined[name]}, {value}" if name in joined else value
        return joined

    @cached_property
    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


@dataclass
class Limits:
    """What ends a connection."""

    keep_alive: float
    max_answers: int
    keep_after_stream: bool


class Connection(asyncio.Protocol):
    """One TCP connection; a task of its own takes its requests one after another.

    `handle` answers a request and says whether the connection lives on; `left` hears of a client that did not wait for
    its whole answer; `closed` of the end.
    """

    def __init__(
        self,
        number: int,
        limits: Limits,
        handle: Callable[[Connection, Request], Awaitable[bool]],
        closed: Callable[[Connection], None],
        left: Callable[[Request], None],
    ) -> None:
        self.number, self.limits = number, limits
        self.gone = asyncio.Event()
        self.gone_at = float("inf")
        """When the client was seen to have left, on the loop's clock."""
        self.current: Request | None = None
        self._handle, self._closed, self._left = handle, closed, left
        self._buffer = bytearray()
        self._arrival: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport = cast(asyncio.Transport, transport)
        self.task = self.loop.create_task(self._run())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._wake()

    def eof_received(self) -> bool:
        self._leave()
        return True  # kept open for writing: some clients say so when they have sent their request

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._writable.set()
        self._closed(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # For answers.

    async def pause(self, what: Pause) -> None:
        """Wait for seconds or an event; Gone if the client leaves first."""
        if isinstance(what, asyncio.Event) and what.is_set():
            return
        waits = [asyncio.ensure_future(self.gone.wait())]
        seconds = None
        if isinstance(what, asyncio.Event):
            waits.append(asyncio.ensure_future(what.wait()))
        else:
            seconds = what
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.gone.is_set():
            raise Gone

    async def write(self, data: bytes) -> None:
        """Write and wait while the client is slow; Gone if it has left."""
        if self.gone.is_set():
            raise Gone
        self.transport.write(data)
        if not self._writable.is_set():
            await self._writable.wait()

    async def reset(self) -> None:
        """Send what was written, then a TCP reset."""
        self.transport.set_write_buffer_limits(high=0)
        if self.transport.get_write_buffer_size():
            await self._writable.wait()
        self.cut()

    def cut(self) -> None:
        """A TCP reset at once; what was not sent yet is lost."""
        self.current = None  # not the client's doing
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    # Inside.

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _leave(self) -> None:
        if not self.gone.is_set():
            self.gone_at = self.loop.time()
            self.gone.set()
            if self.current is not None and not self.current.done:
                self.current.left = True
                self._left(self.current)
        self._wake()

    async def _run(self) -> None:
        try:
            for number in range(1, self.limits.max_answers + 1):
                request = await self._read_request(number)
                if request is None:
                    break
                self.current = request
                if not await self._handle(self, request):
                    break
        except Gone:
            pass
        except BadRequest:
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\nServer: llama.cpp\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            )
        finally:
            self.transport.close()

    async def _more(self, patience: float | None = None) -> bool:
        """Wait for bytes; False when there will be none, or none came within the seconds of `patience`."""
        if self.gone.is_set():
            return False
        self._arrival = self.loop.create_future()
        timer = None if patience is None else self.loop.call_later(patience, self._wake)
        before = len(self._buffer)
        try:
            await self._arrival
        finally:
            if timer is not None:
                timer.cancel()
        return len(self._buffer) > before

    async def _read_request(self, number: int) -> Request | None:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD:
                raise BadRequest
            if not await self._more(self.limits.keep_alive):
                return None
        lines = self._take(end + 4)[:-4].decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            raise BadRequest
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
        request = Request(parts[0], parts[1], parts[2], headers, self.number, number)
        if request.headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in request.headers.get("transfer-encoding", "").lower():
            request.body = await self._read_chunked()
        elif length := request.headers.get("content-length"):
            request.body = await self._read_exactly(int(length) if length.isdigit() else -1)
        return request

    async def _read_chunked(self) -> bytes:
        body = bytearray()
        while True:
            while (end := self._buffer.find(b"\r\n")) < 0:
                if not await self._more():
                    raise Gone
            try:
                size = int(self._take(end + 2).partition(b";")[0], 16)
            except ValueError:
                raise BadRequest from None
            data = await self._read_exactly(size + 2)
            if not data.endswith(b"\r\n"):
                raise BadRequest
            if size == 0:
                return bytes(body)
            body += data[:-2]

    async def _read_exactly(self, size: int) -> bytes:
        if size < 0:
            raise BadRequest
        while len(self._buffer) < size:
            if not await self._more():
                raise Gone
        return self._take(size)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data
