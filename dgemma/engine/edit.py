"""Editing a text in place: find what must change, open only that, and fill it anew.

A long text is edited in segments, each with its own prompt, and a segment in windows of one canvas,
from left to right (`engine.windows`). The result is joined from the given text and the fills
(`guide.edits`).
"""

import secrets
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgemma.constrain.edits import (
    Change,
    Patch,
    allowed_tokens,
    apply,
    changes,
    character_places,
    clip,
    compose,
    diff,
    encode_apart,
    joined,
    line_spans,
    open_spans,
    segments,
    shift,
    whole_words,
)
from dgemma.constrain.holes import Span, check_spans, tail
from dgemma.diffusion.canvas import Noise
from dgemma.diffusion.sampler import Sampler
from dgemma.engine.doubt import copy_bias
from dgemma.engine.events import Draft
from dgemma.engine.fill import closing_ids, end_id
from dgemma.engine.trials import SharedPrefix
from dgemma.engine.windows import EVERYTHING, Manner, Segment, Tokens, Windows
from dgemma.errors import CheckpointError, PromptTooLong, UsageError
from dgemma.text.chat import Message, Prompt
from dgemma.text.tokenizer import refuse_surrogates

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

STRENGTH = 0.5
NOISE = -1  # on a canvas to start from
LOUDEST, DECADES = 7.0, 2.0  # nats of surprise that open a token at strength 0, and how they fall
PREFERENCE, SLOPE = 8.0, 12.0  # the same for preference beyond the copy bias, linear
PASSES, CORRECTION_PASSES = 2, 3  # the most, with an instruction and without


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOptions:
    """What may be chosen for an edit."""

    selection: tuple[Span, ...] | None = None  # characters that may change; None: all
    lines: tuple[int, int] | None = None  # the same in lines, first and last, counted from one
    # 0 to 1, how readily text is opened; None: 0.5, and all of a selection if that changes nothing.
    strength: float | None = None
    passes: int | None = None  # over the text, until nothing changes; None: 2, or 3 to correct
    seed: int | None = None  # None draws one, reported with the result
    sampler: Sampler | None = None
    drafts: bool = False  # whether to report a canvas after each step


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """An edited text and what it took."""

    text: str
    old: str
    changed: tuple[Change, ...]
    opened: tuple[Span, ...]  # of the old text's characters; nothing outside could change
    passes: int
    steps: int  # of all canvases together
    canvases: int
    seconds: float
    seed: int

    def diff(self, name: str = "text") -> str:
        """The change as a unified diff."""
        return diff(self.old, self.text, name)


def check_edit(options: EditOptions) -> None:
    """Refuse what no text and no model could do."""
    Noise(seed=options.seed or 0)
    if options.strength is not None and not 0 <= options.strength <= 1:
        raise UsageError(f"strength is {options.strength}; it must be from 0 to 1")
    if options.passes is not None and options.passes < 1:
        raise UsageError(f"passes is {options.passes}; it must be 1 or more")
    if options.selection is not None and options.lines is not None:
        raise UsageError("give a selection or lines, not both")


def edit(
    engine: "Engine", text: str, instruction: str | None, options: EditOptions
) -> Generator[Draft, None, Edited]:
    """Edit a text as told, or correct it where nothing is said; yields drafts if asked for."""
    check_edit(options)
    refuse_surrogates(text)
    if not engine.model.config.can_denoise:
        raise UsageError("this checkpoint has no denoiser, so it cannot edit in place")
    if instruction is not None and engine.template is None:
        raise UsageError("this checkpoint has no chat template, so it cannot be instructed")
    selection = _selection(text, options)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    begun, editing = time.perf_counter(), Editing(engine, instruction, options, seed)
    patches = yield from editing.run(text, selection)
    return Edited(
        text=apply(text, patches),
        old=text,
        changed=tuple(changes(text, patches)),
        opened=tuple((patch.start, patch.end) for patch in patches),
        passes=editing.passes,
        steps=editing.steps,
        canvases=editing.canvases,
        seconds=time.perf_counter() - begun,
        seed=seed,
    )


def warm_canvas(engine: "Engine", prompt: Prompt, text: str) -> tuple[int, ...]:
    """An old answer as the canvases of a new one would hold it, its end included.

    Words that surprise the causal mode after the prompt are left to noise: a canvas that is clean
    everywhere would be copied. That takes one pass.
    """
    ids = (
        *engine.tokenizer.encode(text),
        *closing_ids(engine, is_turn=engine.template is not None),
    )
    shared = SharedPrefix(engine, prompt.ids)
    try:
        doubts = [-p for p in shared.score([ids])[0].logprobs]
    finally:
        shared.close()
    canvas = list(ids)
    threshold = LOUDEST * 10 ** (-DECADES * STRENGTH)
    opened = open_spans(doubts, threshold, [True] * len(ids))
    for start, stop in whole_words(engine.tokenizer, ids, opened):
        canvas[start:stop] = [NOISE] * (stop - start)
    return (*canvas, *[end_id(engine)] * engine.model.config.canvas_length)


def _selection(text: str, options: EditOptions) -> list[Span] | None:
    if options.lines is not None:
        return [line_spans(text, *options.lines)]
    if options.selection is None:
        return None
    check_spans(options.selection, len(text))
    return joined(options.selection)


class Editing:
    """Passes over a text. `steps` and `canvases` count what they took."""

    def __init__(
        self, engine: "Engine", instruction: str | None, options: EditOptions, seed: int
    ) -> None:
        self.engine, self.instruction, self.options = engine, instruction, options
        self.length = engine.model.config.canvas_length
        self.manner = Manner(
            is_told=instruction is not None,
            seed=seed,
            sampler=options.sampler or engine.sampler,
            drafts=options.drafts,
        )
        self.threshold = self._threshold(STRENGTH if options.strength is None else options.strength)
        self.limit = options.passes or (PASSES if instruction is not None else CORRECTION_PASSES)
        self.passes = self.steps = self.canvases = 0

    def run(self, text: str, selection: list[Span] | None) -> Generator[Draft, None, list[Patch]]:
        """The patches of what was opened, also where nothing changed."""
        patches: list[Patch] = []
        for segment in self._segments(text):
            start, end = segment.start, segment.start + len(segment.text)
            if selection is None or any(a < end and start < b for a, b in selection):
                found = yield from self._edit_segment(segment, selection)
                patches += [Patch(p.start + start, p.end + start, p.new) for p in found]
        return patches

    def _threshold(self, strength: float) -> float:
        """Doubt from which on a token is opened."""
        if strength == 1:
            return EVERYTHING
        if self.instruction is not None:
            return LOUDEST * 10 ** (-DECADES * strength)
        vocab = self.engine.model.config.vocab_size
        return copy_bias(vocab) + PREFERENCE - SLOPE * strength

    # --- segments

    def _segments(self, text: str) -> list[Segment]:
        """Stretches of a text that fit the context, each with its prompt."""
        room = self.engine.model.config.max_position_embeddings - 2 * self.length
        if self.instruction is None:
            return self._plain_segments(text, room)
        header = self._header("")
        count = (room - len(header)) // 2
        if count < 1:
            raise PromptTooLong("the instruction leaves no place for the text; shorten it")
        parts = segments(self.engine.tokenizer, text, count)
        found, start = [], 0
        for part in parts:
            # Templates strip what people say, so a reply neither begins nor ends with white space.
            body = part.strip()
            place = start + part.find(body)
            # The reply to a segment's prompt ends with it, wherever the text goes on.
            found.append(Segment(self._header(body), (), body, place, is_last=True))
            start += len(part)
        return found

    def _plain_segments(self, text: str, room: int) -> list[Segment]:
        if room < 4:
            raise PromptTooLong("the context is too small for two canvases")
        encode, bos = self.engine.tokenizer.encode, self.engine.model.config.bos_token_id
        found, start = [], 0
        for part in segments(self.engine.tokenizer, text, room // 2):
            context = tail(self.engine.tokenizer, text[:start], room // 2 - 1)
            is_last = start + len(part) == len(text)
            found.append(Segment((bos,), tuple(encode(context)), part, start, is_last))
            start += len(part)
        return found

    def _header(self, part: str) -> tuple[int, ...]:
        content = f"{self.instruction}\n\n{part}"
        return self.engine.prompt([Message(role="user", content=content)]).ids

    def _edit_segment(
        self, segment: Segment, selection: list[Span] | None
    ) -> Generator[Draft, None, list[Patch]]:
        """Passes over a segment until nothing changes; its prompt shows the text as it was."""
        text, patches, passes, is_changed = segment.text, list[Patch](), 0, True
        spans = None if selection is None else clip(selection, segment.start, len(text))
        while is_changed and passes < self.limit:
            passes += 1
            now = replace(segment, text=text)
            new = yield from self._pass(now, spans, self.threshold)
            if passes == 1 and self._opens_all(spans) and apply(text, new) == text:
                new = yield from self._pass(now, spans, EVERYTHING)
            patches = compose(patches, new, segment.text)
            spans = None if spans is None else shift(spans, new)
            before, text = text, apply(text, new)
            is_changed = text != before
        self.passes = max(passes, self.passes)
        return patches

    def _opens_all(self, selection: list[Span] | None) -> bool:
        """Whether a selection in which nothing was changed is to be opened as a whole."""
        is_told = self.instruction is not None and self.options.strength is None
        return is_told and selection is not None

    def _pass(
        self, segment: Segment, selection: list[Span] | None, threshold: float
    ) -> Generator[Draft, None, list[Patch]]:
        tokenizer = self.engine.tokenizer
        ids = encode_apart(tokenizer, segment.text, selection or [])
        if tokenizer.decode_bytes(ids) != segment.text.encode():
            raise CheckpointError("the tokenizer does not give the text back as it was")
        places = character_places(tokenizer, ids)
        allowed = allowed_tokens(places, selection)
        tokens = Tokens(tuple(ids), places, allowed)
        windows = Windows(self.engine, segment, tokens, threshold, self.manner)
        yield from windows.run()
        self.steps += windows.steps
        self.canvases += windows.canvases
        return windows.patches
