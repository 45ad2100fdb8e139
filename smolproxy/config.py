"""The config file and what ``serve`` was told: frozen values, read and checked as a whole.

This module owns the shape of ``config.yaml`` and reports all of its problems at once, each with its line. It never
writes, knows nothing of the database, and no message of it shows a server's key.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from smolproxy.errors import ConfigError
from smolproxy.settings import KEY_DEFAULTS, Settings, optional, options, text, whole
from smolproxy.yamltree import Reader, is_null, quote

if TYPE_CHECKING:
    import yaml

__all__ = ["FileConfig", "ServeOptions", "ServerEntry", "Settings", "example", "load"]

_URL_HINT = "must be a URL such as http://10.0.0.5:8080"
_HOST = re.compile(r"[\w.:%-]+")
_SERVER_FIELDS = ("name", "url", "api_key", "models", "slots")


@dataclass(frozen=True)
class ServerEntry:
    """One server of the config file."""

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    api_key_given: bool = False  # whether the file mentions the key: one that it does not mention stays
    models: tuple[str, ...] | None = None  # None: left out, what is stored stays
    slots: int | None = None  # None: left out, what is stored stays


@dataclass(frozen=True)
class FileConfig:
    """A config file without problems; without arguments that of a missing file."""

    path: Path | None = None
    servers: tuple[ServerEntry, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class ServeOptions:
    """What the command line and the environment tell the daemon."""

    host: str
    port: int  # 0: any free one
    db: Path
    config: Path | None = None
    config_required: bool = False  # whether ``config`` was named: then it may not be missing
    admin_key: str | None = field(default=None, repr=False)
    admin_api: bool = True


def load(path: Path) -> FileConfig:
    """Read and check the config file at ``path``.

    :raises ConfigError: with every problem of the file, in the order of their lines.
    """
    reader = _ConfigReader(str(path))
    config = reader.read(path)
    if reader.problems:
        raise ConfigError(sorted(reader.problems, key=lambda problem: problem.line))
    return config


def _url(value: object) -> str:
    """Check for the address of a server; the message never repeats it, since it may hold a password."""
    url = text(value, longest=2000).strip()
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(_URL_HINT) from error
    if "@" in parts.netloc:
        raise ValueError("must not have a name or password in it (a server's key goes to api_key)")
    if parts.scheme.lower() not in ("http", "https") or not _HOST.fullmatch(host) or port == 0 or " " in url:
        raise ValueError(_URL_HINT)
    if "?" in url or "#" in url:
        raise ValueError("must have no query and no fragment")
    return url


def _api_key(value: object) -> str:
    key = text(value)
    if not key.isascii() or key != key.strip():  # it goes into a header
        raise ValueError("must be ASCII, without spaces around it")
    return key


class _ConfigReader(Reader):
    """Reads the sections of a config file."""

    def read(self, path: Path) -> FileConfig:
        sections = self.mapping(self.root(path), "the file", ("servers", "aliases", "settings"))
        servers = self.servers(sections.get("servers"))
        aliases = self.aliases(sections.get("aliases"), {model for entry in servers for model in entry.models or ()})
        return FileConfig(path, tuple(servers), aliases, Settings(**self.settings(sections.get("settings"))))

    def servers(self, node: yaml.Node | None) -> list[ServerEntry]:
        first_lines: dict[str, int] = {}
        return [self.server(item, first_lines) for item in self.sequence(node, "servers")]

    def server(self, node: yaml.Node, first_lines: dict[str, int]) -> ServerEntry:
        if is_null(node):
            self.problem(node, "a server must be a mapping (name: value)")
            return ServerEntry("", "")
        fields = self.mapping(node, "a server", _SERVER_FIELDS)
        if fields:
            for missing in [name for name in ("name", "url") if name not in fields]:
                self.problem(node, f"a server needs a {missing}")
        name = self.check(fields.get("name"), "name", text)
        if name in first_lines:
            self.problem(fields["name"], f"server {quote(name)} is given twice (first in line {first_lines[name]})")
        elif name is not None:
            first_lines[name] = fields["name"].start_mark.line + 1
        return ServerEntry(
            name=name or "",
            url=self.check(fields.get("url"), "url", _url) or "",
            api_key=self.check(fields.get("api_key"), "api_key", optional(_api_key)),
            api_key_given="api_key" in fields,
            models=self.models(fields.get("models")),
            slots=self.check(fields.get("slots"), "slots", optional(whole(low=1))),
        )

    def models(self, node: yaml.Node | None) -> tuple[str, ...] | None:
        if node is None or is_null(node):
            return None
        found: list[str] = []
        for item in self.sequence(node, "models"):
            model = self.check(item, "a model", text)
            if model in found:
                self.problem(item, f"model {quote(model)} is listed twice")
            elif model is not None:
                found.append(model)
        return tuple(found)

    def aliases(self, node: yaml.Node | None, models: Collection[str]) -> dict[str, str]:
        entries = self.mapping(node, "aliases", None)
        found = {}
        for alias, target in entries.items():
            model = self.check(target, f"the model of alias {quote(alias)}", text)
            try:
                text(alias)
            except ValueError as error:
                self.problem(target, f"the name of an alias {error}")
            if alias in models:
                self.problem(target, f"alias {quote(alias)} is also the name of a model")
            elif model in entries:
                self.problem(target, f"alias {quote(alias)} stands for {quote(model)}, which is an alias itself")
            elif model is not None:
                found[alias] = model
        return found

    def settings(self, node: yaml.Node | None) -> dict[str, Any]:
        known = options()
        found = {}
        for name, value in self.mapping(node, "settings", known).items():
            if name == "key_defaults":
                found[name] = {
                    limit: self.check(inner, f"{name}: {limit}", KEY_DEFAULTS[limit])
                    for limit, inner in self.mapping(value, name, KEY_DEFAULTS).items()
                }
            else:
                found[name] = self.check(value, name, known[name].metadata["check"])
        return found


_EXAMPLE = """\
# Everything that smolproxy's config file can hold. All of it is optional; settings are shown with their defaults.
# The servers and aliases are merged into the database when `smolproxy serve` starts and when it gets SIGHUP: those
# named here are created or updated, all others stay. `smolproxy config check` checks a file like this one.

servers:
  - name: big-gpu
    url: http://127.0.0.1:8080
    # Sent to this server as its bearer token; "" for none. Left out, the stored one stays.
    api_key: ""
    # Replaces the server's list. Left out, the stored list stays; without any list, the server itself is asked.
    models:
      - qwen3-30b-a3b.gguf
    # Requests at once. Left out, the server itself is asked.
    slots: 4

# Short names that stand for a model.
aliases:
  smart: qwen3-30b-a3b.gguf

settings:
"""


def example() -> str:
    """Return a complete, commented config file, ending in a newline: every setting with its default."""
    defaults = Settings()
    parts = [_EXAMPLE]
    for name, option in options().items():
        unit = f" [{option.metadata['unit']}]" if option.metadata["unit"] else ""
        comment = textwrap.fill(
            option.metadata["doc"] + unit, 110, initial_indent="  # ", subsequent_indent="  # ", break_long_words=False
        )
        parts.append(f"{comment}\n  {name}: {json.dumps(getattr(defaults, name))}\n")
    return "\n".join(parts[:1]) + "\n".join(parts[1:])
