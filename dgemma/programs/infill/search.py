"""Search for the text of holes that share a canvas: their lengths, and boundary healing.

Canvases with holes of several lengths run together for a few steps. Their texts are trimmed by the
rules, inserted, and scored (`infill.candidates`). Effort `fast` returns the best one. `thorough`
continues around the best lengths with all steps, then grows and shrinks holes while that helps;
causal candidates (`infill.beam`) compete with those of the canvases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dgemma.engine.params import SamplingParams
from dgemma.engine.request import Program
from dgemma.engine.scoring import NextTokens
from dgemma.programs.infill.beam import BeamConstraints, BeamSearch
from dgemma.programs.infill.candidates import (
    Candidate,
    CandidatePool,
    CanvasAttempt,
    Lengths,
)
from dgemma.programs.infill.document import nearby_lengths, num_positions, vary_one_hole
from dgemma.programs.infill.healing import HealingVariant, complete_words
from dgemma.text.chat import Prompt

FillEffort = Literal["fast", "thorough"]

MIN_VISIBLE_AFTER = 8  # tokens after the last hole that must fit the canvas
SEARCH_STEPS = 6  # steps of canvases that only compare lengths
MAX_COMPLETED_WORDS = 2  # completions of an open word before a hole...
READ_TOKENS = 512  # ...among this many most likely causal tokens
STRETCH = (-2, -1, 1, 2)  # changes of a hole's length per step...
MAX_STRETCHES = 3  # ...and the number of steps
NUM_DRAWS = 4  # canvases for holes of known lengths; the best one is taken
MAX_LAST_TRIES = 3  # canvases for holes that all others left empty


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Extent of a search."""

    num_candidates: int = 1
    num_proposals: int = 0  # candidates by beam search, for a hole alone on its canvas
    effort: FillEffort = "thorough"  # fast: one batch of canvases


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthGrid:
    """Candidate lengths per hole: initial ones, others to try, and the longest."""

    first: Lengths
    options: tuple[Lengths, ...]
    limits: Lengths
    refine: bool = True  # try lengths around the best


class Search:
    """One search; its programs run inside the pool's `run`."""

    def __init__(
        self, pool: CandidatePool, lengths: LengthGrid, config: SearchConfig | None = None
    ) -> None:
        self.pool, self.lengths, self.config = pool, lengths, config or SearchConfig()

    def run(self, known: Sequence[Candidate] = ()) -> Program[list[Candidate]]:
        """Return the candidates, best first; empty if no canvas wrote an allowed text.

        `known` are candidates not written by a canvas.
        """
        grid = self._fitting(vary_one_hole(self.lengths.first, self.lengths.options))
        fixed, empty = list(known), (0,) * len(self.lengths.first)
        if empty in grid:  # needs no canvas
            fixed.append(Candidate(fills=("",) * len(empty), lengths=empty))
        texts = {candidate.fills for candidate in fixed}
        fixed += [c for c in (yield from self.propose()) if c.fills not in texts]
        yield from self.pool.add(fixed)
        if len(grid) <= 1:
            yield from self.pool.denoise(self._draws(grid))
        elif self.config.effort == "fast":
            yield from self._run_fast(grid)
        else:
            yield from self._run_thorough(grid)
        yield from self._fill_long_hole()
        yield from self._try_again()
        yield from self.pool.show_best()
        return self.pool.ranked[: self.config.num_candidates]

    def propose(self) -> Program[list[Candidate]]:
        """Return unscored causal candidates for a hole alone on its canvas."""
        lengths, pool = self.lengths, self.pool
        if len(lengths.first) > 1 or not self.config.num_proposals:
            return []
        options = (*lengths.options[0], lengths.first[0])
        constraints = BeamConstraints(
            variant=pool.healing.spaces,
            edge=pool.prompt.edge,
            piece=pool.prompt.pieces[0],
            single_line=pool.config.rules.single_line,
            min_tokens=max(1, min(options)),
            # At most a canvas: the search continues from the best length.
            max_tokens=min(max(options), self._capacity()),
            width=self.config.num_proposals,
            by_total=pool.config.by_total,
        )
        (texts,) = yield [BeamSearch(pool.tokenizer, pool.prefix, constraints)]
        read = [pool.read(CanvasAttempt((len(ids),)), (ids,)) for ids in texts]
        return [candidate for candidate in read if candidate is not None]

    # --- canvases

    def _draws(self, grid: Sequence[Lengths]) -> list[CanvasAttempt]:
        """Return canvases of the same lengths with other noise."""
        count = max(NUM_DRAWS, self.config.num_candidates)
        return [CanvasAttempt(lengths, choice=i) for lengths in grid for i in range(count)]

    def _run_fast(self, grid: Sequence[Lengths]) -> Program[None]:
        """Run all lengths, and the first one with other healing, in one batch."""
        num_draws = -(-self.config.num_candidates // len(grid))
        attempts = [CanvasAttempt(lengths, choice=i) for i in range(num_draws) for lengths in grid]
        others = yield from self._other_variants()
        attempts += [CanvasAttempt(grid[0], variant) for variant in others]
        yield from self.pool.denoise(attempts)

    def _run_thorough(self, grid: Sequence[Lengths]) -> Program[None]:
        """Run few steps of all lengths, then all steps around the best ones."""
        attempts = [CanvasAttempt(lengths, steps=SEARCH_STEPS) for lengths in grid]
        yield from self.pool.denoise(attempts)
        if len(self.pool):
            yield from self._refine()
        if len(self.pool) and self.lengths.refine:
            yield from self._stretch()

    def _refine(self) -> Program[None]:
        """Return lengths around the best, and the best with other healing and noise."""
        best = self._best_lengths()
        near = [
            nearby_lengths(length, limit) if self.lengths.refine else []
            for length, limit in zip(best, self.lengths.limits, strict=True)
        ]
        attempts = [CanvasAttempt(n) for n in self._fitting(vary_one_hole(best, near))]
        others = yield from self._other_variants()
        attempts += [CanvasAttempt(best, variant) for variant in others]
        attempts += [CanvasAttempt(best, choice=i) for i in range(1, self.config.num_candidates)]
        yield from self.pool.denoise(attempts)

    def _stretch(self) -> Program[None]:
        """Grow and shrink holes by a token or two as long as that helps."""
        for _ in range(MAX_STRETCHES):
            best = self.pool.ranked[0]
            near = [
                [length + more for more in STRETCH if 1 <= length + more <= limit]
                for length, limit in zip(best.lengths, self.lengths.limits, strict=True)
            ]
            grid = self._fitting(vary_one_hole(best.lengths, near))
            new = [CanvasAttempt(n) for n in grid if n not in self.pool.refined]
            yield from self.pool.denoise(new)
            if self.pool.ranked[0] == best:
                return

    def _fill_long_hole(self) -> Program[None]:
        """Fill a hole longer than a canvas: its beginning is an open continuation."""
        grid = vary_one_hole(self.lengths.first, self.lengths.options)
        long = [lengths[0] for lengths in grid if not self._fits(lengths)]
        if len(self.lengths.first) > 1 or not long:
            return
        pool, capacity, variant = self.pool, self._capacity(), self.pool.healing.none
        num_blocks = -(-(max(long) - capacity) // pool.length)
        written = yield from self._continue(variant.ids, num_blocks)
        attempts = []
        for length in long:
            used = written[: -(-(length - capacity) // pool.length) * pool.length]
            longer = replace(
                variant,
                ids=(*variant.ids, *used),
                written=pool.tokenizer.decode_bytes(used),
                num_written=len(used),
            )
            rest = max(1, min(capacity, length - len(used)))
            attempts.append(CanvasAttempt((rest,), longer))
        yield from pool.denoise(attempts)

    def _continue(self, ids: Sequence[int], num_blocks: int) -> Program[list[int]]:
        """Continue the prefix and `ids` by a number of canvases, or to the end of the text."""
        pool = self.pool
        params = SamplingParams(
            max_tokens=num_blocks * pool.length,
            seed=pool.config.seed,
            sampler=pool.config.sampler,
            retries=0,
        )
        prompt = Prompt(text="", ids=(*pool.prefix.ids, *ids))
        (done,) = yield [pool.engine.generation(prompt, params, prefix=pool.prefix)]
        is_control = pool.tokenizer.is_control
        end = next((i for i, token in enumerate(done.ids) if is_control(token)), len(done.ids))
        return list(done.ids[:end])

    def _try_again(self) -> Program[None]:
        """If no candidate is sound, try no healing, other noise, then single tokens."""
        first, ones = self.lengths.first, (1,) * len(self.lengths.first)
        for choice in range(MAX_LAST_TRIES):
            if len(self.pool) and self.pool.ranked[0].is_sound:
                return
            is_last = choice + 1 == MAX_LAST_TRIES
            lengths = first if self._fits(first) and not is_last else ones
            attempt = CanvasAttempt(lengths, self.pool.healing.none, choice=choice)
            yield from self.pool.denoise([attempt])

    # --- lengths and healing

    def _best_lengths(self) -> Lengths:
        """Return the best length of each hole, from canvases that varied only that hole."""
        best, first = list(self.lengths.first), self.lengths.first
        for hole in range(len(best)):
            others = (*first[:hole], *first[hole + 1 :])
            varied = [
                candidate.lengths[hole]
                for candidate in self.pool.ranked
                if (*candidate.lengths[:hole], *candidate.lengths[hole + 1 :]) == others
            ]
            best[hole] = varied[0] if varied else best[hole]
        return tuple(best) if self._fits(best) else self.pool.ranked[0].lengths

    def _fitting(self, grid: Sequence[Lengths]) -> list[Lengths]:
        return [lengths for lengths in grid if self._fits(lengths)]

    def _fits(self, lengths: Sequence[int]) -> bool:
        """True if holes of these lengths and some following text fit the canvas."""
        return num_positions(self.pool.healing.none.holes, lengths) <= self._capacity()

    def _capacity(self) -> int:
        """Positions available for holes and the text between them."""
        after = len(self.pool.healing.none.holes[-1].after)
        return self.pool.length - min(after, min_visible_after(self.pool.length))

    def _other_variants(self) -> Program[list[HealingVariant]]:
        pool, words = self.pool, list[HealingVariant]()
        if pool.healing.edge and not pool.healing.edge.isspace():
            (tokens,) = yield [NextTokens(pool.prefix, READ_TOKENS)]
            words = list(complete_words(pool.tokenizer, pool.healing, tokens))
        return [*words[:MAX_COMPLETED_WORDS], *pool.healing.others]


def min_visible_after(length: int) -> int:
    """Minimum visible suffix tokens."""
    return min(MIN_VISIBLE_AFTER, length // 4)
