"""Fault: another process holds the write lock of the database."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

from smolproxy.standin import Reply, StandIn

from .harness import Daemon, until
from .load import Load, chat, ids, loaded, standin_process, watched_stream

LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
connection.execute("COMMIT")
"""


@contextlib.asynccontextmanager
async def write_lock(daemon: Daemon) -> AsyncIterator[None]:
    """Another process holds the lock meanwhile."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOCK, str(daemon.db), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"locked\n"
    try:
        yield
    finally:
        await process.communicate(b"")
    assert process.returncode == 0


async def test_requests_streams_and_commands_go_on_while_the_database_is_locked(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon()
    with standin_process() as url:
        key = await loaded(daemon, url)
        load = Load()
        names: list[str] = []

        async def commands() -> None:
            while True:
                name = f"by-command-{len(names)}"
                await daemon.cli("keys", "create", name)
                names.append(name)

        async with watched_stream(daemon, key) as watched:
            requests = [chat(key, daemon.port), chat(key, daemon.port, stream=True)]
            loading = asyncio.create_task(load.at_rate(daemon.port, 100, 6, *requests))
            writing = asyncio.create_task(commands())
            await asyncio.sleep(0.5)
            async with write_lock(daemon):
                await asyncio.sleep(4)
            await loading
            writing.cancel()
            await asyncio.wait([writing])
        await until(lambda: daemon.logged("usage rows are written again"))

        assert (len(load.ended), load.others, load.broken) == (600, [], 0)
        booked = ids(daemon)
        assert len(booked) == len(set(booked))
        assert set(load.ended) <= set(booked)
        kept = {row["name"] for row in daemon.rows("SELECT name FROM keys")}
        assert names
        assert set(names) <= kept
        print(f"longest gap of the stream {max(watched.gaps):.3f} s")
        assert max(watched.gaps) < 0.5
        assert daemon.logged("usage rows wait in memory: the database cannot be written")
        assert (await daemon.ask("GET", "/health")).status == 200


async def test_a_locked_database_is_told_by_health_and_by_a_change_that_cannot_be_made(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon()
    with standin_process() as url:
        key = await loaded(daemon, url)
        load = Load()
        async with write_lock(daemon):
            end = time.monotonic() + 10
            while not daemon.logged("usage rows wait in memory: the database cannot be written"):
                assert time.monotonic() < end
                await load.hammer(daemon.port, chat(key, daemon.port), lines=1, most=1)
            health = await daemon.ask("GET", "/health")
            assert (health.status, health.json["status"]) == (503, "error")
            run = await daemon.cli("keys", "create", "ann", code=1)
            assert "locked" in run.err
            assert len(run.err.splitlines()) == 1
        await until(lambda: daemon.logged("usage rows are written again"))
        assert ids(daemon) == load.ended
        assert (await daemon.ask("GET", "/health")).status == 200


async def test_fifty_streams_that_end_at_once_make_fifty_rows(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    async with StandIn(["m"], slots=50) as server:
        await daemon.add_server(server)
        key = await daemon.new_key()
        go = asyncio.Event()
        server.default = Reply(says=["a"] * 5, hold={3: go})
        load = Load()
        request = chat(key, daemon.port, stream=True, model="m")
        asking = asyncio.create_task(load.hammer(daemon.port, request, lines=50, most=50))
        await server.wait_for(lambda: server.in_flight == 50, 20)
        go.set()
        await asking
        assert len(load.ended) == 50
        assert sorted(ids(daemon)) == sorted(load.ended)
        assert {row["outcome"] for row in daemon.rows()} == {"ok"}
