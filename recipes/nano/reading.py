"""Questions about a given text, answers that cite numbered sources, headlines.

An answer is a span of the text, or says that the text does not tell. Texts are made-up facts, and
sentences that people wrote and that a rule can ask about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from recipes.nano.facts import Subject, draw_subjects, mixed_text
from recipes.nano.raw import Pair
from recipes.nano.slots import BOYS, GIRLS, Draw
from recipes.nano.verbs import BASE_OF_PAST, FINITE

NOT_SAID = "The text does not say."
ASK = [
    "{text}\n\n{question}",
    "{question}\n\n{text}",
    "Text: {text}\n\nQuestion: {question}",
    "Read this and answer.\n\n{text}\n\n{question}",
    "Answer the question from the text.\n\n{text}\n\n{question}",
    "{text}\n\nQuestion: {question}\nAnswer:",
    "Here is a text.\n\n{text}\n\n{question}",
    "{question} Use this text.\n\n{text}",
    "Use only this text: {text}\n\n{question}",
    "Context: {text}\n\n{question}",
    "{text} {question}",
    "Paragraph: {text}\nQuestion: {question}",
    "Answer from this text: {text}\n{question}",
    '"{text}"\n\n{question}',
    "Document:\n{text}\n\nQ: {question}\nA:",
    "{question}\n{text}",
]
CITE = [
    "{sources}\n\n{question} [Cite|Name|Give|State] [the|your] source[.|]",
    "Sources:\n{sources}\n\nQuestion: {question}\nGive the number of the source[.|]",
    "{question}\n[Answer with a citation|Cite the source|Cite your source][.|:]\n\n{sources}",
    "{sources}\n\n{question} Answer in one sentence and cite the source[ in brackets|][.|]",
    "[Use|Read] these sources and cite [them|the right one].\n\n{sources}\n\n{question}",
    "Answer from the sources [below|here|given] and [name|cite] the source[.|]\n\n"
    "{sources}\n\n{question}",
    "[Answer|Reply] with the source in brackets, like [1][.|:]\n\n{sources}\n\n{question}",
    "{sources}\n\n[Q: |Question: |]{question} (with [source|citation|the source])",
    "{sources}\n\n{question}\n[Answer with the number of the source|Say which source it is from]",
]
HEADLINE = [
    "[Write|Give|Make|Find|Invent] a [headline|title] for [this|this text|the text][.|, please.|:]",
    "Give [this|this text|the text] a [headline|title][.|!|]",
    "What is [this|this text|the text] about? Answer in a few words[.|]",
    "[Sum this up|Sum it up|Say this] in [one short line|a few words|one line][.|]",
    "[Headline|Title][, please.|:|?|.]",
    "[Summarize|Summarise] [this|this text|the text] in [a few words|one short line][.|, please.|]",
]
FIRST = [
    "[Summarize|Summarise|Sum up] [this|this text|the text] in [one|a|a single] sentence[.|]",
    "[Summarize|Summarise|Sum up|Shorten] [this|this text|the text][.|, please.|:]",
    "What is the [main point|gist] of [this|this text|the text]?",
    "[Give me|Write|I need] a [one-sentence|short] summary[.| of this.|, please.]",
    "[Say|Tell me|Write] in one sentence what [happens|this is about][.|]",
]


def question_pairs(draw: Draw, sentences: Sequence[str], count: int) -> Iterator[Pair]:
    """Ask for a span of a text of two or three subjects, or of three to six real sentences."""
    asked = real_questions(draw, sentences)
    for number in range(count):
        real = next(asked, None) if number % 5 == 4 else None
        text, question, answer = real or made_question(draw)
        prompt = draw.any(ASK).format(text=text, question=question)
        yield {"prompt": prompt, "reply": answer}


def made_question(draw: Draw) -> tuple[str, str, str]:
    """Return text, question and answer; a tenth of the questions have none."""
    subjects = draw_subjects(draw, draw.any((1, 2, 2, 3)), draw.any((2, 3, 3, 4)))
    asked = draw.any(subjects)
    fact = draw.any(asked.facts)
    if draw.chance(0.1) and len(asked.facts) > 1:
        left = replace(asked, facts=[one for one in asked.facts if one is not fact])
        others = [left if one is asked else one for one in subjects]
        return mixed_text(draw, others), fact.question, NOT_SAID
    return mixed_text(draw, subjects), fact.question, fact.value


NAME = "|".join(sorted({*GIRLS, *BOYS}))
SAID = re.compile(
    rf"^({NAME}) ([a-z]+) ((?:a|an|the|his|her|some|two|three|my|our|their|all) [a-z ]+?)"
    r"( (?:in|at|on|for|from|with|after|before|near|into|during) [A-Za-z' ]+)?\.$"
)


def real_questions(draw: Draw, sentences: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Ask who did what in three to six sentences of the form name, past verb, object.

    The name is replaced by one that the other sentences do not have.
    """
    found = [match for text in sentences if (match := _said(text))]
    while len(found) >= 6:
        group = draw.rng.sample(found, draw.rng.randint(3, 6))
        names = [name for name, _ in draw.people(len(group))]
        lines = [_renamed(match, name) for match, name in zip(group, names, strict=True)]
        asked = draw.rng.randrange(len(group))
        yield (" ".join(lines), *_question(draw, group[asked], names[asked]))


def _said(text: str) -> re.Match[str] | None:
    match = SAID.match(text)
    if match is None or match[2] not in BASE_OF_PAST or len(text) > 80:
        return None
    return None if FINITE & set((match[3] + (match[4] or "")).split()) else match


def is_told(text: str) -> bool:
    """True for a sentence of a name, a past verb and an object, which a rule can ask about."""
    return _said(text) is not None


def _renamed(match: re.Match[str], name: str) -> str:
    return name + match[0][len(match[1]) :]


def _question(draw: Draw, match: re.Match[str], name: str) -> tuple[str, str]:
    rest = match[0][len(match[1]) + 1 : -1]
    verb = BASE_OF_PAST[match[2]]
    if draw.chance(0.5) or not match[3].startswith(
        ("a ", "an ", "the ", "two ", "three ", "some ")
    ):
        return f"Who {rest}?", name
    return f"What did {name} {verb}{match[4] or ''}?", match[3]


# --- citations


def cited_pairs(draw: Draw, count: int) -> Iterator[Pair]:
    """Ask about one of two to five numbered sources; the answer ends with its number."""
    for _ in range(count):
        subjects = draw_subjects(draw, draw.rng.randint(2, 5), draw.any((1, 2, 2, 3)))
        asked = draw.rng.randrange(len(subjects))
        fact = draw.any(subjects[asked].facts)
        lines = [f"[{i}] {one.text(draw)}" for i, one in enumerate(subjects, 1)]
        said = fact.statement.replace("{s}", subjects[asked].name)
        reply = f"{said[0].upper()}{said[1:].rstrip('.')} [{asked + 1}]."
        form = draw.phrase(CITE)
        prompt = form.format(sources="\n".join(lines), question=fact.question)
        yield {"prompt": prompt, "reply": reply, "answer": fact.value, "source": str(asked + 1)}


# --- summaries


def summary_pairs(draw: Draw, texts: Sequence[str], count: int) -> Iterator[Pair]:
    """Ask for a headline of made-up facts, or for the first sentence of a real text."""
    for number in range(count):
        if number % 3 == 2 and texts:
            text = draw.any(texts)
            yield {"prompt": f"{draw.phrase(FIRST)}\n\n{text}", "reply": _first_sentence(text)}
        else:
            subject = draw_subjects(draw, 1, draw.rng.randint(3, 5))[0]
            prompt = f"{draw.phrase(HEADLINE)}\n\n{subject.text(draw)}"
            yield {"prompt": prompt, "reply": headline(subject)}


def headline(subject: Subject) -> str:
    """Write the subject with its first two facts, as a headline does."""
    values = subject.values()
    name = values["name"]
    if subject.kind == "person":
        head = ", ".join([name, *filter(None, [values.get("age")])])
        job, city = values.get("job"), values.get("city")
        parts = [head, *([job] if job else []), *([f"from {city}"] if city else [])]
        likes = values.get("hobby") or values.get("food")
        tail = f" likes {likes}" if likes and len(parts) < 3 else ""
        return " ".join([", ".join(parts) + tail]) if len(parts) > 1 or tail else f"About {name}"
    title = name.capitalize()
    if subject.kind == "event":
        when, where = values.get("day"), values.get("place")
        found = [f"on {when}" if when else "", f"at {where}" if where else ""]
    else:
        found = [f"for {values['price']}" if "price" in values else ""]
        found.append(f"from {values['year']}" if "year" in values else "")
    return " ".join([title, *filter(None, found)])


def _first_sentence(text: str) -> str:
    match = re.match(r".+?[.!?][\"']?(?=\s|$)", text, re.DOTALL)
    return match[0] if match else text
