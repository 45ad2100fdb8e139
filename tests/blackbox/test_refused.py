"""What smolproxy itself refuses: one envelope on every path, a request id, no row."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest

from .conftest import Site
from .harness import ADMIN_KEY, Answer, Daemon, bearer

SETTINGS = {"max_body_mib": 1}
CHAT = "/v1/chat/completions"


async def refused(site: Site, status: int, code: str, **options: Any) -> Answer:
    """Send a chat that must be refused, without a trace in the books or at the server."""
    options = {"key": site.key, **options}
    answer = await site.daemon.ask("POST", CHAT, **options)
    assert (answer.status, answer.code) == (status, code), answer
    request_id = answer.headers["x-request-id"]
    assert site.daemon.rows_of(request_id) == []
    assert not site.generating()
    return answer


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut"),
        pytest.param(b"model=m1", id="form"),
        pytest.param(b"[]", id="array"),
        pytest.param(b'"text"', id="text"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"model": "m1"} x', id="rest"),
        pytest.param(b'{"model": "m\x001"}', id="NUL"),
        pytest.param(b'{"model": "m1", "x": NaN}', id="NaN"),
        pytest.param(b'{"model": "\xff"}', id="not UTF-8"),
        pytest.param(b'{"model": "m1", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep"),
    ],
)
async def test_a_body_that_is_no_json_object(site: Site, body: bytes) -> None:
    answer = await refused(site, 400, "invalid_json", data=body)
    assert "body" in answer.message


async def test_a_body_nested_ten_thousand_deep_does_no_harm(site: Site) -> None:
    body = json.dumps(site.body())[:-1].encode() + b', "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    answer = await site.daemon.ask("POST", CHAT, key=site.key, data=body)
    assert answer.status in (200, 400)  # how deep Python reads is a matter of its version
    assert (await site.chat()).status == 200


@pytest.mark.parametrize("model", [None, 123, 1.5, True, ["m1"], {"m": 1}, ""], ids=repr)
async def test_a_model_that_is_no_name(site: Site, model: Any) -> None:
    answer = await refused(site, 400, "invalid_request", json=site.body(model=model))
    assert answer.json["error"]["param"] == "model"


async def test_a_body_without_a_model(site: Site) -> None:
    await refused(site, 400, "invalid_request", json={"messages": []})


@pytest.mark.parametrize("model", ["nobody-has-this", "m\x00", "a/b c%2F:d", "日本語", "x" * 5000], ids=ascii)
async def test_an_unknown_model_is_told_with_what_there_is(site: Site, model: str) -> None:
    answer = await refused(site, 404, "model_not_found", json=site.body(model=model))
    assert model in answer.message
    assert site.model in answer.message
    assert answer.json["error"]["param"] == "model"


async def test_a_lone_surrogate_as_model(site: Site) -> None:
    await refused(site, 400, "invalid_request", data=rb'{"model": "\ud800"}')


async def test_of_duplicate_models_the_last_is_checked_and_the_server_reads_no_other(site: Site) -> None:
    body = f'{{"model": "{site.model}", "messages": [], "model": "nobody-has-this"}}'
    await refused(site, 404, "model_not_found", data=body)
    body = f'{{"model": "nobody-has-this", "messages": [], "model": "{site.model}"}}'
    answer = await site.daemon.ask("POST", CHAT, key=site.key, data=body)
    assert answer.status == 200
    seen = json.loads(site.generating()[0].body, object_pairs_hook=list)
    assert {value for name, value in seen if name == "model"} == {site.model}


async def test_a_key_that_may_not_use_the_model_sees_no_difference(site: Site) -> None:
    other = await site.daemon.new_key("other", models=["something-else"])
    answer = await refused(site, 404, "model_not_found", json=site.body(), key=other)
    assert f"'{site.model}'" in answer.message
    assert "There is none" in answer.message


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic YTpi"},
        {"Authorization": "Bearer \u00e4\u00f6"},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
        {"api-key": "wrong"},
        {"Authorization": f"Bearer {ADMIN_KEY}"},
    ],
    ids=str,
)
async def test_no_key_or_a_wrong_one(site: Site, headers: dict[str, str]) -> None:
    answer = await refused(site, 401, "invalid_api_key", key=None, headers=headers, json=site.body())
    assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_a_key_comes_in_either_header_and_any_case_and_the_first_counts(site: Site) -> None:
    for headers in (
        {"Authorization": f"Bearer {site.key}"},
        {"authorization": f"bEARER  {site.key}"},
        {"x-api-key": site.key},
        {"X-API-KEY": f" {site.key} "},
        {"Authorization": f"Bearer {site.key}", "x-api-key": "wrong"},
    ):
        answer = await site.daemon.ask("POST", CHAT, headers=headers, json=site.body())
        assert answer.status == 200, (headers, answer)
    both = {"Authorization": "Bearer wrong", "x-api-key": site.key}
    await site.daemon.ask("POST", CHAT, headers=both, json=site.body())
    answer = await site.daemon.ask("POST", CHAT, headers=both, json=site.body())
    assert answer.status == 401


async def test_a_body_is_json_whatever_its_content_type(site: Site) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "nonsense", ""):
        data = json.dumps(site.body()).encode()
        answer = await site.daemon.ask("POST", CHAT, key=site.key, data=data, headers={"Content-Type": kind})
        assert answer.status == 200, (kind, answer)
    assert {request.headers["content-type"] for request in site.generating()} == {"application/json"}


async def test_a_body_too_large_by_its_length_or_in_chunks(site: Site) -> None:
    large = json.dumps(site.body(x="x" * (1 << 20))).encode()

    async def pieces() -> Any:
        for at in range(0, len(large), 65536):
            yield large[at : at + 65536]

    answer = await refused(site, 413, "body_too_large", data=io.BytesIO(large))
    assert "max_body_mib" in answer.message
    await refused(site, 413, "body_too_large", data=pieces())
    fits = json.dumps(site.body(x="x" * ((1 << 20) - 1000))).encode()
    answer = await site.daemon.ask("POST", CHAT, key=site.key, data=io.BytesIO(fits))
    assert answer.status == 200


async def test_a_body_that_claims_to_be_large_is_refused_before_it_is_sent(site: Site) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.key}\r\nContent-Length: 99999999999\r\n\r\n"
    answer = await site.daemon.raw(head.encode())
    assert (answer.status, answer.code) == (413, "body_too_large")


async def test_a_content_encoding_that_nobody_knows(site: Site) -> None:
    await refused(site, 415, "unsupported_media_type", data=b"x", headers={"Content-Encoding": "zstd-2"})


async def test_a_body_that_is_not_in_its_content_encoding(site: Site) -> None:
    body = json.dumps(site.body()).encode()
    answer = await site.daemon.ask("POST", CHAT, key=site.key, data=body, headers={"Content-Encoding": "gzip"})
    assert answer.status in (400, 415)
    assert answer.code in ("invalid_request", "unsupported_media_type")


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v2/models", "/v1/nothing", "/favicon.ico", "/health/x", "/v1/chat", "/%00", "/v1/%zz", "/*", "//"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_unknown_paths(daemon: Daemon, method: str, path: str) -> None:
    answer = await daemon.ask(method, path)
    assert (answer.status, answer.code) == (404, "not_found")
    assert answer.headers["x-request-id"]
    assert answer.headers["Server"] == "smolproxy"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", "/v1/embeddings", "POST"),
        ("GET", "/v1//completions/", "POST"),
        ("POST", "/v1/models", "GET,HEAD"),
        ("POST", "/v1/models/x", "GET,HEAD"),
        ("PUT", "/health", "GET,HEAD"),
        ("OPTIONS", CHAT, "POST"),
        ("PATCH", "/health/", "GET,HEAD"),
    ],
)
async def test_methods_that_a_path_does_not_have(daemon: Daemon, method: str, path: str, allowed: str) -> None:
    answer = await daemon.ask(method, path)
    assert (answer.status, answer.code) == (405, "method_not_allowed")
    assert answer.headers["Allow"] == allowed
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/9.9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: " + b"a" * 20_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
    ids=["words", "version", "colon", "length", "long line", "long header", "TLS"],
)
async def test_what_is_not_http(daemon: Daemon, data: bytes) -> None:
    answer = await daemon.raw(data)
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert answer.headers["x-request-id"]
    assert answer.headers["Server"] == "smolproxy"
    assert (await daemon.ask("GET", "/health")).status == 200


async def test_a_malformed_request_is_not_quoted_in_the_log(daemon: Daemon) -> None:
    await daemon.raw(b"GET /health HTTP/1.1\r\nAuthorization Bearer quoted-canary\r\n\r\n")
    await daemon.raw(b"quoted-canary HTTP\r\n\r\n")
    assert "quoted-canary" not in daemon.log_text()


async def test_a_body_in_broken_chunks(site: Site) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await site.daemon.raw(head.encode() + b'5\r\n{"mod\r\nzz\r\n\r\n')
    assert (answer.status, answer.code) == (400, "invalid_request")


async def test_a_body_that_breaks_off_is_nobodys_fault(site: Site) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.key}\r\nContent-Length: 1000\r\n\r\n"
    with pytest.raises(asyncio.IncompleteReadError):
        await site.daemon.raw(head.encode() + b'{"mod', end=True)
    assert (await site.chat()).status == 200
    assert not site.daemon.logged("internal error")


async def test_an_unknown_expectation(site: Site) -> None:
    answer = await site.daemon.ask("GET", "/health", headers={"Expect": "the-unexpected"})
    assert answer.status in (200, 417)


@pytest.mark.parametrize(
    "path",
    ["/chat/completions", "//v1//chat/completions", "/v1/chat/completions/", "/v1/chat//completions//?x=1&y=a%20b"],
)
async def test_other_spellings_of_a_path(site: Site, path: str) -> None:
    answer = await site.daemon.ask("POST", path, key=site.key, json=site.body())
    assert answer.status == 200, answer
    (request,) = site.generating()
    assert request.path == CHAT
    assert request.target.partition("?")[2] == path.partition("?")[2]
    row = site.daemon.row(answer.headers["x-request-id"])
    assert row["endpoint"] == CHAT


@pytest.mark.parametrize("path", ["/models", "/v1/models/", "//v1/models", "/v1//models?x=1", "/v1/models/?"])
async def test_other_spellings_of_the_models_path(site: Site, path: str) -> None:
    answer = await site.daemon.ask("GET", path)
    assert [model["id"] for model in answer.json["data"]] == [site.model]


async def test_every_refusal_is_in_the_access_log(site: Site) -> None:
    answer = await site.daemon.ask("POST", CHAT, headers=bearer("canary-in-a-key"), json=site.body())
    (record,) = site.daemon.logged("request", request_id=answer.headers["x-request-id"])
    assert (record["status"], record["method"], record["path"]) == (401, "POST", CHAT)
    assert "canary-in-a-key" not in site.daemon.log_text()
