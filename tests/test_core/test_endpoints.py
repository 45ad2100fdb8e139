from __future__ import annotations

from smolproxy.core.endpoints import ENDPOINTS


def test_the_table() -> None:
    by_path = {endpoint.path: endpoint for endpoint in ENDPOINTS}
    assert set(by_path) == {"/v1/chat/completions", "/v1/completions", "/v1/embeddings"}
    chat, text, embeddings = by_path.values()
    assert chat.spellings == ("/chat/completions",)
    assert (chat.generates, text.generates, embeddings.generates) == (True, True, False)
    assert chat.count_path == "/v1/chat/completions/input_tokens"
    assert chat.prompt_fields == ()
    assert text.prompt_fields == ("prompt",)
    assert embeddings.prompt_fields == ("input", "content")


def test_no_path_stands_for_two() -> None:
    paths = [path for endpoint in ENDPOINTS for path in (endpoint.path, *endpoint.spellings)]
    assert len(set(paths)) == len(paths)
    assert all(path.startswith("/") and path == path.rstrip("/") and "//" not in path for path in paths)


def test_each_tells_how_its_prompt_is_counted() -> None:
    assert all(endpoint.count_path or endpoint.prompt_fields for endpoint in ENDPOINTS)
