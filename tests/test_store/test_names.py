"""What may be a name (core.names): kept exactly, or refused with the reason."""

from __future__ import annotations

import pytest

from smolproxy.core.names import check_name, told_model
from smolproxy.errors import Invalid


@pytest.mark.parametrize(
    "name",
    ["a", "org/model:q4", " two words ", "100%", "%2F", "模型-ü-🦙", "x" * 300, "🦙" * 300, "'; DROP TABLE keys"],
)
def test_a_name_is_returned_as_given(name: str) -> None:
    assert check_name("name", name) == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "must not be empty"),
        (" \t ", "must not be empty"),
        ("x" * 301, "at most 300 characters, this one has 301"),
        ("a\nb", "control characters"),
        ("a\x00b", "control characters"),
        ("a\x7f", "control characters"),
        ("a\u2028b", "control characters"),
        ("a\ud800", "control characters"),
        (None, "must be a string"),
        (7, "must be a string"),
        (["a"], "must be a string"),
    ],
)
def test_what_is_no_name_is_refused_with_the_reason(name: object, reason: str) -> None:
    with pytest.raises(Invalid, match=reason) as caught:
        check_name("model name", name)
    assert str(caught.value).startswith("model name ")
    str(caught.value).encode()  # printable wherever it is shown


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("/var/models/qwen3-8b-q4.gguf", "qwen3-8b-q4.gguf"),
        ("C:\\models\\qwen3.gguf", "qwen3.gguf"),
        ("org/model:Q4_K_M", "org/model:Q4_K_M"),
        ("qwen3-8b-q4.gguf", "qwen3-8b-q4.gguf"),
        ("/", "/"),
    ],
)
def test_a_model_told_by_its_path_is_named_by_its_file(told: str, name: str) -> None:
    assert told_model(told) == name
