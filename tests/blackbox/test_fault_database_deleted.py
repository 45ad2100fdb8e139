"""Fault: the database file is deleted, moved away or replaced under the running daemon."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .harness import Daemon, until
from .load import Load, chat, ids, loaded, standin_process

WAITING = "usage rows wait in memory: the database cannot be written"
AGAIN = "usage rows are written again"
OPENED_ANEW = "the database file has been opened anew"
MOST_WAITING = 10_000


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        yield connection


def integrity(path: Path) -> str:
    with opened(path) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone()[0]


def ids_in(path: Path) -> list[str]:
    with opened(path) as connection:
        return [row[0] for row in connection.execute("SELECT request_id FROM usage ORDER BY id")]


async def unhealthy(daemon: Daemon) -> bool:
    return (await daemon.ask("GET", "/health")).status == 503


async def test_a_file_that_is_moved_away_and_back(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    away = daemon.folder / "away.db"
    with standin_process() as url:
        key = await loaded(daemon, url)
        load = Load()
        request = chat(key, daemon.port)
        await load.hammer(daemon.port, request, most=20)
        daemon.db.rename(away)
        await load.hammer(daemon.port, request, most=200)
        assert daemon.logged(WAITING)[0]["level"] == "error"
        await until(lambda: daemon.logged("the database file is not in its place"))
        assert await unhealthy(daemon)
        assert len(load.ended) == 220
        assert len(ids_in(away)) == 20

        away.rename(daemon.db)
        await until(lambda: daemon.logged(AGAIN) and daemon.logged("the database file is back"))
        assert not daemon.logged(OPENED_ANEW)
        await load.hammer(daemon.port, request, most=20)
        assert sorted(ids(daemon)) == sorted(load.ended)
        assert not await unhealthy(daemon)
        assert daemon.stop() == 0
    assert integrity(daemon.db) == "ok"


async def test_a_file_that_stays_away(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings={"access_log": False})
    with standin_process() as url:
        key = await loaded(daemon, url)
        unused = await daemon.new_key("unused")
        load = Load()
        request = chat(key, daemon.port)
        await load.hammer(daemon.port, request, most=20)
        for suffix in ("", "-wal", "-shm"):
            Path(f"{daemon.db}{suffix}").unlink()
        await load.hammer(daemon.port, chat(unused, daemon.port), lines=1, most=1)  # looked up in the file: it is open
        await load.hammer(daemon.port, request, most=MOST_WAITING + 1000)
        # all that can be booked once there is a file again; then no more
        assert load.broken == 0
        assert {status for status, _ in load.others} == {503}
        assert MOST_WAITING <= len(load.ended) - 20 <= MOST_WAITING + 8
        refused = await daemon.ask(
            "POST", "/v1/chat/completions", key=key, json={"model": "loaded", "messages": [], "max_tokens": 1}
        )
        assert (refused.status, refused.code) == (503, "database_unavailable")
        assert "Retry-After" in refused.headers
        assert await unhealthy(daemon)
        assert not daemon.db.exists()

        # what a command makes in its place is a database like any other
        await daemon.cli("keys", "list")
        await until(lambda: daemon.logged(OPENED_ANEW) and daemon.logged(AGAIN), 20)
        await until(lambda: len(ids(daemon)) >= MOST_WAITING, 20)
        assert ids(daemon) == load.ended[20:]
        assert not await unhealthy(daemon)
        assert (await daemon.ask("POST", "/v1/chat/completions", key=key, json={})).status == 401
        assert await daemon.admin("GET", "/servers") == []
        assert daemon.stop() == 0
    assert integrity(daemon.db) == "ok"


async def test_a_backup_that_is_put_in_its_place(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    backup, old = daemon.folder / "backup.db", daemon.folder / "old.db"
    with standin_process() as url:
        key = await loaded(daemon, url)
        load, later = Load(), Load()
        request = chat(key, daemon.port)
        await load.hammer(daemon.port, request, most=20)
        with opened(daemon.db) as connection, opened(backup) as copy:
            connection.backup(copy)
        backed_up = list(load.ended)
        lost = await daemon.new_key("made after the backup")
        await load.hammer(daemon.port, request, chat(lost, daemon.port), most=20)
        assert (await daemon.admin("GET", "/usage"))["logs"]  # reports have a connection as well

        daemon.db.rename(old)
        await later.hammer(daemon.port, request, most=20)
        backup.rename(daemon.db)
        await until(lambda: daemon.logged(OPENED_ANEW))
        await until(lambda: not daemon.logged(WAITING) or daemon.logged(AGAIN))
        await later.hammer(daemon.port, request, most=20)
        assert not load.others
        assert not later.others
        assert sorted(ids(daemon)) == sorted(backed_up + later.ended)
        # the other file is whole as well, although its write-ahead log was not moved with it
        assert sorted(ids_in(old)) == sorted(load.ended)
        assert integrity(old) == integrity(daemon.db) == "ok"
        assert (await daemon.ask("GET", "/v1/models", key=lost)).status == 401
        report = await daemon.admin("GET", "/usage?limit=1000")
        assert {row["request_id"] for row in report["logs"]} == {*backed_up, *later.ended}
        await daemon.new_key("made in the backup")
        assert "made in the backup" in (await daemon.cli("keys", "list")).out
        assert not await unhealthy(daemon)
        assert daemon.stop() == 0
    assert integrity(daemon.db) == "ok"


@pytest.mark.parametrize("content", [b"", b"no database" * 100, None], ids=["empty", "something else", "half a copy"])
async def test_what_is_no_database_is_not_taken_for_one(
    make_daemon: Callable[..., Daemon], content: bytes | None
) -> None:
    daemon = make_daemon()
    copy = daemon.folder / "copy.db"
    with standin_process() as url:
        key = await loaded(daemon, url)
        load = Load()
        request = chat(key, daemon.port)
        await load.hammer(daemon.port, request, most=20)
        with opened(daemon.db) as connection, opened(copy) as target:
            connection.backup(target)
        whole = copy.read_bytes()
        daemon.db.unlink()
        daemon.db.write_bytes(whole[: len(whole) // 2] if content is None else content)
        reported = await until(lambda: daemon.logged("the database file is not in its place")[1:])
        assert reported[-1]["reason"]
        await load.hammer(daemon.port, request, most=20)
        assert await unhealthy(daemon)
        assert len(load.ended) == 40
        with daemon.db.open("wb") as file:  # the copy goes on, in the same file
            file.write(whole)
        await until(lambda: daemon.logged(OPENED_ANEW) and daemon.logged(AGAIN))
        assert sorted(ids(daemon)) == sorted(load.ended)
        assert not await unhealthy(daemon)
    assert integrity(daemon.db) == "ok"


async def test_a_write_ahead_log_that_is_deleted(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    with standin_process() as url:
        key = await loaded(daemon, url)
        load = Load()
        request = chat(key, daemon.port)
        await load.hammer(daemon.port, request, most=50)
        for suffix in ("-wal", "-shm"):
            Path(f"{daemon.db}{suffix}").unlink()
        await until(lambda: daemon.logged(OPENED_ANEW))
        await load.hammer(daemon.port, request, most=50)
        await until(lambda: len(ids(daemon)) == 100)
        assert sorted(ids(daemon)) == sorted(load.ended)
        daemon.kill()
        assert sorted(ids(daemon)) == sorted(load.ended)
    assert integrity(daemon.db) == "ok"


async def test_a_folder_that_is_moved_away_and_back(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    data, away = daemon.folder / "data", daemon.folder / "away"
    daemon.db = data / "proxy.db"
    daemon.env["DB_PATH"] = str(daemon.db)
    with standin_process() as url:
        key = await loaded(daemon, url)
        load = Load()
        data.rename(away)
        await load.hammer(daemon.port, chat(key, daemon.port), most=50)
        await until(lambda: daemon.logged("the database file is not in its place"))
        away.rename(data)
        await until(lambda: daemon.logged("the database file is back") and daemon.logged(AGAIN))
        assert sorted(ids(daemon)) == sorted(load.ended)
