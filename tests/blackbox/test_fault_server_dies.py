"""Servers that die or break off, at every stage of an answer: an honest end for the client, and the tokens so far."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

import pytest

from smolproxy.standin import Reply

from .clients import booked, idle
from .conftest import Site
from .harness import Answer, Daemon, environment, until


def events(body: bytes) -> list[Any]:
    """The data of a stream's events."""
    found = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [each if each == b"[DONE]" else json.loads(each) for each in found]


def tokens(body: bytes) -> int:
    """Events of a stream that carry text."""
    chunks = [each for each in events(body) if each != b"[DONE]" and "choices" in each]
    return sum(bool(each["choices"] and each["choices"][0]["delta"].get("content")) for each in chunks)


async def check_broken(site: Site, answer: Answer) -> dict[str, Any]:
    """The stream ended with an error event and nothing was invented. Return its row."""
    assert answer.status == 200
    *before, last = events(answer.body)
    assert set(last) == {"error"}
    assert last["error"]["code"] == "server_error"
    assert last["error"]["type"] == "server_error"
    assert "://" not in last["error"]["message"]
    assert b"[DONE]" not in answer.body
    assert not any(choice.get("finish_reason") for each in before for choice in each["choices"])
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["tokens_source"]) == (200, "server_error", "counted")
    assert row["completion_tokens"] == tokens(answer.body)
    assert row["prompt_tokens"] > 0
    await idle(site.daemon)
    return row


@pytest.mark.parametrize("then", ["reset", "close"])
@pytest.mark.parametrize("cut", [1, 2, 5, 12])
async def test_a_stream_is_cut(site: Site, then: Any, cut: int) -> None:
    site.server.script.append(Reply(cut=cut, then=then, delay=0.005))
    row = await check_broken(site, await site.chat(stream=True, max_tokens=20))
    assert row["completion_tokens"] == cut - 1  # the first event tells the role
    assert row["prompt_tokens"] == site.server.counters.prompt_tokens + site.server.counters.cached


async def test_a_stream_is_cut_within_an_event(site: Site) -> None:
    """Half an event is none: it does not go out, so that the error can be read."""
    whole = b'data: {"choices":[{"index":0,"delta":{"content":"one"},"finish_reason":null}]}\n\n'
    site.server.script.append(Reply(chunks=[whole, whole[:30]], then="close"))
    answer = await site.chat(stream=True)
    assert answer.body.startswith(whole + b'data: {"error":{')
    assert (await check_broken(site, answer))["completion_tokens"] == 1


@pytest.mark.parametrize("framing", ["chunked", "close"])
async def test_a_stream_ends_well_without_being_finished(site: Site, framing: Any) -> None:
    whole = b'data: {"choices":[{"index":0,"delta":{"content":"one"},"finish_reason":null}]}\n\n'
    site.server.script.append(Reply(chunks=[whole, whole, whole], framing=framing))
    assert (await check_broken(site, await site.chat(stream=True)))["completion_tokens"] == 3


@pytest.mark.parametrize("then", ["auto", "close", "reset"])
async def test_one_of_two_choices_is_not_finished(site: Site, then: Any) -> None:
    def chunk(index: int, finish: str) -> bytes:
        return b'data: {"choices":[{"index":%d,"delta":{"content":"one"},"finish_reason":%s}]}\n\n' % (
            index,
            finish.encode(),
        )

    stream = chunk(0, "null") + chunk(1, "null") + chunk(0, '"stop"')
    site.server.script.append(Reply(chunks=[stream], then=then))
    answer = await site.chat(stream=True, n=2)
    assert answer.body.startswith(stream + b'data: {"error":{')
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["outcome"], row["completion_tokens"]) == ("server_error", 3)


@pytest.mark.parametrize("usage", [True, False])
async def test_reset_after_done_harms_nobody(site: Site, usage: bool) -> None:
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    site.server.script.append(Reply(then="reset"))
    answer = await site.chat(stream=True, max_tokens=6, **fields)
    assert events(answer.body)[-1] == b"[DONE]"
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["outcome"], row["completion_tokens"], row["tokens_source"]) == ("ok", 6, "usage")


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"code":500,"message":"out of memory","type":"server_error"}}\n\n',
        b'error: {"code":500,"message":"out of memory","type":"server_error"}\n\n',
        b'event: error\ndata: {"code":500,"message":"out of memory"}\n\n',
    ],
    ids=["data", "older", "named"],
)
@pytest.mark.parametrize("done", [b"", b"data: [DONE]\n\n"], ids=["bare", "done"])
async def test_an_error_within_a_stream_is_seen(site: Site, event: bytes, done: bytes) -> None:
    whole = b'data: {"choices":[{"index":0,"delta":{"content":"one"},"finish_reason":null}]}\n\n'
    site.server.script.append(Reply(chunks=[whole, event, *([done] if done else [])]))
    answer = await site.chat(stream=True)
    assert answer.status == 200
    assert answer.body == whole + event + done  # the server's own words, nothing added
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["outcome"], row["completion_tokens"]) == ("server_error", 1)


@pytest.mark.parametrize("status", [400, 422, 429, 500, 501, 503])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_an_error_to_a_stream_stays_an_error(site: Site, status: int, kind: str) -> None:
    body = b'{"error":{"code":%d,"message":"not so","type":"invalid_request_error"}}' % status
    site.server.script.append(Reply(status=status, body=body, headers={"Content-Type": kind}))
    answer = await site.chat(stream=True)
    assert answer.status == status
    if kind == "application/json":
        assert answer.body == body
        assert answer.headers["Content-Type"] == kind
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["stream"]) == (status, "server_error", 1)
    assert row["completion_tokens"] == 0


async def test_loading_is_smolproxys_503_also_for_a_stream(site: Site) -> None:
    site.server.loading = True
    answer = await site.chat(stream=True)
    assert (answer.status, answer.code) == (503, "no_server_available")
    assert int(answer.headers["Retry-After"]) > 0
    assert not site.daemon.rows_of(answer.headers["x-request-id"])


@pytest.mark.parametrize("then", ["reset", "close"])
@pytest.mark.parametrize("cut", [0, 1, 100])
async def test_a_plain_answer_is_cut(site: Site, then: Any, cut: int) -> None:
    site.server.script.append(Reply(cut=cut, then=then))
    answer = await site.chat(max_tokens=20)
    assert (answer.status, answer.code) == (502, "server_error")
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["tokens_source"]) == (502, "server_error", "counted")
    assert row["prompt_tokens"] > 0
    await idle(site.daemon)


async def test_a_long_plain_answer_is_cut(site: Site) -> None:
    """What has begun as a 200 breaks off for the client as well: it cannot be taken for a whole one."""
    text = b'{"data":"' + b"x" * 2_000_000
    headers = {"Content-Type": "application/json"}
    site.server.script.append(Reply(chunks=[text[:1_000_000], 0.05, text[1_000_000:]], then="reset", headers=headers))
    with pytest.raises(Exception, match=r"(?i)payload|transfer|not completed|closed|reset|eof"):
        await site.chat()
    rows = await until(lambda: site.daemon.rows("SELECT * FROM usage WHERE real_model_name = ?", [site.model]))
    assert [(row["status"], row["outcome"]) for row in rows] == [(200, "server_error")]
    await idle(site.daemon)


async def test_the_process_is_killed(daemon: Daemon) -> None:
    """SIGKILL of a server in the middle of streams and of plain answers."""
    command = [sys.executable, "-m", "smolproxy.standin", "--port", "0", "--model", "killed"]
    server = await asyncio.create_subprocess_exec(
        *command, "--token-delay", "0.02", "--slots", "16", stdout=asyncio.subprocess.PIPE, env=environment()
    )
    try:
        assert server.stdout is not None
        url = (await server.stdout.readline()).decode().split(" on ")[1].split()[0]
        await daemon.admin("POST", "/servers", {"name": "killed", "url": url, "models": ["killed"]})
        key = await daemon.new_key()
        body = {"model": "killed", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1000}
        begun = asyncio.Semaphore(0)

        async def stream() -> tuple[str, bytes]:
            asking = daemon.open("POST", "/v1/chat/completions", key=key, json={**body, "stream": True})
            async with asking as response:
                data = await response.content.readany()
                begun.release()
                return response.headers["x-request-id"], data + await response.read()

        streams = [asyncio.ensure_future(stream()) for _ in range(8)]
        plain = [
            asyncio.ensure_future(daemon.ask("POST", "/v1/chat/completions", key=key, json=body)) for _ in range(4)
        ]
        for _ in streams:
            await begun.acquire()
        server.send_signal(signal.SIGKILL)
        for request_id, data in await asyncio.gather(*streams):
            assert events(data)[-1]["error"]["code"] == "server_error"
            row = await booked(daemon, request_id)
            assert (row["outcome"], row["completion_tokens"]) == ("server_error", tokens(data))
        for answer in await asyncio.gather(*plain):
            assert answer.status == 502
            assert answer.code == "server_unreachable"
            assert (await booked(daemon, answer.headers["x-request-id"]))["outcome"] == "server_unreachable"
        await idle(daemon)
        refused = await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)
        assert (refused.status, refused.code) == (502, "server_unreachable")
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()
