"""Chat over a real socket, asked by the real openai client."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.conftest import MODEL, Running, load, wait_for
from tests.taught import ANSWERS, CANVAS, GENERATION, LONG, SHORT, THOUGHT

# For what the model was not taught: it does not converge, however many steps it has.
BRIEF = {"dgemma": {"max_denoising_steps": 6, "retries": 0}}
STEADY = {"dgemma": {"max_denoising_steps": 12, "retries": 1}}


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(server: Running, question: str, **fields: Any) -> ChatCompletion:
    answer = server.client().chat.completions.create(model=MODEL, messages=say(question), **fields)
    assert isinstance(answer, ChatCompletion)
    return answer


def chunks(server: Running, question: str, **fields: Any) -> list[ChatCompletionChunk]:
    return list(
        server.client().chat.completions.create(
            model=MODEL, messages=say(question), stream=True, **fields
        )
    )


def joined(stream: list[ChatCompletionChunk], index: int = 0, name: str = "content") -> str:
    choices = [choice for chunk in stream for choice in chunk.choices if choice.index == index]
    return "".join(getattr(choice.delta, name, None) or "" for choice in choices)


def test_an_answer_is_what_the_model_knows(shared: Running) -> None:
    answer = chat(shared, LONG, seed=1)
    (choice,) = answer.choices
    assert choice.message.content == ANSWERS[LONG]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    took = choice.model_extra["dgemma"]  # type: ignore[index]
    assert took["mode"] == "diffusion" and took["blocks"] == 3 and took["seed"] == 1


def test_a_stream_joins_to_the_answer_of_the_same_seed(shared: Running) -> None:
    whole = chat(shared, LONG, seed=5)
    stream = chunks(shared, LONG, seed=5, stream_options={"include_usage": True})
    assert joined(stream) == whole.choices[0].message.content
    texts = [c for c in stream if c.choices and c.choices[0].delta.content]
    assert len(texts) == 3, "a block is promised as soon as it is committed"
    assert stream[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == "stop"
    assert stream[-1].choices == []
    assert stream[-1].usage is not None and whole.usage is not None
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in stream}) == 1


def test_a_stream_has_no_usage_that_nobody_asked_for(shared: Running) -> None:
    assert all(chunk.choices and chunk.usage is None for chunk in chunks(shared, SHORT))


def test_several_answers_are_those_of_their_choice(shared: Running) -> None:
    odd = "what?"  # nothing it was taught, so that choices differ
    asked: dict[str, Any] = {"seed": 3, "max_tokens": CANVAS, "extra_body": BRIEF}
    many = chat(shared, odd, n=3, **asked)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in many.choices]
    assert len(set(texts)) > 1
    assert texts[0] == chat(shared, odd, **asked).choices[0].message.content
    stream = chunks(shared, odd, n=3, **asked)
    assert [joined(stream, index) for index in range(3)] == texts
    assert many.usage is not None
    assert many.usage.prompt_tokens < 2 * len(odd) + 20, "a prompt counts once"


def test_stop_strings_end_the_answer(shared: Running) -> None:
    one = chat(shared, LONG, seed=1, stop="STOP").choices[0]
    assert one.message.content == ANSWERS[LONG].partition("STOP")[0]
    assert one.finish_reason == "stop"
    many = [f"<|none_{n}|>" for n in range(20)] + ["then"]
    assert (
        chat(shared, LONG, seed=1, stop=many).choices[0].message.content
        == (ANSWERS[LONG].partition("then")[0])
    )
    stream = chunks(shared, LONG, seed=1, stop=many)
    assert joined(stream) == ANSWERS[LONG].partition("then")[0]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_is_cut_exactly(shared: Running, name: str) -> None:
    answer = chat(shared, LONG, seed=1, **{name: 4})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert ANSWERS[LONG].startswith(answer.choices[0].message.content or "?")


def test_a_limit_beyond_the_context_is_lowered_to_it(shared: Running) -> None:
    assert chat(shared, SHORT, max_tokens=10**6).choices[0].message.content == ANSWERS[SHORT]
    mode = {"dgemma": {"mode": "hybrid"}}
    assert chat(shared, SHORT, max_tokens=10**6, extra_body=mode).choices


def test_a_thought_is_told_apart(shared: Running) -> None:
    message = chat(shared, THOUGHT, seed=1).choices[0].message
    assert message.content == "yes"
    assert message.model_extra == {"reasoning_content": "hm"}
    stream = chunks(shared, THOUGHT, seed=1)
    assert joined(stream) == "yes"
    assert joined(stream, name="reasoning_content") == "hm"


def test_thinking_is_written_into_the_prompt(shared: Running) -> None:
    def prompt_tokens(**fields: Any) -> int:
        extra = {**BRIEF, **fields.pop("extra_body", {})}
        usage = chat(shared, SHORT, max_tokens=1, extra_body=extra, **fields).usage
        assert usage is not None
        return usage.prompt_tokens

    plain = prompt_tokens()
    assert prompt_tokens(reasoning_effort="high") > plain
    assert prompt_tokens(extra_body={"chat_template_kwargs": {"enable_thinking": True}}) > plain
    assert prompt_tokens(reasoning_effort="minimal") == plain


def test_autoregression_says_the_same(shared: Running) -> None:
    answer = chat(shared, SHORT, extra_body={"dgemma": {"mode": "ar"}})
    assert answer.choices[0].message.content == ANSWERS[SHORT]
    took = answer.choices[0].model_extra["dgemma"]  # type: ignore[index]
    assert took["mode"] == "ar" and took["blocks"] == 0


@pytest.mark.parametrize("mode", ["ar", "diffusion"])
def test_log_probabilities_are_those_of_the_causal_pass(
    shared: Running, checkpoint: Path, mode: str
) -> None:
    answer = chat(shared, SHORT, seed=1, logprobs=True, extra_body={"dgemma": {"mode": mode}})
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    engine = load(checkpoint)  # the server's belongs to its thread
    (score,) = engine.score(SHORT, [ANSWERS[SHORT]])
    assert [entry.logprob for entry in logprobs.content] == pytest.approx(score.logprobs, abs=1e-4)
    data = bytes(byte for entry in logprobs.content for byte in entry.bytes or [])
    assert data.decode() == ANSWERS[SHORT]
    stream = chunks(shared, SHORT, seed=1, logprobs=True, extra_body={"dgemma": {"mode": mode}})
    given = [c.choices[0].logprobs for c in stream if c.choices and c.choices[0].logprobs]
    assert len(given) == 1 and given[0].content == logprobs.content


def test_temperature_scales_the_draw(shared: Running) -> None:
    def text(**fields: Any) -> str | None:
        asked = {"seed": 7, "max_tokens": CANVAS, "extra_body": BRIEF, **fields}
        return chat(shared, "what?", **asked).choices[0].message.content

    assert text(temperature=1) == text()
    assert text(temperature=0) == text(temperature=0.01), "near zero is zero"
    hot = [tuple(text(temperature=t, seed=seed) for seed in (7, 8, 9)) for t in (0, 1, 2)]
    assert len(set(hot)) > 1
    assert chat(shared, LONG, seed=7, temperature=0).choices[0].message.content == ANSWERS[LONG]
    ar = {"dgemma": {"mode": "ar"}}
    cold = [text(temperature=0, extra_body=ar), text(extra_body=ar)]
    assert cold[0] == cold[1], "AR without a temperature takes the most likely token"
    assert text(temperature=2, extra_body=ar) != cold[0]


def test_a_preset_is_named_in_the_extension_and_other_fields_go_before_it(shared: Running) -> None:
    def steps(**extension: Any) -> int:
        body = {"seed": 7, "max_tokens": CANVAS, "dgemma": {"retries": 0, **extension}}
        return int(shared.ask("what?", **body).json()["choices"][0]["dgemma"]["steps"])

    assert steps(preset="quality") > steps(preset="fast")
    assert steps(preset="fast") <= GENERATION.max_denoising_steps // 4
    assert steps(preset="fast", max_denoising_steps=1) == 1


def test_auto_is_diffusion_until_both_modes_are_timed_at_an_idle_moment(shared: Running) -> None:
    engine = shared.service.worker.engine
    engine.break_even = None

    def mode() -> str:
        answer = shared.ask(SHORT, dgemma={"mode": "auto"}, max_tokens=CANVAS)
        return str(answer.json()["choices"][0]["dgemma"]["mode"])

    assert mode() == "diffusion"
    wait_for(lambda: engine.break_even is not None)
    assert mode() == "auto"


def test_a_conversation_with_tools_in_its_history_is_read(shared: Running) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Is it cold?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "-3"},
    ]
    tools: list[Any] = [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ]
    client = shared.client()
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, tool_choice=choice, max_tokens=4
        )
        assert answer.usage is not None
    declared = answer.usage.prompt_tokens  # type: ignore[union-attr]
    with_tools = client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, max_tokens=4
    )
    assert with_tools.usage is not None
    assert with_tools.usage.prompt_tokens > declared, "without a choice, tools are not shown"
    with pytest.raises(openai.BadRequestError, match="answers a tool call"):
        client.chat.completions.create(model=MODEL, messages=messages[3:])


def test_a_second_turn_finds_the_first_in_the_cache(serve: Callable[..., Running]) -> None:
    server = serve()
    first = chat(server, SHORT, seed=1)
    history = [
        *say(SHORT),
        {"role": "assistant", "content": first.choices[0].message.content},
        *say(SHORT),
    ]
    second = server.client().chat.completions.create(model=MODEL, messages=history, seed=1)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 10


def test_eight_requests_at_once_get_what_each_gets_alone(shared: Running) -> None:
    questions = [LONG, SHORT, "what?", "then", LONG, "who?", THOUGHT, "0123"]

    def ask(seed: int) -> str | None:
        fields = {"seed": seed, "max_tokens": 3 * CANVAS, "extra_body": STEADY}
        if seed % 2:
            return joined(chunks(shared, questions[seed], **fields))
        return chat(shared, questions[seed], **fields).choices[0].message.content

    alone = [ask(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


def test_a_prompt_is_echoed_with_its_scores(shared: Running, checkpoint: Path) -> None:
    """As lm-eval sends it: token ids, one more token, the most likely token at each position."""
    engine, text = load(checkpoint), "the one"
    ids = list(engine.plain_prompt(text).ids)
    (score,) = engine.run(engine.score_program(ids[:1], [ids[1:]]))

    def echo(prompt: Any, **fields: Any) -> Any:
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0, **fields}
        return shared.client().completions.create(model=MODEL, seed=1234, **asked).choices

    plain, again = echo([ids, ids[:1]], max_tokens=1)
    assert len(plain.logprobs.token_logprobs) == len(ids) + 1 and again.logprobs.tokens
    assert plain.logprobs.token_logprobs[0] is None
    assert plain.logprobs.token_logprobs[1:-1] == pytest.approx(score.logprobs, abs=1e-4)
    tops = plain.logprobs.top_logprobs[1:]
    chosen = zip(plain.logprobs.token_logprobs[1:], tops, strict=True)
    assert all(logprob <= max(top.values()) for logprob, top in chosen)
    assert plain.logprobs.token_logprobs[-1] == max(tops[-1].values()), (
        "the last is the most likely"
    )
    (named,) = echo(text, max_tokens=0)
    assert named.text == text and "".join(named.logprobs.tokens) == text
    assert named.logprobs.token_logprobs == pytest.approx(score.logprobs, abs=1e-4)
    assert named.finish_reason == "length"
    (bare,) = echo(text, max_tokens=0, logprobs=None)
    assert bare.text == text and bare.logprobs is None


def test_plain_text_is_gone_on_with(shared: Running) -> None:
    client = shared.client()
    engine = shared.service.engine
    asked: Any = {"model": MODEL, "max_tokens": 8, "seed": 2, "extra_body": BRIEF}
    answer = client.completions.create(prompt="the ", logprobs=0, **asked)
    assert answer.object == "text_completion"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and len(logprobs.tokens or []) == answer.usage.completion_tokens  # type: ignore[union-attr]
    ids = [2, *engine.tokenizer.encode("the ")]
    assert engine.plain_prompt("the ").ids == tuple(ids)
    same = client.completions.create(prompt=ids, **asked)
    assert same.choices[0].text == answer.choices[0].text
    both = client.completions.create(prompt=["the ", "a"], n=2, **asked)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == answer.choices[0].text
    stream = client.completions.create(prompt="the ", stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_a_stream_can_be_paced_for_reading(shared: Running) -> None:
    paced = chunks(shared, LONG, seed=1, extra_body={"dgemma": {"pace": 2000}})
    assert joined(paced) == ANSWERS[LONG]
    pieces = [c.choices[0].delta.content for c in paced if c.choices[0].delta.content]
    assert len(pieces) > 5, "word by word, not block by block"


def test_every_event_is_an_event(shared: Running) -> None:
    text = shared.ask(SHORT, stream=True).text
    assert text.endswith("data: [DONE]\n\n")
    for event in text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"
