"""Holes of known length in texts: filled by a canvas that sees both sides, or by AR from the left.

The form is design.md's: no chat; the cache holds the text before the hole, the canvas is the hole
and behind it, pinned, as much of what follows as the canvas holds. Where the text ends within the
canvas, it is filled with the token that ends texts, as in training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dgemma.constrain.holes import lay_out
from dgemma.constrain.seams import Gap
from dgemma.engine import Engine, Options
from dgemma.engine.fill import FillOptions, end_id
from dgemma.engine.options import Plan
from dgemma.engine.trials import first_canvases, last_canvas
from dgemma.eval.answers import Question, ask, show
from dgemma.text.chat import Prompt

NEWLINE = "\n"


@dataclass(frozen=True, slots=True)
class Hole:
    prefix: str
    middle: str  # what stood there
    suffix: str

    @property
    def is_line(self) -> bool:
        """Whether the hole ends with its line, so that a line break ends an answer to it."""
        return NEWLINE not in self.middle.rstrip(NEWLINE)

    def whole(self, text: str) -> str:
        """The document with `text` in the hole."""
        return self.prefix + text + self.suffix


@dataclass(frozen=True, slots=True)
class Filled:
    text: str
    steps: int
    is_settled: bool


def fill(engine: Engine, holes: Sequence[Hole], seed: int, label: str) -> list[Filled | None]:
    """Fill each hole with as many tokens as it had; None where the canvas cannot hold it."""
    sizes = [len(engine.tokenizer.encode(hole.middle)) for hole in holes]
    fitting = [i for i, n in enumerate(sizes) if 0 < n <= engine.model.config.canvas_length]
    jobs = [engine.submit(_plan(engine, holes[i], sizes[i], seed + i)) for i in fitting]
    for _ in first_canvases(engine, jobs):
        show(label, sum(job.is_over for job in jobs), len(jobs))
    filled: list[Filled | None] = [None] * len(holes)
    for number, job in zip(fitting, jobs, strict=True):
        canvas = last_canvas(job)
        ids = canvas.guess_L[: sizes[number]].tolist()
        text = engine.tokenizer.decode(ids, skip_control=True)
        filled[number] = Filled(text, canvas.num_steps, bool(canvas.settled))
    return filled


def fill_as_told(engine: Engine, holes: Sequence[Hole], seed: int, label: str) -> list[Filled]:
    """What `Engine.fill` puts into each hole, told its length and whether it is a line.

    Other than `fill`, which asks one canvas: several canvases and the causal mode propose, and what
    fits both sides best is taken. One hole after the other, as a user asks.
    """
    filled: list[Filled] = []
    for number, hole in enumerate(holes):
        size = len(engine.tokenizer.encode(hole.middle))
        options = FillOptions(lengths=(size,), single_line=hole.is_line, seed=seed + number)
        found = engine.fill([hole.prefix, hole.suffix], options)
        [one] = found.holes
        filled.append(Filled(one.text, found.steps, one.settled))
        show(label, number + 1, len(holes))
    return filled


def _plan(engine: Engine, hole: Hole, size: int, seed: int) -> Plan:
    length = engine.model.config.canvas_length
    gap = Gap(after=tuple(engine.tokenizer.encode(hole.suffix)))
    options = Options(
        max_tokens=length,
        pins=lay_out([gap], [size], length, end_id(engine)).pins,
        seed=seed,
        retries=0,
    )
    return engine.plan(Prompt(text=hole.prefix, ids=_prefix(engine, hole, length)), options)


def _prefix(engine: Engine, hole: Hole, answer: int) -> tuple[int, ...]:
    """The beginning of texts and as much of the prefix, from its end, as the context holds."""
    room = engine.model.config.max_position_embeddings - answer - 1
    ids = engine.tokenizer.encode(hole.prefix)
    return (engine.model.config.bos_token_id, *ids[max(0, len(ids) - room) :])


def go_on(engine: Engine, holes: Sequence[Hole], label: str) -> list[str | None]:
    """What AR mode writes after each prefix, greedily: to the end of the line if the hole is one.

    Otherwise as many tokens as the hole had. A line may take twice its tokens and eight.
    """
    questions = []
    for hole in holes:
        size = len(engine.tokenizer.encode(hole.middle))
        limit = 2 * size + 8 if hole.is_line else max(1, size)
        stop = (NEWLINE,) if hole.is_line else ()
        ids = _prefix(engine, hole, limit)
        options = Options(mode="ar", max_tokens=limit, stop=stop, seed=0)
        questions.append(Question(Prompt(text=hole.prefix, ids=ids), options))
    texts: list[str | None] = []
    for hole, done in zip(holes, ask(engine, questions, label), strict=True):
        if done is None:
            texts.append(None)
            continue
        text = engine.tokenizer.decode(done.ids, skip_control=True)
        if hole.is_line:
            closing = hole.middle[len(hole.middle.rstrip(NEWLINE)) :]
            text = text.partition(NEWLINE)[0] + closing
        texts.append(text)
    return texts


def cut(hole: Hole, size: int) -> Hole:
    """The hole with at most `size` characters of its surroundings, for printing."""
    return replace(hole, prefix=hole.prefix[-size:], suffix=hole.suffix[:size])
