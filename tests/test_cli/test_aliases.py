"""smolproxy aliases."""

import json

import pytest


def listed(run):
    return json.loads(run("aliases", "list", "--json").stdout)


def test_set_creates_and_updates(run):
    run("servers", "add", "s", "http://a", "--model", "m1", "--model", "m2")
    result = run("aliases", "set", "fast", "m1")
    assert (result.stdout, result.stderr) == ("fast stands for m1\n", "")
    run("aliases", "set", "fast", "m2")
    assert listed(run) == [{"alias_name": "fast", "real_model_name": "m2"}]


def test_a_model_that_no_server_lists_is_accepted_with_a_warning(run):
    result = run("aliases", "set", "fast", "org/m: ü")
    assert result.stderr == "warning: no server lists org/m: ü; one without a list may still have it\n"
    assert listed(run)[0]["real_model_name"] == "org/m: ü"


def test_list(run):
    run("aliases", "set", "slow", "m2")
    run("aliases", "set", "fast", "m1")
    assert run("aliases", "list").stdout == "alias  model\nfast   m1\nslow   m2\n"


def test_an_empty_list_gives_a_hint(run):
    result = run("aliases", "list")
    assert (result.stdout, result.stderr) == ("", "no aliases yet: smolproxy aliases set ALIAS MODEL\n")
    assert listed(run) == []


def test_remove(run, fails):
    run("aliases", "set", "a/b", "m")
    assert run("aliases", "remove", "a/b").stdout == "alias a/b is removed\n"
    assert listed(run) == []
    assert fails("aliases", "remove", "a/b") == "there is no alias 'a/b'"


@pytest.mark.parametrize(
    ("alias", "model", "message"),
    [
        ("m1", "m2", "there is a model 'm1' already"),
        ("x", "fast", "'fast' is an alias itself: give the model that it stands for"),
        ("x", "x", "alias 'x' cannot stand for itself"),
        ("", "m1", "alias name must not be empty"),
        ("x", "", "model name must not be empty"),
        ("a\tb", "m1", "alias name must not hold control characters: 'a\\tb'"),
    ],
)
def test_set_refuses(run, fails, alias, model, message):
    run("servers", "add", "s", "http://a", "--model", "m1")
    run("aliases", "set", "fast", "m1")
    assert fails("aliases", "set", alias, model) == message
    assert len(listed(run)) == 1
