"""The format of API keys: how one is made, hashed and shortened for display.

This module knows nothing of where keys are kept. Whatever holds a key longer than a call holds its digest.
"""

from __future__ import annotations

import hashlib
import secrets

_PREFIX = "sk-"
_SHOWN = len(_PREFIX) + 8  # enough to tell keys apart in a table, too little to guess the other 144 bits


def new_key() -> str:
    """Return a new secret key: ``sk-`` and 192 random bits in base64url, 35 characters in all."""
    return _PREFIX + secrets.token_urlsafe(24)


def digest(key: str) -> str:
    """Return the SHA-256 of a key as 64 hexadecimal digits.

    Any string has one, also what a client sent instead of a key: lone surrogates (undecodable header bytes) included.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def prefix(key: str) -> str:
    """Return the part of a key that may be shown: its first 11 characters."""
    return key[:_SHOWN]
