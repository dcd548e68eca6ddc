"""OpenAI's `temperature` on a canvas: 1 is the model's own sampler, 0 draws the likeliest token.

A canvas is heated by its sampler, from first to last step, and `temperature` multiplies that. The
heat also sets how sure a position looks, so a small one would settle a canvas long before its time:
near zero the heat is left alone and the draw itself is made the argmax.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgemma.canvas import Canvas
    from dgemma.ops.row_stats import RowStats
    from dgemma.sampler import Decision, Rule, Sampler

COLD = 0.05  # temperatures below it are zero; editors send 0.01


@dataclass(frozen=True, slots=True)
class Likeliest:
    """A rule in which every draw is the likeliest token."""

    rule: "Rule"

    def decide(self, canvas: "Canvas", stats: "RowStats") -> "Decision":
        return self.rule.decide(canvas, replace(stats, draw_T=stats.top_T))


def tempered(sampler: "Sampler", temperature: float) -> "Sampler":
    """The sampler at a temperature."""
    if temperature < COLD:
        return replace(sampler, rule=Likeliest(sampler.rule))
    return replace(
        sampler,
        first_heat=sampler.first_heat * temperature,
        last_heat=sampler.last_heat * temperature,
    )
