"""Deployment of a model that recites answers with calls and reasoning."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gateway.reciting_model import cue, write_reciting_model
from tests.quire.spoken_answers import SPOKEN
from tests.services import running_services

MODEL = "reciter"
# Shows what it got, and ends with the name of the answer that the last message asks for.
TEMPLATE = """
{%- for tool in tools or [] %}{{- 'tool ' + tool.function.name + ' ' + tool.function.parameters | tojson }}{% endfor %}
{%- for message in messages %}
    {{- '\\n' + message.role + ': ' + message.content }}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + ' ' + call.function.arguments.city + '</tool_call>' }}
    {%- endfor %}
    {%- if message.tool_call_id %}{{- ' answers ' + message.tool_call_id }}{% endif %}
{%- endfor %}
{%- for document in documents or [] %}{{- document.text }}{% endfor %}
{%- if reasoning_effort %}{{- 'effort ' + reasoning_effort }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<think>' if enable_thinking else '※' + (say or messages[-1].content) + '※' }}
{%- endif %}
"""
ARGUMENTS = '{"city": "Paris", "unit": "C"}'
ANSWERS: dict[str, list[str]] = {
    cue("call"): [
        "<think>\nWhich one?\n</think>",
        "\n\nLet me look.\n",
        "<tool_call>",
        f'\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n',
        "</tool_call>",
    ],
    cue("calls"): [
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
        '<tool_call>{"name": "tides", "arguments": {"port": "Kiel"}}</tool_call>'
    ],
    cue("broken"): ['No <tool_call>{"nom": 1}</tool_call>.'],
    cue("hello"): ["Hello, <b>you</b> there."],
    cue("plain"): ["It rains: 3 < 4."],
    cue("number"): ['{"n":7}'],
    cue("atlantis"): ['<tool_call>\n{"name": "weather", "arguments": {"city": "Atlantis", "unit": "K"}}\n</tool_call>'],
    "<think>": ["Hm: 2 + 2 it is.\n", "</think>", "\n\nFour."],
    **{cue(name): [spoken.text] for name, spoken in SPOKEN.items() if not spoken.in_reasoning},
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}},
        },
    }
]


def asking(answer: str) -> list[Any]:
    return [{"role": "user", "content": answer}]


@contextmanager
def serve_reciter(
    folder: Path, answers: Mapping[str, Sequence[str]] = ANSWERS, template: str = TEMPLATE
) -> Iterator[tuple[str, str]]:
    """Write the model and serve it. Addresses of the scheduler and of the gateway."""
    write_reciting_model(folder, answers, template, ["<tool_call>", "</tool_call>", "</think>"])
    options = ("--dtype", "float32", "--threads", "1", "--num-blocks", "300", "--model-name", MODEL)
    with running_services(*options, model=folder) as services:
        yield services.address, services.url
