"""Fault: the disk is full, or the database's files cannot be written any more."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .harness import Daemon, until
from .load import Load, chat, ids, loaded, standin_process

WAITING = "usage rows wait in memory: the database cannot be written"
AGAIN = "usage rows are written again"

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small disk, or a file that root cannot write")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


async def fails_and_recovers(
    daemon: Daemon, key: str, break_it: Callable[[], object], mend_it: Callable[[], object], reason: str
) -> None:
    """While it is broken requests are answered and their rows wait; when it is mended they are all in the file."""
    load = Load()
    requests = [chat(key, daemon.port), chat(key, daemon.port, stream=True)]
    await load.hammer(daemon.port, *requests, lines=4, most=20)
    break_it()
    while not daemon.logged(WAITING):
        await load.hammer(daemon.port, *requests, lines=4, most=20)
        assert len(load.ended) < 5000
    await load.hammer(daemon.port, *requests, lines=4, most=200)
    written = len(ids(daemon))
    assert written < len(load.ended)
    assert (load.others, load.broken) == ([], 0)
    assert daemon.logged(WAITING)[0]["level"] == "error"
    assert reason in daemon.logged(WAITING)[0]["reason"]
    health = await daemon.ask("GET", "/health")
    assert (health.status, health.json["status"]) == (503, "error")
    change = await daemon.admin("POST", "/keys", {"name": "bob"}, status=503)
    assert change["error"]["code"] == "database_unavailable"

    mend_it()
    await until(lambda: daemon.logged(AGAIN))
    await load.hammer(daemon.port, *requests, lines=4, most=20)
    assert sorted(ids(daemon)) == sorted(load.ended)
    assert daemon.rows("SELECT sum(request_count) AS n FROM usage_daily") == [{"n": len(load.ended)}]
    assert daemon.rows("PRAGMA integrity_check") == [{"integrity_check": "ok"}]
    assert (await daemon.ask("GET", "/health")).status == 200
    await daemon.new_key("bob")


@root
async def test_a_full_disk(make_daemon: Callable[..., Daemon], small_disk: Path) -> None:
    daemon = make_daemon(env={"DB_PATH": str(small_disk / "proxy.db")})
    daemon.db = small_disk / "proxy.db"
    filler = small_disk / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))

    with standin_process() as url:
        key = await loaded(daemon, url)
        await fails_and_recovers(daemon, key, fill, filler.unlink, "full")
        assert daemon.stop() == 0


@root
async def test_files_that_cannot_be_written_any_more(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    files = [daemon.db, Path(f"{daemon.db}-wal")]

    def change(flag: str) -> bool:
        return subprocess.run(["chattr", flag, *files], check=False, capture_output=True).returncode == 0

    with standin_process() as url:
        key = await loaded(daemon, url)
        if not change("+i"):
            pytest.skip("this file system has no immutable files")
        change("-i")
        try:
            await fails_and_recovers(daemon, key, lambda: change("+i"), lambda: change("-i"), str(daemon.db))
        finally:
            change("-i")


@root
async def test_a_file_that_cannot_be_written_at_start(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    await daemon.cli("keys", "create", "ann")
    if subprocess.run(["chattr", "+i", daemon.db], check=False, capture_output=True).returncode:
        pytest.skip("this file system has no immutable files")
    try:
        assert daemon.spawn().wait(20) == 1
    finally:
        subprocess.run(["chattr", "-i", daemon.db], check=True)
    assert "Traceback" not in daemon.log_text()
    assert str(daemon.db) in daemon.log_text()


@root
async def test_rows_that_cannot_be_written_until_the_end_are_in_the_log(
    make_daemon: Callable[..., Daemon], small_disk: Path
) -> None:
    daemon = make_daemon(env={"DB_PATH": str(small_disk / "proxy.db")})
    daemon.db = small_disk / "proxy.db"
    with standin_process() as url:
        key = await loaded(daemon, url)
        with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        load = Load()
        while not daemon.logged(WAITING):
            await load.hammer(daemon.port, chat(key, daemon.port), lines=1, most=1)
        await load.hammer(daemon.port, chat(key, daemon.port), lines=1, most=5)
        assert daemon.stop() == 1
    logged = [record["row"]["request_id"] for record in daemon.logged("usage row not written")]
    assert sorted(ids(daemon) + logged) == sorted(load.ended)
    assert len(logged) >= 5
