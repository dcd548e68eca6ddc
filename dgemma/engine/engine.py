"""The engine: a loaded checkpoint that answers prompts.

Turns prompts, constraints and sampling parameters into tasks, which `core` runs. It does not know
HTTP, terminals or programs.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Unpack

from dgemma.config import GENERATION_CONFIG, GenerationConfig, load_generation_config
from dgemma.constrain.grammar import ConstraintArgs
from dgemma.constrain.matcher import Constraint, compile_constraint
from dgemma.constrain.tool_grammar import grammar_of
from dgemma.constrain.vocabulary import vocabulary
from dgemma.cpu_threads import spin_control
from dgemma.diffusion.sampler import Rule, Sampler, released_sampler
from dgemma.engine import auto
from dgemma.engine.auto import BreakEven
from dgemma.engine.canvas_policy import CanvasPolicy, canvas_policy
from dgemma.engine.core import CoreArgs, EngineCore
from dgemma.engine.events import Done, Event
from dgemma.engine.generation import Generation
from dgemma.engine.image_features import ImageFeatures, image_features
from dgemma.engine.params import SamplingParams, check_params, check_preset, reply_limits
from dgemma.engine.request import DraftMap, Prefix, Program, ReplySpec
from dgemma.engine.scoring import Prefill, Score, Scoring, label_probabilities
from dgemma.engine.speculation import SpeculativeParams, SpeculativeReply
from dgemma.errors import CheckpointError, UsageError
from dgemma.model.gemma import Gemma
from dgemma.text.chat import ChatTemplate, Message, Prompt, Tool, insert_images
from dgemma.text.control_tokens import TURN_END
from dgemma.text.tokenizer import StopIds, Tokenizer
from dgemma.video import Clip
from dgemma.weights.files import OnProgress
from dgemma.weights.hub import ModelOptions, find_checkpoint
from dgemma.weights.inference import LoadArgs, load_for_inference
from dgemma.weights.lora_files import load_adapter
from dgemma.weights.source import load_template, load_tokenizer, source_notes

DEFAULTS = SamplingParams()
logger = logging.getLogger("dgemma")


class Engine(EngineCore):
    """A model with its tokenizer, chat template and generation config."""

    def __init__(
        self,
        model: Gemma,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        generation: GenerationConfig,
        *,
        rule: Rule | None = None,
        preset: str | None = None,
        **core: Unpack[CoreArgs],
    ) -> None:
        """Make an engine. `rule` and `preset` are defaults for requests without their own sampler.

        None: the reference rule, and generation_config unchanged.
        """
        check_preset(preset)
        if tokenizer.vocab_size != model.config.vocab_size:
            raise CheckpointError(
                f"the tokenizer knows {tokenizer.vocab_size} tokens, the model "
                f"{model.config.vocab_size}; they are not of the same checkpoint"
            )
        super().__init__(model, **core)
        self.tokenizer, self.template = tokenizer, template
        self.generation_config = generation  # of the checkpoint, without a preset
        self.rule, self.preset = rule, preset
        self.sampler = self._new_sampler(None)
        self.break_even: BreakEven | None = None  # measured costs of both modes, for mode auto
        self.identity: Mapping[str, str] | None = None  # key of stored costs; None: not stored
        self.stop_ids = StopIds.read(generation.stop_ids)

    @classmethod
    def load(
        cls,
        model: str | Path = "nano",
        *,
        adapter: str | Path | None = None,
        rule: Rule | None = None,
        preset: str | None = None,
        prefix_bytes: int | None = None,
        progress: OnProgress | None = None,
        **where: Unpack[LoadArgs],
    ) -> "Engine":
        """Load a checkpoint: a directory, a GGUF file, a downloaded hub id, or the built-in `nano`.

        `device`, `dtype` and `quant` (weight format in memory) default to `auto`. `template="file"`
        uses the chat template of a GGUF file; `vision` selects its image tower. The directory of an
        adapter may have its own generation_config.json. `rule` and `preset` are defaults for
        requests without their own sampler.
        """
        check_preset(preset)
        adapter = None if adapter is None else Path(adapter)
        path, options = find_checkpoint(str(model)), ModelOptions(adapter=adapter, **where)
        tokenizer = load_tokenizer(path)
        chosen = load_template(path, tokenizer, options.template)
        for note in source_notes(path, chosen):
            logger.warning("%s: %s", path.name, note)
        lora = None if adapter is None else load_adapter(adapter)
        checkpoint = load_for_inference(path, options, lora, progress)
        generation = checkpoint.generation
        if adapter is not None and (adapter / GENERATION_CONFIG).is_file():
            generation = load_generation_config(adapter)
        parts = (checkpoint.model, tokenizer, chosen.template, generation)
        images = image_features(checkpoint)
        engine = cls(*parts, rule=rule, preset=preset, images=images, prefix_bytes=prefix_bytes)
        spin_control().end_pool()  # passes may run in another thread
        if rule is None and preset is None:  # the costs of other samplers are not stored
            engine.load_costs(auto.identity(path, options))
        return engine

    def load_costs(self, identity: Mapping[str, str]) -> None:
        """Load the costs of both modes stored under this key, where new ones will be stored."""
        self.identity, self.break_even = identity, auto.load_break_even(identity)

    def measure_break_even(self) -> BreakEven:
        """Time both modes on this machine for some seconds, and cache the result on disk."""
        self.break_even = auto.measure(self)
        if self.identity is not None:
            auto.store_break_even(self.identity, self.break_even)
        return self.break_even

    def sampler_of(self, preset: str | None) -> Sampler:
        """Return the sampler of a preset with the engine's rule; None: the engine's sampler."""
        check_preset(preset)
        return self.sampler if preset is None else self._new_sampler(preset)

    def _new_sampler(self, preset: str | None) -> Sampler:
        sampler = released_sampler(self.defaults_of(preset))
        return sampler if self.rule is None else replace(sampler, rule=self.rule)

    def defaults_of(self, preset: str | None) -> GenerationConfig:
        """Return the checkpoint's defaults under a preset; None: under the engine's preset."""
        name = preset or self.preset
        if name is None:
            return self.generation_config
        return self.generation_config.with_preset(name, self.model.config.long_reply)

    # --- prompts and tasks

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, thinking: bool = False
    ) -> Prompt:
        """Render a conversation with the checkpoint's chat template; decodes pictures."""
        if self.template is None:
            raise UsageError("this checkpoint has no chat template; give it plain text instead")
        media = [part for message in messages for part in message.media]
        if not media:
            return self.template.prompt(messages, tools, enable_thinking=thinking)
        vision = self.tower().vision
        shown = [part.prepare(vision) for part in media]
        clips = [clip for clip in shown if isinstance(clip, Clip)]
        stamps = [clip.stamps for clip in clips]
        prompt = self.template.prompt(messages, tools, enable_thinking=thinking, stamps=stamps)
        pictures = (part.frames if isinstance(part, Clip) else [part] for part in shown)
        return insert_images(prompt, list(chain.from_iterable(pictures)), self.tokenizer)

    def tower(self) -> ImageFeatures:
        """Return the image tower; refuses pictures if the checkpoint has none."""
        if self.images is None:
            raise UsageError(
                "this checkpoint has no image tower, so it cannot read pictures; send text, or "
                "load one that has it, such as nano or the released DiffusionGemma"
            )
        return self.images

    def plain_prompt(self, text: str) -> Prompt:
        """Return plain text as a prompt, to be continued."""
        ids = (self.model.config.bos_token_id, *self.tokenizer.encode(text))
        return Prompt(text=text, ids=ids)

    def user_prompt(self, text: str | Prompt) -> Prompt:
        """Return a user message as a prompt, or plain text if there is no chat template."""
        if isinstance(text, Prompt):
            return text
        if self.template is None:
            return self.plain_prompt(text)
        return self.prompt([Message(role="user", content=text)])

    def constraint(self, **constraint: Unpack[ConstraintArgs]) -> Constraint:
        """Compile a constraint: one of schema, regex, grammar, choices and tools.

        It may be shared by any number of requests, as `SamplingParams.constraint`. Its shortest
        text is searched here, not in the step loop, where all requests would wait for it. With
        `tools`, `tool_choice` is `required` (default: one call of any tool), the name of the tool
        to call, or `auto`: free text, with calls where the model makes them.
        """
        grammar = grammar_of(constraint, self.tokenizer)
        compiled = compile_constraint(grammar, vocabulary(self.tokenizer, self.stop_ids.ids))
        _ = compiled.shortest
        return compiled

    def generation(
        self,
        prompt: str | Prompt,
        params: SamplingParams = DEFAULTS,
        *,
        prefix: Prefix | None = None,
        map_draft: DraftMap | None = None,
        fit: bool = False,
    ) -> Generation:
        """Check a request and make its task; refuses what cannot be honoured.

        `prefix` holds the beginning of the prompt; `map_draft` maps drafts before they are
        reported. With `fit`, max_tokens is lowered to fit the context.
        """
        spec = self.reply_spec(prompt, params, fit=fit)
        spec = replace(spec, prefix=prefix, map_draft=map_draft)
        if prefix is None and self.policy_of(spec.params).num_speculative_tokens:
            return SpeculativeReply(self, spec, SpeculativeParams(drafter="canvas"))
        return Generation(self, spec)

    def reply_spec(
        self, prompt: str | Prompt, params: SamplingParams, *, fit: bool = False
    ) -> ReplySpec:
        """Check a request for a reply."""
        prompt, config = self.user_prompt(prompt), self.model.config
        check_params(params)
        if params.mode == "auto":
            params = self._without_auto(params)
            check_params(params)
        constraint = params.constraint
        if constraint is not None and constraint.vocabulary.tokenizer is not self.tokenizer:
            raise UsageError("the constraint was compiled by another engine; use this one's")
        default = self.generation_config.max_new_tokens
        limits = reply_limits(params, len(prompt.ids), config, default, fit=fit)
        return ReplySpec(prompt=prompt, params=params, limits=limits)

    def policy_of(self, params: SamplingParams) -> CanvasPolicy:
        """Return the policy for the canvases of a request."""
        sampler, defaults = self.sampler_of(params.preset), self.defaults_of(params.preset)
        return canvas_policy(params, sampler, self.model.config, defaults, self.rule)

    def _without_auto(self, params: SamplingParams) -> SamplingParams:
        """Replace mode auto if there is nothing to choose; an AR-only checkpoint shows no drafts.

        Both modes are timed now, unless `on_missing_costs` defers it.
        """
        if not self.model.config.can_denoise:
            return replace(params, mode="ar", drafts=False)
        if self.break_even is None:
            (self.hooks.on_missing_costs or self.measure_break_even)()
        return replace(params, mode="diffusion") if self.break_even is None else params

    # --- library calls

    def generate(
        self,
        prompt: str | Prompt,
        params: SamplingParams = DEFAULTS,
        **constraint: Unpack[ConstraintArgs],
    ) -> Done:
        """Answer a prompt. A string is a user message; for constraints see `constraint`."""
        for event in self.stream(prompt, params, **constraint):
            if isinstance(event, Done):
                return event
        raise AssertionError("a generation ends with Done")

    def stream(
        self,
        prompt: str | Prompt,
        params: SamplingParams = DEFAULTS,
        **constraint: Unpack[ConstraintArgs],
    ) -> Generator[Event, None, None]:
        """Answer a prompt and yield its events; refusals are raised at the call."""
        if any(value is not None for value in constraint.values()):
            if params.constraint is not None:
                raise UsageError("a constraint is given twice; give it once")
            params = replace(params, constraint=self.constraint(**constraint))
        return self.follow(self.generation(prompt, params))

    def generate_all(
        self, prompts: Sequence[str | Prompt], params: Sequence[SamplingParams]
    ) -> list[Done]:
        """Answer several prompts together, each with its own parameters."""
        if len(prompts) != len(params):
            raise UsageError(f"{len(prompts)} prompts have {len(params)} params; give each one")
        pairs = zip(prompts, params, strict=True)
        return self.run_all([self.generation(*pair) for pair in pairs])

    def score(self, prompt: str | Prompt, texts: Sequence[str]) -> list[Score]:
        """Return the causal log-probability of each text as a continuation of the prompt."""
        encoded = [self.tokenizer.encode(text) for text in texts]
        return self.run(self.score_program(self.user_prompt(prompt), encoded))

    def rank(self, prompt: str | Prompt, texts: Sequence[str]) -> list[tuple[str, Score]]:
        """Return the texts with their scores, sorted by the log-probability of the whole text."""
        ranked = zip(texts, self.score(prompt, texts), strict=True)
        return sorted(ranked, key=lambda pair: pair[1].total, reverse=True)

    def classify(self, prompt: str | Prompt, labels: Sequence[str]) -> list[tuple[str, float]]:
        """Return the probability of each label as the whole answer, sorted; they sum to 1."""
        if not labels or not all(labels):
            raise UsageError("there are no labels, or an empty one; give texts to choose from")
        if len(set(labels)) < len(labels):
            raise UsageError("a label is given twice; give each once")
        turn = self.tokenizer.control_ids.get(TURN_END)
        end = turn if turn in self.stop_ids.ids else self.stop_ids.ids[0]
        encoded = [[*self.tokenizer.encode(label), end] for label in labels]
        scores = self.run(self.score_program(self.user_prompt(prompt), encoded))
        pairs = zip(labels, label_probabilities(scores), strict=True)
        return sorted(pairs, key=lambda pair: pair[1], reverse=True)

    def score_program(
        self, prompt: Prompt | Sequence[int], texts: Sequence[Sequence[int]]
    ) -> Program[list[Score]]:
        """Score continuations of one prompt, which is encoded once."""
        (prefix,) = yield [Prefill(prompt)]
        try:
            (scores,) = yield [Scoring(prefix, texts)]
        finally:
            self.keep(prefix)
        return scores  # type: ignore[no-any-return]
