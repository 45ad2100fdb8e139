"""Server-sent events, cut out of the bytes of a stream: nothing is lost or waits longer than it has to.

This module knows where events begin and end (HTML standard, 9.2.5), not what they say.
"""

from __future__ import annotations

import re

MAX_EVENT = 256 * 1024
"""Bytes of one event that are held back until it is complete; a longer one is handed on as it comes."""

EDGE = 16 * 1024
"""Bytes of the beginning and of the end of such a long event that are handed on in one piece."""

# What a piece of a stream is
EVENT = 0  # a whole event with its empty line
BETWEEN = 1  # comments and empty lines between events, or a part of them
HEAD = 2  # the first EDGE bytes of a long event
MIDDLE = 3  # further ones
TAIL = 4  # its last EDGE bytes

# Lines end with LF, CRLF or CR, an event with an empty line. (LF before CR alone is not taken for one: it would leave
# half of a CRLF behind.)
_EVENT_END = re.compile(rb"\n\r?\n|\r\r")
_EMPTY_LINES = re.compile(rb"[\r\n]*")


def data_lines(event: bytes) -> tuple[list[tuple[int, int]], bool]:
    """Return where the values of an event's data lines are, and whether one of its other lines tells an error."""
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2:
        return [(5, len(event) - 2)], False
    data: list[tuple[int, int]] = []
    error = False
    start = 0
    for line in event.splitlines(keepends=True):
        if line.startswith(b"data:"):
            data.append((start + 5, start + len(line.rstrip(b"\r\n"))))
        elif line.startswith((b"event: error", b"event:error", b"error:")):
            error = True  # "error:" is how older llama-servers tell one
        start += len(line)
    return data, error


class Splitter:
    """Cuts one stream into pieces that make up the stream when they are joined.

    Which pieces of which kinds there are hangs on the stream alone, not on the portions in which it comes; only long
    comments and the middle of long events come in smaller or larger pieces. At most :data:`MAX_EVENT` bytes are kept.
    """

    __slots__ = ("_buffer", "_comment", "_cr", "_large", "clean")

    def __init__(self) -> None:
        self.clean = True  # an event may begin here
        self._buffer = bytearray()  # an event that is not complete
        self._cr = False  # there are CRs in the stream
        self._comment = False  # within a comment whose beginning has been handed on
        self._large = False  # within an event whose beginning has been handed on

    @property
    def open(self) -> bool:
        """Whether a part of an event or comment has been handed on whose end has not."""
        return self._large or self._comment

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take in the next bytes; return the pieces that they complete, with their kinds."""
        buffer = self._buffer
        searched = max(0, len(buffer) - 2)  # the last bytes may be the first of an event's end
        buffer += data
        self._cr = self._cr or b"\r" in data
        pieces: list[tuple[int, bytes]] = []
        at = 0
        while True:
            if not self._large and (end := self._between(at)) > at:
                pieces.append((BETWEEN, bytes(buffer[at:end])))
                at = end
            end = self._event_end(max(at, searched))
            if end < 0:
                break
            self._add_end(pieces, bytes(buffer[at:end]))
            at = end
        del buffer[:at]
        if not self._large and len(buffer) > MAX_EVENT:
            self._large = True
            pieces.append((HEAD, bytes(buffer[:EDGE])))
            del buffer[:EDGE]
        if self._large and len(buffer) > EDGE:
            pieces.append((MIDDLE, bytes(buffer[:-EDGE])))
            del buffer[:-EDGE]
        self.clean = not buffer and not self._comment
        return pieces

    def close(self) -> list[tuple[int, bytes]]:
        """Take in the end of the stream; return what is left, an event without its end as if it were one."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        pieces: list[tuple[int, bytes]] = []
        if rest:
            self._add_end(pieces, rest)
        return pieces

    def _between(self, at: int) -> int:
        """Return the offset behind the comments and empty lines that begin at ``at``."""
        buffer = self._buffer
        while True:
            if self._comment:
                at = self._line_end(at)
                if at == len(buffer) and (not at or buffer[at - 1] not in b"\r\n"):
                    return at
                self._comment = False
            match = _EMPTY_LINES.match(buffer, at)
            assert match is not None  # it matches the empty string
            at = match.end()
            if buffer[at : at + 1] != b":":
                return at
            self._comment = True

    def _line_end(self, at: int) -> int:
        """Return the offset behind the line in which ``at`` is, the buffer's end if the line has none."""
        lf = self._buffer.find(b"\n", at)
        end = len(self._buffer) if lf < 0 else lf + 1
        if not self._cr:
            return end
        cr = self._buffer.find(b"\r", at, end)
        return end if cr < 0 else cr + 1

    def _event_end(self, at: int) -> int:
        """Return the offset behind the first event that ends after ``at``, -1 if none does."""
        if self._cr:
            match = _EVENT_END.search(self._buffer, at)
            return match.end() if match else -1
        end = self._buffer.find(b"\n\n", at)
        return end + 2 if end >= 0 else -1

    def _add_end(self, pieces: list[tuple[int, bytes]], end: bytes) -> None:
        """Add an event, or the end of a large one."""
        if not self._large:
            if len(end) <= MAX_EVENT:
                pieces.append((EVENT, end))
                return
            pieces.append((HEAD, end[:EDGE]))
            end = end[EDGE:]
        self._large = False
        if len(end) > EDGE:
            pieces.append((MIDDLE, end[:-EDGE]))
        pieces.append((TAIL, end[-EDGE:]))
