"""``smolproxy keys``: make and manage the users' API keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from smolproxy.cli import output
from smolproxy.cli.environment import Environment
from smolproxy.cli.options import CLEAR, id_argument, whole_or_none
from smolproxy.core import times
from smolproxy.core.limits import (
    Limits,
    limits_as_json,
    limits_from_defaults,
    parse_expiry,
    parse_limits,
    unmatched_models,
)
from smolproxy.store import keys as store
from smolproxy.store.usage import iso

if TYPE_CHECKING:
    from smolproxy.store.database import Database


@click.group()
def keys() -> None:
    """Make and manage the users' API keys."""


@keys.command()
@click.argument("name", default="unnamed")
@output.json_option
@click.pass_obj
def create(env: Environment, name: str, as_json: bool) -> None:
    """Make a key for NAME and print it, this once, alone on stdout.

    Its limits are the settings.key_defaults of the config file, if there is one.
    """
    defaults = _defaults(env)
    _print_secret(*env.run(lambda db: store.create(db, name, defaults)), as_json)


@keys.command("list")
@output.json_option
@click.pass_obj
def list_(env: Environment, as_json: bool) -> None:
    """List all keys."""
    found = env.run(store.list_all)
    if as_json:
        output.print_json([_row(key) for key in found])
    elif found:
        output.table(
            ("id", "name", "prefix", "active", "created (UTC)", "limits"),
            [
                (str(key.id), key.name, key.prefix, key.active, times.short(key.created_at), _in_words(key.limits))
                for key in found
            ],
        )
    else:
        output.note("no keys yet: smolproxy keys create NAME")


@keys.command()
@id_argument
@output.json_option
@click.pass_obj
def show(env: Environment, id_: int, as_json: bool) -> None:
    """Show the key with the number ID and its limits."""
    _print_key(env.run(lambda db: store.get(db, id_)), as_json)


@keys.command()
@id_argument
@click.pass_obj
def disable(env: Environment, id_: int) -> None:
    """Refuse the key with the number ID until it is enabled again."""
    key = env.run(lambda db: store.set_active(db, id_, False))
    output.say(f"key {key.id} ({key.name}) is disabled")


@keys.command()
@id_argument
@click.pass_obj
def enable(env: Environment, id_: int) -> None:
    """Accept the key with the number ID again."""
    key = env.run(lambda db: store.set_active(db, id_, True))
    output.say(f"key {key.id} ({key.name}) is enabled")


@keys.command()
@id_argument
@click.pass_obj
def delete(env: Environment, id_: int) -> None:
    """Delete the key with the number ID; its usage stays in the books."""

    async def work(db: Database) -> store.Key:
        key = await store.get(db, id_)
        await store.delete(db, id_)
        return key

    key = env.run(work)
    output.say(f"key {key.id} ({key.name}) is deleted")


@keys.command()
@id_argument
@output.json_option
@click.pass_obj
def rotate(env: Environment, id_: int, as_json: bool) -> None:
    """Replace the secret of the key with the number ID and print the new one.

    The old one is refused from now on; id, name, limits and history stay.
    """
    _print_secret(*env.run(lambda db: store.rotate(db, id_)), as_json)


@keys.command()
@id_argument
@click.option("--rpm", callback=whole_or_none, metavar="N", help="Requests per minute.")
@click.option("--tpm", callback=whole_or_none, metavar="N", help="Tokens per minute.")
@click.option("--parallel", callback=whole_or_none, metavar="N", help="Requests at once.")
@click.option("--budget", callback=whole_or_none, metavar="N", help="Tokens per calendar period.")
@click.option("--budget-period", metavar="day|week|month", help="The period; weeks begin on Monday.")
@click.option("--models", multiple=True, metavar="NAMES", help="Names or globs, with commas between; may be repeated.")
@click.option("--expires", metavar="TIME", help="ISO date or time (UTC), or an age from now: 30d.")
@click.option("--max-tokens", callback=whole_or_none, metavar="N", help="Most tokens that one request may generate.")
@click.option(
    "--priority", callback=whole_or_none, metavar="N", help="Weight when servers are full: larger is a larger share."
)
@output.json_option
@click.pass_obj
def limits(env: Environment, /, id_: int, as_json: bool, models: Sequence[str], **given: Any) -> None:
    """Set limits of the key with the number ID, or show them.

    Limits that are not given stay as they are. The word "none" clears one; 0 admits nothing.
    """
    changes = _changes(given, models)
    if not changes:
        _print_key(env.run(lambda db: store.get(db, id_)), as_json)
        return

    async def work(db: Database) -> tuple[store.Key, list[str]]:
        return await store.set_limits(db, id_, changes), await _unmatched(db, changes.get("models") or ())

    key, unmatched = env.run(work)
    for pattern in unmatched:
        output.note(f"warning: no model listed for a server and no alias matches {pattern!r}")
    _print_key(key, as_json)


_OPTIONS = {
    "rpm": "rpm_limit",
    "tpm": "tpm_limit",
    "parallel": "parallel_limit",
    "budget": "budget",
    "budget_period": "budget_period",
    "expires": "expires_at",
    "max_tokens": "max_tokens",
    "priority": "priority",
}


def _changes(given: dict[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """Return the limits that were given, as the store takes them: None clears one."""
    now_ms = time.time_ns() // 1_000_000
    changes = {_OPTIONS[name]: None if value == CLEAR else value for name, value in given.items() if value is not None}
    if models:
        names = [name.strip() for text in models for name in text.split(",") if name.strip()]
        if not names:
            raise click.BadParameter('names no model; "none" clears the limit', param_hint="--models")
        changes["models"] = None if names == [CLEAR] else names
    expiry = changes.pop("expires_at", None)
    parsed = parse_limits(changes, now_ms=now_ms)
    if given["expires"] is not None:
        parsed["expires_at"] = None if expiry is None else parse_expiry(expiry, now_ms=now_ms, ages=True)
    return parsed


async def _unmatched(db: Database, patterns: Sequence[str]) -> list[str]:
    """Return the patterns that match no listed model and no alias."""
    from smolproxy.store import aliases, servers

    names = {model for server in await servers.list_all(db) for model in server.models}
    names.update(alias.alias_name for alias in await aliases.list_all(db))
    return unmatched_models(patterns, names)


def _defaults(env: Environment) -> Limits:
    """Return the limits of new keys by the config file."""
    path, named = env.config()
    if not named and not path.exists():
        return Limits()
    from smolproxy import config

    return limits_from_defaults(config.load(path).settings.key_defaults, time.time_ns() // 1_000_000)


def _row(key: store.Key) -> dict[str, Any]:
    """Return a key in the shape of ``GET /admin/keys``."""
    return {
        "id": key.id,
        "name": key.name,
        "prefix": key.prefix,
        "active": key.active,
        "created_at": iso(key.created_at),
        **limits_as_json(key.limits),
    }


def _in_words(limits: Limits) -> str | None:
    """Return the limits that are set, on one line; None if there are none."""
    words = [
        f"{name.removesuffix('_limit').removesuffix('_at').replace('_', ' ')} {value}"
        for name, value in _row_of_limits(limits).items()
        if value is not None
    ]
    return ", ".join(words) or None


def _row_of_limits(limits: Limits) -> dict[str, Any]:
    return {
        **limits_as_json(limits),
        "models": None if limits.models is None else " ".join(limits.models),
        "expires_at": None if limits.expires_at is None else times.short(limits.expires_at),
    }


def _print_key(key: store.Key, as_json: bool) -> None:
    if as_json:
        output.print_json(_row(key))
        return
    fields = {
        "id": str(key.id),
        "name": key.name,
        "prefix": key.prefix,
        "active": key.active,
        "created_at": times.short(key.created_at),
        **_row_of_limits(key.limits),
    }
    output.table(("field", "value"), list(fields.items()))


def _print_secret(key: store.Key, secret: str, as_json: bool) -> None:
    if as_json:
        output.print_json({"id": key.id, "key": secret, "name": key.name})
        return
    output.note(f"key {key.id} ({key.name}): keep it now, it is shown only this once")
    click.echo(secret)
