"""The schema: from nothing to the newest, once, whoever comes at the same time; never backwards."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from smolproxy.errors import DatabaseError
from smolproxy.store import connection, keys, migrations
from smolproxy.store.database import Database


def run(path: Path, *statements: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        return [row for statement in statements for row in other.execute(statement).fetchall()]


async def test_a_new_file_gets_the_newest_schema(db: Database, path: Path) -> None:
    assert run(path, "PRAGMA user_version", "PRAGMA journal_mode") == [(len(migrations.STEPS),), ("wal",)]
    assert (await db.fetch_all("PRAGMA foreign_keys"))[0][0] == 1
    assert (await db.fetch_all("PRAGMA synchronous"))[0][0] == 1


async def test_opening_again_changes_nothing(db: Database, path: Path) -> None:
    await keys.create(db, "ann")
    await db.close()
    before = run(path, "SELECT type, name, sql FROM sqlite_master", "PRAGMA schema_version")
    again = await Database.open(path)
    assert [key.name for key in await keys.list_all(again)] == ["ann"]
    await again.close()
    assert run(path, "SELECT type, name, sql FROM sqlite_master", "PRAGMA schema_version") == before


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("ours", [False, True])
async def test_a_newer_schema_is_refused_and_left_alone(path: Path, readonly: bool, ours: bool) -> None:
    if ours:
        await (await Database.open(path)).close()
    newer = len(migrations.STEPS) + 1
    run(path, f"PRAGMA user_version = {newer}")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=f"schema {newer} of .* newer than this program knows .*upgrade smolproxy"):
        await Database.open(path, readonly=readonly)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, 1])
async def test_another_programs_database_is_refused_and_left_alone(path: Path, version: int) -> None:
    run(path, "CREATE TABLE keys (a)", f"PRAGMA user_version = {version}")
    with pytest.raises(DatabaseError, match="is a SQLite database, but not one of smolproxy's"):
        await Database.open(path)
    assert run(path, "SELECT name FROM sqlite_master") == [("keys",)]


async def test_an_older_schema_is_migrated_but_not_readonly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await (await Database.open(path)).close()
    version = len(migrations.STEPS)
    added = (*migrations.STEPS, ("CREATE TABLE later (a)", "INSERT INTO later VALUES (1)"))
    monkeypatch.setattr(migrations, "STEPS", added)
    with pytest.raises(DatabaseError, match=f"has schema {version}, older than {version + 1}"):
        await Database.open(path, readonly=True)
    db = await Database.open(path)
    assert [tuple(row) for row in await db.fetch_all("SELECT a FROM later")] == [(1,)]
    await db.close()
    assert run(path, "PRAGMA user_version") == [(version + 1,)]


async def test_a_step_that_fails_leaves_the_schema_before_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await (await Database.open(path)).close()
    version = len(migrations.STEPS)
    added = (*migrations.STEPS, ("CREATE TABLE later (a)", "INSERT INTO missing VALUES (1)"))
    monkeypatch.setattr(migrations, "STEPS", added)
    with pytest.raises(DatabaseError, match="no such table: missing"):
        await Database.open(path)
    assert run(path, "PRAGMA user_version", "SELECT name FROM sqlite_master WHERE name = 'later'") == [(version,)]


async def test_a_step_taken_by_another_while_waiting_is_not_taken_twice(path: Path) -> None:
    await (await Database.open(path)).close()

    class Late(sqlite3.Connection):
        """Sees schema 0 before it has the lock, as if another process had just finished."""

        def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:  # type: ignore[override]
            if sql == "BEGIN IMMEDIATE":
                locked.append(sql)
            elif not locked and ("user_version" in sql or "sqlite_master" in sql):
                return super().execute("SELECT 0")
            return super().execute(sql, *rest)  # type: ignore[arg-type]

    locked: list[str] = []
    with closing(sqlite3.connect(path, factory=Late, isolation_level=None)) as late:
        migrations.migrate(late, str(path))
    assert locked == ["BEGIN IMMEDIATE"]
    assert run(path, "PRAGMA user_version") == [(len(migrations.STEPS),)]


async def test_switching_to_wal_is_tried_again_while_another_process_does(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["database is locked", "database is locked"]
    execute = connection.Connection.execute

    def contended(self: connection.Connection, sql: str, *rest: object) -> sqlite3.Cursor:
        if sql == "PRAGMA journal_mode = WAL" and answers:
            raise sqlite3.OperationalError(answers.pop())
        return execute(self, sql, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(connection.Connection, "execute", contended)
    await (await Database.open(path)).close()
    assert answers == []
    assert run(path, "PRAGMA journal_mode") == [("wal",)]
    answers.append("disk I/O error")
    with pytest.raises(DatabaseError, match="disk I/O error"):
        await Database.open(path.with_name("other.db"))
    assert answers == []


def test_a_migration_that_fails_leaves_no_transaction_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "STEPS", (("CREATE TABLE a (b)", "nonsense"),))
    with closing(sqlite3.connect(path, isolation_level=None)) as bare:
        with pytest.raises(sqlite3.OperationalError):
            migrations.migrate(bare, str(path))
        assert not bare.in_transaction


async def test_a_migration_that_gets_no_lock_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT", 0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseError, match=f"database {path}: database is locked"):
            await Database.open(path)
    await (await Database.open(path)).close()


async def test_processes_that_open_a_new_file_at_once_all_succeed(path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from smolproxy.store import keys\n"
        "from smolproxy.store.database import Database\n"
        "async def main():\n"
        "    db = await Database.open(sys.argv[1])\n"
        "    await keys.create(db, sys.argv[2])\n"
        "    await db.close()\n"
        "sys.stdin.readline()\n"  # all imports done: everybody starts at once
        "asyncio.run(main())\n"
    )
    target = path.parent / "new" / "proxy.db"
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(target), str(n), stdin=pipe, stderr=pipe
        )
        for n in range(6)
    ]
    outputs = await asyncio.wait_for(asyncio.gather(*(process.communicate(b"\n") for process in processes)), 60)
    assert [(process.returncode, err) for process, (_, err) in zip(processes, outputs, strict=True)] == [(0, b"")] * 6
    db = await Database.open(target)
    assert sorted(key.name for key in await keys.list_all(db)) == list("012345")
    await db.close()
