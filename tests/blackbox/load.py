"""Load on a daemon, bounded in time or count, and what is measured meanwhile.

A stand-in in a process of its own, clients that are light enough to leave the machine to the daemon, and a stream that
is watched. Knows nothing of what is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from smolproxy.standin import Reply, StandIn

from .harness import Daemon, environment

MODEL = "loaded"


@contextlib.contextmanager
def standin_process(*options: str) -> Iterator[str]:
    """A stand-in in a process of its own that serves MODEL; yields its URL."""
    command = [sys.executable, "-m", "smolproxy.standin", "--port", "0", "--model", MODEL, "--slots", "64", "--replay"]
    process = subprocess.Popen([*command, *options], env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(word for word in process.stdout.readline().split() if word.startswith("http://"))
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def chat(key: str, port: int, *, stream: bool = False, tokens: int = 3, model: str = MODEL) -> bytes:
    """The bytes of a request for a chat."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream, "max_tokens": tokens}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Line:
    """A connection that is kept; request by request on it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> tuple[int, str]:
        """Send a request and read the answer to its end, of a stream up to `[DONE]`; return status and request id.

        Raises OSError or EOFError when the connection breaks before that.
        """
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
        assert self._reader is not None
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        status = int(head[0].split(" ")[1])
        if "content-length" in headers:
            await self._reader.readexactly(int(headers["content-length"]))
        else:
            await self._reader.readuntil(b"data: [DONE]\n\n")
            self.close()  # what a client has is the last event: not even the end of the chunks is waited for
        return status, headers["x-request-id"]

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclass
class Load:
    """What became of the requests."""

    ended: list[str] = field(default_factory=list)
    """Request ids of whole answers with status 200."""
    others: list[tuple[int, str]] = field(default_factory=list)
    """Status and request id of all other answers."""
    broken: int = 0
    """Requests whose connection broke."""

    async def ask(self, line: Line, request: bytes) -> int:
        """Ask once; return the status, 0 if the connection broke."""
        try:
            status, request_id = await line.ask(request)
        except (OSError, EOFError):
            line.close()
            self.broken += 1
            return 0
        if status == 200:
            self.ended.append(request_id)
        else:
            self.others.append((status, request_id))
        return status

    async def hammer(self, port: int, *requests: bytes, lines: int = 8, most: int = 1_000_000) -> None:
        """Ask on several lines without a pause until a connection breaks, an answer is no 200 or `most` were sent."""
        numbers = iter(range(most))

        async def one(line: Line) -> None:
            for number in numbers:
                if await self.ask(line, requests[number % len(requests)]) != 200:
                    break
            line.close()

        await asyncio.gather(*(one(Line(port)) for _ in range(lines)))

    async def at_rate(self, port: int, rate: float, seconds: float, *requests: bytes) -> None:
        """Ask `rate` times a second, whatever becomes of the answers, for so many seconds."""
        free: list[Line] = []
        running = set()

        async def one(request: bytes) -> None:
            line = free.pop() if free else Line(port)
            await self.ask(line, request)
            free.append(line)

        started = time.monotonic()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, started + number / rate - time.monotonic()))
            running.add(asyncio.create_task(one(requests[number % len(requests)])))
        await asyncio.gather(*running)
        for line in free:
            line.close()


@dataclass
class Watched:
    """A stream of one event each 20 ms."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between pieces of it, at the client."""


@contextlib.asynccontextmanager
async def watched_stream(daemon: Daemon, key: str) -> AsyncIterator[Watched]:
    """Have a stream run through the daemon meanwhile."""
    watched = Watched()
    async with StandIn(["watched"], notice=0.1) as server:
        server.default = Reply(says=["tick "] * 100_000, delay=0.02)
        server_id = await daemon.add_server(server, "watched")

        async def watch(response: Any) -> None:
            last = None
            async for _ in response.content.iter_any():
                now = time.monotonic()
                if last is not None:
                    watched.gaps.append(now - last)
                last = now

        body = {"model": "watched", "stream": True, "messages": [{"role": "user", "content": "count"}]}
        unlimited = aiohttp.ClientTimeout(total=None)
        asking = daemon.open("POST", "/v1/chat/completions", key=key, json=body, timeout=unlimited)
        async with asking as response:
            watching = asyncio.create_task(watch(response))
            yield watched
            assert not watching.done(), "the stream has ended"
            watching.cancel()
            await asyncio.wait([watching])
        await daemon.admin("DELETE", f"/servers/{server_id}")
    assert watched.gaps


async def loaded(daemon: Daemon, url: str) -> str:
    """Start the daemon with the stand-in's URL as the server of MODEL; return a key."""
    daemon.start()
    await daemon.admin("POST", "/servers", {"name": MODEL, "url": url, "models": [MODEL]})
    return await daemon.new_key("load")


def ids(daemon: Daemon) -> list[str]:
    """Request ids of all usage rows, in their order."""
    return [row["request_id"] for row in daemon.rows("SELECT request_id FROM usage ORDER BY id")]
