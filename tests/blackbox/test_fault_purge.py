"""Fault: many usage rows grow too old at once, and readers that stay keep the write-ahead log from starting anew."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .harness import Daemon, until
from .load import Load, chat, ids, loaded, standin_process, watched_stream

DAY = 86_400_000
MIB = 1024 * 1024
PURGED = "usage rows purged"

OLD_ROWS = """
    WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)
    INSERT INTO usage (created_at, request_id, key_id, server_id, model_name, real_model_name, endpoint, stream, status,
                       outcome, prompt_tokens, cached_tokens, completion_tokens, tokens_source, duration_ms)
    SELECT :since + n % :span, hex(randomblob(12)), n % 20, n % 3, 'm' || n % 5, 'm' || n % 5, '/v1/chat/completions',
           1, 200, 'ok', 100, 20, 50, 'usage', 1.0
    FROM numbers
"""


def make_old_rows(daemon: Daemon, count: int) -> None:
    """Rows of three days, a month ago."""
    since = int(time.time() * 1000) - 33 * DAY
    with contextlib.closing(sqlite3.connect(daemon.db, isolation_level=None)) as connection:
        connection.execute(OLD_ROWS, {"count": count, "since": since, "span": 3 * DAY})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [30_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
async def test_old_rows_are_purged_without_a_pause_and_the_file_shrinks(
    make_daemon: Callable[..., Daemon], count: int
) -> None:
    daemon = make_daemon()
    load = Load()
    with standin_process() as url:
        key = await loaded(daemon, url)
        await load.hammer(daemon.port, chat(key, daemon.port), most=20)
        assert daemon.stop() == 0
        make_old_rows(daemon, count)
        totals = daemon.rows("SELECT * FROM usage_daily ORDER BY day, key_id, server_id, model_name")
        before = daemon.db.stat().st_size
        assert before > count * 100

        # The daemon purges when it starts; the stream begins at once then.
        daemon.configure({"settings": {"retention_days": 7}})
        daemon.start()
        log = Path(f"{daemon.db}-wal")
        longest = 0
        async with watched_stream(daemon, key) as watched:
            asking = asyncio.create_task(load.at_rate(daemon.port, 20, 2, chat(key, daemon.port)))
            while not daemon.logged(PURGED):
                longest = max(longest, log.stat().st_size)
                await asyncio.sleep(0.05)
            await asking
        assert daemon.logged(PURGED)[0]["rows"] == count
        print(f"{count} rows purged, longest gap {max(watched.gaps):.3f} s, log {longest / MIB:.1f} MiB")
        assert max(watched.gaps) < 0.5
        assert longest < 64 * MIB
        assert not load.others
        assert set(load.ended) <= set(ids(daemon))
        assert len(daemon.rows()) == len(load.ended) + 1  # and the stream
        kept = daemon.rows("SELECT * FROM usage_daily ORDER BY day, key_id, server_id, model_name")
        assert all(row in kept for row in totals[:50])
        assert sum(row["request_count"] for row in kept) == count + len(load.ended) + 1
        assert daemon.stop() == 0
    assert daemon.db.stat().st_size < before / 5
    assert daemon.rows("PRAGMA integrity_check") == [{"integrity_check": "ok"}]


async def test_readers_that_never_pause_do_not_let_the_log_grow(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings={"access_log": False})
    load = Load()
    with standin_process() as url:
        key = await loaded(daemon, url)
        make_old_rows(daemon, 20_000)
        log = Path(f"{daemon.db}-wal")
        longest = 0
        reports = 0
        done = False

        async def report() -> None:
            nonlocal reports
            while not done:
                await daemon.admin("GET", "/usage?limit=5")
                reports += 1

        async def command() -> None:
            while not done:
                await daemon.cli("usage", "--json")

        with contextlib.closing(sqlite3.connect(daemon.db)) as open_reader:
            open_reader.execute("SELECT count(*) FROM usage").fetchall()
            reading = [asyncio.create_task(each) for each in (report(), report(), command())]
            loading = asyncio.create_task(load.hammer(daemon.port, chat(key, daemon.port), lines=4, most=1500))
            while not loading.done():
                longest = max(longest, log.stat().st_size)
                await asyncio.sleep(0.02)
            done = True
            await asyncio.gather(loading, *reading)
        assert len(load.ended) == 1500
        assert reports > 4
        print(f"log {longest / MIB:.1f} MiB, {reports} reports")
        assert longest < 16 * MIB


async def test_a_transaction_that_another_program_keeps_open_is_told_and_loses_nothing(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(settings={"access_log": False})
    load = Load()
    with standin_process() as url:
        key = await loaded(daemon, url)
        make_old_rows(daemon, 20_000)
        log = Path(f"{daemon.db}-wal")
        with contextlib.closing(sqlite3.connect(daemon.db, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM usage").fetchall()
            with contextlib.closing(sqlite3.connect(daemon.db, isolation_level=None)) as writer:
                while log.stat().st_size <= 64 * MIB:  # who writes so much is not the question here
                    writer.execute("UPDATE usage SET duration_ms = duration_ms + 1")
            started = time.monotonic()
            await load.hammer(daemon.port, chat(key, daemon.port), most=100)
            assert time.monotonic() - started < 5  # nobody waits for the log to be short again
            await until(lambda: daemon.logged("the write-ahead log is long: does another program keep reading?"))
            reader.execute("ROLLBACK")
        await load.hammer(daemon.port, chat(key, daemon.port), most=100)
        assert sorted(load.ended) == sorted(ids(daemon)[-200:])
        await load.hammer(daemon.port, chat(key, daemon.port), most=10)
        assert log.stat().st_size < 8 * MIB
