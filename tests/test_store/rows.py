"""Rows for the books."""

from __future__ import annotations

from smolproxy.store.usage import UsageRow

HOUR = 3_600_000
DAY = 24 * HOUR
NOON = 1_796_040_000_000  # 2026-11-30T12:00:00Z

ROW = UsageRow(
    created_at=NOON + 123,
    request_id="req-1",
    key_id=1,
    server_id=1,
    model_name="m",
    real_model_name="m",
    endpoint="/v1/chat/completions",
    stream=True,
    status=200,
    outcome="ok",
    prompt_tokens=100,
    cached_tokens=20,
    completion_tokens=7,
    tokens_source="usage",
    prompt_ms=12.5,
    predicted_ms=None,
    ttft_ms=3.25,
    duration_ms=40.0,
)
