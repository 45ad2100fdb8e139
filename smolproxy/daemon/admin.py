"""The admin API: keys, servers, aliases and reports under ``/admin``.

Every handler is behind the admin key, since the routes are wrapped as a whole in :func:`routes`. What an admin
changes is in force with the answer.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from aiohttp import web

from smolproxy.config import Settings
from smolproxy.core.call import decode
from smolproxy.core.limits import limits_as_json, limits_from_defaults, parse_limits
from smolproxy.daemon import auth
from smolproxy.daemon.directory import Directory
from smolproxy.daemon.reports import Reports
from smolproxy.daemon.servers import Server
from smolproxy.errors import Conflict, Invalid, NotFound
from smolproxy.store import aliases, keys, servers
from smolproxy.store.database import Database
from smolproxy.store.keys import Key

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def iso(seconds: float) -> str:
    """Return a Unix time in seconds as ISO 8601 in UTC."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def key_row(key: Key) -> dict[str, Any]:
    """Return a key as the admin API shows it."""
    return {
        "id": key.id,
        "name": key.name,
        "prefix": key.prefix,
        "active": key.active,
        "created_at": iso(key.created_at / 1000),
        **limits_as_json(key.limits),
    }


def server_row(server: Server) -> dict[str, Any]:
    """Return a server as the admin API shows it: never with its key."""
    record = server.record
    return {
        "id": record.id,
        "name": record.name,
        "url": record.url,
        "active": record.active,
        "models": list(server.models),
        "has_api_key": bool(record.api_key),
        "state": server.state,
        "slots": server.slots,
        "in_flight": server.in_flight,
        "last_error": server.last_error,
        "since": iso(server.since),
    }


class Admin:
    """Handlers of ``/admin``.

    :param database: where changes are written.
    """

    def __init__(
        self, settings: Settings, admin_key: str, database: Database, directory: Directory, reports: Reports
    ) -> None:
        self._settings = settings
        self._admin_key = admin_key
        self._database = database
        self._directory = directory
        self._reports = reports

    def routes(self) -> list[web.RouteDef]:
        """Return all routes, each behind the admin key."""
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/admin/keys", self.list_keys),
            ("POST", "/admin/keys", self.create_key),
            ("DELETE", "/admin/keys/{id}", self.delete_key),
            ("PATCH", "/admin/keys/{id}/toggle", self.toggle_key),
            ("PUT", "/admin/keys/{id}/limits", self.limit_key),
            ("GET", "/admin/servers", self.list_servers),
            ("POST", "/admin/servers", self.create_server),
            ("PATCH", "/admin/servers/{id}", self.update_server),
            ("DELETE", "/admin/servers/{id}", self.delete_server),
            ("POST", "/admin/servers/{id}/models", self.add_model),
            ("DELETE", "/admin/servers/{id}/models", self.remove_model),
            ("DELETE", "/admin/servers/{id}/models/{model:.+}", self.remove_model),
            ("GET", "/admin/aliases", self.list_aliases),
            ("POST", "/admin/aliases", self.create_alias),
            ("PATCH", "/admin/aliases/{alias:.+}", self.update_alias),
            ("DELETE", "/admin/aliases/{alias:.+}", self.delete_alias),
            ("GET", "/admin/usage", self._reports.usage),
            ("GET", "/admin/usage/summary/real", self._reports.summary_real),
        ]
        return [web.route(method, path, self._guarded(handler)) for method, path, handler in table]

    async def guard(self, request: web.Request) -> None:
        """Let only the administrator pass.

        :raises ApiError: 401 without or with a wrong key, 403 with a user's.
        """
        await auth.admin(request, self._admin_key, self._directory)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            await self.guard(request)
            return await handler(request)

        return guarded

    # keys

    async def list_keys(self, request: web.Request) -> web.Response:
        return web.json_response([key_row(key) for key in await keys.list_all(self._database)])

    async def create_key(self, request: web.Request) -> web.Response:
        fields = await _body(request, ("name",))
        name = fields.get("name", "unnamed")
        if not isinstance(name, str):
            raise Invalid("'name' is not a string")
        limits = limits_from_defaults(self._settings.key_defaults, int(time.time() * 1000))
        key, secret = await keys.create(self._database, name, limits)
        return await self._changed({"ok": True, "id": key.id, "key": secret, "name": key.name})

    async def delete_key(self, request: web.Request) -> web.Response:
        await keys.delete(self._database, _id(request, "key"))
        return await self._changed({"ok": True})

    async def toggle_key(self, request: web.Request) -> web.Response:
        fields = await _body(request, ("active",))
        active = fields.get("active")
        if "active" in fields and not isinstance(active, bool):
            raise Invalid("'active' is neither true nor false")
        key = await keys.set_active(self._database, _id(request, "key"), active)
        return await self._changed({"ok": True, **key_row(key)})

    async def limit_key(self, request: web.Request) -> web.Response:
        key_id = _id(request, "key")
        changes = parse_limits(await _body(request), now_ms=int(time.time() * 1000))
        key = await keys.set_limits(self._database, key_id, changes)
        return await self._changed({"ok": True, **key_row(key)})

    # servers

    async def list_servers(self, request: web.Request) -> web.Response:
        return web.json_response([server_row(server) for server in self._directory.servers.values()])

    async def create_server(self, request: web.Request) -> web.Response:
        fields = await _body(request, ("name", "url", "api_key", "models", "slots"))
        for name in ("name", "url"):
            if not isinstance(fields.get(name), str):
                raise Invalid(f"'{name}' is missing or not a string")
        server = await servers.add(
            self._database,
            fields["name"],
            fields["url"],
            api_key=_text(fields, "api_key"),
            models=_names(fields.get("models")),
            slots=fields.get("slots"),
        )
        return await self._changed({"ok": True, "id": server.id})

    async def update_server(self, request: web.Request) -> web.Response:
        server_id = _id(request, "server")
        await servers.update(self._database, server_id, await _body(request))
        await self._directory.refresh()
        server = self._directory.servers.get(server_id)
        if server is None:  # removed meanwhile
            raise NotFound(f"there is no server {server_id}")
        return web.json_response({"ok": True, **server_row(server)})

    async def delete_server(self, request: web.Request) -> web.Response:
        await servers.remove(self._database, _id(request, "server"))
        return await self._changed({"ok": True})

    async def add_model(self, request: web.Request) -> web.Response:
        server_id = _id(request, "server")
        model = _required(await _body(request, ("model_name",)), "model_name")
        reassign = request.query.get("reassign", "false").lower()
        if reassign not in ("true", "false", "1", "0"):
            raise Invalid("'reassign' is neither true nor false")
        await self._add_model(server_id, model, reassign=reassign in ("true", "1"))
        return await self._changed({"ok": True})

    async def _add_model(self, server_id: int, model: str, *, reassign: bool) -> None:
        """Add a model to what a server serves, also to one that was asked itself until now."""
        asked = {
            number: list(server.discovered)
            for number, server in self._directory.servers.items()
            if not server.record.listed
        }
        if model in asked.get(server_id, ()):
            raise Conflict(f"server {server_id} has the model '{model}' already: it is asked itself")
        async with self._database.transaction():
            if asked.get(server_id):
                await servers.list_models(self._database, server_id, asked[server_id])
            await servers.add_model(self._database, server_id, model, reassign=reassign)
            for number, names in asked.items() if reassign else ():
                if number != server_id and model in names:
                    others = [name for name in names if name != model]
                    await servers.list_models(self._database, number, others)

    async def remove_model(self, request: web.Request) -> web.Response:
        model = request.match_info.get("model") or _required(await _body(request, ("model_name",)), "model_name")
        await servers.remove_model(self._database, _id(request, "server"), model)
        return await self._changed({"ok": True})

    # aliases

    async def list_aliases(self, request: web.Request) -> web.Response:
        return web.json_response([asdict(alias) for alias in await aliases.list_all(self._database)])

    async def create_alias(self, request: web.Request) -> web.Response:
        fields = await _body(request, ("alias_name", "real_model_name"))
        name, real = _required(fields, "alias_name"), _required(fields, "real_model_name")
        self._directory.check_alias(name)
        await aliases.create(self._database, name, real)
        answer: dict[str, Any] = {"ok": True, "alias_name": name, "real_model_name": real}
        return await self._changed(self._warned(answer, real))

    async def update_alias(self, request: web.Request) -> web.Response:
        name, real = (
            request.match_info["alias"],
            _required(await _body(request, ("real_model_name",)), "real_model_name"),
        )
        await aliases.update(self._database, name, real)
        answer: dict[str, Any] = {"ok": True, "alias_name": name, "real_model_name": real}
        return await self._changed(self._warned(answer, real))

    async def delete_alias(self, request: web.Request) -> web.Response:
        await aliases.remove(self._database, request.match_info["alias"])
        return await self._changed({"ok": True})

    def _warned(self, answer: dict[str, Any], real: str) -> dict[str, Any]:
        if self._directory.resolve(real) is None:
            answer["warning"] = f"no server has the model '{real}' yet"
        return answer

    async def _changed(self, answer: dict[str, Any]) -> web.Response:
        await self._directory.refresh()
        return web.json_response(answer)


def _id(request: web.Request, what: str) -> int:
    text = request.match_info["id"]
    if not (text.isascii() and text.isdigit() and len(text) < 19) or text != str(int(text)):
        raise NotFound(f"there is no {what} '{text}'")
    return int(text)


async def _body(request: web.Request, known: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the JSON object in the body, an empty one if there is no body.

    :raises Invalid: a field that is not ``known``.
    """
    data = await request.read()
    fields = decode(data) if data.strip() else {}
    unknown = sorted(set(fields) - set(known)) if known is not None else []
    if unknown:
        raise Invalid(f"unknown field '{unknown[0]}'; known are: {', '.join(known or ())}")
    return fields


def _required(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise Invalid(f"'{name}' is missing or not a string")
    return value


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise Invalid(f"'{name}' is not a string")
    return value


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Invalid("'models' is not a list of strings")
    return value
