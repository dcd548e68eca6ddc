"""A tiny model that knows one answer to each kind of task by heart, and data files to match."""

import gzip
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dgemma.engine import Engine
from dgemma.eval.answers import set_batch_size
from dgemma.eval.data import Data
from dgemma.text.chat import ChatTemplate
from dgemma.weights.load import Checkpoint, random_model
from dgemma.weights.save import save_checkpoint
from examples.memorize import memorize
from tests.taught import CANVAS, GENERATION, ask, taught_config
from tests.text.small import TEMPLATE, make_backend, small_tokenizer

STEPS = 240
CONTEXT = 512
GRAPH = (
    "Colour this graph with red, green and blue so that no edge joins equal colours.\n"
    "A-B\nA red\nB ?"
)
CALL = '{"name": "f"}'
CHATS = {"call": CALL, "Fix.\n\nthe caat sat": "the cat sat", GRAPH: "A red\nB blue"}
PREFIX, MIDDLE, SUFFIX = "def f(x):\n", "  y = x\n", "  return y\n"


def lessons() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Chats with their closing turn, and a function cut at its hole; one canvas each."""
    tokenizer, (fill, turn) = small_tokenizer(), GENERATION.stop_ids
    pairs = [(list(ask(q).ids), [*tokenizer.encode(a), turn]) for q, a in CHATS.items()]
    hole = tokenizer.encode(MIDDLE) + tokenizer.encode(SUFFIX)
    pairs.append(([taught_config().bos_token_id, *tokenizer.encode(PREFIX)], hole))
    return [
        (torch.tensor(prompt), torch.tensor((reply + [fill] * CANVAS)[:CANVAS]))
        for prompt, reply in pairs
    ]


@pytest.fixture(scope="session")
def knowing() -> Engine:
    """Knows the answers in both modes."""
    config = replace(taught_config(), max_position_embeddings=CONTEXT)
    model = random_model(config, seed=0)
    for _ in memorize(model, lessons(), STEPS):
        pass
    tokenizer = small_tokenizer()
    engine = Engine(model, tokenizer, ChatTemplate(TEMPLATE, tokenizer), GENERATION)
    set_batch_size(engine, 8)
    return engine


@pytest.fixture(scope="session")
def knowing_directory(knowing: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a checkpoint on disk."""
    directory = tmp_path_factory.mktemp("knowing")
    make_backend().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    checkpoint = Checkpoint(model=knowing.model, generation=GENERATION)
    save_checkpoint(checkpoint, directory, overwrite=True)
    return directory


def save_lines(path: Path, *records: dict[str, Any]) -> None:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """For each task one case that the model knows, and where it shows one that it does not."""
    heldout, shared = tmp_path / "heldout", tmp_path / "shared"
    heldout.mkdir()
    (shared / "eval").mkdir(parents=True)
    known, other = PREFIX + MIDDLE + SUFFIX, "  z = 9\n"
    save_lines(heldout / "stories.jsonl", {"text": known}, {"text": known[:20]})
    save_lines(heldout / "code.jsonl", {"text": known})
    hole = {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX, "group": "a"}
    # Too short to count, by the model's own tokens: it would come first.
    short = {**hole, "middle": "\n"}
    unknown = {**hole, "middle": other}
    # Group b solves a problem: it counts there, and its line among those of packages does not.
    save_lines(heldout / "infill.jsonl", short, hole, unknown, {**unknown, "group": "b"})
    problem_holes = [{**one, "group": "b"} for one in (short, hole, unknown, unknown, unknown)]
    save_lines(heldout / "problems.jsonl", *problem_holes)
    call = {"prompt": "call", "reply": '{ "name":"f" }'}
    save_lines(heldout / "json_calls.jsonl", call, {**call, "reply": '{"name": "f", "x": 1}'})
    [(fix, fixed)] = [(q, a) for q, a in CHATS.items() if q.startswith("Fix")]
    save_lines(heldout / "fix_stories.jsonl", {"prompt": fix, "reply": fixed})
    save_lines(heldout / "colouring.jsonl", {"prompt": GRAPH, "reply": "A red\nB green"})
    problem = {"entry_point": "f", "prompt": PREFIX, "canonical_solution": MIDDLE, "suffix": SUFFIX}
    test = "def check(f):\n    assert f(3) == {}\n"
    save_lines(
        shared / "eval" / "HumanEval-SingleLineInfilling.jsonl.gz",
        {**problem, "test": test.format(3)},
        {**problem, "test": test.format(4), "canonical_solution": other},
    )
    solution = {"task_id": 11, "code": known.replace("\n", "\r\n")}
    save_lines(shared / "eval" / "mbpp.jsonl", {**solution, "task_id": 10}, solution)
    with zipfile.ZipFile(shared / "eval" / "BLiMP.zip", "w") as archive:
        for name, field in (("one", "syntax"), ("two", "semantics")):
            good, bad = PREFIX.strip(), "zq" + PREFIX.strip()[2:]
            pair = {"sentence_good": good, "sentence_bad": bad, "field": field, "UID": name}
            swapped = {**pair, "sentence_good": bad, "sentence_bad": good}
            records = [pair] if name == "one" else [pair, swapped]
            text = "\n".join(map(json.dumps, records))
            archive.writestr(f"data/{name}.jsonl", text)
            archive.writestr(f"__MACOSX/data/._{name}.jsonl", b"\0\xb0")
    return Data(heldout, shared)


def without_denoiser(engine: Engine) -> Engine:
    """An engine whose config says that there is no canvas mode."""
    model = random_model(replace(engine.model.config, family="gemma4"), seed=0)
    return Engine(model, engine.tokenizer, engine.template, engine.generation_config)
