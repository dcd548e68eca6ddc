"""Make a tiny model if there is none yet, ask it three questions, and show each canvas settling.

    python -m examples.demo [DIRECTORY]

The model knows its answers by heart: what is shown is the machinery, not a language model.
"""

import sys
import time
from pathlib import Path

from dgemma import Done, Draft, Engine, Options, Text
from dgemma.cli.show import CanvasView, printable
from examples.tiny_model import ANSWERS, make_checkpoint

PAUSE = 0.25  # seconds a canvas stays on a screen


def show(engine: Engine, question: str) -> None:
    """Answer one question; on a terminal the canvas moves, elsewhere each step is a line."""
    print(f"\n> {question}")
    with CanvasView() as view:
        for event in engine.stream(question, Options(seed=3, drafts=True)):
            if isinstance(event, Draft) and view.is_live:
                view.draw(event)
                time.sleep(PAUSE)
            elif isinstance(event, Draft):
                text = "".join(map(printable, event.tokens)).replace("\n", "/")
                print(f"  block {event.block + 1} step {event.step:2}  {text}")
            elif isinstance(event, Text) and view.is_live:
                view.promise(event)
            elif isinstance(event, Done):
                done = event
    print(done.text)
    print(f"  [{done.tokens} tokens, {done.steps} steps, {done.seconds:.2f} s]")


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "out/tiny")
    if not (directory / "model.safetensors").exists():
        print("Making a tiny model that learns three answers by heart (under a minute)...")
        make_checkpoint(directory)
    engine = Engine.load(directory, device="cpu", dtype="float32")
    for question in ANSWERS:
        show(engine, question)
    done = engine.generate(list(ANSWERS)[1], Options(mode="ar"))
    print(f"\nThe same weights, one token at a time:\n{done.text}")
    print(f"  [{done.tokens} tokens, {done.steps} steps, {done.seconds:.2f} s]")
    print(f'\nAsk it yourself: .venv/bin/dgemma generate "Write a haiku." --show -m {directory}')


if __name__ == "__main__":
    main()
