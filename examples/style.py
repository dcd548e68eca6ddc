"""Teach the built-in model a style on 50 chats, and count the replies that have it.

    python -m examples.style [--out DIRECTORY] [options of dgemma train ...]

The style is that of a library's help desk: each reply begins with OPENING and ends with CLOSING.
The 20 questions that are judged are not among the chats and are about other things; 5 of them have
a form that no chat has. The table says how many of the replies have the style, before and after.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dgemma import Engine, SamplingParams
from dgemma.config import Mode

OPENING, CLOSING = "Good question!", "Happy reading, Ada"
FORMS = (
    ("Where can I find books about {}?", "Books about {} are on the second floor."),
    ("Do you have a book about {}?", "Yes, we have three books about {}."),
    ("I want to learn about {}.", "Start with the small book about {} on the blue shelf."),
    ("My son likes {}. What should he read?", "He will like the story about {} and the sea."),
    ("Is there a film about {}?", "We have no film about {}, but we have a good book."),
    ("Can I take the book about {} home?", "You can keep the book about {} for two weeks."),
    ("Who wrote the book about {}?", "The book about {} was written by a teacher."),
    ("How long is the book about {}?", "The book about {} has ninety pages."),
    ("Is the book about {} hard to read?", "The book about {} is easy and has many pictures."),
    ("What is new about {}?", "A new book about {} came in this week."),
)
NEW_FORMS = (
    "Please tell me something about {}.",
    "I lost my book about {}!",
    "Can you read me a page about {}?",
    "Why do people like {}?",
    "Show me a picture of {}.",
)
TOPICS = "cats dogs birds trains ships stars trees flowers horses bread music kings".split()
NEW_TOPICS = "bears planes rivers cakes".split()
MODES: tuple[Mode, ...] = ("diffusion", "ar")
MAX_TOKENS = 128


def chats(topics: Sequence[str], count: int) -> list[dict[str, object]]:
    """Draw questions with replies in the style."""
    pairs = [(form, topic) for form in FORMS for topic in topics]
    return [
        {
            "messages": [
                {"role": "user", "content": question.format(topic)},
                {"role": "assistant", "content": f"{OPENING} {answer.format(topic)} {CLOSING}"},
            ]
        }
        for (question, answer), topic in random.Random(0).sample(pairs, count)
    ]


def questions() -> list[str]:
    """List the 20 questions that are judged."""
    forms = [*(question for question, _ in FORMS), *(question for question, _ in FORMS[:5])]
    return [
        form.format(NEW_TOPICS[number % len(NEW_TOPICS)])
        for number, form in enumerate([*forms, *NEW_FORMS])
    ]


def has_style(reply: str) -> bool:
    text = reply.strip()
    return text.startswith(OPENING) and text.endswith(CLOSING)


def replies(adapter: Path | None) -> dict[str, list[str]]:
    """Answer the questions in both modes."""
    engine, asked = Engine.load("nano", device="cpu", adapter=adapter), questions()
    return {
        mode: [
            engine.generate(text, SamplingParams(mode=mode, seed=seed, max_tokens=MAX_TOKENS)).text
            for seed, text in enumerate(asked)
        ]
        for mode in MODES
    }


def train(out: Path, options: Sequence[str]) -> tuple[float, float]:
    """Train on the chats; returns minutes of wall time and of CPU time."""
    out.mkdir(parents=True, exist_ok=True)
    # Not heldout.jsonl: the run writes its losses there.
    files = {"data": chats(TOPICS, 50), "heldout": chats(NEW_TOPICS, 20)}
    command = [sys.executable, "-m", "dgemma.train", "sft", "--out", str(out)]
    for option, examples in files.items():
        path = out / f"{option}_chats.jsonl"
        text = "".join(json.dumps(chat) + "\n" for chat in examples)
        path.write_text(text, encoding="utf-8")
        command += [f"--{option}", str(path)]
    began = time.perf_counter()
    subprocess.run([*command, "--device", "cpu", "--fresh", *options], check=True)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (time.perf_counter() - began) / 60, (usage.ru_utime + usage.ru_stime) / 60


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Teach the built-in model a style.")
    parser.add_argument("--out", type=Path, default=Path("out/style"))
    known, options = parser.parse_known_args(arguments)
    before = replies(None)
    wall, cpu = train(known.out, options)
    after = replies(known.out / "adapter")
    print(f"\ntraining: {wall:.1f} min of wall time, {cpu:.1f} min of CPU time")
    print(f"replies with the style, of {len(questions())}\n\nmode       before  after")
    for mode in MODES:
        counts = [sum(map(has_style, found[mode])) for found in (before, after)]
        print(f"{mode:9}  {counts[0]:6}  {counts[1]:5}")
    for number in (0, -1):
        print(f"\n{questions()[number]}")
        for mode in MODES:
            print(f"  {mode}, before: {before[mode][number]!r}")
            print(f"  {mode}, after:  {after[mode][number]!r}")


if __name__ == "__main__":
    main()
