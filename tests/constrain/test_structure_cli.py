"""`dgemma generate` with a constraint, and the examples of structure."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dgemma.weights.load import Checkpoint
from dgemma.weights.save import save_checkpoint
from examples import form, table
from tests.command import Call, caller
from tests.constrain.languages import fits
from tests.constrain.random_engine import random_engine
from tests.text.small import TEMPLATE, make_backend

HERE = ["--device", "cpu", "--dtype", "float32", "--seed", "1"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def ignorant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint on disk of random weights."""
    directory = tmp_path_factory.mktemp("ignorant")
    make_backend().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    engine = random_engine(1, 64)
    checkpoint = Checkpoint(model=engine.model, generation=engine.generation_config)
    save_checkpoint(checkpoint, directory, overwrite=True)
    return directory


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(monkeypatch, capsys, ["generate", "Who?"], HERE)


def test_each_kind_of_constraint_is_held(call: Call, ignorant: Path, tmp_path: Path) -> None:
    schema = tmp_path / "person.json"
    schema.write_text(json.dumps(PERSON), encoding="utf-8")
    code, out, _ = call("--schema", schema, "-m", ignorant)
    assert code == 0 and fits(out, PERSON)
    code, out, _ = call("--schema", json.dumps(PERSON), "--mode", "ar", "--json", "-m", ignorant)
    assert code == 0 and fits(json.loads(out)["text"], PERSON)
    lark = tmp_path / "greeting.lark"
    lark.write_text('start: "hello " NAME "."\nNAME: /[A-Z][a-z]{2,6}/\n', encoding="utf-8")
    code, out, _ = call("--grammar", lark, "-m", ignorant)
    assert code == 0 and re.fullmatch(r"hello [A-Z][a-z]{2,6}\.\n", out)
    code, out, _ = call("--choices", "yes, no", "-m", ignorant)
    assert code == 0 and out in ("yes\n", "no\n")


def test_the_canvas_can_be_watched_while_it_is_held(call: Call) -> None:
    code, out, _ = call("--regex", "[0-9]{4}-[0-9]{2}", "--show", "--canvas", "32")
    assert code == 0 and re.search(r"^[0-9]{4}-[0-9]{2}$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("args", "phrase"),
    [
        (["--schema", '{"not": {}}'], "not"),
        (["--schema", "no-such-file.json"], "no-such-file.json cannot be read"),
        (["--schema", "{"], "not JSON"),
        (["--regex", "(?=a)b"], "look-around"),
        (["--regex", "a", "--choices", "a"], "--regex and --choices"),
        (["--choices", "a,,b"], "choices"),
        (["--regex", "a", "--stop", "x"], "--stop"),
        (["--regex", "x{900}", "--max-tokens", "9"], "no text: the shortest"),
    ],
)
def test_what_cannot_be_held_is_said_in_one_sentence(
    call: Call, args: list[str], phrase: str
) -> None:
    code, out, err = call(*args)
    assert code != 0 and out.strip() == ""
    assert err.count("\n") == 1 and phrase in err and "Traceback" not in err, err


@pytest.mark.parametrize("example", [form, table])
def test_the_examples_hold_on_a_model_that_knows_nothing_of_them(
    example: ModuleType,
    ignorant: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", str(ignorant)])
    example.main()
    assert capsys.readouterr().out.count("steps") == 2
