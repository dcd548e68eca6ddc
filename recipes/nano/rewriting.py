"""Rewrites of sentences with one right result by rule: tense, politeness, length, case, words.

Each rewrite takes a sentence and returns the instruction and the result, or None where its rule
does not hold. `recipes.nano.prose_tasks` has edits of longer texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from dgemma.eval.spans import rename_word
from recipes.nano.raw import Pair
from recipes.nano.rewrite import plant_errors
from recipes.nano.slots import (
    ANIMALS,
    BOYS,
    CITIES,
    COLOURS,
    DAYS,
    GIRLS,
    MONTHS,
    OBJECTS,
    Draw,
)
from recipes.nano.verbs import BASE_OF_PAST, BASE_OF_THIRD, BE_PAST, FINITE, JOINING, PAST, third

Rewrite = tuple[str, str]  # instruction and result
PUT = [
    "{what}\n\n{text}",
    "{what}\n{text}",
    "{what} {text}",
    "{text}\n\n{what}",
    "{what}\n\nText: {text}",
    "Please do this: {what}\n\n{text}",
]
TO_PAST = [
    "Put this in the past tense.",
    "Rewrite this in the past tense.",
    "Change this to the past tense.",
    "Past tense, please.",
    "Write this as if it happened yesterday.",
    "Turn this into the past.",
]
TO_PRESENT = [
    "Put this in the present tense.",
    "Rewrite this in the present tense.",
    "Change this to the present tense.",
    "Present tense, please.",
    "Turn this into the present.",
]
TO_FUTURE = [
    "Put this in the future tense.",
    "Rewrite this with will.",
    "Change this to the future.",
    "Future tense, please.",
    "Turn this into the future tense.",
]
POLITE = [
    "Make this more polite.",
    "Say this politely.",
    "Rewrite this as a polite request.",
    "Make this sound friendlier.",
    "Turn this into a polite question.",
    "How can I say this more politely?",
]
SHORTER = [
    "Make this shorter.",
    "Shorten this sentence.",
    "Say this in fewer words.",
    "Cut what is not needed.",
    "Make it more concise.",
    "Shorter, please.",
]
NEGATIVE = [
    "Make this negative.",
    "Turn this into its opposite with not.",
    "Negate this sentence.",
    "Rewrite this with not.",
    "Say that this is not so.",
]
QUESTION = [
    "Turn this into a question.",
    "Make this a question.",
    "Ask this as a question.",
    "Rewrite this as a question.",
    "Question form, please.",
]
UPPER = [
    "Write this in capital letters.",
    "Make this all caps.",
    "Change this to upper case.",
    "Use capital letters only.",
    "Put everything in upper case.",
]
LOWER = [
    "Write this in small letters.",
    "Make this lower case.",
    "Change this to lower case.",
    "Use small letters only.",
    "Put everything in lower case.",
]
REPLACE = [
    "Replace {a} with {b}.",
    'Replace "{a}" by "{b}".',
    "Change {a} to {b}.",
    "Use {b} instead of {a}.",
    "Swap {a} for {b}.",
    "Write {b}, not {a}.",
]
REMOVE = [
    'Remove the word "{a}".',
    "Remove {a}.",
    "Delete the word {a}.",
    'Leave out "{a}".',
    "Take out {a}.",
    'Drop the word "{a}".',
]
CORRECT = [
    "Correct the mistakes.",
    "Fix the typos.",
    "Correct this sentence.",
    "Correct the spelling.",
    "Proofread this.",
    "Fix the errors in this sentence.",
    "There is a mistake here. Correct it.",
    "Write this without mistakes.",
]
PRONOUNS = ("You", "He", "She", "We", "They", "It")
SUBJECT = r"((?:The|My|Your|His|Her|Our|Their) [a-z]+|[A-Z][a-z]+|I)"
CONTRACTED = re.compile(r"n't|'(?:ll|m|re|ve|d)\b")
CLAUSE = re.compile(
    rf"^{SUBJECT} ((?:often|always|sometimes|usually|still|also) )?([a-z]+)( .+)?\.$"
)


def clause(text: str) -> tuple[str, str, str, str] | None:
    """Split subject, adverb, verb and rest of a sentence with a single verb."""
    match = CLAUSE.match(text)
    if match is None or len(text) > 90 or JOINING.search(text) or CONTRACTED.search(text):
        return None
    subject, adverb, verb, rest = match[1], match[2] or "", match[3], match[4] or ""
    if FINITE & set(re.findall(r"[a-z']+", f"{rest.lower()} {subject.lower()}")):
        return None
    return subject, adverb, verb, rest


def is_plural(subject: str) -> bool:
    return subject in ("I", "You", "We", "They") or (" " in subject and subject.endswith("s"))


def to_past(text: str, draw: Draw) -> Rewrite | None:
    parts = clause(text)
    if parts is None:
        return None
    subject, adverb, verb, rest = parts
    base = BASE_OF_THIRD.get(verb, verb if is_plural(subject) else "")
    past = BE_PAST.get(verb) or PAST.get(base)
    if verb == "are" and subject == "You":
        past = "were"
    if past is None or past == verb:
        return None
    return draw.pick(TO_PAST), f"{subject} {adverb}{past}{rest}."


def to_present(text: str, draw: Draw) -> Rewrite | None:
    parts = clause(text)
    if parts is None or parts[2] not in BASE_OF_PAST or parts[2] in BASE_OF_PAST.values():
        return None
    subject, adverb, verb, rest = parts
    base = BASE_OF_PAST[verb]
    return draw.pick(
        TO_PRESENT
    ), f"{subject} {adverb}{base if is_plural(subject) else third(base)}{rest}."


def to_future(text: str, draw: Draw) -> Rewrite | None:
    parts = clause(text)
    if parts is None:
        return None
    subject, adverb, verb, rest = parts
    base = "be" if verb in BE_PAST else BASE_OF_THIRD.get(verb) or BASE_OF_PAST.get(verb)
    if base is None and is_plural(subject) and verb in PAST:
        base = verb
    if base is None:
        return None
    return draw.pick(TO_FUTURE), f"{subject} will {adverb}{base}{rest}."


IMPERATIVE = re.compile(r"^([A-Z][a-z]+)((?: [A-Za-z'0-9]+){1,8})[.!]$")


def polite(text: str, draw: Draw) -> Rewrite | None:
    match = IMPERATIVE.match(text)
    if (
        match is None
        or match[1].lower() not in PAST
        or match[1] in ("Like", "Mean", "Saw", "Thank")
    ):
        return None
    if FINITE & set(match[2].split()) or JOINING.search(match[2]):
        return None
    return draw.pick(POLITE), f"Could you please {match[1].lower()}{match[2]}?"


EXTRA = re.compile(
    r" (very|really|quite|just|actually|rather|simply|totally|extremely|certainly|definitely|"
    r"absolutely|completely|probably|basically|literally|truly)(?= [a-z])"
)
TAIL = re.compile(r",? (?:because|although|even though|since|while|whereas) .+(?=[.!]$)")


def shorter(text: str, draw: Draw) -> Rewrite | None:
    cut = TAIL.sub("", EXTRA.sub("", text))
    if cut == text or len(cut.split()) < 3 or re.search(r"\b(not|so|a|an)$", cut.rstrip(".!")):
        return None
    if re.search(r"\b(not|a|an) (very|really|quite|just|rather)\b", text):
        return None
    return draw.pick(SHORTER), cut


BE = re.compile(rf"^{SUBJECT} (is|are|was|were|am|can|will|should|must) (?!not\b)([^,;]+)\.$")


def _be(text: str) -> re.Match[str] | None:
    match = BE.match(text)
    if match is None or len(text) > 80 or JOINING.search(match[3]):
        return None
    return match


def negative(text: str, draw: Draw) -> Rewrite | None:
    match = _be(text)
    if match is None or re.search(r"\b(no|not|never|some|nothing|nobody)\b|n't", text):
        return None
    return draw.pick(NEGATIVE), f"{match[1]} {match[2]} not {match[3]}."


def question(text: str, draw: Draw) -> Rewrite | None:
    match = _be(text)
    if match is None or match[2] in ("am", "must"):
        return None
    first, *more = match[1].split()
    is_name = first in ("I", "Tom", "Mary", "Sami", "Ziri", "Yanni") or first in (*GIRLS, *BOYS)
    if not (is_name or more or first in PRONOUNS):
        return None
    subject = " ".join([first if is_name else first.lower(), *more])
    return draw.pick(QUESTION), f"{match[2].capitalize()} {subject} {match[3]}?"


def upper(text: str, draw: Draw) -> Rewrite | None:
    return (draw.pick(UPPER), text.upper()) if len(text) < 90 else None


def lower(text: str, draw: Draw) -> Rewrite | None:
    return (draw.pick(LOWER), text.lower()) if text != text.lower() else None


GROUPS: Sequence[Sequence[str]] = (GIRLS, BOYS, CITIES, COLOURS, DAYS, MONTHS, ANIMALS, OBJECTS)
NOT_ALWAYS = {"Will", "May", "March", "Mark", "April", "June", "Nice", "Cork", "watch", "orange"}
GROUP_OF = {w: group for group in GROUPS for w in group if " " not in w and w not in NOT_ALWAYS}


def replace(text: str, draw: Draw) -> Rewrite | None:
    """Replace a word by another of its group: a name by a name, a colour by a colour."""
    known = [word for word in set(re.findall(r"[A-Za-z]+", text)) if word in GROUP_OF]
    if not known:
        return None
    old = draw.any(sorted(known))
    alike = [
        word
        for word in draw.side(GROUP_OF[old])
        if word not in text and (word[0] in "aeiou") == (old[0] in "aeiou")
    ]
    if not alike:
        return None
    new = draw.any(alike)
    return draw.pick(REPLACE).format(a=old, b=new), rename_word(text, old, new)


def remove(text: str, draw: Draw) -> Rewrite | None:
    words = re.findall(r"(?<= )[a-z]{3,}(?= )", text)
    once = [word for word in words if len(re.findall(rf"\b{word}\b", text)) == 1]
    if not once or len(text.split()) < 5:
        return None
    word = draw.any(once)
    return draw.pick(REMOVE).format(a=word), text.replace(f" {word} ", " ", 1)


def corrected(text: str, draw: Draw) -> tuple[str, str, str] | None:
    """Return instruction, a text with planted errors and the original."""
    words = len(text.split())
    wrong = plant_errors(text, draw.rng, draw.rng.randint(1, max(1, words // 5)))
    return None if wrong is None else (draw.pick(CORRECT), wrong, text)


REWRITES: Sequence[Callable[[str, Draw], Rewrite | None]] = (
    *(to_past, to_past, to_present, to_future, polite, polite, shorter, shorter),
    *(negative, question, upper, lower, replace, replace, remove),
)


def rewrite_pairs(draw: Draw, sentences: Sequence[str], count: int) -> Iterator[Pair]:
    """Rewrite sentences, of each kind about as many as `REWRITES` has entries of it."""
    made, tried = 0, 0
    while made < count and tried < 60 * count:
        rule = draw.any(REWRITES)
        for _ in range(40):
            tried += 1
            text = draw.any(sentences)
            result = rule(text, draw)
            if result is not None and result[1] != text:
                what, reply = result
                made += 1
                prompt = draw.pick(PUT).format(what=what, text=text)
                yield {"prompt": prompt, "reply": reply, "kind": rule.__name__}
                break


def correction_pairs(draw: Draw, texts: Sequence[str], count: int) -> Iterator[Pair]:
    """Plant errors in texts and ask for the originals."""
    for text in draw.rng.sample(list(texts), min(count, len(texts))):
        made = corrected(text, draw)
        if made is not None:
            what, wrong, right = made
            yield {"prompt": draw.pick(PUT).format(what=what, text=wrong), "reply": right}
