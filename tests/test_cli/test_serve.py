"""smolproxy serve: what it makes of flags, environment, .env and defaults; the daemon itself is left out."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import smolproxy.daemon
from smolproxy.config import ServeOptions
from smolproxy.errors import ConfigError, DatabaseError, Problem


@pytest.fixture
def daemon(monkeypatch):
    """A daemon that notes its options and ends with a status or an error."""
    fake = SimpleNamespace(options=None, outcome=0)

    def run(options):
        fake.options = options
        if isinstance(fake.outcome, Exception):
            raise fake.outcome
        return fake.outcome

    monkeypatch.setattr(smolproxy.daemon, "lifecycle", SimpleNamespace(run=run), raising=False)
    return fake


DEFAULTS = ServeOptions(
    host="0.0.0.0",
    port=8000,
    db=Path("data/proxy.db"),
    config=Path("config.yaml"),
    config_required=False,
    admin_key="adm",
    admin_api=True,
)


def test_defaults(run, daemon, monkeypatch):
    monkeypatch.setenv("ADMIN_KEY", "adm")
    run("serve")
    assert daemon.options == DEFAULTS


def test_dotenv(run, daemon, folder):
    (folder / ".env").write_text(
        "ADMIN_KEY='adm'\nPROXY_HOST=127.0.0.2\nPROXY_PORT=1\nDB_PATH=d.db\nCONFIG_PATH=c.yaml\n# a remark\n"
    )
    run("serve")
    expected = ServeOptions("127.0.0.2", 1, Path("d.db"), Path("c.yaml"), True, "adm", True)
    assert daemon.options == expected


def test_the_environment_wins_over_dotenv(run, daemon, folder, monkeypatch):
    (folder / ".env").write_text("ADMIN_KEY=x\nPROXY_HOST=x\nPROXY_PORT=x\nDB_PATH=x\nCONFIG_PATH=x\n")
    for name, value in {
        "ADMIN_KEY": "adm", "PROXY_HOST": "::1", "PROXY_PORT": "2", "DB_PATH": "e.db", "CONFIG_PATH": "e.yaml",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    run("serve")
    assert daemon.options == ServeOptions("::1", 2, Path("e.db"), Path("e.yaml"), True, "adm", True)


def test_flags_win_over_the_environment(run, daemon, monkeypatch):
    for name in ("ADMIN_KEY", "PROXY_HOST", "PROXY_PORT", "DB_PATH", "CONFIG_PATH"):
        monkeypatch.setenv(name, "x")
    run("--db", "f.db", "serve", "--host", "127.0.0.1", "--port", 0, "--config", "f.yaml")
    assert daemon.options == ServeOptions("127.0.0.1", 0, Path("f.db"), Path("f.yaml"), True, "x", True)


def test_an_empty_variable_counts_as_missing(run, daemon, folder, monkeypatch):
    (folder / ".env").write_text("ADMIN_KEY=adm\nPROXY_HOST=\n")
    for name in ("ADMIN_KEY", "PROXY_PORT", "DB_PATH", "CONFIG_PATH"):
        monkeypatch.setenv(name, "")
    run("serve")
    assert daemon.options == DEFAULTS


def test_no_admin_key_is_refused_and_the_message_says_how_to_make_one(fails, daemon):
    message = fails("serve")
    assert "ADMIN_KEY=$(openssl rand -hex 24) >> .env" in message
    assert "--no-admin-api" in message
    assert daemon.options is None


@pytest.mark.parametrize("key", ["", "adm"])
def test_without_the_admin_api_no_key_is_needed_and_none_is_handed_over(run, daemon, monkeypatch, key):
    monkeypatch.setenv("ADMIN_KEY", key)
    run("serve", "--no-admin-api")
    assert (daemon.options.admin_key, daemon.options.admin_api) == (None, False)


@pytest.mark.parametrize("port", ["-1", "65536", "http", "80.5"])
def test_a_bad_port(fails, misused, daemon, monkeypatch, port):
    assert "--port" in misused("serve", "--port", port)
    monkeypatch.setenv("PROXY_PORT", port)
    monkeypatch.setenv("ADMIN_KEY", "adm")
    assert fails("serve").startswith("PROXY_PORT is ")
    assert daemon.options is None


def test_the_status_of_the_daemon_is_the_commands(run, daemon):
    daemon.outcome = 3
    run("serve", "--no-admin-api", exit_code=3)


def test_an_error_at_start_is_one_line(fails, daemon):
    daemon.outcome = DatabaseError("no\ngood")
    assert fails("serve", "--no-admin-api") == "no good"


def test_every_problem_of_the_config_file_is_printed(run, daemon):
    daemon.outcome = ConfigError([Problem("c.yaml", 3, "x"), Problem("c.yaml", 5, "y")])
    result = run("serve", "--no-admin-api", exit_code=1)
    assert result.stderr == "c.yaml:3: x\nc.yaml:5: y\nError: 2 problems in the config file\n"


def test_a_dotenv_that_cannot_be_read(fails, daemon, folder):
    (folder / ".env").write_bytes(b"ADMIN_KEY=\xff\n")
    assert fails("serve") == ".env is not UTF-8"


def test_a_folder_of_that_name_is_no_dotenv(fails, daemon, folder):
    (folder / ".env").mkdir()
    assert fails("serve").startswith("ADMIN_KEY is not set")


def test_a_dotenv_without_permission(fails, daemon, folder, monkeypatch):
    def denied(_):
        raise PermissionError(13, "Permission denied")

    (folder / ".env").write_text("ADMIN_KEY=adm\n")
    monkeypatch.setattr("dotenv.dotenv_values", denied)
    assert fails("serve") == ".env cannot be read: Permission denied"
