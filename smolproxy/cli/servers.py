"""``smolproxy servers``: manage the llama-servers that requests are forwarded to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from smolproxy.cli import output
from smolproxy.cli.environment import Environment
from smolproxy.cli.options import CLEAR, id_argument, secret, whole_or_none
from smolproxy.store import aliases
from smolproxy.store import servers as store
from smolproxy.store.database import Database


@click.group()
def servers() -> None:
    """Manage the llama-servers that requests are forwarded to."""


@servers.command()
@click.argument("name")
@click.argument("url")
@click.option(
    "--api-key", callback=secret, metavar="KEY|-", help="Sent to this server as its bearer token; -: standard input."
)
@click.option("--model", "models", multiple=True, metavar="NAME", help="A model of it; may be repeated. None: ask it.")
@click.option("--slots", type=int, metavar="N", help="Requests at once. Left out, the server itself is asked.")
@click.pass_obj
def add(env: Environment, name: str, url: str, api_key: str | None, models: Sequence[str], slots: int | None) -> None:
    """Add the server NAME, reached at URL, such as http://10.0.0.5:8080."""

    async def work(db: Database) -> store.Server:
        server = await store.add(db, name, url, api_key=api_key or None, models=models, slots=slots)
        await _warn(db, server)
        return server

    server = env.run(work)
    output.say(f"server {server.id} ({server.name}) is added")


@servers.command("list")
@output.json_option
@click.pass_obj
def list_(env: Environment, as_json: bool) -> None:
    """List all servers and the models listed for them."""
    found = env.run(store.list_all)
    if as_json:
        output.print_json([_row(server) for server in found])
    elif found:
        output.table(
            ("id", "name", "url", "active", "key", "slots", "models"),
            [
                (
                    str(one.id),
                    one.name,
                    one.url,
                    one.active,
                    one.api_key is not None,
                    one.slots,
                    one.models if one.listed else "(asked)",
                )
                for one in found
            ],
        )
    else:
        output.note("no servers yet: smolproxy servers add NAME URL")


@servers.command()
@id_argument
@click.option("--name", help="Another name.")
@click.option("--url", help="Another address.")
@click.option(
    "--api-key", callback=secret, metavar="KEY|-|none", help="Another bearer token; -: standard input; none: none."
)
@click.option("--model", "models", multiple=True, metavar="NAME", help="Replaces its list; may be repeated; none: ask.")
@click.option("--slots", callback=whole_or_none, metavar="N", help="Requests at once; none: ask the server itself.")
@click.pass_obj
def update(env: Environment, /, id_: int, api_key: str | None, models: Sequence[str], **given: Any) -> None:
    """Change the server with the number ID; what is not given stays."""
    changes = {name: value for name, value in given.items() if value is not None}
    if changes.get("slots") == CLEAR:
        changes["slots"] = None
    if api_key is not None:
        changes["api_key"] = None if api_key in ("", CLEAR) else api_key
    if models:
        changes["models"] = [] if list(models) in ([""], [CLEAR]) else list(models)
    if not changes:
        raise click.UsageError("nothing to change: give an option")

    async def work(db: Database) -> store.Server:
        server = await store.update(db, id_, changes)
        await _warn(db, server)
        return server

    server = env.run(work)
    output.say(f"server {server.id} ({server.name}) is changed")


@servers.command()
@id_argument
@click.pass_obj
def enable(env: Environment, id_: int) -> None:
    """Send requests to the server with the number ID again."""
    server = env.run(lambda db: store.update(db, id_, {"active": True}))
    output.say(f"server {server.id} ({server.name}) is enabled")


@servers.command()
@id_argument
@click.pass_obj
def disable(env: Environment, id_: int) -> None:
    """Send no more requests to the server with the number ID; those that run go on."""
    server = env.run(lambda db: store.update(db, id_, {"active": False}))
    output.say(f"server {server.id} ({server.name}) is disabled")


@servers.command()
@id_argument
@click.pass_obj
def remove(env: Environment, id_: int) -> None:
    """Remove the server with the number ID; its usage stays in the books."""

    async def work(db: Database) -> store.Server:
        server = await store.get(db, id_)
        await store.remove(db, id_)
        return server

    server = env.run(work)
    output.say(f"server {server.id} ({server.name}) is removed")


@servers.command()
@id_argument
@click.argument("model")
@click.option("--reassign", is_flag=True, help="Take the model away from all other servers.")
@click.pass_obj
def add_model(env: Environment, id_: int, model: str, reassign: bool) -> None:
    """List MODEL for the server with the number ID."""

    async def work(db: Database) -> store.Server:
        server = await store.add_model(db, id_, model, reassign=reassign)
        await _warn(db, server)
        return server

    server = env.run(work)
    output.say(f"server {server.id} ({server.name}) has {_models(server)}")


@servers.command()
@id_argument
@click.argument("model")
@click.pass_obj
def remove_model(env: Environment, id_: int, model: str) -> None:
    """List MODEL no longer for the server with the number ID."""
    server = env.run(lambda db: store.remove_model(db, id_, model))
    output.say(f"server {server.id} ({server.name}) has {_models(server)}")


@servers.command()
@output.json_option
@click.pass_context
def check(ctx: click.Context, as_json: bool) -> None:
    """Ask each enabled server for its health and models; exit with 1 if one is not up."""
    from smolproxy.cli.check import check_all

    env: Environment = ctx.obj
    results = check_all(env.run(store.list_all))
    if as_json:
        output.print_json([asdict(result) for result in results])
    elif results:
        output.table(
            ("name", "url", "state", "models", "slots", "error"),
            [(one.name, one.url, one.state.replace("_", " "), one.models, one.slots, one.error) for one in results],
        )
    else:
        output.note("no servers yet: smolproxy servers add NAME URL")
    if any(result.state not in ("up", "disabled") for result in results):
        ctx.exit(1)


def _row(server: store.Server) -> dict[str, Any]:
    """Return a server in the shape of ``GET /admin/servers``, without what only a running daemon knows."""
    return {
        "id": server.id,
        "name": server.name,
        "url": server.url,
        "active": server.active,
        "models": list(server.models),
        "has_api_key": server.api_key is not None,
        "slots": server.slots,
    }


def _models(server: store.Server) -> str:
    if server.listed:
        return ", ".join(server.models) or "no models: it gets no requests"
    return "no models listed: it is asked itself"


async def _warn(db: Database, server: store.Server) -> None:
    """Warn of what is allowed, but hardly meant."""
    for other in await store.list_all(db):
        if other.url == server.url and other.id != server.id:
            output.note(f"warning: server {other.id} ({other.name}) has the same URL: its slots count twice")
    for alias in await aliases.list_all(db):
        if alias.alias_name in server.models:
            output.note(f"warning: alias {alias.alias_name} is without effect: a model of that name comes first")
