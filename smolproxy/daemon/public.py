"""What users may ask of smolproxy itself: models and health, answered from memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp import web

from smolproxy.config import Settings
from smolproxy.core.limits import Limits, model_allowed
from smolproxy.daemon import auth
from smolproxy.daemon.dbwatch import DatabaseWatch
from smolproxy.daemon.directory import Directory
from smolproxy.daemon.ledger import Ledger
from smolproxy.errors import ApiError
from smolproxy.store.keys import Key

_NO_LIMITS = Limits()
_MOST_LISTED = 50


def model_not_found(name: str, known: Iterable[str]) -> ApiError:
    """Return the answer to whom a model is not known, with what there is for him."""
    names = sorted(known)
    listed = ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
    there_is = f"There are: {listed}." if names else "There is none that this key may use."
    return ApiError("model_not_found", f"There is no model '{name}' here. {there_is}", param="model")


class Public:
    """Handlers of ``/v1/models`` and ``/health``."""

    def __init__(self, settings: Settings, directory: Directory, ledger: Ledger, dbwatch: DatabaseWatch) -> None:
        self._settings = settings
        self._directory = directory
        self._ledger = ledger
        self._dbwatch = dbwatch

    async def models(self, request: web.Request) -> web.Response:
        """List the models and aliases that can be asked for."""
        key = await self._key(request)
        return web.json_response({"object": "list", "data": self._listed(key)})

    async def model(self, request: web.Request) -> web.Response:
        """Tell of one model; its id may hold slashes."""
        key = await self._key(request)
        name = request.match_info["id"]
        for model in self._listed(key):
            if model["id"] == name:
                return web.json_response(model)
        raise model_not_found(name, (model["id"] for model in self._listed(key)))

    async def health(self, request: web.Request) -> web.Response:
        """Tell whether smolproxy works; the servers are not asked."""
        failing = self._dbwatch.failing or self._ledger.failing or self._directory.failing
        if failing is None:
            await auth.optional_user(request, self._directory)
        answer = {"status": "ok" if failing is None else "error", "active_servers": self._directory.active_servers}
        return web.json_response(answer, status=200 if failing is None else 503)

    async def _key(self, request: web.Request) -> Key | None:
        if self._settings.models_require_key:
            return await auth.user(request, self._directory)
        return await auth.optional_user(request, self._directory)

    def _listed(self, key: Key | None) -> list[dict[str, Any]]:
        limits = _NO_LIMITS if key is None else key.limits
        return [
            {"id": name, "object": "model", "created": since, "owned_by": "smolproxy"}
            for name, real, since in sorted(self._directory.names())
            if model_allowed(limits, name, real)
        ]
