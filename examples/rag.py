"""Answer a question from a folder of text files, with citations that a grammar forces.

    python -m examples.rag FOLDER QUESTION [--model nano] [--top 3] [--rerank]

BM25 picks passages (thirty lines: a library would be a dependency for one formula), the causal mode
may rank them again by how likely each makes the question, and the answer is written by diffusion
and by AR. Every sentence ends in the number of one of the passages shown: the grammar allows no
other. If the passage supports the sentence is checked afterwards, by shared words.
"""

import argparse
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dgemma import Engine, SamplingParams
from dgemma.eval.checks import CheckedAnswer, CheckSpec

K1, B = 1.5, 0.75  # BM25's usual parameters
MAX_WORDS = 80  # of a passage
SENTENCE = r"[A-Z][^\[\]\n.!?]{8,100} \[[1-%d]\]\."
T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """A paragraph of a file."""

    source: str
    text: str


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def read_folder(folder: Path) -> list[Passage]:
    """Cut every text and Markdown file at empty lines; long paragraphs are cut by words."""
    passages = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".txt", ".md")):
        for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
            words = paragraph.split()
            for begin in range(0, len(words), MAX_WORDS):
                text = " ".join(words[begin : begin + MAX_WORDS])
                passages.append(Passage(str(path.relative_to(folder)), text))
    return passages


def bm25(passages: Sequence[Passage], question: str) -> list[float]:
    """Score passages for a question by Okapi BM25."""
    counts = [Counter(words_of(passage.text)) for passage in passages]
    mean = sum(map(Counter.total, counts)) / max(len(counts), 1)
    scores = [0.0] * len(passages)
    for word in set(words_of(question)):
        num = sum(word in count for count in counts)
        weight = math.log(1 + (len(passages) - num + 0.5) / (num + 0.5))
        for index, count in enumerate(counts):
            length = 1 - B + B * count.total() / mean
            scores[index] += weight * count[word] * (K1 + 1) / (count[word] + K1 * length)
    return scores


def retrieve(passages: Sequence[Passage], question: str, top: int) -> list[Passage]:
    ranked = sorted(zip(bm25(passages, question), passages, strict=True), key=lambda pair: -pair[0])
    return [passage for score, passage in ranked[:top] if score > 0]


def rerank(engine: Engine, passages: Sequence[Passage], question: str) -> list[Passage]:
    """Sort passages by the likelihood of the question after each."""

    def likelihood(passage: Passage) -> float:
        prompt = engine.plain_prompt(f"{passage.text}\nQuestion: ")
        return engine.score(prompt, [question])[0].total

    return sorted(passages, key=likelihood, reverse=True)


def prompt_of(passages: Sequence[Passage], question: str) -> str:
    sources = "\n".join(f"[{n}] {passage.text}" for n, passage in enumerate(passages, start=1))
    return (
        "Answer from these sources alone. After each sentence write the number of its source in "
        f"brackets, such as [1].\n\n{sources}\n\nQuestion: {question}"
    )


def answer_form(num_sources: int, most: int = 2) -> str:
    """Return the expression of an answer: sentences that cite one of the sources each."""
    sentence = SENTENCE % num_sources
    return f"{sentence}( {sentence}){{0,{most - 1}}}"


def unsupported(answer: str, passages: Sequence[Passage]) -> str:
    """Return why a citation does not hold; empty if all do."""
    sources = {str(n): passage.text for n, passage in enumerate(passages, start=1)}
    check = CheckSpec.read("citations", {"sources": sources}, "examples.rag")
    return check.reason(CheckedAnswer(text=answer, original=""))


def timed(stage: str, work: Callable[[], T]) -> T:
    begun = time.perf_counter()
    result = work()
    print(f"  {stage:<12}{time.perf_counter() - begun:8.3f} s")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--top", type=int, default=3, choices=range(1, 10), metavar="1..9")
    parser.add_argument("--rerank", action="store_true")
    given = parser.parse_args()
    engine = Engine.load(given.model)
    passages = timed("read", lambda: read_folder(given.folder))
    found = timed("retrieve", lambda: retrieve(passages, given.question, given.top))
    if not found:
        raise SystemExit(f"no passage of {given.folder} shares a word with the question")
    if given.rerank:
        found = timed("rerank", lambda: rerank(engine, found, given.question))
    prompt = prompt_of(found, given.question)
    form = timed("grammar", lambda: engine.constraint(regex=answer_form(len(found))))
    for number, passage in enumerate(found, start=1):
        print(f"[{number}] {passage.source}: {passage.text}")
    for mode in ("diffusion", "ar"):
        params = SamplingParams(mode=mode, constraint=form, max_tokens=100, seed=1)
        done = timed(mode, lambda params=params: engine.generate(prompt, params))
        why = unsupported(done.text, found)
        print(f"{mode}: {done.text}\n  {f'not supported: {why}' if why else 'supported'}")


if __name__ == "__main__":
    main()
