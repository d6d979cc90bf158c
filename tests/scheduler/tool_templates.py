"""Small chat templates with tools, each of the structure of a well-known model's."""

HERMES_LIKE = """
{%- macro type_of(schema) -%}
    {{- schema.type if schema.type is defined else 'any' }}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
        {%- for name, schema in tool.function.parameters.properties.items() %}
            {{- ' ' + name + ': ' + type_of(schema) }}
        {%- endfor %}
    {%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' and message.content is string %}
        {%- set ns.found = true %}{%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA_3_LIKE = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none and not tools_in_user_message | default(false) %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or message.tool_calls is defined) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls is defined %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL_LIKE = """
{%- if messages[0]["role"] == "system" -%}
    {%- set system, rest = messages[0]["content"], messages[1:] -%}
{%- else -%}
    {%- set rest = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in rest -%}
    {%- if message["role"] == "user" -%}
        {%- if tools is not none and (message == rest[-1] or loop.first) -%}
            {{- "[AVAILABLE_TOOLS] [" -}}
            {%- for tool in tools -%}
                {%- set tool = tool.function -%}
                {{- '{"type": "function", "function": {' -}}
                {%- for key, val in tool.items() if key != "return" -%}
                    {{- '"' + key + '": ' -}}{{- val | tojson -}}{%- if not loop.last -%}{{- ", " -}}{%- endif -%}
                {%- endfor -%}
                {{- "}}" -}}{%- if not loop.last -%}{{- ", " -}}{%- endif -%}
            {%- endfor -%}
            {{- "][/AVAILABLE_TOOLS]" -}}
        {%- endif -%}
        {{- "[INST] " + (system + "\\n\\n" if loop.last and system is defined else "") -}}
        {{- message["content"] + "[/INST]" -}}
    {%- elif message["tool_calls"] is defined and message["tool_calls"] is not none -%}
        {{- "[TOOL_CALLS] [" -}}
        {%- for call in message["tool_calls"] -%}
            {{- call.function | tojson | replace(": {", ":{") -}}
            {%- if not call.id is defined or call.id | length != 9 -%}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") -}}
            {%- endif -%}
            {{- ', "id": "' + call.id + '"' -}}{%- if not loop.last -%}{{- ", " -}}{%- endif -%}
        {%- endfor -%}
        {{- "]" + eos_token -}}
    {%- elif message["role"] == "assistant" -%}
        {%- generation -%}{{- " " + message["content"] | trim + eos_token -}}{%- endgeneration -%}
    {%- elif message["role"] == "tool" or message["role"] == "tool_results" -%}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string | tojson -}}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' -}}
    {%- else -%}
        {{- raise_exception("no role " + message["role"]) -}}
    {%- endif -%}
{%- endfor -%}
"""
HARMONY_LIKE = """
{%- macro render_type(schema) -%}
    {%- if schema.type == 'object' -%}
        {{- '{ ' }}
        {%- for name, each in schema.properties | dictsort -%}
            {{- name + ('' if name in (schema.required or []) else '?') + ': ' + render_type(each) + ', ' }}
        {%- endfor -%}
        {{- '}' }}
    {%- elif schema.enum -%}
        {{- schema.enum | map('tojson') | join(' | ') }}
    {%- else -%}
        {{- schema.type }}
    {%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>Current year: ' + strftime_now('%Y') + '\\nReasoning: ' }}
{{- reasoning_effort | default('medium') + '<|end|>' }}
{%- if tools -%}
    {{- '<|start|>developer<|message|>namespace functions {\\n' }}
    {%- for tool in tools -%}
        {{- 'type ' + tool.function.name + ' = (_: ' + render_type(tool.function.parameters) + ') => any;\\n' }}
    {%- endfor -%}
    {{- '}<|end|>' }}
{%- endif -%}
{%- set last = namespace(call=none) -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "thinking" in message -%}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif -%}
        {%- if "tool_calls" in message -%}
            {%- set last.call = message.tool_calls[0].function.name -%}
            {{- '<|start|>assistant to=functions.' + last.call + '<|channel|>commentary json<|message|>' }}
            {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
        {%- elif loop.last and not add_generation_prompt -%}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- else -%}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif -%}
    {%- elif message.role == 'tool' -%}
        {%- if last.call is none -%}{{- raise_exception('no call before') }}{%- endif -%}
        {{- '<|start|>functions.' + last.call + ' to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else -%}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' }}{%- endif -%}
"""
DEEPSEEK_LIKE = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}
{%- set ns = namespace(is_first=false, is_output=true, system='') -%}
{%- for message in messages -%}{%- if message['role'] == 'system' -%}
    {%- set ns.system = ns.system + message['content'] -%}
{%- endif -%}{%- endfor -%}
{{- bos_token }}{{- ns.system }}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and 'tool_calls' in message -%}
        {%- for tool in message['tool_calls'] -%}
            {%- if loop.first and message['content'] is none -%}
                {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
            {%- else -%}
                {{- '<｜Assistant｜>' + message['content'] + '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {%- endif -%}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}
            {{- '\\n```json\\n' }}
            {{- tool['function']['arguments'] | tojson + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor -%}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' -%}
        {%- set content = message['content'] -%}
        {%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' -%}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<｜Assistant｜><think>\\n' if thinking | default(true) else '<｜Assistant｜></think>' }}
{%- endif -%}
"""
WITH_DOCUMENTS = """
{%- for document in documents or [] -%}
    {{- document.title + ': ' + document.text + '\\n' }}
{%- endfor -%}
{%- for message in messages -%}
    {%- for key, value in message.items() -%}{{- key + '=' + value | tojson + ';' }}{%- endfor -%}
{%- endfor -%}
{{- bos_token + eos_token + (extra | default('none')) }}
"""
TEMPLATES = {
    "hermes": HERMES_LIKE,
    "llama3": LLAMA_3_LIKE,
    "mistral": MISTRAL_LIKE,
    "harmony": HARMONY_LIKE,
    "deepseek": DEEPSEEK_LIKE,
    "documents": WITH_DOCUMENTS,
}
