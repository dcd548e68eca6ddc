"""Templates of untrusted checkpoints have limits of time and memory, and change nothing else."""

import os
import shutil
from pathlib import Path

import pytest

from dgemma.errors import CheckpointError, UsageError
from dgemma.text import chat
from dgemma.text import template as templates
from dgemma.text.chat import SHIPPED, ChatTemplate, Message, Tool, is_known
from dgemma.text.tokenizer import Tokenizer
from tests.text.small import TEMPLATE, small_tokenizer

USER = Message(role="user", content="Hello <|turn> é")
DOUBLED = "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 40 + "{{ x }}"
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture
def small() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 1.0)


@pytest.mark.parametrize("source", [ENDLESS, "{{ 7 ** (7 ** 12) }}"])
def test_a_template_that_does_not_end_is_refused(
    source: str, small: Tokenizer, short: None
) -> None:
    with pytest.raises(CheckpointError, match="did not finish within 1 seconds"):
        ChatTemplate.of_checkpoint(source, small).prompt([USER])


@pytest.mark.parametrize(
    "source",
    [
        DOUBLED,
        "{{ 'a' * 9999999999 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'a' | center(9999999999) }}",
    ],
)
def test_a_template_that_grows_text_is_refused(source: str, small: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match="needs more than 1024 MiB"):
        ChatTemplate.of_checkpoint(source, small).prompt([USER])


def test_a_template_that_fails_on_some_conversations_fails_on_those(
    small: Tokenizer, short: None
) -> None:
    """A child that was killed is replaced; the next conversation is rendered."""
    source = "{% if messages | length > 1 %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate.of_checkpoint(source, small)
    with pytest.raises(CheckpointError, match="did not finish"):
        template.prompt([USER, Message(role="assistant", content="Hello")])
    assert template.prompt([USER]).text == USER.content


def test_a_prompt_beyond_the_limit_is_refused(small: Tokenizer) -> None:
    source = "{{ messages[0].content * 9999999 }}"
    with pytest.raises(UsageError, match=r"writes \d+ characters"):
        ChatTemplate.of_checkpoint(source, small).prompt([USER])


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ 1 + }}", "chat template, line 1"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "template"),
        ("{{ [" * 500 + "1" + "] }}" * 500, "template"),
        ("x" * (chat.MAX_TEMPLATE_BYTES + 1), "characters; at most"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(
    source: str, sentence: str, small: Tokenizer
) -> None:
    with pytest.raises(CheckpointError, match=sentence) as caught:
        ChatTemplate.of_checkpoint(source, small)
    assert str(caught.value).isprintable()


def test_both_ways_render_the_same(small: Tokenizer) -> None:
    """The reference renders in this process; messages, tools, thoughts and refusals are equal."""
    trusted, bounded = (ChatTemplate(TEMPLATE, small, is_trusted=way) for way in (True, False))
    tool = Tool(name="f", description="<|tool>", parameters={"type": "object", "x": [1, 2.5, None]})
    conversation = [
        Message(role="system", content="Be brief."),
        Message(role="user", content=("One", "two <turn|> \U0001f600")),
        Message(role="assistant", content="", thought="so", tool_calls=()),
        USER,
    ]
    for messages in ([USER], conversation):
        for thinking in (False, True):
            prompts = [
                template.prompt(messages, [tool], enable_thinking=thinking)
                for template in (trusted, bounded)
            ]
            assert prompts[0] == prompts[1]
    refusals = []
    for way in (True, False):
        template = ChatTemplate(
            "{{ raise_exception('not ' ~ messages[0].role) }}", small, is_trusted=way
        )
        with pytest.raises(UsageError) as caught:
            template.prompt([USER])
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]


def test_shipped_templates_are_rendered_in_this_process_and_others_are_not(
    small: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = list[str]()
    monkeypatch.setattr(chat, "render_bounded", lambda source, *_: asked.append(source) or "")
    for path in SHIPPED:
        shutil.copyfile(path, tmp_path / "chat_template.jinja")
        assert is_known(path.read_text("utf-8")) and ChatTemplate.load(tmp_path, small)
    assert not asked
    (tmp_path / "chat_template.jinja").write_text("{{ 1 }}")
    ChatTemplate.load(tmp_path, small)
    assert asked == ["{{ 1 }}"]


def test_the_released_template_is_known() -> None:
    released = Path(__file__).resolve().parents[3] / "shared/checkpoint/chat_template.jinja"
    if not released.exists():
        pytest.skip("no released files on this machine")
    assert is_known(released.read_text("utf-8"))


def test_the_current_directory_cannot_replace_a_library_of_the_child(
    small: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('replaced')")
    monkeypatch.chdir(tmp_path)
    templates._kill_idle()
    assert ChatTemplate.of_checkpoint("{{ messages[0].content }}", small).prompt([USER]).text
    assert os.getcwd() == str(tmp_path)
