"""The table of proxied endpoints: the one place where an endpoint is added.

A row says under which paths users ask for it, whether it may stream, what is added to a request to learn the usage,
and how the server counts a prompt without generating. It must not know how bytes travel.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One proxied endpoint.

    :param path: the path at the server, also the ``endpoint`` of the usage row.
    :param spellings: other paths under which it is served to users.
    :param generates: whether the answer is generated token by token (else the prompt alone is processed).
    :param prompt_fields: the fields of the body that hold the prompt, for ``/tokenize``; empty: a chat.
    :param count_path: where the server counts the prompt of the same body without generating, if it can.
    """

    path: str
    spellings: tuple[str, ...] = ()
    generates: bool = True
    prompt_fields: tuple[str, ...] = ()
    count_path: str | None = None


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "/v1/chat/completions",
        spellings=("/chat/completions",),
        count_path="/v1/chat/completions/input_tokens",
    ),
    Endpoint("/v1/completions", prompt_fields=("prompt",)),
    Endpoint("/v1/embeddings", generates=False, prompt_fields=("input", "content")),
)
