"""Fault: commands run as root beside a daemon that is run by another user."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import Daemon
from .load import MODEL, Load, chat, ids, standin_process

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, who can become another user"
)

NOBODY = 65534
# It may read everything, as the interpreter may be in a folder of root's, but write only what is its own.
AS_NOBODY = [
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *(
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=-all,+dac_read_search",
        "--bounding-set=-all,+dac_read_search",
    ),
]

CRASH = """
import asyncio, os, sys
from smolproxy.store import keys
from smolproxy.store.database import Database

async def crash():
    database = await Database.open(sys.argv[1])
    await keys.create(database, "made by root")
    os._exit(9)

asyncio.run(crash())
"""


class Unprivileged(Daemon):
    """A daemon run by nobody."""

    def spawn(self) -> subprocess.Popen[bytes]:
        command = [*AS_NOBODY, sys.executable, "-m", "smolproxy", "serve", "--host", "127.0.0.1", "--port", "0"]
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        # nobody may not write where coverage is measured
        env = {name: value for name, value in self.env.items() if not name.startswith("COVERAGE")}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)
        return self.process


def owners(daemon: Daemon) -> dict[str, int]:
    return {path.name: path.stat().st_uid for path in (daemon.db.parent, *daemon.db.parent.glob("proxy.db*"))}


async def served(daemon: Daemon, url: str) -> None:
    """The daemon can write: a key, and the rows of requests."""
    key = await daemon.new_key()
    load = Load()
    assert daemon.port
    await load.hammer(daemon.port, chat(key, daemon.port), most=5)
    assert len(load.ended) == 5
    assert set(load.ended) <= set(ids(daemon))
    assert not daemon.logged("usage rows wait in memory: the database cannot be written")


@pytest.mark.parametrize(
    "folder_of_root", [False, True], ids=["in its folder", "in a folder that root's command makes"]
)
async def test_no_command_of_root_leaves_files_that_the_daemon_cannot_write(
    tmp_path: Path, folder_of_root: bool
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    daemon = Unprivileged(home)
    if folder_of_root:
        daemon.db = home / "data" / "deep" / "proxy.db"
        daemon.env["DB_PATH"] = str(daemon.db)
    with standin_process() as url:
        # before the daemon has ever run
        await daemon.cli("servers", "add", MODEL, url, "--model", MODEL)
        assert set(owners(daemon).values()) == {NOBODY}
        daemon.start()
        try:
            assert Path(f"/proc/{daemon.process.pid}").stat().st_uid == NOBODY  # type: ignore[union-attr]
            await served(daemon, url)

            # while it runs
            await asyncio.gather(*(daemon.cli("keys", "create", f"by root {n}") for n in range(3)))
            await daemon.cli("usage")
            assert set(owners(daemon).values()) == {NOBODY}
            assert {"proxy.db", "proxy.db-wal", "proxy.db-shm"} <= set(owners(daemon))
            await served(daemon, url)
            assert daemon.stop() == 0

            # and when one crashes after it, and leaves its write-ahead log
            crashed = subprocess.run([sys.executable, "-c", CRASH, daemon.db], env=daemon.env, check=False)
            assert crashed.returncode == 9
            assert {"proxy.db", "proxy.db-wal", "proxy.db-shm"} <= set(owners(daemon))
            assert set(owners(daemon).values()) == {NOBODY}
            daemon.start()
            await served(daemon, url)
            assert "made by root" in (await daemon.cli("keys", "list")).out
            assert daemon.stop() == 0
        finally:
            if daemon.process is not None:
                daemon.kill()


async def test_a_daemon_that_cannot_write_says_so(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    daemon = Unprivileged(home)
    await daemon.cli("keys", "create", "ann")  # a folder of root's: the files are root's
    assert daemon.spawn().wait(20) == 1
    text = daemon.log_text()
    assert str(daemon.db) in text
    assert "nobody" in text
    assert len(text.splitlines()) == 1
