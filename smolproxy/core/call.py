"""One parsed request: model, stream, body; the alias spliced in and what is added to learn the usage.

The body is never re-serialised: what has to change is spliced into the bytes the client sent, so that everything
else reaches the server as it came. This module reads JSON; it must not know HTTP or servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined] # not in typeshed
from typing import Any

from smolproxy.core.endpoints import Endpoint
from smolproxy.errors import ApiError


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# NaN and Infinity are Python's extensions, not JSON: llama-server would refuse the body.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
# Which slot and which adapters a request gets is not for a user to say: it reaches into others' requests.
SLOT_FIELDS = ("id_slot", "lora")

_WHITESPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Call:
    """What smolproxy has to know of one request.

    :param model: the model as asked, ``None`` when the body names none.
    :param n: how many choices are asked for each prompt.
    :param prompts: how many prompts the request has (a list of them in completions).
    :param wants_usage: the client itself asked for ``stream_options.include_usage``.
    :param wants_timings: the client itself asked for ``timings_per_token``.
    :param body: the bytes as they came.
    :param keys: names of the body's top-level fields.
    """

    endpoint: Endpoint
    model: str | None
    stream: bool
    n: int
    prompts: int
    wants_usage: bool
    wants_timings: bool
    body: bytes
    keys: frozenset[str]

    @property
    def estimate(self) -> int:
        """Tokens that the request will roughly use, for limits that reserve before they know: four bytes each."""
        return len(self.body) // 4 + 1

    @property
    def added(self) -> bool:
        """Whether something is added to the body to learn the usage, which the meter has to take out again."""
        return self.stream and self.endpoint.generates


def decode(body: bytes) -> dict[str, Any]:
    """Return the JSON object that ``body`` is.

    :raises ApiError: ``invalid_json``; the message says what is wrong and where.
    """
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise ApiError("invalid_json", f"The body is not UTF-8 (byte {error.start}).") from None
    except RecursionError:
        raise ApiError("invalid_json", "The body is nested too deeply.") from None
    except ValueError as error:
        raise ApiError("invalid_json", f"The body is not JSON: {error}.") from None
    if type(value) is not dict:
        raise ApiError("invalid_json", "The body is not a JSON object.")
    return value


def parse(endpoint: Endpoint, body: bytes) -> tuple[Call, dict[str, Any]]:
    """Parse a request's body; also returns its fields, for checks that need more than the call keeps.

    Of duplicate fields the last one counts, as in llama-server.

    :raises ApiError: ``invalid_json`` or ``invalid_request``.
    """
    fields = decode(body)
    model = fields.get("model")
    if model is not None:
        if type(model) is not str:
            raise ApiError("invalid_request", "'model' is not a string.", param="model")
        try:
            model.encode()
        except UnicodeEncodeError:
            raise ApiError("invalid_request", "'model' is not valid Unicode.", param="model") from None
    options = fields.get("stream_options")
    n = fields.get("n")
    prompt = fields.get("prompt")
    # a list of strings or of token lists is several prompts; a list of token numbers is one
    several = type(prompt) is list and len(prompt) > 1 and type(prompt[0]) in (str, list)
    call = Call(
        endpoint=endpoint,
        model=model or None,
        stream=fields.get("stream") is True,
        n=n if type(n) is int and n > 1 else 1,
        prompts=len(prompt) if several and "prompt" in endpoint.prompt_fields else 1,  # type: ignore[arg-type]
        wants_usage=type(options) is dict and options.get("include_usage") is True,
        wants_timings=fields.get("timings_per_token") is True,
        body=body,
        keys=frozenset(fields),
    )
    return call, fields


def outgoing(
    call: Call,
    model: str,
    fields: Mapping[str, Any],
    *,
    put: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> bytes:
    """Return the body for the server.

    :param model: the model's real name; replaces the one asked for if they differ.
    :param fields: the parsed body, as :func:`parse` returned it.
    :param put: further fields to set.
    :param drop: fields to take out.
    """
    changes: dict[str, Any] = dict(put or {})
    if call.model != model or call.body.count(b'"model"') > 1:
        # a name that stands there twice is written over in both places: no reader may see another than was checked
        changes["model"] = model
    if call.added:
        if not call.wants_timings:
            # every chunk then tells the exact count so far: what the books need when the client leaves
            changes["timings_per_token"] = True
        if not call.wants_usage:
            options = fields.get("stream_options")
            changes["stream_options"] = {**(options if type(options) is dict else {}), "include_usage": True}
    elif not changes and not drop:
        return call.body
    return splice(call.body, changes, drop, call.keys)


def splice(body: bytes, changes: Mapping[str, Any], drop: tuple[str, ...], keys: frozenset[str]) -> bytes:
    """Set top-level fields of the JSON object ``body``, leaving every other byte as it is.

    A field that is there is replaced where it stands (each time, if it is there more than once, so that all readers
    agree); a new one is put in front.

    :param keys: the names of the fields that ``body`` has.
    """
    new = [name for name in changes if name not in keys]
    front = b"".join(b"%s:%s," % (_dump(name), _dump(changes[name])) for name in new)
    start = body.index(b"{") + 1
    if len(new) == len(changes) and not keys.intersection(drop):
        return b"%s%s%s" % (body[:start], front, body[start:]) if keys else b"{%s}" % front[:-1]
    pieces = [front]
    for name, before, value, after in _members(body.decode()):
        if name in drop:
            continue
        text = _dump(changes[name]).decode() if name in changes else value
        pieces.append(f"{before}{text}{after},".encode())
    return b"{%s}" % b"".join(pieces)[:-1]


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _members(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, text before the value, value and text after it for each member of a valid JSON object."""
    at = _skip(text, 0)
    while text[at] != "}":
        first = at + 1
        at = _skip(text, first)
        if text[at] == "}":  # an empty object
            return
        name, at = scanstring(text, at + 1, True)
        start = _skip(text, _skip(text, at) + 1)  # behind the colon
        _, end = _DECODER.raw_decode(text, start)
        at = _skip(text, end)
        yield name, text[first:start], text[start:end], text[end:at]


def _skip(text: str, at: int) -> int:
    while text[at] in _WHITESPACE:
        at += 1
    return at
