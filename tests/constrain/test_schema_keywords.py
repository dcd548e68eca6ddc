"""Keywords that llguidance lacks: what is written under them always fits the original schema."""

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.config import Mode
from dgemma.constrain.grammar import schema_grammar
from dgemma.constrain.matcher import Constraint, compile_constraint
from dgemma.constrain.schema_rewrite import rewrite_schema
from dgemma.engine import SamplingParams
from dgemma.errors import UsageError
from tests.constrain.languages import fits
from tests.constrain.random_engine import TOKENIZER, VOCABULARY, random_engine, random_prompt
from tests.constrain.test_structure import few

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
STRINGS = {"type": "array", "items": {"type": "string", "maxLength": 3}}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


NUMBER, TEXT, FLAG = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
# A schema, texts that fit it and can be written, and texts that do not fit.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "not a type": ({"not": {"type": "string"}}, [1, None, [1], {"a": 1}], ["a"]),
    "not a value": (
        {"type": "string", "not": {"enum": ["ab", "b"]}},
        ["a", "abc", ""],
        ["ab", "b"],
    ),
    "not a number": ({"type": "integer", "not": {"const": 3}}, [2, 4], [3]),
    "not a bound": ({"type": "integer", "not": {"minimum": 3}}, [2, -1], [3, 4]),
    "not a property": (
        {**obj(a=NUMBER, b=NUMBER), "not": {"required": ["a", "b"]}},
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 2}],
    ),
    "not any": (
        {**obj(a=NUMBER, b=NUMBER), "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        [{}],
        [{"a": 1}, {"b": 1}],
    ),
    "oneOf required": (
        {**obj(a=NUMBER, b=NUMBER), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "oneOf closed objects": (
        {"oneOf": [obj(a=NUMBER), obj(b=NUMBER)]},
        [{"a": 1}, {"b": 1}],
        [{}],
    ),
    "oneOf with a discriminator": (
        {
            "oneOf": [
                {**obj(kind={"const": "x"}, n=NUMBER), "required": ["kind"]},
                {**obj(kind={"type": "string"}, n=TEXT), "required": ["kind", "n"]},
            ]
        },
        [{"kind": "x"}, {"kind": "x", "n": 1}, {"kind": "y", "n": "z"}],
        [{"kind": "y"}, {"kind": "y", "n": 1}],
    ),
    "if then else": (
        {
            **obj(kind={"enum": ["x", "y"]}, n=NUMBER, t=TEXT),
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "x"}}},
            "then": {"required": ["n"]},
            "else": {"required": ["t"]},
        },
        [{"kind": "x", "n": 1}, {"kind": "y", "t": ""}, {"kind": "y", "n": 1, "t": ""}],
        [{"kind": "x"}, {"kind": "y"}, {"kind": "x", "t": ""}],
    ),
    "dependencies": (
        {
            **obj(a=NUMBER, b=NUMBER, c=NUMBER),
            "$schema": DRAFT_7,
            "dependencies": {"a": ["b"], "b": {"required": ["c"]}},
        },
        [{}, {"c": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}],
        [{"a": 1}, {"b": 1}, {"a": 1, "c": 1}],
    ),
    "dependentRequired": (
        {**obj(a=NUMBER, b=NUMBER), "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "dependentSchemas": (
        {**obj(a=NUMBER, b=NUMBER), "dependentSchemas": {"a": {"properties": {"b": {"const": 2}}}}},
        [{"b": 1}, {"a": 1}, {"a": 1, "b": 2}],
        [{"a": 1, "b": 1}],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "additionalProperties": NUMBER},
        [{}, {"a": 1, "bb": 2}],
        [{"c": 1}],
    ),
    "propertyNames of few": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER},
        [{}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    "minProperties": (
        {**obj(a=NUMBER, b=NUMBER, c=NUMBER), "minProperties": 1},
        [{"a": 1}, {"b": 1}, {"c": 1}, {"a": 1, "c": 1}],
        [{}],
    ),
    "maxProperties": (
        {**obj(a=NUMBER, b=NUMBER, c=NUMBER), "maxProperties": 1},
        [{}, {"a": 1}, {"c": 1}],
        [{"a": 1, "b": 1}],
    ),
    "exactly one property": (
        {**obj(a=NUMBER, b=NUMBER), "minProperties": 1, "maxProperties": 1},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "contains": ({**STRINGS, "contains": {"const": "a"}}, [["a"], ["a", "b"]], [[], ["b"]]),
    "uniqueItems": (
        {**STRINGS, "uniqueItems": True},
        [[], ["a"], ["a", "b", ""]],
        [["a", "a"], ["a", "b", "a"]],
    ),
    "uniqueItems of objects": (
        {"type": "array", "items": {**obj(a=NUMBER, b=NUMBER)}, "uniqueItems": True},
        [[{"a": 1}, {"b": 1}, {}]],
        [[{"a": 1, "b": 2}, {"a": 1, "b": 2}], [{}, {}]],
    ),
    "uniqueItems by reference": (
        {
            **obj(tags={"$ref": "#/$defs/tags"}, path=STRINGS),
            "$defs": {"tags": {**STRINGS, "uniqueItems": True}},
        },
        [{"tags": ["a"], "path": ["b", "b"]}],
        [{"tags": ["a", "a"]}],
    ),
    "minProperties without repeated names": (
        {"type": "object", "additionalProperties": NUMBER, "minProperties": 2},
        [{"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "a pattern with brackets": ({"type": "string", "pattern": "^[a[]+$"}, ["[a", "a"], ["b", "&"]),
}


def constraint(schema: Any) -> Constraint:
    return compile_constraint(schema_grammar(schema), VOCABULARY)


def is_written(text: str, compiled: Constraint) -> bool:
    matcher, ids = compiled.matcher(), TOKENIZER.encode(text)
    return matcher.consume(ids) == len(ids) and matcher.is_accepting


@pytest.mark.parametrize("name", CASES)
def test_a_keyword_allows_what_fits_and_nothing_else(name: str) -> None:
    schema, good, bad = CASES[name]
    compiled = constraint(schema)
    for value in good:
        assert fits(json.dumps(value), schema), "the case itself is wrong"
        assert is_written(json.dumps(value), compiled), value
    for value in bad:
        assert not fits(json.dumps(value), schema), "the case itself is wrong"
        assert not is_written(json.dumps(value), compiled), value


def test_a_repeated_name_does_not_count_twice() -> None:
    schema = CASES["minProperties without repeated names"][0]
    assert not is_written('{"a":1,"a":2}', constraint(schema))
    assert is_written('{"a":1,"b":2,"c":3}', constraint(schema))


def random_text(compiled: Constraint, rng: Random) -> str | None:
    """Write tokens at random that can still be completed, then the shortest completion."""
    matcher, written = compiled.matcher(), list[int]()
    completion = compiled.shortest
    for _ in range(rng.randrange(40)):
        allowed = np.flatnonzero(matcher.allowed())
        likely = [t for t in VOCABULARY.byte_tokens('"{}[],:123abxy') if t in allowed]
        options = likely if likely and rng.random() < 0.8 else allowed.tolist()
        token = rng.choice(options)
        if completion is None or token in VOCABULARY.stops or not matcher.consume([token]):
            break
        following = matcher.complete(300, completion)
        if following is None:
            matcher.rollback(1)
            break
        completion = following
        written.append(token)
    return None if completion is None else TOKENIZER.decode([*written, *completion.tokens])


names = st.sampled_from("abcd")
leaves = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(lambda t: {"type": t}),
    st.lists(
        st.sampled_from(["a", "b", "ab", "", 1, 2, 2.5, True, None]), min_size=1, max_size=3
    ).map(lambda values: {"enum": values}),
    st.sampled_from(["a", 1, True, None]).map(lambda value: {"const": value}),
    st.integers(0, 4).map(lambda n: {"type": "integer", "minimum": n, "maximum": n + 3}),
    st.integers(0, 2).map(lambda n: {"type": "string", "minLength": n, "maxLength": n + 2}),
    st.just(True),
)


def wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(names, inner, min_size=1, max_size=3)
    listed = st.lists(names, unique=True, max_size=2)
    parts = {
        "required": listed,
        "additionalProperties": st.booleans(),
        "not": inner,
        "oneOf": st.lists(inner, min_size=1, max_size=3),
        "anyOf": st.lists(inner, min_size=1, max_size=3),
        "if": inner,
        "then": inner,
        "else": inner,
        "dependentRequired": st.dictionaries(names, listed, max_size=2),
        "dependentSchemas": st.dictionaries(names, inner, max_size=2),
        "propertyNames": st.sampled_from([{"pattern": "^[abc]$"}, {"enum": ["a", "b"]}]),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(1, 3),
    }
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": properties}, optional=parts
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={
            "contains": inner,
            "uniqueItems": st.booleans(),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(2, 4),
        },
    )
    logic = {key: parts[key] for key in ("not", "oneOf", "anyOf", "if", "then", "else")}
    return st.one_of(objects, arrays, st.fixed_dictionaries({}, optional=logic))


any_schema = st.recursive(leaves, wrap, max_leaves=12)


@settings(few, max_examples=150)
@given(schema=any_schema, seed=st.integers(0, 10**6))
def test_whatever_is_written_fits_the_schema(schema: Any, seed: int) -> None:
    try:
        compiled = constraint(schema)
    except UsageError:
        return
    for number in range(3):
        text = random_text(compiled, Random(seed + number))
        assert text is None or fits(text, schema), f"{text} does not fit {json.dumps(schema)}"


@settings(few, max_examples=100)
@given(schema=any_schema)
def test_a_rewritten_schema_allows_nothing_new(schema: Any) -> None:
    try:
        rewritten = rewrite_schema(schema)
    except UsageError:
        return
    values = [
        None,
        True,
        0,
        2,
        2.5,
        "a",
        "xyz",
        [],
        [1],
        ["a", "a"],
        {},
        {"a": 1},
        {"b": "a", "c": 1},
    ]
    for value in values:
        if jsonschema.Draft202012Validator(rewritten).is_valid(value):
            assert jsonschema.Draft202012Validator(schema).is_valid(value), (value, rewritten)


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
@pytest.mark.parametrize("name", ["uniqueItems", "oneOf required", "if then else", "not a value"])
def test_a_model_of_random_weights_writes_what_fits(name: str, mode: Mode) -> None:
    schema = CASES[name][0]
    if name == "uniqueItems":
        schema = {**schema, "minItems": 3}
    engine = random_engine(1)
    for seed in range(3):
        params = SamplingParams(mode=mode, seed=seed, max_tokens=60)
        done = engine.generate(random_prompt(seed), params, schema=schema)
        assert not done.fault and fits(done.text, schema), done.text


def test_newer_keywords_are_not_negated_in_older_drafts() -> None:
    """Draft 4 ignores `const`: an integer other than 1 fits both branches."""
    schema = {"$schema": DRAFT_4, "oneOf": [{"const": 1}, {"type": "integer"}]}
    compiled = constraint(schema)
    for text in ("1", "2", '"x"'):
        assert is_written(text, compiled) == fits(text, schema), text


def test_an_optional_property_that_nothing_can_be_written_for_is_left_out() -> None:
    cannot = {"type": "string", "not": {"pattern": "a"}}
    compiled = constraint(obj(a=NUMBER, b=cannot))
    assert is_written('{"a":1}', compiled) and not is_written('{"b":"x"}', compiled)
    with pytest.raises(UsageError, match="not"):
        schema_grammar({**obj(b=cannot), "required": ["b"]})


def test_a_reference_into_what_is_rewritten_is_refused() -> None:
    branches = [{"required": ["a"]}, {"required": ["b"]}]
    inner = {**obj(a=NUMBER, b=NUMBER, c={"$ref": "#/oneOf/0"}), "oneOf": branches}
    with pytest.raises(UsageError, match=r"\$ref.*use \$defs"):
        schema_grammar(inner)
