"""Tracks `uniqueItems` byte by byte while JSON is written: a grammar cannot compare items.

At each position the schema nodes that may apply are known. If one of them has `uniqueItems`, the
array's items are compared when they end, and a repeated item is a violation. If only some of the
nodes have it, the array is kept unique too, so the text fits every node. Keys of objects with
`minProperties` are compared as well: a grammar counts a repeated key twice.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dgemma.constrain.schema_logic import VALUE_KEYWORDS, follow

UNIQUE = "uniqueItems"
NESTED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else")
DEPENDENT = ("dependencies", "dependentSchemas")
SPACE = b" \t\r\n"
Nodes = tuple[Mapping[str, Any], ...]


def strip_unique(schema: Any) -> tuple[Any, bool]:
    """Return a schema without `uniqueItems`, and whether items or keys must be compared."""
    if isinstance(schema, list):
        pairs = [strip_unique(item) for item in schema]
        return [item for item, _ in pairs], any(unique for _, unique in pairs)
    if not isinstance(schema, Mapping):
        return schema, False
    stripped, has_unique = {}, _is_unique(schema, True) or _is_unique(schema, False)
    for key, value in schema.items():
        if key == UNIQUE and isinstance(value, bool):
            continue
        stripped[key], is_inside = (value, False) if key in VALUE_KEYWORDS else strip_unique(value)
        has_unique |= is_inside
    return stripped, has_unique


@dataclass(frozen=True, slots=True)
class _Frame:
    """An open array or object."""

    nodes: Nodes
    is_array: bool
    is_unique: bool = False  # items or keys are compared
    item_start: int | None = None  # start of the current item or value
    index: int = 0
    key: str | None = None  # None: a key comes next
    seen: frozenset[Any] = field(default=frozenset())


@dataclass(frozen=True, slots=True)
class UniqueState:
    """The state after some bytes of a text. Immutable, so that searches may branch."""

    schema: "UniqueItems"
    text: bytes = b""
    frames: tuple[_Frame, ...] = ()
    string_start: int | None = None
    is_escaped: bool = False
    is_violated: bool = False

    @property
    def open_items(self) -> tuple[Any, ...]:
        """The items of the open unique arrays, and the unfinished ones."""
        frames = [frame for frame in self.frames if frame.is_unique]
        return tuple((frame.seen, self.text[frame.item_start or 0 :]) for frame in frames)

    def feed(self, data: bytes) -> "UniqueState":
        """Return the state after more bytes."""
        state = self
        for byte in data:
            if state.is_violated:
                break
            state = state._next(byte)
        return state

    def _next(self, byte: int) -> "UniqueState":
        position, char = len(self.text), bytes((byte,))
        state = replace(self, text=self.text + char)
        if self.string_start is not None:
            return state._in_string(byte)
        if char in SPACE:
            return state
        if char == b",":
            return state._end_item(position, is_last=False)
        if char in b"]}":
            return state._end_item(position, is_last=True)
        if char == b":":
            return state
        state = state._begin_value(position)
        if char == b'"':
            return replace(state, string_start=position)
        if char in b"[{":
            nodes = state._value_nodes()
            is_unique = any(_is_unique(node, char == b"[") for node in nodes)
            frame = _Frame(nodes, char == b"[", is_unique)
            return replace(state, frames=(*state.frames, frame))
        return state

    def _in_string(self, byte: int) -> "UniqueState":
        if self.is_escaped:
            return replace(self, is_escaped=False)
        if byte == ord("\\"):
            return replace(self, is_escaped=True)
        if byte != ord('"'):
            return self
        state = replace(self, string_start=None)
        frame = self.frames[-1] if self.frames else None
        if frame is None or frame.is_array or frame.key is not None:
            return state
        key = json.loads(self.text[self.string_start :])
        if frame.is_unique and key in frame.seen:
            return replace(state, is_violated=True)
        return state._with(replace(frame, key=key, item_start=None, seen=frame.seen | {key}))

    def _begin_value(self, position: int) -> "UniqueState":
        frame = self.frames[-1] if self.frames else None
        if frame is None or frame.item_start is not None:
            return self
        return self._with(replace(frame, item_start=position))

    def _value_nodes(self) -> Nodes:
        """Return the schema nodes of the value that begins here."""
        if not self.frames:
            return self.schema.root
        frame = self.frames[-1]
        if frame.is_array:
            return self.schema.items(frame.nodes, frame.index)
        return self.schema.properties(frame.nodes, frame.key or "")

    def _end_item(self, position: int, *, is_last: bool) -> "UniqueState":
        frame, state = self.frames[-1], self
        if frame.is_unique and frame.is_array and frame.item_start is not None:
            key = _key(_parse(self.text[frame.item_start : position]))
            if key in frame.seen:
                return replace(self, is_violated=True)
            frame = replace(frame, seen=frame.seen | {key})
        if is_last:
            return replace(state, frames=self.frames[:-1])
        return state._with(replace(frame, item_start=None, index=frame.index + 1, key=None))

    def _with(self, frame: _Frame) -> "UniqueState":
        return replace(self, frames=(*self.frames[:-1], frame))


class UniqueItems:
    """The schema nodes that apply at each position of a JSON text."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.document = schema
        self.root = self._closure((schema,))

    def start(self) -> UniqueState:
        return UniqueState(self)

    def items(self, nodes: Nodes, index: int) -> Nodes:
        children: list[Any] = []
        for node in nodes:
            for keyword in ("prefixItems", "items", "additionalItems", "contains"):
                value = node.get(keyword)
                children += value[index : index + 1] if isinstance(value, list) else [value]
        return self._closure(tuple(children))

    def properties(self, nodes: Nodes, name: str) -> Nodes:
        children: list[Any] = []
        for node in nodes:
            children += [_mapping(node, "properties").get(name), node.get("additionalProperties")]
            patterns = _mapping(node, "patternProperties").items()
            children += [child for pattern, child in patterns if _may_match(pattern, name)]
        return self._closure(tuple(children))

    def _closure(self, schemas: tuple[Any, ...]) -> Nodes:
        """Return all nodes that may apply to a value with these schemas."""
        nodes: dict[int, Mapping[str, Any]] = {}
        waiting = list(schemas)
        while waiting:
            schema = waiting.pop()
            if isinstance(schema, Mapping) and id(schema) not in nodes:
                nodes[id(schema)] = schema
                waiting += self._nested(schema)
        return tuple(nodes.values())

    def _nested(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        for keyword in NESTED:
            value = schema.get(keyword)
            if keyword == "$ref" and value is not None:
                yield self._resolve(value)
            elif isinstance(value, list):
                yield from value
            else:
                yield value
        for keyword in DEPENDENT:
            yield from _mapping(schema, keyword).values()

    def _resolve(self, target: object) -> Any:
        """Return the target of a reference; an unresolvable one makes all arrays unique."""
        schema = follow(self.document, target)
        return EVERYWHERE if schema is None else schema


EVERYWHERE: dict[str, Any] = {UNIQUE: True}
EVERYWHERE |= {"items": EVERYWHERE, "additionalProperties": EVERYWHERE}


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _is_unique(schema: Mapping[str, Any], is_array: bool) -> bool:
    least = schema.get("minProperties")
    return schema.get(UNIQUE) is True if is_array else isinstance(least, int) and least > 1


def _may_match(pattern: str, name: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.search(pattern, name) is not None
    except re.error:
        return True


def _parse(item: bytes) -> Any:
    try:
        return json.loads(item)
    except ValueError:  # more digits than Python converts
        return item.decode("utf-8", "replace")


def _key(value: Any) -> Any:
    """Return a hashable key, equal for values that JSON Schema calls equal."""
    if isinstance(value, bool) or value is None:
        return value, "literal"
    if isinstance(value, list):
        return tuple(map(_key, value)), "array"
    if isinstance(value, dict):
        return frozenset((name, _key(inner)) for name, inner in value.items()), "object"
    return value, "string" if isinstance(value, str) else "number"
