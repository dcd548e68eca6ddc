"""The built-in model: it fits, it does what it is for, and other programs read what it exports."""

import ast
import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from dgemma.backends.reference import commit
from dgemma.diffusion.canvas import NO_PINS
from dgemma.diffusion.denoise import start
from dgemma.diffusion.reference_step import denoise
from dgemma.diffusion.sampler import released_sampler
from dgemma.engine import Engine, SamplingParams
from dgemma.errors import CheckpointError
from dgemma.eval.infill import HoleCase, fill_canvases
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.programs.sudoku.grid import is_solution, prompt_text, read_reply
from dgemma.programs.sudoku.solve import SudokuParams, solve
from dgemma.text.chat import Message
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.int_layout import INT8
from dgemma.weights.load import load_model
from dgemma.weights.save import export
from recipes.nano import ship
from tests.reference import recording
from tests.tiny import CPU

CLASSIC = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
EASY = [  # 36 to 43 clues
    "087500632000700000504690800000001006065420319100300728000009050090200160003007980",
    "000730000000960800500040036870006521009027308205013479908370650406009207050680903",
    "060005408984007003300048017100000000049082571000010034000524709005601380296803145",
]
UNUSED = 3  # the token for what has none, which bytes make needless
STORY = "Write a short story about a dog and a ball."
TEXTS = [
    'Once upon a time, there was a little girl named Lily.\n\nShe said, "I\'m 12 years old!"',
    "def mean(values):\n    return sum(values) / len(values)  # not for []\n\n\tx = 1e-05\n",
    "ünïcödé, 漢字 and 😀: three  spaces   here; 2026-11-15",
    prompt_text(CLASSIC),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("nano", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def model() -> Gemma:
    """As the engine's, not packed."""
    return load_model(NANO_DIRECTORY).model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("exported")
    export(NANO_DIRECTORY, directory)
    yield directory
    shutil.rmtree(directory)  # 120 MB


@pytest.fixture(scope="module")
def reference(exported: Path) -> DiffusionGemmaForBlockDiffusion:
    loaded, info = DiffusionGemmaForBlockDiffusion.from_pretrained(
        exported, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded.eval().requires_grad_(False)


# --- what is shipped


def test_it_fits_where_it_is_kept() -> None:
    sizes = sizes_of(NANO_DIRECTORY)
    assert {"README.md", "config.json", "tokenizer.json", "chat_template.jinja"} <= sizes.keys()
    assert sum(sizes.values()) <= 36_000_000  # 32 of the language model, 4 of the tower
    assert max(sizes.values()) <= 8_000_000


def test_it_is_of_the_architecture_with_experts(engine: Engine) -> None:
    config = engine.model.config
    assert config.can_denoise and config.num_experts >= 8 and config.top_k_experts == 2
    assert 8_000 <= config.vocab_size <= 16_384
    assert engine.tokenizer.vocab_size == config.vocab_size


def sizes_of(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir())}


def test_shipping_gives_the_same_bytes_and_keeps_the_card(exported: Path, tmp_path: Path) -> None:
    into = tmp_path / "models" / "nano"
    shipped = ship.ship(exported, into)
    assert (into / "README.md").read_text(encoding="utf-8") == ship.PLACEHOLDER
    (into / "README.md").write_text("a card", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in into.iterdir()}
    assert ship.ship(into, into) == replace(shipped, sizes=sizes_of(into))
    assert {path.name: path.read_bytes() for path in into.iterdir()} == before
    assert [path.name for path in into.parent.iterdir()] == ["nano"]


@pytest.mark.parametrize(("limit", "value"), [("MAX_BYTES", 29 << 20), ("MAX_FILE_BYTES", 4 << 20)])
def test_shipping_what_is_too_large_changes_nothing(
    limit: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = tmp_path / "nano"
    into.mkdir()
    (into / "config.json").write_text("the model before", encoding="utf-8")
    monkeypatch.setattr(ship, limit, value)
    with pytest.raises(CheckpointError, match="nothing is changed"):
        ship.ship(NANO_DIRECTORY, into, [INT8])
    assert (into / "config.json").read_text(encoding="utf-8") == "the model before"
    assert [path.name for path in tmp_path.iterdir()] == ["nano"]


# --- what it does


def test_it_solves_sudoku_as_a_person_would_ask(engine: Engine) -> None:
    for puzzle in [CLASSIC, *EASY]:
        done = engine.generate(prompt_text(puzzle), SamplingParams(seed=0, max_tokens=192))
        solution = read_reply(done.text)
        assert solution is not None and is_solution(puzzle, solution)
        assert done.steps <= 24


@pytest.mark.parametrize("pinned", [True, False])
def test_it_solves_sudoku_without_restarts(pinned: bool, engine: Engine) -> None:
    results = solve(engine, [CLASSIC, *EASY], SudokuParams(pinned=pinned))
    assert all(one.is_right and one.converged for one in results)


def test_it_fills_holes_in_stories_and_code(engine: Engine) -> None:
    holes = [
        HoleCase("Once upon", " a time", ", there was a little girl named Lily.\n"),
        HoleCase(
            "Once upon a time, there was a little girl named", " Lily.", " Lily loved to play.\n"
        ),
        HoleCase("class Point:\n    def __init__(self, x, y):\n        ", "self.x = x", "\n"),
    ]
    time, name, code = fill_canvases(engine, holes, 0, "fill")
    assert time is not None and time.text == " a time"
    assert name is not None and name.text == " Lily."
    assert code is not None and code.text.startswith("self.")
    ast.parse(holes[2].with_text(code.text))


def test_the_same_seed_gives_the_same_answer_alone_and_in_company(engine: Engine) -> None:
    options = SamplingParams(seed=3, max_tokens=64, canvas_length=64, max_steps=12)
    alone = engine.generate(STORY, options)
    again, _ = engine.generate_all([STORY, prompt_text(CLASSIC)], [options, SamplingParams(seed=1)])
    other = engine.generate(STORY, replace(options, seed=4))
    assert alone.text.strip() and alone.ids == again.ids
    assert other.ids != alone.ids


# --- what others make of it


def test_what_is_exported_holds_the_very_weights(exported: Path, model: Gemma) -> None:
    there = load_model(exported)
    for name, weight in there.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    assert there.config == model.config
    own = load_model(NANO_DIRECTORY).vision
    assert there.vision and own and there.vision.keys() == own.keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in there.vision.items())


def test_transformers_does_not_take_the_eight_bits_for_weights() -> None:
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        DiffusionGemmaForBlockDiffusion.from_pretrained(NANO_DIRECTORY)


def test_autotokenizer_gives_the_same_ids(exported: Path, engine: Engine) -> None:
    theirs = AutoTokenizer.from_pretrained(exported)
    assert len(theirs) == engine.tokenizer.vocab_size
    for text in TEXTS:
        ids = engine.tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs.decode(ids) == engine.tokenizer.decode(ids) == text
    chat = [("user", TEXTS[0]), ("assistant", TEXTS[1]), ("user", TEXTS[2])]
    messages = [{"role": role, "content": content} for role, content in chat]
    written = theirs.apply_chat_template(messages, add_generation_prompt=True)
    prompt = engine.prompt([Message(role=role, content=text) for role, text in chat])
    assert written["input_ids"] == list(prompt.ids)


@pytest.mark.parametrize(
    ("question", "blocks", "max_steps"), [(prompt_text(CLASSIC), 1, 24), (STORY, 2, 8)]
)
def test_transformers_writes_the_same_tokens_from_the_same_noise(
    question: str,
    blocks: int,
    max_steps: int,
    model: Gemma,
    engine: Engine,
    reference: DiffusionGemmaForBlockDiffusion,
) -> None:
    ids = torch.tensor(engine.prompt([Message(role="user", content=question)]).ids)
    generation = deepcopy(reference.generation_config)
    generation.max_denoising_steps = max_steps
    generation.max_new_tokens = blocks * model.config.canvas_length
    generation.eos_token_id = [UNUSED]  # so that the second block comes, whatever the first says
    torch.manual_seed(0)
    with recording(reference) as recorded:
        reference.generate(ids[None], generation_config=generation)
    assert len(recorded) == blocks
    sampler = replace(released_sampler(engine.generation_config), max_denoising_steps=max_steps)
    cache = KVCache(model.config, Capacity(tokens=512), torch.float32, CPU)
    commit(model, cache, ids, chunk=64)
    for block in recorded:
        state = start(sampler, block.noise(0, max_steps), NO_PINS)
        *_, [last] = denoise(model, [cache], [state])
        assert last.canvas.guess_L.tolist() == block.canvas_BL[0].tolist()
        assert last.canvas.num_steps == block.steps_B[0]
        commit(model, cache, last.canvas.guess_L, chunk=64)


def test_greedy_ar_is_the_causal_pass_of_transformers(
    engine: Engine, reference: DiffusionGemmaForBlockDiffusion
) -> None:
    prompt = engine.prompt([Message(role="user", content=STORY)])
    done = engine.generate(prompt, SamplingParams(mode="ar", max_tokens=48, seed=0))
    assert len(done.ids) > 8
    ids = torch.tensor([*prompt.ids, *done.ids])
    with torch.inference_mode():
        hidden = reference.model.encoder(input_ids=ids[None]).last_hidden_state[0]
        most_likely = reference.lm_head(hidden).argmax(-1)
    assert most_likely[len(prompt.ids) - 1 : -1].tolist() == list(done.ids)


def test_the_generation_defaults_arrive(exported: Path, engine: Engine) -> None:
    raw = json.loads((exported / "generation_config.json").read_text())
    assert raw["eos_token_id"] == list(engine.generation_config.stop_ids)
    assert raw["max_denoising_steps"] == engine.generation_config.max_denoising_steps
