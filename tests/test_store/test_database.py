"""The connection: its turns, its transactions, its thread, and the only errors that come out of it."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from smolproxy.errors import Conflict, DatabaseError, Invalid
from smolproxy.store import aliases, connection, keys, servers, usage
from smolproxy.store.database import Database
from test_store.rows import ROW

INSERT = "INSERT INTO aliases VALUES (?, ?)"


async def names(db: Database) -> list[str]:
    return [alias.alias_name for alias in await aliases.list_all(db)]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_data_version_sees_what_another_connection_changed(db: Database, path: Path) -> None:
    other = await Database.open(path)
    before = await db.data_version()
    await keys.create(db)
    assert await db.data_version() == before  # its own changes do not count
    await keys.create(other)
    after = await db.data_version()
    assert after != before
    assert await db.data_version() == after
    assert len(await keys.list_all(db)) == 2
    await other.close()


async def test_revisions_go_up_with_every_change_of_keys_or_routes_and_with_nothing_else(db: Database) -> None:
    async def changed(change: Awaitable[object]) -> tuple[bool, bool]:
        before = await db.revisions()
        await change
        after = await db.revisions()
        assert all(new >= old for new, old in zip(after, before, strict=True))
        return after[0] > before[0], after[1] > before[1]

    for change in (
        keys.create(db),
        keys.set_active(db, 1, False),
        keys.set_limits(db, 1, {"rpm_limit": 1}),
        keys.rotate(db, 1),
        keys.delete(db, 1),
    ):
        assert await changed(change) == (True, False)
    for change in (
        servers.add(db, "a", "http://a"),
        servers.add(db, "b", "http://b", models=["m"]),
        servers.update(db, 1, {"active": False}),
        servers.add_model(db, 1, "n"),
        servers.add_model(db, 1, "m", reassign=True),
        servers.remove_model(db, 1, "n"),
        aliases.create(db, "fast", "m"),
        aliases.set_alias(db, "fast", "n"),
        aliases.remove(db, "fast"),
        servers.remove(db, 1),
    ):
        assert await changed(change) == (False, True)
    for other in (
        usage.insert(db, [ROW]),
        usage.purge(db, 2**50),
        keys.list_all(db),
        usage.summary(db, usage.UsageFilter()),
    ):
        assert await changed(other) == (False, False)


async def test_a_change_that_fails_does_not_count(db: Database) -> None:
    await servers.add(db, "a", "http://a")
    before = await db.revisions()
    with pytest.raises(Conflict):
        await servers.add(db, "a", "http://b")
    assert await db.revisions() == before


async def test_a_transaction_is_all_or_nothing(db: Database, path: Path) -> None:
    other = await Database.open(path)
    async with db.transaction():
        await db.fetch_all(INSERT, ("a", "m"))
        await db.execute_many(INSERT, [("b", "m"), ("c", "m")])
        assert await names(db) == ["a", "b", "c"]
        assert await names(other) == []
    assert await names(other) == ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError):
        async with db.transaction():
            await db.fetch_all(INSERT, ("d", "m"))
            raise ZeroDivisionError
    with pytest.raises(Invalid):
        async with db.transaction():
            await db.fetch_all(INSERT, ("e", "m"))
            await db.fetch_all(INSERT, ("a", "m"))
    assert await names(db) == ["a", "b", "c"]
    await other.close()


async def test_other_tasks_wait_until_a_transaction_has_ended(db: Database) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def long() -> None:
        async with db.transaction():
            await db.fetch_all(INSERT, ("a", "m"))
            inside.set()
            await go_on.wait()
            raise ZeroDivisionError

    first = asyncio.ensure_future(long())
    await inside.wait()
    waiting = [
        asyncio.ensure_future(names(db)),
        asyncio.ensure_future(db.revisions()),
        asyncio.ensure_future(usage.insert(db, [ROW])),
        asyncio.ensure_future(keys.create(db)),
    ]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert not done
    go_on.set()
    with pytest.raises(ZeroDivisionError):
        await first
    assert await waiting[0] == []  # nothing that was undone was seen
    assert await waiting[1] == (0, 0)
    await asyncio.gather(*waiting)
    assert len(await usage.logs(db, usage.UsageFilter())) == 1


async def test_a_transaction_within_another_is_a_part_of_it(db: Database) -> None:
    async with db.transaction():
        await aliases.create(db, "a", "m")
        with pytest.raises(Conflict):
            await aliases.create(db, "a", "n")
        with pytest.raises(ZeroDivisionError):
            async with db.transaction():
                await aliases.create(db, "b", "m")
                raise ZeroDivisionError
        await aliases.create(db, "c", "m")
    assert await names(db) == ["a", "c"]
    with pytest.raises(ZeroDivisionError):
        async with db.transaction():
            await aliases.create(db, "d", "m")
            raise ZeroDivisionError
    assert await names(db) == ["a", "c"]


async def test_a_cancelled_transaction_is_undone(db: Database) -> None:
    inside = asyncio.Event()

    async def long() -> None:
        async with db.transaction():
            await db.fetch_all(INSERT, ("a", "m"))
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(long())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await names(db) == []
    await aliases.create(db, "b", "m")


async def test_a_transaction_cancelled_while_waiting_for_another_process_leaves_none_open(
    db: Database, path: Path
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        task = asyncio.ensure_future(aliases.create(db, "a", "m"))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        other.execute("COMMIT")
    with pytest.raises(asyncio.CancelledError):
        await task
    await aliases.create(db, "b", "m")
    assert await names(db) == ["b"]


async def test_a_cancelled_batch_is_written(db: Database) -> None:
    task = asyncio.ensure_future(usage.insert(db, [ROW]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await usage.logs(db, usage.UsageFilter())) == 1


@pytest.mark.parametrize("count", [1, 64, 65, 500])
async def test_a_batch_is_one_hop_and_one_transaction(
    db: Database, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    hops: list[str] = []
    kind = type(db._connection)

    def counting(name: str) -> Callable[..., object]:
        put = getattr(kind, name)

        def counted(self: object, *args: object) -> object:
            hops.append(name)
            return put(self, *args)

        return counted

    for name in ("executemany", "execute_fetchall"):
        monkeypatch.setattr(kind, name, counting(name))
    monkeypatch.setattr(kind, "execute", None)
    monkeypatch.setattr(kind, "commit", None)
    await usage.insert(db, [ROW] * count)
    assert len(hops) == 1
    assert len(await usage.logs(db, usage.UsageFilter(), limit=1000)) == count


async def test_a_lock_of_another_process_becomes_a_database_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT", 0.05)
    db = await Database.open(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for attempt in (usage.insert(db, [ROW]), keys.create(db), usage.purge(db, 1), db.fetch_all(INSERT, ("a", "m"))):
            with pytest.raises(DatabaseError, match=f"database {path}: database is locked") as caught:
                await attempt
            assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
        assert await keys.list_all(db) == []  # reading goes on
        other.execute("COMMIT")
    await usage.insert(db, [ROW])
    await db.close()


async def test_values_that_cannot_be_stored_are_invalid_and_nothing_else(db: Database) -> None:
    for values in ((None, "m"), (2**63, "m"), ("\ud800", "m"), (object(), "m"), ("a",)):
        with pytest.raises(Invalid, match="does not take these values") as caught:
            await db.fetch_all(INSERT, values)
        assert caught.value.__cause__ is not None
    with pytest.raises(DatabaseError, match="no such table"):
        await db.fetch_all("SELECT * FROM missing")


async def test_a_damaged_file_becomes_a_database_error(path: Path) -> None:
    db = await Database.open(path)
    await usage.insert(db, [ROW] * 100)
    [page] = await db.fetch_all("SELECT rootpage FROM sqlite_master WHERE name = 'usage'")
    await db.close()
    content = bytearray(path.read_bytes())
    content[(page[0] - 1) * 4096 : page[0] * 4096] = b"\xff" * 4096
    path.write_bytes(content)
    db = await Database.open(path)
    with pytest.raises(DatabaseError, match="malformed"):
        await usage.logs(db, usage.UsageFilter())
    await db.close()


async def test_closing_is_idempotent_and_ends_everything(db: Database, path: Path) -> None:
    await db.close()
    await db.close()
    for attempt in (
        db.data_version(),
        db.revisions(),
        db.fetch_all("SELECT 1"),
        db.execute_many(INSERT, []),
        db.insert_row(INSERT, ("a", "m")),
        keys.create(db),
        usage.insert(db, [ROW]),
    ):
        with pytest.raises(DatabaseError, match=f"database {path} is closed"):
            await attempt


async def test_closing_waits_for_what_was_asked_before(db: Database, path: Path) -> None:
    task = asyncio.ensure_future(usage.insert(db, [ROW]))
    await asyncio.sleep(0)
    await db.close()
    await task
    again = await Database.open(path)
    assert len(await usage.logs(again, usage.UsageFilter())) == 1
    await again.close()


async def test_no_thread_is_left_by_closing_or_by_a_failed_open(path: Path) -> None:
    before = set(threading.enumerate())
    db = await Database.open(path)
    assert len(set(threading.enumerate()) - before) == 1
    await db.close()
    await until(lambda: not set(threading.enumerate()) - before)
    garbage = path.with_name("garbage")
    garbage.write_bytes(b"garbage" * 1000)
    with pytest.raises(DatabaseError) as caught:
        await Database.open(garbage)
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)
    await until(lambda: not set(threading.enumerate()) - before)


async def test_a_cancelled_open_leaves_no_thread_and_no_lock(path: Path) -> None:
    before = set(threading.enumerate())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        task = asyncio.ensure_future(Database.open(path))
        await until(lambda: bool(set(threading.enumerate()) - before))
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()  # it sees the thread through: nobody else could
        other.execute("COMMIT")
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not set(threading.enumerate()) - before)
    await (await Database.open(path)).close()


async def test_a_database_left_open_does_not_keep_the_interpreter(path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from smolproxy.store.database import Database\n"
        "kept = asyncio.run(Database.open(sys.argv[1]))\n"
        "print('done')\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(path), stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 30)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert (process.returncode, output) == (0, b"done\n")


async def test_readonly_reads_what_the_writer_wrote_and_writes_nothing(db: Database, path: Path) -> None:
    reader = await Database.open(path, readonly=True)
    await keys.create(db, "ann")
    assert [key.name for key in await keys.list_all(reader)] == ["ann"]
    for attempt in (keys.create(reader), usage.insert(reader, [ROW]), usage.purge(reader, 2**50)):
        with pytest.raises(DatabaseError, match=f"cannot write database {path} as user .*readonly"):
            await attempt
    await reader.close()


async def test_reports_without_a_pause_do_not_let_the_log_grow(
    db: Database, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LOG_LONG", 1 << 20)
    reader = await Database.open(path, readonly=True)
    log = Path(f"{path}-wal")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM usage").fetchall()  # a report that is under way
        for _ in range(10):
            await usage.insert(db, [ROW._replace(request_id="x" * 1000)] * 200)
        assert log.stat().st_size > 2 << 20
        monkeypatch.setattr(connection, "_STEP_ASIDE", 0.05)
        monkeypatch.setattr(connection, "_IN_VAIN", 0)
        assert (await usage.summary(reader, usage.UsageFilter()))[0]["request_count"] == 2000  # it comes through anyway
        assert log.stat().st_size > 2 << 20
        other.execute("COMMIT")
    await usage.summary(reader, usage.UsageFilter())
    assert log.stat().st_size == 0
    assert (await reader.fetch_all("PRAGMA busy_timeout"))[0][0] == connection.BUSY_TIMEOUT * 1000
    await reader.close()


async def test_a_long_log_that_somebody_keeps_long_delays_no_question_and_reports_seldom(
    db: Database, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LOG_LONG", 1 << 18)
    monkeypatch.setattr(connection, "_STEP_ASIDE", 0.3)
    reports, questions = await Database.open(path, readonly=True), await Database.open(path, readonly=True, brief=True)

    async def took(database: Database) -> float:
        started = time.monotonic()
        await keys.list_all(database)
        return time.monotonic() - started

    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM usage").fetchall()
        await usage.insert(db, [ROW._replace(request_id="x" * 1000)] * 500)
        assert await took(questions) < 0.3
        assert await took(reports) >= 0.3
        assert await took(reports) < 0.3
    await reports.close()
    await questions.close()
