"""``smolproxy aliases``: manage short names that stand for models."""

from __future__ import annotations

from dataclasses import asdict

import click

from smolproxy.cli import output
from smolproxy.cli.environment import Environment
from smolproxy.store import aliases as store
from smolproxy.store import servers
from smolproxy.store.database import Database


@click.group()
def aliases() -> None:
    """Manage short names that stand for models."""


@aliases.command("set")
@click.argument("alias")
@click.argument("model")
@click.pass_obj
def set_(env: Environment, alias: str, model: str) -> None:
    """Make ALIAS stand for MODEL, whether it is new or not."""

    async def work(db: Database) -> bool:
        await store.set_alias(db, alias, model)
        return any(model in server.models for server in await servers.list_all(db))

    if not env.run(work):
        output.note(f"warning: no server lists {model}; one without a list may still have it")
    output.say(f"{alias} stands for {model}")


@aliases.command("list")
@output.json_option
@click.pass_obj
def list_(env: Environment, as_json: bool) -> None:
    """List all aliases."""
    found = env.run(store.list_all)
    if as_json:
        output.print_json([asdict(alias) for alias in found])
    elif found:
        output.table(("alias", "model"), [(alias.alias_name, alias.real_model_name) for alias in found])
    else:
        output.note("no aliases yet: smolproxy aliases set ALIAS MODEL")


@aliases.command()
@click.argument("alias")
@click.pass_obj
def remove(env: Environment, alias: str) -> None:
    """Remove ALIAS."""
    env.run(lambda db: store.remove(db, alias))
    output.say(f"alias {alias} is removed")
