"""The one form in which a server's URL is kept: scheme, host, port and a path without a trailing slash.

This module reads the text only; whether somebody answers there is not its business.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from smolproxy.errors import Invalid

_EXAMPLE = "http://127.0.0.1:8080"
_MAX_LENGTH = 2000
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HOST = re.compile(r"[^\s\\<>\"'`{}|^\[\]()!$&*+,;=]+")


def normalise_url(url: str) -> str:
    """Return the URL of a server in its normal form.

    Scheme and host become lower case, trailing slashes go, and so does a trailing ``/v1``, since every request appends
    a path that begins with it. Any other path is kept: a server may live under one.

    :raises Invalid: anything else than ``http`` or ``https`` with a host; credentials, a query or a fragment. The
        message says what to write instead and never repeats credentials.
    """
    if not isinstance(url, str):
        raise Invalid("url must be a string")
    text = url.strip()
    if not text:
        raise Invalid(f"url must not be empty: write {_EXAMPLE}")
    if len(text) > _MAX_LENGTH:
        raise Invalid(f"url must have at most {_MAX_LENGTH} characters, this one has {len(text)}")
    # Before any message repeats the URL: what stands in front of the @ may be a password.
    if "@" in re.split(r"[/?#]", text.partition("://")[2] or text, maxsplit=1)[0]:
        raise Invalid("url must not hold credentials: give the server's key with --api-key (api_key)")
    if any(character.isspace() or not character.isprintable() for character in text):
        raise Invalid(f"url must not hold spaces or control characters: {text!a}")
    scheme = _SCHEME.match(text)
    if scheme is None:
        raise Invalid(f"url {text!r} has no scheme: write {_with_scheme(text)}")
    if scheme[1].lower() not in ("http", "https"):
        raise Invalid(f"url must begin with http:// or https://, not {scheme[1]}://")
    if "?" in text or "#" in text:
        raise Invalid(f"url {text!r} must not have a query or a fragment: write {re.split('[?#]', text)[0]}")
    return f"{scheme[1].lower()}://{_authority(text)}{_path(text)}"


def _with_scheme(text: str) -> str:
    rest = re.sub(r"^(https?:)?/*", "", text, flags=re.IGNORECASE)
    return f"http://{rest}" if rest else _EXAMPLE


def _authority(text: str) -> str:
    """Host and port, of a URL that has a scheme."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise Invalid(f"url {text!r} is not valid: {error}") from None
    if not host:
        raise Invalid(f"url {text!r} has no host: write {_EXAMPLE}")
    if not _HOST.fullmatch(host):
        raise Invalid(f"url {text!r} has a host with characters that cannot be in one")
    if port == 0:
        raise Invalid(f"url {text!r} has port 0")
    if ":" in host:
        host = f"[{host}]"
    return host if port is None else f"{host}:{port}"


def _path(text: str) -> str:
    path = urlsplit(text).path.rstrip("/")
    while path.endswith("/v1"):
        path = path[: -len("/v1")].rstrip("/")
    return path
