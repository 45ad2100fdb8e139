"""The cap on what one request may generate: which fields of its body must be set so that the cap holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Every field that llama-server takes as a number of tokens to generate, the one that it obeys first at the end.
FIELDS = ("max_output_tokens", "max_tokens", "max_completion_tokens", "n_predict")


def cap_fields(max_tokens: int, body: Mapping[str, Any], *, field: str = "max_tokens") -> dict[str, int]:
    """Return what must be put into a body so that no more than the cap is generated: field -> value.

    A field that asks for less than the cap is left. One that asks for more, for no end (a negative number) or for
    what is no whole number gets the cap: a server might take it for none at all. ``null`` means for llama-server that
    the field is not there; it gets what the fields behind it ask for, since a number in a field that the server obeys
    earlier would otherwise lift a smaller one. ``field`` is always there in the end, as not every build and endpoint
    obeys the others.

    The cap is that of one choice: a request with ``n`` choices may generate ``n`` times as much. llama-server makes
    one token even for 0; whoever wants none made must not send the request.

    :param max_tokens: the cap in tokens, from 0 up.
    :param body: the parsed body of the request.
    :param field: the one of :data:`FIELDS` that the endpoint documents (``max_output_tokens`` for ``/v1/responses``).
    """
    put: dict[str, int] = {}
    asked = max_tokens  # what the server would obey if the fields so far were all
    for name in FIELDS:
        if name not in body:
            continue
        value = body[name]
        if value is None:
            put[name] = asked
        elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= max_tokens:
            asked = value
        else:
            put[name] = asked = max_tokens
    if field not in body:
        put[field] = asked
    return put
