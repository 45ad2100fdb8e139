"""Reading the body of a request: within the limit, without costing more memory than it has bytes.

What a body says is not looked at here.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from smolproxy.errors import ApiError

_LARGE = 1024 * 1024  # bytes; parsing more takes several milliseconds


class Bodies:
    """Reads bodies.

    :param limit: MiB; 0: none.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._large = asyncio.Lock()

    async def read(self, request: web.Request) -> bytes:
        """Return the body; a client that waits to be told so is told to send it.

        :raises ApiError: 413 ``body_too_large``.
        """
        if request.content_length is not None:
            self._check(request.content_length)
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Not by request.read(): that keeps the body for as long as the request lives, and newer versions let as much
        # again wait in the buffer of the stream.
        body = await request.content.readany()
        if not request.content.at_eof():
            body = await self._read_on(request, body)
        if len(body) > _LARGE:
            async with self._large:  # many that arrive at once stop the loop for one at a time
                await asyncio.sleep(0)
        return body

    async def _read_on(self, request: web.Request, beginning: bytes) -> bytes:
        whole = bytearray(beginning)
        while piece := await request.content.readany():
            whole += piece
            self._check(len(whole))
        return bytes(whole)

    def _check(self, length: int) -> None:
        if self._limit and length > self._limit * 1024 * 1024:
            raise too_large(self._limit)


def too_large(limit: float) -> ApiError:
    """The answer to a body beyond the limit (MiB)."""
    return ApiError("body_too_large", f"The body is larger than {limit:g} MiB, the limit here (max_body_mib).")
