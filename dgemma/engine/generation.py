"""One generated reply: prefill, then denoising steps or AR tokens, until it ends.

The prompt is committed in chunks. Then, by mode, canvases are denoised (diffusion), one token is
appended per pass (ar), the thought is written in AR and the answer by diffusion (hybrid), or the
faster of both is chosen (auto). A converged block is committed in the same pass as the next
canvas's first step.
"""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dgemma.backends.base import ForwardInput, ForwardOutput, TokenDraw
from dgemma.constrain.matcher import ConstraintFault
from dgemma.diffusion.canvas import NO_PINS, Canvas, Noise, Pins
from dgemma.diffusion.denoise import CanvasState, start
from dgemma.diffusion.logit_stats import draw_token
from dgemma.engine.auto import AutoSwitch
from dgemma.engine.canvas_policy import NOT_A_NUMBER, output_fault, resume_index
from dgemma.engine.constrained_reply import ConstrainedReply
from dgemma.engine.events import Committed, Done, Draft, Retry
from dgemma.engine.request import ReplySpec, Task, TokenSequence
from dgemma.errors import UsageError
from dgemma.text.control_tokens import CHANNEL, CHANNEL_END
from dgemma.text.reply import ReplyReader

if TYPE_CHECKING:
    from dgemma.engine.core import EngineCore
    from dgemma.engine.engine import Engine

AR_BLOCK = 1 << 31  # noise blocks from this index on are for AR tokens, in blocks of...
AR_BLOCK_LENGTH = 256
FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The block in progress between two passes: AR tokens, or a canvas and its attempts."""

    in_thought: bool  # the AR tokens belong to a thought
    is_long: bool = False  # the reply does not end in its first canvas
    retry: int = 0  # failed attempts
    state: CanvasState | None = None  # None: before the first step

    def after_commit(self) -> "Block":
        return Block(in_thought=self.in_thought, is_long=True)


@dataclass(slots=True)
class Progress:
    """Counters and clock of a reply in progress, named as in `Done`."""

    started: float = 0.0
    prefilled_at: float = 0.0
    deadline: float = math.inf
    blocks: int = 0
    steps: int = 0
    unconverged_blocks: int = 0
    retries: int = 0
    reused_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    fault: str = ""  # of the last canvas after all retries
    reported: tuple[int, int] = (0, 0)  # steps and retries already reported as committed
    last_canvas: Canvas | None = None  # the last finished canvas


class Generation(Task):
    """Writes one reply. Created and checked by `Engine.generation`."""

    result: Done | None

    def __init__(self, engine: "Engine", spec: ReplySpec) -> None:
        prompt, params, limits, prefix = spec.prompt, spec.params, spec.limits, spec.prefix
        super().__init__(limits.max_length - (0 if prefix is None else len(prefix.ids)), prefix)
        self.prompt, self.params, self.limits = prompt, params, limits
        self.map_draft = spec.map_draft
        self.tokenizer, self.stops = engine.tokenizer, engine.stop_ids
        policy = engine.policy_of(params)
        self.auto = AutoSwitch.of(engine.break_even, params, limits.max_tokens)
        begins_in_ar = self.auto is not None and bool(self.auto.try_at)
        if prefix is not None:
            policy = policy.without_speculation()
        self.policy = replace(policy, shortens=begins_in_ar)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        self.noise = Noise(seed=seed, choice=params.choice)
        self.reader, self.sequence = self._new_reader(), TokenSequence(prompt)
        self.constrained: ConstrainedReply | None = None  # set by `start`
        self.block = Block(in_thought=prompt.in_thought, is_long=begins_in_ar)
        self.progress = Progress()

    def _new_reader(self) -> ReplyReader:
        return ReplyReader(self.tokenizer, self.params.stop, in_thought=self.prompt.in_thought)

    @property
    def has_long_commit(self) -> bool:
        return self.sequence.has_long_commit

    @property
    def host_seconds(self) -> float:
        return 0.0 if self.constrained is None else self.constrained.text.state.seconds

    @property
    def is_ar(self) -> bool:
        """True if the next token is drawn in AR, as hybrid mode's first token and thoughts are."""
        if self.auto is not None:
            return self.auto.is_ar(len(self.sequence.written))
        if self.params.mode != "hybrid":
            return self.params.mode == "ar"
        return self.block.in_thought or not self.sequence.written

    @property
    def ar_temperature(self) -> float:
        return self.params.temperature or 0.0

    @property
    def end_ids(self) -> frozenset[int]:
        return self.reader.endings.union(self.stops.ids)

    # --- called by the engine

    def start(self, engine: "EngineCore", deadline: float) -> None:
        now, budget = time.monotonic(), self.params.max_seconds
        deadline = deadline if budget is None else min(deadline, now + budget)
        self.progress = Progress(started=now, prefilled_at=now, deadline=deadline)
        if self.params.constraint is not None:
            self.constrained = ConstrainedReply(self, self.params.constraint, self.tokenizer)
            if self.constrained.fault:  # no text of the language fits
                self._fail(self.constrained.fault, "length")
                return
        for commit in self.params.committed:
            self._resume(commit)
        if self.is_done:  # its last tokens were already committed
            return
        if self.prefix is not None:
            cache = self.prefix.fork(self.num_tokens)
        else:
            cache = engine.open_cache(self.sequence.cache_ids, self.limits.max_length)
        self.progress.reused_tokens = min(cache.length, len(self.prompt.ids))
        self.sequence.open(cache, engine)

    def _resume(self, commit: Committed) -> None:
        """Continue after tokens committed by another engine, and report their events again."""
        if self.is_done:
            raise UsageError("`committed` has tokens after the end of the reply; leave them out")
        if self.auto is not None:
            is_block = commit.logprob is None
            self.auto = self.auto.resumed(len(self.sequence.written), is_block=is_block)
        elif (commit.logprob is not None) != self.is_ar:
            raise UsageError("the committed tokens were written in another mode; use that mode")
        self.progress.steps += commit.steps
        self.progress.retries += commit.retries
        if commit.logprob is None:
            self._commit_block(commit)
        else:
            self._commit_token(commit)

    def inputs(self) -> list[ForwardInput]:
        tokens, images = self.sequence.next_tokens(), self.sequence.next_images()
        given = ForwardInput(cache=self.sequence.cache, tokens=tokens, images=images)
        if self.sequence.has_long_commit:
            return [given]
        if self.is_ar:
            if not given.tokens:  # committed with a discarded canvas
                self.sequence.reopen_last()
                given = replace(given, tokens=self.sequence.next_tokens())
            needs_logits = self.constrained is not None
            return [replace(given, draw=self._token_draw(), needs_logits=needs_logits)]
        if self.block.state is None:
            self.block = replace(self.block, state=self._new_state())
        return [replace(given, state=self.block.state)]

    def process(self, inputs: Sequence[ForwardInput], outputs: Sequence[ForwardOutput]) -> None:
        (forward_input,), (output,) = inputs, outputs
        if not self.sequence.is_prefilled:
            self.progress.prefilled_at = time.monotonic()
        self.sequence.commit(len(forward_input.tokens))
        if forward_input.draw is not None:
            self._take_token(output)
        if output.state is not None:
            self._take_step(output.state)
        if not self.is_done and self._is_over_budget():
            self._stop_early()

    def close(self, engine: "EngineCore") -> None:
        """Move the KV cache to the prefix cache, unless it continues a program's prefix."""
        self.block = replace(self.block, state=None)
        self.sequence.close(keep=self.prefix is None)

    # --- canvases

    def _new_state(self) -> CanvasState:
        num_left = self.limits.max_tokens - len(self.reader.ids)
        num_free = self.limits.max_length - len(self.sequence.ids)
        preset = self.policy.next_canvas(num_left, num_free, is_long=self.block.is_long)
        length, sampler, config = preset.length, preset.sampler, self.sequence.cache.config
        steps = sampler.max_denoising_steps
        noise = replace(self.noise, retry=self.block.retry).block(
            self.progress.blocks, steps, length, config.vocab_size, self.sequence.cache.device
        )
        noise = noise.starting_from(self._initial_tokens(length))
        if self.constrained is None:
            return start(sampler, noise, self._pins())
        constraint, pins = self.constrained.begin_block(steps)
        return start(sampler, noise, pins, constraint)

    def _initial_tokens(self, length: int) -> tuple[int, ...]:
        """Return the part of `initial_canvas` after the text written so far; nothing on a retry."""
        old = self.params.initial_canvas
        if not old or self.block.retry:
            return ()
        begin = resume_index(old, self.sequence.written)
        return old[begin : begin + length]

    def _pins(self) -> Pins:
        return self.params.pins if self.progress.blocks == 0 else NO_PINS

    def _take_step(self, state: CanvasState) -> None:
        canvas = state.canvas
        self.block = replace(self.block, state=state)
        self.progress.steps += 1
        if self.auto is not None:
            self.auto = self.auto.after_step(canvas, self.end_ids, len(self.sequence.written))
            if not self.auto.has_switched:
                self.block = replace(self.block, state=None)
                return
        if self.params.drafts:
            shown = Draft.of(canvas, self.progress.blocks, self.tokenizer)
            self.events.append(shown if self.map_draft is None else self.map_draft(shown))
        if state.is_done:
            self._end_block(canvas)
        elif not self.block.is_long and self.policy.restarts(canvas, self.end_ids):
            self.block = replace(self.block, is_long=True, state=None)

    def _end_block(self, canvas: Canvas) -> None:
        if self.constrained is not None and self.constrained.fault:
            self._fail(self.constrained.fault, FAULT)
            return
        ids, progress, retry = canvas.guess_L.tolist(), self.progress, self.block.retry + 1
        is_first = not self.reader.ids and self.constrained is None  # a grammar may allow no text
        reason = output_fault(ids, canvas.entropy_L.tolist(), self.end_ids, is_first=is_first)
        if reason and retry <= self.params.retries:
            self.block = replace(self.block, retry=retry, state=None)
            progress.retries += 1
            self.events.append(Retry(block=progress.blocks, reason=reason, retry=retry))
            return
        progress.last_canvas = canvas
        if reason == NOT_A_NUMBER:
            self._fail(reason, FAULT)
            return
        if self.constrained is not None:
            ids = self.constrained.end_block(ids, len(self.reader.ids))
        is_converged = bool(canvas.converged)
        self._commit_block(self._new_commit(ids, is_converged=is_converged, fault=reason))

    def _commit_block(self, block: Committed) -> None:
        first_stop, progress = self._first_stop_position(), self.progress
        self.block = self.block.after_commit()
        progress.blocks, progress.fault = progress.blocks + 1, block.fault
        progress.unconverged_blocks += not block.is_converged
        self._commit(block, first_stop)
        if not self.is_done and progress.blocks == self.params.max_blocks:
            self._end("length")

    def _first_stop_position(self) -> int:
        """Return the first position at which a stop token ends the canvas: after all pins."""
        pins, stops = self._pins(), self.stops.ids
        text = [p for p, t in zip(pins.positions, pins.tokens, strict=True) if t not in stops]
        return max(text, default=-1) + 1

    # --- AR tokens

    def _token_draw(self, offset: int = 0) -> TokenDraw:
        """Return temperature and random number of a draw, `offset` draws after the next one.

        Random numbers are keyed by the token's index.
        """
        temperature = self.ar_temperature
        if temperature == 0:
            return TokenDraw()
        block, position = divmod(len(self.progress.logprobs) + offset, AR_BLOCK_LENGTH)
        vocab, cpu = self.sequence.cache.config.vocab_size, torch.device("cpu")
        noise = self.noise.block(AR_BLOCK + block, 0, AR_BLOCK_LENGTH, vocab, cpu)
        return TokenDraw(temperature, float(noise.uniform_NL[0, position]))

    def _take_token(self, output: ForwardOutput) -> None:
        self.progress.steps += 1
        if output.logits_V is not None and bool(output.logits_V.isnan().any()):
            self._fail(NOT_A_NUMBER, FAULT)  # before the grammar consumes the token
            return
        try:
            token, logprob = self._choose(output)
        except ConstraintFault as fault:
            self._fail(str(fault), FAULT)
            return
        if math.isnan(logprob):  # NaN if any logit is NaN
            self._fail(NOT_A_NUMBER, FAULT)
            return
        self._commit_token(self._new_commit([token], logprob=logprob))

    def _commit_token(self, commit: Committed) -> None:
        (token,), logprob = commit.ids, commit.logprob
        assert logprob is not None
        if token not in self.stops.ids:
            self.progress.logprobs.append(logprob)
        self._commit(commit)
        names = self.tokenizer.control_ids
        is_open = self.block.in_thought and token != names.get(CHANNEL_END)
        in_thought = is_open or token == names.get(CHANNEL)
        self.block = replace(self.block, in_thought=in_thought)

    def _choose(self, output: ForwardOutput) -> tuple[int, float]:
        if self.constrained is None:
            assert output.token is not None
            assert output.logprob is not None
            return output.token, output.logprob
        logits_V, draw = output.logits_V, self._token_draw()
        assert logits_V is not None

        def drawn(masked_V: Tensor) -> int:
            return draw_token(masked_V, draw.temperature, draw.uniform)[0]

        token = self.constrained.choose(logits_V, len(self.reader.ids), drawn)
        return token, float(logits_V.log_softmax(-1)[token])

    # --- text and its end

    def _new_commit(self, ids: list[int], **fields: Any) -> Committed:
        """Describe newly committed tokens, with the steps since the previous ones."""
        steps, retries = self.progress.reported
        steps, retries = self.progress.steps - steps, self.progress.retries - retries
        return Committed(ids=tuple(ids), steps=steps, retries=retries, **fields)

    def _commit(self, commit: Committed, first_stop: int = 0) -> None:
        """Pass ids to the reader, and to the next pass unless they end the reply."""
        ids, progress = list(commit.ids), self.progress
        progress.reported = (progress.steps, progress.retries)
        if self.params.commits:
            self.events.append(commit)
        if reason := self._read(ids, first_stop):
            self._end(reason)
        else:
            self.sequence.ids.extend(ids)

    def _read(self, ids: list[int], first_stop: int) -> str:
        """Pass ids to the reader up to a stop at `first_stop` or later; return why the reply ends.

        Pinned text is part of the reply: a stop before it is dropped.
        """
        if self.constrained is not None:
            self.events.extend(self.reader.feed(self.stops.cut(ids)[0]))
            if not self.constrained.is_complete:
                return ""
            return "length" if self.constrained.is_cut else "stop"
        num_left = self.limits.max_tokens - len(self.reader.ids)
        before = [token for token in ids[:first_stop] if token not in self.stops.ids]
        after, stop = self.stops.cut(ids[first_stop:])
        self.events.extend(self.reader.feed([*before, *after][:num_left]))
        count, written, goal = len(before) + len(after), self.reader.ids, self.params.stop_sequence
        if self.reader.has_stopped or (goal and tuple(written[-len(goal) :]) == goal):
            return "stop_string"
        # The closing token always ends the reply, listed as a stop id or not.
        if self.reader.parser.has_ended or (stop is not None and count <= num_left):
            return "stop"
        return "length" if count >= num_left else ""

    def _is_over_budget(self) -> bool:
        is_late = time.monotonic() > self.progress.deadline
        max_steps = self.params.max_steps
        return is_late or (max_steps is not None and self.progress.steps >= max_steps)

    def _stop_early(self) -> None:
        """End with the unconverged canvas, and report its entropy."""
        state = self.block.state
        canvas = state.canvas if state is not None and state.canvas.num_steps else None
        remaining = 0.0 if canvas is None else float(canvas.entropy_L.sum())
        if self.constrained is not None:  # close it, so that the text is in the language
            ids = [] if canvas is None else canvas.guess_L.tolist()
            try:
                closed = self.constrained.close(ids, len(self.reader.ids))
            except ConstraintFault as fault:
                self._fail(str(fault), "budget")
                return
            self.events.extend(self.reader.feed(closed))
        elif canvas is not None:
            self._read(canvas.guess_L.tolist(), self._first_stop_position())
        self._end("budget", remaining)

    def _fail(self, reason: str, finish: str) -> None:
        """End without the text of this canvas; a partial constrained text is dropped."""
        self.progress.fault = reason
        self._end(finish, reader=self.reader if self.constrained is None else self._new_reader())

    def _end(
        self, reason: str, remaining: float = 0.0, *, reader: ReplyReader | None = None
    ) -> None:
        """End with the text read so far; `remaining`: entropy of a canvas cut by the budget."""
        reader = reader or self.reader
        self.events.extend(reader.close())
        self.block = replace(self.block, state=None)
        has_stopped = reader.has_stopped and reason != "budget"
        done = self._done(reader, "stop_string" if has_stopped else reason, remaining)
        self.finish(done)
        self.events.append(done)

    def _done(self, reader: ReplyReader, finish: str, remaining: float) -> Done:
        progress, now = self.progress, time.monotonic()
        reply, constrained, ids = reader.reply, self.constrained, reader.ids
        return Done(
            reply=reply,
            ids=tuple(ids),
            finish=finish,
            stop_string=reader.stops.stopped_by or "",
            mode=self.params.mode,
            prompt_tokens=len(self.prompt.ids),
            image_tokens=self.prompt.num_image_tokens,
            notes=self.prompt.notes,
            reused_tokens=progress.reused_tokens,
            blocks=progress.blocks,
            steps=progress.steps,
            forced_from=None if constrained is None else constrained.forced_from(ids, reply.answer),
            unconverged_blocks=progress.unconverged_blocks,
            retries=progress.retries,
            fault=progress.fault,
            remaining_entropy=remaining,
            logprobs=tuple(progress.logprobs),
            seconds=now - progress.started,
            prefill_seconds=progress.prefilled_at - progress.started,
            seed=self.noise.seed,
        )
