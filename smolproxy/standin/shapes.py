"""The JSON of llama-server, key for key in its order (seen on the build of xllamacpp 2026.10.11549). Pure functions."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from .engine import Choice, Counters, Slot, Token

Json = dict[str, Any]

BUILD = "b0-standin"

PARAMS: Json = {
    **{"seed": 4294967295, "temperature": 0.8, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_k": 40},
    **{"top_p": 0.95, "min_p": 0.05, "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1},
    **{"typical_p": 1.0, "repeat_last_n": 64, "repeat_penalty": 1.0, "presence_penalty": 0.0},
    **{"frequency_penalty": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2},
    **{"dry_penalty_last_n": 64, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "adaptive_target": -1.0},
    **{"adaptive_decay": 0.9, "max_tokens": -1, "n_predict": -1, "n_keep": 0, "n_discard": 0, "ignore_eos": False},
    **{"stream": False, "n_probs": 0, "min_keep": 0, "chat_format": "Content-only", "reasoning_format": "none"},
    **{"reasoning_in_content": False, "generation_prompt": "", "samplers": ["top_k", "top_p", "temperature"]},
    **{"speculative.types": "none", "timings_per_token": False, "post_sampling_probs": False},
    **{"backend_sampling": False, "lora": []},
}

TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

METRICS = (  # kind, name, help
    ("counter", "prompt_tokens_total", "Prompt tokens processed, without cached ones"),
    ("counter", "prompt_tokens_cached_total", "Prompt tokens taken from the cache"),
    ("counter", "prompt_seconds_total", "Seconds spent on prompts"),
    ("counter", "tokens_predicted_total", "Tokens generated"),
    ("counter", "tokens_predicted_seconds_total", "Seconds spent generating"),
    ("gauge", "requests_processing", "Requests at work"),
    ("gauge", "requests_deferred", "Requests waiting for a slot"),
)


def dumps(value: Any) -> bytes:
    """Compact JSON with text as UTF-8, as the real one writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error(status: int, message: str, kind: str, **more: int) -> Json:
    """An error of a handler."""
    return {"error": {"code": status, "message": message, "type": kind, **more}}


def early_error(status: int, message: str, kind: str) -> Json:
    """An error from before a handler: other order of keys."""
    return {"error": {"message": message, "type": kind, "code": status}}


def timings(choice: Choice) -> Json:
    """The `timings` object of a choice as it stands."""
    prompt_n, predicted_n, predicted_ms = choice.prompt_n, choice.predicted, choice.predicted_ms
    more = predicted_n - 1  # the time counts from the first token
    return {
        "cache_n": choice.cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": choice.prompt_ms,
        "prompt_per_token_ms": choice.prompt_ms / prompt_n,
        "prompt_per_second": 1000 * prompt_n / choice.prompt_ms,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / more if more > 0 else 0.0,
        "predicted_per_second": 1000 * more / predicted_ms if more > 0 else 0.0,
    }


def usage(choice: Choice) -> Json:
    """The `usage` object of a choice as it stands."""
    prompt = len(choice.prompt)
    return {
        "completion_tokens": choice.predicted,
        "prompt_tokens": prompt,
        "total_tokens": prompt + choice.predicted,
        "prompt_tokens_details": {"cached_tokens": choice.cache_n},
    }


def progress(choice: Choice, processed: int) -> Json:
    """`prompt_progress`, for requests that want it."""
    total, cached = len(choice.prompt), choice.cache_n
    time_ms = 0 if processed < total else round(choice.prompt_ms)
    return {"total": total, "cache": cached, "processed": processed, "time_ms": time_ms}


class Chat:
    """/v1/chat/completions."""

    def __init__(self, id: str, created: int, model: str) -> None:
        self.id, self.created, self.model = id, created, model

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        """One event of a stream."""
        return {
            "choices": choices,
            "created": self.created,
            "id": self.id,
            "model": self.model,
            "system_fingerprint": BUILD,
            "object": "chat.completion.chunk",
            **more,
        }

    def opening(self, index: int) -> list[Json]:
        """The choices of a stream's first event."""
        return self.piece(index, {"role": "assistant", "content": None})

    def piece(self, index: int, delta: Json) -> list[Json]:
        """The choices of an event with text."""
        return [{"finish_reason": None, "index": index, "delta": delta}]

    def closing(self, index: int, finish: str) -> list[Json]:
        """The choices of the event that ends a choice."""
        return [{"finish_reason": finish, "index": index, "delta": {}}]

    def choice(self, index: int, deltas: Iterable[Json], finish: str) -> Json:
        """A choice of a whole answer, from the deltas of its stream."""
        text = thought = ""
        calls: dict[int, Json] = {}
        for delta in deltas:
            text += delta.get("content", "")
            thought += delta.get("reasoning_content", "")
            for part in delta.get("tool_calls", ()):
                known = calls.setdefault(
                    part["index"],
                    {"type": "function", "function": {"name": "", "arguments": ""}, "id": part.get("id")},
                )
                for key, value in part["function"].items():
                    known["function"][key] += value
        message: Json = {"role": "assistant", "content": text if text or not calls else None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = list(calls.values())
        return {"finish_reason": finish, "index": index, "message": message}

    def whole(self, choices: list[Json], **more: Any) -> Json:
        """A whole answer."""
        return self._usage_before_id(choices, "chat.completion", more)

    def _usage_before_id(self, choices: list[Json], kind: str, more: Json) -> Json:
        head: Json = {"choices": choices, "created": self.created, "model": self.model, "system_fingerprint": BUILD}
        head["object"] = kind
        if "usage" in more:
            head["usage"] = more.pop("usage")
        return {**head, "id": self.id, **more}


class Text(Chat):
    """/v1/completions."""

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        return self._usage_before_id(choices, "text_completion", more)

    def opening(self, index: int) -> list[Json]:
        return self.piece(index, {})

    def piece(self, index: int, delta: Json) -> list[Json]:
        return [self.choice(index, [delta], None)]

    def closing(self, index: int, finish: str) -> list[Json]:
        return [self.choice(index, [], finish)]

    def choice(self, index: int, deltas: Iterable[Json], finish: str | None) -> Json:
        text = "".join(delta.get("content", "") for delta in deltas)
        return {"text": text, "index": index, "logprobs": None, "finish_reason": finish}

    def whole(self, choices: list[Json], **more: Any) -> Json:
        return self.chunk(choices, **more)


def embeddings(model: str, inputs: Sequence[Sequence[Token]], dimensions: int, as_base64: bool) -> Json:
    """/v1/embeddings: for each input a vector that its tokens determine."""
    tokens = sum(map(len, inputs))
    data: list[Json] = []
    for index, tokens_of_one in enumerate(inputs):
        digest = hashlib.shake_128(repr(list(tokens_of_one)).encode()).digest(dimensions)
        vector = [byte / 128 - 1 for byte in digest]
        if as_base64:
            text = base64.b64encode(struct.pack(f"<{dimensions}f", *vector)).decode()
            data.append({"embedding": text, "index": index, "object": "embedding", "encoding_format": "base64"})
        else:
            data.append({"embedding": vector, "index": index, "object": "embedding"})
    return {"model": model, "object": "list", "usage": {"prompt_tokens": tokens, "total_tokens": tokens}, "data": data}


def models(names: Sequence[str], created: int, n_ctx: int) -> Json:
    """GET /v1/models."""
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""]}
    details |= {"parameter_size": "", "quantization_level": ""}
    meta: Json = {"vocab_type": 1, "n_vocab": 262144, "n_ctx": n_ctx, "n_ctx_train": 32768, "n_embd": 640}
    meta |= {"n_params": 268098176, "size": 246587904, "ftype": "Q4_K - Medium"}
    ollama: list[Json] = []
    openai: list[Json] = []
    for name in names:
        empty = {"modified_at": "", "size": "", "digest": "", "type": "model", "description": "", "tags": [""]}
        more = {"capabilities": ["completion"], "parameters": "", "details": details}
        ollama.append({"name": name, "model": name, **empty, **more})
        modalities = {"input_modalities": ["text"], "output_modalities": ["text"]}
        entry: Json = {"id": name, "aliases": [name], "tags": [], "object": "model", "architecture": modalities}
        openai.append({**entry, "created": created, "owned_by": "llamacpp", "meta": meta})
    return {"models": ollama, "object": "list", "data": openai}


def props(model: str, slots: int, n_ctx: int, metrics: bool) -> Json:
    """GET /props."""
    capabilities = ["object_arguments", "parallel_tool_calls", "preserve_reasoning", "reasoning_effort"]
    capabilities += ["string_content", "system_role", "tool_calls", "tools", "typed_content"]
    return {
        "default_generation_settings": {"params": PARAMS, "n_ctx": n_ctx},
        "total_slots": slots,
        "model_alias": model,
        "model_ftype": "Q4_K - Medium",
        "model_path": model,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "<__media__>",
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": metrics,
        "ui": True,
        "ui_settings": {},
        "chat_template": TEMPLATE,
        "chat_template_caps": {f"supports_{name}": True for name in capabilities},
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "build_info": BUILD,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }


def slot(slot: Slot, n_ctx: int) -> Json:
    """One entry of GET /slots; a slot that has worked tells more."""
    choice = slot.choice
    shape: Json = {"id": slot.id, "n_ctx": n_ctx, "speculative": False, "is_processing": choice is not None}
    if slot.task < 0:
        return shape
    made = choice.predicted if choice else 0
    token: Json = {"has_next_token": choice is not None, "has_new_line": False}
    token |= {"n_remain": choice.limit - made if choice else -1, "n_decoded": made}
    return {
        **shape,
        "id_task": slot.task,
        "n_prompt_tokens": len(choice.prompt) + made if choice else 0,
        "n_prompt_tokens_processed": choice.prompt_n if choice else 0,
        "n_prompt_tokens_cache": choice.cache_n if choice else 0,
        "params": PARAMS,
        "next_token": [token],
    }


def metrics(counters: Counters, processing: int, deferred: int) -> str:
    """GET /metrics, its most useful part."""
    values = [counters.prompt_tokens, counters.cached, counters.prompt_seconds, counters.predicted]
    values += [counters.predicted_seconds, processing, deferred]
    lines: list[str] = []
    for (kind, name, help), value in zip(METRICS, values, strict=True):
        name = f"llamacpp:{name}"
        lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}", f"{name} {value:.10g}"]
    return "\n".join([*lines, ""])


def render(body: Json) -> str:
    """The prompt that a chat's messages make: a simple ChatML; images and sounds count one word each."""
    text = ""
    if body.get("tools"):
        text += f"<|im_start|>system\n{dumps(body['tools']).decode(errors='replace')}<|im_end|>\n"
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", " <__media__>") for part in content)
        if message.get("tool_calls"):
            content += dumps(message["tool_calls"]).decode(errors="replace")
        text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
    return f"{text}<|im_start|>assistant\n"
