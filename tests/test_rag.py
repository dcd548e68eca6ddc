"""The retrieval example on files: passages, forced citations, support."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.rag import Passage, answer_form, bm25, prompt_of, read_folder, retrieve, unsupported

FILES = {
    "bridge.txt": "The Marlow bridge was opened in 1832.\n\nIt carries cars of up to three tons.",
    "tunnel.md": "The Denham tunnel was closed for repairs in 2019.",
    "notes.csv": "not,read",
}
QUESTION = "When was the Marlow bridge opened?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_paragraphs_are_read_and_the_one_with_rare_words_comes_first(folder: Path) -> None:
    passages = read_folder(folder)
    assert [p.source for p in passages] == ["bridge.txt", "bridge.txt", "tunnel.md"]
    assert retrieve(passages, QUESTION, 1) == [Passage("bridge.txt", FILES["bridge.txt"][:37])]
    assert retrieve(passages, "zebra", 3) == []


def test_scores_are_those_of_the_formula() -> None:
    (score,) = bm25([Passage("a", "red red fish")], "red")
    assert score == pytest.approx(0.28768207 * 2 * 2.5 / (2 + 1.5))


def test_the_form_allows_existing_sources_alone(folder: Path) -> None:
    form = re.compile(answer_form(2))
    assert form.fullmatch("The bridge was opened in 1832 [1].")
    assert form.fullmatch("The bridge was opened in 1832 [1]. The tunnel was closed [2].")
    assert not form.fullmatch("The bridge was opened in 1832 [3].")
    assert not form.fullmatch("The bridge was opened in 1832.")


def test_support_is_checked_by_words_of_the_source(folder: Path) -> None:
    passages = read_folder(folder)
    assert "[2] It carries cars" in prompt_of(passages, QUESTION)
    assert unsupported("The Marlow bridge was opened in 1832 [1].", passages) == ""
    assert unsupported("The Marlow bridge was opened in 1832 [3].", passages) != ""


def test_the_example_answers_in_both_modes_and_tells_the_seconds_of_each_stage(
    folder: Path,
) -> None:
    command = [sys.executable, "-m", "examples.rag", str(folder), QUESTION, "--rerank"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr
    stages = re.findall(r"^  (\w+) +[\d.]+ s$", run.stdout, flags=re.M)
    assert stages == ["read", "retrieve", "rerank", "grammar", "diffusion", "ar"]
    for mode in ("diffusion", "ar"):
        answer = re.search(rf"^{mode}: (.*)$", run.stdout, flags=re.M)
        assert answer and re.fullmatch(answer_form(3), answer[1]), run.stdout
