"""JSON as it is written: members found and changed in an object's bytes, values read wherever they stand.

What is not changed stays as it was written. Nothing that changes JSON recurses or converts numbers, so that whatever
a parser took can be taken apart; it has to be valid. This module must not know what the members mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

_QUOTE, _BACKSLASH, _CLOSE = b'"\\}'
_OPENING = b"[{"
_SPACE = re.compile(rb"[ \t\n\r]*")
_BRACKET = re.compile(rb'["\[\]{}]')
_SCALAR = re.compile(rb"[^,\]} \t\n\r]*")
_DECODER = json.JSONDecoder()


def read(text: bytes) -> Any:
    """Return the value of ``text``, ``None`` if it is not JSON in UTF-8."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):
        return None


def read_at(text: bytes, start: int) -> Any:
    """Return the value that begins at ``start``, whatever follows it; ``None`` if none does."""
    try:
        return _DECODER.raw_decode(text[start:].decode(errors="replace"))[0]
    except (ValueError, RecursionError):
        return None


def members(text: bytes) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield each member of the JSON object ``text``: its name, and where four parts of it are.

    :return: name; offset behind the brace or comma before it; of its value; behind its value; of the comma or brace
        after it.
    """
    at = text.index(b"{")
    while True:
        first = at + 1
        key = _skip(text, first)
        if text[key] != _QUOTE:  # the brace that ends an empty object
            return
        end = _string_end(text, key + 1)
        start = _skip(text, text.index(b":", end) + 1)
        stop = _value_end(text, start)
        at = _skip(text, stop)
        yield _name(text[key:end]), first, start, stop, at
        if text[at] == _CLOSE:
            return


def value_of(text: bytes, name: str) -> bytes | None:
    """Return the value of a member as it is written, the last one's if there are several; ``None`` without one."""
    value = None
    for member, _, start, stop, _ in members(text):
        if member == name:
            value = text[start:stop]
    return value


def splice(text: bytes, changes: Mapping[str, bytes], drop: Container[str] = ()) -> bytes:
    """Set members of the JSON object ``text`` and take some out, leaving every other byte as it is.

    A member that is there is replaced where it stands (each time, if it is there more than once, so that all readers
    agree); a new one is put in front.

    :param changes: the new values, as JSON.
    :param drop: names of the members to take out.
    """
    view = memoryview(text)
    begin = end = text.index(b"{") + 1
    new = dict(changes)
    kept: list[tuple[memoryview | bytes, ...]] = []
    for name, first, start, stop, end in members(text):
        if name in drop:
            continue
        if name in changes:
            new.pop(name, None)
            kept.append((view[first:start], changes[name], view[stop:end]))
        else:
            kept.append((view[first:end],))
    added = [(json.dumps(name).encode(), b":", value) for name, value in new.items()]
    pieces: list[memoryview | bytes] = [view[:begin]]
    for number, parts in enumerate([*added, *kept]):
        if number:
            pieces.append(b",")
        pieces += parts
    pieces.append(view[end:])
    return b"".join(pieces)


def prepend(text: bytes, new: Mapping[str, bytes]) -> bytes:
    """Put new members in front of those of ``text``, a JSON object that has some, but none of these names."""
    start = text.index(b"{") + 1
    front = b"".join(b"%s:%s," % (json.dumps(name).encode(), value) for name, value in new.items())
    return b"".join((memoryview(text)[:start], front, memoryview(text)[start:]))


def _name(raw: bytes) -> str:
    return str(json.loads(raw)) if _BACKSLASH in raw else raw[1:-1].decode()


def _skip(text: bytes, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # it matches the empty string
    return match.end()


def _string_end(text: bytes, at: int) -> int:
    """Return the offset behind the string whose first character is at ``at``."""
    while True:
        quote = text.index(b'"', at)
        back = quote
        while text[back - 1] == _BACKSLASH:
            back -= 1
        if (quote - back) % 2 == 0:
            return quote + 1
        at = quote + 1


def _value_end(text: bytes, at: int) -> int:
    first = text[at]
    if first == _QUOTE:
        return _string_end(text, at + 1)
    if first not in _OPENING:
        match = _SCALAR.match(text, at)
        assert match is not None  # it matches the empty string
        return match.end()
    depth = 0
    while True:
        match = _BRACKET.search(text, at)
        assert match is not None  # the JSON is valid
        at = match.end()
        if (found := text[at - 1]) == _QUOTE:
            at = _string_end(text, at)
        elif found in _OPENING:
            depth += 1
        else:
            depth -= 1
            if not depth:
                return at
