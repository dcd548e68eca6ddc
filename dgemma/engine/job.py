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

from dgemma.cache import KVCache
from dgemma.canvas import NO_PINS, BlockNoise, Canvas, Pins
from dgemma.config import ModelConfig
from dgemma.constrain.edits import next_place
from dgemma.constrain.matcher import GuideFault
from dgemma.denoise import Row, start
from dgemma.engine.batch import Outcome, Work
from dgemma.engine.events import Done, Draft, Event, Retry
from dgemma.engine.guard import NOT_A_NUMBER, fault
from dgemma.engine.guided import THOUGHT_CLOSES, THOUGHT_OPENS, Guided
from dgemma.engine.options import Plan
from dgemma.engine.reader import Reader
from dgemma.graph.check import LONGEST
from dgemma.graph.steppers import Fast
from dgemma.ops.row_stats import Query, row_stats
from dgemma.text.reply import ENDINGS
from dgemma.text.tokenizer import StopIds, Tokenizer

PREFILL_CHUNK = 512  # tokens a request may commit in one pass, at least...
# ...and at most, by the memory of a GPU in bytes: larger passes are worth more, and hold more.
GPU_CHUNKS = ((40e9, LONGEST), (20e9, 1024), (0, PREFILL_CHUNK))
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

    def work(self, chunk: int = PREFILL_CHUNK, fast: Fast | None = None) -> Work:
        """What this job wants of the next pass, in which it may commit so many tokens.

        Where captured passes serve it, its prompt is committed apart from what they do.
        """
        apart = 0 if fast is None or self.prefilled else self._apart(fast)
        if apart:
            return Work(self.cache, tuple(self.pending[: min(apart, chunk)]))
        tokens = tuple(self.pending[:chunk])
        if len(tokens) < len(self.pending):
            return Work(self.cache, tokens)
        if self.is_ar:
            return Work(self.cache, tokens, wants_logits=True)
        if self.row is None:
            self.row = self._fresh_row()
        return Work(self.cache, tokens, self.row)

    def _apart(self, fast: Fast) -> int:
        """Tokens of the prompt that are committed before captured passes take over."""
        if self.is_ar:
            return len(self.pending) - 1  # the last one tells what comes next
        is_block = len(self.pending) == self.plan.canvas_length  # comes with the first step
        can_step = self.guided is None and fast.can_step(self.plan.sampler)
        return len(self.pending) if can_step and not is_block else 0

    def take(self, work: Work, outcome: Outcome) -> None:
        """Go on from what the pass gave."""
        self.committed += work.tokens
        del self.pending[: len(work.tokens)]
        if not self.prefilled and not self.pending:
            if outcome.row is None and outcome.logits_V is None:
                self._await_prompt()
            self.prefilled = time.perf_counter()
            if self.is_remembered:
                self.cache.mark()  # a follow-up that drops the thought resumes here
        if outcome.logits_V is not None:
            self._take_token(outcome.logits_V)
        if outcome.row is not None:
            self._take_step(outcome.row)
        if not self.is_done and self._is_over_budget():
            self._stop_early()

    def _await_prompt(self) -> None:
        """Wait for a prompt that was committed apart, so that its time is known.

        The canvas is made meanwhile.
        """
        self.row = self._fresh_row()
        if self.cache.device.type == "cuda":
            torch.cuda.current_stream(self.cache.device).synchronize()

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

    def _take_token(self, logits_V: Tensor) -> None:
        self.steps += 1
        if self.guided is not None and bool(logits_V.isnan().any()):
            self._fail(NOT_A_NUMBER, FAULT)  # before the grammar moves on
            return
        try:
            token, logprob = self._choose(logits_V)
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
            sampler.max_steps,
            self._canvas_length(),
            config.vocab_size,
            self.cache.device,
        )
        for place, token in enumerate(self._old_version()):
            if token >= 0:
                noise.tokens_NL[0, place] = token
        if self.guided is None:
            return start(sampler, noise, self._pins())
        walker, pins = self.guided.begin_block(sampler.max_steps)
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

    def _choose(self, logits_V: Tensor) -> tuple[int, float]:
        if self.guided is None:
            return self._draw(logits_V)
        used = len(self.reader.ids)
        token = self.guided.choose(logits_V, used, lambda masked_V: self._draw(masked_V)[0])
        return token, float(logits_V.log_softmax(-1)[token])

    def _draw(self, logits_V: Tensor) -> tuple[int, float]:
        """The next token and its causal log-probability, which the heat does not touch."""
        logprob_V = logits_V.log_softmax(-1)
        token = logits_V.argmax()
        if self.plan.options.heat > 0:
            query = Query(
                heat_T=logits_V.new_full((1,), self.plan.options.heat),
                uniform_T=self._token_noise().to(logits_V.device),
                held_T=token[None],
            )
            token = row_stats(logits_V[None].clone(), None, query)[0].draw_T[0]
        # Read in one go: each waits for the device.
        number, logprob = torch.stack([token.double(), logprob_V[token].double()]).tolist()
        return int(number), logprob

    def _token_noise(self) -> Tensor:
        block, position = divmod(len(self.logprobs), AR_BLOCK_LENGTH)
        noise = token_noise(self.plan, AR_BLOCK + block, self.cache.config)
        return noise.uniform_NL[0, position : position + 1]

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


def prefill_chunk(device: torch.device) -> int:
    """Tokens of one prompt that a pass takes; all prompts together, where it is more than least."""
    if device.type != "cuda":
        return PREFILL_CHUNK
    memory = torch.cuda.get_device_properties(device).total_memory
    return next(chunk for least, chunk in GPU_CHUNKS if memory >= least)


def token_noise(plan: Plan, block: int, config: ModelConfig) -> BlockNoise:
    """Noise for single tokens: a block of it without steps, far from the canvases' own."""
    return plan.noise.block(block, 0, AR_BLOCK_LENGTH, config.vocab_size, torch.device("cpu"))


def draft(canvas: Canvas, block: int, tokenizer: Tokenizer) -> Draft:
    """A canvas as an event."""

    def texts(ids: list[int]) -> tuple[str, ...]:
        return tuple(tokenizer.decode([token], skip_control=True) for token in ids)

    ids, guess = canvas.tokens_L.tolist(), canvas.guess_L.tolist()
    return Draft(
        ids=tuple(ids),
        tokens=texts(ids),
        guess=tuple(guess),
        guess_tokens=texts(guess),
        entropy=tuple(canvas.entropy_L.tolist()),
        kept=tuple(canvas.kept_L.tolist()),
        pinned=tuple(canvas.pinned_L.tolist()),
        block=block,
        step=canvas.num_steps,
    )
