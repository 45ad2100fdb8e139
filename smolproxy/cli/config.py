"""``smolproxy config``: check the config file."""

from __future__ import annotations

import click

from smolproxy.cli import output
from smolproxy.cli.environment import Environment


@click.group()
def config() -> None:
    """Check the config file."""


@config.command()
@click.argument("file", required=False)
@click.pass_obj
def check(env: Environment, file: str | None) -> None:
    """Check FILE (CONFIG_PATH or config.yaml if not given) and name each problem with its line."""
    from smolproxy.config import load

    path, _ = env.config(file)
    found = load(path)
    output.say(f"{path} is good (servers: {len(found.servers)}, aliases: {len(found.aliases)})")
