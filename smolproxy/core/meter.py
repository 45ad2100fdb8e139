"""Meters: an answer's bytes in as they come, the client's bytes out, the usage noted on the way.

:class:`StreamMeter` reads server-sent events; it parses their JSON only where they are not llama-server's plain text
chunks. What smolproxy added to the request to learn the usage (``timings_per_token``, ``stream_options.include_usage``;
see :func:`smolproxy.core.call.outgoing`) is taken out of the answer here: this module is the exact inverse of that one.
:class:`PlainMeter` reads an answer that is not streamed. Neither knows where bytes come from or go to.
"""

from __future__ import annotations

import re
from typing import Any

from smolproxy.core import jsontext, sse
from smolproxy.core.call import Call
from smolproxy.core.usage import Tally

# Strings in JSON escape their quotes, so these byte sequences are keys wherever they appear.
_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
_TIMINGS = re.compile(rb'"timings"\s*:\s*(?=\{)')
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"[^"]')
_INDEX = re.compile(rb'"index"\s*:\s*(\d{1,9})')
# How llama-server writes chunks: those of chats have the finish reason first, timings are last.
_CHUNK = b'data: {"choices":[{'
_NO_FINISH = _CHUNK + b'"finish_reason":null,'
_LAST_TIMINGS = b',"timings":{'

_MOST_BEHIND = 16 * 1024  # bytes of comments that wait behind an event that is held back
_WHOLE = 1024 * 1024  # bytes up to which a plain answer is parsed as a whole
_EDGE = 64 * 1024  # bytes kept of the beginning and of the end of a longer one


class StreamMeter:
    """Meters one event stream.

    After each :meth:`feed`:

    - :attr:`error` tells whether the server has told an error in the stream,
    - :attr:`done` whether the stream has told its end (``[DONE]``); that event and the rest of the bytes that came
      with it stay in :attr:`tail`, for the caller to send when the books are written. What is fed later passes.
    """

    __slots__ = (
        "_behind",
        "_held",
        "_large_finished",
        "_large_index",
        "_plain",
        "_single",
        "_splitter",
        "_strip_timings",
        "_strip_usage",
        "_unread",
        "done",
        "error",
        "tail",
        "tally",
    )

    def __init__(self, call: Call) -> None:
        self.tally = Tally(call.prompts, call.choices)
        self.done = False
        self.error = False
        self.tail = b""
        self._single = call.choices == 1
        self._strip_timings = call.added and not call.wants_timings
        self._strip_usage = call.added and not call.wants_usage
        self._splitter = sse.Splitter()
        self._held = b""  # the event with the finish reason
        self._behind = b""  # comments that came after it
        self._plain = False  # text chunks of a single choice are to be expected, which need not be parsed
        self._unread: bytes | None = None  # timings of the last such chunk
        self._large_index = 0  # the choice that a large event is of
        self._large_finished = False  # it has a finish reason

    @property
    def started(self) -> bool:
        """Whether a generated token has been seen."""
        return self.tally.deltas > 0

    @property
    def held(self) -> bool:
        """Whether the event with the finish reason is held back to be completed by the next one."""
        return bool(self._held)

    @property
    def broken_event(self) -> bool:
        """Whether a part of an event or comment has gone out whose end has not."""
        return self._splitter.open

    @property
    def complete(self) -> bool:
        """Whether the server has told the end: ``[DONE]``, or a finish reason for every choice."""
        return self.done or self.tally.complete

    def release(self) -> bytes:
        """Give back the event that is held, as it is: nothing came to complete it in time."""
        released = self._held + self._behind
        self._held = self._behind = b""
        return released

    def feed(self, data: bytes) -> bytes:
        """Take in the server's bytes; return what goes to the client now."""
        if self.done:
            return data
        if (
            data.find(b"\n") == len(data) - 2  # the common case: one whole event, in one line
            and data.endswith(b"\n")
            and self._splitter.clean
            and len(data) <= sse.MAX_EVENT
        ):
            if self._plain and (out := self._plain_chunk(data)) is not None:
                return out
            if data.startswith(b"data:") and b"\r" not in data:
                return self._parsed_event(data)
        return self._take(self._splitter.feed(data), last=False)

    def close(self) -> bytes:
        """Take in the end of the server's bytes; return what is left for the client."""
        # a last event without its empty line is none for a client (HTML standard), but its numbers are read
        return self._take(self._splitter.close(), last=True) + self.release()

    def settle(self) -> Tally:
        """Return the tally of all that was seen."""
        if self._unread is not None:
            self.tally.add_timings(jsontext.read(self._unread))
            self._unread = None
        return self.tally

    def _take(self, pieces: list[tuple[int, bytes]], *, last: bool) -> bytes:
        out: list[bytes] = []
        for kind, piece in pieces:
            if self.done:
                self.tail += piece
            elif kind == sse.EVENT:
                out.append(self._event(piece))
            elif kind == sse.BETWEEN:
                out.append(self._comment(piece))
            elif kind == sse.HEAD:
                out.append(self.release() + piece)
                self._begin_of_large(piece)
            elif kind == sse.TAIL:
                out.append(self._end_of_large(piece))
            else:
                out.append(piece)
        if self.done and not last:
            self.tail += b"".join(piece for _, piece in self._splitter.close())
        return b"".join(out)

    def _comment(self, comment: bytes) -> bytes:
        """Return what can go out of comments: they do not wait, but must not overtake a held event."""
        if not self._held:
            return comment
        self._behind += comment
        return self.release() if len(self._behind) > _MOST_BEHIND else b""

    def _begin_of_large(self, head: bytes) -> None:
        index = _INDEX.search(head)
        self._large_index = self.tally.known(int(index[1])) if index else 0
        self._large_finished = _FINISHED.search(head) is not None
        self._note_usage(head)
        if b'"choices"' in head:
            self.tally.deltas += 1

    def _end_of_large(self, tail: bytes) -> bytes:
        index = self._large_index
        self._note_usage(tail)
        if finished := self._large_finished or _FINISHED.search(tail) is not None:
            self.tally.finished.add(index)
        at = _timings_at_end(tail)
        if at < 0:
            return tail
        self._unread = None
        self.tally.add_timings(jsontext.read_at(tail, at + len(_LAST_TIMINGS) - 1), index)
        return tail if finished or not self._strip_timings else _without_timings(tail, at)

    def _note_usage(self, part: bytes) -> None:
        """Note the usage that an end of a large event tells."""
        for match in _USAGE.finditer(part):
            self.tally.add_usage(jsontext.read_at(part, match.end()), self._large_index, alone=False)

    def _event(self, event: bytes) -> bytes:
        """Take in one event; return what goes to the client now."""
        if self._plain and (out := self._plain_chunk(event)) is not None:
            return out
        return self._parsed_event(event)

    def _plain_chunk(self, event: bytes) -> bytes | None:
        """Take in an event that need not be parsed: text, with timings at its end and without usage; else ``None``."""
        if not event.startswith(_NO_FINISH) and not (event.startswith(_CHUNK) and b'"finish_reason":null' in event):
            return None
        at = event.rfind(_LAST_TIMINGS)
        if at < 0 or event.find(b"}", at) != len(event) - 4 or not event.endswith(b"}}\n\n"):
            return None
        if event.find(b'"usage":', 0, at) >= 0:
            return None
        self.tally.deltas += 1
        self._unread = event[at + 11 : -3]
        return event[:at] + b"}\n\n" if self._strip_timings else event

    def _parsed_event(self, event: bytes) -> bytes:
        """Take in an event whose data has to be parsed."""
        spans, error = sse.data_lines(event)
        self.error = self.error or error
        lines = [event[start:end] for start, end in spans]
        if len(lines) == 1:
            chunk = jsontext.read(lines[0])
            if type(chunk) is dict:
                out = self._chunk(event, spans[0], chunk)
                self._plain = self._single and self.started and not self._held
                return out
        else:
            whole = jsontext.read(b"\n".join(lines))
            for part in [whole] if whole is not None else map(jsontext.read, lines):
                if type(part) is dict:
                    self._note(part)
        if b"[DONE]" in map(bytes.strip, lines):
            self.done = True
            self.tail = event
            return self.release()
        return self.release() + event

    def _chunk(self, event: bytes, span: tuple[int, int], chunk: dict[str, Any]) -> bytes:
        """Take in an event whose only data is the object ``chunk``, written at ``span``."""
        start, end = span
        finished = self._note(chunk)
        choices, usage, timings = chunk.get("choices"), chunk.get("usage"), chunk.get("timings")
        if self._strip_usage and type(usage) is dict and choices == []:
            # the chunk that was asked for by smolproxy alone: unasked, its timings are on the one before
            told = jsontext.value_of(event[start:end], "timings")
            if self._held and told is not None:
                close = self._held.rindex(b"}")
                self._held = b'%s,"timings":%s%s' % (self._held[:close], told, self._held[close:])
            return self.release()
        if type(timings) is dict and choices and not finished and self._strip_timings:
            at = _timings_at_end(event)
            if at >= 0:
                event = _without_timings(event, at)
            else:
                event = event[:start] + jsontext.splice(event[start:end], {}, ("timings",)) + event[end:]
        out = self.release()
        if finished and self._strip_usage and timings is None and type(usage) is not dict:
            self._held = event
            return out
        return out + event

    def _note(self, chunk: dict[str, Any]) -> bool:
        """Note what a chunk tells; return whether it has a finish reason."""
        if chunk.get("error"):
            self.error = True
        if "timings" in chunk:
            self._unread = None  # they are older
        return self.tally.add_chunk(chunk)


class PlainMeter:
    """Meters one answer that is not streamed. Its bytes pass as they are; of a long one only the edges are kept."""

    __slots__ = ("_call", "_head", "_tail", "size")

    def __init__(self, call: Call) -> None:
        self.size = 0
        self._call = call
        self._head = bytearray()
        self._tail = bytearray()  # what follows the head, its last bytes in a long answer

    def feed(self, data: bytes) -> None:
        """Take in bytes of the body."""
        self.size += len(data)
        missing = _EDGE - len(self._head)
        if missing > 0:
            self._head += data[:missing]
            data = data[missing:]
        self._tail += data
        if self.size > _WHOLE:
            del self._tail[:-_EDGE]

    def settle(self) -> tuple[Tally, dict[str, Any] | None]:
        """Return the tally, and the answer itself where it was short enough to be parsed."""
        tally = Tally(self._call.prompts, self._call.choices)
        head, tail = bytes(self._head), bytes(self._tail)
        if self.size <= _WHOLE and type(answer := jsontext.read(head + tail)) is dict:
            tally.add_usage(answer.get("usage"))
            tally.add_timings(answer.get("timings"))
            return tally, answer
        # the part of an answer that is left out holds text, or numbers: usage and timings are near its ends
        for edge in (head + tail,) if self.size <= 2 * _EDGE else (head, tail):
            for match in _USAGE.finditer(edge):
                tally.add_usage(jsontext.read_at(edge, match.end()))
            for match in _TIMINGS.finditer(edge):
                tally.add_timings(jsontext.read_at(edge, match.end()))
        return tally, None


def _timings_at_end(event: bytes) -> int:
    """Return where the timings begin (at their comma) if they are the last member of an event's object, else -1."""
    at = event.rfind(_LAST_TIMINGS)
    if at < 0:
        return -1
    end = event.find(b"}", at) + 1
    return at if event[end:].rstrip(b"\r\n") == b"}" else -1


def _without_timings(event: bytes, at: int) -> bytes:
    return event[:at] + event[event.index(b"}", at) + 1 :]
