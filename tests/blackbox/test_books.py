"""The books: when a row is in the file, what makes none, what outlives a purge."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable

from smolproxy.standin import MISSING, Reply, StandIn

from .conftest import Site
from .harness import Daemon, until


async def test_a_row_is_in_the_file_when_a_plain_answer_has_ended(site: Site) -> None:
    for _ in range(20):
        async with site.open(stream=False, max_tokens=1) as response:
            await response.read()
            rows = site.daemon.rows_of(response.headers["x-request-id"])
        assert [row["outcome"] for row in rows] == ["ok"]


async def test_a_row_is_in_the_file_when_a_stream_says_done(site: Site) -> None:
    for _ in range(20):
        async with site.open(max_tokens=2) as response:
            received = b""
            while b"data: [DONE]" not in received:
                piece = await response.content.readany()
                assert piece
                received += piece
            rows = site.daemon.rows_of(response.headers["x-request-id"])
        assert [row["outcome"] for row in rows] == ["ok"]


async def test_a_row_is_in_the_file_when_an_error_has_been_answered(site: Site) -> None:
    await site.server.stop()
    answer = await site.chat()
    assert answer.status == 502
    assert len(site.daemon.rows_of(answer.headers["x-request-id"])) == 1


async def test_what_is_refused_at_the_door_makes_no_row(daemon: Daemon, site: Site) -> None:
    before = len(daemon.rows())
    poor = await daemon.new_key("poor", rpm_limit=0)
    chat, model = "/v1/chat/completions", site.model
    asked = [
        (400, {"key": site.key, "data": b"{"}),
        (400, {"key": site.key, "json": {"model": 5}}),
        (400, {"key": site.key, "json": site.body(id_slot=1)}),
        (401, {"json": site.body()}),
        (401, {"key": "wrong", "json": site.body()}),
        (404, {"key": site.key, "json": site.body(model="none")}),
        (415, {"key": site.key, "data": b"x", "headers": {"Content-Encoding": "x"}}),
        (429, {"key": poor, "json": site.body()}),
    ]
    for status, options in asked:
        answer = await daemon.ask("POST", chat, **options)
        assert answer.status == status, answer
        assert daemon.logged("request", request_id=answer.headers["x-request-id"])[0]["status"] == status
    await daemon.admin("PATCH", f"/servers/{site.server_id}", {"active": False})
    assert (await site.chat()).status == 503
    assert len(daemon.rows()) == before
    assert not daemon.rows("SELECT * FROM usage WHERE model_name = ?", [model])


async def test_the_server_says_nothing_of_tokens_and_they_are_counted(site: Site) -> None:
    site.server.script.append(Reply(usage=MISSING, timings=False, says=["one", " two", " three"]))
    answer = await site.chat()
    assert "usage" not in answer.json
    row = site.daemon.row(answer.headers["x-request-id"])
    assert (row["outcome"], row["tokens_source"]) == ("ok", "counted")
    assert row["prompt_tokens"] == site.server.counters.prompt_tokens
    assert row["completion_tokens"] - 3 in (0, 1)  # a token that ends the answer is one too


async def test_no_prompt_and_no_answer_is_stored(site: Site) -> None:
    body = site.body(messages=[{"role": "user", "content": "a-secret-canary"}])
    site.server.script.append(Reply(says=["an-answers-canary"]))
    answer = await site.daemon.ask("POST", "/v1/chat/completions", key=site.key, json=body)
    assert "an-answers-canary" in answer.text
    stored = b"".join(path.read_bytes() for path in site.daemon.folder.iterdir())
    assert b"canary" not in stored
    assert site.key.encode() not in stored
    for path in site.daemon.folder.glob("proxy.db*"):
        assert path.stat().st_mode & 0o077 == 0, path


async def test_old_rows_are_purged_and_their_totals_stay(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    async with StandIn(["m"]) as server:
        await daemon.add_server(server)
        key = await daemon.new_key()
        for _ in range(3):
            body = {"model": "m", "max_tokens": 2, "messages": []}
            assert (await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)).status == 200
    before = await daemon.admin("GET", "/usage")
    real = await daemon.admin("GET", "/usage/summary/real")
    assert daemon.stop() == 0
    age(daemon, days=10)

    daemon.configure({"settings": {"retention_days": 30}})
    daemon.start()
    after = await daemon.admin("GET", "/usage")
    assert len(after["logs"]) == 3
    assert daemon.stop() == 0

    daemon.configure({"settings": {"retention_days": 7}})
    daemon.start()
    (purged,) = await until(lambda: daemon.logged("usage rows purged"))
    assert purged["rows"] == 3
    assert not daemon.rows()
    after = await daemon.admin("GET", "/usage")
    assert after["logs"] == []
    assert after["summary"] == before["summary"]
    assert await daemon.admin("GET", "/usage/summary/real") == real


def age(daemon: Daemon, *, days: int) -> None:
    """Make all rows older; their totals stay in the hour in which they were written."""
    with contextlib.closing(sqlite3.connect(daemon.db)) as connection:
        connection.execute("UPDATE usage SET created_at = created_at - ?", [days * 86_400_000])
        connection.commit()


async def test_usage_after_kill_9(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    async with StandIn(["m"]) as server:
        await daemon.add_server(server)
        key = await daemon.new_key()
        seen = []
        for stream in (False, True, True):
            body = {"model": "m", "max_tokens": 2, "messages": [], "stream": stream}
            answer = await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)
            seen.append(answer.headers["x-request-id"])
        daemon.kill()
        assert [row["request_id"] for row in daemon.rows()] == seen
        started = time.monotonic()
        daemon.start()
        assert time.monotonic() - started < 20
        assert [row["request_id"] for row in (await daemon.admin("GET", "/usage"))["logs"]] == seen[::-1]
        assert (await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)).status == 200
