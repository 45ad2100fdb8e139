"""The command as a whole: help, version, exit codes, precedence of --db, what is imported; in real processes too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from smolproxy import __version__
from smolproxy.cli.main import cli
from smolproxy.errors import DatabaseError

ROOT = Path(__file__).parent.parent.parent

# SPEC: every command there is.
COMMANDS = {
    "serve", "demo", "keys create", "keys list", "keys show", "keys disable", "keys enable", "keys delete",
    "keys rotate", "keys limits", "servers add", "servers list", "servers update", "servers enable", "servers disable",
    "servers remove", "servers add-model", "servers remove-model", "servers check", "aliases set", "aliases list",
    "aliases remove", "usage", "config check",
}  # fmt: skip
LISTINGS = {"keys list", "servers list", "servers check", "aliases list", "usage"}


def walk(command, path=()):
    """Yield (path, command) of the command and all below it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from walk(command.get_command(context, name), (*path, name))


ALL = {" ".join(path): command for path, command in walk(cli)}


def smolproxy(*args, **options):
    """Run a real process."""
    return subprocess.run(
        [sys.executable, "-m", "smolproxy", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})},
        **options,
    )


def test_the_commands_are_those_of_the_contract():
    assert {path for path, command in ALL.items() if not isinstance(command, click.Group)} == COMMANDS


@pytest.mark.parametrize("path", ALL)
def test_every_command_and_option_has_a_help(run, path):
    command = ALL[path]
    assert command.help, path
    for param in command.params:
        assert not isinstance(param, click.Option) or param.help, (path, param.name)
    short = run(*path.split(), "-h").stdout
    assert short == run(*path.split(), "--help").stdout
    assert short.startswith(f"Usage: smolproxy {path}".rstrip())


@pytest.mark.parametrize("path", sorted(LISTINGS))
def test_every_listing_takes_json(path):
    assert "--json" in {name for param in ALL[path].params for name in param.opts}


def test_the_version(run):
    assert run("--version").stdout == f"smolproxy, version {__version__}\n"


def test_wrong_usage(misused):
    assert "nonsense" in misused("nonsense")
    assert "nonsense" in misused("keys", "nonsense")
    assert "--nonsense" in misused("keys", "list", "--nonsense")
    assert "surplus" in misused("keys", "list", "surplus")


def test_the_database_flag_wins_over_the_environment_over_dotenv_over_the_default(run, folder, monkeypatch):
    def made():
        return {str(path.relative_to(folder)) for path in folder.rglob("*.db")}

    run("keys", "list")
    assert made() == {"data/proxy.db"}
    (folder / ".env").write_text("DB_PATH=dotenv.db\n")
    run("keys", "list")
    assert made() == {"data/proxy.db", "dotenv.db"}
    monkeypatch.setenv("DB_PATH", "environment.db")
    run("keys", "list")
    assert made() == {"data/proxy.db", "dotenv.db", "environment.db"}
    run("--db", "new/flag.db", "keys", "list")
    assert made() == {"data/proxy.db", "dotenv.db", "environment.db", "new/flag.db"}


def test_a_database_that_cannot_be_used(fails, folder):
    (folder / "text.db").write_text("this is no database, but a text that is long enough to be one" * 20)
    assert "text.db" in fails("--db", "text.db", "keys", "list")
    (folder / "file").write_text("")
    assert "file" in fails("--db", "file/x.db", "keys", "list")


def test_an_error_of_several_lines_is_printed_as_one(fails, monkeypatch):
    def broken(*_):
        raise DatabaseError("a\nb")

    monkeypatch.setattr("smolproxy.store.keys.list_all", broken)
    assert fails("keys", "list") == "a b"


# -- real processes --


def test_a_key_goes_into_a_variable_of_the_shell(folder):
    script = f'KEY=$({sys.executable} -m smolproxy keys create ann 2>/dev/null) && printf "[%s]" "$KEY"'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout.startswith("[sk-")
    assert result.stdout.endswith("]")
    assert len(result.stdout.split()) == 1
    listed = json.loads(smolproxy("keys", "list", "--json").stdout)
    assert result.stdout[1:].startswith(listed[0]["prefix"])


def test_exit_codes_and_no_traceback(folder):
    assert smolproxy("-h").returncode == 0
    failed = smolproxy("keys", "show", 7)
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", "Error: there is no key 7\n")
    assert smolproxy("keys", "show").returncode == 2
    refused = smolproxy("serve")
    assert refused.returncode == 1
    assert refused.stderr.startswith("Error: ADMIN_KEY is not set")
    assert refused.stderr.count("\n") == 1


def test_an_argument_that_is_not_unicode(folder):
    result = smolproxy("keys", "create", b"\xff".decode("utf-8", "surrogateescape"))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


def test_a_reader_that_has_gone_is_no_error_to_shout_about(folder):
    smolproxy("keys", "create", "ann")
    process = subprocess.Popen(
        [sys.executable, "-m", "smolproxy", "keys", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    process.stdout.close()
    with process.stderr as stderr:
        assert stderr.read() == b""
    assert process.wait(60) == 1


PROBE = """
import sys
from smolproxy.cli.main import cli

def run(*args):
    try:
        cli(list(args), prog_name="smolproxy")
    except SystemExit:
        pass

for args in {runs!r}:
    run(*args)
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"aiohttp", "structlog", "uvloop", "rich", "yaml"}}))
"""


def probe(runs):
    """Return which of the heavy modules are imported after some commands."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(runs=runs)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return result.stdout.splitlines()[-1]


def test_no_command_but_serve_and_demo_imports_aiohttp(folder):
    runs = [["-h"], *([*path.split(), "-h"] for path in ALL if path)]
    runs += [
        ["keys", "create", "ann"],
        ["keys", "list"],
        ["keys", "show", "1"],
        ["keys", "limits", "1", "--rpm", "1", "--models", "a"],
        ["keys", "disable", "1"],
        ["keys", "enable", "1"],
        ["keys", "rotate", "1"],
        ["servers", "add", "a", "http://127.0.0.1:9", "--model", "m"],
        ["servers", "list"],
        ["servers", "update", "1", "--slots", "1"],
        ["servers", "add-model", "1", "n"],
        ["servers", "remove-model", "1", "n"],
        ["servers", "check"],
        ["servers", "disable", "1"],
        ["servers", "enable", "1"],
        ["aliases", "set", "x", "m"],
        ["aliases", "list"],
        ["aliases", "remove", "x"],
        ["servers", "remove", "1"],
        ["usage"],
        ["usage", "--logs"],
        ["usage", "--json"],
        ["usage", "--csv", "--by", "key,day"],
        ["keys", "delete", "1"],
    ]
    assert {" ".join(args[:2]) for args in runs} >= COMMANDS - {"serve", "demo", "config check", "usage"}
    assert probe(runs) == "[]"
    (folder / "config.yaml").write_text("{}")
    assert probe([["config", "check"], ["keys", "create"]]) == "['yaml']"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["keys", "create", "ann"], ["usage", "--json"]])
def test_output_that_cannot_be_written_is_told_in_one_line(arguments, tmp_path):
    command = [sys.executable, "-m", "smolproxy", "--db", str(tmp_path / "p.db"), *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Error: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
