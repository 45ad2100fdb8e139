"""Which headers go where: credentials stop at smolproxy, hop-by-hop headers too."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from smolproxy.standin import Reply, StandIn

from .conftest import Site
from .harness import ADMIN_KEY, Daemon

CANARIES = {
    "x-api-key": "canary-1",
    "api-key": "canary-2",
    "Api-Key": "canary-3",
    "Cookie": "session=canary-4",
    "Proxy-Authorization": "Basic canary-5",
}


def everything(server: StandIn) -> str:
    """All that a server was sent, heads and bodies."""
    return "".join(f"{request.target} {request.raw_headers} {request.body!r}\n" for request in server.requests)


async def test_no_credential_reaches_a_server(site: Site) -> None:
    for stream in (False, True):
        answer = await site.chat(stream=stream, headers=CANARIES)
        assert answer.status == 200
    seen = everything(site.server)
    assert "canary" not in seen
    assert site.key not in seen
    assert ADMIN_KEY not in seen
    for request in site.server.requests:
        assert not {"authorization", "x-api-key", "api-key", "cookie"} & set(request.headers)


async def test_a_key_in_x_api_key_does_not_reach_a_server_either(site: Site) -> None:
    headers = {"x-api-key": site.key}
    answer = await site.daemon.ask("POST", "/v1/chat/completions", json=site.body(), headers=headers)
    assert answer.status == 200
    assert site.key not in everything(site.server)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_servers_own_key_goes_to_it_alone(daemon: Daemon, site: Site, stream: bool) -> None:
    async with StandIn(["with-key"], api_key="the-servers-key") as server:
        server_id = await daemon.add_server(server, "with-key", api_key="the-servers-key")
        answer = await daemon.ask(
            "POST", "/v1/chat/completions", key=site.key, json=site.body(model="with-key", stream=stream)
        )
        assert answer.status == 200
        (request,) = [request for request in server.requests if request.method == "POST"]
        assert request.headers["authorization"] == "Bearer the-servers-key"
        assert "the-servers-key" not in answer.text + str(answer.headers)
        await daemon.admin("DELETE", f"/servers/{server_id}")
    await site.chat()
    assert "the-servers-key" not in everything(site.server)
    assert "the-servers-key" not in daemon.log_text()


async def test_hop_by_hop_headers_stop_here_and_others_pass(site: Site) -> None:
    answer = await site.chat(
        headers={
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
            "Keep-Alive": "timeout=99",
            "TE": "trailers",
            "Upgrade-Insecure-Requests": "1",
            "Accept-Encoding": "br",
            "X-Custom": "stays",
            "User-Agent": "somebody/1",
            "Accept": "text/event-stream",
        }
    )
    assert answer.status == 200
    (request,) = site.generating()
    assert not {"x-hop", "keep-alive", "te"} & set(request.headers)
    assert "X-Hop" not in request.headers.get("connection", "")
    assert "br" not in request.headers.get("accept-encoding", "")
    assert request.headers["x-custom"] == "stays"
    assert request.headers["user-agent"] == "somebody/1"
    assert request.headers["accept"] == "text/event-stream"
    assert request.headers["host"] == f"127.0.0.1:{site.server.port}"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_of_a_servers_headers_comes_back(site: Site, stream: bool) -> None:
    site.server.script.append(
        Reply(
            headers={
                "Set-Cookie": "a=b",
                "Server": "llama.cpp",
                "Access-Control-Allow-Origin": "https://evil.example",
                "Access-Control-Allow-Credentials": "true",
                "Cache-Control": "public, max-age=1",
                "X-Accel-Buffering": "yes",
                "X-Request-Id": "of-the-server",
                "Keep-Alive": "timeout=5, max=100",
                "X-Hop": "1",
                "Connection": "keep-alive, X-Hop",
                "X-Custom": "stays",
            }
        )
    )
    answer = await site.chat(stream=stream, headers={"Origin": "https://evil.example"})
    assert answer.status == 200
    names = {name.lower() for name in answer.headers}
    assert not {"set-cookie", "keep-alive", "x-hop"} & names
    assert not [name for name in names if name.startswith("access-control-")]
    assert answer.headers.getall("Server") == ["smolproxy"]
    assert answer.headers["X-Custom"] == "stays"
    ids = answer.headers.getall("x-request-id")
    assert len(ids) == 1
    assert "of-the-server" not in ids
    if stream:
        assert answer.headers.getall("Cache-Control") == ["no-cache"]
        assert answer.headers.getall("X-Accel-Buffering") == ["no"]


async def test_the_request_id_is_the_same_everywhere_and_never_the_clients(site: Site) -> None:
    answer = await site.chat(headers={"x-request-id": "of-the-client"})
    request_id = answer.headers["x-request-id"]
    assert request_id != "of-the-client"
    assert site.daemon.row(request_id)["request_id"] == request_id
    (record,) = site.daemon.logged("request", request_id=request_id)
    assert record["status"] == 200
    assert site.generating()[0].headers["x-request-id"] == request_id


async def test_every_answer_has_a_request_id_of_its_own(daemon: Daemon) -> None:
    paths = ["/health", "/v1/models", "/nothing", "/admin/keys", "/v1/models/none", "/health"]
    ids = [(await daemon.ask("GET", path)).headers["x-request-id"] for path in paths]
    assert len(set(ids)) == len(ids)


async def test_a_gzipped_answer_is_read_for_its_usage(site: Site) -> None:
    site.server.script.append(Reply(gzip=True))
    answer = await site.chat(max_tokens=3)
    assert answer.status == 200
    assert "Content-Encoding" not in answer.headers
    assert answer.json["usage"]["completion_tokens"] == 3
    assert site.daemon.row(answer.headers["x-request-id"])["completion_tokens"] == 3


async def test_a_gzipped_request_is_understood(site: Site) -> None:
    body = gzip.compress(json.dumps(site.body()).encode())
    answer = await site.daemon.ask(
        "POST", "/v1/chat/completions", key=site.key, data=body, headers={"Content-Encoding": "gzip"}
    )
    assert answer.status == 200
    (request,) = site.generating()
    assert "content-encoding" not in request.headers
    assert request.json["model"] == site.model


async def test_a_redirect_is_not_followed_and_its_target_not_told(site: Site) -> None:
    async with StandIn(["elsewhere"]) as other:
        body: dict[str, Any] = {"error": {"message": "moved"}}
        site.server.script.append(Reply(status=307, body=body, headers={"Location": f"{other.url}/v1/x"}))
        answer = await site.chat()
        assert not other.requests
    assert other.url not in str(answer.headers) + answer.text
