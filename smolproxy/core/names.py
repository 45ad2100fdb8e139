"""What may be the name of a key, a server, a model or an alias.

Names are kept exactly as given: ``/``, ``:``, ``%``, spaces and any script are fine, since a model's name is whatever
the server calls it. Only what cannot be shown on one line or stored as UTF-8 is refused.
"""

from __future__ import annotations

import re
import unicodedata

from smolproxy.errors import Invalid

MAX_LENGTH = 300
_DRIVE = re.compile(r"[A-Za-z]:\\")  # of a file on Windows
# Control characters, lone surrogates, line and paragraph separators.
_REFUSED = frozenset({"Cc", "Cs", "Zl", "Zp"})


def check_name(what: str, value: object) -> str:
    """Return ``value``, unchanged, if it can be a name.

    :param what: what is named, for the message: ``key name``, ``model name``...
    :raises Invalid: not a string, blank, longer than 300 characters, or with control characters.
    """
    if not isinstance(value, str):
        raise Invalid(f"{what} must be a string")
    if not value.strip():
        raise Invalid(f"{what} must not be empty")
    if len(value) > MAX_LENGTH:
        raise Invalid(f"{what} must have at most {MAX_LENGTH} characters, this one has {len(value)}")
    if any(unicodedata.category(character) in _REFUSED for character in value):
        raise Invalid(f"{what} must not hold control characters: {value!a}")
    return value


def told_model(told: str) -> str:
    """Return the name under which users ask for a model that a server told by itself.

    A llama-server that was given no alias tells where its file lies. That is for nobody to know, and it serves its one
    model whatever name it is asked for: the file's name is enough.
    """
    if told.startswith("/"):
        return told.rstrip("/").rpartition("/")[2] or told
    if _DRIVE.match(told):
        return told.rstrip("\\").rpartition("\\")[2] or told
    return told
