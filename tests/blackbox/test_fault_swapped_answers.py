"""No user ever gets another's answer, whatever a server does to the connections in between.

The server here is none that follows rules: it answers each request with its own nonce, and does to the connection what
the nonce says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import struct
from collections import Counter
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import pytest

from .clients import Client, idle
from .harness import Daemon, until

SETTINGS = {"first_byte_timeout": 0.3, "idle_timeout": 0.3, "probe_interval": 3600}

FAULTS = ("late", "stall", "close", "reset", "no-answer", "surplus", "twice", "error", "error-close", "short", "junk")
LATE = 0.5  # beyond both timeouts


class Unruly:
    """Answers with the nonce of the request, and ruins the connection as it says."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self.reused = 0
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.open += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            count = 0
            while await self.answer(reader, writer):
                count += 1
                self.reused += count > 1
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection lives on."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = json.loads(await reader.readexactly(int(length[1]))) if length else {}
        if not head.startswith(b"POST /v1/chat/completions "):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return True
        nonce, fault = body["user"].split(" ")
        self.served[fault] += 1
        send = self.stream if body.get("stream") else self.plain
        return await send(writer, nonce, fault)

    def reset(self, writer: asyncio.StreamWriter) -> bool:
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return False

    async def plain(self, writer: asyncio.StreamWriter, nonce: str, fault: str) -> bool:
        answer = json.dumps({"nonce": nonce, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
        status = "500 Oops" if fault.startswith("error") else "200 OK"
        length = len(answer) + (10 if fault == "short" else 0)
        whole = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{answer}".encode()
        )
        if fault in ("no-answer", "reset"):
            return self.reset(writer)
        if fault == "late":
            await asyncio.sleep(LATE)
        if fault in ("stall", "close"):
            writer.write(whole[:-20])
            if fault == "close":
                return False
            await asyncio.sleep(LATE)
            whole = whole[-20:]
        if fault == "surplus":
            whole += answer.encode()
        if fault == "twice":
            whole += whole
        if fault == "junk":
            whole = b"SSH-2.0-OpenSSH_9.2\r\n" + whole
        writer.write(whole)
        return fault != "error-close"

    async def stream(self, writer: asyncio.StreamWriter, nonce: str, fault: str) -> bool:
        def event(data: bytes) -> bytes:
            data = b"data: %s\n\n" % data
            return b"%x\r\n%s\r\n" % (len(data), data)

        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        delta = {"index": 0, "delta": {"content": nonce}, "finish_reason": None}
        token = event(json.dumps({"nonce": nonce, "choices": [delta]}).encode())
        end = event(json.dumps({"nonce": nonce, "choices": [{**delta, "delta": {}, "finish_reason": "stop"}]}).encode())
        end += event(b"[DONE]") + b"0\r\n\r\n"
        if fault == "no-answer":
            return self.reset(writer)
        if fault in ("late", "junk"):
            await asyncio.sleep(LATE if fault == "late" else 0)
        writer.write((b"220 mail.example ESMTP\r\n" if fault == "junk" else b"") + head + token)
        if fault == "stall":
            await asyncio.sleep(LATE)
        if fault in ("close", "short"):
            return False
        if fault == "reset":
            return self.reset(writer)
        writer.write(token + end)
        if fault in ("surplus", "twice"):
            writer.write(head + token + end)
        return fault != "error-close"


async def test_each_answer_is_its_users_own(daemon: Daemon) -> None:
    chance = random.Random(11)
    unruly = Unruly()
    server = await asyncio.start_server(unruly.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server_id = (await daemon.admin("POST", "/servers", {"name": "unruly", "url": url, "models": ["unruly"]}))["id"]
    keys = [await daemon.new_key(f"user {number}") for number in range(8)]
    statuses: Counter[int] = Counter()
    whole = 0

    async def ask(key: str, nonce: str, fault: str) -> None:
        nonlocal whole
        stream = chance.random() < 0.4
        body: dict[str, Any] = {"model": "unruly", "messages": [], "user": f"{nonce} {fault}", "stream": stream}
        if chance.random() < 0.15:  # a client that leaves, at a random moment
            client = await Client(daemon.port).send(body, key)
            await asyncio.sleep(chance.uniform(0, 0.05))
            client.leave(reset=chance.random() < 0.5)
            return
        answer = await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)
        statuses[answer.status] += 1
        found = set(re.findall(r"<\d+>", answer.text))
        assert found <= {f"<{nonce.strip('<>')}>"}, (nonce, fault, answer)
        if fault == "none":
            assert answer.status == 200, (fault, answer)
            assert found, answer
            whole += 1

    numbers = iter(range(700))

    async def user(key: str) -> None:
        for number in numbers:
            await ask(key, f"<{number}>", "none" if number % 3 else chance.choice(FAULTS))

    await asyncio.gather(*(user(keys[at % len(keys)]) for at in range(24)))
    await idle(daemon)
    assert set(unruly.served) == {"none", *FAULTS}
    assert unruly.reused > 50  # connections that nothing ever happened to are used again
    assert whole > 300
    assert {200, 500, 502, 504} <= set(statuses)
    count = "SELECT count(*) AS n FROM usage WHERE real_model_name = 'unruly'"
    await until(lambda: daemon.rows(count)[0]["n"] >= sum(statuses.values()))
    await daemon.admin("DELETE", f"/servers/{server_id}")
    await until(lambda: not unruly.open)
    server.close()


class Talkative(Unruly):
    """Answers, and then answers once more."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        alive = await super().answer(reader, writer)
        if alive:
            await writer.drain()
            await self.plain(writer, "<666>", "none")
        return alive


@pytest.mark.parametrize("wait", [0.0, 0.2])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_nobody_asked_for_reaches_nobody(daemon: Daemon, wait: float, stream: bool) -> None:
    """The server says more on a connection that has gone back into the pool: read already, or not yet."""
    talkative = Talkative()
    server = await asyncio.start_server(talkative.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    name = f"talkative {wait} {stream}"
    server_id = (await daemon.admin("POST", "/servers", {"name": name, "url": url, "models": [name]}))["id"]
    key = await daemon.new_key()
    for number in range(20):
        body = {"model": name, "messages": [], "user": f"<{number}> none", "stream": stream}
        answer = await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)
        assert answer.status == 200
        assert set(re.findall(r"<\d+>", answer.text)) == {f"<{number}>"}
        if number < 3:
            await asyncio.sleep(wait)
    await daemon.admin("DELETE", f"/servers/{server_id}")
    await until(lambda: not talkative.open)
    server.close()
