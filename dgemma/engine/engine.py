"""The engine: a loaded checkpoint, the requests that run on it, and the prefixes it remembers.

All requests advance together, one pass at a time: whoever follows one request drives the others
too. Requests join and leave between passes. HTTP, terminals and threads are not known here.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch

from dgemma.backends.choose import choose_backend
from dgemma.config import GenerationConfig
from dgemma.constrain.calls import grammar_of
from dgemma.constrain.grammar import Constraint
from dgemma.constrain.holes import Holed
from dgemma.constrain.matcher import Guide, compile_guide
from dgemma.constrain.vocabulary import vocabulary
from dgemma.device import give_back
from dgemma.diffusion.sampler import released_sampler
from dgemma.engine.choice import Reading, choose
from dgemma.engine.edit import Edited, EditOptions, edit, warm_canvas
from dgemma.engine.events import Done, Draft, Event
from dgemma.engine.fill import Filled, FillOptions, fill
from dgemma.engine.job import PREFILL_CHUNK, Job
from dgemma.engine.options import Options, Plan, make_plan
from dgemma.engine.prefix_cache import PrefixStore
from dgemma.engine.score import Score, score
from dgemma.errors import CheckpointError, UsageError
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.text.chat import ChatTemplate, Message, Prompt, Tool
from dgemma.text.tokenizer import StopIds, Tokenizer
from dgemma.weights.adapter import load_adapter
from dgemma.weights.download import find_checkpoint
from dgemma.weights.load import Progress
from dgemma.weights.served import Wanted, Where, load_served

DEFAULTS = Options()
FILL_DEFAULTS = FillOptions()
EDIT_DEFAULTS = EditOptions()
MAX_ROWS = 16  # requests in one pass; others wait
# Tokens of a prompt in one pass, by the memory of a GPU in bytes. In 16 bits it is also what a
# reused prefix is cut to, so that small chunks reuse more and large ones prefill faster.
GPU_CHUNKS = ((20e9, 1024), (0, PREFILL_CHUNK))
CPU_CHUNK_16 = 128
MAX_PREFILLING = 4  # prompts that bring a chunk to one pass, at most...
MAX_PREFILLING_BESIDE = 1  # ...beside canvases that run, which wait for it
PREFIX_BYTES = 2 << 30  # memory for the keys and values of finished requests, at most...
PREFIX_SHARE = 0.05  # ...and of a GPU's memory


class Engine:
    """Answers requests. `jobs`, `waiting` and `prefixes` are all that changes.

    `backend` executes the passes.
    """

    def __init__(
        self,
        model: Gemma,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        generation: GenerationConfig,
        *,
        max_rows: int = MAX_ROWS,
        prefix_bytes: int | None = None,
    ) -> None:
        if tokenizer.vocab_size != model.config.vocab_size:
            raise CheckpointError(
                f"the tokenizer knows {tokenizer.vocab_size} tokens, the model "
                f"{model.config.vocab_size}; they are not of the same checkpoint"
            )
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.generation, self.sampler = generation, released_sampler(generation)
        self.stop_ids = StopIds.read(generation.stop_ids)
        weight = model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.backend = choose_backend(model)
        self.max_rows = min(max_rows, self.backend.max_rows)
        self.chunk = prefill_chunk(self.device, self.dtype)
        give_back(self.device)  # what loading, joining and checks have left
        room = prefix_room(self.device) if prefix_bytes is None else prefix_bytes
        # In 16 bits a prefix is reused only where a fresh prompt is cut: answers stay the same.
        self.prefixes = PrefixStore(room, 1 if self.dtype == torch.float32 else self.chunk)
        self.jobs: list[Job] = []
        self.waiting: deque[Job] = deque()

    @classmethod
    def load(
        cls,
        model: str | Path = "nano",
        *,
        adapter: str | Path | None = None,
        prefix_bytes: int | None = None,
        progress: Progress | None = None,
        **where: Unpack[Where],
    ) -> "Engine":
        """Load a checkpoint: a directory, a downloaded hub id, or `nano`, the built-in model.

        `device`, `dtype` and `quant` (the form of its weights in memory) are `auto` or as told.
        """
        directory = find_checkpoint(str(model))
        tokenizer = Tokenizer.load(directory)
        has_template = (directory / "chat_template.jinja").is_file()
        template = ChatTemplate.load(directory, tokenizer) if has_template else None
        lora = None if adapter is None else load_adapter(Path(adapter))
        checkpoint = load_served(directory, Wanted(**where), lora, progress)
        found, generation = checkpoint.model, checkpoint.generation
        return cls(found, tokenizer, template, generation, prefix_bytes=prefix_bytes)

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

    def guide(self, **constraint: Unpack[Constraint]) -> Guide:
        """What a text must look like: one of schema, regex, grammar, choices and tools.

        It may be used for any number of requests, as `Options.guide`. Beside `tools` a
        `tool_choice` may say `required` (the default: one call of any of them), the name of the
        one to call, or `auto`: free text, and calls if the model makes them.
        """
        grammar = grammar_of(constraint, self.tokenizer)
        return compile_guide(grammar, vocabulary(self.tokenizer, self.stop_ids.ids))

    def generate(
        self,
        prompt: str | Prompt,
        options: Options = DEFAULTS,
        *,
        warm: str | None = None,
        **constraint: Unpack[Constraint],
    ) -> Done:
        """Answer a prompt. A string is a user's message, or plain text if there is no chat form.

        `warm` is an old version of the answer, to start from instead of noise: what stays of it
        need not be found again. What the prompt makes doubtful in it is noise from the start. A
        constraint is one of those of `guide`.
        """
        for event in self.stream(prompt, options, warm=warm, **constraint):
            if isinstance(event, Done):
                return event
        raise AssertionError("a stream ends with Done")

    def stream(
        self,
        prompt: str | Prompt,
        options: Options = DEFAULTS,
        *,
        warm: str | None = None,
        **constraint: Unpack[Constraint],
    ) -> Generator[Event, None, None]:
        """Answer a prompt event by event; refused at once if it cannot be answered."""
        if any(value is not None for value in constraint.values()):
            if options.guide is not None:
                raise UsageError("a constraint is given beside a guide; give one of them")
            options = replace(options, guide=self.guide(**constraint))
        if warm is not None:
            prompt = self._from_text(prompt) if isinstance(prompt, str) else prompt
            options = replace(options, canvas=warm_canvas(self, prompt, warm))
        return self._follow(self.plan(prompt, options))

    def generate_all(
        self, prompts: Sequence[str | Prompt], options: Sequence[Options]
    ) -> list[Done]:
        """Answer several prompts together, each with its options."""
        if len(prompts) != len(options):
            raise UsageError(f"{len(prompts)} prompts have {len(options)} options; give each one")
        plans = [self.plan(p, o) for p, o in zip(prompts, options, strict=True)]
        jobs = [self.submit(plan) for plan in plans]
        try:
            while not all(job.is_over for job in jobs):
                self.step()
        finally:
            for job in jobs:
                self.cancel(job)
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [event for job in jobs for event in job.events if isinstance(event, Done)]

    def fill(
        self, text: str | Sequence[str] | Holed, options: FillOptions = FILL_DEFAULTS
    ) -> Filled:
        """Fill the holes of a text: marked `<|fill|>`, or between pieces. The rest stays as is."""
        for event in self.stream_fill(text, options):
            if isinstance(event, Filled):
                return event
        raise AssertionError("a stream ends with its result")

    def stream_fill(
        self, text: str | Sequence[str] | Holed, options: FillOptions = FILL_DEFAULTS
    ) -> Generator[Draft | Filled, None, None]:
        """The same with the drafts on the way, if the options ask for them; the result is last."""
        if not isinstance(text, Holed):
            text = Holed.read(text) if isinstance(text, str) else Holed(tuple(text))
        yield (yield from fill(self, text, options))

    def edit(
        self, text: str, instruction: str | None = None, options: EditOptions = EDIT_DEFAULTS
    ) -> Edited:
        """Change a text as told, only where it must; without an instruction, correct it."""
        for event in self.stream_edit(text, instruction, options):
            if isinstance(event, Edited):
                return event
        raise AssertionError("a stream ends with its result")

    def stream_edit(
        self, text: str, instruction: str | None = None, options: EditOptions = EDIT_DEFAULTS
    ) -> Generator[Draft | Edited, None, None]:
        """The same with the drafts on the way, if the options ask for them; the result is last."""
        yield (yield from edit(self, text, instruction, options))

    def score(self, prompt: str | Prompt, texts: Sequence[str]) -> list[Score]:
        """Causal log-probability of each text as the continuation of the prompt."""
        request = self._from_text(prompt) if isinstance(prompt, str) else prompt
        return score(self.backend, request.ids, [self.tokenizer.encode(text) for text in texts])

    def rank(self, prompt: str | Prompt, choices: Sequence[str]) -> list[tuple[str, Score]]:
        """The choices with their scores, the likeliest as a whole first."""
        scores = self.score(prompt, choices)
        ranked = zip(choices, scores, strict=True)
        return sorted(ranked, key=lambda pair: pair[1].total, reverse=True)

    def classify(
        self, prompt: str | Prompt, labels: Sequence[str], *, reading: Reading = "causal"
    ) -> list[tuple[str, float]]:
        """How probable each label is as the whole answer, the likeliest first; they add up to 1.

        `causal` is exact; `canvas` reads one step of the denoiser, with the labels' ends given.
        """
        request = self._from_text(prompt) if isinstance(prompt, str) else prompt
        turn = self.tokenizer.control_ids.get("<turn|>")
        end = turn if turn in self.stop_ids.ids else self.stop_ids.ids[0]
        encoded = [self.tokenizer.encode(label) for label in labels]
        shares = choose(self.backend, request.ids, encoded, end, reading)
        return sorted(zip(labels, shares, strict=True), key=lambda pair: pair[1], reverse=True)

    def plan(self, prompt: str | Prompt, options: Options = DEFAULTS) -> Plan:
        """Check a request and complete it; what cannot be done is refused here."""
        if isinstance(prompt, str):
            prompt = self._from_text(prompt)
        if options.guide is not None and options.guide.vocabulary.tokenizer is not self.tokenizer:
            raise UsageError("the guide belongs to another engine; make one with this one's guide")
        return make_plan(prompt, options, self.model.config, self.generation, self.sampler)

    def submit(self, plan: Plan, *, past: KVCache | None = None) -> Job:
        """Let a request in; its events gather in `job.events` as the engine steps.

        `past` holds the beginning of its prompt; requests that share one do not encode it again.
        """
        job = Job(plan, self.tokenizer, self.stop_ids)
        job.past, job.is_remembered = past, self.prefixes.max_bytes > 0
        job.alignment = self.prefixes.alignment
        if not job.is_over:  # a grammar without a text that fits ends it at once
            self.waiting.append(job)
        return job

    def step(self) -> None:
        """One pass: every running request moves, finished ones leave, waiting ones join."""
        while self.waiting and len(self.jobs) < self.max_rows:
            self.waiting[0].begin(self._cache(self.waiting[0]))
            self.jobs.append(self.waiting.popleft())
        if not self.jobs:
            return
        jobs = self._turn()
        inputs = [job.work(self.chunk) for job in jobs]
        outputs = self.backend.run(inputs)
        for job, given, output in zip(jobs, inputs, outputs, strict=True):
            try:
                job.take(given, output)
            except Exception as error:
                # It is for whoever follows this request; the others go on.
                job.error = error
        for job in [job for job in self.jobs if job.is_over]:
            self.cancel(job)

    def _turn(self) -> list[Job]:
        """Requests of the next pass: all that run, and as many prompts as keep it short."""
        prefilling = [job for job in self.jobs if job.is_prefilling(self.chunk)]
        limit = MAX_PREFILLING if len(prefilling) == len(self.jobs) else MAX_PREFILLING_BESIDE
        waiting = set(map(id, prefilling[limit:]))
        return [job for job in self.jobs if id(job) not in waiting]

    def cancel(self, job: Job) -> None:
        """Take a request out; what it has committed is remembered."""
        job.is_cancelled = not job.is_done
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.jobs:
            self.jobs.remove(job)
            # An interrupt may leave a cache torn, or ahead of its job. A shared past has an owner.
            is_ours = job.past is None and job.cache.is_consistent
            if is_ours and len(job.committed) == job.cache.length:
                prompt = len(job.plan.prompt.ids)
                self.prefixes.keep(job.committed, job.cache, min(prompt, len(job.committed)))

    def _follow(self, plan: Plan) -> Generator[Event, None, None]:
        job = self.submit(plan)
        try:
            while not job.is_over:
                self.step()
                while job.events:
                    yield job.events.popleft()
            yield from job.events
            if job.error is not None:
                raise job.error
        finally:
            self.cancel(job)

    def _from_text(self, text: str) -> Prompt:
        if self.template is None:
            return self.plain(text)
        return self.prompt([Message(role="user", content=text)])

    def _cache(self, job: Job) -> KVCache:
        plan = job.plan
        if job.past is not None:
            return job.past.fork(plan.room - job.past.length)
        room = Capacity(tokens=plan.room, segment=self.chunk + plan.canvas_length)
        found = self.prefixes.take(plan.prompt.ids, room)
        if found is not None:
            return found[0]
        return KVCache(self.model.config, room, self.dtype, self.device)


def prefix_room(device: torch.device) -> int:
    """Bytes for the keys of finished requests, where nobody says how many."""
    if device.type != "cuda":
        return PREFIX_BYTES
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(PREFIX_BYTES, int(PREFIX_SHARE * memory))


def prefill_chunk(device: torch.device, dtype: torch.dtype) -> int:
    """Tokens of one prompt that a pass commits; prompts are always cut at its multiples."""
    if device.type != "cuda":
        return PREFILL_CHUNK if dtype == torch.float32 else CPU_CHUNK_16
    memory = torch.cuda.get_device_properties(device).total_memory
    return next(chunk for least, chunk in GPU_CHUNKS if memory >= least)
