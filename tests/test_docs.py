"""What is written agrees with the code: README, --help, the settings and the example config."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from smolproxy import config
from smolproxy.cli.main import cli
from smolproxy.settings import Settings, options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_tables_of_the_readme_are_those_that_the_code_makes() -> None:
    made = subprocess.run([sys.executable, ROOT / "packaging" / "reference.py", "--check"], check=False)
    assert made.returncode == 0, "run packaging/reference.py"


def test_the_example_config_is_the_one_that_the_code_makes() -> None:
    assert (ROOT / "examples" / "config.yaml").read_text() == config.example()


def test_the_example_config_names_every_setting_with_its_default(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "config.yaml").read_text()
    documented = re.findall(r"^\s*#?\s*(\w+):", text[text.index("settings:") :], flags=re.MULTILINE)
    assert [name for name in documented if name in options()] == list(options())
    shown = "\n".join(re.sub(r"^(\s*)# ?(?=\s*\w+:)", r"\1", line) for line in text.splitlines())
    values = yaml.safe_load(shown)["settings"]
    defaults = Settings()
    for name, value in values.items():
        assert value == (list(got) if isinstance(got := getattr(defaults, name), tuple) else got), name


def test_the_example_config_is_valid() -> None:
    assert config.load(ROOT / "examples" / "config.yaml").settings == Settings()


@pytest.mark.parametrize("name", ["ADMIN_KEY", "PROXY_HOST", "PROXY_PORT", "DB_PATH", "CONFIG_PATH"])
def test_every_variable_is_in_the_readme_and_in_a_help(name: str) -> None:
    # with the settings of its own: a command keeps the help option that it was first asked for
    context = click.Context(cli, **cli.context_settings)
    helps = cli.get_help(context)
    serve = cli.get_command(context, "serve")
    assert serve is not None
    helps += serve.get_help(click.Context(serve, parent=context))
    assert name in helps
    assert f"| `{name}` |" in README


def test_the_files_that_the_readme_names_are_there() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_version_is_written_once() -> None:
    from smolproxy import __version__

    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert "version = attr: smolproxy.__version__" in (ROOT / "setup.cfg").read_text()
    assert "version" not in (ROOT / "pyproject.toml").read_text().split("[tool", 1)[0]
