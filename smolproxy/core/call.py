"""One parsed request: model, stream, body; the alias spliced in and what is added to learn the usage.

The body is never re-serialised: what has to change is spliced into the bytes the client sent, so that everything
else reaches the server as it came. This module reads JSON; it must not know HTTP or servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smolproxy.core.endpoints import Endpoint
from smolproxy.core.jsontext import members, prepend, splice, value_of
from smolproxy.errors import ApiError

SLOT_FIELDS = ("id_slot", "lora")
"""Which slot and which adapters a request gets is not for a user to say: it reaches into others' requests."""

_MOST_DIGITS = 4000  # of a number that is converted exactly; Python refuses longer ones
_MOST_CHOICES = 1_000_000


class _NotJson(ValueError):
    """A constant that Python's parser takes though JSON has none."""


def _refuse_constant(name: str) -> Any:
    raise _NotJson(f"{name} is no JSON value")


def _any_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


# NaN and Infinity are Python's extensions: llama-server would refuse the body.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
# Slower; for bodies with an integer that Python's default refuses for its length.
_LENIENT = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_any_integer)


@dataclass(frozen=True, slots=True)
class Call:
    """What smolproxy has to know of one request.

    :param model: the model as asked, ``None`` when the body names none.
    :param n: how many choices are asked for each prompt.
    :param prompts: how many prompts the request has (a list of them in completions).
    :param wants_usage: the client itself says whether it wants ``stream_options.include_usage``: nothing is added.
    :param wants_timings: the same of ``timings_per_token``.
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
    def choices(self) -> int:
        """How many choices are asked for, of all prompts together."""
        return self.prompts * self.n

    @property
    def estimate(self) -> int:
        """Tokens that the request will roughly use, for limits that reserve before they know: four bytes each."""
        return len(self.body) // 4 + 1

    @property
    def added(self) -> bool:
        """Whether something is added to the body to learn the usage, which the meter has to take out again."""
        return self.stream and self.endpoint.generates


def decode(body: bytes) -> dict[str, Any]:
    """Return the JSON object that ``body`` is. An integer of more than 4000 digits becomes a float.

    :raises ApiError: ``invalid_json``; the message says what is wrong and where.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ApiError("invalid_json", f"The body is not UTF-8 (byte {error.start}).") from None
    if text.startswith("\ufeff"):
        raise ApiError("invalid_json", "The body begins with a byte order mark, which JSON must not have.")
    try:
        value = _decode(text)
    except RecursionError:
        raise ApiError("invalid_json", "The body is nested too deeply.") from None
    except ValueError as error:
        what = f"The body is not JSON: {error}." if text.strip() else "The body is empty: it has to be a JSON object."
        raise ApiError("invalid_json", what) from None
    if type(value) is not dict:
        raise ApiError("invalid_json", "The body is not a JSON object.")
    return value


def _decode(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (json.JSONDecodeError, _NotJson):
        raise
    except ValueError:
        return _LENIENT.decode(text)


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
    # What a client says in a way that the server will refuse or not heed is left as it is.
    options = fields.get("stream_options")
    call = Call(
        endpoint=endpoint,
        model=model or None,
        stream=fields.get("stream") is True,
        n=_n(fields) if endpoint.generates else 1,
        prompts=_prompts(fields.get("prompt")) if "prompt" in endpoint.prompt_fields else 1,
        wants_usage=_said(options.get("include_usage")) if type(options) is dict else options is not None,
        wants_timings=_said(fields.get("timings_per_token")),
        body=body,
        keys=frozenset(fields),
    )
    return call, fields


def _said(switch: Any) -> bool:
    """Whether a switch that is off by default is anything else than off; 0 is, it is refused."""
    return switch is not None and switch is not False


def _n(fields: Mapping[str, Any]) -> int:
    n = fields.get("n_cmpl")  # llama-server's own name for it, which beats "n"
    if n is None:
        n = fields.get("n")
    return int(n) if isinstance(n, int | float) and 1 < n < _MOST_CHOICES else 1


def _prompts(prompt: Any) -> int:
    """Count the prompts: a list of texts, of token lists or of objects is several; one that has tokens in it is one."""
    if type(prompt) is not list or len(prompt) < 2 or not all(type(part) in (str, list, dict) for part in prompt):
        return 1
    return len(prompt)


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
    body = call.body
    changes = {name: _dump(value) for name, value in (put or {}).items()}
    if call.model != model or _repeats_model(body):
        # a name that stands there twice is written over in both places: no reader may see another than was checked
        changes["model"] = _dump(model)
    if call.added and not call.wants_timings:
        # every chunk then tells the exact count so far: what the books need when the client leaves
        changes["timings_per_token"] = b"true"
    if call.added and not call.wants_usage:
        options = value_of(body, "stream_options") if type(fields.get("stream_options")) is dict else b"{}"
        assert options is not None
        changes["stream_options"] = splice(options, {"include_usage": b"true"})
    if call.keys.isdisjoint(drop):
        if not changes:
            return body
        if call.keys and call.keys.isdisjoint(changes):
            return prepend(body, changes)
    return splice(body, changes, drop)


def _repeats_model(body: bytes) -> bool:
    if body.count(b'"model"') == 1 and b"\\u00" not in body:  # no second one, and none written with escapes
        return False
    return sum(name == "model" for name, *_ in members(body)) > 1


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
