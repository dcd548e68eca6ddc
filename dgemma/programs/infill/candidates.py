"""Candidates for holes that share a canvas: denoised, read as text, and scored.

A score is the causal log-probability of the holes and of a little text after them, which penalizes
a hole that ends in mid-sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

from dgemma.diffusion.sampler import Sampler
from dgemma.engine.canvas_policy import NOT_A_NUMBER
from dgemma.engine.events import Draft
from dgemma.engine.generation import Generation
from dgemma.engine.params import Cost, SamplingParams
from dgemma.engine.request import Prefix, Program
from dgemma.engine.scoring import Prefill, Score, Scoring
from dgemma.errors import DgemmaError
from dgemma.programs.infill.document import (
    FillRules,
    Span,
    lay_out,
    num_positions,
    trim_fill,
    unmatched_brackets,
)
from dgemma.programs.infill.healing import (
    HealingVariant,
    Ids,
    find_healing,
    is_utf8,
    strip_required,
)
from dgemma.text.chat import Prompt
from dgemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

VISIBLE_AFTER = 64  # tokens shown after the last hole
SCORED_AFTER = 32  # scored tokens after the last hole
MAX_HOLE_WEIGHT = 16  # cap on a hole's weight: a long, easy one would dominate the score
T = TypeVar("T")
Lengths = tuple[int, ...]  # tokens of each hole


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillPrompt:
    """Holes that share a canvas, and the text around them as shown to the model."""

    header: Ids  # tokens before the text: bos or chat turns
    before: Ids  # tokens of the text before the first hole
    edge: str  # end of that text, used by the fill rules
    pieces: tuple[str, ...]  # text shown after each hole
    piece_ids: tuple[Ids, ...]  # the same in tokens
    closing: Ids = ()  # end tokens, if the last piece reaches the end of the text
    heal: bool = True  # False if all boundaries are token boundaries
    # Unmatched brackets of the whole text before and after the holes; None:
    # brackets are ignored.
    open_brackets: tuple[str, str] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.header) + len(self.before) + sum(map(len, self.piece_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateConfig:
    """Settings of canvases and scores."""

    rules: FillRules
    seed: int
    sampler: Sampler
    end_id: int  # fills a canvas after the end of a text
    drafts: bool = False
    visible_after: int = VISIBLE_AFTER
    scored_after: int = SCORED_AFTER
    by_total: bool = False  # scores are sums over tokens instead of means: see `with_score`


@dataclass(frozen=True, slots=True)
class CanvasAttempt:
    """A canvas to denoise. None: the default healing, and all steps."""

    lengths: Lengths
    variant: HealingVariant | None = None
    steps: int | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Texts for the holes that share a canvas."""

    fills: tuple[str, ...]
    lengths: Lengths  # on the canvas
    converged: bool = True
    is_sound: bool = True  # no broken characters, and text in every hole
    num_unmatched: int = 0  # unmatched brackets of the whole text
    score: float = 0.0  # see `with_score`
    hole_scores: tuple[float, ...] = ()  # mean log-probability of each hole's tokens

    @property
    def rank(self) -> tuple[bool, int, float]:
        return self.is_sound, -self.num_unmatched, self.score


class CandidatePool:
    """All candidates of one search, indexed by their texts."""

    prefix: Prefix  # set while `run` runs

    def __init__(
        self, engine: "Engine", prompt: InfillPrompt, config: CandidateConfig, cost: Cost
    ) -> None:
        self.engine, self.prompt, self.config, self.cost = engine, prompt, config, cost
        self.tokenizer, self.length = engine.tokenizer, engine.model.config.canvas_length
        closed = (*prompt.piece_ids[:-1], prompt.piece_ids[-1] + prompt.closing)
        self.healing = find_healing(self.tokenizer, prompt.before, closed, heal=prompt.heal)
        self.candidates: dict[tuple[str, ...], Candidate] = {}
        self.refined: set[Lengths] = set()  # lengths of canvases that ran all steps
        self.canvases: dict[tuple[str, ...], Draft] = {}  # their canvases, if drafts are shown
        self.shown: tuple[str, ...] | None = None  # fills of the last canvas shown

    def run(self, program: Program[T]) -> Program[T]:
        """Run a program with the shared prefix, which goes to the prefix cache at the end."""
        (self.prefix,) = yield [Prefill(self.prompt.header + self.healing.shared)]
        try:
            return (yield from program)
        finally:
            self.engine.keep(self.prefix)
            del self.prefix

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def ranked(self) -> list[Candidate]:
        """All candidates, best first."""
        return sorted(self.candidates.values(), key=lambda c: c.rank, reverse=True)

    # --- canvases

    def denoise(self, attempts: Sequence[CanvasAttempt]) -> Program[None]:
        """Denoise canvases together and add their texts to the candidates."""
        attempts = [attempt for attempt in attempts if any(attempt.lengths)]
        if not attempts:
            return
        shown = len(attempts) // 2 if self.config.drafts else -1
        pairs = [self._task(attempt, drafts=i == shown) for i, attempt in enumerate(attempts)]
        yield [task for task, _ in pairs]
        candidates, full = [], self.config.sampler.max_denoising_steps
        for attempt, (task, holes) in zip(attempts, pairs, strict=True):
            guess, converged = finished_canvas(task)
            texts = [tuple(guess[start:stop]) for start, stop in holes]
            read = self.read(attempt, texts, converged=converged)
            candidates.append(read)
            canvas = task.progress.last_canvas
            if self.config.drafts and read is not None and canvas is not None:
                shown_canvas = Draft.of(canvas, 0, self.tokenizer)
                self.canvases.setdefault(read.fills, shown_canvas)
            self.cost.steps += task.progress.steps
            is_written = attempt.variant is not None and bool(attempt.variant.written)
            if (attempt.steps or full) >= full and not is_written:
                self.refined.add(attempt.lengths)
        self.cost.canvases += len(pairs)
        last = candidates[shown] if shown >= 0 else None
        self.shown = None if last is None else last.fills
        yield from self.add([candidate for candidate in candidates if candidate is not None])

    def _task(self, attempt: CanvasAttempt, *, drafts: bool) -> tuple[Generation, tuple[Span, ...]]:
        """Return the generation of one canvas, and the positions of its holes."""
        variant, visible = attempt.variant or self.healing.spaces, self.config.visible_after
        after = len(variant.holes[-1].after)
        if self.prompt.closing:
            after = max(after, visible)  # filled with the token that ends texts
        used = num_positions(variant.holes, attempt.lengths)
        length = min(self.length, used + min(after, visible))
        layout = lay_out(variant.holes, attempt.lengths, length, self.config.end_id)
        sampler = self.config.sampler
        params = SamplingParams(
            max_tokens=layout.length,
            canvas_length=layout.length,
            pins=layout.pins,
            seed=self.config.seed,
            choice=attempt.choice,
            sampler=with_max_steps(sampler, attempt.steps or sampler.max_denoising_steps),
            drafts=drafts,
            retries=0,
            max_blocks=1,
        )
        prompt = Prompt(text="", ids=self.prefix.ids + variant.ids)
        return self.engine.generation(prompt, params, prefix=self.prefix), layout.holes

    def read(
        self, attempt: CanvasAttempt, holes: Sequence[Ids], *, converged: bool = True
    ) -> Candidate | None:
        """Return a candidate; None if it contradicts the text or a hole stays empty."""
        prompt, rules = self.prompt, self.config.rules
        variant = attempt.variant or self.healing.spaces
        written, before, fills, is_sound = variant.written, prompt.edge, list[str](), True
        for hole, ids, piece in zip(variant.holes, holes, prompt.pieces, strict=True):
            data = strip_required(self.tokenizer.decode_bytes(ids, skip_control=True), hole)
            if data is None:
                return None
            data = written + data
            text = trim_fill(data.decode("utf-8", "ignore"), before, piece, rules)
            if not text and not rules.allow_empty:
                return None
            is_sound = is_sound and is_utf8(data) and bool(text.strip() or rules.allow_empty)
            fills.append(text)
            written, before = b"", piece or text
        lengths = (attempt.lengths[0] + variant.num_written, *attempt.lengths[1:])
        return Candidate(
            fills=tuple(fills), lengths=lengths, converged=converged, is_sound=is_sound
        )

    def _num_unmatched(self, fills: Sequence[str]) -> int:
        """Count the brackets that would be unmatched in the whole text."""
        if self.prompt.open_brackets is None:
            return 0
        before, after = self.prompt.open_brackets
        between = zip(fills, [*self.prompt.pieces[:-1], ""], strict=True)
        text = "".join(fill + piece for fill, piece in between)
        return len(unmatched_brackets(before + text + after))

    def show_best(self) -> Program[None]:
        """Report the canvas of the best candidate, unless it was the last one shown.

        A text that no canvas wrote is shown as a canvas of pins.
        """
        if not (self.config.drafts and self.candidates):
            return
        best = self.ranked[0].fills
        if best != self.shown:
            yield self.canvases.get(best) or self._pinned_canvas(best)
            self.shown = best

    def _pinned_canvas(self, fills: tuple[str, ...]) -> Draft:
        after = self.prompt.piece_ids[-1][: self.config.visible_after]
        between = zip(fills, [*self.prompt.pieces[:-1], ""], strict=True)
        text = "".join(fill + piece for fill, piece in between)
        ids = (*self.tokenizer.encode(text), *after)[: self.length]
        texts, all_pinned = tuple(map(self.tokenizer.token_text, ids)), (True,) * len(ids)
        return Draft(
            ids=ids,
            tokens=texts,
            guess=ids,
            guess_tokens=texts,
            entropy=(0.0,) * len(ids),
            accepted=all_pinned,
            pinned=all_pinned,
            block=0,
            step=1,
        )

    # --- scores

    def add(self, candidates: Sequence[Candidate]) -> Program[None]:
        """Score new candidates; a converged canvas replaces one with the same fills."""
        for candidate in candidates:
            fills = candidate.fills
            if fills in self.candidates and candidate.converged:
                self.candidates[fills] = replace(self.candidates[fills], converged=True)
        new = {
            c.fills: replace(c, num_unmatched=self._num_unmatched(c.fills))
            for c in candidates
            if c.fills not in self.candidates
        }
        if not new:
            return
        encoded = [self._encode(candidate) for candidate in new.values()]
        (scores,) = yield [Scoring(self.prefix, [ids for ids, _ in encoded])]
        for fills, (_, lengths), score in zip(new, encoded, scores, strict=True):
            self.candidates[fills] = with_score(
                new[fills], score, lengths, self.tokenizer, by_total=self.config.by_total
            )

    def _encode(self, candidate: Candidate) -> tuple[list[int], list[int]]:
        """Encode the text from the shared prefix to a little after the holes.

        Also returns the byte counts of its parts: edge, hole, piece, hole, ..., piece.
        """
        prompt = self.prompt
        after = prompt.piece_ids[-1][: self.config.scored_after]
        last = self.tokenizer.decode_bytes(after).decode("utf-8", "ignore")
        texts = [self.healing.edge.decode()]
        for fill, piece in zip(candidate.fills, [*prompt.pieces[:-1], last], strict=True):
            texts += [fill, piece]
        ids = self.tokenizer.encode("".join(texts))
        if len(after) == len(prompt.piece_ids[-1]):
            ids += prompt.closing[:1]
        return ids or [self.config.end_id], [len(text.encode()) for text in texts]


def with_score(
    candidate: Candidate,
    score: Score,
    lengths: Sequence[int],
    tokenizer: Tokenizer,
    *,
    by_total: bool = False,
) -> Candidate:
    """Return a candidate with its scores; `lengths` are bytes of the parts, alternately holes.

    The score is the mean over tokens, or with `by_total` the sum: with unknown lengths each
    repeated token would improve a mean. A token that overlaps a hole counts as part of it.
    """
    ends = list(accumulate(lengths, initial=0))
    holes = list(pairwise(ends))[1::2]  # in bytes
    by_hole: list[list[float]] = [[] for _ in holes]
    others, stop = list[float](), 0
    for logprob, token in zip(score.logprobs, score.ids, strict=True):
        start, stop = stop, stop + len(tokenizer.token_bytes(token))
        pairs = zip(by_hole, holes, strict=True)
        inside = [logprobs for logprobs, (a, b) in pairs if start < b and stop > a]
        for logprobs in inside or [others]:
            logprobs.append(logprob)
    weights = [min(len(logprobs), MAX_HOLE_WEIGHT) for logprobs in by_hole]
    means = tuple(sum(logprobs) / max(1, len(logprobs)) for logprobs in by_hole)
    total = sum(others) + sum(w * mean for w, mean in zip(weights, means, strict=True))
    mean = total / max(1, len(others) + sum(weights))
    return replace(candidate, score=score.total if by_total else mean, hole_scores=means)


def finished_canvas(task: Generation) -> tuple[list[int], bool]:
    """Return the tokens of a generation's last canvas, and whether it converged."""
    canvas = task.progress.last_canvas
    if canvas is None or task.progress.fault == NOT_A_NUMBER:
        raise DgemmaError("the model's output is not a number; the checkpoint or dtype is at fault")
    return canvas.guess_L.tolist(), bool(canvas.converged)


def with_max_steps(sampler: Sampler, steps: int) -> Sampler:
    return replace(sampler, max_denoising_steps=min(steps, sampler.max_denoising_steps))
