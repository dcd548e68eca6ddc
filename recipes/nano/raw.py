"""Read the data directory: clean documents and functions with their groups, and ready-made pairs.

Owns the formats of those files. A group (a story, a package, a problem, a dialogue) is the unit of
the held-out split. Pairs are `prompt` and `reply`: instructions, calls, tasks, questions.
"""

from __future__ import annotations

import ast
import gzip
import html
import json
import lzma
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from dgemma.errors import UsageError

Pair = dict[str, str]

# The model ships and talks like a children's book: sentences with these words stay out.
UNSUITED = re.compile(
    r"\b(sex\w*|fuck\w*|shit\w*|bitch\w*|rape[ds]?|rapist|nigg\w*|whore\w*|slut\w*|porn\w*|penis|"
    r"vagina|dick|cock|cunt|fag\w*|nazi\w*|suicide|hitler|orgasm\w*|prostitut\w*|naked|nude)\b",
    re.IGNORECASE,
)
BANDS = 40
MAX_WRAPPED_LINE = 90  # characters of a line in a hard-wrapped file
CALL_REQUEST = "Write the function call for this dialogue as JSON."
CALL_REQUESTS = [
    CALL_REQUEST,
    CALL_REQUEST,
    "Give the function call as JSON.",
    "Which function should the assistant call now? Reply with JSON only.",
]
MAX_DIALOGUE = 1600  # characters of a dialogue that a prompt shows, the last ones
MAX_PER_TASK = 350
MAX_DEFINITION = 500  # characters


class Document(NamedTuple):
    """A text and its group."""

    text: str
    group: str


@dataclass(frozen=True, slots=True)
class Function:
    """A Python function and its group."""

    code: str
    group: str
    name: str
    top: bool  # a plain function, not a method


@dataclass(frozen=True, slots=True)
class Call:
    """A dialogue up to the point where the assistant calls a function, and the call."""

    dialogue: str
    call: dict[str, object]
    group: str


def read_xz(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"no {path.name} in {path.parent}; --data takes the data directory")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def read_lines(path: Path) -> Iterator[Any]:
    """Read the records of a .jsonl or .jsonl.xz file."""
    text = read_xz(path) if path.suffix == ".xz" else path.read_text(encoding="utf-8")
    # Not splitlines, which also splits at separators that JSON strings may hold.
    return (json.loads(line) for line in text.split("\n") if line.strip())


def sentences(data: Path) -> list[str]:
    """Read single sentences, cleaned, each once, in file order."""
    unique: dict[str, None] = {}
    for name in ("tatoeba_en", "cv_en"):
        for line in read_xz(data / "train" / f"{name}.txt.xz").splitlines():
            text = plain(line)
            if 8 <= len(text) <= 240 and text.isascii() and not UNSUITED.search(text):
                unique[text] = None
    return list(unique)


def plain(text: str) -> str:
    """Replace typographic quotes and dashes by ASCII; collapse spaces."""
    text = html.unescape(text).replace("’", "'").replace("‘", "'")
    text = text.replace("“", '"').replace("”", '"').replace("…", "...").replace("\u00a0", " ")
    return re.sub(r"[ \t]+", " ", text).strip()


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def paragraphs(text: str) -> list[str]:
    """Split at blank lines and unwrap the lines between."""
    blocks = re.split(r"\n\s*\n", text)
    texts = [plain(" ".join(block.split())).replace("_", "") for block in blocks]
    return [paragraph for paragraph in texts if re.search(r"[A-Za-z]{2}", paragraph)]


def storybook(data: Path) -> list[Document]:
    """Read African Storybook and Pratham Books: a heading and short paragraphs, joined."""
    parts = re.split(r"^# (.*)\n", read_xz(data / "train" / "asp_pb_en.txt.xz"), flags=re.MULTILINE)
    return [
        Document("\n\n".join(join_short(paragraphs(body), 240)), f"asp/{title.strip().lower()}")
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
        if paragraphs(body)
    ]


def join_short(paragraphs: list[str], min_size: int) -> list[str]:
    """Join adjacent paragraphs until each has at least `min_size` characters."""
    longer: list[str] = []
    for paragraph in paragraphs:
        if longer and len(longer[-1]) < min_size:
            longer[-1] += " " + paragraph
        else:
            longer.append(paragraph)
    return longer


def tales(data: Path) -> list[Document]:
    """Read FairytaleQA: nothing marks the end of a story, so the file is cut into bands."""
    blocks = read_xz(data / "train" / "fairytaleqa_stories.txt.xz").split("\n\n")
    unwrapped = [paragraph for block in blocks for paragraph in unwrap(block)]
    longer = join_short([paragraph for paragraph in unwrapped if paragraph], 160)
    size = -(-len(longer) // BANDS)
    bands = [longer[start : start + size] for start in range(0, len(longer), size)]
    return [Document("\n\n".join(band), f"tale/{index}") for index, band in enumerate(bands)]


def unwrap(block: str) -> list[str]:
    """Return the paragraphs of a block whose lines are wrapped, or paragraphs themselves."""
    lines = block.splitlines()
    wrapped = bool(lines) and max(map(len, lines)) < MAX_WRAPPED_LINE
    return [plain(" ".join(lines))] if wrapped else [plain(line) for line in lines]


def books(data: Path) -> list[Document]:
    """Read children's classics, one document per book, without headings and front matter."""
    text = read_xz(data / "train" / "kids_books.txt.xz")
    parts = re.split(r"^# ([^\n]*\.md)\n", text, flags=re.MULTILINE)
    documents = []
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        lines = [line for line in body.splitlines() if not re.match(r"\s*(#|---|\*\*\*)", line)]
        documents.append(Document("\n\n".join(paragraphs("\n".join(lines))), f"book/{name}"))
    return documents


def dialogues(data: Path) -> list[Document]:
    parts = read_xz(data / "train" / "sgd_dialogues.txt.xz").split("\n\n")
    return [
        Document(plain_lines(text), f"dialogue/{index}")
        for index, text in enumerate(parts)
        if text.strip()
    ]


def plain_lines(text: str) -> str:
    return "\n".join(plain(line) for line in text.splitlines() if line.strip())


def functions(data: Path) -> list[Function]:
    """Read the Python functions that parse, dedented, four spaces a level, each once."""
    by_code: dict[str, Function] = {}
    for record in read_lines(data / "train" / "algos.jsonl.xz"):
        group = f"{record['s'].split()[0]}/{record['n']}"
        add_function(by_code, record, group, top="(self" not in record["c"])
    for record in read_lines(data / "train" / "py_funcs.jsonl.xz"):
        add_function(by_code, record, record["p"], top=bool(record["top"]))
    return list(by_code.values())


def more_functions(path: Path) -> list[Function]:
    """Read functions of the same form from a file as `recipes.nano.pypi` writes it."""
    if not path.is_file():
        makers = "`python -m recipes.nano.pypi` or `python -m recipes.nano.teacher.extract`"
        raise UsageError(f"no {path}; {makers} makes a file of functions")
    by_code: dict[str, Function] = {}
    for record in read_lines(path):
        add_function(by_code, record, record["p"], top=bool(record["top"]))
    return list(by_code.values())


def add_function(by_code: dict[str, Function], record: Any, group: str, *, top: bool) -> None:
    code = clean_code(record["c"])
    key = re.sub(r"\s+", "", code)
    if code and key not in by_code:
        by_code[key] = Function(code, group, record["n"], top)


def clean_code(text: str) -> str:
    """Expand tabs and strip trailing spaces; empty if Python cannot parse it."""
    text = textwrap.dedent(text.expandtabs(4).replace("\r", ""))
    text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
    if not text.isascii() or max(map(len, text.splitlines())) > 120:
        return ""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return text


def benchmark_code(data: Path) -> list[tuple[str, str]]:
    """Return name and solution of every problem of HumanEval and MBPP."""
    human_eval, mbpp = benchmark_problems(data)
    solutions = [(item["entry_point"], item["canonical_solution"]) for item in human_eval]
    for item in mbpp:
        names = re.findall(r"^def (\w+)", item["code"], re.M)
        solutions += [(name, item["code"]) for name in names]
    return solutions


def benchmark_texts(data: Path) -> list[str]:
    """Return the same problems in words."""
    human_eval, mbpp = benchmark_problems(data)
    return [*(item["prompt"] for item in human_eval), *(item["text"] for item in mbpp)]


def benchmark_problems(data: Path) -> tuple[list[Any], list[Any]]:
    """Read the problems of HumanEval and of MBPP as their files have them."""
    folder = data / "eval"
    with gzip.open(folder / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        human_eval = [json.loads(line) for line in file]
    return human_eval, list(read_lines(folder / "mbpp.jsonl"))


def compact_json(value: object) -> str:
    """Write JSON as the model does: no spaces between tokens."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def call_pair(call: Call, request: str = CALL_REQUEST) -> Pair:
    """Make a pair of a dialogue's last turns and the call."""
    lines = call.dialogue.splitlines()
    while len(lines) > 1 and sum(map(len, lines)) > MAX_DIALOGUE:
        lines.pop(0)
    return {"prompt": request + "\n\n" + "\n".join(lines), "reply": compact_json(call.call)}


def json_calls(calls: Sequence[Call], rng: Random) -> Iterator[Pair]:
    for call in calls:
        yield call_pair(call, rng.choice(CALL_REQUESTS))


def instructions(data: Path, is_excluded: Callable[[str], bool]) -> Iterator[Pair]:
    """Read a teacher's pairs, without code that is excluded; JSON without spaces."""
    for record in read_lines(data / "train" / "instruct.jsonl.xz"):
        prompt, reply = record["prompt"].strip(), record["reply"].strip()
        if UNSUITED.search(f"{prompt} {reply}"):
            continue
        if record["kind"] == "code":
            reply = reply.expandtabs(4)
            if is_excluded(reply) or not clean_code(reply):
                continue
        if record["kind"] == "json":
            reply = compact_json(json.loads(reply))
        yield {"prompt": prompt, "reply": plain(reply) if is_plain(record) else reply}


def is_plain(record: dict[str, str]) -> bool:
    return record["kind"] not in ("code", "json") and "\n" not in record["reply"]


def tasks(data: Path, rng: Random) -> Iterator[Pair]:
    """Read Natural Instructions with a short definition, some of every task."""
    text = (data / "train" / "ni_gen_defs.json").read_text(encoding="utf-8")
    definitions = {name: entry["def"] for name, entry in json.loads(text).items()}
    by_task: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, source, target in read_lines(data / "train" / "ni_gen.jsonl.xz"):
        if len(source) + len(target) <= 900 and len(target.strip()) >= 2 and is_prose(source):
            by_task[name].append((source, target))
    for name, pairs in by_task.items():
        definition = shorten(" ".join(definitions[name].split()))
        for source, target in rng.sample(pairs, min(MAX_PER_TASK, len(pairs))):
            if not UNSUITED.search(f"{source} {target}"):
                yield {"prompt": f"{definition}\n\n{source.strip()}", "reply": target.strip()}


def is_prose(text: str) -> bool:
    """True if most of the text is words: a small model learns nothing from lists of numbers."""
    letters = sum(map(len, re.findall(r"[A-Za-z]{2,}", text)))
    return letters >= 0.6 * len(re.sub(r"\s", "", text))


def shorten(text: str) -> str:
    """Cut a definition after the last sentence that fits."""
    if len(text) <= MAX_DEFINITION:
        return text
    end = text.rfind(". ", 0, MAX_DEFINITION)
    return text[: end + 1] if end > 0 else text[:MAX_DEFINITION]


def questions(data: Path, texts: Sequence[str], rng: Random) -> Iterator[Pair]:
    """Make pairs of questions whose answer is a quotation of the paragraph most like them."""
    paragraphs = [p for text in texts for p in text.split("\n\n") if 80 <= len(p) <= 1500]
    bags = [set(words(paragraph)) for paragraph in paragraphs]
    index_of: dict[str, list[int]] = defaultdict(list)
    for index, bag in enumerate(bags):
        for word in bag:
            index_of[word].append(index)
    for record in read_lines(data / "train" / "fairytaleqa_qa.jsonl.xz"):
        question, answer = plain(record["q"]), plain(record["a"]).strip(" .")
        best = best_paragraph(set(words(f"{question} {answer}")), index_of, len(bags))
        core = re.sub(r"^(the|a|an|his|her|because) ", "", answer.lower())
        if best is None or len(core) < 3 or core not in paragraphs[best].lower():
            continue
        reply = answer[:1].upper() + answer[1:] + "."
        forms = [f"{paragraphs[best]}\n\n{question}", f"{question}\n\n{paragraphs[best]}"]
        yield {"prompt": rng.choice(forms), "reply": reply}


def best_paragraph(query: set[str], index_of: dict[str, list[int]], total: int) -> int | None:
    """Return the paragraph that shares the rarest words; None where hardly any is shared."""
    scores: Counter[int] = Counter()
    for word in query:
        matches = index_of.get(word, ())
        if matches and len(matches) < total / 8:
            for index in matches:
                scores[index] += round(100 / len(matches) ** 0.5)
    return max(scores, key=lambda index: (scores[index], -index)) if scores else None
