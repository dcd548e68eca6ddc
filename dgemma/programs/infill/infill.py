"""Fill the holes of a text: the context shown to the model, groups of holes, the result."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dgemma.diffusion.canvas import Noise
from dgemma.engine.params import CanvasParams, CanvasResult, Cost, require_denoiser
from dgemma.engine.request import HostTask, Program, in_thread_if_long
from dgemma.engine.scoring import NextTokens, Prefill
from dgemma.errors import PromptTooLong, UsageError, require
from dgemma.programs.infill.candidates import (
    VISIBLE_AFTER,
    Candidate,
    CandidateConfig,
    CandidatePool,
    InfillPrompt,
    with_max_steps,
)
from dgemma.programs.infill.document import (
    CHARACTERS_PER_TOKEN,
    REQUEST,
    FillRules,
    InfillDocument,
    cut_at_stop,
    doubling_lengths,
    first_tokens,
    geometric_lengths,
    group_holes,
    last_tokens,
    trim_fill,
    unmatched_brackets,
)
from dgemma.programs.infill.healing import is_utf8
from dgemma.programs.infill.search import (
    FillEffort,
    LengthGrid,
    Search,
    SearchConfig,
    min_visible_after,
)
from dgemma.text.chat import Message
from dgemma.text.control_tokens import EOS, FILL_MARK, TURN_END

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

PromptStyle = Literal["base", "instruct", "both"]
PROMPT_STYLES: tuple[PromptStyle, ...] = ("base", "instruct", "both")
EFFORTS: tuple[FillEffort, ...] = ("fast", "thorough")
NUM_PROPOSALS = 16  # causal candidates that compete with the canvases
TYPICAL_LENGTH = 8  # assumed length of a hole while others are searched
# Effort fast: lengths tried, the longest of them, steps of a canvas, tokens shown after the hole.
FAST_LENGTHS, FAST_MAX_LENGTH, FAST_STEPS, FAST_VISIBLE_AFTER = 9, 64, 8, 32
NUM_EDGE_CHARACTERS = 256  # characters before a hole seen by the fill rules
# Tokens that a scored text may have beyond its canvases: the end of the text, a token of what
# follows that no canvas shows, and what it is longer by when it is encoded anew.
NUM_SPARE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FillParams(CanvasParams):
    """Parameters of a fill. None means the model's value; a length is searched."""

    max_tokens: int | None = None  # per hole; None: as many as fit one canvas
    lengths: tuple[int, ...] | None = None  # lengths of the holes in tokens, if known
    stop: tuple[str, ...] = ()  # fills end before these
    single_line: bool = False  # fills end at a line end
    allow_empty: bool = False
    num_candidates: int = 1  # candidates to return, best first
    effort: FillEffort = "thorough"  # fast: one batch of canvases per hole, few steps
    num_proposals: int = NUM_PROPOSALS  # causal candidates, for a hole alone on its canvas
    prompt_style: PromptStyle | None = None  # None: see `choose_style`


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledHole:
    """The text of a hole; start and end are characters of the new text."""

    start: int
    end: int
    text: str
    score: float  # mean causal log-probability of its tokens
    tokens: int  # positions on the canvas
    converged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledText:
    """One way to fill all holes."""

    text: str
    holes: tuple[FilledHole, ...]
    # Log-probability of holes and following text: mean over tokens, or sum without a limit.
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult(CanvasResult):
    """A filled text and its cost."""

    candidates: tuple[FilledText, ...]  # best first
    prompt_style: PromptStyle

    @property
    def text(self) -> str:
        return self.candidates[0].text

    @property
    def holes(self) -> tuple[FilledHole, ...]:
        return self.candidates[0].holes


FILL_DEFAULTS = FillParams()


def check_fill(params: FillParams) -> None:
    """Refuse parameters that no text and no model can honour."""
    cut_at_stop("", params.stop)  # refuses what cannot be a stop string
    Noise(seed=params.seed or 0)
    for name in ("max_tokens", "num_candidates"):
        value = getattr(params, name)
        require(value is None or value >= 1, name, value, "1 or more")
    require(params.num_proposals >= 0, "num_proposals", params.num_proposals, "0 or more")
    if params.lengths is not None and min(params.lengths, default=0) < 1:
        raise UsageError(f"lengths are {params.lengths}; each must be 1 or more")
    if params.prompt_style not in (None, *PROMPT_STYLES):
        allowed = " or ".join(PROMPT_STYLES)
        raise UsageError(f"prompt style {params.prompt_style!r} is not known; use {allowed}")
    if params.effort not in EFFORTS:
        raise UsageError(f"effort {params.effort!r} is not known; use {' or '.join(EFFORTS)}")


def fill(
    engine: "Engine",
    text: str | Sequence[str] | InfillDocument,
    params: FillParams = FILL_DEFAULTS,
) -> FillResult:
    """Fill the holes of a text: marked `<|fill|>`, or between pieces."""
    return engine.run(fill_program(engine, text, params))


def fill_program(
    engine: "Engine",
    text: str | Sequence[str] | InfillDocument,
    params: FillParams = FILL_DEFAULTS,
) -> Program[FillResult]:
    """Fill the holes of a text; reports drafts on request."""
    check_fill(params)
    require_denoiser(engine.model.config, "it cannot fill holes")
    if isinstance(text, str):
        document = InfillDocument.parse(text)
    else:
        document = text if isinstance(text, InfillDocument) else InfillDocument(tuple(text))
    if params.lengths is not None and len(params.lengths) != document.num_holes:
        raise UsageError(f"{len(params.lengths)} lengths are given for {document.num_holes} holes")
    seed = secrets.randbits(32) if params.seed is None else params.seed
    run = InfillRun(engine, document, params, Cost(seed=seed))
    yield from run.run()
    results = tuple(run.results())
    return FillResult(candidates=results, prompt_style=run.style, **run.cost.fields())


class InfillRun:
    """A document in progress: groups of holes are filled from left to right."""

    def __init__(
        self, engine: "Engine", document: InfillDocument, params: FillParams, cost: Cost
    ) -> None:
        self.engine, self.document, self.params, self.cost = engine, document, params, cost
        self.is_fast = params.effort == "fast"
        self.style = choose_style(engine, params.prompt_style, has_proposals=not self.is_fast)
        self.rules = FillRules(
            stop=params.stop, single_line=params.single_line, allow_empty=params.allow_empty
        )
        self.length = engine.model.config.canvas_length
        self.num_characters = sum(map(len, document.pieces))
        self.filled: list[list[Candidate]] = []  # candidates of each group, best first

    def run(self) -> Program[None]:
        groups = yield from in_thread_if_long(self.num_characters, self._groups)
        # For canvases and scores; with `both`, the instruct prompt is for proposals only.
        style: PromptStyle = "base" if self.style == "both" else self.style
        for holes in groups:
            known: list[Candidate] = []
            if self.style == "both" and len(holes) == 1:
                # They are scored on the plain text, like all others.
                search = yield from self._search(holes, "instruct")
                known = yield from search.pool.run(search.propose())
            search = yield from self._search(holes, style)
            candidates = yield from search.pool.run(search.run(known))
            self.cost.prompt_tokens += search.pool.prompt.num_tokens
            self.filled.append(candidates or [(yield from self._most_likely(holes, style))])

    def results(self) -> list[FilledText]:
        """The n-th best text has each group's n-th best fills, or its last if it has fewer."""
        count = max(map(len, self.filled))
        return [
            self._result([ranked[min(i, len(ranked) - 1)] for ranked in self.filled])
            for i in range(count)
        ]

    def _result(self, chosen: Sequence[Candidate]) -> FilledText:
        fills = [fill for candidate in chosen for fill in candidate.fills]
        spans = iter(self.document.spans(fills))
        holes = []
        for one in chosen:
            for text, score, length in zip(one.fills, one.hole_scores, one.lengths, strict=True):
                start, end = next(spans)
                hole = FilledHole(
                    start=start,
                    end=end,
                    text=text,
                    score=score,
                    tokens=length,
                    converged=one.converged,
                )
                holes.append(hole)
        score = sum(candidate.score for candidate in chosen) / len(chosen)
        return FilledText(text=self.document.join(fills), holes=tuple(holes), score=score)

    def _search(self, holes: range, style: PromptStyle) -> Program[Search]:
        prompt = yield from in_thread_if_long(self.num_characters, self._prompt, holes, style)
        params, sampler = self.params, self.params.sampler or self.engine.sampler
        config = CandidateConfig(
            rules=self.rules,
            seed=self.cost.seed,
            sampler=with_max_steps(sampler, FAST_STEPS) if self.is_fast else sampler,
            end_id=end_id(self.engine),
            drafts=params.drafts,
            visible_after=FAST_VISIBLE_AFTER if self.is_fast else VISIBLE_AFTER,
            # A limit hints at a hole's length, and bounds the gain of repetitions in a mean.
            by_total=params.lengths is None and params.max_tokens is None,
        )
        pool = CandidatePool(self.engine, prompt, config, self.cost)
        extent = SearchConfig(
            num_candidates=params.num_candidates,
            num_proposals=0 if self.is_fast else params.num_proposals,
            effort=params.effort,
        )
        return Search(pool, self._lengths(holes), extent)

    # --- which holes share a canvas

    def _groups(self) -> list[range]:
        known, count = self.params.lengths, self.document.num_holes
        if self.is_fast and not known:  # one batch tries the lengths of one hole
            return [range(hole, hole + 1) for hole in range(count)]
        lengths = list(known) if known else [self._typical_length()] * count
        between = [len(self._encode_head(piece)) for piece in self.document.pieces[1:-1]]
        return group_holes(between, lengths, self.length - min_visible_after(self.length))

    def _typical_length(self) -> int:
        limit = self.params.max_tokens
        return min(TYPICAL_LENGTH, max(1, self.length // 4), limit or TYPICAL_LENGTH)

    def _lengths(self, holes: range) -> LengthGrid:
        known = self.params.lengths
        if known:
            first = tuple(known[hole] for hole in holes)
            return LengthGrid(first=first, options=tuple((n,) for n in first), limits=first)
        most = max(1, self.length - min_visible_after(self.length))
        limit, count = self.params.max_tokens or most, len(holes)
        if self.is_fast:
            limit = min(limit, most, FAST_MAX_LENGTH)
            grid = tuple(geometric_lengths(limit, FAST_LENGTHS))
            return LengthGrid(first=(grid[len(grid) // 2],), options=(grid,), limits=(limit,))
        return LengthGrid(
            first=(self._typical_length(),) * count,
            options=(tuple(doubling_lengths(limit)),) * count,
            limits=(limit,) * count,
        )

    # --- the context

    def _prompt(self, holes: range, style: PromptStyle) -> InfillPrompt:
        before = self._before(holes.start)
        rest = self.document.pieces[holes.start + 1 :]
        pieces = rest[: len(holes)]
        piece_ids = [self._encode_head(piece) for piece in pieces]
        is_end = len(rest) == len(holes) and len(piece_ids[-1]) <= self.length
        last = self.engine.tokenizer.decode_bytes(piece_ids[-1]).decode("utf-8", "ignore")
        header, shown = self._context(before, rest, style)
        return InfillPrompt(
            header=header,
            before=tuple(self.engine.tokenizer.encode(shown)),
            edge=before[-NUM_EDGE_CHARACTERS:],
            pieces=(*pieces[:-1], last),
            piece_ids=tuple(piece_ids),
            closing=closing_ids(self.engine, is_turn=style == "instruct") if is_end else (),
            open_brackets=(
                unmatched_brackets(before),
                unmatched_brackets("".join(rest[len(holes) - 1 :])),
            ),
        )

    def _before(self, hole: int) -> str:
        """Return the text before a hole, including earlier fills.

        Joins only as much of it as the context can hold.
        """
        fills = [fill for ranked in self.filled for fill in ranked[0].fills]
        limit = CHARACTERS_PER_TOKEN * self.engine.model.config.max_position_embeddings
        pieces = self.document.pieces[: hole + 1]
        texts, length = list[str](), 0
        for piece, fill in zip(reversed(pieces), reversed([*fills, ""]), strict=True):
            texts += [fill, piece]
            length += len(fill) + len(piece)
            if length > limit:
                break
        return "".join(reversed(texts))

    def _encode_head(self, piece: str) -> tuple[int, ...]:
        """Encode as much of a piece as a canvas could show, and one more token if there is one."""
        shown, ids = CHARACTERS_PER_TOKEN * self.length, list[int]()
        while len(ids) <= self.length:
            ids = self.engine.tokenizer.encode(piece[:shown])
            if shown >= len(piece):
                break
            shown *= 2  # few tokens of many characters, such as long rows of spaces
        return tuple(ids[: self.length + 1])

    def _context(
        self, before: str, rest: Sequence[str], style: PromptStyle
    ) -> tuple[tuple[int, ...], str]:
        """Return the header, and as much of the text before the hole as fits after it."""
        capacity, tokenizer = self._prompt_capacity(), self.engine.tokenizer
        if style == "base":
            shown = last_tokens(tokenizer, before, capacity - 1)
            return (self.engine.model.config.bos_token_id,), shown
        count, after = capacity, FILL_MARK.join(rest)[: CHARACTERS_PER_TOKEN * capacity]
        while count:
            count = count * 2 // 3
            shown = last_tokens(tokenizer, before, count)
            document = shown + FILL_MARK + first_tokens(tokenizer, after, count)
            header = self.engine.prompt([Message(role="user", content=f"{REQUEST}\n\n{document}")])
            if len(header.ids) + len(tokenizer.encode(shown)) <= capacity:
                return header.ids, shown
        raise PromptTooLong(
            f"the context leaves {capacity} tokens for a prompt, too few to fill a hole"
        )

    def _prompt_capacity(self) -> int:
        """Tokens that may precede the canvas, an open continuation of long holes included."""
        longest = max(self.params.lengths or (self.params.max_tokens or 1,))
        blocks = -(-longest // self.length)
        limit = self.engine.model.config.max_position_embeddings - NUM_SPARE_TOKENS
        capacity = limit - (blocks + 1) * self.length
        if capacity < 1:
            most = (limit - 1) // self.length - 1
            raise PromptTooLong(
                f"holes of {longest} tokens leave no room for the text around them; lower max "
                f"tokens to {most * self.length} or less"
            )
        return capacity

    # --- when all canvases are empty

    def _most_likely(self, holes: range, style: PromptStyle) -> Program[Candidate]:
        """Return for each hole the most likely allowed token in causal mode."""
        prompt = yield from in_thread_if_long(self.num_characters, self._prompt, holes, style)
        fills: list[str] = []
        for hole in holes:
            written = zip(fills, prompt.pieces, strict=False)
            between = "".join(fill + piece for fill, piece in written)
            ids = (*prompt.header, *prompt.before, *self.engine.tokenizer.encode(between))
            (prefix,) = yield [Prefill(ids)]
            try:
                (tokens,) = yield [NextTokens(prefix, self.engine.tokenizer.vocab_size)]
            finally:
                self.engine.keep(prefix)
            after = self.document.pieces[hole + 1]
            (text,) = yield [HostTask(self._first_allowed, tokens, after)]
            fills.append(text)
        return Candidate(
            fills=tuple(fills),
            lengths=(1,) * len(fills),
            converged=False,
            is_sound=False,
            hole_scores=(0.0,) * len(fills),
        )

    def _first_allowed(self, tokens: Sequence[int], after: str) -> str:
        """Return the text of the first token that a hole may hold; white space only as a last
        resort.
        """
        tokenizer, blank = self.engine.tokenizer, ""
        for token in tokens:
            data = b"" if tokenizer.is_control(token) else tokenizer.token_bytes(token)
            text = trim_fill(data.decode(), "", after, self.rules) if is_utf8(data) else ""
            if text.strip():
                return text
            blank = blank or text
        if blank:
            return blank
        raise UsageError("the stop strings allow no text in a hole; give others")


def choose_style(
    engine: "Engine", requested: PromptStyle | None, *, has_proposals: bool = True
) -> PromptStyle:
    """Return the prompt style of a fill.

    The default uses both, as measured for the built-in model, which gains little. The best style
    for the released model has not been measured. `both` differs from `base` by causal proposals;
    without proposals it is `base`.
    """
    if engine.template is None and requested in ("instruct", "both"):
        raise UsageError(f"this checkpoint has no chat template for style {requested}; use base")
    chosen = requested or ("base" if engine.template is None else "both")
    return "base" if chosen == "both" and not has_proposals else chosen


def end_id(engine: "Engine") -> int:
    """Return the token that ends texts and pads their last canvas."""
    return engine.tokenizer.control_ids.get(EOS, engine.stop_ids.ids[0])


def closing_ids(engine: "Engine", *, is_turn: bool) -> tuple[int, ...]:
    """Return the tokens that end a text, or a turn of the model."""
    end, turn = end_id(engine), engine.tokenizer.control_ids.get(TURN_END)
    return (turn, end) if is_turn and turn is not None else (end,)
