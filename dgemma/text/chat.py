"""Messages and tools to a prompt: the checkpoint's own template, and what stands in it is data.

Owns the rendering of a chat template and the line between what the template writes and what people
write. Every control token the template writes is marked, in its parsed tree, with half a surrogate
pair: a character that valid text cannot hold. After rendering, marked control tokens become control
ids and all the rest is encoded as plain text. So content that spells `<|turn>`, in one piece or in
several that the template joins, stays text, and content is never changed. What the template *looks
for* in content (`split`, `in`) is not marked: it must go on matching. The price: a control token
that a template assembles from pieces (`'<|' ~ role ~ '>'`) is text; the released one has none.

Knows nothing of the model's replies: see reply.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dgemma.errors import CheckpointError, UsageError
from dgemma.text.messages import Message, Tool, ToolCall, check_conversation
from dgemma.text.tokenizer import Tokenizer, refuse_surrogates

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatTemplate", "Message", "Prompt", "Tool", "ToolCall"]

MARK = "\ud800"
MAX_NESTING = 100  # levels of arguments and schemas; the template recurses over them
# What foreign template code raises on data it did not expect, beside jinja's own errors.
TEMPLATE_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered conversation. `in_thought`: it ends in a thought that the reply goes on with."""

    text: str
    ids: tuple[int, ...]
    in_thought: bool = False


class ChatTemplate:
    """A checkpoint's chat template, bound to its tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        from jinja2 import TemplateSyntaxError

        self._tokenizer = tokenizer
        self._pattern = tokenizer.control_pattern(MARK)
        environment = make_environment()
        try:
            tree = environment.parse(source)
            mark_written(tree, tokenizer)
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from None

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read `chat_template.jinja` of a checkpoint directory."""
        path = directory / "chat_template.jinja"
        if not path.is_file():
            raise CheckpointError(
                f"no chat_template.jinja in {directory}; this model has no chat form"
            )
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from None
        return cls(source, tokenizer)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        enable_thinking: bool = False,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """Render a conversation; past thoughts are dropped unless `preserve_thinking`."""
        check_conversation(messages)
        variables = {
            "messages": [message_data(message) for message in messages],
            "tools": [tool_data(tool) for tool in tools] or None,
            "enable_thinking": enable_thinking,
            "preserve_thinking": preserve_thinking,
            "add_generation_prompt": add_generation_prompt,
        }
        check_data(variables)
        return self._encode(self._render(variables))

    def _render(self, variables: Mapping[str, object]) -> str:
        from jinja2 import TemplateError

        bos = MARK + "<bos>" if "<bos>" in self._tokenizer.control_ids else ""
        try:
            return self._template.render(variables, bos_token=bos)
        except (TemplateError, *TEMPLATE_FAULTS) as error:
            reason = str(error).replace(MARK, "")
            raise UsageError(
                f"the chat template cannot render this conversation: {reason}"
            ) from error

    def _encode(self, rendered: str) -> Prompt:
        if MARK in self._pattern.sub("", rendered):
            raise CheckpointError(
                "the chat template takes its own control tokens apart; use another one"
            )
        ids = self._tokenizer.encode_control(rendered, mark=MARK)
        return Prompt(
            text=rendered.replace(MARK, ""), ids=tuple(ids), in_thought=self._in_thought(ids)
        )

    def _in_thought(self, ids: Sequence[int]) -> bool:
        channel = [self._tokenizer.control_ids.get(name) for name in ("<|channel>", "<channel|>")]
        return next((token == channel[0] for token in reversed(ids) if token in channel), False)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders chat templates."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, leaves HTML characters and other scripts as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def mark_written(tree: nodes.Node, tokenizer: Tokenizer) -> None:
    """Mark the control tokens in the strings a template writes, not in those it looks for."""
    from jinja2 import nodes

    pattern = tokenizer.control_pattern()

    def marked(text: str) -> str:
        return pattern.sub(lambda match: MARK + match[0], text)

    def visit(node: nodes.Node) -> None:
        if isinstance(node, nodes.TemplateData):
            node.data = marked(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            node.value = marked(node.value)
        skipped = looked_for(node)
        for child in node.iter_child_nodes():
            if not any(child is other for other in skipped):
                visit(child)

    visit(tree)


def looked_for(node: nodes.Node) -> Sequence[nodes.Node]:
    """The children of `node` that a template compares content with, and does not write."""
    from jinja2 import nodes

    if isinstance(node, nodes.Compare):
        return [node.expr, *node.ops]
    if isinstance(node, nodes.Test):
        return node.args or []
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        # Of text.replace(old, new) the second is written.
        return node.args[:1] if node.node.attr == "replace" else node.args
    if isinstance(node, nodes.Filter) and node.name == "replace":
        return (node.args or [])[:1]
    return []


def message_data(message: Message) -> dict[str, object]:
    """A message as templates know it; what is empty is left out, since they test for presence."""
    fields = {
        "reasoning_content": message.thought,
        "tool_calls": [call_data(call) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    present = {name: value for name, value in fields.items() if value}
    return {"role": message.role, "content": content_data(message.content), **present}


def content_data(content: str | tuple[str, ...]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part} for part in content]


def call_data(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    identity = {"id": call.id} if call.id else {}
    return {"type": "function", "function": function, **identity}


def tool_data(tool: Tool) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def check_data(value: object, depth: int = 0) -> None:
    """Refuse what is not JSON or not Unicode: valid text cannot hold a mark."""
    if depth > MAX_NESTING:
        raise UsageError(
            f"arguments or schemas nest deeper than {MAX_NESTING} levels; flatten them"
        )
    if isinstance(value, str):
        refuse_surrogates(value)
    elif isinstance(value, Mapping):
        check_data(list(value.values()), depth)
        check_keys(value)
    elif isinstance(value, list | tuple):
        for item in value:
            check_data(item, depth + 1)
    elif not isinstance(value, bool | int | float | None):
        raise UsageError(f"{value!r} is not JSON data; give strings, numbers, lists and objects")


def check_keys(mapping: Mapping[object, object]) -> None:
    for key in mapping:
        if not isinstance(key, str):
            raise UsageError(f"the key {key!r} is not a string; JSON objects have string keys")
        refuse_surrogates(key)
