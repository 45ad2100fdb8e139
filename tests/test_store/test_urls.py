"""The normal form of a server's URL (core.urls)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolproxy.core.urls import normalise_url
from smolproxy.errors import Invalid


@pytest.mark.parametrize(
    ("given_url", "normal"),
    [
        ("http://10.0.0.5:8080", "http://10.0.0.5:8080"),
        ("HTTP://Big-GPU:8080/", "http://big-gpu:8080"),
        (" https://gpu.example.org/ ", "https://gpu.example.org"),
        ("http://host/v1", "http://host"),
        ("http://host:1/v1/", "http://host:1"),
        ("http://host/llama/v1//", "http://host/llama"),
        ("http://host/Llama/a%20b/", "http://host/Llama/a%20b"),
        ("http://host/v1/v1", "http://host"),
        ("http://host/v1x", "http://host/v1x"),
        ("http://host/path@2", "http://host/path@2"),
        ("http://[::1]:8080/", "http://[::1]:8080"),
        ("http://host:", "http://host"),
        ("http://gpu_1:80", "http://gpu_1:80"),
    ],
)
def test_normal_form(given_url: str, normal: str) -> None:
    assert normalise_url(given_url) == normal


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "must not be empty"),
        ("localhost:8080", "has no scheme: write http://localhost:8080$"),
        ("10.0.0.5", "has no scheme: write http://10.0.0.5$"),
        ("//host/x", "has no scheme: write http://host/x$"),
        ("http:/host", "has no scheme: write http://host$"),
        ("http:", "has no scheme: write http://127.0.0.1:8080$"),
        ("ftp://host", "must begin with http:// or https://, not ftp://"),
        ("unix:///run/llama.sock", "must begin with http:// or https://"),
        ("http://", "has no host"),
        ("http:///v1", "has no host"),
        ("http://:8080", "has no host"),
        ("http://host:port", "is not valid"),
        ("http://host:70000", "is not valid"),
        ("http://host:0", "has port 0"),
        ("http://[::1", "is not valid"),
        ("http://a<b>", "characters that cannot be in one"),
        ("http://host/?a=b", "query or a fragment: write http://host/$"),
        ("http://host?", "query or a fragment"),
        ("http://host#x", "query or a fragment"),
        ("http://host/a b", "spaces or control"),
        ("http://host/\r\nX: y", "spaces or control"),
        ("http://host/\ud800", "spaces or control"),
        ("http://" + "x" * 2000, "at most 2000"),
    ],
)
def test_what_cannot_be_a_server_is_refused_with_what_to_write(url: str, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        normalise_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://ann:hunter2@host",
        "ann:hunter2@host",
        "https://hunter2@host/v1",
        "ftp://a:hunter2@h",
        "http://h unter2@h",
    ],
)
def test_credentials_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(Invalid, match="--api-key") as caught:
        normalise_url(url)
    assert "unter2" not in str(caught.value)


def test_other_types_are_refused() -> None:
    with pytest.raises(Invalid, match="must be a string"):
        normalise_url(8080)  # type: ignore[arg-type]


@given(
    st.one_of(
        st.text(max_size=40),
        st.builds("http://{}{}".format, st.text(max_size=10), st.text("/v1ab.%", max_size=12)),
        st.builds("https://host:{}/{}".format, st.integers(-1, 70000), st.text("/v1x", max_size=8)),
    )
)
def test_the_normal_form_is_its_own_and_everything_else_is_invalid(url: str) -> None:
    try:
        normal = normalise_url(url)
    except Invalid:
        return
    assert normalise_url(normal) == normal
    assert normal.startswith(("http://", "https://"))
    assert not normal.endswith(("/", "/v1"))
