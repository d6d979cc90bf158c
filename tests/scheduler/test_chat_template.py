"""ChatTemplate against transformers, on templates in the style of well-known models."""

import os
import signal
from datetime import datetime
from typing import Any

import pytest

from quire.errors import FailedPreconditionError, InvalidRequestError
from scheduler_svc.text.chat_template import MAX_EXCESSES, ChatTemplate
from scheduler_svc.text.template_program import CompiledTemplate
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json, theirs

CHAT_ML = """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_2_LIKE = """
{% if messages[0]['role'] == 'system' %}
    {% set turns = messages[1:] %}
    {% set opening = '<<SYS>>\\n' + messages[0]['content'].strip() + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set turns = messages %}
    {% set opening = '' %}
{% endif %}
{% for turn in turns %}
    {% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {% endif %}
    {% set content = opening + turn['content'] if loop.first else turn['content'] %}
    {% if turn['role'] == 'user' %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}
{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}
"""
LLAMA_3_LIKE = """
{{- bos_token }}
{%- set state = namespace(count=0, dated=false) %}
{%- for message in messages %}
    {%- set state.count = state.count + 1 %}
    {%- if not state.dated and date_string is not defined %}
        {%- set date_string = "26 Jul 2024" %}
        {%- set state.dated = true %}
        {{- "<|header|>system<|/header|>\\n\\nToday: " + date_string + "\\n" }}
    {%- endif %}
    {{- "<|header|>" ~ message.role ~ "<|/header|>\\n\\n" ~ message.content | trim ~ "<|eot|>" }}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson(indent=2) }}{%- endif %}
{%- if add_generation_prompt %}{{- "<|header|>assistant<|/header|>\\n\\n" }}{%- else %}{{- eos_token }}{%- endif %}
{{- state.count }}
"""
MISTRAL_LIKE = """
{%- set users = messages | selectattr("role", "equalto", "user") | list -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message["role"] == "system" -%}
        {%- continue -%}
    {%- endif -%}
    {%- if message["role"] not in ("user", "assistant") -%}
        {{- raise_exception("Only user and assistant roles are supported, not " + message["role"]) -}}
    {%- endif -%}
    {%- if loop.index0 > 50 -%}{%- break -%}{%- endif -%}
    {%- if message["role"] == "user" -%}
        {{- "[INST] " + message["content"] + "[/INST]" -}}
        {%- if loop.last -%}{{- users | length -}}{%- endif -%}
    {%- else -%}
        {%- generation -%}{{- " " + message["content"] + eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""
WITH_JSON = """{% for message in messages %}
{{ message | tojson }} {{ {'b': message.content, 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}
  {% generation %}
  {% set inner = loop.index %}
said {{ inner }} by {{ message.get('name', 'nobody') }}
  {% endgeneration %}
{{ inner is defined }} {{ documents is none }} {{ pad_token is defined }}
{% endfor %}"""
GUARD_LIKE = """
{{- bos_token }}
{%- for message in messages %}
    {{- message['role'] | capitalize + ': ' }}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}
    {%- endfor %}
    {{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}
"""
FIRST_PART = "{% for message in messages %}{{ message.role }}|{{ message.content[0].text }}\n{% endfor %}"
BY_KIND = """
{%- for message in messages %}
    {%- if message.content is string %}{{ message.content }}{% else %}{{ message.content[0].text }} as parts{% endif %}
{%- endfor %}
"""
NO_TEXT = """
{%- for message in messages %}
    {%- if message.content is string %}{{ raise_exception('give a list of parts') }}{% endif %}
    {{- message.content | map(attribute='text') | join }}
{%- endfor %}
"""
OF_PARTS = {"guard_like": GUARD_LIKE, "first_part": FIRST_PART, "no_text": NO_TEXT}
TEMPLATES = {
    "chat_ml": CHAT_ML,
    "llama_2_like": LLAMA_2_LIKE,
    "llama_3_like": LLAMA_3_LIKE,
    "mistral_like": MISTRAL_LIKE,
    "with_json": WITH_JSON,
    "by_kind": BY_KIND,
}
USER = {"role": "user", "content": '  Où est <b>le chat</b> & "l\'autre"? 你好 👩‍👩‍👧\n'}
ANSWER = {"role": "assistant", "content": "Sous la table."}
SYSTEM = {"role": "system", "content": " Be brief. "}
CHATS = {
    "question": [USER],
    "with_system": [SYSTEM, USER],
    "going_on": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And now?"}],
    "answered": [USER, ANSWER],
}


@pytest.mark.long
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_look_as_transformers_renders_them(template: str, chat: str, add_generation_prompt: bool) -> None:
    source, messages = TEMPLATES[template], CHATS[chat]
    expected = theirs(byte_level_json(), source).apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    rendered = ChatTemplate(source, SPECIAL_TOKENS).render(messages, add_generation_prompt=add_generation_prompt)
    assert rendered == expected
    assert "le chat" in rendered


@pytest.mark.parametrize("content", ["Sous la", " Sous la table. ", "Le chat est", "", "  \n"])
@pytest.mark.parametrize("template", ["chat_ml", "llama_2_like", "llama_3_like", "mistral_like"])
def test_a_final_message_is_continued_where_transformers_continues_it(template: str, content: str) -> None:
    source, messages = TEMPLATES[template], [USER, ANSWER, USER, {"role": "assistant", "content": content}]
    expected = theirs(byte_level_json(), source).apply_chat_template(
        messages, continue_final_message=True, tokenize=False
    )
    rendered = ChatTemplate(source, SPECIAL_TOKENS).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected
    assert rendered.rstrip().endswith(content.strip())


def with_parts(messages: list[dict[str, str]]) -> list[Any]:
    """The messages as a user of transformers writes them for a template of parts."""
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", OF_PARTS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_that_writes_words_only_where_they_come_as_parts_gets_parts(
    template: str, chat: str, add_generation_prompt: bool
) -> None:
    source, messages = OF_PARTS[template], CHATS[chat]
    expected = theirs(byte_level_json(), source).apply_chat_template(
        with_parts(messages), add_generation_prompt=add_generation_prompt, tokenize=False
    )
    rendered = ChatTemplate(source, SPECIAL_TOKENS).render(messages, add_generation_prompt=add_generation_prompt)
    assert rendered == expected
    assert "le chat" in rendered


@pytest.mark.parametrize("content", ["Sous la", " Sous la table. ", ""])
@pytest.mark.parametrize("template", OF_PARTS)
def test_a_final_message_of_parts_is_continued_where_transformers_continues_it(template: str, content: str) -> None:
    source, messages = OF_PARTS[template], [USER, ANSWER, USER, {"role": "assistant", "content": content}]
    expected = theirs(byte_level_json(), source).apply_chat_template(
        with_parts(messages), continue_final_message=True, tokenize=False
    )
    rendered = ChatTemplate(source, SPECIAL_TOKENS).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{{ messages[-1].content | upper }}", "{{ messages[-1].content[:3] }}"]
)
def test_a_final_message_that_the_template_changes_cannot_be_continued(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the template changes or omits its content"):
        ChatTemplate(source, {}).render([USER, ANSWER], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        (LLAMA_2_LIKE, [ANSWER], "Roles must alternate"),
        (MISTRAL_LIKE, [{"role": "critic", "content": "Bad."}], "roles are supported, not critic"),
        ("{{ messages[7].content }}", [USER], "has no element 7"),
        ("{{ 1 / 0 }}", [USER], "division by zero"),
        ("{{ messages[0].content + 1 }}", [USER], "str"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", [USER], "too big"),
        ("{{ messages.__class__.__mro__ }}", [USER], "unsafe"),
        ("{{ messages.append(1) }}", [USER], "unsafe"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", [USER], "recursion"),
        ("{% include 'other' %}", [USER], "no loader"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_refusal_with_its_message(
    source: str, messages: list[dict[str, str]], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        ChatTemplate(source, {}).render(messages, add_generation_prompt=True)
    assert [each.field for each in caught.value.violations] == ["chat.messages"]


def test_a_long_message_of_a_template_is_cut() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate("{{ raise_exception('x' * 100000) }}", {}).render([USER], add_generation_prompt=True)
    assert len(caught.value.message) < 500


def test_a_template_that_is_not_jinja_is_reported_by_the_chat_that_needs_it() -> None:
    broken = ChatTemplate("{% for message in messages %}\n{{ message.content }", {})
    with pytest.raises(FailedPreconditionError, match=r"line 2: .*send the prompt as text"):
        broken.render([USER], add_generation_prompt=True)


def test_a_template_can_ask_for_the_date() -> None:
    template = CompiledTemplate(
        "{{ strftime_now('%d %B %Y') }}: {{ messages[0].role }}", {}, now=lambda: datetime(2024, 7, 9)
    )
    assert template.render([USER], add_generation_prompt=True) == "09 July 2024: user"


def test_a_template_cannot_change_the_messages_of_its_caller() -> None:
    messages = [dict(USER)]
    with pytest.raises(InvalidRequestError, match="unsafe"):
        ChatTemplate("{{ messages[0].update({'role': 'system'}) }}", {}).render(messages, add_generation_prompt=True)
    assert messages == [USER]


NESTED_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "a nested loop": NESTED_LOOPS,
    "a width of 10^9": "{{ '%1000000000s' % 'x' }}",
    "a format of 10^9": "{{ '{:1000000000}'.format('x') }}",
    "a string times 10^9": "{{ 'x' * 1000000000 }}",
    "doubled 40 times": "{% set s = namespace(t='x') %}{% for i in range(40) %}{% set s.t = s.t ~ s.t %}{% endfor %}",
    "a tower of powers": "{{ 9 ** (9 ** 9) }}",
    "centred in 10^9": "{{ 'x' | center(1000000000) }}",
    "filled with zeros": "{{ 'x'.zfill(1000000000) }}",
    "much output": "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "lorem ipsum": "{{ lipsum(n=100000000) }}",
}


@pytest.mark.long
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_goes_beyond_its_limits_is_one_plain_error_and_its_process_is_gone(source: str) -> None:
    with pytest.raises((FailedPreconditionError, InvalidRequestError)) as caught:
        ChatTemplate(source, {}).render([USER], add_generation_prompt=True)
    assert len(caught.value.message) < 500 and "template" in caught.value.message


@pytest.mark.parametrize("depth", [100, 5_000])
def test_deeply_nested_ifs_are_one_plain_error(depth: int) -> None:
    source = "{% if true %}" * depth + "x" + "{% endif %}" * depth
    template = ChatTemplate(source, {})
    for _ in range(2):
        with pytest.raises(FailedPreconditionError, match="template"):
            template.render([USER], add_generation_prompt=True)


@pytest.mark.long
def test_a_template_that_exceeds_its_limits_again_and_again_is_not_tried_for_a_while() -> None:
    template = ChatTemplate("{% if messages[0].role == 'user' %}" + NESTED_LOOPS + "{% endif %}fine", {})
    assert template.render([SYSTEM], add_generation_prompt=True) == "fine"
    for _ in range(MAX_EXCESSES):
        with pytest.raises(FailedPreconditionError, match="takes more than"):
            template.render([USER], add_generation_prompt=True)
    with pytest.raises(FailedPreconditionError, match="takes more than"):
        template.render([SYSTEM, USER], add_generation_prompt=True)


@pytest.mark.long
def test_long_chats_beyond_the_limits_of_a_template_stop_no_shorter_ones() -> None:
    """Three of them made everybody's chats fail for half a minute."""
    slow = "{% for a in messages %}{% for b in range(99999) %}{% endfor %}{% endfor %}fine"
    template = ChatTemplate(slow, {})
    for _ in range(MAX_EXCESSES + 1):
        with pytest.raises(FailedPreconditionError, match="takes more than"):
            template.render([USER] * 10_000, add_generation_prompt=True)
    assert template.render([USER], add_generation_prompt=True) == "fine"


def test_a_process_that_was_ended_while_it_waited_is_replaced() -> None:
    """By the system, when memory was short: the next chat was refused as if the template had taken too long for it."""
    template = ChatTemplate("fine", {})
    template.render([USER], add_generation_prompt=True)
    (waiting,) = template._idle._idle
    os.kill(waiting._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, waiting._process.pid, os.WEXITED | os.WNOWAIT)
    assert template.render([USER], add_generation_prompt=True) == "fine"
    assert len(template._idle._idle) == 1


def test_a_template_sees_nothing_of_its_process() -> None:
    for source in (
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].environ }}",
    ):
        with pytest.raises(InvalidRequestError):
            ChatTemplate(source, {}).render([USER], add_generation_prompt=True)
