"""Records of training data: chats in the common formats, as messages and a reply; plain texts.

| keys | format |
|---|---|
| `messages`, with `tools` or not | a conversation (OpenAI, TRL) |
| `conversations` | a conversation (ShareGPT): `from` and `value` in each turn |
| `instruction`, `output`, with `input` or not | a task and its answer (Alpaca) |
| `prompt` and `completion` or `reply` | two strings, or two lists of messages (TRL) |
| `text` | plain text, no chat |

The last message of a conversation, the assistant's, is the reply: its text, or calls of tools.
Further keys are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dgemma.errors import UsageError
from dgemma.text.chat import Message, Tool
from dgemma.text.messages import check_conversation, read_tools

FORMS = (
    '"messages", "conversations", "instruction" and "output", "prompt" and "completion" or '
    '"reply", or "text"'
)
FORM_KEYS = ("messages", "conversations", "instruction", "prompt", "text")
ROLES = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"chatgpt": "assistant", "model": "assistant", "bot": "assistant", "system": "system"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingChat:
    """A conversation and the reply that is learned."""

    messages: Sequence[Message]
    reply: str | Message  # a text, or a message with calls of tools
    tools: Sequence[Tool] = ()


def read_record(record: object) -> TrainingChat | str:
    """Read a chat or a plain text; a refusal says what the record has and what it needs."""
    if not isinstance(record, Mapping):
        raise UsageError(f"a {type(record).__name__} and not an object with {FORMS}")
    keys = ", ".join(map(repr, record)) or "none"
    found = [key for key in FORM_KEYS if key in record]
    if len(found) > 1:
        raise UsageError(f"the keys are {keys}, of several forms; give only {FORMS}")
    if found == ["text"]:
        return _string(record, "text")
    if found == ["messages"]:
        return _conversation(record["messages"], "messages", record.get("tools"))
    if found == ["conversations"]:
        return _conversation(_from_sharegpt(record["conversations"]), "conversations")
    if found == ["instruction"] and "output" in record:
        return _from_alpaca(record)
    answers = [key for key in ("completion", "reply") if key in record]
    if found == ["prompt"] and len(answers) == 1:
        return _from_pair(record, answers[0])
    raise UsageError(f"the keys are {keys}; give {FORMS}")


def _conversation(messages: object, key: str, tools: object = None) -> TrainingChat:
    if not isinstance(messages, list) or len(messages) < 2:
        raise UsageError(f'"{key}" must be a list of at least a question and an answer')
    *before, last = [Message.from_dict(message) for message in messages]
    if last.role != "assistant" or not isinstance(last.content, str):
        raise UsageError("the last message must be the assistant's, with text as its content")
    check_conversation(before)
    reply = last if last.tool_calls else last.content
    return TrainingChat(messages=before, reply=reply, tools=read_tools(tools))


def _from_sharegpt(entries: object) -> object:
    """Rename ShareGPT's keys and roles."""
    if not isinstance(entries, list):
        return entries
    messages = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not {"from", "value"} <= entry.keys():
            raise UsageError(f'"conversations"[{number}] needs "from" and "value"')
        role = ROLES.get(entry["from"]) if isinstance(entry["from"], str) else None
        if role is None:
            allowed = ", ".join(ROLES)
            raise UsageError(
                f'"conversations"[{number}]: "from" is {entry["from"]!r}; it must be one of '
                f"{allowed}"
            )
        messages.append({"role": role, "content": _string(entry, "value")})
    return messages


def _from_alpaca(record: Mapping[str, object]) -> TrainingChat:
    """Join instruction and input by a blank line, as `edit` does."""
    given = _string(record, "input") if record.get("input") is not None else ""
    question = "\n\n".join(part for part in (_string(record, "instruction"), given) if part)
    return _question(question, _string(record, "output"))


def _from_pair(record: Mapping[str, object], answer: str) -> TrainingChat:
    prompt, reply = record["prompt"], record[answer]
    if isinstance(prompt, list) and isinstance(reply, list):
        return _conversation([*prompt, *reply], "prompt", record.get("tools"))
    return _question(_string(record, "prompt"), _string(record, answer))


def _question(question: str, reply: str) -> TrainingChat:
    return TrainingChat(messages=[Message(role="user", content=question)], reply=reply)


def _string(record: Mapping[str, object], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise UsageError(f'"{key}" is {value!r}; it must be a string')
    return value
