"""One answer of the stand-in on its way: head, body and end, as its `Reply` wants them: gzip, splits, framing, cut.

Unasked, it does as llama-server: after an error, a stream, or the last answer that a connection may give, it closes the
connection. Knows no path and no JSON.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from .reply import Gone, Reply
from .wire import Connection, Request


class Answer:
    """The way back of one request."""

    def __init__(self, connection: Connection, request: Request, reply: Reply) -> None:
        self.connection, self.request, self.reply = connection, request, reply
        self.closing = False
        """The connection is closed after this answer."""
        self.started = False
        self.tape: list[bytes] | None = None
        """When set, every piece written is also kept here."""
        self.tape_whole: bytes | None = None
        self._gzip: Any = None
        self._head_bytes = b""
        self._chunked = False
        self._written = 0

    async def whole(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json; charset=utf-8",
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """A whole answer."""
        reply, self.tape_whole = self.reply, body
        if reply.gzip:
            compress = zlib.compressobj(wbits=31)
            body = compress.compress(body) + compress.flush()
        if self.request.method == "HEAD":
            self._head(status, kind, len(body), extra)
            body = b""
        elif reply.framing in ("auto", "length"):
            self._head(status, kind, len(body), extra)
        else:
            self._head(status, kind, None, extra)
        if reply.cut is not None:
            body = body[: reply.cut]
        await self._send(body)
        await self._end(cut=reply.cut is not None)

    def start(self, status: int = 200, kind: str = "text/event-stream", extra: Mapping[str, str] | None = None) -> None:
        """Begin a stream."""
        if self.reply.gzip:
            self._gzip = zlib.compressobj(wbits=31)
        self._head(status, kind, None, {"X-Accel-Buffering": "no", **(extra or {})}, stream=True)

    async def flush(self) -> None:
        """Send the head of a stream now; unasked, it goes out with the first piece, as llama-server's does."""
        if self._head_bytes:
            await self._send(b"")

    async def write(self, piece: bytes) -> None:
        """One piece of a stream; Gone when the client has left, or the reply's `cut` was reached with it."""
        if self.reply.cut == 0:
            await self._end(cut=True)
        if self.tape is not None:
            self.tape.append(piece)
        self._written += 1
        if self._gzip is not None:
            piece = self._gzip.compress(piece) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        await self._send(piece)
        if self._written == self.reply.cut:
            await self._end(cut=True)

    async def finish(self) -> None:
        """The end of a stream."""
        if self._gzip is not None and self.reply.then not in ("close", "reset", "hang"):
            await self._send(self._gzip.flush())
        await self._end(cut=False)

    def _head(
        self, status: int, kind: str, length: int | None, extra: Mapping[str, str] | None, stream: bool = False
    ) -> None:
        reply, request = self.reply, self.request
        self.started = True
        self._chunked = length is None and reply.framing != "close"
        wants_close = request.headers.get("connection", "").lower() == "close"
        old = request.version == "HTTP/1.0" and request.headers.get("connection", "").lower() != "keep-alive"
        last = request.number >= self.connection.limits.max_answers
        ends = last or wants_close or status >= 400
        self.closing = (
            ends or old or reply.framing == "close" or (stream and not self.connection.limits.keep_after_stream)
        )
        headers: dict[str, str] = {
            "Server": "llama.cpp",
            "Access-Control-Allow-Origin": request.headers.get("origin", ""),
            **(extra or {}),
            "Content-Type": kind,
        }
        if reply.gzip:
            headers["Content-Encoding"] = "gzip"
        if length is not None:
            headers["Content-Length"] = str(length)
        elif self._chunked:
            headers["Transfer-Encoding"] = "chunked"
        if ends:
            headers["Connection"] = "close"
        else:
            headers["Keep-Alive"] = (
                f"timeout={self.connection.limits.keep_alive:g}, max={self.connection.limits.max_answers}"
            )
        for name, value in reply.headers.items():
            for usual in [usual for usual in headers if usual.lower() == name.lower()]:
                del headers[usual]
            if value is not None:
                headers[name] = value
        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = "Unknown"
        lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
        self._head_bytes = "\r\n".join([*lines, "", ""]).encode("latin-1")

    async def _send(self, data: bytes) -> None:
        head, self._head_bytes = self._head_bytes, b""
        if not self.reply.split:
            framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked and data else data
            await self.connection.write(head + framed)
            return
        await self.connection.write(head)
        for at in range(0, len(data), self.reply.split):
            await asyncio.sleep(0)
            piece = data[at : at + self.reply.split]
            await self.connection.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)

    async def _end(self, cut: bool) -> None:
        then = self.reply.then
        if then == "auto" and cut:
            then = "close"
        await self.flush()
        if then in ("close", "reset", "hang"):
            self.closing = True
            self.request.done = then != "hang"
            if then == "reset":
                await self.connection.reset()
            elif then == "hang":
                await self.connection.gone.wait()
            else:
                self.connection.transport.close()
            raise Gone
        if self._chunked:
            await self.connection.write(b"0\r\n\r\n")
        if then == "keep":
            self.closing = False
        self.request.done = True
