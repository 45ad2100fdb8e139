"""Captures what a real llama-server answers into `real_shapes/`, for the stand-in's tests to compare with.

    python capture.py BUILD PLAIN_PORT KEYED_PORT

PLAIN_PORT is a fresh server without embeddings and with a context of 256 tokens per slot; KEYED_PORT one with
`--embeddings --pooling mean --api-key sekret`. Two slots or more each, both on 127.0.0.1, with `--metrics`.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "real_shapes"
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 3}
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 400}]}
STREAM: dict[str, Any] = {**ASK, "stream": True}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
TELL: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 3}
LIST: dict[str, Any] = {"prompt": ["Once upon", "A cat sat"], "max_tokens": 2}
KEY = {"Authorization": "Bearer sekret"}

PLAIN: dict[str, tuple[Any, ...]] = {  # name: method, path, body, headers
    "slots": ("GET", "/slots"),
    "health": ("GET", "/health"),
    "health_head": ("HEAD", "/health"),
    "models": ("GET", "/v1/models"),
    "models_short": ("GET", "/models"),
    "props": ("GET", "/props"),
    "chat": ("POST", CHAT, ASK),
    "chat_one_token": ("POST", CHAT, {**ASK, "max_tokens": 1}),
    "chat_n2": ("POST", CHAT, {**ASK, "n": 2}),
    "chat_connection_close": ("POST", CHAT, ASK, {"Connection": "close"}),
    "chat_timings_per_token": ("POST", CHAT, {**ASK, "timings_per_token": True}),
    "chat_stream": ("POST", CHAT, STREAM),
    "chat_stream_zero_tokens": ("POST", CHAT, {**STREAM, "max_tokens": 0}),
    "chat_stream_usage": ("POST", CHAT, {**STREAM, **USAGE}),
    "chat_stream_timings_per_token": ("POST", CHAT, {**STREAM, "timings_per_token": True}),
    "chat_stream_timings_per_token_usage": ("POST", CHAT, {**STREAM, **USAGE, "timings_per_token": True}),
    "chat_stream_progress": ("POST", CHAT, {**STREAM, "return_progress": True}),
    "chat_stream_n2": ("POST", CHAT, {**STREAM, "n": 2}),
    "chat_stream_n2_usage": ("POST", CHAT, {**STREAM, **USAGE, "n": 2}),
    "text": ("POST", TEXT, TELL),
    "text_n2": ("POST", TEXT, {**TELL, "n": 2}),
    "text_list": ("POST", TEXT, LIST),
    "text_list_of_one": ("POST", TEXT, {**LIST, "prompt": ["Once upon"]}),
    "text_tokens": ("POST", TEXT, {**TELL, "prompt": [2, 3, 4]}),
    "text_tokens_and_text": ("POST", TEXT, {**TELL, "prompt": [12, "A b"]}),
    "text_stream": ("POST", TEXT, {**TELL, "stream": True}),
    "text_stream_usage": ("POST", TEXT, {**TELL, **USAGE, "stream": True}),
    "text_stream_timings_per_token": ("POST", TEXT, {**TELL, "stream": True, "timings_per_token": True}),
    "text_stream_n2": ("POST", TEXT, {**TELL, "stream": True, "n": 2}),
    "text_stream_list": ("POST", TEXT, {**LIST, "stream": True}),
    "tokenize": ("POST", "/tokenize", {"content": "Once upon a time"}),
    "tokenize_special": ("POST", "/tokenize", {"content": "Once upon", "add_special": True}),
    "tokenize_pieces": ("POST", "/tokenize", {"content": "Once upon", "with_pieces": True}),
    "detokenize": ("POST", "/detokenize", {"tokens": [1000, 2000]}),
    "apply_template": ("POST", "/apply-template", {"messages": ASK["messages"]}),
    "input_tokens": ("POST", CHAT + "/input_tokens", {"messages": ASK["messages"]}),
    "error_json": ("POST", CHAT, '{"messages":'),
    "error_array": ("POST", CHAT, []),
    "error_no_messages": ("POST", CHAT, {"model": "x"}),
    "error_no_prompt": ("POST", TEXT, {"model": "x"}),
    "error_n": ("POST", CHAT, {**ASK, "n": 99}),
    "error_context": ("POST", CHAT, LONG),
    "error_context_stream": ("POST", CHAT, {**LONG, "stream": True}),
    "error_path": ("GET", "/v1/nothing"),
    "error_method": ("GET", CHAT),
    "error_model_by_id": ("GET", "/v1/models/gemma"),
    "error_embeddings_off": ("POST", EMBED, {"input": "hi"}),
}
KEYED: dict[str, tuple[Any, ...]] = {
    "error_no_key": ("GET", "/v1/models"),
    "error_wrong_key": ("POST", CHAT, ASK, {"Authorization": "Bearer wrong"}),
    "health_without_key": ("GET", "/health"),
    "embeddings": ("POST", EMBED, {"input": "hello there"}, KEY),
    "embeddings_list": ("POST", EMBED, {"input": ["hello there", "a cat"]}, KEY),
    "embeddings_tokens": ("POST", EMBED, {"input": [[1, 2], [3]]}, KEY),
    "embeddings_base64": ("POST", EMBED, {"input": "hello there", "encoding_format": "base64"}, KEY),
    "error_embeddings_empty": ("POST", EMBED, {"input": []}, KEY),
    "error_embeddings_nothing": ("POST", EMBED, {"x": 1}, KEY),
    "chat_on_embeddings_server": ("POST", CHAT, ASK, KEY),
}


def exchange(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """One request on a connection of its own: status, headers, body or writes (HTTP chunks), whether it was closed."""
    payload = b"" if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    received, closed = b"", False
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(30)
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + payload)
        while not closed:
            try:
                data = sock.recv(65536)
            except TimeoutError:
                break
            received, closed = received + data, not data
            if _complete(received, method):
                sock.settimeout(0.3)  # is it closed now, or kept?
    head, _, rest = received.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    told: dict[str, Any] = {"status": int(status.split(" ")[1]), "headers": [field.split(": ", 1) for field in fields]}
    told["closed"] = closed
    if b"transfer-encoding: chunked" in head.lower():
        told["writes"] = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            if size != b"0":
                told["writes"].append(rest[: int(size, 16)].decode())
            rest = rest[int(size, 16) + 2 :]
    else:
        told["body"] = json.loads(rest) if rest else None
    return told


def _complete(received: bytes, method: str) -> bool:
    head, end, rest = received.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    if length:
        return bool(end) and (method == "HEAD" or len(rest) >= int(length[1]))
    return received.endswith(b"\r\n0\r\n\r\n")


def _shorten(told: Any, path: str) -> Any:
    """Vectors of three numbers instead of hundreds; no path of the capturing machine."""
    if isinstance(told, dict):
        return {key: _shorten(value[:3] if key == "embedding" else value, path) for key, value in told.items()}
    if isinstance(told, list):
        return [_shorten(value, path) for value in told]
    return told.replace(path, "gemma3.gguf") if isinstance(told, str) else told


def main(build: str, plain: int, keyed: int) -> None:
    path = exchange(plain, "GET", "/v1/models")["body"]["data"][0]["id"]
    FOLDER.mkdir(exist_ok=True)
    for server, port, cases in (("plain", plain, PLAIN), ("keyed", keyed, KEYED)):
        for name, request in cases.items():
            told = {"build": build, "server": server, "request": request, **exchange(port, *request)}
            text = json.dumps(_shorten(told, path), indent=1, ensure_ascii=False)
            (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
