"""Tokenizers and templates for the tests: the small ones, and the released ones where they lie."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dgemma.text.chat import ChatTemplate
from dgemma.text.tokenizer import Tokenizer
from tests.text.small import TEMPLATE, small_tokenizer

BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[3] / "shared" / "checkpoint"


@pytest.fixture(scope="session")
def released_files() -> Path:
    directory = Path(os.environ.get("DGEMMA_CHECKPOINT_FILES", BESIDE_THE_REPOSITORY))
    if not (directory / "tokenizer.json").is_file():
        pytest.skip("the released tokenizer.json is not here; set DGEMMA_CHECKPOINT_FILES")
    return directory


@pytest.fixture(scope="session")
def released(released_files: Path) -> Tokenizer:
    return Tokenizer.load(released_files)


@pytest.fixture(scope="session")
def small() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="session", params=["small", "released"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture(scope="session")
def chat(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> ChatTemplate:
    if tokenizer is small_tokenizer():
        return ChatTemplate(TEMPLATE, tokenizer)
    return ChatTemplate.load(request.getfixturevalue("released_files"), tokenizer)


@pytest.fixture(scope="session")
def peer(released_files: Path) -> Callable[..., list[int]]:
    """The same prompt by transformers, from OpenAI-style dicts."""
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(released_files / "tokenizer.json"), bos_token="<bos>"
    )
    template = (released_files / "chat_template.jinja").read_text(encoding="utf-8")

    def render(messages: list[dict], tools: list[dict] | None = None, **options: bool) -> list[int]:
        options = {"add_generation_prompt": True, **options}
        return reference.apply_chat_template(
            messages, tools=tools, chat_template=template, return_dict=False, **options
        )

    return render
