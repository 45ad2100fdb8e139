"""Which headers go to a server, and which come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# RFC 9110, 7.6.1, and what belongs to one connection in practice. What ``Connection`` names is hop-by-hop as well.
HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
CREDENTIALS = frozenset(("authorization", "x-api-key", "api-key", "cookie"))

# Framing is made anew; encodings are declined so that the usage can be read; a browser's origin would make
# llama-server answer with CORS headers of its own.
_NOT_SENT = (
    HOP_BY_HOP
    | CREDENTIALS
    | {
        "host",
        "content-length",
        "accept-encoding",
        "expect",
        "origin",
        "referer",
        "x-request-id",
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-real-ip",
        "content-encoding",
    }
)
# Length, encoding and date are those of smolproxy's own answer; where a server lives is not for users to know.
_NOT_RETURNED = HOP_BY_HOP | {
    "content-length",
    "content-encoding",
    "set-cookie",
    "set-cookie2",
    "server",
    "location",
    "alt-svc",
    "date",
    "x-request-id",
}
_NOT_RETURNED_TO_STREAM = _NOT_RETURNED | {"cache-control", "x-accel-buffering"}


def to_server(headers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the request headers that a server may see: no credential, nothing that belongs to the connection."""
    pairs = list(headers)
    named = _named(pairs)
    for name, value in pairs:
        lower = name.lower()
        if lower not in _NOT_SENT and lower not in named:
            yield name, value


def to_client(headers: Iterable[tuple[str, str]], *, stream: bool) -> Iterator[tuple[str, str]]:
    """Yield the headers of a server's answer that the client gets.

    :param stream: the answer is an event stream, whose cache headers are set by smolproxy.
    """
    pairs = list(headers)
    dropped = (_NOT_RETURNED_TO_STREAM if stream else _NOT_RETURNED) | _named(pairs)
    for name, value in pairs:
        lower = name.lower()
        if lower not in dropped and not lower.startswith("access-control-"):
            yield name, value


def _named(headers: list[tuple[str, str]]) -> set[str]:
    """The names in lower case that ``Connection`` says belong to the connection alone."""
    values = [value for name, value in headers if name.lower() == "connection"]
    return {token.strip().lower() for value in values for token in value.split(",")}
