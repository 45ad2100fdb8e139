"""``smolproxy serve``: gather the flags and the environment, then run the daemon."""

from __future__ import annotations

import click

from smolproxy.cli.environment import Environment
from smolproxy.errors import Invalid


@click.command()
@click.option("--host", metavar="HOST", help="Listen address; else PROXY_HOST, else 0.0.0.0.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT", help="Listen port; else PROXY_PORT, else 8000.")
@click.option("--config", metavar="FILE", help="Config file; else CONFIG_PATH, else ./config.yaml if it is there.")
@click.option("--no-admin-api", is_flag=True, help="Answer 404 on every /admin path; no ADMIN_KEY is needed then.")
@click.pass_context
def serve(ctx: click.Context, host: str | None, port: int | None, config: str | None, no_admin_api: bool) -> None:
    """Run the daemon in the foreground.

    ADMIN_KEY, in the environment or in .env, is the bearer token of /admin.
    """
    from smolproxy.config import ServeOptions

    env: Environment = ctx.obj
    admin_key = env.get("ADMIN_KEY")
    if admin_key is None and not no_admin_api:
        raise Invalid(
            "ADMIN_KEY is not set: make one with `echo ADMIN_KEY=$(openssl rand -hex 24) >> .env`, "
            "or give --no-admin-api to do without the admin API"
        )
    path, required = env.config(config)
    options = ServeOptions(
        host=host or env.get("PROXY_HOST") or "0.0.0.0",  # noqa: S104 - the documented default
        port=_port(env) if port is None else port,
        db=env.database(),
        config=path,
        config_required=required,
        admin_key=None if no_admin_api else admin_key,
        admin_api=not no_admin_api,
    )
    from smolproxy.daemon import lifecycle

    ctx.exit(lifecycle.run(options))


def _port(env: Environment) -> int:
    text = env.get("PROXY_PORT") or "8000"
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise Invalid(f"PROXY_PORT is {text!r}: it must be a whole number from 0 to 65535")
    return int(text)
