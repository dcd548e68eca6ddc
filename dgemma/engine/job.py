"""One request on its way: what it brings to the next pass, and what it makes of the outcome.

A job commits its prompt in chunks; then it steps canvases (diffusion), or appends one token a pass
(AR), or does the second until its thought is closed and then the first (hybrid). A settled block is
committed in the pass that takes the next canvas's first step.
"""

import math
import time
from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from dgemma.backends.base import ForwardInput, ForwardOutput, TokenDraw
from dgemma.config import ModelConfig
from dgemma.constrain.edits import next_place
from dgemma.constrain.matcher import GuideFault
from dgemma.diffusion.canvas import NO_PINS, BlockNoise, Canvas, Pins
from dgemma.diffusion.denoise import Row, start
from dgemma.diffusion.logit_stats import draw_token
from dgemma.engine.events import Done, Draft, Event, Retry
from dgemma.engine.guard import NOT_A_NUMBER, fault
from dgemma.engine.guided import THOUGHT_CLOSES, THOUGHT_OPENS, Guided
from dgemma.engine.options import Plan
from dgemma.engine.reader import Reader
from dgemma.model.kv_cache import KVCache
from dgemma.text.reply import ENDINGS
from dgemma.text.tokenizer import StopIds, Tokenizer

PREFILL_CHUNK = 512  # tokens a request may commit in one pass, at least
AR_BLOCK = 1 << 31  # blocks of noise from here on serve single tokens, in blocks of...
AR_BLOCK_LENGTH = 256
LENGTHS_APART = 8  # canvases that shrink differ by so much: each length is captured by itself
LEAST_FILLED = 1 / 8  # of a first canvas, if a reply ends in it
LONGEST_LAST = 1.5  # times a short canvas: what is left beyond it takes another one
FAULT = "fault"


class Job:
    """The state of one request. The engine alone calls `begin`, `work` and `take`, in turn."""

    cache: KVCache  # from `begin` on
    past: KVCache | None = None  # holds the beginning of the prompt, shared with other requests
    is_remembered = True  # whether its cache may serve a follow-up
    alignment = 1  # of prefixes that are reused

    def __init__(self, plan: Plan, tokenizer: Tokenizer, stops: StopIds) -> None:
        self.plan, self.tokenizer, self.stops = plan, tokenizer, stops
        self.committed: list[int] = []
        self.pending = list(plan.prompt.ids)  # to commit before anything else
        self.reused = 0  # tokens of the prompt that were cached already
        self.is_ar = plan.mode != "diffusion"
        self.in_thought = plan.prompt.in_thought
        self.row: Row | None = None
        self.last: Canvas | None = None  # the last canvas that came to its end
        self.reader = Reader(tokenizer, plan.options.stop, in_thought=plan.prompt.in_thought)
        self.events: deque[Event] = deque()
        self.blocks = self.steps = self.unsettled = self.retries = 0
        self.retry = 0  # attempts at the present block that went wrong
        self.is_long = False  # found to need several canvases, which are then short
        self.logprobs: list[float] = []
        self.begun = time.perf_counter()
        self.prefilled = 0.0
        self.fault = ""  # what went wrong with the last canvas and was not mended
        self.error: Exception | None = None  # what went wrong with the program
        self.is_done = self.is_cancelled = False
        endings = {tokenizer.control_ids.get(name) for name in ENDINGS}
        self.ends = {*stops.ids, *(token for token in endings if token is not None)}
        guide = plan.options.guide
        self.guided = None if guide is None else Guided(plan, guide, tokenizer)
        if self.guided is not None and self.guided.fault:
            self._fail(self.guided.fault, "length")

    @property
    def is_over(self) -> bool:
        return self.is_done or self.is_cancelled or self.error is not None

    def begin(self, cache: KVCache) -> None:
        """Start on a cache that may hold the beginning of the prompt already."""
        self.cache, self.reused = cache, cache.length
        self.committed = self.pending[: cache.length]
        del self.pending[: cache.length]

    def is_prefilling(self, chunk: int) -> bool:
        """True while the prompt needs more than one pass."""
        return not self.prefilled and len(self.pending) > self._next_chunk(chunk)

    def _next_chunk(self, chunk: int) -> int:
        """Tokens up to the next boundary at which prompts are cut."""
        return chunk - len(self.committed) % chunk

    def work(self, chunk: int = PREFILL_CHUNK) -> ForwardInput:
        """Tokens of this job for the next pass; prompts are cut at multiples of `chunk`."""
        tokens = tuple(self.pending)
        if not self.prefilled:
            tokens = tokens[: self._next_chunk(chunk)]
        if len(tokens) < len(self.pending):
            return ForwardInput(cache=self.cache, tokens=tokens)
        if self.is_ar:
            return ForwardInput(
                cache=self.cache,
                tokens=tokens,
                draw=self._token_draw(),
                needs_logits=self.guided is not None,
            )
        if self.row is None:
            self.row = self._fresh_row()
        return ForwardInput(cache=self.cache, tokens=tokens, row=self.row)

    def take(self, given: ForwardInput, output: ForwardOutput) -> None:
        """Go on from what the pass gave."""
        self.committed += given.tokens
        del self.pending[: len(given.tokens)]
        if not self.prefilled:
            self._checkpoint()
            self.prefilled = 0.0 if self.pending else time.perf_counter()
        if given.draw is not None:
            self._take_token(output)
        if output.row is not None:
            self._take_step(output.row)
        if not self.is_done and self._is_over_budget():
            self._stop_early()

    def _checkpoint(self) -> None:
        """Let a follow-up resume at the end of the prompt, or at the last boundary before it."""
        if self.alignment == 1:
            is_last = not self.pending
        else:
            is_boundary = len(self.committed) % self.alignment == 0
            is_last = is_boundary and 0 < len(self.pending) <= self.alignment
        if self.is_remembered and is_last:
            self.cache.checkpoint()

    def _take_step(self, row: Row) -> None:
        self.row, self.steps = row, self.steps + 1
        if self.plan.options.drafts:
            self.events.append(draft(row.canvas, self.blocks, self.tokenizer))
        if row.is_done:
            self._end_block(row.canvas)
        elif self._turns_out_long(row.canvas):
            self.is_long, self.row = True, None

    def _turns_out_long(self, canvas: Canvas) -> bool:
        """Whether the first step of a first canvas sees no end in it, so that short ones do better.

        A reply that ends in its first canvas is left there: its parts may depend on each other, as
        a grid's do. What is behind an end is filled with such tokens; a few at a canvas's very end
        are mere doubt.
        """
        is_first = not self.blocks and not self.is_long and canvas.num_steps == 1
        if not self._can_shrink or not is_first or self.plan.options.pins.positions:
            return False
        ends = sum(token in self.ends for token in canvas.guess_L.tolist())
        return ends < LEAST_FILLED * canvas.length

    @property
    def _can_shrink(self) -> bool:
        return self.plan.shortest_canvas < self.plan.canvas_length

    def _end_block(self, canvas: Canvas) -> None:
        if self.guided is not None and self.guided.fault:
            self._fail(self.guided.fault, FAULT)
            return
        ids = canvas.guess_L.tolist()
        reason = self._fault(ids, canvas)
        if reason and self.retry < self.plan.options.retries:
            self.retry, self.retries, self.row = self.retry + 1, self.retries + 1, None
            self.events.append(Retry(block=self.blocks, reason=reason, retry=self.retry))
            return
        self.fault, self.last = reason, canvas
        if reason == NOT_A_NUMBER:
            self._fail(reason, FAULT)
            return
        after = self._first_end()
        self.blocks, self.retry, self.row = self.blocks + 1, 0, None
        self.is_long = self._can_shrink  # whatever its first step said, if it goes on
        self.unsettled += not bool(canvas.settled)
        if self.guided is not None:
            ids = self.guided.end_block(ids, len(self.reader.ids))
            self._promise_guided(ids)
        else:
            self._promise(ids, after)
        self.pending = [] if self.is_done else ids

    def _take_token(self, output: ForwardOutput) -> None:
        self.steps += 1
        if output.logits_V is not None and bool(output.logits_V.isnan().any()):
            self._fail(NOT_A_NUMBER, FAULT)  # before the grammar moves on
            return
        try:
            token, logprob = self._choose(output)
        except GuideFault as fault:
            self._fail(str(fault), FAULT)
            return
        if math.isnan(logprob):  # as it is if any logit is
            self._fail(NOT_A_NUMBER, FAULT)
            return
        if token not in self.stops.ids:
            self.logprobs.append(logprob)
        if self.guided is not None:
            self._promise_guided([token])
        else:
            self._promise([token])
        self.pending = [] if self.is_done else [token]
        if self.plan.mode == "hybrid" and not self.is_done:
            self.is_ar = self._stays_in_thought(token)

    def _stays_in_thought(self, token: int) -> bool:
        """Hybrid: whether the thought goes on after this token. No thought: diffusion at once."""
        names = self.tokenizer.control_ids
        if token == names.get(THOUGHT_OPENS):
            self.in_thought = True
        elif token == names.get(THOUGHT_CLOSES):
            self.in_thought = False
        return self.in_thought

    def _promise(self, ids: list[int], after: int = 0) -> None:
        """Hand ids to the reader, up to a stop that stands at `after` or later, and see if it ends.

        Pinned text is part of the reply whatever stands before it: a stop there is dropped.
        """
        room = self.plan.max_tokens - len(self.reader.ids)
        before = [token for token in ids[:after] if token not in self.stops.ids]
        kept, stop = self.stops.cut(ids[after:])
        self.events += self.reader.feed([*before, *kept][:room])
        count = len(before) + len(kept)
        # A closing token ends the reply, whether or not it is listed as a stop.
        has_ended = self.reader.parser.has_ended or (stop is not None and count <= room)
        if self.reader.has_stopped:
            self._finish("stop_string")
        elif has_ended:
            self._finish("stop")
        elif count >= room:
            self._finish("length")

    def _promise_guided(self, ids: list[int]) -> None:
        """The same for a text that is held to a grammar, which says itself when it ends."""
        assert self.guided is not None
        self.events += self.reader.feed(self.stops.cut(ids)[0])
        if self.guided.is_complete:
            self._finish("length" if self.guided.is_cut else "stop")

    def _first_end(self) -> int:
        """Where a stop may first end the present canvas: behind all pinned text."""
        pins = self._pins()
        text = [
            p for p, t in zip(pins.positions, pins.tokens, strict=True) if t not in self.stops.ids
        ]
        return max(text, default=-1) + 1

    def _pins(self) -> Pins:
        return self.plan.options.pins if self.blocks == 0 else NO_PINS

    def _fresh_row(self) -> Row:
        plan, config = self.plan, self.cache.config
        sampler = plan.long_sampler if self.is_long else plan.sampler
        noise = replace(plan.noise, retry=self.retry).block(
            self.blocks,
            sampler.max_denoising_steps,
            self._canvas_length(),
            config.vocab_size,
            self.cache.device,
        )
        old = self._old_version()
        if old:
            old_L = torch.tensor(old, device=self.cache.device)
            first_L = noise.tokens_NL[0, : len(old)]
            first_L.copy_(torch.where(old_L >= 0, old_L, first_L))
        if self.guided is None:
            return start(sampler, noise, self._pins())
        walker, pins = self.guided.begin_block(sampler.max_denoising_steps)
        return start(sampler, noise, pins, walker)

    def _canvas_length(self) -> int:
        """Of the next canvas: whole, unless the plan lets it be short and the reply is long.

        The last holds what may still be written, or a little more: rather that than a remnant.
        """
        plan = self.plan
        if not self.is_long:
            return plan.canvas_length
        left = plan.max_tokens - len(self.reader.ids)
        wanted = max(plan.shortest_canvas, -(-left // LENGTHS_APART) * LENGTHS_APART)
        if wanted > plan.shortest_canvas * LONGEST_LAST:
            return plan.shortest_canvas
        return min(wanted, plan.room - len(self.committed) - len(self.pending))

    def _old_version(self) -> tuple[int, ...]:
        """What the present canvas starts from instead of noise: the old version's next tokens.

        What was written so far need not be as long as what the old version had there.
        """
        old = self.plan.options.canvas
        if not old or self.retry:  # a canvas that went wrong is done again from noise
            return ()
        written = [*self.committed, *self.pending][len(self.plan.prompt.ids) :]
        begin = next_place(old, written)
        return old[begin : begin + self.plan.canvas_length]

    def _choose(self, output: ForwardOutput) -> tuple[int, float]:
        if self.guided is None:
            assert output.token is not None
            assert output.logprob is not None
            return output.token, output.logprob
        assert output.logits_V is not None
        draw = self._token_draw()

        def drawn(masked_V: Tensor) -> int:
            return draw_token(masked_V, draw.temperature, draw.uniform)[0]

        token = self.guided.choose(output.logits_V, len(self.reader.ids), drawn)
        return token, float(output.logits_V.log_softmax(-1)[token])

    def _token_draw(self) -> TokenDraw:
        """Temperature and noise of the next draw; noise is keyed by the token's index."""
        temperature = self.plan.options.temperature or 0.0
        if temperature == 0:
            return TokenDraw()
        block, position = divmod(len(self.logprobs), AR_BLOCK_LENGTH)
        noise = token_noise(self.plan, AR_BLOCK + block, self.cache.config)
        return TokenDraw(temperature, float(noise.uniform_NL[0, position]))

    def _fault(self, ids: list[int], canvas: Canvas) -> str:
        is_first = not self.reader.ids and self.guided is None  # a grammar may allow no text
        return fault(ids, canvas.entropy_L.tolist(), self.ends, is_first=is_first)

    def _is_over_budget(self) -> bool:
        options = self.plan.options
        spent = time.perf_counter() - self.begun
        is_late = options.max_seconds is not None and spent > options.max_seconds
        return is_late or (options.max_steps is not None and self.steps >= options.max_steps)

    def _stop_early(self) -> None:
        """Give the canvas as far as it is refined, and say how far that is."""
        canvas = None if self.row is None or self.row.canvas.num_steps == 0 else self.row.canvas
        remaining = 0.0
        if canvas is not None:
            remaining = float(canvas.entropy_L.sum())
        if self.guided is not None:  # brought to its end, so that it is a text of the grammar
            ids = [] if canvas is None else canvas.guess_L.tolist()
            try:
                self.events += self.reader.feed(self.guided.close(ids, len(self.reader.ids)))
            except GuideFault as fault:
                self._fail(str(fault), "budget")
                return
        elif canvas is not None:
            self._promise(canvas.guess_L.tolist(), self._first_end())
        self._finish("budget", remaining)

    def _fail(self, reason: str, finish: str) -> None:
        """End without any text of this canvas; a part of a text held to a grammar is no text."""
        self.fault = reason
        if self.guided is not None:
            self.reader = Reader(self.tokenizer, (), in_thought=self.plan.prompt.in_thought)
        self._finish(finish)

    def _finish(self, reason: str, remaining: float = 0.0) -> None:
        if self.is_done:
            if reason != "budget":
                return
            self.events.pop()  # the partial canvas looked like an end; the budget is the reason
        else:
            self.events += self.reader.close()
        self.is_done, self.row = True, None
        finish = "stop_string" if self.reader.has_stopped and reason != "budget" else reason
        self.events.append(self._done(finish, remaining))

    def _done(self, finish: str, remaining: float) -> Done:
        now = time.perf_counter()
        return Done(
            reply=self.reader.reply,
            ids=tuple(self.reader.ids),
            finish=finish,
            mode=self.plan.mode,
            prompt_tokens=len(self.plan.prompt.ids),
            reused_tokens=self.reused,
            blocks=self.blocks,
            steps=self.steps,
            unsettled_blocks=self.unsettled,
            retries=self.retries,
            fault=self.fault,
            remaining_entropy=remaining,
            logprobs=tuple(self.logprobs),
            seconds=now - self.begun,
            prefill_seconds=(self.prefilled or now) - self.begun,
            seed=self.plan.noise.seed,
        )


def token_noise(plan: Plan, block: int, config: ModelConfig) -> BlockNoise:
    """Noise for single tokens: a block of it without steps, far from the canvases' own."""
    return plan.noise.block(block, 0, AR_BLOCK_LENGTH, config.vocab_size, torch.device("cpu"))


def draft(canvas: Canvas, block: int, tokenizer: Tokenizer) -> Draft:
    """A canvas as an event."""
    text = tokenizer.token_text
    ids, guess = canvas.tokens_L.tolist(), canvas.guess_L.tolist()
    return Draft(
        ids=tuple(ids),
        tokens=tuple(map(text, ids)),
        guess=tuple(guess),
        guess_tokens=tuple(map(text, guess)),
        entropy=tuple(canvas.entropy_L.tolist()),
        kept=tuple(canvas.kept_L.tolist()),
        pinned=tuple(canvas.pinned_L.tolist()),
        block=block,
        step=canvas.num_steps,
    )
