"""Limits of a key, enforced by the daemon."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from smolproxy.standin import Reply

from .conftest import Site
from .harness import Answer, Daemon


async def ask(site: Site, key: str, **fields: Any) -> Answer:
    body = site.body(**{"max_tokens": 2, **fields})
    return await site.daemon.ask("POST", "/v1/chat/completions", key=key, json=body)


def refused(site: Site, answer: Answer, named: str) -> None:
    """The answer must be a 429 that names the limit, tells when to come again, and left no row."""
    assert (answer.status, answer.code) == (429, "rate_limit_exceeded"), answer
    assert named in answer.message
    assert int(answer.headers["Retry-After"]) >= 1
    assert site.daemon.rows_of(answer.headers["x-request-id"]) == []


async def test_requests_per_minute(site: Site) -> None:
    key = await site.daemon.new_key("rpm", rpm_limit=2)
    assert [(await ask(site, key)).status for _ in range(2)] == [200, 200]
    answer = await ask(site, key)
    refused(site, answer, "rpm")
    assert int(answer.headers["Retry-After"]) <= 60
    assert len(site.generating()) == 2
    other = await site.daemon.new_key("other", rpm_limit=2)
    assert (await ask(site, other)).status == 200


async def test_tokens_per_minute(site: Site) -> None:
    key = await site.daemon.new_key("tpm", tpm_limit=50)
    assert (await ask(site, key, max_tokens=50)).status == 200
    refused(site, await ask(site, key), "tpm")


async def test_requests_at_once(site: Site) -> None:
    gate = asyncio.Event()
    site.server.default = Reply(hold={2: gate})
    key = await site.daemon.new_key("parallel", parallel_limit=1)
    body = site.body(stream=True)
    async with site.daemon.open("POST", "/v1/chat/completions", key=key, json=body) as response:
        await response.content.readany()
        refused(site, await ask(site, key), "parallel")
        gate.set()
        await response.content.read()
    assert (await ask(site, key)).status == 200
    # one that leaves gives its place back
    site.server.default = Reply(hold={2: asyncio.Event()})
    async with site.daemon.open("POST", "/v1/chat/completions", key=key, json=body) as response:
        await response.content.readany()
    await site.server.wait_for(lambda: site.server.closed_early == 1)
    site.server.default = Reply()
    assert (await ask(site, key)).status == 200


async def test_a_budget(site: Site) -> None:
    key = await site.daemon.new_key("budget", budget=20, budget_period="day")
    assert (await ask(site, key, max_tokens=30)).status == 200
    answer = await ask(site, key)
    refused(site, answer, "budget")
    assert int(answer.headers["Retry-After"]) <= 86_400
    (row,) = [row for row in await site.daemon.admin("GET", "/keys") if key.startswith(row["prefix"])]
    await site.daemon.admin("PUT", f"/keys/{row['id']}/limits", {"budget": 1000})
    assert (await ask(site, key)).status == 200
    await site.daemon.admin("PUT", f"/keys/{row['id']}/limits", {"budget": None})
    assert (await ask(site, key)).status == 200


@pytest.mark.parametrize("limit", ["rpm_limit", "tpm_limit", "parallel_limit", "budget"])
async def test_zero_admits_nothing(site: Site, limit: str) -> None:
    key = await site.daemon.new_key("zero", **{limit: 0})
    refused(site, await ask(site, key), limit.removesuffix("_limit"))
    assert not site.generating()


async def test_models_by_name_and_glob(daemon: Daemon, site: Site) -> None:
    for model in ("org/a", "org/b", "else"):
        await daemon.admin("POST", f"/servers/{site.server_id}/models", {"model_name": model})
    key = await daemon.new_key("models", models=["org/*", "none"])
    assert (await ask(site, key, model="org/a")).status == 200
    answer = await ask(site, key, model="else")
    assert (answer.status, answer.code) == (404, "model_not_found")
    assert "org/a, org/b" in answer.message
    assert "else," not in answer.message


async def test_expiry(site: Site) -> None:
    soon = datetime.now(timezone.utc) + timedelta(seconds=1.5)
    key = await site.daemon.new_key("expiring", expires_at=soon.isoformat().replace("+00:00", "Z"))
    assert (await ask(site, key)).status == 200
    end = time.monotonic() + 10
    while (answer := await ask(site, key)).status == 200:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert datetime.now(timezone.utc) >= soon


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_tokens": 100},
        {"max_tokens": None},
        {"max_tokens": -1},
        {"n_predict": 100},
        {"n_predict": -1},
        {"max_completion_tokens": 100},
        {"max_tokens": 1, "n_predict": 100},
        {"max_completion_tokens": 100, "max_tokens": 2},
    ],
    ids=str,
)
async def test_a_cap_on_what_is_generated(site: Site, asked: dict[str, Any]) -> None:
    key = await site.daemon.new_key("cap", max_tokens=3)
    body = {name: value for name, value in site.body(**asked).items() if name in asked or name in ("model", "messages")}
    answer = await site.daemon.ask("POST", "/v1/chat/completions", key=key, json=body)
    assert answer.status == 200
    made = answer.json["usage"]["completion_tokens"]
    assert 1 <= made <= 3
    assert site.daemon.row(answer.headers["x-request-id"])["completion_tokens"] == made


async def test_less_than_the_cap_is_left_as_it_is(site: Site) -> None:
    key = await site.daemon.new_key("cap", max_tokens=30)
    answer = await ask(site, key, max_tokens=2)
    assert answer.json["usage"]["completion_tokens"] == 2


async def test_a_cap_holds_for_completions_too(site: Site) -> None:
    key = await site.daemon.new_key("cap", max_tokens=3)
    body = {"model": site.model, "prompt": "x", "n_predict": 100, "max_tokens": 100}
    answer = await site.daemon.ask("POST", "/v1/completions", key=key, json=body)
    assert answer.json["usage"]["completion_tokens"] == 3


async def test_limits_of_new_keys_from_the_settings(make_daemon: Any) -> None:
    daemon = make_daemon(settings={"key_defaults": {"rpm_limit": 7, "models": ["a*"], "expires_at": "30d"}}).start()
    made = await daemon.admin("POST", "/keys", {"name": "new"})
    (row,) = await daemon.admin("GET", "/keys")
    assert (row["id"], row["rpm_limit"], row["models"]) == (made["id"], 7, ["a*"])
    expires = datetime.fromisoformat(row["expires_at"].replace("Z", "+00:00")) - datetime.now(timezone.utc)
    assert timedelta(days=29) < expires <= timedelta(days=30)
