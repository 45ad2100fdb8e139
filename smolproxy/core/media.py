"""Media that a request names by URL: llama-server would fetch them from inside the network, or read local files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Fields of a message part that carry media, as a string or in an object.
_PARTS = frozenset(
    (
        "image_url",
        "video_url",
        "audio_url",
        "file_url",
        "input_image",
        "input_video",
        "input_audio",
        "image",
        "video",
        "audio",
        "file",
    )
)
_IN_OBJECT = ("url", "data", "file_url", "file_data")
# Control characters and spaces before it do not keep every reader from seeing a scheme. Base64 has no colon.
_SCHEME = re.compile(r"[\x00-\x20\s]*([a-zA-Z][a-zA-Z0-9+.-]{0,30}):")
# llama-server does not look for the colon.
_HTTP = re.compile(r"[\x00-\x20\s]*http", re.IGNORECASE)


def forbidden_url(fields: Mapping[str, Any], *, allow_remote: bool) -> str | None:
    """Return the scheme of the first media URL in a chat that must not reach a server, ``None`` if there is none.

    ``file:`` never may; ``data:`` and bare base64 always may; anything else, such as ``http:`` and ``https:``, only if
    ``allow_remote``.
    """
    for url in _urls(fields.get("messages")):
        match = _SCHEME.match(url)
        scheme = match[1].lower() if match else "http" if _HTTP.match(url) else "data"
        if scheme == "file" or (scheme != "data" and not allow_remote):
            return f"{scheme}:"
    return None


def _urls(messages: Any) -> Iterator[str]:
    for message in messages if type(messages) is list else ():
        content = message.get("content") if type(message) is dict else None
        for part in content if type(content) is list else ():
            if type(part) is not dict:
                continue
            for name in _PARTS.intersection(part):
                value = part[name]
                for text in map(value.get, _IN_OBJECT) if type(value) is dict else (value,):
                    if type(text) is str:
                        yield text
