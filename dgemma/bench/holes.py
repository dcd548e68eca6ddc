"""Holes of known length in texts: filled by a canvas that sees both sides, or by AR from the left.

The form is design.md's: no chat; the cache holds the text before the hole, the canvas is the hole
and behind it, pinned, as much of what follows as the canvas holds. Where the text ends within the
canvas, it is filled with the token that ends texts, as in training.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dgemma.bench.answers import Question, ask, show
from dgemma.cache import KVCache, Room
from dgemma.canvas import Noise, Pins
from dgemma.denoise import Row, start
from dgemma.engine import Engine, Options
from dgemma.engine.batch import Work, run
from dgemma.text.chat import Prompt

CHUNK = 512  # tokens of a prefix committed in one pass
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


@dataclass(slots=True)
class _Open:
    """A hole on its way."""

    number: int
    size: int
    cache: KVCache
    row: Row
    pending: list[int]  # of the prefix, to be committed

    def work(self) -> Work:
        if len(self.pending) > CHUNK:
            return Work(self.cache, tuple(self.pending[:CHUNK]))
        return Work(self.cache, tuple(self.pending), self.row)


def fill(engine: Engine, holes: Sequence[Hole], seed: int, label: str) -> list[Filled | None]:
    """Fill each hole with as many tokens as it had; None where the canvas cannot hold it."""
    filled: list[Filled | None] = [None] * len(holes)
    sizes = [len(engine.tokenizer.encode(hole.middle)) for hole in holes]
    fitting = [i for i, n in enumerate(sizes) if 0 < n <= engine.model.config.canvas_length]
    waiting, running, count = deque(fitting), list[_Open](), 0
    while waiting or running:
        while waiting and len(running) < engine.max_rows:
            number = waiting.popleft()
            running.append(_open(engine, holes[number], sizes[number], seed, number))
        works = [one.work() for one in running]
        for one, work, outcome in zip(running, works, run(engine.model, works), strict=True):
            del one.pending[: len(work.tokens)]
            one.row = outcome.row or one.row
        for one in [one for one in running if one.row.is_done]:
            running.remove(one)
            filled[one.number] = _read(engine, one)
            count += 1
            show(label, count, len(fitting))
    return filled


def _open(engine: Engine, hole: Hole, size: int, seed: int, number: int) -> _Open:
    config, encode = engine.model.config, engine.tokenizer.encode
    length = config.canvas_length
    suffix = encode(hole.suffix)[: length - size]
    pinned = suffix + [end_id(engine)] * (length - size - len(suffix))
    noise = Noise(seed=seed + number).block(
        0, engine.sampler.max_steps, length, config.vocab_size, engine.device
    )
    row = start(engine.sampler, noise, Pins(tuple(range(size, length)), tuple(pinned)))
    prefix = list(_prefix(engine, hole, length))
    room = Room(tokens=len(prefix) + length, span=CHUNK + length)
    cache = KVCache(config, room, engine.dtype, engine.device)
    return _Open(number, size, cache, row, prefix)


def _prefix(engine: Engine, hole: Hole, answer: int) -> tuple[int, ...]:
    """The beginning of texts and as much of the prefix, from its end, as the context holds."""
    room = engine.model.config.max_position_embeddings - answer - 1
    ids = engine.tokenizer.encode(hole.prefix)
    return (engine.model.config.bos_token_id, *ids[max(0, len(ids) - room) :])


def _read(engine: Engine, one: _Open) -> Filled:
    canvas = one.row.canvas
    ids = canvas.guess_L[: one.size].tolist()
    text = engine.tokenizer.decode(ids, skip_control=True)
    return Filled(text, canvas.num_steps, bool(canvas.settled))


def end_id(engine: Engine) -> int:
    """The token that ends texts and fills their last canvas."""
    return engine.tokenizer.control_ids.get("<eos>", engine.stop_ids.ids[0])


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
