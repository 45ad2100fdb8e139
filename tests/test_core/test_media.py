from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolproxy.core.media import forbidden_url


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": list(parts)}]}


def image(url: Any) -> dict[str, Any]:
    return chat({"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}})


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("http://10.0.0.1/x.png", "http:"),
        ("https://example.com/x.png", "https:"),
        ("HTTPS://example.com", "https:"),
        ("  \n\thttp://x", "http:"),
        ("\x00http://x", "http:"),
        ("\u00a0http://x", "http:"),
        ("httpx", "http:"),
        ("ftp://x", "ftp:"),
        ("gopher:x", "gopher:"),
    ],
)
def test_remote_media(url: str, scheme: str) -> None:
    assert forbidden_url(image(url), allow_remote=False) == scheme
    assert forbidden_url(image(url), allow_remote=True) is None


@pytest.mark.parametrize("url", ["file:///etc/passwd", "FILE:x", " file://x", "\x01file:x"])
@pytest.mark.parametrize("allow_remote", [True, False])
def test_files_of_the_server_are_never_allowed(url: str, allow_remote: bool) -> None:
    assert forbidden_url(image(url), allow_remote=allow_remote) == "file:"


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,aGk=", "DATA:,x", "aGVsbG8=", "/9j/4AAQ", "", None, 7, [], {"a": "http://x"}]
)
def test_data_is_allowed(url: Any) -> None:
    assert forbidden_url(image(url), allow_remote=False) is None


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "http://x"},
        {"type": "input_audio", "input_audio": {"data": "http://x", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"url": "data:,x", "data": "http://x"}},
        {"type": "input_audio", "input_audio": {"url": "http://x", "data": "data:,x"}},
        {"type": "video_url", "video_url": {"url": "http://x"}},
        {"type": "audio_url", "audio_url": {"url": "http://x"}},
        {"type": "file", "file": {"file_data": "http://x"}},
        {"type": "input_image", "image_url": "http://x"},
        {"type": "input_file", "file_url": "http://x"},
        {"type": "text", "text": "what type says does not count", "image_url": {"url": "http://x"}},
    ],
)
def test_every_way_to_name_media(part: dict[str, Any]) -> None:
    assert forbidden_url(chat(part), allow_remote=False) == "http:"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        chat({"type": "text", "text": "http://x"}),
        chat({"type": "file", "file": {"filename": "Report: 1.pdf", "file_data": "aGk="}}),
        {"messages": [{"role": "user", "content": "file:///etc/passwd"}]},
        {"prompt": "http://x"},
    ],
)
def test_text_is_no_media(fields: dict[str, Any]) -> None:
    assert forbidden_url(fields, allow_remote=False) is None


anything = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "image_url", "url", "type"]), inner, max_size=3)
    ),
)


@settings(deadline=None)
@given(anything)
def test_any_body_is_read(messages: Any) -> None:
    forbidden_url({"messages": messages}, allow_remote=False)
