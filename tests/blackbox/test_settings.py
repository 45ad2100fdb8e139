"""Settings that change what a request may say and what an answer tells."""

from __future__ import annotations

from typing import Any

import pytest

from smolproxy.standin import StandIn

from .conftest import Site
from .harness import Answer, Daemon

SETTINGS = {"default_model": "usual", "expose_server": True, "slot_fields": "drop", "remote_media": "allow"}
CHAT = "/v1/chat/completions"


def picture(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


@pytest.fixture
async def plain(make_daemon: Any) -> Any:
    """A daemon with the defaults, and its server."""
    async with StandIn(["m"]) as server:
        daemon = make_daemon().start()
        await daemon.add_server(server, "the-server")
        yield daemon, server, await daemon.new_key()


async def ask(daemon: Daemon, key: str, **fields: Any) -> Answer:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return await daemon.ask("POST", CHAT, key=key, json=body)


async def test_by_default_slots_and_media_of_others_are_refused(plain: Any) -> None:
    daemon, server, key = plain
    refused = [
        {"id_slot": 0},
        {"lora": [{"id": 0, "scale": 1}]},
        {"messages": picture("http://10.0.0.1/x.png")},
        {"messages": picture("HTTPS://example.org/x.png")},
        {"messages": picture("file:///etc/passwd")},
    ]
    for fields in refused:
        answer = await ask(daemon, key, **fields)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request"), fields
        assert daemon.rows_of(answer.headers["x-request-id"]) == []
    assert not [request for request in server.requests if request.method == "POST"]
    answer = await ask(daemon, key, messages=picture("data:image/png;base64,AAAA"))
    assert answer.json.get("error", {}).get("code") != "invalid_request"  # what the server says of it is its business
    answer = await ask(daemon, key)
    assert answer.status == 200
    assert "x-smolproxy-server" not in answer.headers
    answer = await daemon.ask("POST", CHAT, key=key, json={"messages": []})
    assert (answer.status, answer.code) == (400, "invalid_request")


async def test_slot_fields_are_dropped_if_so_set(site: Site) -> None:
    answer = await site.chat(id_slot=1, lora=[], top_k=5)
    assert answer.status == 200
    (request,) = site.generating()
    assert {"id_slot", "lora"} & set(request.json) == set()
    assert request.json["top_k"] == 5


async def test_remote_media_are_allowed_if_so_set_but_files_never(site: Site) -> None:
    await site.chat(messages=picture("http://example.org/x.png"))
    assert len(site.generating()) == 1
    answer = await site.chat(messages=picture("file:///etc/passwd"))
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
    assert len(site.generating()) == 1


async def test_the_server_is_told_if_so_set(site: Site) -> None:
    for stream in (False, True):
        answer = await site.chat(stream=stream)
        assert answer.headers["x-smolproxy-server"].startswith("server-")


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}], ids=str)
async def test_a_request_without_a_model_gets_the_default_one(site: Site, named: dict[str, Any]) -> None:
    await site.daemon.admin("POST", f"/servers/{site.server_id}/models", {"model_name": "usual"})
    body = {"messages": [{"role": "user", "content": "x"}], **named}
    answer = await site.daemon.ask("POST", CHAT, key=site.key, json=body)
    assert answer.status == 200
    assert site.generating()[0].json["model"] == "usual"
    row = site.daemon.row(answer.headers["x-request-id"])
    assert (row["model_name"], row["real_model_name"]) == ("usual", "usual")
