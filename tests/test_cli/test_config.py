"""smolproxy config check."""

import pytest

GOOD = "servers: [{name: a, url: 'http://a'}]\naliases: {x: y, z: y}\n"
BAD = "servers:\n- name: a\nsettings:\n  heartbeet: 1\n"


def test_a_good_file(run, folder):
    (folder / "my.yaml").write_text(GOOD)
    assert run("config", "check", "my.yaml").stdout == "my.yaml is good (servers: 1, aliases: 2)\n"


def test_every_problem_is_named_with_path_and_line(run, folder):
    (folder / "my.yaml").write_text(BAD)
    result = run("config", "check", "my.yaml", exit_code=1)
    assert result.stdout == ""
    assert result.stderr == (
        "my.yaml:2: a server needs a url\n"
        'my.yaml:4: unknown name "heartbeet" in settings; did you mean "heartbeat"?\n'
        "Error: 2 problems in the config file\n"
    )


@pytest.mark.parametrize("where", ["environment", "dotenv", "default"])
def test_the_file_of_the_environment_or_the_default(run, folder, monkeypatch, where):
    name = "config.yaml" if where == "default" else "other.yaml"
    (folder / name).write_text(GOOD)
    if where == "environment":
        monkeypatch.setenv("CONFIG_PATH", name)
    elif where == "dotenv":
        (folder / ".env").write_text(f"CONFIG_PATH={name}\n")
    assert run("config", "check").stdout.startswith(f"{name} is good")


def test_a_missing_file(run):
    result = run("config", "check", exit_code=1)
    assert result.stderr.splitlines() == [
        "config.yaml:1: cannot be read: No such file or directory",
        "Error: 1 problem in the config file",
    ]


def test_nothing_is_written(run, folder):
    (folder / "config.yaml").write_text(GOOD)
    run("config", "check")
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
