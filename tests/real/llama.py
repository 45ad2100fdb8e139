"""Runs a real llama.cpp server until its standard input ends: `python llama.py MODEL ADDRESS`.

Writes its URL to the file ADDRESS once it listens. A process of its own, so that nothing of it is left, whatever
becomes of the tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SLOTS = 4
# Qwen's way of calling tools, in few words: the template that comes with the model knows none, and without one
# llama.cpp cannot make a model call them.
TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\nYour tools are within <tools></tools>:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nCall one so:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def main(model: str, address: Path) -> None:
    import xllamacpp  # here, so that SLOTS can be had without it

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = 0
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * 2048
    params.n_batch = params.n_ubatch = 128  # so that a long prompt can be left in its middle
    params.endpoint_metrics = True
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.use_jinja = True
    params.chat_template = TEMPLATE
    params.cpuparams.n_threads = 1  # several wait for each other, which takes ages where others are at work too
    server = xllamacpp.Server(params)
    written = address.with_suffix(".new")
    written.write_text(server.listening_address)
    written.replace(address)
    sys.stdin.read()
    os._exit(0)  # what it still generates matters to nobody


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
