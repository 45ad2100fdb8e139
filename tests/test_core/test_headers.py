from __future__ import annotations

import pytest

from smolproxy.core.headers import CREDENTIALS, HOP_BY_HOP, to_client, to_server


def names(headers: list[tuple[str, str]]) -> list[str]:
    return [name for name, _ in to_server(headers)]


@pytest.mark.parametrize(
    "name", ["Authorization", "authorization", "X-API-Key", "api-key", "Cookie", "Proxy-Authorization"]
)
def test_no_credential_reaches_a_server(name: str) -> None:
    assert names([(name, "canary"), ("X-Other", "kept"), (name.upper(), "canary")]) == ["X-Other"]


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_what_belongs_to_a_connection_ends_there(name: str) -> None:
    headers = [(name.title(), "x"), ("X-Kept", "1")]
    assert names(headers) == ["X-Kept"]
    for stream in (True, False):
        assert list(to_client(headers, stream=stream)) == [("X-Kept", "1")]


def test_what_connection_names_ends_there_too() -> None:
    headers = [
        ("Connection", "close, X-Hop"),
        ("x-hop", "1"),
        ("X-Kept", "2"),
        ("connection", " x-other ,"),
        ("X-Other", "3"),
    ]
    assert names(headers) == ["X-Kept"]
    assert list(to_client(headers, stream=False)) == [("X-Kept", "2")]


def test_framing_encodings_and_origins_are_not_sent() -> None:
    dropped = [
        "Host",
        "Content-Length",
        "Accept-Encoding",
        "Content-Encoding",
        "Expect",
        "Origin",
        "Referer",
        "X-Request-Id",
    ]
    dropped += ["X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Forwarded"]
    assert names([(name, "x") for name in dropped]) == []


def test_other_headers_pass_as_they_are() -> None:
    headers = [("Content-Type", "application/json"), ("User-Agent", "x"), ("Accept", "*/*"), ("X-A", "1"), ("x-a", "2")]
    assert list(to_server(headers)) == headers


def test_answers() -> None:
    kept = [("Content-Type", "application/json"), ("X-Odd", "1"), ("X-Odd", "2"), ("Cache-Control", "private")]
    dropped = ["Server", "Set-Cookie", "Date", "Content-Length", "Content-Encoding", "X-Request-Id", "Keep-Alive"]
    dropped += ["Access-Control-Allow-Origin", "access-control-allow-credentials", "Access-Control-Expose-Headers"]
    answer = [*kept, *((name, "x") for name in dropped)]
    assert list(to_client(answer, stream=False)) == kept
    # smolproxy sets these itself, once each
    assert list(to_client([*answer, ("X-Accel-Buffering", "yes")], stream=True)) == kept[:3]


def test_no_name_stands_in_a_list_in_upper_case() -> None:
    assert all(name == name.lower() for name in HOP_BY_HOP | CREDENTIALS)
