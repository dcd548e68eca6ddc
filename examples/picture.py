"""Draw docs/settling.svg: one canvas of the tiny model, step by step.

python -m examples.picture MODEL_DIRECTORY OUTPUT.svg
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from dgemma import Draft, Engine
from dgemma.cli.show import paint
from dgemma.engine import SamplingParams
from examples.tiny_model import ANSWERS

WIDTH = 66


def main() -> None:
    model, output = sys.argv[1:]
    engine = Engine.load(model, device="cpu", dtype="float32")
    question = list(ANSWERS)[1]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for event in engine.stream(question, SamplingParams(seed=3, drafts=True)):
        if isinstance(event, Draft) and event.block == 0:
            console.print(paint(event), soft_wrap=False)
            console.print()
    svg = console.export_svg(title=f'dgemma generate "{question}" --show')
    # The viewer's own monospace font does; the picture fetches nothing.
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.DOTALL)
    Path(output).write_text(svg.replace("Fira Code", "monospace"), encoding="utf-8")


if __name__ == "__main__":
    main()
