"""A tokenizer and a chat template small enough to read, of the same kind as the released ones."""

from functools import cache

from tokenizers import Tokenizer as Backend

from dgemma.text.tokenizer import Tokenizer
from examples.tiny_model import bpe_tokenizer

CONTROL = (
    "<pad> <eos> <bos> <unk> <mask> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
    '<tool_response|> <|"|> <|think|> <|channel> <channel|> <|turn> <turn|> '
    "<|image> <|audio> <|image|> <|audio|> <image|> <audio|> <|video|>"
).split()
ALPHABET = [chr(code) for code in range(32, 127) if chr(code) != " "] + list("▁\n\téäπЖא中")
MERGES = [
    *[("t", "h"), ("th", "e"), ("▁", "the"), ("th", "o"), ("tho", "u"), ("g", "h"), ("gh", "t")],
    *[
        ("thou", "ght"),
        ("\n", "\n"),
        ("▁", "▁"),
        ("c", "a"),
        ("l", "l"),
        ("ca", "ll"),
        ("call", ":"),
    ],
    *[("|", ">"), ("<", "|"), ("{", "}"), ("中", "中"), ("Ж", "Ж"), ("a", "▁")],
]

# The same paths as the released template, in another hand: system, thinking, tools, calls, answers,
# thoughts dropped from history.
TEMPLATE = """\
{%- macro value(item) -%}
    {%- if item is none -%}null
    {%- elif item is string -%}{{ '<|"|>' + item + '<|"|>' }}
    {%- elif item is boolean -%}{{ 'true' if item else 'false' }}
    {%- elif item is mapping -%}{{ '{' }}{{ fields(item) }}{{ '}' }}
    {%- elif item is sequence -%}
        [{% for one in item %}{{ value(one) }}{{ ',' if not loop.last }}{% endfor %}]
    {%- else -%}{{ item }}
    {%- endif -%}
{%- endmacro -%}
{%- macro fields(mapping) -%}
    {%- for key, item in mapping | dictsort -%}
        {{ key }}:{{ value(item) }}{{ ',' if not loop.last }}
    {%- endfor -%}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
    {%- set kept = namespace(text='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- set before = part.split('<|channel>')[0] if '<|channel>' in part else part -%}
        {%- set kept.text = kept.text + before -%}
    {%- endfor -%}
    {{ kept.text | trim }}
{%- endmacro -%}
{%- macro body(message) -%}
    {%- set whole = [{'text': message.content}] -%}
    {%- for part in (whole if message.content is string else message.content) -%}
        {%- if message.role == 'assistant' -%}{{ without_thoughts(part.text) }}
        {%- else -%}{{ part.text | trim }}
        {%- endif -%}
    {%- endfor -%}
{%- endmacro -%}
{%- set state = namespace(last_user=-1, rest=messages, names={}, after_answer=false) -%}
{{- bos_token -}}
{%- if messages[0].role in ['system', 'developer'] or tools or enable_thinking -%}
    <|turn>system
    {{- '\\n<|think|>' if enable_thinking }}
    {{- '\\n' }}
    {%- if messages[0].role in ['system', 'developer'] -%}
        {{- body(messages[0]) -}}
        {%- set state.rest = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        <|tool>declaration:{{ tool.function.name -}}
        {description:{{ value(tool.function.description) -}}
        ,parameters:{{ value(tool.function.parameters) }}}<tool|>
    {%- endfor -%}
    <turn|>{{ '\\n' }}
{%- endif -%}
{%- for message in state.rest -%}
    {%- if message.role == 'user' -%}{%- set state.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in state.rest -%}
    {%- if message.role == 'tool' -%}
        {%- set call = namespace(name=message.name or 'unknown') -%}
        {%- for one in state.calls -%}
            {%- if one.id == message.tool_call_id -%}
                {%- set call.name = one.function.name -%}
            {%- endif -%}
        {%- endfor -%}
        {{- '<|tool_response>response:' + call.name + '{value:' + value(body(message)) -}}
        {{- '}<tool_response|>' -}}
        {%- set state.after_answer = true -%}
    {%- else -%}
        {%- if not state.after_answer -%}
            {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
        {%- endif -%}
        {%- set state.after_answer = false -%}
        {%- set is_kept = preserve_thinking or loop.index0 > state.last_user -%}
        {%- if message.reasoning_content and is_kept -%}
            {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' -}}
        {%- endif -%}
        {{- body(message) -}}
        {%- set state.calls = message.tool_calls or [] -%}
        {%- for one in state.calls -%}
            {{- '<|tool_call>call:' + one.function.name + '{' + fields(one.function.arguments) -}}
            {{- '}<tool_call|>' -}}
        {%- endfor -%}
        {%- if not state.calls -%}{{- '<turn|>\\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if not state.after_answer -%}{{- '<|turn>model\\n' -}}
    {%- elif enable_thinking -%}{{- '<|channel>thought\\n' -}}
    {%- endif -%}
{%- endif -%}
"""


def make_backend(*, byte_tokens: int = 256) -> Backend:
    pieces = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(byte_tokens)), *ALPHABET]
    pieces += [left + right for left, right in MERGES]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return bpe_tokenizer(vocabulary, MERGES, CONTROL)


@cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer(make_backend())
