"""YAML files read as a node tree, so that every problem has its line.

This module owns the collecting of problems and knows nothing of what the file is about. No message repeats a value of
the file: it may be a secret.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smolproxy.errors import Problem
from smolproxy.settings import Check

if TYPE_CHECKING:  # imported where it is used: the commands that read no file start faster without
    import yaml


def quote(name: str) -> str:
    """Return a name of the file for a message: in quotes, without control characters, cut when long."""
    return json.dumps(name if len(name) <= 80 else name[:79] + "…", ensure_ascii=not name.isprintable())


def is_null(node: yaml.Node) -> bool:
    """Tell whether a node is empty, ``~`` or ``null``."""
    return bool(node.tag == "tag:yaml.org,2002:null")


class Reader:
    """Walks the node tree of one file and collects its problems.

    :param where: the name of the file, for messages.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []

    def add(self, line: int, message: str) -> None:
        """Note a problem in a line, counted from 1."""
        self.problems.append(Problem(self.where, line, message))

    def problem(self, node: yaml.Node, message: str) -> None:
        """Note a problem of a node."""
        self.add(node.start_mark.line + 1, message)

    def root(self, path: Path) -> yaml.Node | None:
        """Return the root of the file's node tree, None if the file is empty, unreadable or not YAML."""
        import yaml

        try:
            data = path.read_bytes()
        except OSError as error:
            self.add(1, f"cannot be read: {error.strerror}")
            return None
        try:
            return yaml.compose(data, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.add(mark.line + 1 if mark else 1, f"is not YAML: {_reason(error.problem or error.context or '')}")
        except yaml.reader.ReaderError as error:
            self.add(data[: error.position].count(b"\n") + 1, f"is not YAML: {error.reason}")
        except RecursionError:
            self.add(1, "is nested too deeply")
        return None

    def plain(self, node: yaml.Node) -> Any:
        """Return the value of a scalar or of a list of scalars; anything deeper comes as something no check accepts."""
        import yaml

        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item) if isinstance(item, yaml.ScalarNode) else {} for item in node.value]
        if not isinstance(node, yaml.ScalarNode):
            return {}
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError):  # an unknown tag, a date that is none
            return {}

    def check(self, node: yaml.Node | None, name: str, check: Check) -> Any:
        """Return what ``check`` makes of a node's value; None without a node and after a problem."""
        if node is None:
            return None
        try:
            return check(self.plain(node))
        except ValueError as error:
            self.problem(node, f"{name} {error}")
            return None

    def sequence(self, node: yaml.Node | None, what: str) -> list[yaml.Node]:
        """Return the items of a list; none without a node, for an empty one and after a problem."""
        import yaml

        if node is None or is_null(node):
            return []
        if not isinstance(node, yaml.SequenceNode):
            self.problem(node, f"{what} must be a list (- item)")
            return []
        return list(node.value)

    def mapping(self, node: yaml.Node | None, what: str, known: Collection[str] | None) -> dict[str, yaml.Node]:
        """Return the entries of a mapping whose keys are texts, among ``known`` if that is given.

        None without a node, for an empty one and after a problem with the whole.
        """
        import yaml

        if node is None or is_null(node):
            return {}
        if not isinstance(node, yaml.MappingNode):
            self.problem(node, f"{what} must be a mapping (name: value)")
            return {}
        entries: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = self.plain(key)
            if not isinstance(name, str):
                self.problem(key, f"a name in {what} must be text (write it in quotes)")
            elif name in entries:
                self.problem(key, f"{quote(name)} is given twice in {what}")
            elif known is not None and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {quote(near[0])}?" if near else f"known are {', '.join(known)}"
                self.problem(key, f"unknown name {quote(name)} in {what}; {hint}")
            else:
                entries[name] = value
        return entries


def _reason(problem: str) -> str:
    """Return the YAML parser's words, unless they quote the file: a key, for example, that starts with ``*``."""
    if all(len(part) <= 2 or part.startswith("<") for part in re.findall(r"'([^']*)'", problem)):
        return problem
    return "a value that starts with *, & or ! must be in quotes"
