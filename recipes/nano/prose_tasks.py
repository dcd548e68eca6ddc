"""Make tasks from sentences and stories: continue, write about, fill, correct, edit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random

from dgemma.eval.spans import draw_hole, rename_word, sentence_spans
from dgemma.text.control_tokens import FILL_MARK
from recipes.nano.raw import Document, Pair
from recipes.nano.rewrite import open_hole, plant_errors, split_sentences
from recipes.nano.split import chunks

CONTINUE = ["Continue the story.", "Continue this story.", "What happens next?", "Go on."]
CORRECT = [
    "Correct the mistakes.",
    "Correct the errors.",
    "Fix the mistakes in this text.",
    "Correct this text.",
    "Proofread this.",
    "Fix spelling and grammar.",
]
GAP = ["Fill the gap.", "Fill in the gap.", "Fill in the blank.", "Replace ___ with what fits."]
FILL_TEXT = [
    f"Replace {FILL_MARK} and reply with the whole text.",
    f"Fill in {FILL_MARK}. Reply with the completed text.",
    "Complete the document.",
]
NAMES = (
    "Anna Ben Clara David Emma Finn Grace Henry Iris Jack Kate Leo Lily Max Mia Nora Oscar Paul "
    "Rosa Sam Sara Tina Tom Victor Zoe Mary John Lucy Peter Alice Adam Ella Hugo Ivy Jane Luke"
).split()
NOT_NAMES = set(
    "I The A An He She It They We You But And So Then When What Who Why How Where If In On At To "
    "This That There Here One Once All No Not Yes Oh My His Her Their Its Our Your For From With "
    "After Before Now Some Many Mr Mrs Dr God King Queen Prince Princess O".split()
)


def find_nouns(sentences: Sequence[str], max_count: int = 1500) -> list[str]:
    """Find words that often follow an article and end a phrase there."""
    after = r"(?=[.,!?;]| (?:is|was|and|in|on|of|with|to)\b)"
    noun = re.compile(rf"\b(?:a|an|the|my|his|her) ([a-z]{{3,10}})\b{after}")
    counts = Counter(word for text in sentences for word in noun.findall(text))
    everywhere = Counter(word for text in sentences for word in re.findall(r"[a-z]{3,10}", text))
    usual = [
        word
        for word, count in counts.most_common(4 * max_count)
        if count >= 20 and count > 0.25 * everywhere[word] and not word.endswith(("ly", "st"))
    ]
    return usual[:max_count]


def sentence_texts(sentences: Sequence[str], rng: Random, max_count: int) -> Iterator[str]:
    """Join sentences to small groups; many stay single."""
    order = rng.sample(sentences, min(max_count, len(sentences)))
    at = 0
    while at < len(order):
        size = rng.choice((1, 1, 2, 3, 4, 6, 8))
        yield " ".join(order[at : at + size])
        at += size


def short_texts(stories: Sequence[Document], rng: Random, max_size: int) -> list[str]:
    """Cut every story into pieces of between a third of `max_size` and all of it."""
    pieces = [
        piece
        for document in stories
        for piece in chunks(document.text, rng.randint(max_size // 3, max_size))
        if len(piece) >= 120
    ]
    return rng.sample(pieces, len(pieces))


def story_tasks(texts: Sequence[str], nouns: set[str], rng: Random) -> Iterator[Pair]:
    """Ask for a continuation, a gap or the order of sentences."""
    makers = [continue_story, continue_story, fill_gap, put_in_order, next_sentence]
    for text in texts:
        made = rng.choice(makers)(text, nouns, rng)
        if made is not None:
            yield made


def story_requests(stories: Sequence[Document], nouns: set[str], rng: Random) -> Iterator[Pair]:
    """Ask for a story; only the opening of one is an answer to that."""
    openings: dict[str, str] = {}
    for document in stories:
        openings.setdefault(document.group, document.text)
    for text in openings.values():
        for _ in range(4):
            made = write_about(chunks(text, rng.randint(500, 2000))[0], nouns, rng)
            if made is not None:
                yield made


def sentence_tasks(sentences: Sequence[str], nouns: set[str], rng: Random) -> Iterator[Pair]:
    """Ask for a sentence with a word, or for a gap in one."""
    for text in sentences:
        made = rng.choice([write_sentence, fill_gap])(text, nouns, rng)
        if made is not None:
            yield made


def pair(instruction: str, text: str, reply: str) -> Pair:
    return {"prompt": f"{instruction}\n\n{text}", "reply": reply}


def continue_story(text: str, nouns: set[str], rng: Random) -> Pair | None:
    spans = sentence_spans(text)
    if len(spans) < 3:
        return None
    start = spans[rng.randrange(1, len(spans))][0]
    return pair(rng.choice(CONTINUE), text[:start].rstrip(), text[start:])


def next_sentence(text: str, nouns: set[str], rng: Random) -> Pair | None:
    spans = sentence_spans(text)
    if len(spans) < 3:
        return None
    start, stop = spans[rng.randrange(1, len(spans))]
    return pair("Write the next sentence.", text[:start].rstrip(), text[start:stop])


def nouns_in(text: str, nouns: set[str]) -> list[str]:
    return list(dict.fromkeys(word for word in re.findall(r"[a-z]+", text) if word in nouns))


def write_about(text: str, nouns: set[str], rng: Random) -> Pair | None:
    subjects = nouns_in(text, nouns)
    if len(subjects) < 2:
        return None
    counts = Counter(re.findall(r"[a-z]+", text))
    first, second = rng.sample(sorted(subjects, key=lambda word: -counts[word])[:4], 2)
    request = rng.choice(
        [
            f"Write a short story about {article(first)} and {article(second)}.",
            f"Write a story about {article(first)} and {article(second)}.",
            f"Tell me a story about {article(first)}.",
            f"Write a short story with the words {first} and {second}.",
        ]
    )
    return {"prompt": request, "reply": text}


def article(noun: str) -> str:
    if noun.endswith("s") and not noun.endswith("ss"):
        return noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def write_sentence(text: str, nouns: set[str], rng: Random) -> Pair | None:
    subjects = nouns_in(text, nouns)
    if not subjects:
        return None
    word = rng.choice(subjects)
    about = f"Write a sentence about {article(word)}."
    return {
        "prompt": rng.choice([f'Write a sentence with the word "{word}".', about]),
        "reply": text,
    }


def fill_gap(text: str, nouns: set[str], rng: Random) -> Pair | None:
    span = draw_hole(text, rng)
    if span is None or "___" in text:
        return None
    return pair(rng.choice(GAP), open_hole(text, span, "___"), text)


def put_in_order(text: str, nouns: set[str], rng: Random) -> Pair | None:
    ordered = split_sentences(text.replace("\n\n", " "))[: rng.randint(3, 5)]
    mixed = rng.sample(ordered, len(ordered))
    if len(ordered) < 3 or mixed == ordered:
        return None
    return pair("Put these sentences in order.", "\n".join(mixed), "\n".join(ordered))


def corrections(texts: Sequence[str], rng: Random, per_words: int) -> Iterator[Pair]:
    """Plant about one error in `per_words` words, rarely none, and ask for the original."""
    for text in texts:
        count = rng.randint(1, max(1, len(text.split()) // per_words))
        wrong = text if rng.random() < 0.03 else plant_errors(text, rng, count)
        if wrong is not None:
            yield pair(rng.choice(CORRECT), wrong, text)


def edits(texts: Sequence[str], nouns: Sequence[str], rng: Random) -> Iterator[Pair]:
    """Ask for one change of a text: a name, a noun, case, sentences, tense, order."""
    makers: list[Callable[[str, Sequence[str], Random], Pair | None]] = [
        rename,
        rename,
        replace_noun,
        replace_noun,
        replace_noun,
        change_case,
        by_sentences,
        by_sentences,
        change_tense,
        sort_words,
    ]
    for text in texts:
        made = rng.choice(makers)(text, nouns, rng)
        if made is None:
            made = rng.choice([change_case, replace_noun, change_tense])(text, nouns, rng)
        if made is not None:
            yield made


def rename(text: str, nouns: Sequence[str], rng: Random) -> Pair | None:
    inside = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+\b", text))
    names = [word for word in inside if word not in NOT_NAMES]
    unused = [name for name in NAMES if name not in text]
    if not names or not unused:
        return None
    old, new = rng.choice(names), rng.choice(unused)
    forms = [f"Change {old} to {new}.", f"Rename {old} to {new}.", f"Call {old} {new} instead."]
    return pair(rng.choice(forms), text, rename_word(text, old, new))


def replace_noun(text: str, nouns: Sequence[str], rng: Random) -> Pair | None:
    candidates = nouns_in(text, set(nouns))
    if not candidates:
        return None
    old = rng.choice(candidates)
    # The article before the word has to stay right.
    alike = [word for word in rng.sample(nouns, 20) if (word[0] in "aeiou") == (old[0] in "aeiou")]
    if not alike or alike[0] in text or f"{old}s" in text:
        return None
    new = alike[0]
    forms = [f"Change {old} to {new}.", f'Replace "{old}" with "{new}".', f"Use {new}, not {old}."]
    return pair(rng.choice(forms), text, rename_word(text, old, new))


def change_case(text: str, nouns: Sequence[str], rng: Random) -> Pair | None:
    text = split_sentences(text)[0]
    if len(text.split()) > 25:
        return None
    forms: list[tuple[str, Callable[[str], str]]] = [
        ("Write this in capital letters.", str.upper),
        ("Write this in small letters.", str.lower),
        ("Remove the punctuation.", lambda line: re.sub(r"[^\w\s']", "", line)),
        ("Replace the spaces with underscores.", lambda line: line.replace(" ", "_")),
        ("Write each word on a new line.", lambda line: "\n".join(line.split())),
        ("Reverse the order of the words.", lambda line: " ".join(line.split()[::-1])),
    ]
    instruction, change = rng.choice(forms)
    return pair(instruction, text, change(text)) if change(text) != text else None


def by_sentences(text: str, nouns: Sequence[str], rng: Random) -> Pair | None:
    parts = split_sentences(text.replace("\n\n", " "))
    if len(parts) < 3:
        return None
    whole = " ".join(parts)
    swapped = [parts[1], parts[0], *parts[2:]]
    forms = [
        ("Remove the last sentence.", " ".join(parts[:-1])),
        ("Remove the first sentence.", " ".join(parts[1:])),
        ("Put each sentence on a new line.", "\n".join(parts)),
        ("Swap the first two sentences.", " ".join(swapped)),
        ("Number the sentences.", "\n".join(f"{n}. {line}" for n, line in enumerate(parts, 1))),
        ("Keep only the first sentence.", parts[0]),
    ]
    instruction, reply = rng.choice(forms)
    return pair(instruction, whole, reply)


TENSES = [("is", "was"), ("are", "were"), ("am", "was")]
SIMPLE = re.compile(
    r"^(I|You|He|She|It|We|They|This|Tom|Mary|The [a-z]+|My [a-z]+) (is|are|am|was|were) "
    r"((?:not |very |too |so |always |still )?[a-z]+(?: [a-z]+){0,5})\.$"
)


def change_tense(text: str, nouns: Sequence[str], rng: Random) -> Pair | None:
    """Change sentences whose only verb is a form of to be, so that one word decides."""
    matches = [match for line in split_sentences(text) if (match := SIMPLE.match(line))]
    if not matches or re.search(r"\b(that|who|when|than|tomorrow|now|if|\w+ed)\b", matches[0][3]):
        return None
    subject, verb, rest = matches[0].groups()
    is_past = verb in ("was", "were")
    if is_past:
        present = "am" if subject == "I" else "is" if verb == "was" else "are"
        forms = [("present", present), ("future", "will be")]
    else:
        forms = [("past", dict(TENSES)[verb]), ("future", "will be")]
    tense, new = rng.choice(forms)
    return pair(f"Put this in the {tense} tense.", matches[0][0], f"{subject} {new} {rest}.")


def sort_words(text: str, nouns: Sequence[str], rng: Random) -> Pair | None:
    size = rng.randint(3, 8)
    if rng.random() < 0.3:
        numbers = [rng.randint(0, 99) for _ in range(size)]
        ordered = sorted(numbers)
        return pair("Sort these numbers.", listed(numbers), listed(ordered))
    words = rng.sample(nouns, size)
    forms = [
        ("Put these words in alphabetical order.", sorted(words)),
        ("Reverse this list.", words[::-1]),
        (f"Remove {words[1]} from this list.", [word for word in words if word != words[1]]),
    ]
    instruction, reply = rng.choice(forms)
    separator = rng.choice((", ", "\n"))
    return pair(instruction, separator.join(words), separator.join(reply))


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def fills(texts: Sequence[str], rng: Random) -> Iterator[Pair]:
    """Show each text with a hole and ask for the whole."""
    for text in texts:
        span = draw_hole(text, rng)
        if span is not None:
            yield pair(rng.choice(FILL_TEXT), open_hole(text, span), text)
