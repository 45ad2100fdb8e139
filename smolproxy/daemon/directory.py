"""Keys, servers and aliases in memory: what the way of a request looks up without asking the database.

Servers and aliases are held whole. Keys are held as they are used, so that a hundred thousand of them cost nothing;
the first request of each after a change of any key asks the database once. Another process's change is noticed by
``PRAGMA data_version``, polled twice a second. This module reads the store and never writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from smolproxy.config import Settings
from smolproxy.core import tokens
from smolproxy.daemon.servers import Server
from smolproxy.daemon.tasks import Tasks
from smolproxy.errors import Conflict, SmolproxyError
from smolproxy.store import aliases, keys, servers
from smolproxy.store.database import Database
from smolproxy.store.keys import Key

log = structlog.get_logger("smolproxy")

POLL = 0.5
"""Seconds between looks for a change made by another process."""

_MOST_KEYS = 10_000  # held in memory


class Directory:
    """What users may ask for and who they are.

    :param database: a connection that is not used for usage rows.
    :param tasks: where a removed server's connections are closed in the background.
    :param added: called with each server that is new, to have its health watched.
    """

    def __init__(
        self, database: Database, settings: Settings, tasks: Tasks, added: Callable[[Server], None] = lambda _: None
    ) -> None:
        self.servers: dict[int, Server] = {}
        self.aliases: dict[str, str] = {}
        self.failing: str | None = None
        self._database = database
        self._settings = settings
        self._tasks = tasks
        self._added = added
        self._routes: dict[str, tuple[Server, ...]] = {}
        self._since: dict[str, int] = {}
        self._keys: dict[str, Key | None] = {}
        self._version = -1
        self._revisions = (-1, -1)
        self._lock = asyncio.Lock()

    async def key(self, secret: str) -> Key | None:
        """Return the key that may be used with this secret; ``None`` if it is unknown, disabled or expired.

        :raises DatabaseError: the key is not in memory and the database cannot be read.
        """
        digest = tokens.digest(secret)
        key = self._keys.get(digest)
        if key is None:
            held = self._keys
            key = await keys.find(self._database, digest)
            # self._keys is replaced when a key changes: what was read before that is not held
            if key is not None and held is self._keys:
                if len(held) >= _MOST_KEYS:
                    held.clear()
                held[digest] = key
        if key is None or not key.active:
            return None
        expires = key.limits.expires_at
        if expires is not None and expires <= time.time() * 1000:
            return None
        return key

    def resolve(self, name: str) -> tuple[str, tuple[Server, ...]] | None:
        """Return a model's real name and the servers that have it; ``None`` for an unknown one."""
        found = self._routes.get(name)
        if found is not None:
            return name, found
        real = self.aliases.get(name)
        if real is None:
            return None
        found = self._routes.get(real)
        return None if found is None else (real, found)

    def check_alias(self, name: str) -> None:
        """Refuse a name for an alias that a server's model has already; the store knows listed models only.

        :raises Conflict: it is taken.
        """
        if name in self._routes:
            raise Conflict(f"'{name}' is the name of a model")

    def names(self) -> Iterable[tuple[str, str, int]]:
        """Yield name, real name and the time since which it is known (Unix, seconds) of all that can be asked for.

        Models of which every server is disabled are left out.
        """
        enabled = {name for name, having in self._routes.items() if any(server.record.active for server in having)}
        for name in self._routes:
            if name in enabled:
                yield name, name, self._since[name]
        for alias, real in self.aliases.items():
            if real in enabled and alias not in self._routes:
                yield alias, real, self._since[real]

    @property
    def active_servers(self) -> int:
        """How many servers are enabled."""
        return sum(server.record.active for server in self.servers.values())

    def rebuild(self) -> None:
        """Make the routes anew, after a server's models have changed."""
        routes: dict[str, list[Server]] = {}
        for server in self.servers.values():
            for model in server.models:
                routes.setdefault(model, []).append(server)
        now = int(time.time())
        self._since = {name: self._since.get(name, now) for name in routes}
        self._routes = {name: tuple(having) for name, having in routes.items()}

    async def refresh(self) -> None:
        """Take over what has changed in the database.

        :raises DatabaseError: it cannot be read; what is in memory stays.
        """
        async with self._lock:
            self._version = await self._database.data_version()
            revisions = await self._database.revisions()
            if revisions[0] != self._revisions[0]:
                self._keys = {}
            if revisions[1] != self._revisions[1]:
                records = await servers.list_all(self._database)
                self.aliases = {a.alias_name: a.real_model_name for a in await aliases.list_all(self._database)}
                self._take(records)
            self._revisions = revisions

    async def reload(self) -> None:
        """Take everything over from a database that is another than before.

        :raises DatabaseError: it cannot be read; what is in memory stays.
        """
        self._revisions = (-1, -1)
        await self.refresh()

    async def poll(self) -> None:
        """Look for changes of other processes until cancelled."""
        while True:
            await asyncio.sleep(POLL)
            try:
                if self.failing is not None or await self._database.data_version() != self._version:
                    await self.refresh()
                self.failing = None
            except SmolproxyError as error:
                if self.failing is None:
                    log.error("the database cannot be read", reason=str(error))
                self.failing = str(error)

    def _take(self, records: list[servers.Server]) -> None:
        old = self.servers
        self.servers = {}
        for record in records:
            server = old.pop(record.id, None)
            if server is None or not server.update(record):
                former, server = server, Server(record, self._settings)
                if former is not None:
                    server.succeed(former)
                    self._tasks.start(self._retire(former), f"retire {record.name}")
                self._added(server)
            self.servers[record.id] = server
        for server in old.values():
            self._tasks.start(self._retire(server), f"retire {server.record.name}")
        self.rebuild()

    async def _retire(self, server: Server) -> None:
        """Close a removed server's connections when its running requests have ended."""
        while server.in_flight:
            await asyncio.sleep(0.5)
        await server.close()

    async def close(self) -> None:
        """Close all servers' connections."""
        for server in self.servers.values():
            await server.close()
