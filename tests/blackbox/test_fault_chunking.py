"""Streams cut into pieces at every place: the client's bytes are the server's, the counts are exact."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

import pytest

from smolproxy.standin import Reply

from .clients import MIB, booked, memory
from .conftest import Site
from .harness import until

TEXT = "Grüße, 世界 🚀 \x85 next\u2028line"


def chunk(text: str, **more: Any) -> bytes:
    """A chunk of a chat, its text as UTF-8."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return json.dumps({"id": "c", "choices": [choice], **more}, ensure_ascii=False).encode()


FINISH = b'{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
USAGE = (
    b'{"id":"c","choices":[],"usage":{"prompt_tokens":11,"completion_tokens":3,"total_tokens":14,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}'
)
STREAM = b"".join(
    (
        b": a comment before anything\n\n",
        b"data: %s\n\n" % chunk(TEXT),
        b":\n\n",
        b"event: message\nid: 7\ndata: %s\n\n" % chunk("two"),
        b":\n\ndata:%s\r\n\r\n" % chunk("no space, CR LF"),
        b'data: {"id":"c",\ndata: "choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n',
        b"data: %s\n\n" % FINISH,
        b"data: %s\n\n" % USAGE,
        b"data: [DONE]\n\n",
    )
)
"""A stream with all that may be in one."""

WANTED = {"stream_options": {"include_usage": True}, "timings_per_token": True}
"""Asked for by the client, so that nothing has to be taken out of the answer."""


async def check(site: Site, expected: bytes, *, outcome: str = "ok", **fields: Any) -> dict[str, Any]:
    """Ask for a stream; its bytes must be the expected ones. Return its row."""
    answer = await site.chat(stream=True, **{**WANTED, **fields})
    assert answer.status == 200
    assert answer.body == expected
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["stream"]) == (200, outcome, 1)
    return row


def assert_counts(row: dict[str, Any]) -> None:
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (11, 4, 3)
    assert row["tokens_source"] == "usage"


@pytest.mark.parametrize("split", [1, 2, 3, 7, 64, 0])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_pieces_of_every_size(site: Site, split: int, end: bytes) -> None:
    stream = STREAM.replace(b"\r\n", b"\n").replace(b"\n", end)
    site.server.script.append(Reply(chunks=[stream], split=split))
    assert_counts(await check(site, stream))


async def test_cut_in_two_at_every_offset_of_a_text(site: Site) -> None:
    text = range(STREAM.index(b"Gr"), STREAM.index(b"line") + 4)
    offsets = iter([at for at in range(1, len(STREAM)) if at in text or at % 4 == 0])

    async def worker() -> None:
        for at in offsets:
            # A connection of its own for each, in the order of the script.
            async with lock:
                site.server.script.append(Reply(chunks=[STREAM[:at], 0.01, STREAM[at:]]))
                asking = asyncio.ensure_future(check(site, STREAM))
                await until(lambda: not site.server.script)
            assert_counts(await asking)

    lock = asyncio.Lock()
    await asyncio.gather(*(worker() for _ in range(8)))


@pytest.mark.parametrize(
    "reply",
    [
        Reply(split=1),
        Reply(crlf=True),
        Reply(heartbeat=True),
        Reply(heartbeat=True, crlf=True, split=5),
        Reply(gzip=True),
        Reply(gzip=True, split=1),
        Reply(framing="close"),
        Reply(says=["Gr", "üße 世", "界 🚀", " \x85", "\u2028"], split=1),
    ],
    ids=["bytewise", "crlf", "comments", "all", "gzip", "gzip-bytewise", "until-close", "utf8"],
)
@pytest.mark.parametrize("wanted", [True, False], ids=["usage-asked", "usage-added"])
async def test_counts_are_exact_however_it_comes(site: Site, reply: Reply, wanted: bool) -> None:
    site.server.script.append(reply)
    made = site.server.counters.predicted
    answer = await site.chat(stream=True, max_tokens=20, **(WANTED if wanted else {}))
    assert answer.status == 200
    assert "Content-Encoding" not in answer.headers
    data = [line[6:] for line in answer.body.splitlines() if line.startswith(b"data: ")]
    assert data[-1] == b"[DONE]"
    chunks = [json.loads(each) for each in data[:-1]]
    assert any("usage" in each for each in chunks) == wanted
    text = "".join(choice["delta"].get("content") or "" for each in chunks for choice in each["choices"])
    assert text == "".join(reply.says) if reply.says else len(text.split()) == 20
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["outcome"], row["tokens_source"]) == ("ok", "usage")
    assert row["completion_tokens"] == site.server.counters.predicted - made


async def test_no_done(site: Site) -> None:
    """A server that does not say [DONE] has said the end with the finish reason; none is invented."""
    stream = STREAM.removesuffix(b"data: [DONE]\n\n")
    site.server.script.append(Reply(chunks=[stream]))
    assert_counts(await check(site, stream))


async def test_headers_of_a_stream_once_each(site: Site) -> None:
    given = {"Cache-Control": "private", "X-Accel-Buffering": "yes", "Set-Cookie": "a=b"}
    site.server.script.append(Reply(headers=given))
    answer = await site.chat(stream=True)
    headers: Any = answer.headers
    assert headers.getall("X-Accel-Buffering") == ["no"]
    assert headers.getall("Cache-Control") == ["no-cache"]
    assert headers.getall("Content-Type") == ["text/event-stream"]
    assert "Set-Cookie" not in headers


@pytest.mark.parametrize("accepts", ["gzip, br, zstd", "br", "zstd;q=1.0", "identity;q=0, gzip", "*"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("gzip", [True, False])
async def test_accept_encoding(site: Site, accepts: str, stream: bool, gzip: bool) -> None:
    """Whatever the client accepts, and whether the server compresses or not: labels and bytes agree."""
    site.server.script.append(Reply(gzip=gzip))
    answer = await site.chat(stream=stream, max_tokens=9, headers={"Accept-Encoding": accepts})
    assert answer.status == 200
    assert "Content-Encoding" not in answer.headers  # the client here decompresses nothing
    assert answer.body.rstrip().endswith(b"data: [DONE]") if stream else answer.json["object"] == "chat.completion"
    assert "accept-encoding" not in site.generating()[-1].headers
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["completion_tokens"], row["tokens_source"], row["outcome"]) == (9, "usage", "ok")


async def test_a_line_of_2_mib(site: Site) -> None:
    text = "0123456789abcdef" * (2 * MIB // 16)
    stream = b"data: %s\n\ndata: %s\n\ndata: %s\n\ndata: [DONE]\n\n" % (chunk(text), FINISH, USAGE)
    site.server.script.append(Reply(chunks=[stream[:100], stream[100:]]))
    assert_counts(await check(site, stream))


async def test_a_line_that_never_ends(site: Site) -> None:
    """256 MiB without a line's end pass through, and the daemon does not grow."""
    assert site.daemon.process is not None
    pid = site.daemon.process.pid
    first = b'data: {"choices":[{"index":0,"delta":{"content":"'
    site.server.script.append(Reply(chunks=[first, *[b"x" * 65536] * (256 * 16)]))
    before, most, size, end = memory(pid), 0, 0, b""
    async with site.open() as response:
        head = await response.content.readexactly(len(first))
        assert head == first
        async for data in response.content.iter_any():
            size += len(data)
            if size // (8 * MIB) != (size - len(data)) // (8 * MIB):
                most = max(most, memory(pid))
            end = (end + data)[-1000:]
    assert most - before < 16 * MIB
    assert size >= 256 * MIB - 64 * 1024
    # It was no end that a server should make: the client is told, and what was open is closed before that.
    assert b'xxx\n\ndata: {"error":{' in end
    assert b'"code":"server_error"' in end
    assert end.endswith(b"}}\n\n")
    row = await booked(site.daemon, response.headers["x-request-id"])
    assert row["outcome"] == "server_error"


async def test_each_event_is_there_at_once(site: Site) -> None:
    count = 100
    gates = [asyncio.Event() for _ in range(count)]
    chunks: list[bytes | float | asyncio.Event] = []
    for number, gate in enumerate(gates):
        chunks += [gate, b"data: %s\n\n" % chunk(f"<{number}>")]
    site.server.script.append(Reply(chunks=[*chunks, b"data: %s\n\ndata: [DONE]\n\n" % FINISH]))
    delays = []
    async with site.open(**WANTED) as response:
        seen = b""
        for number, gate in enumerate(gates):
            started = time.perf_counter()
            gate.set()
            while b"<%d>" % number not in seen:
                data = await response.content.readany()
                assert data
                seen += data
            delays.append(time.perf_counter() - started)
        assert (seen + await response.read()).endswith(b"data: [DONE]\n\n")
    assert statistics.median(delays) < 0.05
    assert max(delays) < 0.25


async def test_the_last_event_does_not_wait_for_the_one_that_may_complete_it(site: Site) -> None:
    gate = asyncio.Event()
    site.server.script.append(
        Reply(chunks=[b"data: %s\n\n" % chunk("a"), b"data: %s\n\n" % FINISH, gate, b"data: [DONE]\n\n"])
    )
    async with site.open() as response:
        seen = b""
        started = time.perf_counter()
        while b'"finish_reason":"stop"' not in seen:
            seen += await response.content.readany()
        assert time.perf_counter() - started < 0.5
        gate.set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
