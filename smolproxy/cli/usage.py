"""``smolproxy usage``: reports from the books."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from smolproxy.cli import output
from smolproxy.cli.environment import Environment
from smolproxy.cli.options import ID
from smolproxy.core import times
from smolproxy.errors import Invalid
from smolproxy.store import usage as store
from smolproxy.store.database import Database
from smolproxy.store.totals import GROUPS

_TOTALS = ("request_count", "total_prompt_tokens", "total_cached_tokens", "total_completion_tokens", "total_all_tokens")
_LOG_FIELDS = (
    "id",
    "created_at",
    "request_id",
    "key_id",
    "user_name",
    "server_id",
    "server_name",
    "model_name",
    "real_model_name",
    "endpoint",
    "stream",
    "status",
    "outcome",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "total_tokens",
    "tokens_source",
    "prompt_ms",
    "predicted_ms",
    "ttft_ms",
    "duration_ms",
)
# What a table says for a field; of a row, the table shows only these.
_TITLES = {
    "created_at": "time (UTC)",
    "day": "day",
    "hour": "hour",
    "key_name": "key",
    "user_name": "key",
    "server_name": "server",
    "model_name": "model",
    "real_model_name": "real model",
    "status": "status",
    "outcome": "outcome",
    "request_count": "requests",
    "total_prompt_tokens": "prompt",
    "prompt_tokens": "prompt",
    "total_cached_tokens": "cached",
    "cached_tokens": "cached",
    "total_completion_tokens": "completion",
    "completion_tokens": "completion",
    "total_all_tokens": "total",
    "total_tokens": "total",
    "tokens_source": "source",
    "ttft_ms": "first ms",
    "duration_ms": "ms",
}


def _time(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return a time as Unix time in milliseconds; None if it was not given."""
    if value is None:
        return None
    try:
        return times.parse(value, time.time_ns() // 1_000_000, end_of_day=param.name == "until")
    except Invalid as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _groups(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    groups = tuple(dict.fromkeys(name.strip() for text in values for name in text.split(",")))
    unknown = [name for name in groups if name not in GROUPS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(GROUPS)}", ctx, param)
    return groups


@click.command()
@click.option("--key", "key_id", type=ID, metavar="ID", help="Only of this key.")
@click.option("--server", "server_id", type=ID, metavar="ID", help="Only of this server.")
@click.option("--model", metavar="NAME", help="Only of this model, by the name asked for or its real one.")
@click.option(
    "--since", callback=_time, metavar="TIME", help="From then on: 2026-05-31, 2026-05-31T18:30, 7d, 24h, 30m."
)
@click.option("--until", callback=_time, metavar="TIME", help="Before then; a date alone includes that day.")
@click.option("--by", multiple=True, callback=_groups, help=f"Group by {', '.join(GROUPS)}; several with commas.")
@click.option("--logs", is_flag=True, help="The single requests, newest first, instead of a summary.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most requests to show.")
@click.option("--offset", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Requests to skip.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the requests and the summary.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV: the summary, or the requests with --logs.")
@click.pass_obj
def usage(
    env: Environment,
    key_id: int | None,
    server_id: int | None,
    model: str | None,
    since: int | None,
    until: int | None,
    by: tuple[str, ...],
    logs: bool,
    limit: int,
    offset: int,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Report who used how many tokens of which model.

    Times are UTC unless they name an offset; ages such as 7d count back from now.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    if logs and by and not as_json:
        raise click.UsageError("--by groups the summary, --logs shows single requests: give one of them")
    if since is not None and until is not None and since >= until:
        raise click.UsageError("--since must be before --until")
    where = store.UsageFilter(key_id, server_id, model, since, until)

    async def work(db: Database) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        rows = await store.logs(db, where, limit=limit, offset=offset) if logs or as_json else []
        if logs and not as_json:
            return rows, []
        return rows, await (store.summary_by(db, where, by) if by else store.summary(db, where))

    rows, sums = env.run(work, readonly=True)
    groups = by or ("key", "model")
    if as_json:
        output.print_json({"logs": rows, "summary": sums})
    elif logs:
        _print(rows, _LOG_FIELDS, as_csv)
    else:
        _print(sums, [name for group in groups for name in GROUPS[group]] + list(_TOTALS), as_csv)


def _print(rows: Sequence[dict[str, Any]], fields: Sequence[str], as_csv: bool) -> None:
    if as_csv:
        output.print_csv(rows, fields)
    elif rows:
        shown = [name for name in fields if name in _TITLES]
        output.table([_TITLES[name] for name in shown], [[row[name] for name in shown] for row in rows])
    else:
        output.note("no usage recorded yet, or none that matches")
