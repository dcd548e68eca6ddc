"""What an answer must look like: response formats, tool choices and constraints, made into guides.

A guide is compiled, and its shortest text found, beside the event loop and the engine's thread: a
large schema takes a while.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dgemma.errors import UsageError
from dgemma.server import limits
from dgemma.server.faults import ApiError
from dgemma.server.wire import ChatBody, Extension, ResponseFormat

if TYPE_CHECKING:
    from dgemma.constrain.grammar import Constraint
    from dgemma.constrain.matcher import Guide
    from dgemma.engine import Engine
    from dgemma.text.messages import Tool


def text_guide(engine: "Engine", asked: Extension, form: ResponseFormat | None) -> "Guide | None":
    """What the text of an answer is held to; None: to nothing."""
    given: dict[str, Constraint] = {}
    if form is not None and form.type != "text":
        given["response_format"] = {"schema": form.form}
    if asked.regex is not None:
        given["dgemma.regex"] = {"regex": asked.regex}
    if asked.grammar is not None:
        given["dgemma.grammar"] = {"grammar": asked.grammar}
    if asked.choices is not None:
        given["dgemma.choices"] = {"choices": asked.choices}
    if len(given) > 1:
        raise ApiError(400, f"{' and '.join(given)} are given; hold the text to one of them")
    return next((make_guide(engine, one, name) for name, one in given.items()), None)


def check_none(asked: Extension) -> None:
    """Refuse constraints where a text has a form of its own."""
    for name in ("regex", "grammar", "choices"):
        if getattr(asked, name) is not None:
            raise ApiError(400, f"dgemma.{name} is refused: it is not for fills", param="dgemma")


def calls_guide(engine: "Engine", body: ChatBody, tools: Sequence["Tool"]) -> "Guide | None":
    """What holds an answer to calls of these tools: a choice that forces one, or a strict tool."""
    choice, named = body.tool_choice, body.named_tool
    called = [tool for tool in tools if named in (None, tool.name)]
    if choice == "none" or (choice == "auto" and not any(tool.strict for tool in tools)):
        return None
    if not called:
        what = "there are no tools" if named is None else f"the tool {named[:60]!r} is not declared"
        raise ApiError(400, f"tool_choice asks for a call, but {what}", param="tool_choice")
    kind = "auto" if choice == "auto" else "required"
    return make_guide(engine, {"tools": called, "tool_choice": kind}, "tools")


def make_guide(engine: "Engine", constraint: "Constraint", param: str) -> "Guide":
    """Compile a constraint; what is too large or cannot be held to is refused by name."""
    size, most = _size(constraint), limits.MAX_CONSTRAINT
    if size > most:
        raise ApiError(
            400, f"{param} has {size} characters; at most {most} can be held to", param=param
        )
    try:
        guide = engine.guide(**constraint)
    except UsageError as error:
        raise ApiError(400, str(error), param=param) from None
    if guide.shortest is None:  # looked for here, once, and not by the engine's thread
        raise ApiError(400, f"no text was found that fits {param} and comes to an end", param=param)
    return guide


def _size(constraint: "Constraint") -> int:
    """Characters of a constraint, written as JSON."""
    tools = [tool.parameters for tool in constraint.get("tools", ())]
    try:
        return len(json.dumps([*tools, *(v for k, v in constraint.items() if k != "tools")]))
    except RecursionError:
        return limits.MAX_CONSTRAINT + 1
