"""Continuous batching of the teacher: texts in slots of its KV cache, each replaced when it ends.

Samples at temperature 1 with min-p 0.05.

B slots, S tokens of a slot, V vocabulary, P tokens of a prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.backends.cuda.graphs import Graphs
from recipes.nano.teacher.qwen import Qwen

MIN_P = 0.05  # a sampled token's least probability, as a fraction of the likeliest one's
PROMPT_MULTIPLE = 64  # prompts are padded to a multiple of this, so that few shapes occur


@dataclass(frozen=True, slots=True)
class TeacherRequest:
    """A tokenized prompt, which ends with the prefix of the reply."""

    number: int
    prefix: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TeacherReply:
    """The tokens that were generated."""

    request: TeacherRequest
    ids: tuple[int, ...]
    ended: bool  # by a stop token, not by the limit


class TeacherBatch:
    """The texts in progress. `add`, `step` and `take_finished` change it."""

    def __init__(self, model: Qwen, stop_ids: Sequence[int], max_tokens: int) -> None:
        self.model, self.stop_ids, self.max_tokens = model, frozenset(stop_ids), max_tokens
        num_slots, max_len = len(model.slots_B), len(model.positions_S)
        device = model.slots_B.device
        self.requests: list[TeacherRequest | None] = [None] * num_slots
        self.tokens_BS = torch.zeros(num_slots, max_len, dtype=torch.long, device=device)
        self.last_B = torch.zeros(num_slots, dtype=torch.long, device=device)  # newest token
        self.limit_B = torch.zeros_like(self.last_B)  # position of the last token allowed
        self.done_B = torch.ones(num_slots, dtype=torch.bool, device=device)
        vocab_size = len(model.weights.lm_head_VD)
        self.is_stop_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_stop_V[torch.tensor(sorted(stop_ids), device=device)] = True
        self.graphs = Graphs(device)

    @property
    def free_slots(self) -> list[int]:
        return [slot for slot, request in enumerate(self.requests) if request is None]

    @torch.inference_mode()
    def add(self, requests: Sequence[TeacherRequest]) -> None:
        """Prefill requests into free slots."""
        slots, device = self.free_slots[: len(requests)], self.last_B.device
        lengths_B = torch.tensor([len(request.ids) for request in requests])
        padded = -(-int(lengths_B.max()) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
        width = min(padded, self.tokens_BS.shape[1])
        prompts_BP = torch.zeros(len(requests), width, dtype=torch.long)
        for row_P, request in zip(prompts_BP, requests, strict=True):
            row_P[: len(request.ids)] = torch.tensor(request.ids)
        slots_B, lengths_B = torch.tensor(slots, device=device), lengths_B.to(device)
        prompts_BP = prompts_BP.to(device)
        self.model.prefill(prompts_BP, slots_B)
        self.tokens_BS[slots_B, :width] = prompts_BP
        self.last_B[slots_B] = lengths_B - 1  # decoded again, since a step needs its logits
        final = self.tokens_BS.shape[1] - 1
        self.limit_B[slots_B] = (lengths_B - 1 + self.max_tokens).clamp(max=final)
        self.done_B[slots_B] = False
        for slot, request in zip(slots, requests, strict=True):
            self.requests[slot] = request

    def step(self) -> None:
        """Generate one token for every text in progress."""
        self.graphs.run("step", self._step)

    @torch.inference_mode()
    def _step(self) -> None:
        newest_B1 = self.tokens_BS.gather(1, self.last_B[:, None])
        sampled_B = sample(self.model.decode(newest_B1[:, 0], self.last_B))
        next_B = torch.where(self.done_B, self.last_B, self.last_B + 1)
        written_B = torch.where(self.done_B, newest_B1[:, 0], sampled_B)
        self.tokens_BS.scatter_(1, next_B[:, None], written_B[:, None])
        self.last_B.copy_(next_B)
        self.done_B.logical_or_(self.is_stop_V[sampled_B] | (next_B >= self.limit_B))

    def take_finished(self) -> list[TeacherReply]:
        """Return the finished texts and free their slots."""
        done, last = self.done_B.tolist(), self.last_B.tolist()
        finished = [
            (slot, request)
            for slot, request in enumerate(self.requests)
            if request is not None and done[slot]
        ]
        rows_BS = self.tokens_BS[[slot for slot, _ in finished]].tolist()
        replies = []
        for (slot, request), row in zip(finished, rows_BS, strict=True):
            self.requests[slot] = None
            ids = row[len(request.ids) : last[slot] + 1]
            ended = ids[-1] in self.stop_ids
            replies.append(TeacherReply(request, tuple(ids[:-1] if ended else ids), ended))
        return replies


def sample(logits_BV: Tensor) -> Tensor:
    """Sample a token for each row by min-p."""
    logits_BV = logits_BV.float()
    threshold_B1 = logits_BV.amax(-1, keepdim=True) + math.log(MIN_P)
    gumbel_BV = torch.empty_like(logits_BV).exponential_().log_().neg_()
    return (logits_BV + gumbel_BV).masked_fill_(logits_BV < threshold_B1, -math.inf).argmax(-1)
