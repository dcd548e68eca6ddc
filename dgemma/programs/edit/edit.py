"""Edit a text in place: find what must change, open only those spans, and refill them.

A long text is edited in segments, each with its own prompt, and a segment in windows of one canvas,
from left to right (`edit.windows`). The result is joined from the original text and the fills.
"""

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgemma.diffusion.canvas import Noise
from dgemma.engine.events import Done
from dgemma.engine.params import CanvasParams, CanvasResult, Cost, SamplingParams, require_denoiser
from dgemma.engine.request import PASS, Program, in_thread_if_long
from dgemma.engine.scoring import Prefill, Score, Scoring
from dgemma.errors import CheckpointError, PromptTooLong, UsageError, require
from dgemma.programs.edit.spans import (
    Change,
    Patch,
    allowed_tokens,
    apply_patches,
    changes_of,
    clip_spans,
    compose_patches,
    encode_split,
    line_span,
    merge_spans,
    shift_spans,
    spans_above,
    token_characters,
    unified_diff,
    widen_to_words,
)
from dgemma.programs.edit.windows import (
    OPEN_ALL,
    EditConfig,
    EditSegment,
    EditWindows,
    SegmentTokens,
    copy_bias,
)
from dgemma.programs.infill.document import (
    CHARACTERS_PER_TOKEN,
    Span,
    check_spans,
    first_tokens,
    last_tokens,
)
from dgemma.programs.infill.infill import closing_ids, end_id
from dgemma.text.chat import Message, Prompt
from dgemma.text.tokenizer import Tokenizer, refuse_surrogates

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

STRENGTH = 0.5  # 0 opens only the most surprising tokens, 1 opens all
NOISE = -1  # marks noise in an initial canvas
# Surprisal in nats that opens a token at strength 0, and the decades it falls by to strength 1.
MAX_SURPRISAL, SURPRISAL_DECADES = 7.0, 2.0
MAX_PREFERENCE, PREFERENCE_SLOPE = 8.0, 12.0  # the same for preference, linear
MAX_PASSES, MAX_CORRECTION_PASSES = 2, 3
FENCE = re.compile(r"\A```[^\n]*\n(.*?)\n?```\s*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class EditParams(CanvasParams):
    """Parameters of an edit."""

    selection: tuple[Span, ...] | None = None  # character spans that may change; None: all
    lines: tuple[int, int] | None = None  # the same as first and last line, counted from one
    # 0 to 1, how readily text is opened; None: STRENGTH, then 1 if a selection does not change.
    strength: float | None = None
    passes: int | None = None  # most passes until nothing changes; None: 2, or 3 for a correction


@dataclass(frozen=True, slots=True, kw_only=True)
class EditResult(CanvasResult):
    """An edited text and its cost."""

    text: str
    old: str
    changed: tuple[Change, ...]
    opened: tuple[Span, ...]  # opened character spans of the old text
    passes: int

    def diff(self, name: str = "text") -> str:
        """Return the change as a unified diff."""
        return unified_diff(self.old, self.text, self.changed, name)


EDIT_DEFAULTS = EditParams()


def check_edit(params: EditParams) -> None:
    """Refuse parameters that no text and no model can honour."""
    Noise(seed=params.seed or 0)
    strength, passes = params.strength, params.passes
    require(strength is None or 0 <= strength <= 1, "strength", strength, "from 0 to 1")
    require(passes is None or passes >= 1, "passes", passes, "1 or more")
    if params.selection is not None and params.lines is not None:
        raise UsageError("give a selection or lines, not both")


def edit(
    engine: "Engine",
    text: str,
    instruction: str | None = None,
    params: EditParams = EDIT_DEFAULTS,
) -> EditResult:
    """Edit a text as instructed; without an instruction, replace doubtful words."""
    return engine.run(edit_program(engine, text, instruction, params))


def edit_program(
    engine: "Engine",
    text: str,
    instruction: str | None = None,
    params: EditParams = EDIT_DEFAULTS,
) -> Program[EditResult]:
    """Edit a text; reports drafts on request."""
    check_edit(params)
    refuse_surrogates(text)
    require_denoiser(engine.model.config, "it cannot edit in place")
    if instruction is not None and engine.template is None:
        raise UsageError("this checkpoint has no chat template, so it takes no instruction")
    selection = yield from in_thread_if_long(len(text), _selection, text, params)
    seed = secrets.randbits(32) if params.seed is None else params.seed
    run = EditRun(engine, instruction, params, Cost(seed=seed))
    patches = yield from run.run(text, selection)
    return (yield from in_thread_if_long(len(text), run.result, text, patches))


def rewrite(
    engine: "Engine", prompt: str | Prompt, old: str, params: SamplingParams | None = None
) -> Done:
    """Answer a prompt, starting from an old version of the answer instead of noise."""
    return engine.run(rewrite_program(engine, prompt, old, params))


def rewrite_program(
    engine: "Engine", prompt: str | Prompt, old: str, params: SamplingParams | None = None
) -> Program[Done]:
    """Answer a prompt from an old answer; tokens that are surprising under it become noise."""
    prompt, params = engine.user_prompt(prompt), params or SamplingParams()
    engine.generation(prompt, replace(params, initial_canvas=(NOISE,)))  # refuses what cannot be
    canvas = yield from warm_canvas(engine, prompt, old)
    (done,) = yield [engine.generation(prompt, replace(params, initial_canvas=canvas))]
    return done  # type: ignore[no-any-return]


def warm_canvas(engine: "Engine", prompt: Prompt, text: str) -> Program[tuple[int, ...]]:
    """Return an old answer as the initial canvases of a new one.

    Some of it must be noise: a canvas without noise would be copied unchanged.
    """
    closing = closing_ids(engine, is_turn=engine.template is not None)
    ids = (*(yield from in_thread_if_long(len(text), engine.tokenizer.encode, text)), *closing)
    (prefix,) = yield [Prefill(prompt.ids)]
    try:
        ((score,),) = yield [Scoring(prefix, [ids])]
    finally:
        engine.keep(prefix)
    return (yield from in_thread_if_long(len(text), _with_noise, engine, score))


def _with_noise(engine: "Engine", score: Score) -> tuple[int, ...]:
    """Replace words with surprising tokens by noise."""
    surprisal, ids = [-logprob for logprob in score.logprobs], score.ids
    opened = spans_above(surprisal, surprisal_threshold(STRENGTH), [True] * len(ids))
    canvas = list(ids)
    for start, stop in widen_to_words(engine.tokenizer, ids, opened):
        canvas[start:stop] = [NOISE] * (stop - start)
    return (*canvas, *[end_id(engine)] * engine.model.config.canvas_length)


def without_fence(text: str) -> str:
    """Remove a Markdown code fence around the whole text."""
    fenced = FENCE.match(text.strip())
    return fenced[1] if fenced else text


def surprisal_threshold(strength: float) -> float:
    return MAX_SURPRISAL * 10 ** (-SURPRISAL_DECADES * strength)


def _selection(text: str, params: EditParams) -> list[Span] | None:
    if params.lines is not None:
        return [line_span(text, *params.lines)]
    if params.selection is None:
        return None
    check_spans(params.selection, len(text))
    return merge_spans(params.selection)


def text_stretches(tokenizer: Tokenizer, text: str, count: int) -> Iterator[tuple[int, str]]:
    """Split a text into stretches of at most `count` tokens, at line ends if possible.

    Yields the start and text of each.
    """
    start = 0
    while start < len(text):
        rest = text[start : start + CHARACTERS_PER_TOKEN * count]
        stretch = first_tokens(tokenizer, rest, count)
        if not stretch:
            raise UsageError(
                f"a character takes more than {count} tokens; the context is too small"
            )
        yield start, stretch
        start += len(stretch)


class EditRun:
    """The passes over one text."""

    def __init__(
        self, engine: "Engine", instruction: str | None, params: EditParams, cost: Cost
    ) -> None:
        self.engine, self.instruction, self.params, self.cost = engine, instruction, params, cost
        self.length = engine.model.config.canvas_length
        self.config = EditConfig(
            has_instruction=instruction is not None,
            sampler=params.sampler or engine.sampler,
            drafts=params.drafts,
            cost=cost,
        )
        self.threshold = self._threshold(STRENGTH if params.strength is None else params.strength)
        default = MAX_PASSES if instruction is not None else MAX_CORRECTION_PASSES
        self.max_passes = params.passes or default
        self.passes = 0

    def result(self, text: str, patches: list[Patch]) -> EditResult:
        return EditResult(
            text=apply_patches(text, patches),
            old=text,
            changed=tuple(changes_of(text, patches)),
            opened=tuple((patch.start, patch.end) for patch in patches),
            passes=self.passes,
            **self.cost.fields(),
        )

    def run(self, text: str, selection: list[Span] | None) -> Program[list[Patch]]:
        """Return patches of all opened spans, also of unchanged ones."""
        patches: list[Patch] = []
        segments = self._segments(text)
        while (
            segment := (yield from in_thread_if_long(len(text), next, segments, None))
        ) is not None:
            yield PASS  # a long text has many segments
            start, end = segment.start, segment.start + len(segment.text)
            if selection is None or any(a < end and start < b for a, b in selection):
                local = yield from self._edit_segment(segment, selection)
                patches += [Patch(p.start + start, p.end + start, p.new) for p in local]
        return patches

    def _threshold(self, strength: float) -> float:
        """Return the score above which a token is opened."""
        if strength == 1:
            return OPEN_ALL
        if self.instruction is not None:
            return surprisal_threshold(strength)
        vocab = self.engine.model.config.vocab_size
        return copy_bias(vocab) + MAX_PREFERENCE - PREFERENCE_SLOPE * strength

    # --- segments

    def _segments(self, text: str) -> Iterator[EditSegment]:
        """Yield stretches of the text that fit the context, each with its prompt."""
        capacity = self.engine.model.config.max_position_embeddings - 2 * self.length
        if self.instruction is None:
            yield from self._plain_segments(text, capacity)
            return
        count = (capacity - len(self._header(""))) // 2
        if count < 1:
            raise PromptTooLong("the instruction leaves no room for the text; shorten it")
        for start, stretch in text_stretches(self.engine.tokenizer, text, count):
            # Templates strip a user's message, so a reply neither starts nor ends with white space.
            body = stretch.strip()
            body_start = start + stretch.find(body)
            # The reply to a segment's prompt ends with the segment.
            yield EditSegment(self._header(body), (), body, body_start, is_last=True)

    def _plain_segments(self, text: str, capacity: int) -> Iterator[EditSegment]:
        if capacity < 4:
            raise PromptTooLong("the context is too small for two canvases")
        tokenizer, bos = self.engine.tokenizer, self.engine.model.config.bos_token_id
        count = capacity // 2 - 1
        for start, stretch in text_stretches(tokenizer, text, capacity // 2):
            before = text[max(0, start - CHARACTERS_PER_TOKEN * count) : start]
            context = tuple(tokenizer.encode(last_tokens(tokenizer, before, count)))
            is_last = start + len(stretch) == len(text)
            yield EditSegment((bos,), context, stretch, start, is_last)

    def _header(self, text: str) -> tuple[int, ...]:
        content = f"{self.instruction}\n\n{text}"
        return self.engine.prompt([Message(role="user", content=content)]).ids

    def _edit_segment(
        self, segment: EditSegment, selection: list[Span] | None
    ) -> Program[list[Patch]]:
        """Run passes over a segment until nothing changes; its prompt shows the original text."""
        old, patches, size = segment.text, list[Patch](), len(segment.text)
        spans = None if selection is None else clip_spans(selection, segment.start, size)
        for number in range(1, self.max_passes + 1):
            self.passes = max(number, self.passes)
            new = yield from self._pass(segment, spans, self.threshold)
            if number == 1 and self._opens_all(spans) and not changes_of(old, new):
                new = yield from self._pass(segment, spans, OPEN_ALL)
            text = apply_patches(segment.text, new)
            patches = yield from in_thread_if_long(size, compose_patches, patches, new, old)
            if text == segment.text:
                break
            spans = None if spans is None else shift_spans(spans, new)
            segment = replace(segment, text=text)
        return patches

    def _opens_all(self, selection: list[Span] | None) -> bool:
        """True if a selection without changes is opened as a whole."""
        is_default = self.instruction is not None and self.params.strength is None
        return is_default and selection is not None

    def _pass(
        self, segment: EditSegment, selection: list[Span] | None, threshold: float
    ) -> Program[list[Patch]]:
        size = len(segment.text)
        tokens = yield from in_thread_if_long(size, self._tokens, segment.text, selection)
        self.cost.prompt_tokens += len(segment.header) + len(segment.context) + len(tokens.ids)
        windows = EditWindows(self.engine, segment, tokens, threshold, self.config)
        yield from windows.run()
        return windows.patches

    def _tokens(self, text: str, selection: list[Span] | None) -> SegmentTokens:
        tokenizer = self.engine.tokenizer
        ids = encode_split(tokenizer, text, selection or [])
        if tokenizer.decode_bytes(ids) != text.encode():
            raise CheckpointError("the tokenizer does not reproduce the text; use another model")
        characters = token_characters(tokenizer, ids)
        return SegmentTokens(tuple(ids), characters, allowed_tokens(characters, selection))
