"""The application: resources in the order of their life, one middleware, routes from the table of endpoints."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from zoneinfo import ZoneInfo

from aiohttp import web

from smolproxy.config import FileConfig, ServeOptions
from smolproxy.core.endpoints import ENDPOINTS
from smolproxy.core.limiter import Limiter
from smolproxy.daemon.admin import Admin
from smolproxy.daemon.dbwatch import DatabaseWatch
from smolproxy.daemon.directory import Directory
from smolproxy.daemon.health import Health
from smolproxy.daemon.ledger import Ledger
from smolproxy.daemon.middlewares import outermost
from smolproxy.daemon.proxy import Proxy
from smolproxy.daemon.public import Public
from smolproxy.daemon.reports import Reports
from smolproxy.daemon.retention import Retention
from smolproxy.daemon.servers import Server
from smolproxy.daemon.tasks import Tasks
from smolproxy.store.database import Database


@dataclass
class Daemon:
    """The parts of a running daemon that live as long as it does."""

    options: ServeOptions
    config: FileConfig
    books: Database  # for usage rows alone
    lookups: Database  # for the directory, whose reading must not wait behind a write
    database: Database  # for the admin's changes and purging; reports have their own
    ledger: Ledger
    directory: Directory
    proxy: Proxy
    reports: Reports
    dbwatch: DatabaseWatch
    settling: Tasks = field(default_factory=Tasks)  # requests whose clients have gone
    watching: Tasks = field(default_factory=Tasks)  # what runs for as long as the daemon
    unwritten: int = 0  # usage rows that could not be written until the end

    @classmethod
    async def open(cls, options: ServeOptions, config: FileConfig) -> Daemon:
        """Open the database and put the parts together; nothing runs yet.

        :raises DatabaseError: the database cannot be used.
        """
        settings = config.settings
        async with AsyncExitStack() as opened:
            connections = []
            for readonly in (False, False, True):
                connections.append(await Database.open(options.db, readonly=readonly, brief=True))
                opened.push_async_callback(connections[-1].close)
            opened.pop_all()
        books, database, lookups = connections
        settling, watching = Tasks(), Tasks()
        ledger = Ledger(books)
        directory = Directory(lookups, settings, settling, lambda server: watch(server))
        health = Health(settings, directory.rebuild)

        def watch(server: Server) -> None:
            watching.start(
                health.watch(server, lambda: directory.servers.get(server.record.id) is server),
                f"health {server.record.name}",
            )

        limiter = Limiter(ZoneInfo(settings.timezone))
        proxy = Proxy(settings, directory, ledger, health, settling, limiter, secrets.token_hex(8))
        reports = Reports(options.db)
        dbwatch = DatabaseWatch((books, database, lookups), reports, directory)
        return cls(
            options, config, books, lookups, database, ledger, directory, proxy, reports, dbwatch, settling, watching
        )

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Run what runs in the background; for ``app.cleanup_ctx``."""
        await self.directory.refresh()
        writing = Tasks()
        writing.start(self.ledger.run(), "ledger")
        self.watching.start(self.directory.poll(), "directory")
        self.watching.start(self.dbwatch.run(), "database file")
        self.watching.start(self.proxy.prune(), "limits")
        retention = Retention(self.database, self.config.settings.retention_days)
        self.watching.start(retention.run(), "retention")
        yield
        await self.watching.cancel()
        await self.settling.drain(timeout=10.0)
        self.unwritten = await self.ledger.flush(timeout=10.0)
        await writing.cancel()
        await self.directory.close()
        await self.reports.close()
        await self.close()

    async def close(self) -> None:
        """Close the connections to the database."""
        for connection in (self.lookups, self.database, self.books):
            await connection.close()


async def _expect_later(request: web.Request) -> None:
    """Leave ``Expect: 100-continue`` to the proxy, which first asks who it is that wants to send."""


def create_app(daemon: Daemon) -> web.Application:
    """Make the application of a daemon."""
    settings = daemon.config.settings
    limit = settings.max_body_mib
    admin = None
    if daemon.options.admin_key is not None and daemon.options.admin_api:
        admin = Admin(settings, daemon.options.admin_key, daemon.database, daemon.directory, daemon.reports)
    guard = None if admin is None else admin.guard
    app = web.Application(
        middlewares=[outermost(access_log=settings.access_log, max_body_mib=limit, guard=guard)],
        client_max_size=int(limit * 1024 * 1024) or 2**62,
    )
    app.cleanup_ctx.append(daemon.run)
    for endpoint in ENDPOINTS:
        for path in (endpoint.path, *endpoint.spellings):
            handler = partial(daemon.proxy.handle, endpoint=endpoint)
            app.router.add_post(path, handler, expect_handler=_expect_later)
    public = Public(settings, daemon.directory, daemon.ledger, daemon.dbwatch)
    for prefix in ("/v1", ""):
        app.router.add_get(f"{prefix}/models", public.models)
        app.router.add_get(f"{prefix}/models/{{id:.+}}", public.model)
    app.router.add_get("/health", public.health)
    if admin is not None:
        app.router.add_routes(admin.routes())
    return app
