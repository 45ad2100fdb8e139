"""Meters: an answer's bytes in as they come, the client's bytes out, what it tells of its usage at the end.

:class:`StreamMeter` reads server-sent events. It searches them, and parses JSON only where usage can be. What
smolproxy added to the request to learn the usage (``timings_per_token``, ``stream_options.include_usage``; see
:func:`smolproxy.core.call.outgoing`) is taken out of the answer here: this module is the exact inverse of that one.
:class:`PlainMeter` reads an answer that is not streamed. Neither knows where bytes come from or go to.
"""

from __future__ import annotations

import json
import re
from typing import Any

from smolproxy.core.call import Call
from smolproxy.core.usage import Tally

# An event ends with an empty line; lines end with LF, CRLF or CR (HTML standard, 9.2.5).
_EVENT_END = re.compile(rb"\n\r?\n|\r\r")
# Strings in JSON escape their quotes, so these byte sequences are keys wherever they appear.
_TIMINGS = re.compile(rb',\s*"timings"\s*:\s*(\{[^{}]*\})|"timings"\s*:\s*(\{[^{}]*\})\s*,?')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')

MAX_EVENT = 256 * 1024
"""Bytes of one event that are held back until it is complete; a longer one passes through as it comes."""

_TAIL = 16 * 1024  # bytes kept of such a long event: its end is where usage and timings stand
_WHOLE = 1024 * 1024  # bytes up to which a plain answer is parsed as a whole
_EDGE = 64 * 1024  # bytes kept of the beginning and of the end of a longer one


class StreamMeter:
    """Meters one event stream.

    After each :meth:`feed`:

    - :attr:`started` tells whether a generated token has been seen,
    - :attr:`held` whether the event with the finish reason is held back to be completed by the next one,
    - :attr:`done` whether the stream has told its end (``[DONE]``); that event and what follows stay in
      :attr:`tail`, for the caller to send when the books are written.
    """

    __slots__ = (
        "_buffer",
        "_call",
        "_finished",
        "_held",
        "_last_timings",
        "_oversize",
        "_single",
        "_strip_timings",
        "_strip_usage",
        "done",
        "error",
        "started",
        "tail",
        "tally",
    )

    def __init__(self, call: Call) -> None:
        self.tally = Tally(call.prompts, call.prompts * call.n)
        self.started = False
        self.done = False
        self.error = False
        self.tail = b""
        self._call = call
        self._single = call.prompts * call.n == 1
        self._strip_timings = call.added and not call.wants_timings
        self._strip_usage = call.added and not call.wants_usage
        self._buffer = bytearray()
        self._held = b""
        self._oversize = False
        self._finished = 0
        self._last_timings: bytes | None = None

    @property
    def held(self) -> bool:
        """Whether a complete event is held back."""
        return bool(self._held)

    @property
    def broken_event(self) -> bool:
        """Whether a part of an event has gone out whose end has not."""
        return self._oversize

    @property
    def complete(self) -> bool:
        """Whether the server has told the end: ``[DONE]``, or a finish reason for every choice."""
        return self.done or self._finished >= self._call.prompts * self._call.n

    def release(self) -> bytes:
        """Give back the event that is held, as it is: nothing came to complete it in time."""
        held, self._held = self._held, b""
        return held

    def feed(self, data: bytes) -> bytes:
        """Take in the server's bytes; return what goes to the client now."""
        if self.done:
            return data
        buffer = self._buffer
        if not buffer and not self._oversize and data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2:
            return self._event(data)  # the common case: one whole event
        searched = max(0, len(buffer) - 3)
        buffer += data
        out: list[bytes] = []
        position = 0
        while match := _EVENT_END.search(buffer, max(position, searched)):
            event = bytes(buffer[position : match.end()])
            position = match.end()
            event = self._end_of_oversize(event) if self._oversize else self._event(event)
            out.append(event)
            if self.done:
                self.tail += bytes(buffer[position:])
                buffer.clear()
                return b"".join(out)
        del buffer[:position]
        out.append(self._incomplete())
        return b"".join(out)

    def close(self) -> bytes:
        """Take in the end of the server's bytes; return what is left for the client."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        if rest and not self.done:
            # a last event without its empty line is none for a client (HTML standard), but its numbers are read
            rest = self._end_of_oversize(rest) if self._oversize else self._event(rest)
        return self.release() + rest

    def settle(self) -> Tally:
        """Return the tally of all that was seen."""
        if self._last_timings is not None:
            self.tally.add_timings(_parse(self._last_timings))
            self._last_timings = None
        return self.tally

    def _incomplete(self) -> bytes:
        """Return what of the incomplete event in the buffer can go out."""
        buffer = self._buffer
        if buffer.startswith(b":") and not self._held and (end := buffer.rfind(b"\n") + 1):
            # comment lines keep the connection alive: they do not wait for an empty line that may come much later
            while not buffer.startswith(b":", buffer.rfind(b"\n", 0, end - 1) + 1):
                end = buffer.rfind(b"\n", 0, end - 1) + 1
            comment = bytes(buffer[:end])
            del buffer[:end]
            return comment
        if self._oversize or len(buffer) > MAX_EVENT:
            first = self.release()
            if not self._oversize:
                self._oversize = True
                self._delta()
            surplus = len(buffer) - _TAIL
            if surplus > 0:
                passed = bytes(buffer[:surplus])
                del buffer[:surplus]
                return first + passed
            return first
        return b""

    def _end_of_oversize(self, end: bytes) -> bytes:
        self._oversize = False
        for match in _USAGE.finditer(end):
            self.tally.add_usage(_value_at(end, match.end() - 1), running=True)
        finished = _FINISHED.search(end)
        if finished:
            self._finished += 1
        return self._timings(end, keep=finished is not None)

    def _delta(self) -> None:
        self.started = True
        self.tally.deltas += 1

    def _event(self, event: bytes) -> bytes:
        """Take in one whole event; return what goes to the client of it."""
        if b'"choices"' in event:
            return self._chunk(event)
        if event.startswith(b"data:") and event[5:].strip() == b"[DONE]":
            self.done = True
            self.tail = event
            return self.release()
        # "error:" is how older llama-servers tell a fault
        if event.startswith(b"error:") or (b'"error"' in event and _tells_error(event)):
            self.error = True
        return self._held_first(event)

    def _held_first(self, event: bytes) -> bytes:
        return self.release() + event if self._held else event

    def _chunk(self, event: bytes) -> bytes:
        """Take in a chat or text completion chunk."""
        finished = _FINISHED.search(event) is not None
        has_usage = _USAGE.search(event) is not None
        if not (finished or has_usage) and self.started and self._single:
            self.tally.deltas += 1
            event = self._timings(event)
            return self._held_first(event)

        chunk = _json_of(event)
        if type(chunk) is not dict or type(choices := chunk.get("choices")) is not list:
            return self._held_first(event)
        generated = sum(_has_token(choice) for choice in choices)
        self.tally.deltas += generated
        self.started = self.started or generated > 0
        if choices and not self._single and type(choices[0]) is dict:
            index = choices[0].get("index")
            self.tally.add_timings(chunk.get("timings"), index if type(index) is int else 0)
        if has_usage:
            self.tally.add_usage(chunk["usage"], running=bool(choices) and not finished)
            if not choices:
                return self._usage_chunk(event, chunk)
        if finished:
            self._finished += 1
        out = self._held_first(self._timings(event, keep=finished))
        if finished and self._strip_usage and b'"timings"' not in event:
            # Unasked for usage, llama-server puts its timings on this chunk; asked, on the next. Wait for that one.
            self._held = out[len(out) - len(event) :]
            return out[: len(out) - len(event)]
        return out

    def _usage_chunk(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        """Take in the chunk that has the usage and no choices."""
        timings = _TIMINGS.search(event)
        if timings and self._single:
            self._last_timings = timings[1] or timings[2]
        if not self._strip_usage or not _NO_CHOICES.search(event):
            return self._held_first(event)
        held = self.release()
        if timings and held:
            end = held.rindex(b"}")
            return b'%s,"timings":%s%s' % (held[:end], (timings[1] or timings[2]), held[end:])
        return held

    def _timings(self, event: bytes, *, keep: bool = False) -> bytes:
        """Note the timings of an event, and take them out if they are there for smolproxy alone."""
        if b'"timings"' not in event:
            return event
        matches = list(_TIMINGS.finditer(event))
        if not matches:
            return event
        match = matches[-1]
        if self._single:
            self._last_timings = match[1] or match[2]
        if keep or not self._strip_timings:
            return event
        return event[: match.start()] + event[match.end() :]


class PlainMeter:
    """Meters one answer that is not streamed. Its bytes pass as they are; of a long one only the edges are kept."""

    __slots__ = ("_call", "_head", "_tail", "size")

    def __init__(self, call: Call) -> None:
        self.size = 0
        self._call = call
        self._head = bytearray()
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        """Take in bytes of the body."""
        self.size += len(data)
        if self.size <= _WHOLE:
            self._head += data
            return
        if len(self._head) > _EDGE:
            self._tail += self._head[_EDGE:]
            del self._head[_EDGE:]
        self._tail += data
        if len(self._tail) > _EDGE:
            del self._tail[:-_EDGE]

    def settle(self) -> tuple[Tally, dict[str, Any] | None]:
        """Return the tally, and the answer itself where it was short enough to be parsed."""
        call = self._call
        tally = Tally(call.prompts, call.prompts * call.n)
        if self.size <= _WHOLE:
            answer = _parse(bytes(self._head))
            if type(answer) is not dict:
                return tally, None
            tally.add_usage(answer.get("usage"))
            tally.add_timings(answer.get("timings"))
            return tally, answer
        for edge in (bytes(self._head), bytes(self._tail)):
            for match in _USAGE.finditer(edge):
                tally.add_usage(_value_at(edge, match.end() - 1), running=True)
            for match in _TIMINGS.finditer(edge):
                tally.add_timings(_parse(match[1] or match[2]))
        return tally, None


def _has_token(choice: Any) -> bool:
    """Whether a choice of a chunk carries generated text: content, reasoning or a tool call."""
    if type(choice) is not dict:
        return False
    delta = choice.get("delta")
    if type(delta) is dict:
        return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal"))
    return bool(choice.get("text"))


def _tells_error(event: bytes) -> bool:
    value = _json_of(event)
    return type(value) is dict and bool(value.get("error"))


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _json_of(event: bytes) -> Any:
    """Return the JSON value of an event's data lines, ``None`` if it is none."""
    lines = [line[5:] for line in re.split(rb"\r\n|\n|\r", event) if line.startswith(b"data:")]
    return _parse(b"\n".join(lines))


def _value_at(data: bytes, start: int) -> Any:
    """Return the JSON value that begins at ``start``, ``None`` if none does."""
    try:
        return json.JSONDecoder().raw_decode(data[start:].decode(errors="replace"))[0]
    except (ValueError, RecursionError):
        return None
