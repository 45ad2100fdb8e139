"""Event streams for the tests of the meter: recorded ones, made-up ones, and what a client has to see of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smolproxy.core.call import Call, outgoing, parse
from smolproxy.core.endpoints import ENDPOINTS
from smolproxy.core.meter import StreamMeter

FOLDER = Path(__file__).parent / "streams"
CHAT, TEXT, EMBEDDINGS = ENDPOINTS
DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]


def call(endpoint: Any = CHAT, **fields: Any) -> Call:
    """The call of a streamed request with these fields."""
    return parse(endpoint, json.dumps({"model": "m", "stream": True, **fields}).encode())[0]


def recorded(name: str) -> bytes:
    """What a real llama-server said (build of PyPI's xllamacpp 2026.10.11549, Gemma 3 270M)."""
    return (FOLDER / f"{name}.sse").read_bytes()


def dump(value: Any) -> bytes:
    """JSON as llama-server writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


def run(meter: StreamMeter, *chunks: bytes, close: bool = True) -> bytes:
    """Feed the chunks as the daemon does; return all that the client gets."""
    out = b""
    tail_sent = False
    for chunk in chunks:
        out += meter.feed(chunk)
        if meter.done and not tail_sent:
            out += meter.tail
            tail_sent = True
    if close:
        out += meter.close()
        if meter.done and not tail_sent:
            out += meter.tail
    return out


def unasked(stream: bytes, *, timings: bool = True, usage: bool = True) -> bytes:
    """What llama-server sends without being asked, worked out from what it sends when it is asked.

    :param timings: ``timings_per_token`` is not asked for either.
    :param usage: ``stream_options.include_usage`` is not asked for either.
    """
    out: list[bytes | Json] = []
    finish: Json = {}
    for block in stream.split(b"\n\n")[:-1]:
        data = block.partition(b"data: ")[2]
        value = None if data == b"[DONE]" else json.loads(data)
        if type(value) is not dict:
            out.append(block + b"\n\n")
            continue
        assert event(value) == block + b"\n\n"  # this function can write it as it was
        if value["choices"] == [] and usage:
            if "timings" not in finish:
                finish["timings"] = value["timings"]
            continue
        if value["choices"] and value["choices"][0]["finish_reason"]:
            finish = value
        elif value["choices"] and timings:
            value.pop("timings", None)
        out.append(value)
    return b"".join(part if isinstance(part, bytes) else event(part) for part in out)


def sent(call: Call) -> Json:
    """The body that the server gets."""
    fields: Json = json.loads(outgoing(call, "m", json.loads(call.body)))
    return fields
