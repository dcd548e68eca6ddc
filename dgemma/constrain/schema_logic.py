"""Negation and disjointness of JSON Schemas, as far as JSON Schema can express them.

A negation is a list of schemas, none of which shares a value with the original; together they need
not cover the whole complement. A conflict is a proof that no value fits all given schemas; without
a proof they may still be disjoint. Keywords that an older draft ignores are not used.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

Schema = Any  # a mapping or a bool
TYPES = ("string", "number", "boolean", "null", "array", "object")  # number: integers too
VALUE_KEYWORDS = frozenset("const default enum examples".split())  # never hold schemas
MAX_DEPTH = 8  # of negations and of references in a proof
MAX_NEGATIONS, MAX_INNER_NEGATIONS = 24, 6  # alternatives of a schema, of one inside it
MAX_PROOF_STEPS = 2_000  # negations and conflicts looked at for one keyword
MAX_EXCLUDED = 600  # characters of strings that a pattern excludes


class SchemaLogic:
    """Negation and conflicts of schemas within one root schema."""

    def __init__(self, root: Schema) -> None:
        self.root, self.proof_steps = root, 0
        declared = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
        # Older drafts ignore newer keywords, so that these must not be negated.
        self._has_const = not any(f"draft-0{n}" in declared for n in (3, 4))
        self._can_negate = "draft-03" not in declared
        is_older = any(f"draft-0{n}" in declared for n in (3, 4, 6, 7))
        self.prefix_items = "items" if is_older else "prefixItems"
        # A nested `$id` changes the base of references below it.
        nested = (node for node in objects(root) if node is not root)
        self._has_one_base = not any(_has_id(node) for node in nested)

    def negate(self, schema: Schema, names: Sequence[str] = ()) -> list[Schema]:
        """Return schemas that share no value with `schema`.

        `names` are properties that an object may have: a property that `schema` forbids excludes
        it.
        """
        return list(islice(self._negations(schema, names, 0), MAX_NEGATIONS))

    def _negations(self, schema: Schema, names: Sequence[str], depth: int) -> Iterator[Schema]:
        if schema is False:
            yield True
        if not isinstance(schema, Mapping) or not self._can_negate or self._is_exhausted(depth):
            return
        if "$ref" in schema:  # older drafts ignore its siblings
            yield from self._negations(self.resolve(schema["$ref"]), names, depth + 1)
            return
        yield from self._negate_object(schema, names, depth)
        yield from _negate_type(schema)
        for values in self._value_lists(schema):
            yield from _exclude(values)
        yield from self._negate_bounds(schema)
        yield from self._negate_items(schema, depth)
        yield from self._negate_logic(schema, names, depth)

    def _negate_object(
        self, schema: Mapping[str, Any], names: Sequence[str], depth: int
    ) -> Iterator[Schema]:
        properties = schema.get("properties", {})
        for name in required_names(schema):
            yield {"type": "object", "properties": {name: False}}
        for name in names if _is_closed(schema) else ():
            if name not in properties:
                yield {"type": "object", "required": [name]}
        for name, inner in properties.items():
            if bad := self._few_negations(inner, depth):
                yield {"type": "object", "properties": {name: union(bad)}, "required": [name]}

    def _negate_items(self, schema: Mapping[str, Any], depth: int) -> Iterator[Schema]:
        items = schema.get("items")
        is_uniform = isinstance(items, Mapping) and "prefixItems" not in schema
        if is_uniform and (bad := self._few_negations(items, depth)):
            yield {"type": "array", self.prefix_items: [union(bad)], "minItems": 1}

    def _negate_logic(
        self, schema: Mapping[str, Any], names: Sequence[str], depth: int
    ) -> Iterator[Schema]:
        if "not" in schema:
            yield schema["not"]
        for conjunct in schema.get("allOf", []):
            yield from self._negations(conjunct, names, depth + 1)
        for keyword in ("anyOf", "oneOf"):  # a value that fits no branch fits neither
            if isinstance(branches := schema.get(keyword), list):
                negated = [self._few_negations(branch, depth, names) for branch in branches]
                if negated and all(negated):
                    yield intersection([union(options) for options in negated])

    def _few_negations(self, schema: Schema, depth: int, names: Sequence[str] = ()) -> list[Schema]:
        return list(islice(self._negations(schema, names, depth + 1), MAX_INNER_NEGATIONS))

    def conflict(self, schemas: Sequence[Schema], depth: int = 0) -> bool:
        """True if it is proven that no value fits all of these schemas."""
        flat = self.flatten(schemas)
        if any(schema is False for schema in flat):
            return True
        if self._is_exhausted(depth):
            return False
        nodes = [schema for schema in flat if isinstance(schema, Mapping)]
        if not set(TYPES).intersection(*(types_of_schema(node) for node in nodes)):
            return True
        if self._fixed_values(nodes) == []:
            return True
        for node in nodes:
            if options := node.get("anyOf"):
                others = [other for other in nodes if other is not node]
                if all(self.conflict([*others, option], depth + 2) for option in options):
                    return True
        is_object = any(types_of_schema(node) == {"object"} for node in nodes)
        return is_object and self._object_conflict(nodes, depth)

    def _is_exhausted(self, depth: int) -> bool:
        self.proof_steps += 1
        return depth > MAX_DEPTH or self.proof_steps > MAX_PROOF_STEPS

    def _object_conflict(self, nodes: Sequence[Mapping[str, Any]], depth: int) -> bool:
        required = {name for node in nodes for name in required_names(node)}
        for name in required:
            schemas = []
            for node in nodes:
                properties = node.get("properties", {})
                if name in properties:
                    schemas.append(properties[name])
                elif _is_closed(node):
                    return True
            if schemas and self.conflict(schemas, depth + 2):
                return True
        return False

    def flatten(self, schemas: Sequence[Schema]) -> list[Schema]:
        """Return the conjuncts of schemas: references resolved, allOf expanded."""
        flat: list[Schema] = []
        waiting = [(schema, 0) for schema in schemas]
        while waiting:
            schema, depth = waiting.pop(0)
            if isinstance(schema, Mapping) and depth < MAX_DEPTH:
                target = self.resolve(schema["$ref"]) if "$ref" in schema else None
                waiting += [] if target is None else [(target, depth + 1)]
                waiting += [(part, depth + 1) for part in schema.get("allOf", [])]
                # Older drafts ignore the siblings of a reference.
                schema = {} if "$ref" in schema else schema
            flat.append(schema)
        return flat

    def _value_lists(self, schema: Mapping[str, Any]) -> list[list[Any]]:
        const = [[schema["const"]]] if "const" in schema and self._has_const else []
        return const + ([schema["enum"]] if isinstance(schema.get("enum"), list) else [])

    def _fixed_values(self, nodes: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """Return the values allowed by `enum` and `const`, as JSON; None: all."""
        sets = [set(map(_key, vs)) for node in nodes for vs in self._value_lists(node)]
        return sorted(set.intersection(*sets)) if sets else None

    def _negate_bounds(self, schema: Mapping[str, Any]) -> list[Schema]:
        """Return what bounds exclude; in draft 4 they may be exclusive: never the bound itself."""
        opposites = [("minimum", "exclusiveMaximum"), ("maximum", "exclusiveMinimum")]
        if self._has_const:
            opposites += [("exclusiveMinimum", "maximum"), ("exclusiveMaximum", "minimum")]
        negated: list[Schema] = [
            {"type": "number", opposite: schema[keyword]}
            for keyword, opposite in opposites
            if _is_number(schema.get(keyword))
        ]
        for type_, unit in (("string", "Length"), ("array", "Items")):
            low, high = schema.get(f"min{unit}"), schema.get(f"max{unit}")
            if isinstance(low, int) and low > 0:
                negated.append({"type": type_, f"max{unit}": low - 1})
            if isinstance(high, int):
                negated.append({"type": type_, f"min{unit}": high + 1})
        return negated

    def resolve(self, target: object) -> Schema | None:
        schema = follow(self.root, target) if self._has_one_base else None
        return schema if isinstance(schema, Mapping | bool) else None


def follow(root: Schema, target: object) -> Any:
    """Return the target of a JSON pointer, or None."""
    if not isinstance(target, str) or not target.startswith("#"):
        return None
    value = root
    for segment in filter(None, target[1:].split("/")):
        name = segment.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return None
    return value


def objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Return all mappings inside a JSON value, itself included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _has_id(node: Mapping[str, Any]) -> bool:
    return any(isinstance(node.get(key), str) for key in ("$id", "id"))


def union(schemas: Sequence[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def intersection(schemas: Sequence[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)}


def property_names(schemas: Sequence[Schema]) -> list[str]:
    """Return the property names that schemas declare or require."""
    names: dict[str, None] = {}
    for schema in schemas:
        if isinstance(schema, Mapping):
            allowed = (n for n, s in schema.get("properties", {}).items() if s is not False)
            names |= dict.fromkeys([*required_names(schema), *allowed])
    return list(names)


def required_names(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required", [])
    return required if isinstance(required, list) else []


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """True if an object may have declared properties only."""
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def types_of_schema(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema may allow."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    known = {*TYPES, "integer"}
    if not isinstance(names, list) or not all(isinstance(n, str) and n in known for n in names):
        return set(TYPES)
    return {"number" if name == "integer" else name for name in names}


def _key(value: Any) -> str:
    number = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if number else value, sort_keys=True)


def _negate_type(schema: Mapping[str, Any]) -> list[Schema]:
    others = sorted(set(TYPES) - types_of_schema(schema))
    return [{"type": others}] if others else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _exclude(values: Sequence[Any]) -> list[Schema]:
    """Return schemas of all other values, as far as they can be expressed."""
    strings = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if _is_number(value)})
    present = {name for value in values for name in _types_of(value)}
    excluded: list[Schema] = []
    if strings and sum(map(len, strings)) <= MAX_EXCLUDED:
        excluded.append({"type": "string", "pattern": f"^{_other_than(set(strings))}$"})
    bounds = [None, *numbers, None]
    for low, high in pairwise(bounds) if numbers else ():
        interval = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        excluded.append(
            {
                "type": "number",
                **{key: value for key, value in interval.items() if value is not None},
            }
        )
    booleans = [value for value in (True, False) if not any(value is other for other in values)]
    if "boolean" in present and booleans:
        excluded.append({"enum": booleans})
    absent = sorted(set(TYPES) - present)
    return [*excluded, *([{"type": absent}] if absent else [])]


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _other_than(texts: set[str]) -> str:
    """Return a regular expression for all other texts."""
    rest: dict[str, set[str]] = {}
    for text in texts:
        if text:
            rest.setdefault(text[0], set()).add(text[1:])
    branches = [] if "" in texts else [""]
    first = "".join(map(_escape, sorted(rest)))
    branches.append(f"[^{first}][\\s\\S]*" if first else "[\\s\\S]+")
    branches += [f"{_escape(char)}{_other_than(tails)}" for char, tails in sorted(rest.items())]
    return f"(?:{'|'.join(branches)})"


def _escape(char: str) -> str:
    return char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}"
