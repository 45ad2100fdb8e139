"""What comes back, byte for byte, and what the books say of it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import aiohttp
import pytest

from smolproxy.standin import Reply, StandIn

from .conftest import Site
from .harness import Answer, Daemon, until

SETTINGS = {"connect_timeout": 0.5, "first_byte_timeout": 1, "idle_timeout": 1, "loading_timeout": 1}
SERVER_ERROR = {
    "error": {"code": 400, "message": "the request exceeds the context", "type": "exceed_context_size_error"}
}


def counts(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]


def told(usage: dict[str, Any]) -> tuple[int, int, int]:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return usage["prompt_tokens"], cached, usage.get("completion_tokens", 0)


async def ask_server(server: StandIn, path: str, body: dict[str, Any]) -> Answer:
    """Ask a server itself."""
    async with aiohttp.ClientSession() as session, session.post(server.url + path, json=body) as response:
        return Answer(response.status, response.headers, await response.read())


def same(answer: bytes) -> bytes:
    """An answer without what differs from one to the next: ids, times and speeds."""
    volatile = ("id", "created", "prompt_ms", "predicted_ms", "prompt_per_token_ms", "predicted_per_token_ms")

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            keep = {name: clean(inner) for name, inner in value.items() if name not in volatile}
            return {name: inner for name, inner in keep.items() if not name.endswith("per_second")}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    lines = [
        line if not line.startswith(b"{") else json.dumps(clean(json.loads(line))).encode()
        for line in (part.removeprefix(b"data: ") for part in answer.split(b"\n"))
    ]
    return b"\n".join(lines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 7}),
        ("/v1/completions", {"prompt": "once upon a time", "max_tokens": 5}),
    ],
)
async def test_a_generated_answer_is_the_servers_and_is_booked(
    site: Site, path: str, fields: dict[str, Any], stream: bool
) -> None:
    body = {"model": site.model, "stream": stream, "temperature": 0, **fields}
    async with StandIn([site.model]) as twin:
        direct = await ask_server(twin, path, body)
    answer = await site.daemon.ask("POST", path, key=site.key, json=body)
    assert answer.status == direct.status == 200
    assert answer.headers["Content-Type"] == direct.headers["Content-Type"]
    assert same(answer.body) == same(direct.body)
    row = site.daemon.row(answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["stream"], row["endpoint"]) == (200, "ok", stream, path)
    assert row["tokens_source"] == "usage"
    made = site.server.counters
    assert row["prompt_tokens"] == made.prompt_tokens + row["cached_tokens"]
    assert row["completion_tokens"] == fields["max_tokens"]
    assert (row["model_name"], row["real_model_name"], row["server_id"]) == (site.model, site.model, site.server_id)
    assert (row["ttft_ms"] is not None) == stream
    assert 0 < row["duration_ms"] < 10_000
    assert abs(row["created_at"] / 1000 - time.time()) < 60


async def test_an_embedding_is_booked(site: Site) -> None:
    answer = await site.daemon.ask(
        "POST", "/v1/embeddings", key=site.key, json={"model": site.model, "input": ["one two", "three"]}
    )
    assert answer.status == 200
    assert len(answer.json["data"]) == 2
    row = site.daemon.row(answer.headers["x-request-id"])
    assert (row["outcome"], row["tokens_source"], row["endpoint"]) == ("ok", "usage", "/v1/embeddings")
    assert counts(row) == (answer.json["usage"]["prompt_tokens"], 0, 0)


async def test_the_second_time_a_prompt_is_cached(site: Site) -> None:
    first, second = await site.chat(max_tokens=3), await site.chat(max_tokens=3)
    rows = [site.daemon.row(answer.headers["x-request-id"]) for answer in (first, second)]
    assert [counts(row) for row in rows] == [told(answer.json["usage"]) for answer in (first, second)]
    assert rows[0]["cached_tokens"] == 0 < rows[1]["cached_tokens"]


async def test_the_request_is_byte_for_byte_the_users(site: Site) -> None:
    body = (
        f'\r\n {{ "zeta":1e2,"messages" :[{{"role":"user","content":"\\u00e4\t"}}], "model"  :  "{site.model}",'
        '"unknown":{"a":[1,2.50]}, "stream":false } \n'
    ).replace("\t", "\\t")
    answer = await site.daemon.ask("POST", "/v1/chat/completions", key=site.key, data=body.encode())
    assert answer.status == 200
    assert site.generating()[0].body == body.encode()


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_a_servers_own_error_passes_through(site: Site, status: int) -> None:
    error = {"error": {**SERVER_ERROR, "code": status}}
    for stream in (False, True):
        site.server.script.append(Reply(status=status, body=error))
        answer = await site.chat(stream=stream)
        assert answer.status == status
        assert answer.json == error
        row = site.daemon.row(answer.headers["x-request-id"])
        assert (row["status"], row["outcome"], row["tokens_source"]) == (status, "server_error", "none")
        assert counts(row) == (0, 0, 0)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(body="<html>Bad gateway</html>", headers={"Content-Type": "text/html"}), "200"),
        (Reply(status=502, body="<html>Bad gateway</html>", headers={"Content-Type": "text/html"}), "502"),
        (Reply(body=b""), "200"),
        (Reply(body=b"", headers={"Content-Type": "text/plain"}), "200"),
        (Reply(status=404, body=b"File Not Found", headers={"Content-Type": "text/plain"}), "404"),
    ],
    ids=["page", "error page", "empty", "empty text", "text"],
)
async def test_what_is_no_answer_becomes_502_with_the_servers_status(site: Site, reply: Reply, said: str) -> None:
    site.server.script.append(reply)
    answer = await site.chat()
    assert (answer.status, answer.code) == (502, "server_error")
    assert said in answer.message
    row = site.daemon.row(answer.headers["x-request-id"])
    assert (row["status"], row["outcome"]) == (502, "server_error")


async def test_media_pass_through(site: Site) -> None:
    site.server.script.append(Reply(body=b"\x00\xffRIFF", headers={"Content-Type": "audio/wav"}))
    answer = await site.chat()
    assert (answer.status, answer.body, answer.headers["Content-Type"]) == (200, b"\x00\xffRIFF", "audio/wav")


async def unreachable(daemon: Daemon, model: str) -> Answer:
    key = await daemon.new_key()
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    return await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)


async def test_a_refused_connection(daemon: Daemon) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        added = await daemon.admin("POST", "/servers", {"name": "nobody", "url": url, "models": ["gone"]})
        answer = await unreachable(daemon, "gone")
    assert (answer.status, answer.code) == (502, "server_unreachable")
    assert "127.0.0.1" not in answer.text
    row = daemon.row(answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["tokens_source"]) == (502, "server_unreachable", "none")
    assert row["server_id"] == added["id"]
    (server,) = [each for each in await daemon.admin("GET", "/servers") if each["name"] == "nobody"]
    assert server["state"] == "down"
    assert server["last_error"].startswith("cannot connect")
    await daemon.admin("DELETE", f"/servers/{added['id']}")


async def test_a_server_that_cannot_be_found(daemon: Daemon) -> None:
    url = "http://no-such-host.invalid:8080"
    added = await daemon.admin("POST", "/servers", {"name": "nowhere", "url": url, "models": ["nowhere"]})
    answer = await unreachable(daemon, "nowhere")
    assert (answer.status, answer.code) in ((502, "server_unreachable"), (504, "server_timeout"))
    assert "invalid" not in answer.text
    await daemon.admin("DELETE", f"/servers/{added['id']}")


async def test_a_reset_before_the_answer(site: Site) -> None:
    site.server.default = Reply(no_answer=True)
    answer = await site.chat()
    assert (answer.status, answer.code) == (502, "server_unreachable")
    # It may have run. Sent again only if its connection had been used before: that one may have been dead already.
    assert 1 <= len(site.generating()) <= 2
    assert site.daemon.row(answer.headers["x-request-id"])["outcome"] == "server_unreachable"


async def test_an_answer_that_is_not_http(daemon: Daemon) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        added = await daemon.admin("POST", "/servers", {"name": "ssh", "url": url, "models": ["ssh"]})
        answer = await unreachable(daemon, "ssh")
        assert (answer.status, answer.code) == (502, "server_error")
        assert "HTTP" in answer.message
        await daemon.admin("DELETE", f"/servers/{added['id']}")


async def test_a_server_that_refuses_smolproxys_key(daemon: Daemon) -> None:
    async with StandIn(["locked"], api_key="right") as server:
        server_id = await daemon.add_server(server, "locked", api_key="wrong")
        answer = await unreachable(daemon, "locked")
        assert (answer.status, answer.code) == (502, "server_error")
        assert "wrong" not in answer.text
        row = daemon.row(answer.headers["x-request-id"])
        assert (row["status"], row["outcome"], row["tokens_source"]) == (502, "server_error", "none")
        (shown,) = [each for each in await daemon.admin("GET", "/servers") if each["id"] == server_id]
        assert shown["state"] == "wrong_key"
        await daemon.admin("PATCH", f"/servers/{server_id}", {"api_key": "right"})
        assert (await unreachable(daemon, "locked")).status == 200
        await daemon.admin("DELETE", f"/servers/{server_id}")


async def test_a_request_waits_for_a_model_that_loads(site: Site) -> None:
    site.server.loading = True
    await until_state(site, "loading")
    asked = asyncio.ensure_future(site.chat())
    await site.server.wait_for(lambda: len(site.generating()) == 1)
    site.server.loading = False
    answer = await asked
    assert answer.status == 200
    assert site.daemon.row(answer.headers["x-request-id"])["outcome"] == "ok"


async def test_a_model_that_loads_for_too_long(site: Site) -> None:
    site.server.loading = True
    started = time.monotonic()
    answer = await site.chat()
    assert 0.9 < time.monotonic() - started < 10
    assert (answer.status, answer.code) == (503, "no_server_available")
    assert int(answer.headers["Retry-After"]) > 0
    assert "load" in answer.message
    assert site.daemon.rows_of(answer.headers["x-request-id"]) == []


async def until_state(site: Site, state: str) -> None:
    end = time.monotonic() + 10
    while True:
        shown = {each["id"]: each["state"] for each in await site.daemon.admin("GET", "/servers")}
        if shown[site.server_id] == state:
            return
        assert time.monotonic() < end, shown
        await asyncio.sleep(0.02)


async def test_a_disabled_servers_model(site: Site) -> None:
    await site.daemon.admin("PATCH", f"/servers/{site.server_id}", {"active": False})
    answer = await site.chat()
    assert (answer.status, answer.code) == (503, "no_server_available")
    assert int(answer.headers["Retry-After"]) > 0
    assert site.daemon.rows_of(answer.headers["x-request-id"]) == []
    assert not site.generating()


async def test_timeouts_are_told_by_their_names(site: Site) -> None:
    site.server.script.append(Reply(before=30.0))
    answer = await site.chat()
    assert (answer.status, answer.code) == (504, "server_timeout")
    assert "first_byte_timeout (1 s)" in answer.message
    row = site.daemon.row(answer.headers["x-request-id"])
    assert (row["status"], row["outcome"]) == (504, "timeout")

    site.server.script.append(Reply(cut=20, then="hang"))
    answer = await site.chat()
    assert (answer.status, answer.code) == (504, "server_timeout")
    assert "idle_timeout (1 s)" in answer.message
    assert site.daemon.row(answer.headers["x-request-id"])["outcome"] == "timeout"
    await site.server.wait_for(lambda: site.server.in_flight == 0)


async def test_a_server_to_which_no_connection_comes_about(daemon: Daemon) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        address = deaf.getsockname()
        # a full backlog lets further connections wait
        filling = [socket.socket() for _ in range(4)]
        for each in filling:
            each.setblocking(False)
            each.connect_ex(address)
        url = f"http://127.0.0.1:{address[1]}"
        added = await daemon.admin("POST", "/servers", {"name": "deaf", "url": url, "models": ["deaf"]})
        answer = await unreachable(daemon, "deaf")
        assert (answer.status, answer.code) == (504, "server_timeout")
        assert "connect_timeout (0.5 s)" in answer.message
        assert daemon.row(answer.headers["x-request-id"])["outcome"] == "timeout"
        await daemon.admin("DELETE", f"/servers/{added['id']}")
        for each in filling:
            each.close()


async def test_a_fault_in_a_stream_is_one_more_event_and_no_done(site: Site) -> None:
    cases = [
        (Reply(cut=3, then="reset"), "server_error", "server_error"),
        (Reply(cut=3, then="close"), "server_error", "server_error"),
        (Reply(cut=3, then="hang"), "server_timeout", "timeout"),
    ]
    for reply, code, outcome in cases:
        site.server.script.append(reply)
        answer = await site.chat(stream=True, max_tokens=8)
        assert answer.status == 200
        events = [event for event in answer.body.split(b"\n\n") if event]
        assert b"[DONE]" not in answer.body
        error = json.loads(events[-1].removeprefix(b"data: "))["error"]
        assert error["code"] == code
        assert set(error) == {"message", "type", "code", "param"}
        row = site.daemon.row(answer.headers["x-request-id"])
        assert (row["status"], row["outcome"], row["tokens_source"]) == (200, outcome, "counted")
        assert row["completion_tokens"] > 0 or reply.then == "reset"  # which may overtake what was sent before


async def test_a_server_that_is_smolproxy_itself(daemon: Daemon) -> None:
    key = await daemon.new_key("loop")
    body = {"name": "loop", "url": str(daemon.url("")), "api_key": key, "models": ["loop"]}
    added = await daemon.admin("POST", "/servers", body)
    answer = await daemon.ask("POST", "/v1/chat/completions", key=key, json={"model": "loop", "messages": []})
    assert (answer.status, answer.code) == (508, "loop_detected")
    await daemon.admin("DELETE", f"/servers/{added['id']}")
    rows = daemon.rows("SELECT * FROM usage WHERE model_name = 'loop'")
    assert len(rows) == 1


async def test_a_dead_connection_of_the_pool_is_no_failure(site: Site) -> None:
    for _ in range(3):
        assert (await site.chat()).status == 200
        site.server.kill_connections()
        await site.server.wait_for(lambda: not site.server.connections)
    assert (await site.chat()).status == 200


async def test_every_answer_is_in_the_access_log_with_its_usage(site: Site) -> None:
    answer = await site.chat(stream=True, max_tokens=4)
    request_id = answer.headers["x-request-id"]
    (record,) = await until(lambda: site.daemon.logged("request", request_id=request_id))
    row = site.daemon.row(request_id)
    assert record["path"] == "/v1/chat/completions"
    assert (record["status"], record["outcome"], record["model"]) == (200, "ok", site.model)
    assert (record["prompt"], record["cached"], record["completion"]) == counts(row)
    assert record["key_id"] == row["key_id"]
    assert record["ms"] >= 0
    assert "story" not in site.daemon.log_text()
    assert site.key not in site.daemon.log_text()
