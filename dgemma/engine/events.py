"""Events that a request reports. Closing the stream of events cancels the request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgemma.text.reply import Reply, Text

if TYPE_CHECKING:
    from dgemma.diffusion.canvas import Canvas
    from dgemma.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The canvas after a step. Nothing in it is final."""

    ids: tuple[int, ...]  # on the canvas: accepted tokens, and noise
    tokens: tuple[str, ...]  # each id's own text; a control token has none
    guess: tuple[int, ...]  # would be committed now
    guess_tokens: tuple[str, ...]
    entropy: tuple[float, ...]  # nats
    kept: tuple[bool, ...]  # accepted in this step, not renoised
    pinned: tuple[bool, ...]
    block: int
    step: int

    @classmethod
    def of(cls, canvas: "Canvas", block: int, tokenizer: "Tokenizer") -> "Draft":
        text = tokenizer.token_text
        ids, guess = canvas.tokens_L.tolist(), canvas.guess_L.tolist()
        return cls(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Tokens that a reply has committed: those of a finished canvas, or one AR token.

    Reported before their text, if `SamplingParams.commits` asks for it. Given back as
    `SamplingParams.committed`, all of them continue the reply in another engine.
    """

    ids: tuple[int, ...]  # of a canvas, with what follows a stop
    logprob: float | None = None  # of an AR token
    steps: int = 1  # that it took, and...
    retries: int = 0
    is_converged: bool = True
    fault: str = ""  # of the canvas, after all retries


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A canvas failed the output check and is done again with the next noise."""

    block: int
    reason: str
    retry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a generation: its reply and its cost."""

    reply: Reply
    ids: tuple[int, ...]  # the reply's tokens
    prompt_tokens: int
    blocks: int
    steps: int
    seconds: float
    seed: int
    mode: str = "diffusion"
    finish: str = "stop"  # or stop_string, length, budget (time or steps ran out), fault
    stop_string: str = ""  # that ended it
    reused_tokens: int = 0  # of the prompt, found in the prefix cache
    image_tokens: int = 0  # of the prompt, soft tokens of pictures
    notes: tuple[str, ...] = ()  # pictures that were shrunk so much that small text is lost
    unconverged_blocks: int = 0  # blocks that ran out of steps
    retries: int = 0
    fault: str = ""  # of the last canvas after all retries; empty: none
    # Character of the text from which on a limit decided and not the model: constrained text
    # was brought to its shortest end. None: nowhere.
    forced_from: int | None = None
    remaining_entropy: float = 0.0  # nats left on a canvas that the budget cut short
    logprobs: tuple[float, ...] = ()  # causal log-probability of each token written in AR
    prefill_seconds: float = 0.0
    result: Any = None  # of a program that ends with this

    @property
    def text(self) -> str:
        return self.reply.answer

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


Event = Draft | Text | Committed | Retry | Done
