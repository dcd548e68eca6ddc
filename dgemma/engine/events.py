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

    ids: tuple[int, ...]  # tokens of the canvas: accepted ones and noise
    tokens: tuple[str, ...]  # text of each id; empty for control tokens
    guess: tuple[int, ...]  # argmax, committed if the canvas ends now
    guess_tokens: tuple[str, ...]
    entropy: tuple[float, ...]  # nats
    accepted: tuple[bool, ...]  # in this step; the others were renoised
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
            accepted=tuple(canvas.accepted_L.tolist()),
            pinned=tuple(canvas.pinned_L.tolist()),
            block=block,
            step=canvas.num_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Tokens committed to a reply: those of a finished canvas, or one AR token.

    Reported before their text if `SamplingParams.commits` is set. Passed back as
    `SamplingParams.committed`, they let another engine continue the reply.
    """

    ids: tuple[int, ...]  # all tokens of a canvas, also those after a stop
    logprob: float | None = None  # AR only
    steps: int = 1  # denoising steps since the last commit
    retries: int = 0
    is_converged: bool = True
    fault: str = ""  # output check of the canvas after all retries


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A canvas failed the output check and is denoised again with new noise."""

    block: int
    reason: str
    retry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a generation: reply and cost."""

    reply: Reply
    ids: tuple[int, ...]  # the reply's tokens
    prompt_tokens: int
    blocks: int
    steps: int
    seconds: float
    seed: int
    mode: str
    finish: str = "stop"  # or stop_string, length, budget (time or steps ran out), fault
    stop_string: str = ""  # the stop string that was found
    reused_tokens: int = 0  # prompt tokens found in the prefix cache
    image_tokens: int = 0  # soft tokens of pictures in the prompt
    notes: tuple[str, ...] = ()  # warnings, such as pictures shrunk until small text is lost
    unconverged_blocks: int = 0  # blocks that ran out of steps
    retries: int = 0
    fault: str = ""  # output check of the last canvas after all retries
    # Character from which tokens were forced by a limit, not chosen by the model: constrained text
    # is closed by its shortest completion. None: nowhere.
    forced_from: int | None = None
    remaining_entropy: float = 0.0  # in nats, of a canvas cut short by the budget
    logprobs: tuple[float, ...] = ()  # causal log-probability of each AR token
    prefill_seconds: float = 0.0
    result: Any = None  # result of the program

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
