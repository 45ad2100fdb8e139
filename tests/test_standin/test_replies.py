"""Scripted replies: each fault, one test; they show how to write such a script."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from smolproxy.standin import MISSING, Reply, StandIn

from .client import CHAT, Client, ask, parse

STREAM = ask(stream=True, max_tokens=3)
WITH_USAGE = {**STREAM, "stream_options": {"include_usage": True}}


async def streamed(reply: Reply, body: Any = STREAM) -> list[bytes]:
    """The chunks of a stream with that reply."""
    async with StandIn() as server, Client(server) as client:
        server.script.append(reply)
        return await client.stream(body=body)


async def received(reply: Reply, body: Any = STREAM) -> bytes:
    """All bytes until the server closes."""
    async with StandIn() as server, Client(server) as client:
        server.script.append(reply)
        await client.send(CHAT, body)
        return await client.reader.read()


async def test_a_script_is_used_up_in_order_and_probes_do_not_touch_it() -> None:
    async with StandIn() as server, Client(server) as client:
        server.script += [Reply(says=["one"]), Reply(says=["two"])]
        server.default = Reply(says=["always"])
        said = []
        for _ in range(4):
            await client.ask("/health")
            said.append((await client.ask(body=ask()))["choices"][0]["message"]["content"])
        assert said == ["one", "two", "always", "always"]


async def test_a_path_can_have_a_reply_of_its_own() -> None:
    async with StandIn() as server, Client(server) as client:
        server.on["/health"] = Reply(body={"status": "odd"}, headers={"X-Odd": "yes"})
        await client.send("/health")
        assert "X-Odd: yes" in await client.head()
        assert await client.reader.readexactly(16) == b'{"status":"odd"}'


async def test_body_and_headers_as_given() -> None:
    reply = Reply(status=502, headers={"content-type": "text/html", "Keep-Alive": None}, body="<h1>no</h1>")
    head, _, body = (await received(reply)).decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 502 Bad Gateway\r\n")
    assert "content-type: text/html" in head
    assert "Content-Type" not in head
    assert body == "<h1>no</h1>"


async def test_a_status_alone_is_an_error_of_llama() -> None:
    async with StandIn() as server, Client(server) as client:
        server.script.append(Reply(status=500))
        answer = await client.ask(body=ask())
        assert answer == {"error": {"code": 500, "message": "scripted", "type": "server_error"}}


async def test_chunks_are_written_one_by_one_with_pauses_between() -> None:
    async with StandIn() as server, Client(server) as client:
        gate = asyncio.Event()
        server.script.append(Reply(chunks=[b"data: 1\n\n", gate, b"data", 0.01, b": 2\n\n"]))
        await client.send(CHAT, STREAM)
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.reader.readexactly(1), 0.05)
        gate.set()
        assert [await client.chunk(), await client.chunk(), await client.chunk()] == [b"data", b": 2\n\n", b""]


async def test_one_byte_per_write() -> None:
    chunks = await streamed(Reply(split=1))
    assert {len(chunk) for chunk in chunks} == {1}
    assert len(parse(chunks)) == 5
    whole = await received(Reply(split=1, body=b"abc", framing="chunked", then="close"))
    assert whole.partition(b"\r\n\r\n")[2] == b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n"


async def test_crlf_and_heartbeats() -> None:
    chunks = await streamed(Reply(crlf=True, heartbeat=True))
    assert all(chunk.startswith(b":\r\n\r\ndata: ") and chunk.endswith(b"\r\n\r\n") for chunk in chunks)
    assert all(b"\n" not in chunk.replace(b"\r\n", b"") for chunk in chunks)
    assert len(chunks) == 6


@pytest.mark.parametrize("stream", [True, False])
async def test_gzip(stream: bool) -> None:
    data = await received(Reply(gzip=True, framing="close"), ask(stream=stream, max_tokens=3))
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"Content-Encoding: gzip" in head
    assert b"tok0" in gzip.decompress(body)


async def test_a_cut_stream_ends_without_the_end_of_its_chunks() -> None:
    body = (await received(Reply(cut=2))).partition(b"\r\n\r\n")[2]
    assert body.count(b"data: ") == 2
    assert not body.endswith(b"\r\n0\r\n\r\n")
    assert (await received(Reply(cut=0))).endswith(b"\r\n\r\n")


async def test_a_cut_body_is_shorter_than_its_length_says() -> None:
    head, _, body = (await received(Reply(cut=10), ask())).partition(b"\r\n\r\n")
    assert len(body) == 10 < int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0])


async def test_reset_after_some_events() -> None:
    async with StandIn() as server, Client(server) as client:
        server.script.append(Reply(cut=2, then="reset"))
        await client.send(CHAT, STREAM)
        await client.head()
        await client.chunk()
        await client.chunk()
        with pytest.raises(ConnectionResetError):
            await client.chunk()
        assert server.closed_early == 0
        await server.wait_for(lambda: server.engine.busy == 0)
        assert server.counters.predicted == 1


async def test_reset_instead_of_an_answer() -> None:
    async with StandIn() as server, Client(server) as client:
        server.script.append(Reply(no_answer=True))
        await client.send(CHAT, STREAM)
        with pytest.raises(ConnectionResetError):
            await client.head()


async def test_hang_until_the_client_leaves() -> None:
    async with StandIn() as server, Client(server) as client:
        server.script.append(Reply(cut=1, then="hang"))
        await client.send(CHAT, STREAM)
        await client.head()
        await client.chunk()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.reader.readexactly(1), 0.05)
        assert server.in_flight == 1
        await client.close()
        await server.wait_for(lambda: server.in_flight == 0)
        assert server.closed_early == 1


async def test_keep_the_connection_after_a_stream() -> None:
    async with StandIn() as server, Client(server) as client:
        server.script.append(Reply(then="keep"))
        await client.stream(body=STREAM)
        assert await client.ask("/health") == {"status": "ok"}


async def test_close_after_a_plain_answer_that_promised_to_keep() -> None:
    data = await received(Reply(then="close"), ask())
    assert b"Keep-Alive" in data.partition(b"\r\n\r\n")[0]
    assert data.endswith(b"}}")


async def test_wait_before_the_answer() -> None:
    async with StandIn() as server, Client(server) as client:
        gate = asyncio.Event()
        server.script += [Reply(before=gate), Reply(before=0.05)]
        await client.send(CHAT, ask())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.reader.readexactly(1), 0.05)
        gate.set()
        await client.whole()
        began = asyncio.get_running_loop().time()
        await client.ask(body=ask())
        assert asyncio.get_running_loop().time() - began >= 0.04


async def test_hold_an_event_of_a_stream() -> None:
    async with StandIn() as server, Client(server) as client:
        gate = asyncio.Event()
        server.script.append(Reply(hold={2: gate}, delay=0.001))
        await client.send(CHAT, STREAM)
        await client.head()
        assert len(parse([await client.chunk(), await client.chunk()])) == 2
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.reader.readexactly(1), 0.05)
        gate.set()
        assert b"tok1" in await client.chunk()


# Counts told otherwise.


async def told(reply: Reply, body: Any = WITH_USAGE) -> list[Any]:
    """`usage` of each event, MISSING where there is none."""
    return [event.get("usage", MISSING) for event in parse(await streamed(reply, body))]


async def test_usage_as_given() -> None:
    assert (await told(Reply(usage=None)))[-2:] == [MISSING, None]
    assert (await told(Reply(usage={"prompt_tokens": 0})))[-1] == {"prompt_tokens": 0}
    assert await told(Reply(usage=MISSING)) == [MISSING] * 5
    async with StandIn() as server, Client(server) as client:
        server.default = Reply(usage=MISSING, timings=False)
        for path, body in ((CHAT, ask()), ("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
            assert not {"usage", "timings"} & set(await client.ask(path, body))
        server.default = Reply(usage=None, timings=None)
        assert (await client.ask("/v1/embeddings", {"input": "a"}))["usage"] is None
        assert (await client.ask(body=ask()))["timings"] is None


async def test_usage_on_every_chunk_grows() -> None:
    usages = await told(Reply(usage_everywhere=True))
    assert [usage["completion_tokens"] for usage in usages] == [1, 1, 2, 3, 3, 3]


async def test_usage_on_the_finish_chunk() -> None:
    events = parse(await streamed(Reply(usage_on_finish=True), WITH_USAGE))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 3


async def test_neither_timings_nor_done() -> None:
    chunks = await streamed(Reply(timings=False, done=False))
    assert b"[DONE]" not in b"".join(chunks)
    assert all("timings" not in event for event in parse(chunks))


# What is said.


async def test_thinking_and_tool_calls() -> None:
    reply = Reply(think=["hm", " hm"], calls=[("weather", ['{"city":', '"Bern"}']), ("time", ["{}"])])
    async with StandIn() as server, Client(server) as client:
        server.default = reply
        answer = await client.ask(body=ask())
        message = answer["choices"][0]["message"]
        assert message["content"] is None
        assert message["reasoning_content"] == "hm hm"
        calls = [{"name": "weather", "arguments": '{"city":"Bern"}'}, {"name": "time", "arguments": "{}"}]
        assert [call["function"] for call in message["tool_calls"]] == calls
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert answer["usage"]["completion_tokens"] == 6
        events = parse(await client.stream(body=ask(stream=True)))
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[1] == {"reasoning_content": "hm"}
        first = deltas[3]["tool_calls"][0]
        assert first == {
            "index": 0,
            "id": "call_0",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":'},
        }
        assert deltas[4]["tool_calls"] == [{"index": 0, "function": {"arguments": '"Bern"}'}}]


async def test_more_tokens_than_pieces() -> None:
    events = parse(await streamed(Reply(says=["a", "b"], tokens_per_piece=4, finish="odd"), ask(stream=True)))
    assert events[-1]["choices"][0]["finish_reason"] == "odd"
    assert events[-1]["timings"]["predicted_n"] == 9
