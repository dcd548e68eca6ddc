"""The search for what stands in holes that share a canvas: sizes, seams, scores.

Canvases with holes of several sizes run together, a few steps each. What each says is shaped by the
rules, put in its place, and scored by the causal mode together with what follows, which punishes a
hole that ends in the middle of something. With effort `fast` the best of them is the answer. With
`thorough` the search goes on around the best sizes with all steps, and from there holes grow and
shrink while that helps; what the causal mode itself would write in a hole (`engine.proposals`)
competes with what the canvases say.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dgemma.constrain.holes import Rules, around, lay_out, needed, shape, sweep
from dgemma.constrain.seams import Variant, complete_words, find_seams, is_whole, take_off
from dgemma.diffusion.sampler import Sampler
from dgemma.engine.candidates import Candidate, given, rank, scored
from dgemma.engine.events import Draft
from dgemma.engine.proposals import Hole, propose
from dgemma.engine.trials import SharedPrefix, Trial, with_steps

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

Effort = Literal["fast", "thorough"]

SEEN_AFTER = 64  # tokens behind the last hole that a canvas shows, if there are so many
LEAST_AFTER = 8  # and those that it must have place for, if it is not a small one
SCORED_AFTER = 32  # tokens behind the last hole that count in a score
SEARCH_STEPS = 6  # of a canvas that is only tried
COMPLETED_WORDS = 2  # ways tried to complete a word that the text before a hole leaves open
LOOKED_AT = 512  # of the causal mode's likeliest tokens, in search of those
STRETCH = (-2, -1, 1, 2)  # tokens by which a hole may grow or shrink at a time...
STRETCHES = 3  # ...and how often
DRAWS = 4  # canvases for holes whose lengths are known: the best of them is taken
LAST_TRIES = 3  # more canvases for holes that all others left empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Holes that share a canvas, and the text around them as the model is to see it."""

    header: tuple[int, ...]  # what stands before the text: its beginning, or turns
    before: tuple[int, ...]  # the text before the first hole, in tokens
    edge: str  # the end of that text; the rules look at it
    pieces: tuple[str, ...]  # the text behind each hole, as far as it is to be seen
    piece_ids: tuple[tuple[int, ...], ...]  # the same in tokens
    closing: tuple[int, ...] = ()  # what ends the text, where the last piece reaches its end
    heal: bool = True  # whether seams may be healed; not where they lie between tokens anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings of a search."""

    rules: Rules
    seed: int
    sampler: Sampler
    end: int  # the token that fills a canvas behind the end of a text
    drafts: bool = False
    candidates: int = 1
    proposals: int = 0  # texts that the causal mode writes for a hole, beside the canvases' own
    seen_after: int = SEEN_AFTER
    scored_after: int = SCORED_AFTER
    by_total: bool = False  # whether scores are sums over tokens, not means: see `scored`
    effort: Effort = "thorough"  # fast: one batch of canvases, none after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens in each hole: those to start from, others to try, and the most there may be."""

    first: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    refine: bool = True  # whether to try sizes around the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A canvas to try."""

    variant: Variant
    sizes: tuple[int, ...]
    steps: int
    choice: int = 0


class Search:
    """One sheet's search. `steps` and `canvases` count what it took."""

    def __init__(self, engine: "Engine", sheet: Sheet, tuning: Tuning) -> None:
        self.engine, self.sheet, self.tuning = engine, sheet, tuning
        self.length = engine.model.config.canvas_length
        closed = (*sheet.piece_ids[:-1], sheet.piece_ids[-1] + sheet.closing)
        self.seams = find_seams(engine.tokenizer, sheet.before, closed, heal=sheet.heal)
        self.shared = SharedPrefix(engine, sheet.header + self.seams.shared)
        self.found: dict[tuple[str, ...], Candidate] = {}
        self.tried: set[tuple[int, ...]] = set()  # sizes of canvases that took all their steps
        self.steps = self.canvases = 0

    def run(
        self, sizes: Sizes, known: Sequence[Candidate] = ()
    ) -> Generator[Draft, None, list[Candidate]]:
        """The candidates, the best first; none where no canvas said anything that is allowed.

        `known`: what no canvas wrote and is a candidate too.
        """
        try:
            self._remember(known)
            swept = [one for one in sweep(sizes.first, sizes.choices) if self._fits(one)]
            if (nothing := (0,) * len(sizes.first)) in swept:  # needs no canvas
                self._remember([given(("",) * len(nothing), nothing)])
            self._remember(self._proposed(sizes))
            if len(swept) <= 1:
                yield from self._try(self._draws(swept, DRAWS))
            elif self.tuning.effort == "fast":
                yield from self._try(self._batch(swept))
            else:
                yield from self._widen(sizes, swept)
            yield from self._try(self._long(sizes))
            yield from self._try_again(sizes)
        finally:
            self.shared.close()
        ranked = sorted(self.found.values(), key=rank, reverse=True)
        return ranked[: self.tuning.candidates]

    def _best(self) -> Candidate:
        return max(self.found.values(), key=rank)

    def proposals(self, sizes: Sizes) -> list[Candidate]:
        """What is proposed, where the search goes no further."""
        try:
            return self._proposed(sizes)
        finally:
            self.shared.close()

    def _proposed(self, sizes: Sizes) -> list[Candidate]:
        """What the causal mode writes where one hole has the canvas for itself; not scored yet."""
        if len(sizes.first) > 1:
            return []
        lengths, usual = (*sizes.choices[0], sizes.first[0]), self.seams.usual
        hole = Hole(
            variant=usual,
            edge=self.sheet.edge,
            piece=self.sheet.pieces[0],
            single_line=self.tuning.rules.single_line,
            least=max(1, min(lengths)),
            # No longer than a canvas could hold: the search goes on from the best size.
            most=min(max(lengths), self._most()),
            by_total=self.tuning.by_total,
        )
        said = [
            self._read(Attempt(variant=usual, sizes=(len(ids),), steps=0), (ids,), settled=True)
            for ids in propose(self.shared, hole, self.tuning.proposals)
        ]
        return [one for one in said if one is not None]

    def _batch(self, swept: Sequence[tuple[int, ...]]) -> list[Attempt]:
        """Canvases of all sizes, and of the first with other seams: all that `fast` runs."""
        usual, steps = self.seams.usual, self.tuning.sampler.max_denoising_steps
        draws = -(-self.tuning.candidates // len(swept))
        attempts = [
            Attempt(variant=usual, sizes=one, steps=steps, choice=choice)
            for choice in range(draws)
            for one in swept
        ]
        return attempts + [
            Attempt(variant=variant, sizes=swept[0], steps=steps) for variant in self._other_seams()
        ]

    def _widen(
        self, sizes: Sizes, swept: Sequence[tuple[int, ...]]
    ) -> Generator[Draft, None, None]:
        """A few steps of all sizes, then all steps around the best of them."""
        usual, steps = self.seams.usual, SEARCH_STEPS
        yield from self._try([Attempt(variant=usual, sizes=s, steps=steps) for s in swept])
        if self.found:
            yield from self._refine(sizes)
        if self.found and sizes.refine:
            yield from self._stretch(sizes)

    def _refine(self, sizes: Sizes) -> Generator[Draft, None, None]:
        """Sizes around the best, and the best with other seams and other noise, all steps taken."""
        best = self._best_sizes(sizes)
        limits = sizes.limits if sizes.refine else best
        near = [
            around(size, limit) if sizes.refine else []
            for size, limit in zip(best, limits, strict=True)
        ]
        usual, steps = self.seams.usual, self.tuning.sampler.max_denoising_steps
        attempts = [
            Attempt(variant=usual, sizes=one, steps=steps)
            for one in sweep(best, near)
            if self._fits(one)
        ]
        attempts += [
            Attempt(variant=variant, sizes=best, steps=steps) for variant in self._other_seams()
        ]
        attempts += [
            Attempt(variant=usual, sizes=best, steps=steps, choice=choice)
            for choice in range(1, self.tuning.candidates)
        ]
        yield from self._try(attempts)

    def _stretch(self, sizes: Sizes) -> Generator[Draft, None, None]:
        """Let holes grow or shrink by a token or two for as long as that is an improvement."""
        usual, steps = self.seams.usual, self.tuning.sampler.max_denoising_steps
        for _ in range(STRETCHES):
            best = self._best()
            near = [
                [size + more for more in STRETCH if 1 <= size + more <= limit]
                for size, limit in zip(best.sizes, sizes.limits, strict=True)
            ]
            new = [
                one for one in sweep(best.sizes, near) if self._fits(one) and one not in self.tried
            ]
            yield from self._try([Attempt(variant=usual, sizes=one, steps=steps) for one in new])
            if self._best() == best:
                return

    def _draws(self, swept: Sequence[tuple[int, ...]], least: int) -> list[Attempt]:
        """Canvases of the same sizes from other noise, all steps taken."""
        usual, steps = self.seams.usual, self.tuning.sampler.max_denoising_steps
        count = max(least, self.tuning.candidates)
        return [
            Attempt(variant=usual, sizes=sizes, steps=steps, choice=choice)
            for sizes in swept
            for choice in range(count)
        ]

    def _try_again(self, sizes: Sizes) -> Generator[Draft, None, None]:
        """Where nothing sound was said: plain seams, other noise, then single tokens."""
        steps, ones = self.tuning.sampler.max_denoising_steps, (1,) * len(sizes.first)
        first = sizes.first if self._fits(sizes.first) else ones
        for choice in range(LAST_TRIES):
            if any(one.is_sound for one in self.found.values()):
                return
            some = first if choice + 1 < LAST_TRIES else ones
            yield from self._try(
                [Attempt(variant=self.seams.tight, sizes=some, steps=steps, choice=choice)]
            )

    def _long(self, sizes: Sizes) -> list[Attempt]:
        """Canvases for a hole that does not fit one: what comes first is an open continuation."""
        wanted = [s[0] for s in sweep(sizes.first, sizes.choices) if not self._fits(s)]
        most = self._most()
        if len(sizes.first) > 1 or not wanted:
            return []
        tight, decode = self.seams.tight, self.engine.tokenizer.decode_bytes
        blocks = -(-(max(wanted) - most) // self.length)
        written = self.shared.go_on(tight.ids, blocks, self.tuning.seed, self.tuning.sampler)
        attempts = []
        for size in wanted:
            used = written[: -(-(size - most) // self.length) * self.length]
            variant = replace(
                tight, ids=(*tight.ids, *used), given=decode(used), given_size=len(used)
            )
            rest = max(1, min(most, size - len(used)))
            steps = self.tuning.sampler.max_denoising_steps
            attempts.append(Attempt(variant=variant, sizes=(rest,), steps=steps))
        return attempts

    def _best_sizes(self, sizes: Sizes) -> tuple[int, ...]:
        """The best size of each hole, from the canvases in which it alone was varied."""
        by_sizes: dict[tuple[int, ...], Candidate] = {}
        for one in self.found.values():
            if one.sizes not in by_sizes or rank(one) > rank(by_sizes[one.sizes]):
                by_sizes[one.sizes] = one
        best = list(sizes.first)
        for hole in range(len(best)):
            others = [
                one
                for s, one in by_sizes.items()
                if s[:hole] + s[hole + 1 :] == sizes.first[:hole] + sizes.first[hole + 1 :]
            ]
            if others:
                best[hole] = max(others, key=rank).sizes[hole]
        if self._fits(best):
            return tuple(best)
        return self._best().sizes

    def _fits(self, sizes: Sequence[int]) -> bool:
        """Whether holes of these sizes fit the canvas, with something of what follows."""
        return needed(self.seams.tight.gaps, sizes) <= self._most()

    def _most(self) -> int:
        """Positions that holes and what lies between them may take."""
        after = len(self.seams.tight.gaps[-1].after)
        return self.length - min(after, least_after(self.length))

    def _other_seams(self) -> list[Variant]:
        tokenizer, logits_V = self.engine.tokenizer, self.shared.next_logits()
        nearest = logits_V.topk(min(LOOKED_AT, len(logits_V))).indices.tolist()
        words = list(complete_words(tokenizer, self.seams, nearest))[:COMPLETED_WORDS]
        return [*words, *self.seams.others]

    # --- canvases

    def _try(self, attempts: Sequence[Attempt]) -> Generator[Draft, None, None]:
        """Run canvases together, and remember what they say."""
        attempts = [attempt for attempt in attempts if any(attempt.sizes)]
        if not attempts:
            return
        shown = len(attempts) // 2 if self.tuning.drafts else -1
        trials = [replace(self._trial(a), drafts=i == shown) for i, a in enumerate(attempts)]
        tried = yield from self.shared.run(trials)
        self.steps += sum(one.steps for one in tried)
        self.canvases += len(tried)
        full = self.tuning.sampler.max_denoising_steps
        self.tried |= {a.sizes for a in attempts if a.steps >= full and not a.variant.given}
        both = zip(attempts, tried, strict=True)
        said = [self._read(a, one.holes, settled=one.settled) for a, one in both]
        self._remember([one for one in said if one is not None])

    def _trial(self, attempt: Attempt) -> Trial:
        gaps, seen = attempt.variant.gaps, self.tuning.seen_after
        after = len(gaps[-1].after)
        if self.sheet.closing:
            after = max(after, seen)  # filled up with the token that ends texts
        length = min(self.length, needed(gaps, attempt.sizes) + min(after, seen))
        return Trial(
            layout=lay_out(gaps, attempt.sizes, length, self.tuning.end),
            ids=attempt.variant.ids,
            seed=self.tuning.seed,
            choice=attempt.choice,
            sampler=with_steps(self.tuning.sampler, attempt.steps),
        )

    def _read(
        self, attempt: Attempt, holes: Sequence[tuple[int, ...]], *, settled: bool
    ) -> Candidate | None:
        """What a canvas says, or None where it does not agree with the text or says nothing."""
        sheet, rules, variant = self.sheet, self.tuning.rules, attempt.variant
        given, before, fills, sound = variant.given, sheet.edge, [], True
        for gap, ids, piece in zip(variant.gaps, holes, sheet.pieces, strict=True):
            written = self.engine.tokenizer.decode_bytes(ids, skip_control=True)
            data = take_off(written, gap)
            if data is None:
                return None
            data = given + data
            text = shape(data.decode("utf-8", "ignore"), before, piece, rules)
            if not text and not rules.allow_empty:
                return None
            sound = sound and is_whole(data) and bool(text.strip() or rules.allow_empty)
            fills.append(text)
            given, before = b"", piece or text
        return Candidate(
            fills=tuple(fills),
            sizes=(attempt.sizes[0] + variant.given_size, *attempt.sizes[1:]),
            settled=settled,
            is_sound=sound,
        )

    # --- scores

    def _remember(self, said: Sequence[Candidate]) -> None:
        """Score what is new; of the same fills the canvas that settled counts."""
        for one in said:
            if one.fills in self.found and one.settled:
                self.found[one.fills] = replace(self.found[one.fills], settled=True)
        new = {one.fills: one for one in said if one.fills not in self.found}
        if not new:
            return
        spelled = [self._spell(one) for one in new.values()]
        scores = self.shared.score([ids for ids, _ in spelled])
        tokenizer, by_total = self.engine.tokenizer, self.tuning.by_total
        for one, (_, lengths), score in zip(new.values(), spelled, scores, strict=True):
            self.found[one.fills] = scored(one, score, lengths, tokenizer, by_total=by_total)

    def _spell(self, one: Candidate) -> tuple[list[int], list[int]]:
        """The text from the shared prefix to a little behind the holes, in tokens.

        Also the bytes of each of its stretches: edge, hole, piece, hole, ..., piece.
        """
        tokenizer, sheet = self.engine.tokenizer, self.sheet
        tail = sheet.piece_ids[-1][: self.tuning.scored_after]
        pieces = [*sheet.pieces[:-1], tokenizer.decode_bytes(tail).decode("utf-8", "ignore")]
        stretches = [self.seams.edge.decode()]
        for fill, piece in zip(one.fills, pieces, strict=True):
            stretches += [fill, piece]
        ids = tokenizer.encode("".join(stretches))
        if len(tail) == len(sheet.piece_ids[-1]):
            ids += sheet.closing[:1]
        return ids or [self.tuning.end], [len(text.encode()) for text in stretches]


def least_after(length: int) -> int:
    """Tokens behind the last hole that a canvas must have place for, if there are so many."""
    return min(LEAST_AFTER, length // 4)
