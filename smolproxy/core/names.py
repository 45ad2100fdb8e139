"""What may be the name of a key, a server, a model or an alias.

Names are kept exactly as given: ``/``, ``:``, ``%``, spaces and any script are fine, since a model's name is whatever
the server calls it. Only what cannot be shown on one line or stored as UTF-8 is refused.
"""

from __future__ import annotations

import unicodedata

from smolproxy.errors import Invalid

MAX_LENGTH = 300
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
