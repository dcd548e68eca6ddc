"""A rule of one's own: each step accepts a fixed number of positions, the likeliest first.

    dgemma generate "Write a short story about a dog." --rule examples.own_rule:FixedCount
    dgemma eval --tasks sudoku --limit 20 --rule examples.own_rule:FixedCount
    python -m examples.own_rule

A canvas of 128 tokens then takes 16 steps, however sure the model is. The released rule takes fewer
where the model is sure, and more where it is not.
"""

from dataclasses import dataclass

import torch

from dgemma import Canvas, Decision, Engine, PositionStats, SamplingParams


@dataclass(frozen=True, slots=True)
class FixedCount:
    """Accept so many more positions in each step, and never take one back."""

    count: int = 8

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision:
        open_L = ~canvas.accepted_L  # pinned positions count as kept
        number = min(self.count, int(open_L.sum()))
        best = stats.top_p_T.masked_fill(~open_L, -1).topk(number).indices
        new_L = torch.zeros_like(open_L).index_fill(0, best, True)
        tokens_L = torch.where(new_L, stats.draw_T, canvas.tokens_L)
        accepted_L = canvas.accepted_L | new_L
        guess_L = torch.where(accepted_L, tokens_L, stats.top_T)
        return Decision(accepted_L, tokens_L, guess_L, converged=accepted_L.all())


def main() -> None:
    prompt = "Change cat to dog.\n\nThe cat sat on the mat. The cat was happy."
    for rule in (None, FixedCount()):
        engine = Engine.load("nano", rule=rule)
        done = engine.generate(prompt, SamplingParams(seed=1))
        print(f"{type(engine.sampler.rule).__name__}: {done.steps} steps: {done.text}")


if __name__ == "__main__":
    main()
