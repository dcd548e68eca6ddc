"""Requests in, typed events out: the only place where text and tensors meet.

A request runs block by block: prefill the prompt, denoise a canvas, cut it at a stop, commit it, go
on. Closing the generator cancels the request. HTTP, terminals and files are not known here.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dgemma.cache import KVCache, Room
from dgemma.canvas import NO_PINS, Canvas, Noise, Pins
from dgemma.config import GenerationConfig
from dgemma.denoise import commit, denoise, start
from dgemma.device import choose_device, choose_dtype
from dgemma.errors import CheckpointError, PromptTooLong, UsageError
from dgemma.model import Gemma
from dgemma.sampler import Sampler, released_sampler
from dgemma.text.chat import ChatTemplate, Message, Prompt, Tool
from dgemma.text.reply import AnswerText, Reply, ReplyEvent, ReplyParser, ThoughtText
from dgemma.text.stream import StopStrings
from dgemma.text.tokenizer import StopIds, Tokenizer
from dgemma.weights.download import find_checkpoint
from dgemma.weights.load import Progress, load_model
from dgemma.weights.pack import pack

PREFILL_CHUNK = 512  # tokens encoded at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a request may choose. None means: as the checkpoint says."""

    max_tokens: int | None = None
    seed: int | None = None  # None draws one, reported when done
    sampler: Sampler | None = None
    canvas_length: int | None = None  # up to the model's own
    stop: tuple[str, ...] = ()
    pins: Pins = NO_PINS  # of the first canvas
    drafts: bool = False  # whether to report the canvas after each step


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The canvas as it stands. Nothing in it is promised."""

    ids: tuple[int, ...]  # what stands on the canvas: decided tokens, and noise
    tokens: tuple[str, ...]  # each id's own text; a control token has none
    guess: tuple[int, ...]  # what would be committed now
    guess_tokens: tuple[str, ...]
    entropy: tuple[float, ...]  # nats
    kept: tuple[bool, ...]  # decided in this step, not renoised
    pinned: tuple[bool, ...]
    block: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Promised text."""

    text: str
    is_thought: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a request, and what it took."""

    reply: Reply
    finish: str  # stop: a stop id; stop_string; length: max_tokens reached
    prompt_tokens: int
    tokens: int  # committed, up to the stop
    blocks: int
    steps: int
    unsettled_blocks: int  # blocks that ran out of steps
    seconds: float
    prefill_seconds: float
    seed: int

    @property
    def text(self) -> str:
        return self.reply.answer

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


Event = Draft | Text | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request, checked and complete."""

    prompt: Prompt
    max_tokens: int
    max_blocks: int
    canvas_length: int
    sampler: Sampler
    noise: Noise
    options: Options


class Engine:
    """A loaded checkpoint that answers requests."""

    def __init__(
        self,
        model: Gemma,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        generation: GenerationConfig,
    ) -> None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise CheckpointError(
                f"the tokenizer knows {tokenizer.vocab_size} tokens, the model only "
                f"{model.config.vocab_size}; they are not of the same checkpoint"
            )
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.generation, self.sampler = generation, released_sampler(generation)
        self.stop_ids = StopIds.read(generation.stop_ids)
        weight = model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype

    @classmethod
    def load(
        cls,
        model: str | Path = "nano",
        *,
        device: str = "auto",
        dtype: str = "auto",
        progress: Progress | None = None,
    ) -> "Engine":
        """Load a checkpoint: a directory, a downloaded hub id, or `nano`, the built-in model."""
        directory = find_checkpoint(str(model))
        where = choose_device(device)
        tokenizer = Tokenizer.load(directory)
        has_template = (directory / "chat_template.jinja").is_file()
        template = ChatTemplate.load(directory, tokenizer) if has_template else None
        checkpoint = load_model(
            directory, device=where, dtype=choose_dtype(dtype, where), on_tensor=progress
        )
        return cls(pack(checkpoint.model), tokenizer, template, checkpoint.generation)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, thinking: bool = False
    ) -> Prompt:
        """Write a conversation in the model's own chat form."""
        if self.template is None:
            raise UsageError("this checkpoint has no chat template; give it plain text instead")
        return self.template.prompt(messages, tools, enable_thinking=thinking)

    def plain(self, text: str) -> Prompt:
        """A prompt that is just text for the model to go on with."""
        ids = (self.model.config.bos_token_id, *self.tokenizer.encode(text))
        return Prompt(text=text, ids=ids)

    def generate(self, prompt: str | Prompt, options: Options = Options()) -> Done:  # noqa: B008
        """Answer a prompt. A string is a user's message, or plain text if there is no chat form."""
        for event in self.stream(prompt, options):
            if isinstance(event, Done):
                return event
        raise AssertionError("a stream ends with Done")

    def stream(
        self,
        prompt: str | Prompt,
        options: Options = Options(),  # noqa: B008
    ) -> Iterator[Event]:
        """Answer a prompt event by event; refused at once if it cannot be answered."""
        return self._run(self._plan(prompt, options))

    def _plan(self, prompt: str | Prompt, options: Options) -> Plan:
        if not self.model.config.can_denoise:
            raise UsageError("this checkpoint has no denoiser; it runs only in AR mode")
        if isinstance(prompt, str):
            prompt = self._from_text(prompt)
        own_length = self.model.config.canvas_length
        length = own_length if options.canvas_length is None else options.canvas_length
        if not 1 <= length <= own_length:
            raise UsageError(f"canvas length is {length}; this model allows 1 to {own_length}")
        max_tokens = options.max_tokens
        if max_tokens is None:
            max_tokens = self.generation.max_new_tokens
        if max_tokens < 1:
            raise UsageError(f"max tokens is {max_tokens}; it must be 1 or more")
        max_blocks = -(-max_tokens // length)
        self._check_context(len(prompt.ids), max_blocks * length)
        seed = secrets.randbits(32) if options.seed is None else options.seed
        return Plan(
            prompt=prompt,
            max_tokens=max_tokens,
            max_blocks=max_blocks,
            canvas_length=length,
            sampler=options.sampler or self.sampler,
            noise=Noise(seed=seed),
            options=options,
        )

    def _from_text(self, text: str) -> Prompt:
        if self.template is None:
            return self.plain(text)
        return self.prompt([Message(role="user", content=text)])

    def _check_context(self, prompt: int, answer: int) -> None:
        limit = self.model.config.max_position_embeddings
        if prompt == 0:
            raise UsageError("the prompt is empty; give at least one token")
        if prompt + answer > limit:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens and the answer may take {answer}, but the context "
                f"holds {limit}; shorten the prompt or lower max tokens"
            )

    def _run(self, plan: Plan) -> Iterator[Event]:
        begin = time.perf_counter()
        cache = self._cache(plan)
        prompt_T = torch.tensor(plan.prompt.ids, device=self.device)
        commit(self.model, cache, prompt_T, PREFILL_CHUNK)
        prefilled = time.perf_counter()
        reader = Reader(self.tokenizer, plan.options.stop, in_thought=plan.prompt.in_thought)
        tokens = blocks = steps = unsettled = 0
        finish = ""
        while not finish:
            canvas: Canvas | None = None
            for canvas in self._block(plan, cache, blocks):
                if plan.options.drafts:
                    yield self._draft(canvas, blocks)
            assert canvas is not None
            blocks, steps = blocks + 1, steps + canvas.num_steps
            unsettled += not bool(canvas.settled)
            ids, stop = self.stop_ids.cut(canvas.guess_L.tolist()[: plan.max_tokens - tokens])
            tokens += len(ids)
            yield from reader.feed(ids)
            finish = reader.finish_reason(stop, is_full=blocks == plan.max_blocks)
            if not finish:
                commit(self.model, cache, canvas.guess_L, PREFILL_CHUNK)
        yield from reader.close()
        yield Done(
            reply=reader.reply,
            finish=finish,
            prompt_tokens=len(plan.prompt.ids),
            tokens=tokens,
            blocks=blocks,
            steps=steps,
            unsettled_blocks=unsettled,
            seconds=time.perf_counter() - begin,
            prefill_seconds=prefilled - begin,
            seed=plan.noise.seed,
        )

    def _cache(self, plan: Plan) -> KVCache:
        tokens = len(plan.prompt.ids) + plan.max_blocks * plan.canvas_length
        span = max(PREFILL_CHUNK, plan.canvas_length)
        room = Room(tokens=tokens, span=span)
        return KVCache(self.model.config, room, self.dtype, self.device)

    def _block(self, plan: Plan, cache: KVCache, block: int) -> Iterator[Canvas]:
        noise = plan.noise.block(
            block,
            plan.sampler.max_steps,
            plan.canvas_length,
            self.model.config.vocab_size,
            self.device,
        )
        pins = plan.options.pins if block == 0 else NO_PINS
        for (row,) in denoise(self.model, [cache], [start(plan.sampler, noise, pins)]):
            yield row.canvas

    def _draft(self, canvas: Canvas, block: int) -> Draft:
        ids, guess = canvas.tokens_L.tolist(), canvas.guess_L.tolist()
        return Draft(
            ids=tuple(ids),
            tokens=self._texts(ids),
            guess=tuple(guess),
            guess_tokens=self._texts(guess),
            entropy=tuple(canvas.entropy_L.tolist()),
            kept=tuple(canvas.kept_L.tolist()),
            pinned=tuple(canvas.pinned_L.tolist()),
            block=block,
            step=canvas.num_steps,
        )

    def _texts(self, ids: list[int]) -> tuple[str, ...]:
        return tuple(self.tokenizer.decode([token], skip_control=True) for token in ids)


class Reader:
    """Turns committed ids into promised text, thought and calls, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], *, in_thought: bool) -> None:
        self.parser = ReplyParser(tokenizer, in_thought=in_thought)
        self.stops = StopStrings(stop)
        self.events: list[ReplyEvent] = []

    @property
    def reply(self) -> Reply:
        return Reply.collect(self.events)

    def feed(self, ids: Sequence[int]) -> list[Text]:
        return self._promise(self.parser.feed(ids))

    def close(self) -> list[Text]:
        """What was held back for a character or stop string that never came."""
        texts = self._promise(self.parser.finish())
        return texts + self._promise([AnswerText(text=self.stops.finish())], is_checked=True)

    def finish_reason(self, stop: int | None, *, is_full: bool) -> str:
        if self.stops.stopped_by is not None:
            return "stop_string"
        if stop is not None:
            return "stop"
        return "length" if is_full else ""

    def _promise(self, events: list[ReplyEvent], *, is_checked: bool = False) -> list[Text]:
        """Stop strings cut the answer alone; a thought may speak of them."""
        texts = []
        for event in events:
            if isinstance(event, AnswerText):
                checked = event.text if is_checked else self.stops.feed(event.text)
                event = AnswerText(text=checked)
            self.events.append(event)
            if isinstance(event, AnswerText | ThoughtText) and event.text:
                is_thought = isinstance(event, ThoughtText)
                texts.append(Text(text=event.text, is_thought=is_thought))
        return texts
