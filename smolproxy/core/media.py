"""Media that a request names by URL: llama-server would fetch them from inside the network, or read local files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PARTS = ("image_url", "video_url", "audio_url", "input_audio", "file")


def forbidden_url(fields: Mapping[str, Any], *, allow_remote: bool) -> str | None:
    """Return the scheme of the first media URL in a chat that must not reach a server, ``None`` if there is none.

    ``file:`` never may, ``http:`` and ``https:`` only if ``allow_remote``; ``data:`` and bare base64 always may.
    """
    for url in _urls(fields.get("messages")):
        scheme = url.lstrip()[:8].lower().partition(":")[0]
        if scheme == "file" or (scheme in ("http", "https") and not allow_remote):
            return f"{scheme}:"
    return None


def _urls(messages: Any) -> Iterator[str]:
    for message in messages if type(messages) is list else ():
        content = message.get("content") if type(message) is dict else None
        for part in content if type(content) is list else ():
            if type(part) is not dict:
                continue
            for name in _PARTS:
                value = part.get(name)
                if type(value) is dict:
                    value = value.get("url") or value.get("data")
                if type(value) is str:
                    yield value
