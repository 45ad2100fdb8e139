"""The file under an open connection: here, gone, or another; and what is given back to the disk."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from smolproxy.errors import DatabaseError
from smolproxy.store import aliases, connection, files, keys, usage
from smolproxy.store.database import Database
from test_store.rows import ROW


def backup(path: Path, to: Path) -> None:
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


def integrity(path: Path) -> str:
    with closing(sqlite3.connect(path)) as opened:
        return opened.execute("PRAGMA integrity_check").fetchone()[0]


async def test_here_gone_and_replaced(db: Database, path: Path, tmp_path: Path) -> None:
    assert db.place() == "here"
    backup(path, tmp_path / "other")
    path.rename(tmp_path / "away")
    assert db.place() == "gone"
    (tmp_path / "other").rename(path)
    assert db.place() == "replaced"
    (tmp_path / "away").replace(path)
    assert db.place() == "here"


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_without_its_log_it_is_not_the_file_that_others_see(db: Database, path: Path, suffix: str) -> None:
    Path(f"{path}{suffix}").unlink()
    assert db.place() == "replaced"
    with pytest.raises(DatabaseError, match="deleted, moved or replaced"):
        await keys.create(db)


async def test_nothing_is_written_into_a_file_that_is_gone(db: Database, path: Path, tmp_path: Path) -> None:
    await usage.insert(db, [ROW])
    path.rename(tmp_path / "away")
    for writing in (usage.insert(db, [ROW]), keys.create(db), aliases.create(db, "a", "b")):
        with pytest.raises(DatabaseError, match="deleted, moved or replaced"):
            await writing
    (tmp_path / "away").rename(path)
    await usage.insert(db, [ROW])
    assert len(await usage.logs(db, usage.UsageFilter())) == 2
    assert await keys.list_all(db) == []


async def test_a_transaction_is_not_committed_into_a_file_that_is_gone(
    db: Database, path: Path, tmp_path: Path
) -> None:
    with pytest.raises(DatabaseError, match="deleted, moved or replaced"):
        async with db.transaction():
            await keys.create(db)
            path.rename(tmp_path / "away")
    (tmp_path / "away").rename(path)
    assert await keys.list_all(db) == []
    await keys.create(db)  # and the transaction is not open any more


async def test_what_only_the_log_had_is_saved_into_the_file(db: Database, path: Path, tmp_path: Path) -> None:
    await usage.insert(db, [ROW] * 10)
    path.rename(tmp_path / "away")
    with pytest.raises(DatabaseError):
        await usage.insert(db, [ROW])
    with closing(sqlite3.connect(tmp_path / "away")) as alone:
        assert alone.execute("SELECT count(*) FROM usage").fetchone()[0] == 10


async def test_reading_goes_on_in_a_file_that_is_gone(db: Database, path: Path) -> None:
    await keys.create(db, "ann")
    reader = await Database.open(path, readonly=True)
    path.unlink()
    assert [key.name for key in await keys.list_all(reader)] == ["ann"]
    await reader.close()


async def test_reopened_on_another_file(db: Database, path: Path, tmp_path: Path) -> None:
    reader = await Database.open(path, readonly=True)
    backup(path, tmp_path / "other")
    await keys.create(db, "ann")
    (tmp_path / "other").replace(path)
    await Database.reopen([db, reader])
    assert (db.place(), reader.place()) == ("here", "here")
    assert await keys.list_all(reader) == []
    await keys.create(db, "bob")
    assert [key.name for key in await keys.list_all(reader)] == ["bob"]
    await reader.close()
    assert integrity(path) == "ok"


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 10_000], ids=["empty", "short", "something else"])
async def test_not_reopened_on_what_is_no_database(db: Database, path: Path, tmp_path: Path, content: bytes) -> None:
    await keys.create(db, "ann")
    path.rename(tmp_path / "away")
    path.write_bytes(content)
    with pytest.raises(DatabaseError):
        await Database.reopen([db])
    assert path.read_bytes() == content
    (tmp_path / "away").replace(path)  # nothing was let go of
    assert db.place() == "here"
    assert [key.name for key in await keys.list_all(db)] == ["ann"]


async def test_not_reopened_on_another_programs_database(db: Database, path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (a)")
    with pytest.raises(DatabaseError, match="not one of smolproxy's"):
        await Database.reopen([db])


async def test_a_companion_that_is_not_the_other_files_stays(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").write_bytes(b"")
    known = files.identity(path)
    Path(f"{path}-shm").unlink()
    (tmp_path / "another").write_bytes(b"")
    (tmp_path / "another").rename(f"{path}-shm")
    files.remove_companions(path, (None, known[1], (0, 0)))
    assert not Path(f"{path}-wal").exists()
    assert Path(f"{path}-shm").exists()


async def test_what_is_purged_is_given_back_to_the_disk(db: Database, path: Path) -> None:
    await usage.insert(db, [ROW._replace(request_id=f"r{n}") for n in range(5000)])
    assert not await db.shrink(100)
    while await usage.purge(db, ROW.created_at + 1):
        pass
    assert await db.shrink(100)  # not all of it at once
    while await db.shrink(100):
        pass
    assert (await db.fetch_all("PRAGMA freelist_count"))[0][0] == 0
    pages = (await db.fetch_all("PRAGMA page_count"))[0][0]
    await db.close()
    assert path.stat().st_size == pages * 4096 < 300_000


async def test_a_file_made_without_that_is_left_as_it_is(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(path)) as old:
        old.execute("PRAGMA auto_vacuum = NONE")
        old.execute("PRAGMA user_version = 0")
        old.execute("CREATE TABLE t (a)")
        old.execute("DROP TABLE t")
        old.commit()
    db = await Database.open(path)
    await usage.insert(db, [ROW] * 1000)
    while await usage.purge(db, ROW.created_at + 1):
        pass
    assert not await db.shrink(10)
    await db.close()


async def test_the_size_of_the_log(db: Database, path: Path) -> None:
    await usage.insert(db, [ROW] * 100)
    assert db.log_size == Path(f"{path}-wal").stat().st_size > 0
    await db.close()
    assert db.log_size == 0


def test_a_file_replaced_while_it_is_opened_is_not_taken_for_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "p.db", tmp_path / "other.db"
    for each in (path, other):
        each.touch()
        connection.Connection(str(each)).close()
    set_up = connection.Connection._set_up

    def replaced_meanwhile(self: connection.Connection, database: str) -> None:
        set_up(self, database)
        if other.exists():
            other.replace(path)

    monkeypatch.setattr(connection.Connection, "_set_up", replaced_meanwhile)
    with pytest.raises(sqlite3.OperationalError, match="replaced"):
        connection.Connection(str(path))
