"""What the stand-in does as llama-server does it: counts, slots, connections, clients that leave."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import pytest

from smolproxy.standin import Counters, Reply, StandIn

from .client import CHAT, Client, ask, parse


def processed(server: StandIn) -> tuple[int, int, int]:
    return server.counters.prompt_tokens, server.counters.cached, server.counters.predicted


async def test_a_prompt_is_words_and_a_repeated_one_comes_from_the_cache_but_for_one_token() -> None:
    async with StandIn() as server, Client(server) as client:
        first = await client.ask(body=ask(max_tokens=3))
        second = await client.ask(body=ask(max_tokens=3))
        counted = await client.ask(CHAT + "/input_tokens", ask())
        rendered = await client.ask("/apply-template", ask())
        tokens = await client.ask("/tokenize", {"content": rendered["prompt"], "add_special": True})
        text = await client.ask("/detokenize", tokens)
        assert text == {"content": "<bos>" + rendered["prompt"]}
        assert processed(server) == (6 + 1, 5, 6)
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == 6
    assert counted["input_tokens"] == len(tokens["tokens"]) == 6
    assert (first["timings"]["cache_n"], first["timings"]["prompt_n"]) == (0, 6)
    assert (second["timings"]["cache_n"], second["timings"]["prompt_n"]) == (5, 1)
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


@pytest.mark.parametrize(
    ("limits", "made"),
    [
        ({}, 16),
        ({"max_tokens": 0}, 1),
        ({"max_tokens": -1}, 16),
        ({"max_tokens": 4, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 4, "max_completion_tokens": 3, "n_predict": 2}, 2),
    ],
)
async def test_the_limit_that_counts(limits: dict[str, int], made: int) -> None:
    async with StandIn() as server, Client(server) as client:
        answer = await client.ask(body=ask(**limits))
        assert answer["usage"]["completion_tokens"] == made == server.counters.predicted
        assert answer["choices"][0]["message"]["content"] == " ".join(f"tok{at}" for at in range(made))
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_answer_that_stops_by_itself_has_one_token_more_than_it_shows() -> None:
    async with StandIn() as server, Client(server) as client:
        server.default = Reply(says=["well", " done"])
        answer = await client.ask(body=ask())
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "stop"
        cut = await client.ask(body=ask(max_tokens=2))
        assert (cut["usage"]["completion_tokens"], cut["choices"][0]["finish_reason"]) == (2, "length")


@pytest.mark.parametrize(("include", "told"), [(False, 0), (True, 2)])
async def test_every_choice_is_made_and_the_prompt_counts_once(include: bool, told: int) -> None:
    async with StandIn() as server, Client(server) as client:
        plain = await client.ask(body=ask(n=2, max_tokens=8))
        assert plain["usage"]["completion_tokens"] == 8
        assert processed(server) == (6, 0, 16)
        options = {"stream_options": {"include_usage": True}} if include else {}
        events = parse(await client.stream(body=ask("other", n=2, max_tokens=8, stream=True, **options)))
        usages = [event["usage"]["completion_tokens"] for event in events if "usage" in event]
        assert usages == [8] * told
        assert server.counters.predicted == 32


async def test_timings_per_token_tell_the_running_count() -> None:
    async with StandIn() as server, Client(server) as client:
        events = parse(await client.stream(body=ask(max_tokens=4, stream=True, timings_per_token=True)))
        assert [event["timings"]["predicted_n"] for event in events if "timings" in event] == [1, 2, 3, 4, 4]
        assert list(events[1])[-1] == "timings"


async def test_prompts_of_a_list_are_all_counted_also_beyond_the_slots() -> None:
    async with StandIn(slots=2) as server, Client(server) as client:
        answer = await client.ask("/v1/completions", {"prompt": ["a b", "c d", "e f"], "max_tokens": 2})
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == 3
        # Each has a BOS token, which the third found in a cache.
        assert processed(server) == (3 + 3 + 2, 1, 6)


async def test_parts_tools_and_calls_are_part_of_the_prompt() -> None:
    parts = [{"type": "text", "text": "look here"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    async with StandIn() as server, Client(server) as client:
        prompt = (await client.ask("/apply-template", {"messages": [{"role": "user", "content": parts}]}))["prompt"]
        assert prompt == "<|im_start|>user\nlook here <__media__><|im_end|>\n<|im_start|>assistant\n"
        plain = await client.ask(CHAT + "/input_tokens", ask())
        with_tools = await client.ask(CHAT + "/input_tokens", ask(tools=[{"type": "function"}]))
        assert with_tools["input_tokens"] > plain["input_tokens"]
        prompt = (await client.ask("/apply-template", {"messages": [called]}))["prompt"]
        assert '"arguments":"{}"' in prompt


@pytest.mark.parametrize("messages", [5, [5], [{"content": "no role"}], [{"role": "user", "content": [5]}]])
async def test_odd_messages_are_refused(messages: object) -> None:
    async with StandIn() as server, Client(server) as client:
        assert (await client.ask(body={"messages": messages}))["error"]["code"] == 400


async def test_embeddings_count_their_prompts_and_equal_texts_have_equal_vectors() -> None:
    async with StandIn() as server, Client(server) as client:
        answer = await client.ask("/v1/embeddings", {"input": ["hello there", "a", "hello there"]})
        one, other, same = (entry["embedding"] for entry in answer["data"])
        assert one == same != other
        assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
        assert processed(server) == (8, 0, 0)


async def test_more_requests_than_slots_wait_first_come_first_served() -> None:
    async with StandIn(slots=1) as server:
        gate = asyncio.Event()
        server.script.append(Reply(hold={0: gate}))
        ended: deque[int] = deque()

        async def one(number: int) -> None:
            async with Client(server) as client:
                await client.stream(body=ask(f"number {number}", stream=True, max_tokens=2))
                ended.append(number)

        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(one(number)))
            await server.wait_for(lambda number=number: server.in_flight == number + 1)
        assert (server.engine.busy, server.engine.deferred) == (1, 3)
        async with Client(server) as client:
            (slot,) = await client.ask("/slots")
            assert slot["is_processing"] is True
        gate.set()
        await asyncio.gather(*tasks)
        assert list(ended) == [0, 1, 2, 3]
        assert (server.engine.peak, server.engine.busy, server.in_flight) == (1, 0, 0)


async def test_a_request_for_more_slots_is_not_overtaken() -> None:
    async with StandIn(slots=2) as server, Client(server) as one, Client(server) as two, Client(server) as three:
        gate = asyncio.Event()
        server.script.append(Reply(hold={0: gate}))
        await one.send(CHAT, ask(stream=True))
        await server.wait_for(lambda: server.engine.busy == 1)
        await two.send(CHAT, ask(n=2, max_tokens=1))
        await server.wait_for(lambda: server.engine.deferred == 1)
        await three.send(CHAT, ask(max_tokens=1))
        await server.wait_for(lambda: server.engine.deferred == 2)
        assert server.engine.busy == 1  # a slot is free, but it is not the third's turn
        gate.set()
        assert len((await two.whole())["choices"]) == 2
        assert len((await three.whole())["choices"]) == 1


async def test_slots_given_back_at_once_all_find_takers() -> None:
    async with StandIn(slots=2) as server, Client(server) as one, Client(server) as two, Client(server) as three:
        gate, later = asyncio.Event(), asyncio.Event()
        server.script += [Reply(hold={0: gate}), Reply(hold={0: later}), Reply(hold={0: later})]
        await one.send(CHAT, ask(stream=True, n=2))
        await server.wait_for(lambda: server.engine.busy == 2)
        await two.send(CHAT, ask(stream=True))
        await three.send(CHAT, ask(stream=True))
        await server.wait_for(lambda: server.engine.deferred == 2)
        gate.set()
        await server.wait_for(lambda: server.engine.deferred == 0)
        assert server.engine.busy == 2
        later.set()


async def test_choices_share_what_their_prompt_found_in_the_cache() -> None:
    async with StandIn() as server, Client(server) as client:
        await client.ask(body=ask(max_tokens=1))
        events = parse(await client.stream(body=ask(n=2, max_tokens=2, stream=True)))
        assert [event["timings"]["cache_n"] for event in events if "timings" in event] == [5, 5]
        assert processed(server) == (7, 5, 5)


# Clients that leave.


async def test_a_client_that_leaves_a_stream_is_noticed_at_the_next_token() -> None:
    async with StandIn(slots=1, token_delay=0.01) as server, Client(server) as client:
        await client.send(CHAT, ask(stream=True, max_tokens=4000))
        await client.head()
        await client.chunk()
        await client.close()
        await server.wait_for(lambda: server.engine.busy == 0)
        assert (server.closed_early, server.in_flight) == (1, 0)
        assert server.requests[0].left
        assert 1 <= server.counters.predicted < 100


async def test_a_client_that_leaves_a_plain_answer_is_noticed_later() -> None:
    async with StandIn(slots=1, token_delay=0.01, notice=0.3) as server, Client(server) as client:
        await client.send(CHAT, ask(max_tokens=4000))
        await server.wait_for(lambda: server.engine.busy)
        await client.close()
        await server.wait_for(lambda: server.closed_early == 1)
        left_at = time.monotonic()
        assert server.engine.busy == 1
        await server.wait_for(lambda: server.engine.busy == 0)
        assert time.monotonic() - left_at >= 0.2
        assert 1 <= server.counters.predicted < 1000


async def test_a_client_that_leaves_the_queue_gives_its_place_up() -> None:
    async with StandIn(slots=1, notice=0.05) as server:
        gate = asyncio.Event()
        server.script.append(Reply(hold={0: gate}))
        async with Client(server) as first, Client(server) as third:
            await first.send(CHAT, ask(stream=True, max_tokens=2))
            await server.wait_for(lambda: server.engine.busy)
            async with Client(server) as second:
                await second.send(CHAT, ask(max_tokens=2))
                await server.wait_for(lambda: server.engine.deferred == 1)
                await third.send(CHAT, ask(max_tokens=2))
                await server.wait_for(lambda: server.engine.deferred == 2)
            await server.wait_for(lambda: server.engine.deferred == 1)
            gate.set()
            assert (await third.whole())["usage"]["completion_tokens"] == 2
        assert server.counters.predicted == 4


async def test_who_waited_behind_a_client_that_left_moves_up() -> None:
    async with StandIn(slots=2, notice=0.05) as server, Client(server) as first, Client(server) as third:
        server.script.append(Reply(hold={0: asyncio.Event()}))
        await first.send(CHAT, ask(stream=True))
        await server.wait_for(lambda: server.engine.busy == 1)
        async with Client(server) as second:
            await second.send(CHAT, ask(n=2))
            await server.wait_for(lambda: server.engine.deferred == 1)
            await third.send(CHAT, ask(max_tokens=2))
            await server.wait_for(lambda: server.engine.deferred == 2)
        assert (await third.whole())["usage"]["completion_tokens"] == 2


async def test_a_client_that_leaves_during_its_prompt_is_counted_without_tokens() -> None:
    async with StandIn(prompt_delay=60, notice=0.05) as server, Client(server) as client:
        await client.send(CHAT, ask())
        await server.wait_for(lambda: server.engine.busy)
        await client.close()
        await server.wait_for(lambda: server.engine.busy == 0)
        assert processed(server) == (0, 0, 0)


# Connections.


async def test_a_plain_answer_keeps_the_connection_and_a_stream_closes_it() -> None:
    async with StandIn() as server, Client(server) as client:
        await client.ask(body=ask())
        await client.ask(body=ask())
        assert [(request.connection, request.number) for request in server.requests] == [(1, 1), (1, 2)]
        await client.send(CHAT, ask(stream=True))
        head = await client.head()
        assert "Keep-Alive: timeout=5, max=100" in head
        assert "Connection: close" not in head
        assert (await client.reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.closed_early == 0


async def test_an_idle_connection_is_closed_after_keep_alive() -> None:
    async with StandIn(keep_alive=0.3) as server, Client(server) as client:
        await client.ask("/health")
        began = time.monotonic()
        assert await client.closed()
        assert 0.25 < time.monotonic() - began < 3
        await server.wait_for(lambda: not server.connections)


async def test_a_slow_answer_or_body_is_not_idle() -> None:
    async with StandIn(keep_alive=0.05, prompt_delay=0.3) as server, Client(server) as client:
        assert (await client.ask(body=ask(max_tokens=1)))["object"] == "chat.completion"
        assert await client.closed()
    async with StandIn(keep_alive=0.05) as server, Client(server) as client:
        client.writer.write(b"POST /tokenize HTTP/1.1\r\nContent-Length: 15\r\n\r\n")
        await asyncio.sleep(0.2)  # longer than keep_alive, which this is about
        client.writer.write(b'{"content":"a"}')
        assert len((await client.whole())["tokens"]) == 1


async def test_the_last_answer_of_a_connection_says_so() -> None:
    async with StandIn(max_answers=2) as server, Client(server) as client:
        await client.send("/health")
        assert "Keep-Alive: timeout=5, max=2" in await client.head()
        await client.reader.readexactly(15)
        await client.send("/health")
        assert "Connection: close" in await client.head()
        await client.reader.readexactly(15)
        assert await client.closed()


async def test_an_error_closes_the_connection() -> None:
    async with StandIn() as server, Client(server) as client:
        assert (await client.ask("/nothing"))["error"]["code"] == 404
        assert await client.closed()


async def test_bodies_in_chunks_and_expect_continue_are_understood() -> None:
    async with StandIn() as server, Client(server) as client:
        client.writer.write(
            b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
            b'8;x=y\r\n{"conten\r\n7\r\nt":"a"}\r\n0\r\n\r\n'
        )
        assert await client.head() == "HTTP/1.1 100 Continue\r\n\r\n"
        assert len((await client.whole())["tokens"]) == 1
        assert server.requests[0].json == {"content": "a"}


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
        b"GET /" + b"x" * 70_000,
    ],
    ids=["no-http", "length", "chunk-size", "chunk-end", "long-head"],
)
async def test_what_is_not_http_gets_400(bytes_sent: bytes) -> None:
    async with StandIn() as server, Client(server) as client:
        client.writer.write(bytes_sent)
        assert (await client.head()).startswith("HTTP/1.1 400 Bad Request\r\n")
        assert await client.closed()
        assert server.requests == []


async def test_a_slow_reader_slows_the_stream() -> None:
    async with StandIn() as server, Client(server) as client:
        big = Reply(chunks=[b"x" * 1_000_000] * 40)
        server.script.append(big)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(CHAT, ask())
        (connection,) = server.connections
        await server.wait_for(lambda: connection.transport.get_write_buffer_size() > 0)
        await asyncio.sleep(0.05)
        assert connection.transport.get_write_buffer_size() < 2_000_000
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await client.head()
        assert sum([len(await client.chunk()) for _ in big.chunks or ()]) == 40_000_000


# The server as a whole.


async def test_a_key_is_needed_for_all_but_health() -> None:
    async with StandIn(api_key="secret") as server:
        async with Client(server) as client:
            assert await client.ask("/health") == {"status": "ok"}
            assert (await client.ask("/v1/models"))["error"]["code"] == 401
        async with Client(server) as client:
            await client.send("/v1/models", head="Authorization: Bearer secret\r\n")
            assert [entry["id"] for entry in (await client.whole())["data"]] == ["m1"]


async def test_it_dies_and_comes_back_on_its_port() -> None:
    async with StandIn() as server:
        port = server.port
        async with Client(server) as client:
            server.script.append(Reply(before=asyncio.Event()))
            await client.send(CHAT, ask())
            await server.wait_for(lambda: server.in_flight)
            await server.stop()
            with pytest.raises(ConnectionResetError):
                await client.reader.read()
        assert server.in_flight == server.closed_early == 0
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(server.host, port)
        await server.start()
        async with Client(server) as client:
            assert await client.ask("/health") == {"status": "ok"}
        assert server.port == port


async def test_stopping_does_not_wait_for_answers() -> None:
    async with StandIn(prompt_delay=60, notice=60) as server, Client(server) as client:
        await client.send(CHAT, ask())
        await server.wait_for(lambda: server.engine.busy)
        await asyncio.wait_for(server.stop(), 5)
        assert server.engine.busy == 0


async def test_connections_can_be_reset() -> None:
    async with StandIn() as server, Client(server) as client:
        await client.ask("/health")
        server.kill_connections()
        with pytest.raises(ConnectionResetError):
            await client.reader.read()
        async with Client(server) as other:
            assert await other.ask("/health") == {"status": "ok"}


async def test_metrics_are_the_counters() -> None:
    async with StandIn() as server, Client(server) as client:
        await client.ask(body=ask(max_tokens=3))
        await client.ask(body=ask(max_tokens=3))
        await client.send("/metrics")
        head = await client.head()
        assert "Content-Type: text/plain" in head
        text = (await client.reader.readexactly(int(head.partition("Content-Length: ")[2].partition("\r")[0]))).decode()
        for line in ("prompt_tokens_total 7", "prompt_tokens_cached_total 5", "tokens_predicted_total 6"):
            assert f"\nllamacpp:{line}\n" in text
    async with StandIn(metrics=False) as server, Client(server) as client:
        assert (await client.ask("/metrics"))["error"]["code"] == 501


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replayed_answer_is_the_same_and_counts_the_same(stream: bool) -> None:
    async with StandIn(replay=True) as server:
        seen = []
        for _ in range(3):
            async with Client(server) as client:
                await client.send(CHAT, ask(stream=stream, max_tokens=5, stream_options={"include_usage": True}))
                await client.head()
                size = -1 if stream else 100
                seen.append(await client.reader.read(size))
        assert seen[1] == seen[0] == seen[2]
        assert processed(server) == (18, 0, 15)


async def test_a_fault_of_the_stand_in_is_not_kept_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        async with StandIn() as server, Client(server) as client:
            monkeypatch.setattr(server.engine, "step", lambda choices: 1 // 0)
            assert (await client.ask(body=ask()))["error"]["code"] == 500


async def test_wait_for_gives_up() -> None:
    async with StandIn() as server:
        with pytest.raises(TimeoutError):
            await server.wait_for(lambda: False, timeout=0.01)
        assert server.counters == Counters()
