#!/usr/bin/env python3
"""Make the reference tables of the README from the code: commands, settings, endpoints, error codes.

``packaging/reference.py`` writes them into the README, between the comments that name them;
``packaging/reference.py --check`` exits with 1 if they are not up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from smolproxy.cli.main import cli
from smolproxy.core.endpoints import ENDPOINTS
from smolproxy.errors import CODES
from smolproxy.settings import options

README = Path(__file__).parent.parent / "README.md"


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def commands() -> str:
    """Every command with its arguments and its one line of help."""

    def walk(command: click.Command, context: click.Context, path: str) -> Iterator[tuple[str, ...]]:
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                yield from walk(child, click.Context(child, context, name), f"{path} {name}".strip())
            return
        usage = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
        flags = [parameter.opts[0] for parameter in command.params if isinstance(parameter, click.Option)]
        yield (
            f"`{' '.join([path, *usage])}`",
            command.get_short_help_str(200),
            " ".join(f"`{flag}`" for flag in flags),
        )

    return _table(("command", "does", "options"), walk(cli, click.Context(cli), ""))


def settings() -> str:
    """Every setting with its default, its unit and its documentation."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name, option in options().items():
            default = {} if option.default is MISSING else option.default
            shown = "none" if default is None else json.dumps(default)
            unit = option.metadata["unit"]
            yield f"`{name}`", f"`{shown}`" + (f" {unit}" if unit else ""), option.metadata["doc"]

    return _table(("setting", "default", "meaning"), rows())


def endpoints() -> str:
    """Every endpoint that is forwarded."""
    return _table(
        ("path", "also as", "generates"),
        (
            (
                f"`POST {endpoint.path}`",
                ", ".join(f"`{path}`" for path in endpoint.spellings) or "-",
                "yes, `stream` true or false" if endpoint.generates else "no",
            )
            for endpoint in ENDPOINTS
        ),
    )


def errors() -> str:
    """Every error code with its status and type."""
    ordered = sorted(CODES.items(), key=lambda item: item[1][0])
    return _table(
        ("status", "`code`", "`type`"), ((str(status), f"`{code}`", f"`{kind}`") for code, (status, kind) in ordered)
    )


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "settings": settings,
    "endpoints": endpoints,
    "errors": errors,
}


def render(text: str) -> str:
    """Return the README's text with its tables made anew."""
    for name, make in TABLES.items():
        block = f"<!-- {name}: made by packaging/reference.py -->\n{make()}\n<!-- end -->"
        text, count = re.subn(rf"<!-- {name}: [^>]*-->.*?<!-- end -->", lambda _, b=block: b, text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"README.md has {count} places for the table '{name}'")
    return text


def main() -> int:
    """Write the tables, or check them."""
    old = README.read_text()
    new = render(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
