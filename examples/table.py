"""Write a Markdown table by grammar: two columns, three to five rows, the second column a number.

    python -m examples.table [MODEL]

The grammar is in Lark's notation, with `start` as its first rule. Head and bars are pinned; the
model samples the cells.
"""

import re
import sys

from dgemma import Engine, SamplingParams

GRAMMAR = r"""
start: HEAD row{3,5}
HEAD: "| animal | legs |\n| --- | ---: |\n"
row: "| " NAME " | " LEGS " |\n"
NAME: /[a-z]+( [a-z]+)?/ & /.{3,12}/
LEGS: /[0-9]|[1-9][0-9]/
"""
TABLE = re.compile(
    r"\| animal \| legs \|\n\| --- \| ---: \|\n(\| [a-z ]{3,12} \| \d{1,2} \|\n){3,5}"
)


def main() -> None:
    engine = Engine.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
    prompt = "Make a table of animals and the number of their legs."
    for mode in ("diffusion", "ar"):
        params = SamplingParams(mode=mode, max_tokens=200, seed=1)
        done = engine.generate(prompt, params, grammar=GRAMMAR)
        assert TABLE.fullmatch(done.text), done.fault
        print(done.text)
        print(f"{done.mode}: {done.tokens} tokens, {done.steps} steps, {done.seconds:.1f} s\n")


if __name__ == "__main__":
    main()
