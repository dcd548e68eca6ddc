"""The parts of a constraint: vocabularies, refusals, completions, literals, tool calls, choices."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.constrain.grammar import (
    ConstraintArgs,
    choice_grammar,
    lark_grammar,
    read_constraint,
    regex_grammar,
    schema_grammar,
)
from dgemma.constrain.matcher import Constraint, compile_constraint
from dgemma.constrain.shortest_completion import (
    MAX_TAIL_WORK,
    CompletionSearch,
    KnownCompletion,
    lark_literals,
    schema_literals,
    shortest_match,
)
from dgemma.constrain.tool_grammar import call_grammar
from dgemma.constrain.vocabulary import vocabulary
from dgemma.engine import Done, Mode, SamplingParams
from dgemma.errors import UsageError
from dgemma.text.messages import Tool
from tests.constrain.languages import REGEXES, leaves, schemas
from tests.constrain.random_engine import (
    EOS,
    RESPONSE,
    TOKENIZER,
    TURN,
    VOCABULARY,
    random_engine,
    random_prompt,
)
from tests.constrain.test_structure import few, many, some
from tests.text.strategies import any_text


def guide(**constraint: Any) -> Constraint:
    return compile_constraint(read_constraint(ConstraintArgs(**constraint)), VOCABULARY)


def text_of(ids: Any) -> str:
    return TOKENIZER.decode(ids)


# Vocabularies


@settings(many, max_examples=500)
@given(any_text)
def test_both_vocabularies_spell_a_text_exactly(text: str) -> None:
    ids = TOKENIZER.encode(text)
    spelled = VOCABULARY.split(ids)
    assert TOKENIZER.decode_bytes(spelled) == text.encode()
    assert all(len(TOKENIZER.token_bytes(token)) == 1 for token in spelled)
    assert TOKENIZER.decode_bytes(VOCABULARY.merge(spelled)) == text.encode()
    assert VOCABULARY.tokens.decode_bytes(ids) == text.encode()


def test_control_ids_are_not_text() -> None:
    for name, token in TOKENIZER.control_ids.items():
        assert VOCABULARY.tokens.is_special_token(token)
        assert VOCABULARY.split([token]) == [token] == VOCABULARY.merge([token])
        matcher = guide(regex="(?s:.*)").matcher()
        assert matcher.consume([token]) == 0
        assert matcher.consume(TOKENIZER.encode(name)) == len(TOKENIZER.encode(name))


def test_a_vocabulary_is_built_once_and_a_grammar_compiled_once() -> None:
    stops = (EOS, TURN, RESPONSE)
    assert vocabulary(TOKENIZER, stops) is vocabulary(TOKENIZER, stops)
    assert guide(regex="a+b") is guide(regex="a+b")


# Refusals

REFUSED = {
    "not": {"not": {}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "maxContains": {"type": "array", "contains": {}, "maxContains": 2},
    "propertyNames": {"type": "object", "propertyNames": {"not": {"const": "a"}}},
    "oneOf": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "minimum": {"type": "integer", "minimum": 5, "maximum": 2},
    "Expected array for 'required'": {"type": "object", "required": True},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "false": False,
    "anyOf is empty": {"enum": []},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_held_to_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(name)):
        schema_grammar(REFUSED[name])


@pytest.mark.parametrize("schema", ["{", "[1]", '"a"', "3"])
def test_what_is_no_schema_is_refused(schema: str) -> None:
    with pytest.raises(UsageError, match="schema"):
        schema_grammar(schema)


def test_a_schema_that_nests_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    with pytest.raises(UsageError, match="nests deeper"):
        schema_grammar(schema)


def test_other_constraints_are_refused_with_a_reason_and_without_inner_state() -> None:
    with pytest.raises(UsageError, match="look-around") as caught:
        regex_grammar("(?=a)b")
    assert "|" not in str(caught.value) and "state" not in str(caught.value)
    with pytest.raises(UsageError, match="grammar"):
        lark_grammar("start: nothing")
    for choices in ([], "yes", [""]):
        with pytest.raises(UsageError, match="choices"):
            choice_grammar(choices)
    with pytest.raises(UsageError, match="nothing is given"):
        read_constraint({})
    with pytest.raises(UsageError, match="schema and regex is given"):
        read_constraint({"schema": {}, "regex": "a"})


def test_an_unknown_format_is_an_annotation_wherever_it_stands() -> None:
    inner = {"type": "string", "format": "no-such-format"}
    schema_grammar({"type": "object", "properties": {"format": inner}, "required": ["format"]})
    schema_grammar({"anyOf": [inner, {"type": "array", "items": inner}], "$defs": {"a": inner}})
    known = guide(schema={"type": "string", "format": "date"}).matcher()
    assert known.consume(TOKENIZER.encode('"hello"')) < 7
    names = {"type": "object", "properties": {"format": {"const": 1}}, "required": ["format"]}
    matcher = guide(schema=names).matcher()
    assert matcher.consume(TOKENIZER.encode('{"format":1}')) and matcher.is_accepting


def test_json_may_have_a_space_where_people_put_one() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}'):
        matcher = guide(schema=schema).matcher()
        ids = TOKENIZER.encode(text)
        assert matcher.consume(ids) == len(ids) and matcher.is_accepting
    matcher = guide(schema=schema).matcher()
    assert matcher.consume(TOKENIZER.encode('{"a":  [')) < len(TOKENIZER.encode('{"a":  ['))


def test_a_schema_may_not_loosen_what_is_promised() -> None:
    with pytest.raises(UsageError, match="not"):
        schema_grammar({"x-guidance": {"lenient": True}, "not": {}})


# Ends


@many
@given(schemas(), st.integers(0, 40), st.integers(0, 2**32))
def test_an_end_is_found_from_wherever_a_text_stands(schema: Any, count: int, seed: int) -> None:
    """A text is written at random; at each token there is an end, and it is one."""
    import numpy as np

    generator = np.random.default_rng(seed)
    matcher = guide(schema=schema).matcher()
    written: list[int] = []
    ending = matcher.complete(400)
    for _ in range(count):
        choices = np.flatnonzero(matcher.allowed())
        choices = choices[~np.isin(choices, VOCABULARY.stops)]
        if not len(choices):
            break
        written.append(int(generator.choice(choices)))
        assert matcher.consume(written[-1:]) == 1
        ending = matcher.complete(400, ending)
        assert ending is not None
    assert ending is not None
    text = text_of([*written, *ending.tokens])
    jsonschema.validate(json.loads(text), schema)
    matcher.rollback(len(written))
    assert matcher.complete(400) == guide(schema=schema).matcher().complete(400)


SHORTEST = {
    '{"type": "object", "required": ["b"], "properties": {"a": {}, "b": {"type": "null"}}}': 10,
    '{"type": "array", "items": {"enum": ["long text", 7]}, "minItems": 3}': 7,
    '{"type": "string", "pattern": "wifi"}': 6,
    '{"anyOf": [{"type": "string", "minLength": 90}, {"type": "boolean"}]}': 4,
    '{"type": "object", "minProperties": 0}': 2,
    '{"enum": ["abc", "ab", 123456]}': 4,
}


@pytest.mark.parametrize("schema", SHORTEST)
def test_the_end_found_is_the_shortest(schema: str) -> None:
    ending = guide(schema=schema).shortest
    assert ending is not None and len(ending.byte_tokens) == SHORTEST[schema], text_of(
        ending.tokens
    )


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_has_an_end(regex: str) -> None:
    ending = guide(regex=regex).shortest
    assert ending is not None and re.fullmatch(regex, text_of(ending.tokens))


def test_an_end_must_fit_the_limit() -> None:
    matcher = guide(regex="x{30}").matcher()
    ending = matcher.complete(40)
    assert ending is not None
    assert matcher.complete(len(ending.tokens) - 1) is None
    assert matcher.complete(len(ending.tokens)) == ending


def test_a_tail_of_a_known_end_is_the_shortest_that_fits() -> None:
    matcher = guide(schema={"type": "array", "items": {"type": "string"}}).matcher()
    matcher.consume(TOKENIZER.encode('["a'))
    known = VOCABULARY.byte_tokens('b","c"]')
    spelled = guide(schema={"type": "array", "items": {"type": "string"}})._bytes.deep_copy()
    spelled.try_consume_tokens(VOCABULARY.byte_tokens('["a'))
    ending = VOCABULARY.byte_tokens('"]')
    assert KnownCompletion(known, 0).tail(spelled, 0) == ending
    assert CompletionSearch(VOCABULARY).run(spelled, 10, KnownCompletion(known, 0)) == ending


def test_of_a_long_known_end_the_tail_that_follows_the_text_is_found_with_little_work() -> None:
    """No shorter tail ends this text, and to test them all takes the square of its length."""
    compiled = guide(regex="[a-z]{900}!")
    known, spelled = compiled.shortest, compiled._bytes.deep_copy()
    assert known is not None and len(known.byte_tokens) == 901
    spelled.try_consume_tokens(VOCABULARY.byte_tokens("two"))
    tested = list[int]()

    class Counted:
        """A matcher that counts the bytes it is asked about."""

        def validate_tokens(self, tokens: list[int]) -> int:
            tested.append(len(tokens))
            return spelled.validate_tokens(tokens)

        def deep_copy(self) -> Any:
            return spelled.deep_copy()

    found = KnownCompletion(known.byte_tokens, 1).tail(Counted(), 2)  # type: ignore[arg-type]
    assert found == list(known.byte_tokens[3:])
    assert sum(tested) < 2 * sum(MAX_TAIL_WORK)
    spelled.try_consume_tokens(VOCABULARY.byte_tokens("x"))
    for grown in (9, 200):  # from the end of these, and from their beginning
        found = KnownCompletion(known.byte_tokens, grown).tail(spelled, 0)
        assert found == list(known.byte_tokens[4:])


@some
@given(st.sampled_from([*REGEXES, "^a+$", r"\w[^\d]", "(a|bc){2}x?", "[^a-z]", r"\s\S"]))
def test_a_literal_is_a_shortest_match(regex: str) -> None:
    text = shortest_match(regex)
    assert text is not None and re.search(regex, text)


def test_literals_come_from_patterns_formats_and_literals() -> None:
    schema = {"properties": {"a": {"pattern": "wi+fi"}, "b": {"format": "date"}}, "pattern": 3}
    assert set(schema_literals(schema)) == {"wifi", "2000-01-01"}
    assert set(lark_literals('start: "the" X\nX: /[0-9]{3}/')) == {"the", "000"}
    assert shortest_match("(?P<a>") is None


# Tool calls


def arguments() -> st.SearchStrategy[dict[str, Any]]:
    keys = st.sampled_from(["city", "Zip", "n", "a b", "x:y", "é"])
    simple = leaves().filter(lambda schema: "wifi" not in schema.get("pattern", ""))

    def bigger(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        listed = st.builds(
            lambda item, low, more: {
                "type": "array",
                "items": item,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        )
        fields = st.dictionaries(keys, inner, min_size=1, max_size=3)
        named = fields.map(lambda f: {"type": "object", "properties": f, "required": sorted(f)[:1]})
        return st.one_of(listed, named)

    values = st.recursive(simple, bigger, max_leaves=3)
    return st.dictionaries(keys, values, max_size=3).map(
        lambda f: {"type": "object", "properties": f, "required": sorted(f)[1:]}
    )


@some
@given(
    st.lists(arguments(), min_size=1, max_size=2),
    st.integers(0, 8),
    st.sampled_from(["diffusion", "ar", "hybrid"]),
)
def test_a_call_can_be_read_and_fits_its_schema(
    parameters: list[dict[str, Any]], seed: int, mode: Mode
) -> None:
    engine = random_engine(seed)
    tools = [Tool(name=f"tool_{i}", parameters=p) for i, p in enumerate(parameters)]
    options = SamplingParams(mode=mode, seed=seed, max_tokens=100, retries=0)
    done = engine.generate(random_prompt(seed), options, tools=tools)
    assert not done.fault and done.text == ""
    assert not done.reply.broken_calls and not done.reply.stray_tokens
    (call,) = done.reply.tool_calls
    schema = {tool.name: tool.parameters for tool in tools}[call.name]
    jsonschema.validate(call.arguments, schema)
    assert written_as_the_template_does(done, call.name)


TOOLS = [
    Tool(name="find", parameters={"properties": {"a": {"type": "string"}}, "required": ["a"]}),
    Tool(name="add", parameters={"properties": {"n": {"type": "integer"}}, "required": ["n"]}),
]


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
@pytest.mark.parametrize("seed", range(6))
def test_which_tool_is_called_can_be_chosen(seed: int, mode: Mode) -> None:
    engine = random_engine(seed)
    options = SamplingParams(mode=mode, seed=seed, max_tokens=60, retries=0)
    done = engine.generate(random_prompt(seed), options, tools=TOOLS, tool_choice="add")
    assert [call.name for call in done.reply.tool_calls] == ["add"]
    free = engine.generate(random_prompt(seed), options, tools=TOOLS, tool_choice="auto")
    assert free.finish == ("length" if free.tokens == 60 else "stop")
    assert not free.fault and not free.reply.broken_calls and not free.reply.stray_tokens


def test_with_auto_there_may_be_text_and_calls() -> None:
    grammar = call_grammar(TOOLS, TOKENIZER, "auto")
    call = "<|tool_call>call:add{n:1}<tool_call|>"
    for text in ("the thought", call, f"the {call}{call}", ""):
        matcher = compile_constraint(grammar, VOCABULARY).matcher()
        ids = TOKENIZER.encode_control(text)
        assert matcher.consume(ids) == len(ids) and matcher.is_accepting


def test_a_wrong_choice_of_tools_is_refused() -> None:
    engine = random_engine(0)
    with pytest.raises(UsageError, match="auto, required or one of find, add"):
        engine.constraint(tools=TOOLS, tool_choice="none")
    with pytest.raises(UsageError, match="tools stand alone"):
        engine.constraint(tools=TOOLS, schema={})
    with pytest.raises(UsageError, match="needs tools"):
        engine.constraint(tool_choice="add")


def written_as_the_template_does(done: Done, name: str) -> bool:
    text = TOKENIZER.decode(done.ids)
    start = text.rindex("<|tool_call>")
    return text[start:].startswith(f"<|tool_call>call:{name}{{") and text.endswith("}<tool_call|>")


def test_keys_stand_in_the_order_of_the_template() -> None:
    properties = {key: {"const": 1} for key in ("b", "A", "c", "B2")}
    tool = Tool(name="f", parameters={"properties": properties, "required": [*properties]})
    ending = compile_constraint(call_grammar([tool], TOKENIZER), VOCABULARY).shortest
    assert ending is not None
    assert text_of(ending.tokens) == "<|tool_call>call:f{A:1,b:1,B2:1,c:1}<tool_call|>"


def test_a_schema_that_refers_to_itself_is_followed_and_ends() -> None:
    tree = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        "required": ["kids"],
    }
    parameters = {"properties": {"tree": {"$ref": "#/$defs/tree"}}, "required": ["tree"]}
    tool = Tool(name="plant", parameters={**parameters, "$defs": {"tree": tree}})
    matcher = compile_constraint(call_grammar([tool], TOKENIZER), VOCABULARY).matcher()
    call = "<|tool_call>call:plant{tree:{kids:[{kids:[]},{kids:[{kids:[]}]}]}}<tool_call|>"
    ids = TOKENIZER.encode_control(call)
    assert matcher.consume(ids) == len(ids) and matcher.is_complete


CALLS_REFUSED: dict[str, dict[str, Any]] = {
    "no declared properties": {"properties": {"a": {"type": "object"}}},
    "uniqueItems": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    "may overlap": {"properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}},
    "leads nowhere": {"properties": {"a": {"$ref": "#/$defs/none"}}},
    "not declared": {"properties": {}, "required": ["a"]},
    "the pattern": {"properties": {"a": {"type": "string", "pattern": "a(?=b)"}}},
    "is not known": {"properties": {"a": {"type": "tuple"}}},
    "anyOf at the top": {"anyOf": [{}]},
    "not a string, number or word": {"properties": {"a": {"const": [1]}}},
    "nothing fits": {"properties": {"a": False}, "required": ["a"]},
}


@pytest.mark.parametrize("name", CALLS_REFUSED)
def test_a_tool_whose_schema_cannot_be_held_to_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(name)) as caught:
        call_grammar([Tool(name="lookup", parameters=CALLS_REFUSED[name])], TOKENIZER)
    assert "lookup" in str(caught.value)
    with pytest.raises(UsageError, match="no tools"):
        call_grammar([], TOKENIZER)


def test_oneof_of_things_that_are_apart_is_a_choice() -> None:
    apart = [{"type": "string"}, {"type": "integer"}, {"const": None}, {"enum": [True]}]
    tool = Tool(name="f", parameters={"properties": {"a": {"oneOf": apart}}, "required": ["a"]})
    grammar = call_grammar([tool], TOKENIZER)
    for value in ('<|"|>x<|"|>', "7", "null", "true"):
        matcher = compile_constraint(grammar, VOCABULARY).matcher()
        ids = TOKENIZER.encode_control(f"<|tool_call>call:f{{a:{value}}}<tool_call|>")
        assert matcher.consume(ids) == len(ids) and matcher.is_complete


# Choices with probabilities


@few
@given(st.integers(0, 8), st.permutations(["yes", "no", "not now", "中"]))
def test_probabilities_of_labels_add_up_and_do_not_depend_on_their_order(
    seed: int, labels: list[str]
) -> None:
    engine = random_engine(seed)
    ranked = engine.classify(random_prompt(seed), labels)
    assert sum(p for _, p in ranked) == pytest.approx(1)
    assert [p for _, p in ranked] == sorted((p for _, p in ranked), reverse=True)
    again = dict(engine.classify(random_prompt(seed), sorted(labels)))
    for label, p in ranked:
        assert again[label] == pytest.approx(p, abs=1e-3)


def test_a_causal_probability_is_that_of_the_label_and_its_end() -> None:
    import math

    engine, prompt = random_engine(0), random_prompt(0)
    labels = ["a", "the", "call: x"]
    texts = [[*TOKENIZER.encode(label), TURN] for label in labels]
    totals = [score.total for score in engine.run(engine.score_program(prompt.ids, texts))]
    whole = sum(map(math.exp, totals))
    expected = {la: math.exp(t) / whole for la, t in zip(labels, totals, strict=True)}
    assert dict(engine.classify(prompt, labels)) == pytest.approx(expected, rel=1e-3)


def test_labels_that_cannot_be_told_apart_or_read_are_refused() -> None:
    engine = random_engine(0)
    for labels, name in (([], "no labels"), (["a", ""], "empty"), (["a", "a"], "twice")):
        with pytest.raises(UsageError, match=name):
            engine.classify("the", labels)
