"""Filling the holes of a text: what the model sees of it, which holes share a canvas, the result.

The text itself is never decoded from tokens: the result is joined from the given pieces and what
the canvases say (`guide.holes`). What they say is found by `engine.search`.
"""

import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dgemma.constrain.holes import (
    MARK,
    REQUEST,
    Holed,
    Rules,
    characters,
    cut_at_stop,
    grid,
    group,
    head,
    shape,
    spread,
    tail,
)
from dgemma.constrain.seams import is_whole
from dgemma.diffusion.canvas import Noise
from dgemma.diffusion.sampler import Sampler
from dgemma.engine.candidates import Candidate
from dgemma.engine.events import Draft
from dgemma.engine.search import SEEN_AFTER, Effort, Search, Sheet, Sizes, Tuning, least_after
from dgemma.engine.trials import SharedPrefix, with_steps
from dgemma.errors import PromptTooLong, UsageError
from dgemma.text.chat import Message

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

Form = Literal["base", "instruct", "both"]
FORMS: tuple[Form, ...] = ("base", "instruct", "both")
EFFORTS: tuple[Effort, ...] = ("fast", "thorough")
PROPOSALS = 16  # texts of the causal mode that compete with the canvases' own
TYPICAL = 8  # tokens of a hole whose length is not known, while others are searched
# With effort fast: lengths of a hole that are tried, the longest of them in tokens, the most steps
# of a canvas, and the tokens that it shows behind the hole.
FAST_LENGTHS, FAST_LONGEST, FAST_STEPS, FAST_SEEN_AFTER = 9, 64, 8, 32
EDGE = 256  # characters of the text before a hole that the rules look at
# Tokens that a text to be scored may have beyond its canvases: the end of the text, a token of what
# follows that no canvas shows, and what it is longer by when it is encoded anew.
SPARE = 8
TURN_ENDS, TEXT_ENDS = "<turn|>", "<eos>"


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """Options of a fill. None: as the model has it; a length is searched."""

    max_tokens: int | None = None  # of each hole; None: what fits one canvas
    lengths: tuple[int, ...] | None = None  # of the holes in tokens, if known
    stop: tuple[str, ...] = ()  # a hole ends before these
    single_line: bool = False  # a hole ends with its line
    allow_empty: bool = False
    candidates: int = 1  # how many to return, the best first
    # fast: one batch of canvases for each hole, a few steps, no proposals; see `Search`
    effort: Effort = "thorough"
    proposals: int = PROPOSALS  # texts of the causal mode, for one hole by itself; 0: none
    form: Form | None = None  # how the model is asked; None: see `choose_form`
    seed: int | None = None  # None draws one, reported with the result
    sampler: Sampler | None = None
    drafts: bool = False  # whether to report a canvas after each step


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledHole:
    """What stands in a hole now; places are characters of the whole new text."""

    start: int
    end: int
    text: str
    score: float  # mean causal log-probability of its tokens, nats
    tokens: int  # positions it had on the canvas
    settled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledText:
    """One way to fill all holes."""

    text: str
    holes: tuple[FilledHole, ...]
    # Of the holes and what follows, nats: the tokens' mean, or their sum without any limit.
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A filled text and what it took."""

    candidates: tuple[FilledText, ...]  # the best first
    steps: int  # of all canvases together
    canvases: int
    seconds: float
    seed: int
    form: Form

    @property
    def text(self) -> str:
        return self.candidates[0].text

    @property
    def holes(self) -> tuple[FilledHole, ...]:
        return self.candidates[0].holes


def check_fill(options: FillOptions) -> None:
    """Refuse what no text and no model could do."""
    cut_at_stop("", options.stop)  # refuses what cannot be a stop string
    Noise(seed=options.seed or 0)
    for name in ("max_tokens", "candidates"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be 1 or more")
    if options.proposals < 0:
        raise UsageError(f"proposals is {options.proposals}; it must be 0 or more")
    if options.lengths is not None and min(options.lengths, default=0) < 1:
        raise UsageError(f"lengths are {options.lengths}; each must be 1 or more")
    if options.form not in (None, *FORMS):
        raise UsageError(f"form {options.form!r} is not known; use {' or '.join(FORMS)}")
    if options.effort not in EFFORTS:
        raise UsageError(f"effort {options.effort!r} is not known; use {' or '.join(EFFORTS)}")


def fill(engine: "Engine", holed: Holed, options: FillOptions) -> Generator[Draft, None, Filled]:
    """Fill a text's holes; yields drafts on the way if they are asked for."""
    check_fill(options)
    if not engine.model.config.can_denoise:
        raise UsageError("this checkpoint has no denoiser, so it cannot fill holes")
    if options.lengths is not None and len(options.lengths) != holed.count:
        raise UsageError(f"{len(options.lengths)} lengths are given for {holed.count} holes")
    begun = time.perf_counter()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    filling = Filling(engine, holed, options, seed)
    yield from filling.run()
    return Filled(
        candidates=tuple(filling.results()),
        steps=filling.steps,
        canvases=filling.canvases,
        seconds=time.perf_counter() - begun,
        seed=seed,
        form=filling.form,
    )


class Filling:
    """A text on its way: groups of holes are filled from left to right."""

    def __init__(self, engine: "Engine", holed: Holed, options: FillOptions, seed: int) -> None:
        self.engine, self.holed, self.options, self.seed = engine, holed, options, seed
        self.is_fast = options.effort == "fast"
        self.form = choose_form(engine, options.form, proposes=not self.is_fast)
        # By which canvases are asked and texts scored.
        self.own_form: Form = "base" if self.form == "both" else self.form
        self.rules = Rules(
            stop=options.stop, single_line=options.single_line, allow_empty=options.allow_empty
        )
        self.length = engine.model.config.canvas_length
        self.filled: list[list[Candidate]] = []  # of each group, the best first
        self.steps = self.canvases = 0

    def run(self) -> Generator[Draft, None, None]:
        for holes in self._groups():
            told = self._told(holes) if self.form == "both" and len(holes) == 1 else []
            search = Search(self.engine, self._sheet(holes, self.own_form), self._tuning())
            found = yield from search.run(self._sizes(holes), told)
            self.steps += search.steps
            self.canvases += search.canvases
            self.filled.append(found or [self._likeliest(holes)])

    def _told(self, holes: range) -> list[Candidate]:
        """What the causal mode proposes when it has been told the whole text, both sides of a hole.

        How likely it is there and what follows after it, is for the plain text to say.
        """
        search = Search(self.engine, self._sheet(holes, "instruct"), self._tuning())
        return search.proposals(self._sizes(holes))

    def results(self) -> list[FilledText]:
        """The n-th best text has each group's n-th best fills, or its last where it has fewer."""
        count = max(map(len, self.filled))
        return [
            self._result([found[min(i, len(found) - 1)] for found in self.filled])
            for i in range(count)
        ]

    def _result(self, chosen: Sequence[Candidate]) -> FilledText:
        fills = [fill for one in chosen for fill in one.fills]
        places = self.holed.places(fills)
        scores = [score for one in chosen for score in one.hole_scores]
        sizes = [size for one in chosen for size in one.sizes]
        settled = [one.settled for one in chosen for _ in one.fills]
        holes = tuple(
            FilledHole(start=a, end=b, text=text, score=score, tokens=size, settled=is_settled)
            for (a, b), text, score, size, is_settled in zip(
                places, fills, scores, sizes, settled, strict=True
            )
        )
        score = sum(one.score for one in chosen) / len(chosen)
        return FilledText(text=self.holed.join(fills), holes=holes, score=score)

    # --- what shares a canvas

    def _groups(self) -> list[range]:
        known = self.options.lengths
        if self.is_fast and not known:  # one batch tries the lengths of one hole
            return [range(hole, hole + 1) for hole in range(self.holed.count)]
        sizes = list(known) if known else [self._typical()] * self.holed.count
        between = [len(self._encode_head(piece)) for piece in self.holed.pieces[1:-1]]
        return group(between, sizes, self.length - least_after(self.length))

    def _typical(self) -> int:
        limit = self.options.max_tokens
        return min(TYPICAL, max(1, self.length // 4), limit or TYPICAL)

    def _sizes(self, holes: range) -> Sizes:
        known = self.options.lengths
        if known:
            first = tuple(known[hole] for hole in holes)
            return Sizes(first=first, choices=tuple((size,) for size in first), limits=first)
        most = max(1, self.length - least_after(self.length))
        limit, count = self.options.max_tokens or most, len(holes)
        if self.is_fast:
            limit = min(limit, most, FAST_LONGEST)
            tried = spread(limit, FAST_LENGTHS)
            return Sizes(first=(tried[len(tried) // 2],), choices=(tuple(tried),), limits=(limit,))
        return Sizes(
            first=(self._typical(),) * count,
            choices=(tuple(grid(limit)),) * count,
            limits=(limit,) * count,
        )

    def _tuning(self) -> Tuning:
        sampler = self.options.sampler or self.engine.sampler
        return Tuning(
            rules=self.rules,
            seed=self.seed,
            sampler=with_steps(sampler, FAST_STEPS) if self.is_fast else sampler,
            end=end_id(self.engine),
            drafts=self.options.drafts,
            candidates=self.options.candidates,
            proposals=0 if self.is_fast else self.options.proposals,
            effort=self.options.effort,
            seen_after=FAST_SEEN_AFTER if self.is_fast else SEEN_AFTER,
            # A limit says about how long a hole is, and bounds what a repetition gains by a mean.
            by_total=self.options.lengths is None and self.options.max_tokens is None,
        )

    # --- what the model sees

    def _sheet(self, holes: range, form: Form) -> Sheet:
        before = self._before(holes.start)
        rest = self.holed.pieces[holes.start + 1 :]
        pieces = rest[: len(holes)]
        piece_ids = [self._encode_head(piece) for piece in pieces]
        is_end = len(rest) == len(holes) and len(piece_ids[-1]) <= self.length
        last = self.engine.tokenizer.decode_bytes(piece_ids[-1]).decode("utf-8", "ignore")
        header, shown = self._context(before, rest, form)
        return Sheet(
            header=header,
            before=tuple(self.engine.tokenizer.encode(shown)),
            edge=before[-EDGE:],
            pieces=(*pieces[:-1], last),
            piece_ids=tuple(piece_ids),
            closing=closing_ids(self.engine, is_turn=form == "instruct") if is_end else (),
        )

    def _before(self, hole: int) -> str:
        """The text before a hole, with what was filled so far."""
        fills = [fill for found in self.filled for fill in found[0].fills]
        both = zip(self.holed.pieces[: hole + 1], [*fills, ""], strict=True)
        return "".join(piece + fill for piece, fill in both)

    def _encode_head(self, piece: str) -> tuple[int, ...]:
        """As much of a piece as a canvas could show, and a token more if it goes on."""
        shown, ids = characters(self.length), list[int]()
        while len(ids) <= self.length:
            ids = self.engine.tokenizer.encode(piece[:shown])
            if shown >= len(piece):
                break
            shown *= 2  # few tokens of many characters, such as long rows of spaces
        return tuple(ids[: self.length + 1])

    def _context(self, before: str, rest: Sequence[str], form: Form) -> tuple[tuple[int, ...], str]:
        """What stands before the text, and as much of the text before the hole as fits."""
        room = self._room()
        if form == "base":
            shown = tail(self.engine.tokenizer, before, room - 1)
            return (self.engine.model.config.bos_token_id,), shown
        encode, count, after = self.engine.tokenizer.encode, room, MARK.join(rest)
        while count:
            count = count * 2 // 3
            shown = tail(self.engine.tokenizer, before, count)
            document = shown + MARK + head(self.engine.tokenizer, after, count)
            header = self.engine.prompt([Message(role="user", content=f"{REQUEST}\n\n{document}")])
            if len(header.ids) + len(encode(shown)) <= room:
                return header.ids, shown
        raise PromptTooLong(
            f"the context leaves {room} tokens for a prompt, too few to fill a hole"
        )

    def _room(self) -> int:
        """Tokens that may stand before the canvas, an open continuation of long holes included."""
        longest = max(self.options.lengths or (self.options.max_tokens or 1,))
        blocks = -(-longest // self.length)
        limit = self.engine.model.config.max_position_embeddings - SPARE
        room = limit - (blocks + 1) * self.length
        if room < 1:
            most = (limit - 1) // self.length - 1
            raise PromptTooLong(
                f"holes of {longest} tokens leave no place for the text around them; lower max "
                f"tokens to {most * self.length} or less"
            )
        return room

    # --- when all canvases are empty

    def _likeliest(self, holes: range) -> Candidate:
        """For each hole the causal mode's likeliest token that is allowed."""
        fills: list[str] = []
        sheet = self._sheet(holes, self.own_form)
        for hole in holes:
            between = "".join(
                fill + piece for fill, piece in zip(fills, sheet.pieces, strict=False)
            )
            ids = (*sheet.header, *sheet.before, *self.engine.tokenizer.encode(between))
            fills.append(self._likeliest_text(ids, self.holed.pieces[hole + 1]))
        ones = (1,) * len(fills)
        zeros = (0.0,) * len(fills)
        return Candidate(
            fills=tuple(fills), sizes=ones, settled=False, is_sound=False, hole_scores=zeros
        )

    def _likeliest_text(self, ids: Sequence[int], after: str) -> str:
        prefix, tokenizer = SharedPrefix(self.engine, ids), self.engine.tokenizer
        try:
            order = prefix.next_logits().argsort(descending=True).tolist()
        finally:
            prefix.close()
        blank = ""
        for token in order:
            data = b"" if tokenizer.is_control(token) else tokenizer.token_bytes(token)
            text = shape(data.decode(), "", after, self.rules) if is_whole(data) else ""
            if text.strip():
                return text
            blank = blank or text
        if blank:
            return blank
        raise UsageError("the stop strings leave nothing that a hole could hold; give others")


def choose_form(engine: "Engine", wanted: Form | None, *, proposes: bool = True) -> Form:
    """How the model is asked to fill.

    Without a choice both are used, as the built-in model was measured; it gains little by it
    (LOG.md, 2026-11-17). Which is best for the released one has not been measured. Both differ from
    `base` by what the causal mode proposes; without proposals they are `base`.
    """
    if engine.template is None and wanted in ("instruct", "both"):
        raise UsageError(f"this checkpoint has no chat template for form {wanted}; use base")
    chosen = wanted or ("base" if engine.template is None else "both")
    return "base" if chosen == "both" and not proposes else chosen


def end_id(engine: "Engine") -> int:
    """The token that ends texts and fills their last canvas."""
    return engine.tokenizer.control_ids.get(TEXT_ENDS, engine.stop_ids.ids[0])


def closing_ids(engine: "Engine", *, is_turn: bool) -> tuple[int, ...]:
    """What ends a text, or a turn of the model."""
    end, turn = end_id(engine), engine.tokenizer.control_ids.get(TURN_ENDS)
    return (turn, end) if is_turn and turn is not None else (end,)
