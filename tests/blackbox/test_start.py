"""How `serve` starts, and why it does not: exit 1 and one line, no traceback."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .harness import ADMIN_KEY, Daemon

Make = Callable[..., Daemon]


def fails(daemon: Daemon, *, lines: int = 1) -> str:
    """Start what does not start: exit 1, that many lines. Return them."""
    process = daemon.spawn()
    assert process.wait(30) == 1, daemon.log_text()
    text = daemon.log_text()
    assert len(text.splitlines()) == lines, text
    assert text.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in text
    return text


async def test_without_an_admin_key(make_daemon: Make) -> None:
    for key in (None, ""):
        text = fails(make_daemon(env={"ADMIN_KEY": key}))
        assert "ADMIN_KEY" in text
        assert "--no-admin-api" in text


async def test_a_port_in_use(make_daemon: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon = make_daemon()
        daemon.port = taken.getsockname()[1]
        text = fails(daemon)
    assert str(daemon.port) in text
    assert "in use" in text
    assert not daemon.db.exists()


async def test_a_host_that_is_not_ours(make_daemon: Make) -> None:
    assert "cannot listen" in fails(make_daemon(arguments=["--host", "192.0.2.1"]))
    assert "cannot listen" in fails(make_daemon(arguments=["--host", "no-such-host.invalid"]))


async def test_a_database_in_a_folder_that_cannot_be_made(make_daemon: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" / "sub" / "proxy.db"
    text = fails(make_daemon(env={"DB_PATH": str(path)}))
    assert str(path) in text or str(path.parent) in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_database_in_a_folder_that_cannot_be_written(make_daemon: Make, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    text = fails(make_daemon(env={"DB_PATH": str(folder / "proxy.db")}))
    assert str(folder) in text
    assert "as user" in text


async def test_a_file_that_is_no_database(make_daemon: Make) -> None:
    daemon = make_daemon()
    daemon.db.write_text("certainly not a database, but long enough to have a header" * 20)
    assert "not a SQLite database" in fails(daemon)


async def test_a_folder_as_database(make_daemon: Make) -> None:
    daemon = make_daemon()
    daemon.db.mkdir()
    assert str(daemon.db) in fails(daemon)


async def test_another_programs_database(make_daemon: Make) -> None:
    daemon = make_daemon()
    with contextlib.closing(sqlite3.connect(daemon.db)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
        connection.execute("PRAGMA user_version = 3")
        connection.commit()
    before = daemon.db.read_bytes()
    fails(daemon)
    assert daemon.db.read_bytes() == before


async def test_a_schema_newer_than_the_program(make_daemon: Make) -> None:
    daemon = make_daemon()
    await daemon.cli("keys", "create", "ann")
    with contextlib.closing(sqlite3.connect(daemon.db)) as connection:
        connection.execute("PRAGMA user_version = 999")
    text = fails(daemon)
    assert "999" in text
    assert "newer" in text


async def test_a_bad_config_file_is_told_with_all_its_problems(make_daemon: Make) -> None:
    daemon = make_daemon()
    (daemon.folder / "config.yaml").write_text(
        "servers:\n  - {name: a, url: nowhere}\n  - {name: a, url: 'http://127.0.0.1:1', colour: red}\n"
        "settings:\n  drain_timeout: soon\n"
    )
    text = fails(daemon, lines=5)
    assert re.findall(r"config\.yaml:(\d+):", text) == ["2", "3", "3", "5"]
    assert not daemon.db.exists()


async def test_a_config_file_that_is_missing(make_daemon: Make, tmp_path: Path) -> None:
    path = tmp_path / "nothing.yaml"
    assert str(path) in fails(make_daemon(arguments=["--config", str(path)]), lines=2)
    assert str(path) in fails(make_daemon(env={"CONFIG_PATH": str(path)}), lines=2)


async def test_an_alias_of_the_config_that_is_a_model(make_daemon: Make) -> None:
    daemon = make_daemon()
    await daemon.cli("servers", "add", "one", "http://127.0.0.1:1", "--model", "m")
    daemon.configure({"aliases": {"m": "n"}})
    assert "'m'" in fails(daemon)


@pytest.mark.parametrize("port", ["http", "-1", "65536", "8 0"])
async def test_a_port_that_is_none(make_daemon: Make, port: str) -> None:
    daemon = make_daemon(env={"PROXY_PORT": port})
    daemon.port = None
    assert "PROXY_PORT" in fails(daemon)


async def test_the_environment_wins_over_dotenv_and_flags_over_both(make_daemon: Make) -> None:
    daemon = make_daemon(env={"ADMIN_KEY": None, "DB_PATH": None})
    daemon.db = daemon.folder / "sub" / "folder" / "from-dotenv.db"
    (daemon.folder / ".env").write_text(
        "ADMIN_KEY=from-dotenv\nDB_PATH=sub/folder/from-dotenv.db\n"
        f"PROXY_PORT=1\nCONFIG_PATH={daemon.folder}/config.yaml\n"
    )
    daemon.start()
    assert (await daemon.ask("GET", "/admin/keys", key="from-dotenv")).status == 200
    assert (await daemon.ask("GET", "/admin/keys", key=ADMIN_KEY)).status == 401
    assert daemon.db.exists()
    assert daemon.db.stat().st_mode & 0o777 == 0o600
    assert daemon.db.parent.stat().st_mode & 0o777 == 0o700
    assert daemon.stop() == 0
    daemon.env["ADMIN_KEY"] = "from-environment"
    daemon.start()
    assert (await daemon.ask("GET", "/admin/keys", key="from-environment")).status == 200
    assert (await daemon.ask("GET", "/admin/keys", key="from-dotenv")).status == 401


async def test_two_daemons_share_a_database(make_daemon: Make) -> None:
    first = make_daemon().start()
    second = make_daemon(env={"DB_PATH": str(first.db)})
    second.db = first.db
    second.start()
    key = await first.new_key()
    assert (await second.ask("GET", "/v1/models", key=key)).status == 200


async def test_what_is_unknown_is_wrong_usage(make_daemon: Make) -> None:
    await make_daemon().cli("serve", "--colour", code=2)
    await make_daemon().cli("serve", "--port", "eighty", code=2)


async def test_secrets_are_not_in_the_log(make_daemon: Make) -> None:
    config: dict[str, Any] = {
        "servers": [{"name": "one", "url": "http://127.0.0.1:1", "api_key": "server-canary", "models": ["m"]}]
    }
    daemon = make_daemon(config=config, settings={"log_level": "debug"}, env={"ADMIN_KEY": "admin-canary"}).start()
    await daemon.ask("GET", "/admin/keys", key="admin-canary")
    await daemon.ask("GET", "/v1/models?key=query-canary", key="wrong-canary")
    await daemon.ask("POST", "/v1/chat/completions", headers={"x-api-key": "other-canary", "Cookie": "c=cookie-canary"})
    assert daemon.stop() == 0
    assert "canary" not in daemon.log_text()
