"""Tool calls as a grammar: the released syntax, by token id, with arguments that fit their schemas.

    <|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>

Strings stand between control ids and need no escapes; keys stand bare, sorted as the template sorts
them. What a call may hold is a part of what its schema allows, never more: properties that are not
declared are left out, and schemas that refer to themselves are followed a few levels deep. What
cannot be held to is refused by name. A `format` is an annotation.

Numbers are written without exponents, with at most 15 digits before and behind the point, so that
every number can be read.
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NoReturn

from dgemma.constrain.grammar import Constraint, Grammar, checked_lark, read_constraint
from dgemma.errors import UsageError
from dgemma.text.messages import Tool
from dgemma.text.tokenizer import Tokenizer

OPENS, CLOSES, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
OTHERS = frozenset({"schema", "regex", "grammar", "choices"})
MAX_DEPTH = 12  # levels of arguments; what refers to itself must end somewhere
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly $comment $schema $id "
    "id $defs definitions nullable strict".split()
)
COMMON = frozenset("type enum const anyOf oneOf allOf $ref format".split())
KEYWORDS = {
    "string": frozenset("minLength maxLength pattern".split()),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset("items minItems maxItems".split()),
    "object": frozenset("properties required additionalProperties".split()),
}
KNOWN = ANNOTATIONS | COMMON | frozenset[str]().union(*KEYWORDS.values())
INTEGER = r"/-?(0|[1-9][0-9]{0,14})/"
NUMBER = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?/"
BARE_KEY = re.compile(r"[^\s:,{}\[\]\\\"']+")


def grammar_of(constraint: Constraint, tokenizer: Tokenizer) -> Grammar:
    """The grammar of whichever constraint is given, tools among them."""
    tools, choice = constraint.get("tools"), constraint.get("tool_choice")
    others = [name for name, value in constraint.items() if value is not None and name in OTHERS]
    if tools is None and choice is None:
        return read_constraint(constraint)
    if tools is None or others:
        given = " and ".join([*others, "tool_choice" if tools is None else "tools"])
        raise UsageError(f"{given} is given; a tool_choice needs tools, and tools stand alone")
    return calls_grammar(tools, tokenizer, "required" if choice is None else choice)


def calls_grammar(tools: Sequence[Tool], tokenizer: Tokenizer, choice: str = "required") -> Grammar:
    """One call of one of these tools, or of the one named; `auto`: text, then calls, or neither."""
    if not tools:
        raise UsageError("there are no tools to call; declare at least one")
    names = [tool.name for tool in tools]
    if choice not in ("auto", "required", *names):
        raise UsageError(
            f"tool_choice is {choice!r}; it must be auto, required or one of {', '.join(names)}"
        )
    writer = _Writer(tokenizer)
    calls = " | ".join(
        writer.call(tool) for tool in tools if choice in ("auto", "required", tool.name)
    )
    start = f"TEXT? ({calls})*" if choice == "auto" else calls
    lark = "\n".join([f"start: {start}", *writer.rules, "TEXT: /(?s:.+)/", ""])
    return replace(checked_lark("tools", lark), is_free=choice == "auto")


class _Writer:
    """Writes the rules of a grammar; a rule that is None cannot be met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = [n for n in (OPENS, CLOSES, QUOTE) if n not in tokenizer.control_ids]
        if missing:
            raise UsageError(f"this tokenizer has no {missing[0]}, so tools cannot be called")
        ids = {name: f"<[{tokenizer.control_ids[name]}]>" for name in (OPENS, CLOSES, QUOTE)}
        self.opens, self.closes, self.quote = ids[OPENS], ids[CLOSES], ids[QUOTE]
        self.rules: list[str] = []
        self._root: Mapping[str, Any] = {}
        self._where = ""
        self._known: dict[tuple[str, str, int], str | None] = {}

    def call(self, tool: Tool) -> str:
        self._root, self._where = tool.parameters, f"tool {tool.name}"
        schema = {"type": "object", **tool.parameters}
        self._check(schema, "")
        for key in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const"):
            if key in schema:
                self._refuse("", f"{key} at the top of its parameters; declare properties there")
        if str(schema["type"]).lower() != "object":
            self._refuse("", f"its parameters are of type {schema['type']!r}; they are an object")
        arguments = self._object(schema, "", 0)
        if arguments is None:
            self._refuse("", "nothing fits its parameters")
        head = json.dumps(f"call:{tool.name}")
        return self._rule(f"{self.opens} {head} {arguments} {self.closes}")

    def _value(self, schema: Any, path: str, depth: int) -> str | None:
        """What stands for a value that fits a schema, as a part of a rule."""
        if depth > MAX_DEPTH or schema is False:
            return None
        if schema is True or schema == {}:
            schema = {"type": list(TYPES[:5])}  # anything: whatever is not made of other values
        if not isinstance(schema, Mapping):
            self._refuse(path, f"{schema!r:.40} is no schema")
        self._check(schema, path)
        if "$ref" in schema:
            return self._reference(schema["$ref"], path, depth)
        if "enum" in schema or "const" in schema:
            return self._one_of(schema, path)
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self._combined(key, schema, path, depth)
        return self._typed(schema, path, depth)

    def _typed(self, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        given = schema.get("type")
        kinds = [given] if isinstance(given, str) else given
        if kinds is None:
            kinds = [kind for kind in TYPES if KEYWORDS[kind] & schema.keys()] or list(TYPES[:5])
        kinds = [str(kind).lower() for kind in kinds]
        unknown = [kind for kind in kinds if kind not in TYPES]
        if unknown:
            self._refuse(path, f"the type {unknown[0]!r} is not known")
        if schema.get("nullable") is True:
            kinds.append("null")
        parts = [self._kind(kind, schema, path, depth) for kind in dict.fromkeys(kinds)]
        return self._either(parts)

    def _kind(self, kind: str, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        match kind:
            case "string":
                return self._string(schema, path)
            case "integer" | "number":
                return self._number(kind, schema)
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema, path, depth)
        return self._object(schema, path, depth)

    def _string(self, schema: Mapping[str, Any], path: str) -> str:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        terms = [f"/(?s:.{{{low},{high}}})/"] if low or high != "" else []
        if "pattern" in schema:
            terms.append(self._pattern(schema["pattern"], path))
        name = self._terminal(" & ".join(terms) or "/(?s:.*)/")
        return f"({self.quote} {name} {self.quote})"

    def _number(self, kind: str, schema: Mapping[str, Any]) -> str:
        bounds = {key: schema[key] for key in KEYWORDS[kind] if key in schema}
        if not bounds:
            return self._terminal(INTEGER if kind == "integer" else NUMBER)
        return self._rule(f"%json {json.dumps({'type': kind, **bounds})}")

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        item = self._value(schema.get("items", True), f"{path}[]", depth + 1)
        if item is None or high == 0:
            return '"[]"' if low == 0 else None
        most = "" if high is None else high - 1
        more = f'("," {item}){{{max(low - 1, 0)},{most}}} ' if most != 0 else ""
        several = f'"[" {item} {more}"]"'
        return self._rule(several if low else f'"[]" | {several}')

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if depth and not properties:
            self._refuse(path, "an object with no declared properties has no known keys")
        undeclared = [key for key in required if key not in properties]
        if undeclared:
            self._refuse(path, f"the required property {undeclared[0]!r} is not declared")
        fields: list[tuple[str, bool]] = []
        for key in sorted(properties, key=str.lower):  # as the template's dictsort does
            value = self._value(properties[key], f"{path}.{key}", depth + 1)
            if value is not None:
                fields.append((f"{self._key(key)} {value}", key in required))
            elif key in required:
                return None
        return self._rule(f'"{{" {self._fields(fields)} "}}"')

    def _fields(self, fields: Sequence[tuple[str, bool]]) -> str:
        """Fields in their order, commas between those that are there."""
        rest, rest_after = "", ""  # what may follow nothing so far, and what may follow a field
        for field, is_required in reversed(fields):
            here = self._rule(field)
            start, after = f"{here} {rest_after}", f'"," {here} {rest_after}'
            skip, skip_after = rest, rest_after
            if is_required:
                rest, rest_after = self._rule(start), self._rule(after)
            elif skip_after:
                rest = self._rule(f"{start} | {skip}" if skip else f"({start})?")
                rest_after = self._rule(f"{after} | {skip_after}")
            else:
                rest, rest_after = self._rule(f"({start})?"), self._rule(f"({after})?")
        return rest

    def _key(self, key: str) -> str:
        if BARE_KEY.fullmatch(key):
            return json.dumps(f"{key}:", ensure_ascii=False)
        text = f"{json.dumps(key, ensure_ascii=False)} " if key else ""
        return f'{self.quote} {text}{self.quote} ":"'

    def _one_of(self, schema: Mapping[str, Any], path: str) -> str | None:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        kinds = schema.get("type")
        allowed = [kinds] if isinstance(kinds, str) else kinds
        fitting = [v for v in values if allowed is None or _kinds_of(v) & set(allowed)]
        return self._either([self._literal(value, path) for value in fitting])

    def _literal(self, value: object, path: str) -> str:
        if isinstance(value, str):
            text = f"{json.dumps(value, ensure_ascii=False)} " if value else ""
            return f"({self.quote} {text}{self.quote})"
        if isinstance(value, bool | int | None):
            return f'"{json.dumps(value)}"'
        if isinstance(value, float) and "e" not in json.dumps(value) and value == value:
            return f'"{json.dumps(value)}"'
        self._refuse(path, f"the fixed value {value!r:.40} is not a string, number or word")

    def _combined(self, key: str, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        beside = schema.keys() - ANNOTATIONS - {key, "type"}
        if beside:
            self._refuse(path, f"{key} beside {sorted(beside)[0]!r}")
        options = schema[key]
        if key == "allOf" and len(options) != 1:
            self._refuse(path, "allOf of several schemas")
        if key == "oneOf" and not _are_apart(options):
            self._refuse(path, "oneOf of schemas that may overlap; use anyOf")
        return self._either([self._value(one, f"{path}/{key}", depth) for one in options])

    def _reference(self, target: object, path: str, depth: int) -> str | None:
        """A rule for each schema referred to, at each depth: so whatever recurs comes to an end."""
        if not isinstance(target, str) or not target.startswith("#"):
            self._refuse(path, f"the reference {target!r}; only those within the schema are known")
        key = (self._where, target, depth)
        if key not in self._known:
            found: Any = self._root
            for part in filter(None, target[1:].split("/")):
                name = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(found, Mapping) or name not in found:
                    self._refuse(path, f"the reference {target!r} leads nowhere")
                found = found[name]
            self._known[key] = self._value(found, path, depth + 1)
        return self._known[key]

    def _check(self, schema: Mapping[str, Any], path: str) -> None:
        unknown = sorted(schema.keys() - KNOWN)
        if unknown:
            self._refuse(path, f"the keyword {unknown[0]!r} is not supported in tool calls")

    def _either(self, parts: Sequence[str | None]) -> str | None:
        possible = [part for part in parts if part is not None]
        return self._rule(" | ".join(dict.fromkeys(possible))) if possible else None

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _pattern(self, pattern: object, path: str) -> str:
        """A pattern that may stand anywhere in a string, as one that stands for all of it.

        Of alternatives with anchors, `^a|b$`, only the texts that are a or b as a whole are left.
        """
        from llguidance import regex_to_lark

        inner = str(pattern)
        begins, ends = inner.startswith("^"), inner.endswith("$") and not inner.endswith("\\$")
        inner = inner[begins : len(inner) - ends]
        if not _is_plain(inner):
            self._refuse(path, f"the pattern {pattern!r:.60} is not supported in tool calls")
        whole = ("" if begins else "(?s:.*)") + f"({inner})" + ("" if ends else "(?s:.*)")
        return f"/{regex_to_lark(whole, use_ascii='dw')}/"

    def _refuse(self, path: str, what: str) -> NoReturn:
        raise UsageError(f"{self._where}{path}: {what}")


def _is_plain(pattern: str) -> bool:
    """Whether a regular expression can be read, and holds no anchors or lookarounds."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return not re.search(r"\bAT\b|ASSERT|GROUPREF", repr(list(parsed)))


def _kinds_of(value: object) -> set[str]:
    """The types of JSON Schema that a value is of."""
    match value:
        case bool():
            return {"boolean"}
        case None:
            return {"null"}
        case str():
            return {"string"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case list():
            return {"array"}
    return {"object"}


def _are_apart(schemas: Sequence[Any]) -> bool:
    """Whether no value can fit two of these schemas, as far as their types and values tell."""
    reaches = [_reach(schema) for schema in schemas]
    return all(
        not (one.values & other.values if one.values and other.values else one.kinds & other.kinds)
        for index, one in enumerate(reaches)
        for other in reaches[:index]
    )


@dataclass(frozen=True, slots=True)
class _Reach:
    """What a schema may allow at most: values of some types, or, if given, only these values."""

    kinds: frozenset[str]
    values: frozenset[str] = frozenset()


def _reach(schema: Any) -> _Reach:
    if not isinstance(schema, Mapping):
        return _Reach(frozenset(TYPES))
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if values:
        kinds = frozenset[str]().union(*map(_kinds_of, values))
        return _Reach(kinds, frozenset(map(json.dumps, values)))
    given = schema.get("type", TYPES)
    kinds = frozenset([given] if isinstance(given, str) else given)
    return _Reach(kinds | {"integer"} if "number" in kinds else kinds)
