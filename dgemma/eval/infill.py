"""Tasks with a hole of known length: held-out lines of code, MBPP, HumanEval single-line infilling.

Diffusion fills a canvas that sees both sides; AR continues from the left. No chat: the KV cache
holds the text before the hole, the canvas is the hole followed by pinned tokens of the text after
it, as many as fit. If the text ends within the canvas, the rest is the end token, as in training.

HumanEval's tests run generated code in a subprocess. A fresh interpreter (`python -I`, no
environment, an empty directory that is removed afterwards) sets limits before it reads the program:
CPU seconds, memory, no file writes, no processes; it also removes functions that delete, move and
start things. It is killed on timeout. After the last line the interpreter prints a random word that
the program does not know, so exiting early is a failure. This prevents accidents of a small model's
code. It is not a security boundary: the program can still read files and open connections. Evaluate
models that you do not trust in a container.
"""

import ast
import secrets
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dgemma.engine import Engine, SamplingParams
from dgemma.engine.generation import Generation
from dgemma.eval.answers import EvalPrompt, generate_all, show_progress
from dgemma.eval.data import Data, MissingData, read_jsonl, spread
from dgemma.eval.measure import Case, Measure
from dgemma.eval.spans import body_lines
from dgemma.programs.infill.candidates import finished_canvas
from dgemma.programs.infill.document import lay_out
from dgemma.programs.infill.healing import Hole
from dgemma.programs.infill.infill import FillParams, end_id, fill
from dgemma.text.chat import Prompt

NEWLINE = "\n"
TASK = "infill"
PACKAGE_FILE, PROBLEM_FILE, MBPP_FILE = "infill.jsonl", "problems.jsonl", "mbpp.jsonl"
LIMIT = 1000  # cases per section
PROGRAM_LIMIT = 200  # holes filled one by one by the infill program
MIN_TOKENS = 3  # shortest hole in tokens
MBPP_TEST = range(11, 511)  # task_ids, as the set's authors split it
MAX_MBPP_CHARACTERS = 1600  # of a solution, as of the other held-out functions
MAX_MBPP_HOLES = 4  # holes per problem
HUMANEVAL = "humaneval_infill"
HUMANEVAL_FILE = "HumanEval-SingleLineInfilling.jsonl.gz"


@dataclass(frozen=True, slots=True)
class HoleCase:
    """A text with one hole, and the original text of the hole."""

    prefix: str
    middle: str
    suffix: str

    @property
    def is_line(self) -> bool:
        """True if the hole ends with its line, so that a line break ends an answer to it."""
        return NEWLINE not in self.middle.rstrip(NEWLINE)

    def with_text(self, text: str) -> str:
        """Return the document with `text` in the hole."""
        return self.prefix + text + self.suffix


@dataclass(frozen=True, slots=True)
class HoleFill:
    """The text that was written into a hole."""

    text: str
    steps: int
    converged: bool


def fill_canvases(
    engine: Engine, holes: Sequence[HoleCase], seed: int, label: str
) -> list[HoleFill | None]:
    """Denoise one canvas per hole, with its original length; None if no canvas holds it."""
    sizes = [len(engine.tokenizer.encode(hole.middle)) for hole in holes]
    fitting = [i for i, n in enumerate(sizes) if 0 < n <= engine.model.config.canvas_length]
    tasks = [_canvas(engine, holes[i], sizes[i], seed + i) for i in fitting]
    filled: list[HoleFill | None] = [None] * len(holes)
    for count, (number, _) in enumerate(engine.as_completed(tasks), start=1):
        index, task = fitting[number], tasks[number]
        ids, converged = finished_canvas(task)
        text = engine.tokenizer.decode(ids[: sizes[index]], skip_control=True)
        filled[index] = HoleFill(text, task.progress.steps, converged)
        show_progress(label, count, len(tasks))
    return filled


def _canvas(engine: Engine, hole: HoleCase, size: int, seed: int) -> Generation:
    length = engine.model.config.canvas_length
    after = Hole(after=tuple(engine.tokenizer.encode(hole.suffix)))
    params = SamplingParams(
        max_tokens=length,
        pins=lay_out([after], [size], length, end_id(engine)).pins,
        seed=seed,
        retries=0,
        max_blocks=1,
    )
    return engine.generation(Prompt(text=hole.prefix, ids=_prefix(engine, hole, length)), params)


def _prefix(engine: Engine, hole: HoleCase, num_new: int) -> tuple[int, ...]:
    """Return bos and as much of the prefix, from its end, as the context holds."""
    capacity = engine.model.config.max_position_embeddings - num_new - 1
    ids = engine.tokenizer.encode(hole.prefix)
    return (engine.model.config.bos_token_id, *ids[max(0, len(ids) - capacity) :])


def fill_by_program(
    engine: Engine, holes: Sequence[HoleCase], seed: int, label: str
) -> list[HoleFill]:
    """Fill each hole by `fill`, given its length and whether it is a line.

    Several canvases and causal candidates compete, one hole after the other, as for a user.
    """
    filled: list[HoleFill] = []
    for number, hole in enumerate(holes):
        size = len(engine.tokenizer.encode(hole.middle))
        params = FillParams(lengths=(size,), single_line=hole.is_line, seed=seed + number)
        result = fill(engine, [hole.prefix, hole.suffix], params)
        [answer] = result.holes
        filled.append(HoleFill(answer.text, result.steps, answer.converged))
        show_progress(label, number + 1, len(holes))
    return filled


def continue_prefixes(engine: Engine, holes: Sequence[HoleCase], label: str) -> list[str | None]:
    """Continue each prefix in AR, greedily: to the end of the line if the hole is one.

    Otherwise as many tokens as the hole had. A line may take twice its tokens and eight.
    """
    prompts = []
    for hole in holes:
        size = len(engine.tokenizer.encode(hole.middle))
        limit = 2 * size + 8 if hole.is_line else max(1, size)
        stop = (NEWLINE,) if hole.is_line else ()
        ids = _prefix(engine, hole, limit)
        params = SamplingParams(mode="ar", max_tokens=limit, stop=stop, seed=0)
        prompts.append(EvalPrompt(Prompt(text=hole.prefix, ids=ids), params))
    texts: list[str | None] = []
    for hole, done in zip(holes, generate_all(engine, prompts, label), strict=True):
        if done is None:
            texts.append(None)
            continue
        text = engine.tokenizer.decode(done.ids, skip_control=True)
        if hole.is_line:
            closing = hole.middle[len(hole.middle.rstrip(NEWLINE)) :]
            text = text.partition(NEWLINE)[0] + closing
        texts.append(text)
    return texts


# --- held-out lines


def infill(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Measure exact match and how many non-trivial fills parse, in both modes, by section.

    A line of a package may name what is defined elsewhere in it; the solution of a problem is
    complete in itself; the problems of MBPP are published.
    """
    measures: list[Measure] = []
    for name, read in SECTIONS.items():
        try:
            holes = spread(list(read(engine, data)), limit or LIMIT)
        except MissingData as reason:
            measures.append(Case(TASK, prefix=f"{name}: ").skipped(str(reason)))
        else:
            measures += _section(engine, name, holes, seed)
    return measures


def package_lines(engine: Engine, data: Data) -> Iterator[HoleCase]:
    """Yield lines of packages and of Python's own library."""
    try:
        problem_groups = {record["group"] for record in data.records(PROBLEM_FILE, None)}
    except MissingData:
        problem_groups = set()
    records = data.records(PACKAGE_FILE, None)
    # A group belongs to one section.
    return _long(engine, (_hole(one) for one in records if one["group"] not in problem_groups))


def problem_lines(engine: Engine, data: Data) -> Iterator[HoleCase]:
    return _long(engine, map(_hole, data.records(PROBLEM_FILE, None)))


def mbpp_lines(engine: Engine, data: Data) -> Iterator[HoleCase]:
    """Yield at most four lines of each problem of MBPP, spread over it."""
    for record in read_jsonl(data.evaluation(MBPP_FILE), None):
        yield from spread(list(_long(engine, mbpp_holes(record))), MAX_MBPP_HOLES)


def mbpp_holes(record: dict[str, Any]) -> list[HoleCase]:
    """Return a hole for every body line of a problem of MBPP's test split, in order.

    Only the code is used, imports and helpers included; the statement of the problem is not.
    """
    # The file ends most lines as Windows does, which is not part of the solution.
    code = record["code"].replace("\r", "")
    if record["task_id"] not in MBPP_TEST or len(code) > MAX_MBPP_CHARACTERS:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in others' code
        spans = list(_body_spans(code))
    return [HoleCase(code[:start], code[start:stop], code[stop:]) for start, stop in spans]


def _body_spans(code: str) -> Iterator[tuple[int, int]]:
    """Yield the body lines of each function that is not within another or in a class."""
    lines = code.splitlines(keepends=True)
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef):
            before = len("".join(lines[: node.lineno - 1]))
            function = "".join(lines[node.lineno - 1 : node.end_lineno])
            yield from ((before + start, before + stop) for start, stop in body_lines(function))


SECTIONS: dict[str, Callable[[Engine, Data], Iterator[HoleCase]]] = {
    "package": package_lines,
    "problem": problem_lines,
    "mbpp": mbpp_lines,
}


def _section(engine: Engine, name: str, holes: Sequence[HoleCase], seed: int) -> list[Measure]:
    label, prefix = f"{TASK} by {name}", f"{name}: "
    filled = fill_canvases(engine, holes, seed, f"{label}, diffusion")
    texts = ["" if one is None else one.text for one in filled]
    case = Case(TASK, "diffusion", prefix)
    measures = _line_measures(case, holes, texts, "length known")
    done = [one for one in filled if one is not None]
    measures.append(case.mean("steps", [float(one.steps) for one in done], "steps"))
    measures.append(case.share("converged", [one.converged for one in done]))
    measures += _program(engine, name, spread(holes, PROGRAM_LIMIT), seed)
    texts = [text or "" for text in continue_prefixes(engine, holes, f"{label}, ar")]
    return measures + _line_measures(Case(TASK, "ar", prefix), holes, texts, "prefix only, greedy")


def _program(engine: Engine, name: str, holes: Sequence[HoleCase], seed: int) -> list[Measure]:
    case = Case(TASK, "diffusion", f"{name}: fill: ")
    filled = fill_by_program(engine, holes, seed, f"{TASK} by {name}, fill")
    note = "`fill`: both modes propose, length known"
    measures = _line_measures(case, holes, [one.text for one in filled], note)
    steps = [float(one.steps) for one in filled]
    return [*measures, case.mean("steps", steps, "steps", "of all canvases together")]


def sample_holes(engine: Engine, data: Data, limit: int) -> list[HoleCase]:
    """Return holes spread over all groups of the held-out file."""
    return list(spread(list(_long(engine, map(_hole, data.records(PACKAGE_FILE, None)))), limit))


def trim_context(hole: HoleCase, size: int) -> HoleCase:
    """Return the hole with at most `size` characters on either side, for printing."""
    return replace(hole, prefix=hole.prefix[-size:], suffix=hole.suffix[:size])


def _hole(record: dict[str, str]) -> HoleCase:
    return HoleCase(record["prefix"], record["middle"], record["suffix"])


def _long(engine: Engine, holes: Iterable[HoleCase]) -> Iterator[HoleCase]:
    """Drop holes shorter than MIN_TOKENS in the model's tokens."""
    encode = engine.tokenizer.encode
    return (hole for hole in holes if len(encode(hole.middle.strip())) >= MIN_TOKENS)


def _line_measures(
    case: Case, holes: Sequence[HoleCase], texts: Sequence[str], note: str
) -> list[Measure]:
    both = list(zip(holes, texts, strict=True))
    # If the original does not parse by itself, no fill could.
    parsable = [
        (hole, text)
        for hole, text in both
        if not is_trivial(text) and parses(hole.with_text(hole.middle))
    ]
    parsed = [parses(hole.with_text(text)) for hole, text in parsable]
    return [
        case.share("exact", [is_exact(text, hole) for hole, text in both], note),
        case.share("non-trivial", [not is_trivial(text) for text in texts]),
        case.share("parses if non-trivial", parsed),
    ]


def is_exact(text: str, hole: HoleCase) -> bool:
    return text.strip() == hole.middle.strip()


def is_trivial(text: str) -> bool:
    return text.strip() in ("", "pass", "...")


def parses(source: str) -> bool:
    """Return True if a function or a method by itself is valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes and the like, in others' code
            ast.parse(textwrap.dedent(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# --- HumanEval


def humaneval_infill(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Measure exact match and the problems' unit tests; generated code runs in a subprocess.

    Diffusion sees both sides and the hole's length in tokens; AR sees the left side.
    """
    holes, tests = read_humaneval(data, limit)
    filled = fill_canvases(engine, holes, seed, f"{HUMANEVAL}, diffusion")
    lines = ["" if one is None else one.text for one in filled]
    measures = _test_measures(Case(HUMANEVAL, "diffusion"), holes, lines, tests)
    steps = [float(one.steps) for one in filled if one is not None]
    measures.append(Case(HUMANEVAL, "diffusion").mean("steps", steps, "steps"))
    lines = [text or "" for text in continue_prefixes(engine, holes, f"{HUMANEVAL}, ar")]
    return measures + _test_measures(Case(HUMANEVAL, "ar"), holes, lines, tests)


def read_humaneval(data: Data, limit: int | None) -> tuple[list[HoleCase], list[str]]:
    """Return the holes, and for each the code that tests the completed function."""
    records = read_jsonl(data.evaluation(HUMANEVAL_FILE), limit)
    holes = [HoleCase(r["prompt"], r["canonical_solution"], r["suffix"]) for r in records]
    return holes, [f"{r['test']}\ncheck({r['entry_point']})\n" for r in records]


def run_tests(holes: Sequence[HoleCase], lines: Sequence[str], tests: Sequence[str]) -> list[bool]:
    """Put each line into its hole and run the problem's tests."""
    return run_programs(
        [
            f"{hole.with_text(line)}\n{test}"
            for hole, line, test in zip(holes, lines, tests, strict=True)
        ]
    )


def _test_measures(
    case: Case, holes: Sequence[HoleCase], lines: Sequence[str], tests: Sequence[str]
) -> list[Measure]:
    exact = [is_exact(line, hole) for line, hole in zip(lines, holes, strict=True)]
    note = "prefix only, greedy" if case.mode == "ar" else "length known"
    passed = run_tests(holes, lines, tests)
    return [case.share("exact", exact, note), case.share("tests pass", passed, note)]


# --- generated programs

SECONDS = 5.0
MEMORY = 1 << 30  # bytes of address space
WORKERS = 4
RUNNER = """
import builtins, os, resource, shutil, subprocess, sys
word, source = sys.stdin.read().split("\\n", 1)
say = os.write
for limit, value in (
    (resource.RLIMIT_CPU, int(sys.argv[1])),
    (resource.RLIMIT_AS, int(sys.argv[2])),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NPROC, 0),
):
    resource.setrlimit(limit, (value, value))
for module, names in (
    (os, "kill killpg fork forkpty system popen execv execve posix_spawn putenv remove unlink rmdir"
         " removedirs rename renames replace truncate chmod chown chdir symlink link mkdir"),
    (shutil, "rmtree move copyfile copytree"),
    (subprocess, "Popen run call check_call check_output"),
):
    for name in names.split():
        setattr(module, name, None)
builtins.exit = builtins.quit = builtins.input = None
exec(compile(source, "program", "exec"), {"__name__": "program"})
say(1, word.encode())
"""


def run_program(program: str, seconds: float = SECONDS) -> bool:
    """Return True if the program runs to its end, without an error and in time."""
    word = secrets.token_hex(16)
    command = [sys.executable, "-I", "-c", RUNNER, str(int(seconds) + 1), str(MEMORY)]
    with tempfile.TemporaryDirectory(prefix="dgemma-sandbox-") as directory:
        try:
            done = subprocess.run(
                command,
                input=f"{word}\n{program}".encode("utf-8", "replace"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                cwd=directory,
                env={},
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.stdout.endswith(word.encode())


def run_programs(programs: Sequence[str]) -> list[bool]:
    """Run programs, a few at a time; True for each that passes."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(run_program, programs))
