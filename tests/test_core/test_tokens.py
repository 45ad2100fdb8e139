"""The format of API keys."""

from __future__ import annotations

import hashlib
import re

from hypothesis import given
from hypothesis import strategies as st

from smolproxy.core import tokens

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too


def test_a_key_has_192_random_bits_in_base64url() -> None:
    made = {tokens.new_key() for _ in range(200)}
    assert len(made) == 200
    assert all(re.fullmatch(r"sk-[A-Za-z0-9_-]{32}", key) for key in made)
    # Each position takes many values: nothing of it is constant.
    assert all(len({key[position] for key in made}) > 20 for position in range(3, 35))


def test_digest_is_sha256_in_hex() -> None:
    assert tokens.digest("sk-abc") == hashlib.sha256(b"sk-abc").hexdigest()


def test_undecodable_bytes_of_a_header_are_told_apart() -> None:
    assert len({tokens.digest(key) for key in ("\udc80", "\udcff", "?", "\ufffd", "\ud800\udc00", "\U00010000")}) == 6


def test_prefix_shows_eight_characters() -> None:
    assert tokens.prefix("sk-0123456789abcdef") == "sk-01234567"
    assert tokens.prefix("x") == "x"


@given(ANY_TEXT, ANY_TEXT)
def test_every_string_has_a_digest_of_its_own(one: str, other: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", tokens.digest(one))
    assert (tokens.digest(one) == tokens.digest(other)) == (one == other)
