"""Scripted answers of the stand-in: what `Reply` can say. Data only; `server` and `wire` act on it.

A fault test in five lines:

    async with StandIn() as server:
        server.script.append(Reply(cut=2, then="reset"))     # two events, then a TCP reset
        ...ask through the code under test...
        assert server.requests[0].json["stream"] is True

Without `body` or `chunks` a reply changes the ordinary, generated answer, so every option below combines with real
counting, slots and timings. With `body` or `chunks` the bytes are sent as they are and nothing is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal


class Mark(Enum):
    """Values that no JSON has."""

    KEEP = "keep"
    MISSING = "missing"


KEEP = Mark.KEEP
MISSING = Mark.MISSING

Pause = float | asyncio.Event
"""Seconds, or an event to wait for. Either ends early, and the answer with it, when the client leaves."""

JSON = Any


class Gone(Exception):
    """The client has left, or the connection was cut on purpose: nothing more can be written."""


@dataclass
class Reply:
    """One scripted answer. Put it into `StandIn.script` (used once), `.default` (always) or `.on[path]` (that path)."""

    # The head of the answer.
    status: int = 200
    headers: Mapping[str, str | None] = field(default_factory=dict)
    """Added to the usual ones, or in the place of one of the same name (in any case); None takes it away."""
    before: Pause | None = None
    """What to wait for before the answer's first byte."""
    no_answer: bool = False
    """Reset the connection (after `before`) instead of answering."""

    # Raw answers: sent as given, nothing is generated or counted.
    body: bytes | str | JSON | None = None
    """A whole answer; what is neither bytes nor text is sent as JSON."""
    chunks: Sequence[bytes | float | asyncio.Event] | None = None
    """A stream: bytes are written one piece at a time, seconds and events are waited for in between."""

    # What the generated answer says: one token per piece, in this order.
    think: Sequence[str] = ()
    """Pieces of reasoning (`reasoning_content`)."""
    says: Sequence[str] | None = None
    """Pieces of text. Left out, there is a piece for every token asked for (none after `calls`)."""
    calls: Sequence[tuple[str, Sequence[str]]] = ()
    """Tool calls: a function's name and the pieces of its arguments."""
    tokens_per_piece: int = 1
    """As with speculative decoding or held-back text: this many tokens are made for each piece."""
    finish: str | None = None
    """The `finish_reason`; left out, `stop`, `length` or `tool_calls` as it comes."""

    # How the answer tells its counts.
    usage: JSON | Mark = KEEP
    """In place of every usage object: any JSON (None is `null`), or MISSING for none."""
    timings: JSON | Mark | bool = True
    """False or MISSING: none. Any other JSON than True replaces them (None is `null`)."""
    usage_everywhere: bool = False
    """Streams: the usage so far on every chunk."""
    usage_on_finish: bool = False
    """Streams: the usage rides on the chunk with the `finish_reason`, none follows."""
    done: bool = True
    """False: a stream ends without `data: [DONE]`."""

    # How it travels.
    delay: float = 0.0
    """Seconds before each event of a stream."""
    hold: Mapping[int, asyncio.Event] = field(default_factory=dict)
    """Streams: events to wait for before the event of that number (from 0) is written."""
    heartbeat: bool = False
    """Streams: a comment frame before each event."""
    crlf: bool = False
    """Streams: lines end with CR LF."""
    split: int = 0
    """Bytes per write (and per HTTP chunk of a chunked answer); 0: a whole piece per write."""
    gzip: bool = False
    """`Content-Encoding: gzip`, flushed after every piece."""
    framing: Literal["auto", "length", "chunked", "close"] = "auto"
    """How the body's end is told. auto: `length` for whole answers, `chunked` for streams. `close`: by closing."""

    # How it ends.
    cut: int | None = None
    """Stop after so many events (streams) or body bytes (whole answers)."""
    then: Literal["auto", "keep", "close", "reset", "hang"] = "auto"
    """After what was written. `close` and `reset` leave the HTTP framing unfinished; `hang` waits until the client
    leaves; `keep` ends well and keeps the connection, also after a stream. auto: as llama-server does, or `close` after
    a `cut`."""
