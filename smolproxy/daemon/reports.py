"""Reports of the admin API, read on a connection of their own so that no usage row waits for them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from smolproxy.core import times
from smolproxy.errors import Invalid
from smolproxy.store import usage
from smolproxy.store.database import Database
from smolproxy.store.usage import UsageFilter

MOST_ROWS = 1000
_FILTERS = ("key_id", "server_id", "model", "start_date", "end_date", "limit", "offset")


class Reports:
    """Handlers of ``/admin/usage``.

    :param path: the database; opened for reading when the first report is asked for.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database: Database | None = None
        self._opening = asyncio.Lock()

    async def usage(self, request: web.Request) -> web.Response:
        """Rows and summary of what the query selects."""
        query = request.query
        for name in query:
            if name not in _FILTERS:
                raise Invalid(f"unknown parameter '{name}'; known are: {', '.join(_FILTERS)}")
        where = UsageFilter(
            key_id=_number(query, "key_id"),
            server_id=_number(query, "server_id"),
            model=query.get("model"),
            since=_time(query, "start_date", end=False),
            until=_time(query, "end_date", end=True),
        )
        limit = _number(query, "limit")
        limit = 100 if limit is None else min(limit, MOST_ROWS)
        database = await self._reader()
        logs = await usage.logs(database, where, limit=limit, offset=_number(query, "offset") or 0)
        return web.json_response({"logs": logs, "summary": await usage.summary(database, where)})

    async def summary_real(self, request: web.Request) -> web.Response:
        """Totals of each real model at each server."""
        return web.json_response(await usage.summary_real(await self._reader()))

    async def close(self) -> None:
        """Close the connection, after the report that is being made; the next one opens another."""
        database, self._database = self._database, None
        if database is not None:
            await database.close()

    async def _reader(self) -> Database:
        async with self._opening:
            if self._database is None:
                self._database = await Database.open(self._path, readonly=True)
            return self._database


def _number(query: Any, name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Invalid(f"'{name}' is not a whole number: '{text}'")
    return int(text)


def _time(query: Any, name: str, *, end: bool) -> int | None:
    text = query.get(name)
    return None if text is None else times.parse(text, int(time.time() * 1000), end_of_day=end)
