"""smolproxy servers, but for check."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smolproxy
from smolproxy.store import servers


@pytest.fixture
def gpu(run):
    """Server 1."""
    run("servers", "add", "gpu", "http://10.0.0.5:8080/", "--api-key", "s3cret", "--model", "a", "--model", "b/c:d")


def listed(run):
    return json.loads(run("servers", "list", "--json").stdout)


def test_add(run, db):
    result = run("servers", "add", "gpu", "HTTP://Host:8080/v1/", "--model", "a", "--model", "b", "--slots", 4)
    assert (result.stdout, result.stderr) == ("server 1 (gpu) is added\n", "")
    assert listed(run) == [
        {
            "id": 1,
            "name": "gpu",
            "url": "http://host:8080",
            "active": True,
            "models": ["a", "b"],
            "has_api_key": False,
            "slots": 4,
        }
    ]
    assert run("servers", "add", "--api-key", "", "other", "http://b").exit_code == 0
    assert db(servers.get, 2).api_key is None


def test_no_output_shows_a_servers_key(run, gpu, db):
    assert db(servers.get, 1).api_key == "s3cret"
    assert "s3cret" not in run("servers", "list").stdout + run("servers", "list", "--json").stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gpu", "http://b"), "there is a server 'gpu' already"),
        (("", "http://b"), "server name must not be empty"),
        (("b", "10.0.0.5:8080"), "url '10.0.0.5:8080' has no scheme: write http://10.0.0.5:8080"),
        (
            ("b", "http://user:pa55@h"),
            "url must not hold credentials: give the server's key with --api-key (api_key)",
        ),
        (("b", "http://b", "--slots", "0"), "slots must be a whole number from 1 up, or left out to ask the server"),
        (("b", "http://b", "--model", "x\ny"), "model name must not hold control characters: 'x\\ny'"),
        (("b", "http://b", "--api-key", "a\nb"), "api_key must hold printable ASCII only, without spaces around it"),
    ],
)
def test_add_refuses(run, gpu, fails, args, message):
    assert fails("servers", "add", *args) == message
    assert len(listed(run)) == 1


def test_the_same_url_twice_is_warned_of(run, gpu):
    result = run("servers", "add", "two", "http://10.0.0.5:8080/v1")
    assert result.stderr == "warning: server 1 (gpu) has the same URL: its slots count twice\n"


def test_a_model_hidden_by_an_alias_is_warned_of(run, gpu):
    run("aliases", "set", "fast", "a")
    warning = "warning: alias fast is without effect: a model of that name comes first\n"
    assert run("servers", "add", "two", "http://b", "--model", "fast").stderr == warning
    assert run("servers", "add-model", 1, "fast").stderr == warning


def test_list(run, gpu):
    run("servers", "add", "two", "http://b", "--slots", 1000)
    assert [line.split() for line in run("servers", "list").stdout.splitlines()] == [
        ["id", "name", "url", "active", "key", "slots", "models"],
        ["1", "gpu", "http://10.0.0.5:8080", "yes", "yes", "-", "a,", "b/c:d"],
        ["2", "two", "http://b", "yes", "no", "1,000", "(asked)"],
    ]


def test_an_empty_list_gives_a_hint(run):
    result = run("servers", "list")
    assert (result.stdout, result.stderr) == ("", "no servers yet: smolproxy servers add NAME URL\n")
    assert run("servers", "list", "--json").stdout == "[]\n"


def test_update_changes_what_is_given(run, gpu, db):
    run("servers", "update", 1, "--name", "new", "--slots", 2)
    server = db(servers.get, 1)
    assert (server.name, server.url, server.api_key, server.models, server.slots) == (
        "new", "http://10.0.0.5:8080", "s3cret", ("a", "b/c:d"), 2,
    )  # fmt: skip
    result = run("servers", "update", 1, "--url", "http://x", "--api-key", "other", "--model", "z", "--slots", "none")
    assert result.stdout == "server 1 (new) is changed\n"
    server = db(servers.get, 1)
    assert (server.url, server.api_key, server.models, server.slots) == ("http://x", "other", ("z",), None)


@pytest.mark.parametrize("nothing", ["", "none"])
def test_update_clears_the_key_and_the_models(run, gpu, db, nothing):
    run("servers", "update", 1, "--api-key", nothing)
    assert db(servers.get, 1).api_key is None
    run("servers", "update", 1, "--model", nothing)
    assert db(servers.get, 1).models == ()


def test_update_refuses(run, gpu, fails, misused):
    run("servers", "add", "two", "http://b")
    assert fails("servers", "update", 2, "--name", "gpu") == "there is a server 'gpu' already"
    assert fails("servers", "update", 2, "--name", "") == "server name must not be empty"
    assert fails("servers", "update", 2, "--url", "").startswith("url must not be empty")
    assert fails("servers", "update", 2, "--slots", 0).startswith("slots must be")
    assert "neither a whole number" in misused("servers", "update", 2, "--slots", "x")
    assert misused("servers", "update", 2) == "Error: nothing to change: give an option"


def test_disable_enable_remove(run, gpu):
    assert run("servers", "disable", 1).stdout == "server 1 (gpu) is disabled\n"
    assert listed(run)[0]["active"] is False
    assert run("servers", "enable", 1).stdout == "server 1 (gpu) is enabled\n"
    assert listed(run)[0]["active"] is True
    assert run("servers", "remove", 1).stdout == "server 1 (gpu) is removed\n"
    assert listed(run) == []


@pytest.mark.parametrize("model", ["org/name:tag", "100% sure", "ünï 模型", "m" * 300])
def test_models_of_any_name_are_added_and_removed(run, gpu, fails, model):
    assert run("servers", "add-model", 1, model).stdout == f"server 1 (gpu) has a, b/c:d, {model}\n"
    assert listed(run)[0]["models"] == ["a", "b/c:d", model]
    assert "already" in fails("servers", "add-model", 1, model)
    assert run("servers", "remove-model", 1, model).stdout == "server 1 (gpu) has a, b/c:d\n"
    assert "no model" in fails("servers", "remove-model", 1, model)


def test_the_last_model_removed(run):
    run("servers", "add", "gpu", "http://a", "--model", "m")
    assert run("servers", "remove-model", 1, "m").stdout == "server 1 (gpu) has no models: it gets no requests\n"


def test_reassign_takes_a_model_away_from_others(run, gpu):
    run("servers", "add", "two", "http://b")
    run("servers", "add-model", 2, "a")
    assert [server["models"] for server in listed(run)] == [["a", "b/c:d"], ["a"]]
    run("servers", "remove-model", 2, "a")
    run("servers", "add-model", 2, "a", "--reassign")
    assert [server["models"] for server in listed(run)] == [["b/c:d"], ["a"]]


@pytest.mark.parametrize(
    "args",
    [("enable",), ("disable",), ("remove",), ("update", "--name", "x"), ("add-model", "m"), ("remove-model", "m")],
)
def test_an_unknown_or_impossible_id(fails, misused, args):
    command, *rest = args
    assert fails("servers", command, 77, *rest) == "there is no server 77"
    assert "ID" in misused("servers", command, 0, *rest)


def test_a_key_may_come_by_standard_input(run, db):
    run("servers", "add", "gpu", "http://a", "--api-key", "-", stdin="s3cret\nmore\n")
    assert db(servers.get, 1).api_key == "s3cret"
    run("servers", "update", 1, "--api-key", "-", stdin="  other  ")
    assert db(servers.get, 1).api_key == "other"
    result = run("servers", "update", 1, "--api-key", "-", stdin="", exit_code=2)
    assert "there is none on standard input" in result.stderr
    assert db(servers.get, 1).api_key == "other"


def test_a_key_is_asked_for_at_a_terminal_and_not_shown(db):
    keyboard, terminal = os.openpty()
    command = [sys.executable, "-m", "smolproxy", "servers", "add", "gpu", "http://a", "--api-key", "-"]
    env = {**os.environ, "PYTHONPATH": str(Path(smolproxy.__file__).parent.parent)}
    with subprocess.Popen(
        command, env=env, stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, start_new_session=True
    ) as process:
        os.close(terminal)
        shown = os.read(keyboard, 1000)  # what is typed before is forgotten
        assert b"key" in shown
        os.write(keyboard, b"s3cret\n")
        assert process.stdout.read() == b"server 1 (gpu) is added\n"
        shown += os.read(keyboard, 1000)
    os.close(keyboard)
    assert process.returncode == 0
    assert b"s3cret" not in shown
    assert db(servers.get, 1).api_key == "s3cret"
