"""What a text must look like, in llguidance's form: JSON Schema, regex, Lark grammar or choices.

What llguidance cannot hold to is refused here by name, before any work: an unsupported keyword, a
lookaround, a schema nothing fits. An unknown `format` is an annotation and narrows nothing.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from dgemma.constrain.snippets import of_lark, of_regex, of_schema
from dgemma.errors import UsageError
from dgemma.text.messages import Tool

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

# The formats llguidance enforces.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
# Keywords whose values are not schemas, whatever they look like.
VALUES = frozenset("const default enum examples".split())
MAX_NESTING = 200
EXCERPT = re.compile(r"<state>|\n +\d+ \|")  # inner state and lines of source in error messages
# Short, on one line, and with or without a space as the model likes: a form it has not learnt costs
# it more than whitespace does. A schema's own "x-guidance" may choose otherwise.
STYLE: "JsonCompileOptions" = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
}
# No schema may ask for less than what is promised.
STRICT: "JsonCompileOptions" = {"lenient": False, "coerce_one_of": False}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint, checked and in llguidance's form."""

    kind: str  # schema, regex, grammar, choices or tools: what a person gave
    source: str
    snippets: tuple[str, ...] = ()  # texts that help to find an end
    is_free: bool = False  # it may end anywhere, so that a limit cuts it and does not end it


class Constraint(TypedDict, total=False):
    """The ways to say what a text must look like; exactly one is given."""

    schema: Mapping[str, Any] | str | bool
    regex: str
    grammar: str
    choices: Sequence[str]
    tools: Sequence[Tool]  # calls of these: see calls.py
    tool_choice: str  # beside tools: required (the default), auto, or the name of one


def read_constraint(constraint: Constraint) -> Grammar:
    """The grammar of whichever constraint is given, tools aside."""
    readers: Mapping[str, Callable[[Any], Grammar]] = {
        "schema": schema_grammar,
        "regex": regex_grammar,
        "grammar": lark_grammar,
        "choices": choices_grammar,
    }
    given = [(name, value) for name, value in constraint.items() if value is not None]
    if len(given) != 1 or given[0][0] not in readers:
        names = " and ".join(name for name, _ in given) or "nothing"
        raise UsageError(f"{names} is given; hold a text to one of {', '.join(readers)} or tools")
    name, value = given[0]
    return readers[name](value)


def schema_grammar(schema: Mapping[str, Any] | str | bool) -> Grammar:
    """JSON that fits a schema, given as such or as its text."""
    schema = _read_schema(schema)
    if schema is False:
        raise UsageError("the schema is false, which nothing fits; give one that something fits")
    plain = _annotate({} if schema is True else schema)
    matcher = _library()
    try:
        source = matcher.grammar_from_json_schema(
            json.dumps(plain),
            defaults=STYLE,
            overrides=STRICT,
        )
    except ValueError as error:
        raise UsageError(f"the schema cannot be read: {error}") from None
    return _checked("schema", source, of_schema(plain))


def regex_grammar(regex: str) -> Grammar:
    """Text that a regular expression matches as a whole."""
    return _checked("regex", _library().grammar_from_regex(regex), of_regex(regex))


def lark_grammar(grammar: str) -> Grammar:
    """Text of a context-free grammar in Lark's notation, from its rule `start`."""
    return _checked("grammar", _library().grammar_from_lark(grammar), of_lark(grammar))


def choices_grammar(choices: Sequence[str]) -> Grammar:
    """One of a few texts."""
    if isinstance(choices, str) or not choices or not all(choices):
        raise UsageError(f"the choices are {choices!r}; give a list of texts that are not empty")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return checked_lark("choices", f"start: {texts}")


def checked_lark(kind: str, lark: str) -> Grammar:
    """A Lark grammar of our own making, for a constraint that is not called one."""
    return _checked(kind, _library().grammar_from_lark(lark), of_lark(lark))


def _checked(kind: str, source: str, snippets: tuple[str, ...]) -> Grammar:
    error = _library().validate_grammar(source)
    if error:
        refuse(kind, error)
    return Grammar(kind, source, snippets)


def refuse(kind: str, error: str) -> NoReturn:
    """Say what of a constraint is not possible, in llguidance's words without its inner state."""
    words = " ".join(EXCERPT.split(error)[0].split())
    if words.startswith("NoExtension"):
        words = "no text fits it"
    if words.startswith("oneOf constraints"):
        words = "its oneOf has branches that a value may fit together; use anyOf"
    raise UsageError(f"the {kind} cannot be held to: {words[:300]}")


def _read_schema(schema: Mapping[str, Any] | str | bool) -> Any:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"the schema is {schema!r:.60}; a JSON Schema is an object")
    return schema


def _annotate(schema: Any, depth: int = 0) -> Any:
    """A schema without the formats llguidance does not know: they are annotations.

    A reference may lead to anywhere in a schema, so all of it is looked at. A property that is
    called format has a schema, not a name, and stays.
    """
    if depth > MAX_NESTING:
        raise UsageError(f"the schema nests deeper than {MAX_NESTING} levels; flatten it")
    if isinstance(schema, list):
        return [_annotate(one, depth + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in VALUES else _annotate(value, depth + 1)
        for key, value in schema.items()
        if key != "format" or not isinstance(value, str) or value in FORMATS
    }


def _library() -> "type[LLMatcher]":
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise UsageError(
            "constraints need the package llguidance, which is not installed; "
            "run pip install llguidance"
        ) from None
    return LLMatcher
