"""Texts that are written beside one another, each at a place of the teacher's cache.

A place whose text has ended goes on to the next request. Draws: heat 1, of tokens that are at least
a twentieth as likely as the likeliest.

B places, S tokens that a place holds, V vocabulary, P tokens of a prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.backends.cuda.capture import Graphs
from recipes.teacher.qwen import Qwen

LEAST_SHARE = 0.05  # of the likeliest token's probability that a drawn one must have
ROUNDED = 64  # prompts that are encoded together are as long as the longest, rounded up


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    begin: str  # the first words of the reply, which the prompt ends with
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    request: Request
    ids: tuple[int, ...]
    ended: bool  # by itself, not by the limit


class Desk:
    """What stands at each place. `seat`, `advance` and `take` change it."""

    def __init__(self, model: Qwen, ends: Sequence[int], longest: int) -> None:
        self.model, self.ends, self.longest = model, frozenset(ends), longest
        places, room = len(model.at_B), len(model.room_S)
        device = model.at_B.device
        self.requests: list[Request | None] = [None] * places
        self.tokens_BS = torch.zeros(places, room, dtype=torch.long, device=device)
        self.at_B = torch.zeros(places, dtype=torch.long, device=device)  # of the newest token
        self.limit_B = torch.zeros_like(self.at_B)  # of the last one there may be
        self.over_B = torch.ones(places, dtype=torch.bool, device=device)
        self.is_end_V = torch.zeros(len(model.weights.head_VD), dtype=torch.bool, device=device)
        self.is_end_V[torch.tensor(sorted(ends), device=device)] = True
        self.graphs = Graphs(device)

    @property
    def free(self) -> list[int]:
        return [place for place, request in enumerate(self.requests) if request is None]

    @torch.inference_mode()
    def seat(self, requests: Sequence[Request]) -> None:
        """Begin texts at free places."""
        places, device = self.free[: len(requests)], self.at_B.device
        lengths_B = torch.tensor([len(request.ids) for request in requests])
        rounded = -(-int(lengths_B.max()) // ROUNDED) * ROUNDED
        width = min(rounded, self.tokens_BS.shape[1])
        prompts_BP = torch.zeros(len(requests), width, dtype=torch.long)
        for row_P, request in zip(prompts_BP, requests, strict=True):
            row_P[: len(request.ids)] = torch.tensor(request.ids)
        places_B, lengths_B = torch.tensor(places, device=device), lengths_B.to(device)
        prompts_BP = prompts_BP.to(device)
        self.model.encode(prompts_BP, places_B)
        self.tokens_BS[places_B, :width] = prompts_BP
        self.at_B[places_B] = lengths_B - 1  # a step reads the last token, since it has the logits
        last = self.tokens_BS.shape[1] - 1
        self.limit_B[places_B] = (lengths_B - 1 + self.longest).clamp(max=last)
        self.over_B[places_B] = False
        for place, request in zip(places, requests, strict=True):
            self.requests[place] = request

    def advance(self) -> None:
        """A token more for every text that has not ended."""
        self.graphs.run("advance", self._advance)

    @torch.inference_mode()
    def _advance(self) -> None:
        newest_B1 = self.tokens_BS.gather(1, self.at_B[:, None])
        drawn_B = draw(self.model.step(newest_B1[:, 0], self.at_B))
        next_B = torch.where(self.over_B, self.at_B, self.at_B + 1)
        written_B = torch.where(self.over_B, newest_B1[:, 0], drawn_B)
        self.tokens_BS.scatter_(1, next_B[:, None], written_B[:, None])
        self.at_B.copy_(next_B)
        self.over_B.logical_or_(self.is_end_V[drawn_B] | (next_B >= self.limit_B))

    def take(self) -> list[Reply]:
        """Texts that have ended; their places are free then."""
        over, ends = self.over_B.tolist(), self.at_B.tolist()
        done = [
            (place, request)
            for place, request in enumerate(self.requests)
            if request is not None and over[place]
        ]
        rows_BS = self.tokens_BS[[place for place, _ in done]].tolist()
        replies = []
        for (place, request), row in zip(done, rows_BS, strict=True):
            self.requests[place] = None
            ids = row[len(request.ids) : ends[place] + 1]
            ended = ids[-1] in self.ends
            replies.append(Reply(request, tuple(ids[:-1] if ended else ids), ended))
        return replies


def draw(logits_BV: Tensor) -> Tensor:
    """A token for each row, of those that are likely enough."""
    logits_BV = logits_BV.float()
    least_B1 = logits_BV.amax(-1, keepdim=True) + math.log(LEAST_SHARE)
    gumbel_BV = torch.empty_like(logits_BV).exponential_().log_().neg_()
    return (logits_BV + gumbel_BV).masked_fill_(logits_BV < least_B1, -math.inf).argmax(-1)
