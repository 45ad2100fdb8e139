"""What commands print: tables, JSON and CSV on stdout, remarks on stderr.

On a terminal tables are drawn with rich, if it is installed; elsewhere they are plain aligned text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unicodedata import combining, east_asian_width

import click

_WIDEST = 400  # columns of a table on a terminal

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def note(message: str) -> None:
    """Print a remark on stderr: stdout is for what scripts read."""
    click.echo(printable(message), err=True)


def say(message: str) -> None:
    """Print one line on stdout."""
    click.echo(printable(message))


def print_json(value: object) -> None:
    """Print a value as JSON. Everything but ASCII is escaped: names from outside cannot steer a terminal."""
    click.echo(json.dumps(value, indent=2))


def print_csv(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> None:
    """Print rows as CSV with a header; None is empty, truth is ``true`` or ``false``."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    for row in rows:
        values = (row[name] for name in fields)
        writer.writerow([str(value).lower() if isinstance(value, bool) else value for value in values])
    click.echo(text.getvalue(), nl=False)


def printable(text: str) -> str:
    """Escape control characters, which could steer a terminal or break a line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table.

    Numbers are aligned to the right and have thousands separators (ids are no numbers: pass them as text), None is
    ``-``, truth is ``yes`` or ``no``, a list is joined with commas.
    """
    values = [list(row) for row in rows]
    right = [
        any(map(_is_number, column)) and all(cell is None or _is_number(cell) for cell in column)
        for column in (list(column) for column in zip(*values, strict=True))
    ] or [False] * len(columns)
    cells = [[_cell(value) for value in row] for row in values]
    if not (sys.stdout.isatty() and _draw(columns, cells, right)):
        _align(columns, cells, right)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value)) or "-"
    return printable(str(value))


def _draw(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> bool:
    """Draw with rich; tell whether it is there."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name, is_right in zip(columns, right, strict=True):
        drawn.add_column(name, justify="right" if is_right else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*map(Text, row))  # not str: in a name, square brackets are no markup
    console = Console()
    # a table that is too wide is left to the terminal: squeezed columns of three letters help nobody
    needed = console.measure(drawn, options=console.options.update(max_width=_WIDEST)).maximum
    Console(width=max(console.width, min(needed, _WIDEST))).print(drawn)
    return True


def _width(text: str) -> int:
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def _align(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    lines = [columns, *cells]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = []
        for text, width, is_right in zip(line, widths, right, strict=True):
            space = " " * (width - _width(text))
            padded.append(space + text if is_right else text + space)
        click.echo("  ".join(padded).rstrip())
