"""A bare HTTP client for the stand-in's own tests: shows connections as they are, and pools nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from smolproxy.standin import StandIn

CHAT = "/v1/chat/completions"


def ask(text: str = "hello there", **more: Any) -> dict[str, Any]:
    """The body of a chat."""
    return {"messages": [{"role": "user", "content": text}], **more}


class Client:
    """One connection to the stand-in."""

    def __init__(self, server: StandIn) -> None:
        self.server = server

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection(self.server.host, self.server.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, path: str, body: Any = None, method: str | None = None, head: str = "") -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        start = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(data)}\r\n\r\n"
        self.writer.write(start.encode() + data)
        await self.writer.drain()

    async def head(self) -> str:
        """The head of the answer."""
        return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def whole(self) -> Any:
        """The JSON of an answer with a length."""
        head = await self.head()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        return json.loads(await self.reader.readexactly(length))

    async def ask(self, path: str = CHAT, body: Any = None) -> Any:
        await self.send(path, body)
        return await self.whole()

    async def chunk(self) -> bytes:
        """The next HTTP chunk; empty at the end."""
        size = int(await self.reader.readline(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def stream(self, path: str = CHAT, body: Any = None) -> list[bytes]:
        """All chunks of a streamed answer."""
        await self.send(path, body)
        await self.head()
        chunks: list[bytes] = []
        while chunk := await self.chunk():
            chunks.append(chunk)
        return chunks

    async def closed(self) -> bool:
        """Whether the server closes now, with nothing more to say."""
        return await asyncio.wait_for(self.reader.read(), 5) == b""


def parse(chunks: list[bytes]) -> list[Any]:
    """The events of a stream without `[DONE]`."""
    blocks = b"".join(chunks).decode().split("\n\n")
    return [json.loads(block[6:]) for block in blocks if block.startswith("data: ") and block != "data: [DONE]"]
