"""What comes back, and what the books say of it."""

from __future__ import annotations

from .conftest import Site


async def test_a_chat_is_answered_and_booked(site: Site) -> None:
    answer = await site.chat(max_tokens=7)
    assert answer.status == 200
    usage = answer.json["usage"]
    assert usage["completion_tokens"] == 7
    row = site.daemon.row(answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["tokens_source"], row["stream"]) == (200, "ok", "usage", 0)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (usage["prompt_tokens"], 7)
