"""Asks servers for their health, models and slots, from the command line: the standard library is enough.

This module only looks; it changes nothing, neither a server nor the database.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from smolproxy.core.names import told_model
from smolproxy.store.servers import Server

TIMEOUT = 5.0  # seconds, for one question
_LARGEST = 16 * 1024 * 1024  # bytes of an answer


@dataclass(frozen=True)
class Result:
    """What one server told."""

    name: str
    url: str
    state: str  # "up", "loading", "down", "wrong_key" or "disabled"
    models: tuple[str, ...] = ()
    slots: int | None = None
    error: str | None = None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would carry the server's key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


# Without the proxies of the environment: servers are inside the network.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def check_all(servers: Sequence[Server]) -> list[Result]:
    """Return what each server tells, in their order; all are asked at once."""
    if not servers:
        return []
    with ThreadPoolExecutor(min(len(servers), 32)) as pool:
        return list(pool.map(_check, servers))


def _check(server: Server) -> Result:
    if not server.active:
        return Result(server.name, server.url, "disabled", server.models, server.slots)
    try:
        status, _ = _get(server, "/health")
        if status not in (200, 404, 503):  # 404: another OpenAI-compatible server, whose models tell enough
            return _failed(server, "down", f"GET /health answered {status}")
        if status != 503:
            status, answer = _get(server, "/v1/models")
        if status == 503:
            return _failed(server, "loading", None)
        if status in (401, 403):
            return _failed(server, "wrong_key", f"GET /v1/models answered {status}")
        if status != 200:
            return _failed(server, "down", f"GET /v1/models answered {status}")
        models = tuple(told_model(str(model["id"])) for model in json.loads(answer)["data"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return _failed(server, "down", "GET /v1/models answered no list of models")
    except urllib.error.URLError as error:
        return _failed(server, "down", _words(error.reason))
    except (OSError, http.client.HTTPException) as error:
        return _failed(server, "down", _words(error))
    return Result(server.name, server.url, "up", models, _slots(server))


def _failed(server: Server, state: str, error: str | None) -> Result:
    return Result(server.name, server.url, state, server.models, server.slots, error)


def _slots(server: Server) -> int | None:
    """Return how many slots the server has, as configured or as it tells; None if it does not."""
    if server.slots is not None:
        return server.slots
    try:
        status, answer = _get(server, "/props")
        slots = json.loads(answer)["total_slots"] if status == 200 else None
    except (OSError, http.client.HTTPException, KeyError, TypeError, ValueError, RecursionError):
        return None
    return slots if isinstance(slots, int) else None


def _words(reason: object) -> str:
    if isinstance(reason, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__


def _get(server: Server, path: str) -> tuple[int, bytes]:
    """Return status and body of one GET.

    :raises OSError: if the server cannot be reached or is too slow.
    :raises http.client.HTTPException: if it does not speak HTTP.
    """
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    request = urllib.request.Request(server.url + path, headers=headers)  # noqa: S310 - the store takes only http(s)
    deadline = time.monotonic() + TIMEOUT
    try:
        response = _opener.open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, b""
    with response:
        body = bytearray()
        while part := response.read1(65536):
            body += part
            if time.monotonic() > deadline or len(body) > _LARGEST:
                raise TimeoutError
    return response.status, bytes(body)
