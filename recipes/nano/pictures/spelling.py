"""Spell pictures: which token each soft token of a picture stands for, and texts that teach it.

    python -m recipes.nano.pictures.spelling --data out/pictures.npz --out out/nano/tokens

A soft token of nano's tower has the embedding of one text token, of what is seen where it is. So a
tower only has to recognize what is local, and the language model reads: it learns from texts, with
tokens in the places of soft tokens, without any picture.

- A line: the last row, nearest to the reply, has one character per cell, in the column of its
  middle or the next free one where letters are narrow; the first letter of a word is with its
  space. Everything else is FILLER.
- A scene: the cell of an object's middle has its colour, the next one its form.

Writes OUT/lines.npz and OUT/scenes.npz. Some cells are wrong, as a tower's are.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from dgemma.images import Image, target_size
from dgemma.text.chat import ChatTemplate
from dgemma.text.control_tokens import IMAGE_BEGIN, IMAGE_END, IMAGE_TOKEN, TURN_END
from dgemma.text.messages import Message
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.tokens import TokenPair, TokenStore
from dgemma.weights.hub import NANO_DIRECTORY
from recipes.nano.pictures.compose import COLOURS, FORMS
from recipes.nano.pictures.glyphs import FIRST, HELD_OUT_EVERY
from recipes.nano.pictures.tower import CONFIG
from recipes.nano.slots import Draw, listed

SPACE = "\u2581"
FILLER = "\n"
# One token each; any word would do that is told from the others.
COLOUR_PIECES = [SPACE + w for w in "red green blue yellow orange ring black".split()]
FORM_PIECES = [SPACE + w for w in "round square tri star cross".split()]
MAX_OBJECTS = 4
SCENE_HEIGHTS = 0.75, 1.34  # of a width
NUMBERS = ("no", "one", "two", "three", "four")
SAY = [
    "What does it say?",
    "[Read|Transcribe|Type|Copy] [this|the text|the line|it][.|, please.|]",
    "What [is written|does the text say|is the text][ here|][ in the picture|]?",
    "[Read|Tell me|Write] what [it says|is written][ here|][.|]",
    "What [text|sentence|line] is [in|on] [the picture|this picture|it]?",
    "[Text|OCR|Transcription][, please.|.|:]",
]
ALIKE = (
    "Il1|i!",
    "O0oQ",
    "S5s$",
    "B8",
    "Z2z",
    "cCeG",
    "uUvV",
    "nhm",
    "rnm",
    ".,",
    "'`",
    "gq9",
    "6b",
    "wW",
)
NEIGHBOURS = {c: group.replace(c, "") for group in ALIKE for c in group}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_WRONG = 0.05  # of the characters


@dataclass(frozen=True, slots=True)
class Cells:
    """The soft tokens of a picture: a piece in some cells of a grid."""

    rows: int
    columns: int
    pieces: dict[int, str]  # by the cell's number


def line_columns(
    centres_K: Sequence[float] | NDArray[np.floating], columns: int
) -> list[int] | None:
    """Return the column of each character; None if they do not fit."""
    taken, last = [], -1
    for centre in centres_K:
        last = max(last + 1, int(centre))
        taken.append(last)
    return taken if last < columns else None


def line_pieces(text: str) -> list[str]:
    """Return the characters of a line, the first of a word with its space."""
    return [SPACE + c if i and text[i - 1] == " " else c for i, c in enumerate(text) if c != " "]


def line_layout(length: float, rng: Random) -> tuple[int, int, float]:
    """Return rows and columns of a picture with a line of so many ems, and its width in ems."""
    margin = rng.uniform(0.15, 1.0)
    height = rng.uniform(0.72, 1.25) + 2 * margin
    width = length + 2 * margin * rng.uniform(0.7, 1.4)
    return *soft_shape(height, width), width


def soft_shape(height: float, width: float) -> tuple[int, int]:
    """Return rows and columns of soft tokens in a picture of these proportions."""
    budget = CONFIG.default_output_length
    size = target_size(round(1000 * height), round(1000 * width), budget, CONFIG)
    return size[0] // CONFIG.cell, size[1] // CONFIG.cell


def spell_line(text: str, advance_C: NDArray[np.floating], rng: Random) -> Cells | None:
    """Lay out a line in a picture of its own, as `draw.draw_line` does."""
    widths = [float(advance_C[ord(c) - FIRST]) for c in text]
    ends = np.cumsum(widths)
    rows, columns, width = line_layout(float(ends[-1]), rng)
    left = (width - float(ends[-1])) / 2
    centres = [
        (left + end - own / 2) / width * columns
        for c, end, own in zip(text, ends, widths, strict=True)
        if c != " "
    ]
    found = line_columns(centres, columns)
    if found is None:
        return None
    first = (rows - 1) * columns
    places = [first + column for column in found]
    return Cells(rows, columns, dict(zip(places, line_pieces(text), strict=True)))


def spoil_line(cells: Cells, rng: Random) -> Cells:
    """Change, drop and move some characters."""
    rate = rng.uniform(0, MAX_WRONG) * (rng.random() < 0.7)
    pieces = dict[int, str]()
    for place, piece in cells.pieces.items():
        kind = rng.random() if rng.random() < rate else 1.0
        if kind < 0.15:
            continue
        if kind < 0.75:
            char = piece[-1]
            wrong = rng.choice(NEIGHBOURS.get(char, LETTERS))
            piece = piece[:-1] + wrong
        elif kind < 0.85:
            piece = piece.removeprefix(SPACE)
        elif kind < 1 and place + 1 not in cells.pieces and (place + 1) % cells.columns:
            place += 1
        pieces[place] = piece
    return Cells(cells.rows, cells.columns, pieces)


def spell_scene(objects: Sequence[tuple[int, int]], rng: Random) -> Cells:
    """Put objects into different ninths of a picture."""
    rows, columns = soft_shape(rng.uniform(*SCENE_HEIGHTS), 1.0)
    pieces = dict[int, str]()
    for (form, colour), place in zip(objects, rng.sample(range(9), len(objects)), strict=True):
        x = (place % 3 + rng.uniform(0.3, 0.7)) / 3 * columns
        y = (place // 3 + rng.uniform(0.3, 0.7)) / 3 * rows
        cell = int(y) * columns + min(int(x), columns - 2)
        pieces[cell], pieces[cell + 1] = COLOUR_PIECES[colour], FORM_PIECES[form]
    return Cells(rows, columns, pieces)


def draw_objects(rng: Random) -> list[tuple[int, int]]:
    """Draw up to four objects, each a form and a colour; half of them repeat one before."""
    objects: list[tuple[int, int]] = []
    for _ in range(rng.randint(1, MAX_OBJECTS)):
        new = (rng.randrange(len(FORMS)), rng.randrange(len(COLOURS)))
        objects.append(rng.choice(objects) if objects and rng.random() < 0.5 else new)
    return objects


def plural(noun: str, count: int) -> str:
    return noun + ("" if count == 1 else "es" if noun.endswith("ss") else "s")


def caption(objects: Sequence[tuple[int, int]]) -> str:
    """Name and count objects: equal ones together, in a fixed order."""
    names = []
    for form, colour in sorted(set(objects)):
        count = objects.count((form, colour))
        noun = plural(f"{list(COLOURS)[colour]} {FORMS[form]}", count)
        names.append(f"{NUMBERS[count]} {noun}")
    return listed(names)


WHAT = [
    "What is in the picture?",
    "What [do you see|can you see|is there|is this|is shown][ in the picture| here| in it|]?",
    "[Describe|Name|List] [this|the picture|what you see|the shapes][.|, please.|]",
    "[Which|What] shapes [are there|do you see|are in the picture]?",
]
COUNT = [
    "How many {n} [are there|do you see|are in the picture|can you count]?",
    "[Count|Number of|Please count] the {n}[.|]",
]
COLOUR = [
    "[What|Which] colour is the {n}?",
    "[What is|Tell me|Name] the colour of the {n}[.|?]",
]


def ask_scene(objects: Sequence[tuple[int, int]], draw: Draw) -> tuple[str, str]:
    """Return a question about objects and its answer: all of them, a number, or a colour."""
    kind, forms = draw.rng.random(), [form for form, _ in objects]
    single = [one for one in objects if forms.count(one[0]) == 1]
    if kind < 0.25:
        form = draw.any(forms) if draw.chance(0.85) else draw.rng.randrange(len(FORMS))
        question = draw.phrase(COUNT).format(n=plural(FORMS[form], 2))
        return question, f"{NUMBERS[forms.count(form)].capitalize()}."
    if kind < 0.45 and single:
        form, colour = draw.any(single)
        question = draw.phrase(COLOUR).format(n=FORMS[form])
        return question, f"{list(COLOURS)[colour].capitalize()}."
    return draw.phrase(WHAT), caption(objects)


def edit_distance(a: str, b: str) -> int:
    """Count the insertions, deletions and substitutions that lead from one text to another."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            best = min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
            previous, row[j] = row[j], best
    return row[-1]


class Speller:
    """Writes chats whose pictures are spelled by tokens."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.tokenizer = Tokenizer.load(directory)
        self.template = ChatTemplate.load(directory, self.tokenizer)
        self.draw = Draw(Random(seed))
        control = self.tokenizer.control_ids
        self.image, self.begin, self.end, self.turn_end = (
            control[name] for name in (IMAGE_TOKEN, IMAGE_BEGIN, IMAGE_END, TURN_END)
        )
        self.filler = self.piece_id(FILLER)

    def pair(self, cells: Cells, question: str, answer: str) -> TokenPair:
        """Ask about a picture, which is before the question or after it."""
        picture = Image(b"")
        parts = (picture, question) if self.draw.chance(0.5) else (question, picture)
        ids = list(self.template.prompt([Message(role="user", content=parts)]).ids)
        at = ids.index(self.image)
        prompt = [*ids[:at], self.begin, *self.soft_tokens(cells), self.end, *ids[at + 1 :]]
        return prompt, [*self.tokenizer.encode(answer), self.turn_end]

    def piece_id(self, piece: str) -> int:
        [token] = self.tokenizer.encode(piece.replace(SPACE, " "))
        return token

    def soft_tokens(self, cells: Cells) -> list[int]:
        """Return a token for each cell; a digit's space, which is no token with it, goes before."""
        soft = [self.filler] * (cells.rows * cells.columns)
        for place, piece in cells.pieces.items():
            ids = self.tokenizer.encode(piece.replace(SPACE, " "))
            soft[place] = ids[-1]
            if len(ids) == 2 and place and soft[place - 1] == self.filler:
                soft[place - 1] = ids[0]
        return soft

    def lines(self, texts: Sequence[str], advance_FC: NDArray[np.floating]) -> Iterator[TokenPair]:
        rng = self.draw.rng
        for text in texts:
            cells = spell_line(text, rng.choice(advance_FC), rng)
            if cells is not None:
                yield self.pair(spoil_line(cells, rng), self.draw.phrase(SAY), text)

    def scenes(self, count: int) -> Iterator[TokenPair]:
        for _ in range(count):
            objects = draw_objects(self.draw.rng)
            question, answer = ask_scene(objects, self.draw)
            yield self.pair(spell_scene(objects, self.draw.rng), question, answer)


def training_lines(chars_NL: NDArray[np.uint8]) -> list[str]:
    """Return the sentences that are not held out; 255 ends one."""
    kept = [line for i, line in enumerate(chars_NL) if i % HELD_OUT_EVERY]
    return ["".join(chr(FIRST + c) for c in line if c < 255) for line in kept]


def other_lines(rng: Random, count: int) -> Iterator[str]:
    """Write lines that are no sentences: codes, prices, words in capitals."""
    words = (
        "SALE OPEN EXIT Room Gate Price Total Menu Tel. No. Street Platform Coffee Order".split()
    )
    for _ in range(count):
        letters = "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 8)))
        number = str(rng.randint(1, 99_999))
        parts = [
            *(rng.choice(words), letters.upper(), number, letters.capitalize()),
            *(f"{number[:2]}.{number[-2:]}", f"{rng.randint(1, 99)}%", f"${number}", f"#{number}"),
        ]
        yield " ".join(rng.sample(parts, rng.randint(1, 4)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("out/pictures.npz"))
    parser.add_argument("--out", type=Path, default=Path("out/nano/tokens"))
    parser.add_argument("--lines", type=int, default=40_000)
    parser.add_argument("--scenes", type=int, default=16_000)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    speller = Speller(NANO_DIRECTORY, options.seed)
    with np.load(options.data) as file:
        advance_FC = file["advance"][~file["held_out"]]
        texts = training_lines(file["chars"])
    rng = Random(options.seed)
    texts = rng.sample(texts, min(len(texts), options.lines * 17 // 20))
    texts += other_lines(rng, options.lines - len(texts))
    rng.shuffle(texts)
    made = {
        "lines": speller.lines(texts, advance_FC),
        "scenes": speller.scenes(options.scenes),
    }
    for name, pairs in made.items():
        store = TokenStore.build(pairs, speller.tokenizer.vocab_size)
        store.save(options.out / f"{name}.npz")
        print(f"{name}: {len(store)} examples, {len(store.tokens_N):,} tokens")


if __name__ == "__main__":
    main()
