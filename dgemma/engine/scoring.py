"""Tasks that read probabilities: prefill of shared prefixes, causal and canvas scores, next tokens.

V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dgemma.backends.base import CanvasQuery, ForwardInput, ForwardOutput, TokenDraw
from dgemma.diffusion.canvas import NO_PINS, Noise
from dgemma.diffusion.denoise import start
from dgemma.diffusion.sampler import Sampler
from dgemma.engine.image_features import chunk_end
from dgemma.engine.request import Opened, Prefix, Task
from dgemma.errors import PromptTooLong, UsageError
from dgemma.model.kv_cache import KVCache
from dgemma.text.chat import Prompt

if TYPE_CHECKING:
    from dgemma.engine.core import EngineCore

MAX_TOKENS_PER_PASS = 512  # tokens to score in a pass
ONE_STEP = Sampler(max_denoising_steps=1, t_max=1.0, t_min=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probabilities of a text's tokens, in nats."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    best: tuple[tuple[int, float], ...] = ()  # argmax at each position, with its log-probability

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        return self.total / len(self.logprobs)


class Prefill(Task):
    """Computes a `Prefix` in chunks, starting from the prefix cache."""

    has_long_commit = True

    def __init__(self, prompt: Prompt | Sequence[int]) -> None:
        if not isinstance(prompt, Prompt):
            prompt = Prompt(text="", ids=tuple(prompt))
        if not prompt.ids:
            raise UsageError("the prompt is empty; give at least one token")
        super().__init__(len(prompt.ids))
        self.prompt, self.ids = prompt, prompt.ids
        self._opened: Opened | None = None  # set between `start` and `close`

    def start(self, engine: "EngineCore", deadline: float) -> None:
        limit = engine.model.config.max_position_embeddings
        if len(self.ids) > limit:
            raise PromptTooLong(
                f"the prompt has {len(self.ids)} tokens, but the context holds {limit}; shorten it"
            )
        cache = engine.open_cache(self.prompt.cache_ids, len(self.ids))
        self._opened = Opened(cache, engine)
        self._finish_if_cached(cache)

    def _finish_if_cached(self, cache: KVCache) -> None:
        if cache.length >= len(self.ids) - 1:
            self.finish(Prefix(self.ids, cache, self.prompt.cache_ids))

    def inputs(self) -> list[ForwardInput]:
        assert self._opened is not None, "a prefill has a cache from start to close"
        (cache, engine), images = self._opened, self.prompt.images
        begin = cache.length
        end = min(chunk_end(begin, engine.chunk, images), len(self.ids) - 1)
        rows = engine.images.rows(images, begin, end) if engine.images is not None else ()
        return [ForwardInput(cache=cache, tokens=self.ids[begin:end], images=rows)]

    def process(self, inputs: Sequence[ForwardInput], outputs: Sequence[ForwardOutput]) -> None:
        (given,) = inputs
        self._finish_if_cached(given.cache)
        if self.is_done:
            given.cache.checkpoint()

    def close(self, engine: "EngineCore") -> None:
        """Store what a cancelled prefill has computed; the prefix of a finished one is the
        program's.
        """
        opened, self._opened = self._opened, None
        if opened is not None and not self.is_done and opened.cache.is_consistent:
            cache = opened.cache
            engine.prefixes.keep(self.prompt.cache_ids[: cache.length], cache)


class Scoring(Task):
    """Causal log-probabilities of texts after a prefix. Texts share passes; long ones are split."""

    prefix: Prefix
    has_long_commit = True

    def __init__(self, prefix: Prefix, texts: Sequence[Sequence[int]]) -> None:
        if not texts or not all(texts):
            raise UsageError("scoring needs texts of at least one token each")
        limit = prefix.cache.config.max_position_embeddings
        longest = len(prefix.ids) + max(map(len, texts))
        if longest > limit:
            raise PromptTooLong(
                f"prompt and text have {longest} tokens, but the context holds {limit}; shorten one"
            )
        super().__init__(sum(map(len, texts)), prefix)
        self.texts = [tuple(text) for text in texts]
        self.logprobs: list[list[float]] = [[] for _ in texts]
        self.best: list[list[tuple[int, float]]] = [[] for _ in texts]
        self.caches: dict[int, KVCache] = {}  # of unfinished texts

    def start(self, engine: "EngineCore", deadline: float) -> None:
        for index, text in enumerate(self.texts):
            self.caches[index] = self.prefix.fork(len(text))

    def _next(self) -> list[tuple[int, int]]:
        """Return text indices and token counts of the next pass."""
        num_left, counts = MAX_TOKENS_PER_PASS, []
        for index in self.caches:
            count = min(num_left, len(self.texts[index]) - len(self.logprobs[index]))
            if count:
                counts.append((index, count))
            num_left -= count
        return counts

    def inputs(self) -> list[ForwardInput]:
        inputs = []
        for index, count in self._next():
            text, begin = self.texts[index], len(self.logprobs[index])
            tokens = (self.prefix.ids[-1], *text)[begin : begin + count]
            targets = text[begin : begin + count]
            cache = self.caches[index]
            inputs.append(ForwardInput(cache=cache, tokens=tokens, targets=targets))
        return inputs

    def process(self, inputs: Sequence[ForwardInput], outputs: Sequence[ForwardOutput]) -> None:
        for (index, _), output in zip(self._next(), outputs, strict=True):
            self.logprobs[index] += output.logprobs
            self.best[index] += output.best
            if len(self.logprobs[index]) == len(self.texts[index]):
                del self.caches[index]
        if not self.caches:
            rows = zip(self.texts, self.logprobs, self.best, strict=True)
            self.finish([Score(ids=i, logprobs=tuple(p), best=tuple(b)) for i, p, b in rows])

    def close(self, engine: "EngineCore") -> None:
        self.caches.clear()


class CanvasScoring(Task):
    """Log-probabilities of canvas tokens in one denoising pass without self-conditioning."""

    prefix: Prefix

    def __init__(self, prefix: Prefix, queries: Sequence[CanvasQuery]) -> None:
        super().__init__(sum(len(query.tokens) + 1 for query in queries), prefix)
        self.queries = queries
        self.canvases: list[ForwardInput] = []

    def start(self, engine: "EngineCore", deadline: float) -> None:
        vocab, device = engine.model.config.vocab_size, engine.device
        for query in self.queries:
            tokens = query.tokens
            noise = Noise().block(0, 1, len(tokens), vocab, device).starting_from(tokens)
            state, cache = start(ONE_STEP, noise, NO_PINS), self.prefix.fork(len(tokens))
            last = self.prefix.ids[-1:]
            self.canvases.append(ForwardInput(cache=cache, tokens=last, state=state, query=query))

    def inputs(self) -> list[ForwardInput]:
        return list(self.canvases)

    def process(self, inputs: Sequence[ForwardInput], outputs: Sequence[ForwardOutput]) -> None:
        self.finish([output.canvas_score for output in outputs])

    def close(self, engine: "EngineCore") -> None:
        self.canvases.clear()


class NextTokens(Task):
    """The most likely next tokens after a prefix in causal mode, sorted."""

    prefix: Prefix

    def __init__(self, prefix: Prefix, count: int) -> None:
        super().__init__(1, prefix)
        self.count = count
        self.caches: list[KVCache] = []  # one between `start` and `close`

    def start(self, engine: "EngineCore", deadline: float) -> None:
        self.caches.append(self.prefix.fork(0))

    def inputs(self) -> list[ForwardInput]:
        (cache,), draw = self.caches, TokenDraw()
        last = self.prefix.ids[-1:]
        return [ForwardInput(cache=cache, tokens=last, draw=draw, needs_logits=True)]

    def process(self, inputs: Sequence[ForwardInput], outputs: Sequence[ForwardOutput]) -> None:
        logits_V = outputs[0].logits_V
        assert logits_V is not None
        self.finish(logits_V.topk(min(self.count, len(logits_V))).indices.tolist())

    def close(self, engine: "EngineCore") -> None:
        self.caches.clear()


def label_probabilities(scores: Sequence[Score]) -> list[float]:
    """Return the probability of each text, given that one of them is the answer."""
    totals = torch.tensor([score.total for score in scores], dtype=torch.float64)
    return totals.softmax(-1).tolist()
