"""Kinds of options that several commands share."""

from __future__ import annotations

import sys

import click

CLEAR = "none"
"""What an option's value says to clear it."""

ID = click.IntRange(1, 2**63 - 1)
id_argument = click.argument("id_", metavar="ID", type=ID)


def whole_or_none(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """Return an option's value as a whole number, ``CLEAR`` as it is, None if it was not given."""
    if value is None or value == CLEAR:
        return value
    try:
        return int(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is neither a whole number nor {CLEAR!r}", ctx, param) from error


def secret(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return an option's value, or the line on standard input for ``-``: that is in no process list and no history."""
    if value != "-":
        return value
    interactive = sys.stdin.isatty()
    line = str(click.prompt(str(param.name), hide_input=True, err=True)) if interactive else sys.stdin.readline()
    if not line.strip():
        raise click.BadParameter("there is none on standard input", ctx, param)
    return line.strip()
