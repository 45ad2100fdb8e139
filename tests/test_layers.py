"""Imports go down only: cli -> daemon -> store -> core -> errors, config, settings, yamltree."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "smolproxy"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the top to the ground. `standin` stands beside: it knows nothing of the package but its version.
LAYERS = ("cli", "daemon", "store", "core", "ground")
GROUND = ("errors", "config", "settings", "yamltree", "logs", "__init__")
TOP = ("__main__",)
STARTERS = ("smolproxy.cli.serve", "smolproxy.cli.demo")
IMPURE = {
    "asyncio",
    "aiohttp",
    "aiosqlite",
    "sqlite3",
    "socket",
    "ssl",
    "selectors",
    "subprocess",
    "threading",
    "os",
    "pathlib",
}
IMPURE |= {
    "http",
    "urllib.request",
    "multiprocessing",
    "concurrent",
    "tempfile",
    "shutil",
    "signal",
    "structlog",
    "click",
}


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def layer(name: str) -> str:
    """The layer of a module of the package."""
    parts = name.split(".")
    if len(parts) == 1 or parts[1] in GROUND:
        return "ground"
    if parts[1] in TOP:
        return "cli"
    return parts[1]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Each module that a file imports, wherever in the file, with the line."""
    name = module(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            for alias in node.names:
                inner = PACKAGE.parent.joinpath(*base.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield (f"{base}.{alias.name}" if is_module else base, node.lineno)


def test_the_walk_sees_imports() -> None:
    found = {name for name, _ in imports(PACKAGE / "cli" / "serve.py")}
    assert any(name.startswith("smolproxy.daemon.") for name in found)
    assert "smolproxy.core.call" in {name for name, _ in imports(PACKAGE / "daemon" / "proxy.py")}
    assert {layer(module(path)) for path in FILES} == {*LAYERS, "standin"}


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_go_down(path: Path) -> None:
    name = module(path)
    own = layer(name)
    for imported, line in imports(path):
        if imported.partition(".")[0] != "smolproxy":
            continue
        other = layer(imported)
        where = f"{path.relative_to(ROOT)}:{line} imports {imported}"
        if own == "standin":
            assert other == "standin" or imported == "smolproxy", where
        elif other == "standin":
            assert name in (*STARTERS, "smolproxy.cli.main"), where
        else:
            assert LAYERS.index(own) <= LAYERS.index(other), where
        if own == "cli" and other == "daemon":
            assert name in STARTERS, where


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*.py")), ids=module)
def test_the_core_is_pure(path: Path) -> None:
    for imported, line in imports(path):
        assert not {imported, imported.partition(".")[0]} & IMPURE, f"{path.name}:{line} imports {imported}"
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not calls & {"open", "print", "input", "exec", "eval"}
    assert not [node for node in nodes if isinstance(node, ast.AsyncFunctionDef | ast.Await)]


@pytest.mark.parametrize("path", [path for path in FILES if layer(module(path)) != "daemon"], ids=module)
def test_only_the_daemon_speaks_http(path: Path) -> None:
    name = module(path)
    for imported, line in imports(path):
        if imported.partition(".")[0] in ("aiohttp", "multidict", "yarl"):
            assert name in STARTERS, f"{path.relative_to(ROOT)}:{line} imports {imported}"


@pytest.mark.parametrize("path", [path for path in FILES if layer(module(path)) != "store"], ids=module)
def test_only_the_store_knows_the_database(path: Path) -> None:
    for imported, line in imports(path):
        assert imported.partition(".")[0] not in ("sqlite3", "aiosqlite"), f"{path.relative_to(ROOT)}:{line} {imported}"


SQL = re.compile(
    r"\bSELECT\b.+\bFROM\b|\bINSERT\s+(OR\s+\w+\s+)?INTO\b|\bUPDATE\s+\S+\s+SET\b|\bDELETE\s+FROM\b|\bPRAGMA\s+\w+"
    r"|\b(CREATE|DROP|ALTER)\s+(TABLE|INDEX|TRIGGER|VIEW)\b|^\s*(SELECT|BEGIN|COMMIT|ROLLBACK|VACUUM|ATTACH)\b",
    re.DOTALL,
)


def strings(path: Path) -> Iterator[tuple[str, int]]:
    """The string literals of a file, without its docstrings; of f-strings the fixed parts, joined."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner.update(id(part) for part in ast.walk(node))
            yield "{}".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)), node.lineno
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value, node.lineno


def test_the_search_for_sql_finds_it() -> None:
    found = [text for path in sorted((PACKAGE / "store").glob("*.py")) for text, _ in strings(path) if SQL.search(text)]
    assert len(found) > 20
    assert SQL.search("PRAGMA data_version")
    assert not SQL.search("Delete keys from the list, or update them")


@pytest.mark.parametrize("path", [path for path in FILES if layer(module(path)) != "store"], ids=module)
def test_only_the_store_has_sql(path: Path) -> None:
    for text, line in strings(path):
        assert not SQL.search(text), f"{path.relative_to(ROOT)}:{line}: {text[:60]}"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_a_file_is_one_room(path: Path) -> None:
    """It says what it owns, and is not so long that it must own two things."""
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)), f"{path.name} has no docstring"
    assert source.count("\n") <= 330


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    # measuring coverage would load half of the library
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT, env=env
    )
    return set(result.stdout.split())


def test_the_core_loads_without_the_rest() -> None:
    names = ", ".join(module(path) for path in (PACKAGE / "core").glob("*.py"))
    loaded = loaded_by(f"import {names}")
    assert "smolproxy.core.meter" in loaded
    assert not loaded & {"asyncio", "aiohttp", "sqlite3", "aiosqlite", "socket", "click", "structlog", "yaml"}


def test_commands_load_without_aiohttp() -> None:
    names = [module(path) for path in (PACKAGE / "cli").glob("*.py")]
    loaded = loaded_by("import " + ", ".join(name for name in names if name not in STARTERS))
    assert "smolproxy.cli.main" in loaded
    assert not loaded & {"aiohttp", "smolproxy.daemon", "smolproxy.standin"}
