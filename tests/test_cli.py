"""The command line: answers on stdout, one sentence on stderr when wrong, and quick to start."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from dgemma import __version__
from dgemma.cli import main
from dgemma.cli.app import app, option_hints
from dgemma.cli.show import CanvasView, paint, printable
from dgemma.engine import Draft
from dgemma.errors import UsageError
from dgemma.weights.hub import NANO_DIRECTORY
from tests.command import Call, Result, caller
from tests.taught import ANSWERS, LONG, SHORT, THOUGHT

ROOT = Path(__file__).resolve().parents[1]
DGEMMA = [sys.executable, "-m", "dgemma"]
JSON_FIELDS = set("text tokens steps blocks tokens_per_step seconds finish seed mode model".split())
HERE = ["--device", "cpu", "--dtype", "float32", "--seed", "1"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(monkeypatch, capsys)


def run_outside(*args: str | Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as its own process."""
    return subprocess.run(
        [*DGEMMA, *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
        check=False,
    )


def assert_one_sentence(err: str, phrase: str) -> None:
    assert err.startswith("dgemma: ") and err.endswith("\n"), err
    assert err.count("\n") == 1, f"not one line: {err}"
    assert "Traceback" not in err and "(a bug;" not in err, err
    assert phrase in err, err


# --- answers


def test_the_answer_alone_is_on_stdout(call: Call, checkpoint: Path) -> None:
    assert call("generate", LONG, "-m", checkpoint, *HERE) == Result(0, ANSWERS[LONG] + "\n", "")


def test_a_thought_is_not_printed_as_the_answer(call: Call, checkpoint: Path) -> None:
    assert call("generate", THOUGHT, "-m", checkpoint, *HERE) == Result(0, "yes\n", "")


def test_json_is_one_object_with_the_promised_fields(call: Call, checkpoint: Path) -> None:
    result = call("generate", LONG, "-m", checkpoint, *HERE, "--json")
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    report = json.loads(result.out)
    assert report.keys() >= JSON_FIELDS
    assert report["text"] == ANSWERS[LONG]
    assert (report["finish"], report["seed"], report["blocks"]) == ("stop", 1, 3)
    assert (report["mode"], report["model"]) == ("diffusion", str(checkpoint))
    assert report["tokens_per_step"] == pytest.approx(report["tokens"] / report["steps"], abs=1e-3)
    assert 0 < report["seconds"] < 60


def test_json_keeps_the_thought_apart(call: Call, checkpoint: Path) -> None:
    report = json.loads(call("generate", THOUGHT, "-m", checkpoint, *HERE, "--json").out)
    assert (report["text"], report["thought"], report["tool_calls"]) == ("yes", "hm", [])


def test_a_dash_reads_the_prompt_from_stdin(call: Call, checkpoint: Path) -> None:
    result = call("generate", "-", "-m", checkpoint, *HERE, stdin=SHORT.encode())
    assert result == Result(0, ANSWERS[SHORT] + "\n", "")


def test_show_without_a_terminal_draws_nothing(call: Call, checkpoint: Path) -> None:
    result = call("generate", SHORT, "-m", checkpoint, *HERE, "--show")
    assert result == Result(0, ANSWERS[SHORT] + "\n", "")
    report = call("generate", SHORT, "-m", checkpoint, *HERE, "--show", "--json")
    assert json.loads(report.out)["text"] == ANSWERS[SHORT] and not report.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--max-tokens", "3"], "one"),
        (["--stop", ", "], "one"),
        (["--stop", "zzz", "--stop", "two"], "one, "),
        (["--rule", "confidence"], ANSWERS[SHORT]),
        (["--rule", "confidence", "--steps", "30"], ANSWERS[SHORT]),
        (["--canvas", "16"], ANSWERS[SHORT]),
    ],
    ids=" ".join,
)
def test_options_reach_the_engine(
    call: Call, checkpoint: Path, options: list[str], text: str
) -> None:
    result = call("generate", SHORT, "-m", checkpoint, *HERE, *options)
    assert result == Result(0, text + "\n", "")


def test_more_options_reach_the_engine(call: Call, checkpoint: Path) -> None:
    chat = json.loads(call("generate", SHORT, "-m", checkpoint, *HERE, "--json").out)
    args = ["generate", SHORT, "-m", checkpoint, *HERE, "--max-tokens", "4", "--json"]
    plain = json.loads(call(*args, "--plain").out)
    system = json.loads(call(*args, "--system", "be brief").out)
    once = json.loads(call(*args, "--steps", "1").out)
    small = json.loads(call(*args, "--canvas", "2").out)
    assert plain["prompt_tokens"] < chat["prompt_tokens"] < system["prompt_tokens"]
    assert once["steps"] == 1 and small["blocks"] == 2


def test_a_canvas_is_painted_without_moving_the_cursor() -> None:
    assert "\x1b" not in printable("\x1b[2J\r\x07") and printable("a\nb") == "a\nb"
    draft = Draft(
        ids=(1, 2),
        tokens=("he", "\x1bllo"),
        guess=(1, 2),
        guess_tokens=("he", "llo"),
        entropy=(0.0, 1.0),
        accepted=(True, False),
        pinned=(True, False),
        block=1,
        step=4,
    )
    painted = paint(draft).plain
    assert "block 2" in painted and "step 4" in painted and "50% accepted" in painted
    assert painted.endswith("he·llo")


# --- other commands


def test_info_tells_what_would_run(call: Call, checkpoint: Path) -> None:
    result = call("info", "-m", checkpoint, "--device", "cpu", "--dtype", "float32", "--json")
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    facts = json.loads(result.out)
    assert facts["dgemma"] == __version__ and facts["dtype"] == "float32"
    assert facts["device"].startswith("cpu") and facts["weights"].startswith("float32")
    assert (facts["model"], facts["family"]) == (str(checkpoint), "diffusion_gemma")
    assert (facts["layers"], facts["canvas"], facts["vocabulary"]) == (2, 16, 403)
    assert facts["backend"].startswith("reference: ")
    plain = call("info", "-m", checkpoint, "--device", "cpu")
    assert plain.code == 0 and "diffusion_gemma" in plain.out and "vocabulary" in plain.out


def test_info_needs_no_weights(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    facts = json.loads(call("info", "-m", tmp_path, "--json").out)
    assert facts["experts"] == "2 of 4"


def test_the_version_is_printed(call: Call) -> None:
    assert call("--version") == Result(0, f"dgemma {__version__}\n", "")


def test_help_lists_every_command(call: Call) -> None:
    result = call("--help")
    commands = app.registered_commands
    names = [c.name or c.callback.__name__ for c in commands]  # type: ignore[union-attr]
    assert {"generate", "info", "download"} <= set(names)
    assert result.code == 0 and not result.err
    assert all(name in result.out for name in names)


def test_no_command_at_all_prints_the_help_and_is_a_wrong_call(call: Call) -> None:
    result = call()
    assert result.code == 2 and "generate" in result.out + result.err


# --- wrong calls and failed work


@pytest.mark.parametrize(
    ("args", "phrase"),
    [
        (["nonsense"], "'nonsense'"),
        (["generate"], "'prompt'"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "-"], "the prompt on stdin is empty"),
        (["generate", "hi", "extra"], "extra"),
        (["generate", "hi", "--frobnicate"], "--frobnicate"),
        (["generate", "hi", "--max-tokens", "many"], "--max-tokens is 'many'; it must be a whole"),
        (
            ["generate", "hi", "--seed=1.5"],
            "--seed is '1.5'; it must be a whole number; see `dgemma",
        ),
        (
            ["generate", "hi", "--temperature", "hot"],
            "--temperature is 'hot'; it must be a number;",
        ),
        (["generate", "hi", "--max-tokens", "-3"], "max tokens is -3; it must be above 0"),
        (["generate", "hi", "--max-tokens", "0"], "max tokens is 0"),
        (["generate", "hi", "--max-tokens", "9999"], "10000 (rounded up to whole canvases)"),
        (["generate", "hi " * 300], "shorten the prompt"),
        (["generate", "hi", "--seed", "-1"], "seed is -1"),
        (["generate", "hi", "--canvas", "17"], "canvas length is 17"),
        (["generate", "hi", "--canvas", "0"], "canvas length is 0"),
        (["generate", "hi", "--steps", "0"], "--steps is 0; it must be a whole number, 1 or more"),
        (["generate", "hi", "--steps", "9", "--steps", "x"], "--steps is 'x'"),
        (["generate", "hi", "--steps"], "`dgemma generate --help`"),
        (["fill", "x", "--length", "x", "--length", "2"], "--length is 'x'; it must be a whole"),
        (["fill", "x", "--length", "0"], "--length is 0; it must be a whole number, 1 or more"),
        (
            ["serve", "--port", "99999"],
            "--port is 99999; it must be a whole number from 0 to",
        ),
        (["serve", "--max-body", "nan"], "--max-body is nan; it must be"),
        (["serve", "--max-body", "-1"], "--max-body is -1.0; it must be"),
        (["eval", "--seed", "-1"], "seed is -1; it must be 0 to"),
        (["train", "x.toml", "--steps", "-3"], "steps is -3; it must be 1 or more"),
        (["train", "x.toml", "--seconds", "nan"], "seconds is nan; it must be above 0"),
        (["train", "x.toml", "--workers", "-1"], "workers is -1; it must be 0 or more"),
        (["generate", "hi", "--stop", ""], "stop string is empty"),
        (["generate", "hi", "--rule", "greedy"], "'greedy' is not known; use entropy,"),
        (["generate", "hi", "--rule", "confidence", "--mode", "ar"], "cannot honour --rule"),
        (["generate", "hi", "--steps", "5", "--mode", "ar"], "cannot honour --steps"),
        (["generate", "hi", "--steps", "5", "--draft", "ngram", "--mode", "ar"], "honour --steps"),
        (["generate", "hi", "--steps", "5", "--verify", "strict"], "leave out --steps"),
        (["generate", "hi", "--rule", "confidence", "--verify", "strict"], "leave out --rule"),
        (["generate", "hi", "--preset", "fast", "--verify", "strict"], "leave out --preset"),
        (["generate", "hi", "--template", "file"], "--template file is for GGUF models"),
        (["info", "--model", "nano", "--template", "x"], "--template x is for GGUF models"),
        (["sudoku", "." * 81, "--template", "file"], "--template file is for GGUF models"),
        (["generate", "hi", "--adapter", "/nope"], "/nope does not exist; give the directory of"),
        (["generate", "hi", "--device", "cuda:7"], "use cpu or auto"),
        (["generate", "hi", "--device", "toaster"], "use auto, cpu, cuda, cuda:N or mps"),
        (["generate", "hi", "--dtype", "int3"], "'int3' is not known"),
        (["generate", "hi", "--plain", "--system", "x"], "leave out --system"),
        (["generate", "hi", "--plain", "--thinking"], "--plain"),
        (["generate", "hi", "--model", "no/such/place"], "'no/such/place' names no model"),
        (["generate", "hi", "--model", "owner/unheard-of"], "dgemma download owner/unheard-of"),
        (["generate", "hi", "--model", ""], "names no model"),
        (["info", "--device", "cuda:7"], "'cuda:7'"),
        (["info", "--model", "no/such/place"], "names no model"),
        (["download", "not-a-hub-name"], "owner/name"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_a_wrong_call_is_refused_in_one_sentence(
    call: Call, checkpoint: Path, args: list[str], phrase: str
) -> None:
    if args[0] == "generate" and "--model" not in args:
        args = [*args, "--model", str(checkpoint)]
    result = call(*args)
    assert (result.code, result.out) == (2, "")
    assert_one_sentence(result.err, phrase)


def numeric_options() -> list[tuple[str, str]]:
    """Each command with each of its options that takes a number."""
    found = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        kinds = {key: str(hint) for key, hint in option_hints(command.callback).items()}
        found += [
            (name, option.opts[0])
            for option in command.params
            if re.search(r"\b(int|float)\b", kinds.get(option.name, ""))
        ]
    return found


@pytest.mark.parametrize(("command", "option"), numeric_options())
def test_a_word_for_a_number_is_refused_alike_everywhere(
    call: Call, command: str, option: str
) -> None:
    result = call(command, option, "many")
    assert (result.code, result.out) == (2, "")
    assert_one_sentence(result.err, f"{option} is 'many'; it must be a ")


def test_every_command_with_numbers_is_asked() -> None:
    assert {"generate", "fill", "edit", "serve", "train"} <= {name for name, _ in numeric_options()}


@pytest.mark.skipif(NANO_DIRECTORY.is_dir(), reason="this build has the built-in model")
def test_the_built_in_model_is_not_promised_where_it_is_missing(call: Call) -> None:
    result = call("generate", "hi", "--model", "nano")
    assert (result.code, result.out) == (2, "")
    assert_one_sentence(result.err, "nano is not part of this build")
    facts = json.loads(call("info", "--json").out)
    assert facts["model"].startswith("none (") and "nano" in facts["model"]


def cut_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 400)


def add_unknown_key(directory: Path) -> None:
    raw = json.loads((directory / "config.json").read_text())
    raw["text_config"]["brand_new_flag"] = True
    (directory / "config.json").write_text(json.dumps(raw))


def rename_tensor(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"decoder.norm.weight", b"decoder.nurm.weight"))


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def write(name: str, content: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_text(content)


@pytest.mark.parametrize(
    ("spoil", "phrase"),
    [
        (remove("config.json"), "config.json does not exist"),
        (remove("tokenizer.json"), "no tokenizer.json"),
        (remove("model.safetensors"), "model.safetensors"),
        (write("config.json", "{"), "config.json is not valid JSON"),
        (write("config.json", "[]"), "must hold a JSON object"),
        (write("config.json", '{"model_type": "llama"}'), "'llama'"),
        (write("tokenizer.json", "{}"), "tokenizer.json is damaged"),
        (write("chat_template.jinja", "{% if %}"), "chat template, line 1"),
        (write("generation_config.json", '{"knob": 1}'), "does not know knob"),
        (write("generation_config.json", "nope"), "generation_config.json is not valid JSON"),
        (add_unknown_key, "does not know brand_new_flag"),
        (cut_short, "is cut short"),
        (damage, "is not a safetensors file, or is cut short"),
        (rename_tensor, "decoder.norm.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_spoilt_checkpoint_fails_in_one_sentence(
    call: Call, checkpoint: Path, tmp_path: Path, spoil: Callable[[Path], Any], phrase: str
) -> None:
    mine = shutil.copytree(checkpoint, tmp_path / "mine")
    spoil(mine)
    result = call("generate", SHORT, "-m", mine, *HERE)
    assert (result.code, result.out) == (1, "")
    assert_one_sentence(result.err, phrase)


def test_a_checkpoint_without_template_takes_no_system_message(
    call: Call, checkpoint: Path, tmp_path: Path
) -> None:
    mine = shutil.copytree(checkpoint, tmp_path / "mine")
    remove("chat_template.jinja")(mine)
    assert call("generate", "abc", "-m", mine, *HERE, "--max-tokens", "4").code == 0
    result = call("generate", "abc", "-m", mine, *HERE, "--system", "x")
    assert result.code == 2
    assert_one_sentence(result.err, "no chat template")


def test_stdin_that_is_no_text_is_refused(call: Call, checkpoint: Path) -> None:
    result = call("generate", "-", "-m", checkpoint, *HERE, stdin=b"\xff\xfe")
    assert (result.code, result.out) == (2, "")
    assert_one_sentence(result.err, "not utf-8 text")


def test_debug_shows_where_an_error_was_raised(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    args = ["dgemma", "--debug", "generate", "hi", "-m", str(checkpoint), "--rule", "x"]
    monkeypatch.setattr(sys, "argv", args)
    with pytest.raises(UsageError, match="rule 'x'"):
        main()


def test_a_bug_ends_in_a_sentence_that_calls_it_one(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("dgemma.cli.generate.load_engine", break_down)
    result = call("generate", "hi")
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert "ZeroDivisionError: of all things (a bug; dgemma --debug COMMAND" in result.err


def test_an_interrupt_ends_quietly_with_its_own_code(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dgemma.cli.generate.load_engine", interrupt)
    assert call("generate", "hi") == Result(130, "", "dgemma: interrupted\n")


def test_an_interrupted_canvas_leaves_what_was_promised(
    call: Call, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: CanvasView, draft: Draft) -> None:
        if draft.block:
            raise KeyboardInterrupt

    monkeypatch.setattr(CanvasView, "draw", interrupt)
    for is_live in (True, False):
        monkeypatch.setattr(CanvasView, "is_live", is_live)
        result = call("generate", LONG, "-m", checkpoint, *HERE, "--show")
        assert result.code == 130 and result.err.endswith("dgemma: interrupted\n")
        assert len(result.out) > 1 and ANSWERS[LONG].startswith(result.out[:-1])


# --- as its own process


def test_a_process_answers_from_a_pipe_in_json(checkpoint: Path) -> None:
    run = run_outside("generate", "-", "-m", checkpoint, *HERE, "--json", stdin=LONG)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["text"] == ANSWERS[LONG]


def test_a_process_fails_with_the_right_code(tmp_path: Path) -> None:
    wrong = run_outside("generate", "hi", "-m", tmp_path / "nowhere")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert_one_sentence(wrong.stderr, "names no model")
    failed = run_outside("info", "-m", tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert_one_sentence(failed.stderr, "config.json does not exist")


def test_a_reader_that_leaves_early_gets_no_traceback(checkpoint: Path) -> None:
    command = [*DGEMMA, "generate", LONG, "-m", str(checkpoint), *HERE]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read().decode()
    assert "Traceback" not in err and "(a bug;" not in err, err


def test_a_closed_stdin_is_an_empty_one(checkpoint: Path) -> None:
    command = shlex.join([*DGEMMA, "generate", "-", "-m", str(checkpoint)])
    run = subprocess.run(
        f"{command} <&-", shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert_one_sentence(run.stderr, "the prompt on stdin is empty")


def test_what_stdout_cannot_encode_is_spelled_out(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "中")
    told = run_outside("info", "-m", tmp_path / "中", PYTHONIOENCODING="ascii")
    assert (told.returncode, told.stderr) == (0, "")
    assert "\\u4e2d" in told.stdout


def test_a_download_without_network_fails_in_one_sentence(tmp_path: Path) -> None:
    run = run_outside("download", "owner/name", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert (run.returncode, run.stdout) == (1, "")
    assert_one_sentence(run.stderr, "the hub could not be reached for owner/name")


# --- how quickly it starts


def best_of_three(command: list[str]) -> float:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        times.append(time.perf_counter() - begin)
    return min(times)


def test_help_is_there_at_once() -> None:
    assert best_of_three([*DGEMMA, "--help"]) < 0.7


def test_importing_the_package_takes_no_time() -> None:
    bare = best_of_three([sys.executable, "-c", "pass"])
    assert best_of_three([sys.executable, "-c", "import dgemma"]) - bare < 0.3


@pytest.mark.parametrize(
    "program",
    [
        "import dgemma; dgemma.__version__; dir(dgemma)",
        "import dgemma.config, dgemma.errors, dgemma.text.chat, dgemma.text.reply",
        "from dgemma.cli import main",
        "import dgemma; dgemma.DgemmaError",
        *(
            f"import sys; from dgemma.cli import main; sys.argv[1:] = {args}\ntry: main()\n"
            "except SystemExit: pass"
            for args in (["--help"], ["generate", "--help"], ["--version"], ["download", "x"])
        ),
    ],
)
def test_what_needs_no_tensors_does_not_import_them(program: str) -> None:
    check = "\nimport sys; print({'torch', 'transformers'} & sys.modules.keys(), file=sys.stderr)"
    run = subprocess.run(
        [sys.executable, "-c", program + check],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr.splitlines()[-1] == "set()"


def test_every_public_name_resolves() -> None:
    import dgemma

    for name in dgemma.__all__:
        assert getattr(dgemma, name) is not None
    assert set(dir(dgemma)) == set(dgemma.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        dgemma.Nonsense  # noqa: B018
