"""The ``smolproxy`` command: global options, the table of commands, errors turned into one line.

A command's module is imported when it is asked for, so that every command starts fast.
"""

from __future__ import annotations

import importlib
from typing import IO, Any

import click

from smolproxy import __version__
from smolproxy.cli.environment import Environment
from smolproxy.errors import ConfigError, SmolproxyError

# command -> module and attribute
_COMMANDS = {
    "serve": "smolproxy.cli.serve:serve",
    "demo": "smolproxy.cli.demo:demo",
    "keys": "smolproxy.cli.keys:keys",
    "servers": "smolproxy.cli.servers:servers",
    "aliases": "smolproxy.cli.aliases:aliases",
    "usage": "smolproxy.cli.usage:usage",
    "config": "smolproxy.cli.config:config",
}


class _ConfigProblems(click.ClickException):
    """All problems of a config file, one a line, then the sum."""

    def __init__(self, error: ConfigError) -> None:
        count = len(error.problems)
        super().__init__(f"{count} problem{'' if count == 1 else 's'} in the config file")
        self.problems = error.problems

    def show(self, file: IO[Any] | None = None) -> None:
        for problem in self.problems:
            click.echo(problem, file=file, err=file is None)
        super().show(file)


class _LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise _ConfigProblems(error) from error
        except SmolproxyError as error:
            raise click.ClickException(" ".join(str(error).split("\n"))) from error


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="smolproxy")
@click.option("--db", metavar="PATH", help="SQLite file; else DB_PATH, else data/proxy.db.")
@click.pass_context
def cli(ctx: click.Context, db: str | None) -> None:
    """Share llama.cpp servers among people: keys, routing and exact books.

    Every option of the environment may also stand in a .env file in the working folder. A change made by a command
    is in force in a running daemon within a second.
    """
    ctx.obj = Environment(db)
