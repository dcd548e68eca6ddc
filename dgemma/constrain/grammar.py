"""Compiles constraints to llguidance grammars: JSON Schema, regex, Lark grammar or choices.

Unsupported constraints are refused by name before any work, such as a keyword, a lookaround, or a
schema that no value fits. An unknown `format` is an annotation and constrains nothing.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from dgemma.constrain.schema_logic import VALUE_KEYWORDS
from dgemma.constrain.schema_rewrite import rewrite_schema
from dgemma.constrain.shortest_completion import lark_literals, regex_literals, schema_literals
from dgemma.constrain.unique_items import strip_unique
from dgemma.constrain.vocabulary import MISSING_LLGUIDANCE
from dgemma.errors import UsageError
from dgemma.text.messages import Tool

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

# Formats that llguidance enforces.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
MAX_NESTING = 200
CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)
SET_SYNTAX = re.compile(r"(\\.)|[\[&~]", re.DOTALL)  # in a character class
EXCERPT = re.compile(r"<state>|\n +\d+ \|")  # internals of llguidance in error messages
# On one line, with or without a space after separators as the model prefers: an unfamiliar format
# costs more than whitespace does. A schema's own "x-guidance" may choose otherwise.
STYLE: "JsonCompileOptions" = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
}
# Raised for schemas whose keywords have values of wrong types.
MALFORMED = (AttributeError, KeyError, RecursionError, TypeError, ValueError)
# No schema may weaken the guarantee.
STRICT: "JsonCompileOptions" = {"lenient": False, "coerce_one_of": False}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A checked constraint in llguidance's format."""

    kind: str  # schema, regex, grammar, choices or tools, as given by the user
    source: str
    literals: tuple[str, ...] = ()  # shortcuts for the completion search
    is_free: bool = False  # the text may end anywhere, so that a token limit may cut it
    unique_items: str = ""  # JSON Schema whose `uniqueItems` is checked outside the grammar


class ConstraintArgs(TypedDict, total=False):
    """Keyword arguments that constrain a text; exactly one is given."""

    schema: Mapping[str, Any] | str | bool
    regex: str
    grammar: str
    choices: Sequence[str]
    tools: Sequence[Tool]  # tools to call: see tool_grammar.py
    tool_choice: str  # with tools: required (default), auto, or the name of a tool


def read_constraint(args: ConstraintArgs) -> Grammar:
    """Return the grammar of a constraint other than tools."""
    readers: Mapping[str, Callable[[Any], Grammar]] = {
        "schema": schema_grammar,
        "regex": regex_grammar,
        "grammar": lark_grammar,
        "choices": choice_grammar,
    }
    present = {name: value for name, value in args.items() if value is not None}
    if len(present) != 1 or not present.keys() <= readers.keys():
        names = " and ".join(present) or "nothing"
        raise UsageError(f"{names} is given; give exactly one of {', '.join(readers)} or tools")
    ((name, value),) = present.items()
    return readers[name](value)


def schema_grammar(schema: Mapping[str, Any] | str | bool) -> Grammar:
    """Constrain to JSON that fits a schema, given as a mapping or as JSON text."""
    schema = _read_schema(schema)
    if schema is False:
        raise UsageError("the schema is false, so no value fits it; give another")
    normal = _normalize({} if schema is True else schema)
    plain, has_unique = strip_unique(normal)
    grammar = _schema_grammar(plain)
    return replace(grammar, unique_items=json.dumps(normal)) if has_unique else grammar


def _schema_grammar(plain: Any) -> Grammar:
    """Compile a schema, rewritten if llguidance lacks one of its keywords."""
    try:
        return _supported_schema(plain)
    except UsageError as error:
        refusal = error
    try:
        rewritten = rewrite_schema(plain)
    except MALFORMED:
        raise refusal from None
    if rewritten == plain:
        raise refusal
    try:
        return _supported_schema(rewritten)
    except UsageError as error:
        raise (refusal if "nsatisfiable" in str(error) else error) from None


def _supported_schema(schema: Any) -> Grammar:
    """Compile a schema that uses only keywords supported by llguidance."""
    try:
        source = _library().grammar_from_json_schema(
            json.dumps(schema), defaults=STYLE, overrides=STRICT
        )
    except ValueError as error:
        raise UsageError(f"the schema cannot be read: {error}") from None
    return _checked("schema", source, schema_literals(schema))


def regex_grammar(regex: str) -> Grammar:
    """Constrain to text that a regular expression matches as a whole."""
    return _checked("regex", _library().grammar_from_regex(regex), regex_literals(regex))


def lark_grammar(grammar: str) -> Grammar:
    """Constrain to the language of a Lark grammar, from its rule `start`."""
    return checked_lark("grammar", grammar)


def choice_grammar(texts: Sequence[str]) -> Grammar:
    """Constrain to one of several texts."""
    if isinstance(texts, str) or not texts or not all(texts):
        raise UsageError(f"the choices are {texts!r}; give a list of texts that are not empty")
    literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
    return checked_lark("choices", f"start: {literals}")


def checked_lark(kind: str, lark: str) -> Grammar:
    """Check a Lark grammar; `kind` names the constraint in refusals."""
    return _checked(kind, _library().grammar_from_lark(lark), lark_literals(lark))


def _checked(kind: str, source: str, literals: tuple[str, ...]) -> Grammar:
    error = _library().validate_grammar(source)
    if error:
        refuse(kind, error)
    return Grammar(kind, source, literals)


def refuse(kind: str, error: str) -> NoReturn:
    """Raise a UsageError with llguidance's message, without its inner state."""
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


def _normalize(schema: Any, depth: int = 0) -> Any:
    """Remove formats unknown to llguidance, and rewrite patterns in its dialect.

    Unknown formats are annotations. Covers the whole schema, since a reference may point anywhere.
    A property named format or pattern holds a schema, not a string, and stays.
    """
    if depth > MAX_NESTING:
        raise UsageError(f"the schema nests deeper than {MAX_NESTING} levels; flatten it")
    if isinstance(schema, list):
        return [_normalize(item, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    normal: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            normal[key] = _rust_pattern(value)
        elif key == "patternProperties" and isinstance(value, Mapping):
            by_pattern = {_rust_pattern(name): inner for name, inner in value.items()}
            normal[key] = _normalize(by_pattern, depth + 1)
        elif key in VALUE_KEYWORDS:
            normal[key] = value
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            normal[key] = _normalize(value, depth + 1)
    return normal


def _rust_pattern(pattern: str) -> str:
    """Escape characters that open nested sets in Rust's character classes, but not in ECMA's."""

    def escape(match: re.Match[str]) -> str:
        text = match[0]
        if not text.startswith("["):
            return text
        return "[" + SET_SYNTAX.sub(lambda m: m[0] if m[1] else "\\" + m[0], text[1:])

    return CLASS_OR_ESCAPE.sub(escape, pattern)


def _library() -> "type[LLMatcher]":
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise UsageError(MISSING_LLGUIDANCE) from None
    return LLMatcher
