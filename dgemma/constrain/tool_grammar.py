"""Grammar of tool calls: the released syntax, by token id, with arguments that fit their schemas.

    <|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>

Strings are enclosed in control ids and need no escapes; keys are bare, in the template's order. The
grammar allows a subset of what a schema allows, never more: undeclared properties are left out, and
recursive schemas are expanded a few levels deep. Unsupported keywords are refused by name. A
`format` is an annotation.

Numbers have no exponents and at most 15 digits before and after the point, so that every number can
be parsed.
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NoReturn

from dgemma.constrain.grammar import ConstraintArgs, Grammar, checked_lark, read_constraint
from dgemma.errors import UsageError
from dgemma.text.control_tokens import STRING_QUOTE, TOOL_CALL, TOOL_CALL_END
from dgemma.text.messages import Tool
from dgemma.text.tokenizer import Tokenizer

MAX_DEPTH = 12  # levels of arguments; recursive schemas end here
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


def grammar_of(args: ConstraintArgs, tokenizer: Tokenizer) -> Grammar:
    """Return the grammar of a constraint, including tools."""
    present: dict[str, Any] = {n: value for n, value in args.items() if value is not None}
    others = [name for name in present if name not in ("tools", "tool_choice")]
    if len(others) == len(present):
        return read_constraint(args)
    if "tools" not in present or others:
        names = " and ".join([*others, "tools" if "tools" in present else "tool_choice"])
        raise UsageError(f"{names} is given; a tool_choice needs tools, and tools stand alone")
    return call_grammar(args["tools"], tokenizer, present.get("tool_choice", "required"))


def call_grammar(tools: Sequence[Tool], tokenizer: Tokenizer, choice: str = "required") -> Grammar:
    """Constrain to one call of any tool or of the named one; `auto`: text, then optional calls."""
    if not tools:
        raise UsageError("there are no tools to call; declare at least one")
    names = [tool.name for tool in tools]
    if choice not in ("auto", "required", *names):
        raise UsageError(
            f"tool_choice is {choice!r}; it must be auto, required or one of {', '.join(names)}"
        )
    writer = _GrammarWriter(tokenizer)
    calls = " | ".join(
        writer.call(tool) for tool in tools if choice in ("auto", "required", tool.name)
    )
    start = f"TEXT? ({calls})*" if choice == "auto" else calls
    lark = "\n".join([f"start: {start}", *writer.rules, "TEXT: /(?s:.+)/", ""])
    return replace(checked_lark("tools", lark), is_free=choice == "auto")


class _GrammarWriter:
    """Writes the rules of a grammar; a rule of None cannot be matched."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        names, ids = (TOOL_CALL, TOOL_CALL_END, STRING_QUOTE), tokenizer.control_ids
        missing = [name for name in names if name not in ids]
        if missing:
            raise UsageError(f"this tokenizer has no {missing[0]}, so tools cannot be called")
        self.opens, self.closes, self.quote = (f"<[{ids[name]}]>" for name in names)
        self.rules: list[str] = []
        self._root: Mapping[str, Any] = {}
        self._where = ""
        self._references: dict[tuple[str, str, int], str | None] = {}

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
        """Return the rule of a value that fits a schema."""
        if depth > MAX_DEPTH or schema is False:
            return None
        if schema is True or schema == {}:
            schema = {"type": list(TYPES[:5])}  # anything: all types but arrays and objects
        if not isinstance(schema, Mapping):
            self._refuse(path, f"{schema!r:.40} is not a schema")
        self._check(schema, path)
        if "$ref" in schema:
            return self._reference(schema["$ref"], path, depth)
        if "enum" in schema or "const" in schema:
            return self._enum(schema, path)
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self._combined(key, schema, path, depth)
        return self._typed(schema, path, depth)

    def _typed(self, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        types = _as_list(schema.get("type"))
        if types is None:
            types = [name for name in TYPES if KEYWORDS[name] & schema.keys()] or list(TYPES[:5])
        types = [str(name).lower() for name in types]
        unknown = [name for name in types if name not in TYPES]
        if unknown:
            self._refuse(path, f"the type {unknown[0]!r} is not known")
        if schema.get("nullable") is True:
            types.append("null")
        return self._either([self._type(n, schema, path, depth) for n in dict.fromkeys(types)])

    def _type(self, name: str, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        match name:
            case "string":
                return self._string(schema, path)
            case "integer" | "number":
                return self._number(name, schema)
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

    def _number(self, name: str, schema: Mapping[str, Any]) -> str:
        bounds = {key: schema[key] for key in KEYWORDS[name] if key in schema}
        if not bounds:
            return self._terminal(INTEGER if name == "integer" else NUMBER)
        return self._rule(f"%json {json.dumps({'type': name, **bounds})}")

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        item = self._value(schema.get("items", True), f"{path}[]", depth + 1)
        if item is None or high == 0:
            return '"[]"' if low == 0 else None
        max_more = "" if high is None else high - 1
        more = f'("," {item}){{{max(low - 1, 0)},{max_more}}} ' if max_more != 0 else ""
        items = f'"[" {item} {more}"]"'
        return self._rule(items if low else f'"[]" | {items}')

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
        """Return the rule of these fields in their order, with commas between those present."""
        rest, rest_after = "", ""  # the later fields, after none or some earlier fields
        for field, is_required in reversed(fields):
            rule = self._rule(field)
            start, after = f"{rule} {rest_after}", f'"," {rule} {rest_after}'
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

    def _enum(self, schema: Mapping[str, Any], path: str) -> str | None:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        types = _as_list(schema.get("type"))
        fitting = [v for v in values if types is None or types_of(v) & set(types)]
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
        others = schema.keys() - ANNOTATIONS - {key, "type"}
        if others:
            self._refuse(path, f"{key} beside {sorted(others)[0]!r}")
        options = schema[key]
        if key == "allOf" and len(options) != 1:
            self._refuse(path, "allOf of several schemas")
        if key == "oneOf" and not _are_disjoint(options):
            self._refuse(path, "oneOf of schemas that may overlap; use anyOf")
        return self._either([self._value(option, f"{path}/{key}", depth) for option in options])

    def _reference(self, target: object, path: str, depth: int) -> str | None:
        """Return a rule for each referenced schema at each depth, so that recursion ends."""
        if not isinstance(target, str) or not target.startswith("#"):
            self._refuse(path, f"the reference {target!r}; only those within the schema are known")
        key = (self._where, target, depth)
        if key not in self._references:
            schema: Any = self._root
            for segment in filter(None, target[1:].split("/")):
                name = segment.replace("~1", "/").replace("~0", "~")
                if not isinstance(schema, Mapping) or name not in schema:
                    self._refuse(path, f"the reference {target!r} leads nowhere")
                schema = schema[name]
            self._references[key] = self._value(schema, path, depth + 1)
        return self._references[key]

    def _check(self, schema: Mapping[str, Any], path: str) -> None:
        unknown = sorted(schema.keys() - KNOWN)
        if unknown:
            self._refuse(path, f"the keyword {unknown[0]!r} is not supported in tool calls")

    def _either(self, rules: Sequence[str | None]) -> str | None:
        possible = [rule for rule in rules if rule is not None]
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
        """Turn a pattern that may match anywhere in a string into one that matches all of it.

        Anchored alternatives, `^a|b$`, keep only the texts that are a or b as a whole.
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
    """Return True if a regex can be parsed and has no anchors, lookarounds or backreferences."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return not re.search(r"\bAT\b|ASSERT|GROUPREF", repr(list(parsed)))


def _as_list(names: Any) -> Any:
    return [names] if isinstance(names, str) else names


def types_of(value: object) -> set[str]:
    """Return the JSON Schema types of a value."""
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


def _are_disjoint(schemas: Sequence[Any]) -> bool:
    """Return True if types and fixed values show that no value fits two of these schemas."""
    sets = [_value_set(schema) for schema in schemas]
    return all(
        not (a.values & b.values if a.values and b.values else a.types & b.types)
        for index, a in enumerate(sets)
        for b in sets[:index]
    )


@dataclass(frozen=True, slots=True)
class _ValueSet:
    """A superset of what a schema allows: values of some types, or, if given, only these values."""

    types: frozenset[str]
    values: frozenset[str] = frozenset()


def _value_set(schema: Any) -> _ValueSet:
    if not isinstance(schema, Mapping):
        return _ValueSet(frozenset(TYPES))
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if values:
        types = frozenset[str]().union(*map(types_of, values))
        return _ValueSet(types, frozenset(map(json.dumps, values)))
    types = frozenset(_as_list(schema.get("type", TYPES)))
    return _ValueSet(types | {"integer"} if "number" in types else types)
