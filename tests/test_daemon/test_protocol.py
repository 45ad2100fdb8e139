"""Connections: what aiohttp would answer by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from aiohttp import http_exceptions, web

from smolproxy.daemon.protocol import Protocol, malformed


@pytest.mark.parametrize(
    ("error", "status", "word"),
    [
        (http_exceptions.BadStatusLine("GET /?key=canary"), 400, "HTTP"),
        (http_exceptions.LineTooLong("canary", "8190", "9000"), 400, "too long"),
        (http_exceptions.ContentEncodingError("canary"), 415, "Content-Encoding"),
        (None, 400, "HTTP"),
    ],
)
def test_what_is_malformed_is_told_without_being_quoted(error: Any, status: int, word: str) -> None:
    answer = malformed(error)
    assert answer.status == status
    assert word in answer.message
    assert "canary" not in answer.message


async def ask(handler: Any, data: bytes) -> tuple[bytes, list[Protocol]]:
    """Serve with a handler that nothing guards, send bytes, return the answer and the connections lost."""
    lost: list[Protocol] = []
    server = web.Server(handler)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Protocol(server, lost.append), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    listening.close()
    while not lost:
        await asyncio.sleep(0.001)
    await server.shutdown(1.0)
    return answer, lost


async def test_a_fault_that_nothing_caught() -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        raise ZeroDivisionError("a-secret")

    with structlog.testing.capture_logs() as logs:
        answer, lost = await ask(handler, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500")
    assert b'"code":"internal_error"' in body
    assert b"a-secret" not in answer
    (fault,) = [record for record in logs if record["event"] == "internal error"]
    assert fault["request_id"].encode() in body
    assert len(lost) == 1


async def test_a_client_that_has_gone_is_not_answered() -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        raise ConnectionResetError("gone")

    with structlog.testing.capture_logs() as logs:
        answer, lost = await ask(handler, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer == b""
    assert logs == []
    assert len(lost) == 1


async def test_a_fault_behind_the_head_of_an_answer_ends_the_connection() -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"part")
        raise ZeroDivisionError

    with structlog.testing.capture_logs() as logs:
        answer, _ = await ask(handler, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"part" in answer
    assert b"internal_error" not in answer
    assert not answer.endswith(b"0\r\n\r\n")
    assert [record["event"] for record in logs] == ["internal error"]
