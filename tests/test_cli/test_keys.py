"""smolproxy keys."""

import json
import stat
import time

import pytest

from smolproxy.core.tokens import digest
from smolproxy.store import keys


@pytest.fixture
def ann(run):
    """The secret of key 1."""
    return run("keys", "create", "ann").stdout.strip()


def shown(run, key_id=1):
    return json.loads(run("keys", "show", key_id, "--json").stdout)


def test_create_prints_the_key_alone_on_stdout(run, db):
    result = run("keys", "create", "ann")
    secret = result.stdout[:-1]
    assert result.stdout == f"{secret}\n"
    assert result.stderr == "key 1 (ann): keep it now, it is shown only this once\n"
    assert db(keys.find, digest(secret)).name == "ann"


def test_create_as_json_and_without_a_name(run, db):
    result = run("keys", "create", "--json")
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert list(found) == ["id", "key", "name"]
    assert (found["id"], found["name"]) == (1, "unnamed")
    assert db(keys.find, digest(found["key"])).id == 1


def test_the_database_is_made_private(run, folder):
    run("keys", "list")
    assert stat.S_IMODE((folder / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "data" / "proxy.db").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 301, "\udcff"])
def test_a_bad_name_is_refused(fails, name):
    assert fails("keys", "create", name).startswith("key name must ")


def test_create_gives_the_limits_of_the_config_file(run, folder):
    (folder / "config.yaml").write_text("settings: {key_defaults: {rpm_limit: 7, models: ['a*'], expires_at: 30d}}")
    run("keys", "create", "ann")
    key = shown(run)
    assert (key["rpm_limit"], key["models"], key["tpm_limit"]) == (7, ["a*"], None)
    assert key["expires_at"] > time.strftime("%Y-%m-%d", time.gmtime(time.time() + 29 * 86400))


def test_create_makes_no_key_when_the_config_file_is_bad(run, folder, monkeypatch):
    (folder / "config.yaml").write_text("settings: {key_defaults: {rpm: 7}}")
    result = run("keys", "create", "ann", exit_code=1)
    assert result.stdout == ""
    assert result.stderr.startswith('config.yaml:1: unknown name "rpm" in key_defaults')
    assert run("keys", "list", "--json").stdout == "[]\n"
    monkeypatch.setenv("CONFIG_PATH", "missing.yaml")
    assert run("keys", "create", exit_code=1).stderr.startswith("missing.yaml:1: cannot be read")


def test_list(run, ann):
    run("keys", "create", "bob")
    run("keys", "disable", 2)
    run("keys", "limits", 2, "--rpm", 60, "--models", "a,b", "--expires", "2031-01-01")
    head, first, second = run("keys", "list").stdout.splitlines()
    assert head.split() == ["id", "name", "prefix", "active", "created", "(UTC)", "limits"]
    assert first.split()[:4] == ["1", "ann", ann[:11], "yes"]
    assert first.endswith("  -")
    assert second.split()[3] == "no"
    assert second.endswith("rpm 60, models a b, expires 2031-01-01 00:00:00")
    assert ann not in first


def test_list_as_json_has_the_shape_of_the_admin_api(run, ann):
    (key,) = json.loads(run("keys", "list", "--json").stdout)
    assert list(key) == [
        "id", "name", "prefix", "active", "created_at", "rpm_limit", "tpm_limit", "parallel_limit", "budget",
        "budget_period", "models", "expires_at", "max_tokens", "priority",
    ]  # fmt: skip
    assert (key["id"], key["name"], key["prefix"], key["active"]) == (1, "ann", ann[:11], True)
    assert key["created_at"][:4] >= "2024"
    assert key["created_at"].endswith("Z")


def test_an_empty_list_gives_a_hint(run):
    result = run("keys", "list")
    assert (result.stdout, result.stderr) == ("", "no keys yet: smolproxy keys create NAME\n")
    result = run("keys", "list", "--json")
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_show(run, ann):
    lines = run("keys", "show", 1).stdout.splitlines()
    assert [line.split()[0] for line in lines][:5] == ["field", "id", "name", "prefix", "active"]
    assert "rpm_limit" in lines[6]
    assert lines[6].endswith("-")
    assert shown(run) == json.loads(run("keys", "list", "--json").stdout)[0]


def test_disable_and_enable(run, ann):
    assert run("keys", "disable", 1).stdout == "key 1 (ann) is disabled\n"
    assert shown(run)["active"] is False
    run("keys", "disable", 1)
    assert shown(run)["active"] is False
    assert run("keys", "enable", 1).stdout == "key 1 (ann) is enabled\n"
    assert shown(run)["active"] is True


def test_delete(run, ann, fails, db):
    assert run("keys", "delete", 1).stdout == "key 1 (ann) is deleted\n"
    assert run("keys", "list", "--json").stdout == "[]\n"
    assert db(keys.find, digest(ann)) is None
    assert fails("keys", "delete", 1) == fails("keys", "show", 1)


def test_rotate_keeps_all_but_the_secret(run, ann, db):
    run("keys", "limits", 1, "--rpm", 3)
    before = shown(run)
    result = run("keys", "rotate", 1)
    assert "shown only this once" in result.stderr
    secret = result.stdout.strip()
    assert secret != ann
    assert db(keys.find, digest(ann)) is None
    assert db(keys.find, digest(secret)).id == 1
    assert {**shown(run), "prefix": ""} == {**before, "prefix": ""}
    found = json.loads(run("keys", "rotate", 1, "--json").stdout)
    assert (found["id"], found["name"]) == (1, "ann")
    assert db(keys.find, digest(found["key"])).id == 1


@pytest.mark.parametrize("command", ["show", "disable", "enable", "delete", "rotate", "limits"])
def test_an_unknown_or_impossible_id(fails, misused, command):
    assert fails("keys", command, 77) == "there is no key 77"
    for wrong in ("x", "0", "-1", "1.5", 2**63):
        assert "ID" in misused("keys", command, "--", wrong)
    assert "Missing argument" in misused("keys", command)


# -- limits --

EVERY = {
    "--rpm": ("rpm_limit", "60", 60),
    "--tpm": ("tpm_limit", "100000", 100000),
    "--parallel": ("parallel_limit", "0", 0),
    "--budget": ("budget", "5000000", 5000000),
    "--budget-period": ("budget_period", "week", "week"),
    "--models": ("models", "a*,b/c:d", ["a*", "b/c:d"]),
    "--expires": ("expires_at", "2031-05-31T18:30", "2031-05-31T18:30:00Z"),
    "--max-tokens": ("max_tokens", "512", 512),
    "--priority": ("priority", "3", 3),
}


@pytest.mark.parametrize("option", EVERY)
def test_a_limit_is_set_alone_and_cleared_with_none(run, ann, option):
    field, given, stored = EVERY[option]
    result = json.loads(run("keys", "limits", 1, option, given, "--json").stdout)
    assert result == shown(run)
    limits = {name: value for name, value in result.items() if value is not None and name in LIMITS}
    assert limits == {field: stored}
    run("keys", "limits", 1, option, "none")
    assert shown(run)[field] is None


LIMITS = {field for field, _, _ in EVERY.values()}


def test_all_limits_at_once_and_others_stay(run, ann):
    run("keys", "limits", 1, *(part for option, (_, given, _) in EVERY.items() for part in (option, given)))
    run("keys", "limits", 1, "--rpm", 1, "--budget", "none")
    expected = {field: stored for field, _, stored in EVERY.values()} | {"rpm_limit": 1, "budget": None}
    assert {name: value for name, value in shown(run).items() if name in LIMITS} == expected


def test_limits_without_an_option_shows_them(run, ann):
    assert run("keys", "limits", 1).stdout == run("keys", "show", 1).stdout
    assert json.loads(run("keys", "limits", 1, "--json").stdout) == shown(run)


def test_models_may_be_repeated(run, ann):
    run("keys", "limits", 1, "--models", "a, b", "--models", "c")
    assert shown(run)["models"] == ["a", "b", "c"]


def test_models_that_match_nothing_are_warned_of(run, ann):
    run("servers", "add", "s", "http://a", "--model", "qwen-8b")
    run("aliases", "set", "fast", "qwen-8b")
    result = run("keys", "limits", 1, "--models", "qwen*,fast,gemma*")
    assert result.stderr == "warning: no model listed for a server and no alias matches 'gemma*'\n"
    assert shown(run)["models"] == ["qwen*", "fast", "gemma*"]


def test_expires_takes_an_age_from_now(run, ann):
    run("keys", "limits", 1, "--expires", "2d")
    day = shown(run)["expires_at"][:10]
    assert day in {time.strftime("%Y-%m-%d", time.gmtime(time.time() + 2 * 86400 + off)) for off in (-60, 60)}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rpm", "-5"),
        ("--tpm", str(10**30)),
        ("--priority", "0"),
        ("--budget-period", "year"),
        ("--expires", "2020-01-01"),
        ("--expires", "soon"),
        ("--expires", "2031-02-31"),
    ],
)
def test_a_limit_out_of_range_is_refused_and_changes_nothing(run, ann, fails, option, value):
    before = shown(run)
    message = fails("keys", "limits", 1, "--parallel", 1, option, value)
    assert option.strip("-").replace("-", "_")[:4] in message
    assert shown(run) == before


@pytest.mark.parametrize("value", ["1.5", "x", "", "1e3", "None"])
def test_a_limit_that_is_no_number(misused, value):
    assert "is neither a whole number nor 'none'" in misused("keys", "limits", 1, "--rpm", value)


def test_models_without_a_name(misused):
    assert '"none" clears the limit' in misused("keys", "limits", 1, "--models", " , ")
