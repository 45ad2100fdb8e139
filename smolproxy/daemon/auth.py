"""Who asks: credentials out of the headers, users' keys and the admin key."""

from __future__ import annotations

import hmac

from aiohttp import web

from smolproxy.daemon.directory import Directory
from smolproxy.errors import ApiError
from smolproxy.store.keys import Key


def bearer(request: web.Request) -> str | None:
    """Return the key in ``Authorization: Bearer KEY``."""
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    return value.strip() or None if scheme.lower() == "bearer" else None


def credential(request: web.Request) -> str | None:
    """Return the key a request carries: ``Authorization: Bearer KEY``, else ``x-api-key: KEY``."""
    return bearer(request) or request.headers.get("x-api-key", "").strip() or None


def unauthorized(message: str) -> ApiError:
    """Return the 401 answer."""
    return ApiError("invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})


async def user(request: web.Request, directory: Directory) -> Key:
    """Return the key of the user who asks.

    :raises ApiError: 401 ``invalid_api_key``.
    """
    secret = credential(request)
    if secret is None:
        raise unauthorized("No API key: send it as 'Authorization: Bearer KEY'.")
    key = await directory.key(secret)
    if key is None:
        raise unauthorized("The API key is unknown, disabled or expired.")
    request["key"] = key
    return key


async def optional_user(request: web.Request, directory: Directory) -> Key | None:
    """Return the key of the user who asks, where none is needed; a wrong one is refused all the same."""
    return None if credential(request) is None else await user(request, directory)


async def admin(request: web.Request, admin_key: str, directory: Directory) -> None:
    """Let only the administrator pass.

    :raises ApiError: 401 without or with a wrong key, 403 with a user's.
    """
    secret = bearer(request)
    if secret is None:
        raise unauthorized("No admin key: send it as 'Authorization: Bearer ADMIN_KEY'.")
    if hmac.compare_digest(secret.encode(errors="surrogateescape"), admin_key.encode(errors="surrogateescape")):
        return
    if await directory.key(secret) is not None:
        raise ApiError("forbidden", "A user's key does not open the admin API.")
    raise unauthorized("The admin key is wrong.")
