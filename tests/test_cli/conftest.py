"""Fixtures of the commands: a working folder of their own, no variables of the environment, a runner."""

import asyncio

import pytest
from click.testing import CliRunner

from smolproxy.cli.main import cli
from smolproxy.store.database import Database

VARIABLES = ("ADMIN_KEY", "PROXY_HOST", "PROXY_PORT", "DB_PATH", "CONFIG_PATH")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder, without variables that the commands read."""
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def run():
    """Run a command in this process; the result has exit_code, stdout and stderr."""
    try:
        runner = CliRunner(mix_stderr=False)  # click 8.1
    except TypeError:
        runner = CliRunner()

    def invoke(*args, exit_code=0, stdin=None):
        arguments = [str(arg) for arg in args]
        result = runner.invoke(cli, arguments, input=stdin, prog_name="smolproxy", catch_exceptions=False)
        assert result.exit_code == exit_code, (result.stdout, result.stderr)
        return result

    return invoke


@pytest.fixture
def fails(run):
    """Run a command that a user gets wrong: exit 1, one line on stderr, nothing on stdout. Return the message."""

    def invoke(*args):
        result = run(*args, exit_code=1)
        assert result.stdout == ""
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        return result.stderr[len("Error: ") : -1]

    return invoke


@pytest.fixture
def misused(run):
    """Run a command with wrong usage: exit 2. Return what stderr says."""

    def invoke(*args):
        result = run(*args, exit_code=2)
        assert result.stdout == ""
        assert result.stderr.startswith("Usage: smolproxy")
        return result.stderr.splitlines()[-1]

    return invoke


@pytest.fixture
def db():
    """Call a function of the store on the commands' database."""

    def call(work, *args, **kwargs):
        async def opened():
            database = await Database.open("data/proxy.db")
            try:
                return await work(database, *args, **kwargs)
            finally:
                await database.close()

        return asyncio.run(opened())

    return call
