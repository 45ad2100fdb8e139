"""Merging a config file into the database: what the file names is created or updated, everything else stays.

This module decides what differs; it writes nothing that is already so, since every write makes a running daemon load
its directory anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smolproxy.config import FileConfig, ServerEntry
from smolproxy.core.urls import normalise_url
from smolproxy.store import aliases, servers
from smolproxy.store.database import Database


@dataclass(frozen=True)
class Merged:
    """What a merge did, in words for the log; no word tells a server's key."""

    changes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


async def merge(db: Database, config: FileConfig) -> Merged:
    """Merge a config file into the database, all of it or, after an error, nothing.

    Servers and aliases are created or updated by name. Listed models replace the server's list; models, slots and a
    key that the file does not mention stay. Keys, limits and usage are never touched.

    :raises SmolproxyError: what the store raises: an alias that equals a model in the database, for example.
    """
    changes: list[str] = []
    async with db.transaction():
        stored = {server.name: server for server in await servers.list_all(db)}
        for entry in config.servers:
            server = stored.get(entry.name)
            if server is None:
                await servers.add(
                    db, entry.name, entry.url, api_key=entry.api_key, models=entry.models or (), slots=entry.slots
                )
                changes.append(f"server {entry.name} added")
            elif differing := _differing(server, entry):
                await servers.update(db, server.id, differing)
                changes.append(f"server {entry.name} changed: {', '.join(differing)}")
        known = await _aliases(db)
        for alias, model in config.aliases.items():
            if known.get(alias) != model:
                await aliases.set_alias(db, alias, model)
                changes.append(f"alias {alias} {'changed' if alias in known else 'added'}")
        listed = {model for server in await servers.list_all(db) for model in server.models}
        hiding = [alias for alias in await _aliases(db) if alias in listed]
    warnings = [
        f"alias {alias}: no server lists {model}; one without a list may still have it"
        for alias, model in config.aliases.items()
        if model not in listed
    ]
    warnings += [f"alias {alias} is without effect: a model of that name comes first" for alias in hiding]
    return Merged(tuple(changes), tuple(warnings))


async def _aliases(db: Database) -> dict[str, str]:
    return {alias.alias_name: alias.real_model_name for alias in await aliases.list_all(db)}


def _differing(server: servers.Server, entry: ServerEntry) -> dict[str, Any]:
    """Return what the file says differently from the database."""
    differing: dict[str, Any] = {}
    if normalise_url(entry.url) != server.url:
        differing["url"] = entry.url
    if entry.api_key_given and entry.api_key != server.api_key:
        differing["api_key"] = entry.api_key
    # The order of a list says nothing.
    if entry.models is not None and (set(entry.models) != set(server.models) or bool(entry.models) != server.listed):
        differing["models"] = list(entry.models)
    if entry.slots is not None and entry.slots != server.slots:
        differing["slots"] = entry.slots
    return differing
