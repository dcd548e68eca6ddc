"""Rewrites JSON Schema keywords that llguidance lacks into keywords that it has.

    not S                    anyOf of schemas that exclude S
    if I then T else E       anyOf [I and T, (not I) and E]
    oneOf [A, B]             anyOf [A and not B, B and not A]; plain anyOf where they are disjoint
    dependencies a: [b]      anyOf [a is absent, b is required]; dependentRequired, dependentSchemas
    propertyNames S          patternProperties or properties, and no others
    min/maxProperties        anyOf of sets of properties that are required, or the only ones allowed
    contains S               the first item fits S

The rewritten schema allows a subset of what the original allows, never more: a text that fits it
fits the original. Negations are exact only where JSON Schema can express them; alternatives that it
cannot express are left out. If none is left, nothing fits there: an optional property is then never
written, and a required one makes the schema be refused.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

from dgemma.constrain.schema_logic import (
    MAX_DEPTH,
    VALUE_KEYWORDS,
    Schema,
    SchemaLogic,
    follow,
    intersection,
    objects,
    property_names,
    types_of_schema,
    union,
)
from dgemma.errors import UsageError

SCHEMA_MAPS = frozenset(
    "properties patternProperties $defs definitions dependencies dependentSchemas".split()
)
MAX_NODES = 10_000  # of a rewritten schema
MAX_SETS = 24  # of properties for min/maxProperties


def rewrite_schema(schema: Schema) -> Schema:
    """Return an equivalent or narrower schema without the keywords above."""
    rewritten = _Rewriter(schema).rewrite(schema)
    for target in (node["$ref"] for node in objects(rewritten) if "$ref" in node):
        if follow(schema, target) is not None and follow(rewritten, target) is None:
            _refuse("$ref", f"{target!r} leads into a keyword that is rewritten; use $defs")
    return rewritten


class _Rewriter:
    def __init__(self, root: Schema) -> None:
        self.logic, self._num_nodes = SchemaLogic(root), 0

    def rewrite(self, schema: Any) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise UsageError("the schema cannot be held to: it is too large once it is rewritten")
        if isinstance(schema, list):
            return [self.rewrite(item) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        plain = {key: self._value(key, value) for key, value in schema.items()}
        extra: list[Schema] = []
        for keywords, read in (
            (("not",), self._not),
            (("if", "then", "else"), self._if),
            (("oneOf",), self._one_of),
            (("dependencies", "dependentRequired", "dependentSchemas"), self._dependencies),
            (("propertyNames",), self._property_names),
            (("minProperties", "maxProperties"), self._num_properties),
            (("contains", "minContains", "maxContains"), self._contains),
        ):
            if any(keyword in schema for keyword in keywords):
                self.logic.proof_steps = 0
                rewritten = read(schema)
                if rewritten is not None:
                    extra += rewritten
                    plain = {key: value for key, value in plain.items() if key not in keywords}
        return {**plain, "allOf": [*plain.get("allOf", []), *extra]} if extra else plain

    def _value(self, key: str, value: Any) -> Any:
        if key in VALUE_KEYWORDS:
            return value
        if key in SCHEMA_MAPS and isinstance(value, Mapping):
            return {name: self.rewrite(schema) for name, schema in value.items()}
        return self.rewrite(value)

    # --- keywords: the schemas that replace one, or None to leave it to llguidance

    def _not(self, schema: Mapping[str, Any]) -> list[Schema]:
        return [
            self._either(
                self.logic.negate(schema["not"], property_names(self.logic.flatten([schema])))
            )
        ]

    def _if(self, schema: Mapping[str, Any]) -> list[Schema]:
        if "if" not in schema:
            return []
        condition = schema["if"]
        branches = [_both(condition, schema.get("then", True))]
        otherwise = schema.get("else", True)
        names = property_names(self.logic.flatten([schema, condition]))
        branches += [_both(other, otherwise) for other in self.logic.negate(condition, names)]
        return [self._either(branches)]

    def _one_of(self, schema: Mapping[str, Any]) -> list[Schema] | None:
        branches = schema["oneOf"]
        if not isinstance(branches, list) or not branches:
            return None
        shared = {key: value for key, value in schema.items() if key != "oneOf"}
        variants = [self._only(index, branches, shared) for index in range(len(branches))]
        return [self._either([variant for variant in variants if variant is not None])]

    def _only(self, index: int, branches: Sequence[Schema], shared: Schema) -> Schema | None:
        """Return a branch without the values that fit another one; None: they all may."""
        branch = branches[index]
        names = property_names(self.logic.flatten([shared, branch]))
        # The alternatives of several branches multiply.
        limit = 3 if len(branches) == 2 else 2 if len(branches) <= 4 else 1
        conditions: list[Schema] = []
        for other in (other for i, other in enumerate(branches) if i != index):
            if self.logic.conflict([shared, branch, *conditions, other]):
                continue
            alternatives = (
                alternative
                for alternative in self.logic.negate(other, names)
                if not self.logic.conflict([shared, branch, *conditions, alternative])
            )
            excluding = list(islice(alternatives, limit))
            if not excluding:
                return None
            conditions.append(union(excluding))
        return intersection([branch, *conditions])

    def _dependencies(self, schema: Mapping[str, Any]) -> list[Schema]:
        extra = []
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needed in schema.get(keyword, {}).items():
                needed = [needed] if isinstance(needed, str) else needed
                then = {"required": needed} if isinstance(needed, list) else needed
                extra.append(self._either([{"properties": {name: False}}, then]))
        return extra

    def _property_names(self, schema: Mapping[str, Any]) -> list[Schema]:
        return self._names_schemas(schema["propertyNames"], 0)

    def _names_schemas(self, names: Schema, depth: int) -> list[Schema]:
        """Return schemas of objects whose property names fit a schema."""
        if names is True:
            return []
        if names is False or "string" not in types_of_schema(names):
            return [{"additionalProperties": False}]
        if "$ref" in names:
            target = self.logic.resolve(names["$ref"])
            if target is None or depth > MAX_DEPTH:
                _refuse("propertyNames", f"the reference {names['$ref']!r} cannot be followed")
            return self._names_schemas(target, depth + 1)
        schemas = [s for part in names.get("allOf", []) for s in self._names_schemas(part, depth)]
        patterns = [names["pattern"]] if "pattern" in names else []
        if "minLength" in names or "maxLength" in names:
            patterns.append(
                f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
            )
        schemas += [
            {"patternProperties": {p: True}, "additionalProperties": False} for p in patterns
        ]
        if "enum" in names or "const" in names:
            values = names.get("enum", [names.get("const")])
            allowed = {name: True for name in values if isinstance(name, str)}
            schemas.append({"properties": allowed, "additionalProperties": False})
        unknown = names.keys() & {"anyOf", "oneOf", "not", "if"}
        if unknown:
            _refuse("propertyNames", f"{sorted(unknown)[0]} in it cannot be held to")
        return schemas

    def _num_properties(self, schema: Mapping[str, Any]) -> list[Schema] | None:
        """Require or allow sets of optional properties; llguidance counts the others itself."""
        properties, required = schema.get("properties", {}), set(schema.get("required", []))
        optional = [
            name for name, s in properties.items() if name not in required and s is not False
        ]
        if not optional:
            return None
        low = schema.get("minProperties", 0) - len(required)
        high = schema.get("maxProperties")
        if high is None and low > len(optional):  # the rest are additional properties
            return [{"required": optional}, {"minProperties": schema["minProperties"]}]
        count = low if high is None else min(high - len(required), len(optional))
        if count < max(low, 0):
            return [False]
        if count <= 0 and high is None:
            return []
        sets = (
            [tuple((optional * 2)[i : i + count]) for i in range(len(optional))] if count else [()]
        )
        alternatives = []
        for names in islice(dict.fromkeys(tuple(sorted(chosen)) for chosen in sets), MAX_SETS):
            alternative: dict[str, Any] = {"required": sorted(names)[: max(low, 0)]}
            if high is not None:
                alternative["properties"] = dict.fromkeys([*sorted(required), *names], True)
                alternative["additionalProperties"] = False
            alternatives.append(alternative)
        return [self._either(alternatives)]

    def _contains(self, schema: Mapping[str, Any]) -> list[Schema]:
        if schema.get("minContains", 1) > 1 or "maxContains" in schema:
            _refuse("minContains, maxContains", "only one item that fits can be required")
        if "contains" not in schema or schema.get("minContains") == 0:
            return []
        return [self.rewrite({self.logic.prefix_items: [schema["contains"]], "minItems": 1})]

    def _either(self, schemas: Sequence[Schema]) -> Schema:
        """Return the union; of no schema, False: a keyword without alternatives allows nothing."""
        return self.rewrite(union(schemas)) if schemas else False


def _refuse(keyword: str, reason: str) -> NoReturn:
    raise UsageError(f"the schema cannot be held to: {keyword}: {reason}")


def _both(first: Schema, second: Schema) -> Schema:
    return intersection([schema for schema in (first, second) if schema is not True] or [True])
