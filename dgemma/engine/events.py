"""What a request reports on its way. Closing the stream of events cancels the request."""

from dataclasses import dataclass

from dgemma.text.reply import Reply


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
class Retry:
    """A canvas went wrong and is done again with the next noise."""

    block: int
    reason: str
    retry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a request, and what it took."""

    reply: Reply
    ids: tuple[int, ...]  # the reply's tokens
    finish: str  # stop, stop_string, length, budget (time or steps ran out) or fault
    mode: str
    prompt_tokens: int
    reused_tokens: int  # of the prompt, found in the cache
    blocks: int
    steps: int
    unsettled_blocks: int  # blocks that ran out of steps
    retries: int
    fault: str  # what was wrong with the last canvas after all retries; empty: nothing
    remaining_entropy: float  # nats left on a canvas that the budget cut short
    logprobs: tuple[float, ...]  # causal log-probability of each token written in AR
    seconds: float
    prefill_seconds: float
    seed: int

    @property
    def text(self) -> str:
        return self.reply.answer

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


Event = Draft | Text | Retry | Done
