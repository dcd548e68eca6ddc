"""Where tokens go when kernels are checked: noted in their run, and the same in the one beside it.

A router that is almost undecided may choose otherwise for rounding alone, and then the whole row is
another: with 8 experts, of which 2 are taken, by up to 0.9 of it, and no bound could tell that from
a fault. So the definition is run with the choices that were made with the kernels, and all rows can
be held against each other. The choices themselves are held against the definition's scores: what
was chosen may be worth a little less to it than what it would have chosen, but not more.

T tokens of a pass, E experts, K of them per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.ops.fused import Joined, Routed
from dgemma.stack import Fused


class Routes:
    """The choices of a run, pass by pass, and what they lack by the scores of another.

    They are noted once, and given once.
    """

    def __init__(self) -> None:
        self.chosen: list[Tensor] = []
        self.lacks: list[Tensor] = []

    def note(self, layer: Fused, joined: Joined, found: Routed) -> Routed:
        """A stack's `watch` while kernels run.

        Nothing is launched here: kernels that begin before the last has ended are checked as such.
        """
        self.chosen.append(found.ids_TK)
        return found

    def are_choices(self, num_experts: int) -> bool:
        """Whether every token goes to experts that exist, and to none of them twice."""
        ids_TK = torch.cat(self.chosen).sort(-1).values
        is_new = (ids_TK[:, 1:] > ids_TK[:, :-1]).all()
        return bool(is_new & (ids_TK >= 0).all() & (ids_TK < num_experts).all())

    def give(self, layer: Fused, joined: Joined, found: Routed) -> Routed:
        """A stack's `watch` while the same passes run by definition."""
        ids_TK = self.chosen[len(self.lacks)].long()
        scores_TE = F.linear(joined.router_TD, layer.router.weight_ED).float()
        self.lacks.append(_lack(scores_TE, ids_TK))
        share_TK = scores_TE.gather(1, ids_TK).softmax(-1)
        return Routed(ids_TK, share_TK * layer.router.scale_E[ids_TK])

    def lack_T(self) -> Tensor:
        return torch.cat(self.lacks)


def _lack(scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """How far the worst choice of a token is below the worst that would have been right, [T].

    In units of the scores' deviation over the experts.
    """
    right_T = scores_TE.topk(ids_TK.shape[1]).values[:, -1]
    worst_T = scores_TE.gather(1, ids_TK).amin(-1)
    return (right_T - worst_T) / scores_TE.std(-1, correction=0).clamp(min=1e-6)
