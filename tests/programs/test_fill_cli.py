"""`dgemma fill` and `dgemma edit`: bytes in, bytes out, one sentence when wrong."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dgemma.cli import main
from dgemma.cli.text_files import write_text
from dgemma.errors import DgemmaError
from dgemma.text.control_tokens import FILL_MARK
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.load import Checkpoint
from dgemma.weights.save import save_checkpoint
from tests.constrain.small_engines import AFTER, BEFORE, HOLE, REQUEST, RIGHT, WRONG, knowing_engine
from tests.taught import GENERATION
from tests.text.small import TEMPLATE, make_backend

Call = Callable[..., tuple[int, bytes, str]]
HERE = ["--device", "cpu", "--dtype", "float32", "--seed", "1"]
WHOLE = (BEFORE + HOLE + AFTER).encode()


def put(path: Path, text: str) -> None:
    """Write a result that was made from what the file holds."""
    write_text(str(path), text, path.read_bytes().decode())


@pytest.fixture(scope="session")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint on disk that knows a function and a correction."""
    directory = tmp_path_factory.mktemp("knowing")
    make_backend().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    checkpoint = Checkpoint(model=knowing_engine().model, generation=GENERATION)
    save_checkpoint(checkpoint, directory, overwrite=True)
    return directory


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Call:
    """Run a command line in this process; what it prints, in bytes."""

    def run(*args: str | Path, stdin: bytes = b"") -> tuple[int, bytes, str]:
        monkeypatch.setattr(sys, "argv", ["dgemma", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as caught:
            main()
        sys.stdout.flush()
        code = caught.value.code
        out, err = capfdbinary.readouterr()
        return code if isinstance(code, int) else 0, out, err.decode()

    return run


@pytest.fixture
def holed(tmp_path: Path) -> Path:
    path = tmp_path / "holed.py"
    path.write_bytes(f"{BEFORE}{FILL_MARK}{AFTER}".encode())
    return path


# --- fill


def test_fill_prints_the_filled_text_and_nothing_else(
    call: Call, knowing: Path, holed: Path
) -> None:
    assert call("fill", holed, "-m", knowing, *HERE) == (0, WHOLE, "")
    assert FILL_MARK in holed.read_text(encoding="utf-8")


def test_fill_reads_stdin_and_keeps_every_byte(call: Call, knowing: Path) -> None:
    before, after = b"\xef\xbb\xbfa\r\nb\t", b"\r\n\x00 \xe2\x96\x81 end"
    text = before + FILL_MARK.encode() + after
    code, out, err = call("fill", "-", "-m", knowing, *HERE, "--length", "2", stdin=text)
    assert (code, err) == (0, "")
    assert out.startswith(before) and out.endswith(after) and len(out) > len(before + after)


def test_fill_writes_in_place(call: Call, knowing: Path, holed: Path) -> None:
    assert call("fill", holed, "-m", knowing, *HERE, "--in-place") == (0, b"", "")
    assert holed.read_bytes() == WHOLE


def test_fill_reports_as_json(call: Call, knowing: Path, holed: Path) -> None:
    _, out, err = call("fill", holed, "-m", knowing, *HERE, "--json", "--candidates", "2", "--show")
    report = json.loads(out)
    assert (report["text"].encode(), err) == (WHOLE, "")
    [hole] = report["holes"]
    assert report["text"][hole["start"] : hole["end"]] == hole["text"] == HOLE
    assert hole.keys() == set("start end text score tokens converged".split())
    assert len(report["candidates"]) == 2 and report["candidates"][0]["text"] == report["text"]
    assert report.keys() >= set("steps canvases seconds seed prompt_style model score".split())


def test_fill_options_reach_the_engine(call: Call, knowing: Path, holed: Path) -> None:
    size = len(Tokenizer.load(knowing).encode(HOLE))
    code, out, err = call("fill", holed, "-m", knowing, *HERE, "--length", str(size))
    assert (code, out, err) == (0, WHOLE, "")
    fast = ["--effort", "fast", "--max-tokens", str(size)]
    assert call("fill", holed, "-m", knowing, *HERE, *fast) == (0, WHOLE, "")
    _, out, _ = call("fill", holed, "-m", knowing, *HERE, "--stop", "=", "--max-tokens", "4")
    assert b"=" not in out.removesuffix(AFTER.encode())
    _, out, err = call("fill", holed, "-m", knowing, *HERE, "--candidates", "2", "--single-line")
    assert out.count(b"\n") == WHOLE.count(b"\n") and err.startswith("candidate 2, score -")


@pytest.mark.parametrize(
    ("args", "stdin", "phrase"),
    [
        (["-"], b"no hole", "no hole"),
        (["missing.txt"], b"", "no file missing.txt"),
        (["-", "--in-place"], FILL_MARK.encode(), "cannot be written in place"),
        (["-"], b"\xff" + FILL_MARK.encode(), "is not UTF-8 text"),
        (
            ["-", "--length", "1", "--length", "2"],
            FILL_MARK.encode(),
            "2 lengths are given for 1 holes",
        ),
        (["-", "--prompt-style", "other"], FILL_MARK.encode(), "style 'other' is not known"),
        (["-", "--effort", "slow"], FILL_MARK.encode(), "effort 'slow' is not known"),
        (["-", "--candidates", "0"], FILL_MARK.encode(), "candidates is 0"),
    ],
)
def test_a_wrong_fill_is_one_sentence(
    call: Call, args: list[str], stdin: bytes, phrase: str
) -> None:
    code, out, err = call("fill", *args, "-m", "no such model", stdin=stdin)
    assert (code, out) == (2, b"")
    assert err.startswith("dgemma: ") and err.count("\n") == 1 and phrase in err


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path, old = tmp_path / "old.txt", "old\n" * 100
    path.write_text(old, encoding="utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(DgemmaError, match="could not be written: File too large; it is as it"):
            put(path, "new\n" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text(encoding="utf-8") == old


def test_a_reader_sees_the_old_text_or_the_new_one_never_half(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes(b"old\n")
    path.chmod(0o640)
    with path.open("rb") as reader:
        put(path, "new\r\n")
        assert reader.read() == b"old\n", "the old file was written into"
    assert path.read_bytes() == b"new\r\n" and path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["old.txt"]


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "text.txt", tmp_path / "link.txt"
    target.write_bytes(b"old")
    link.symlink_to(Path("there", "text.txt"))
    put(link, "new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert os.listdir(target.parent) == ["text.txt"]


def test_other_names_of_a_file_see_the_new_text_too(tmp_path: Path) -> None:
    path, other = tmp_path / "one.txt", tmp_path / "other.txt"
    path.write_bytes(b"old")
    other.hardlink_to(path)
    put(path, "new")
    assert other.read_bytes() == b"new" and path.samefile(other)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_goes_wrong_at_the_last_moment_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((DgemmaError, KeyboardInterrupt)):
        put(path, "new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["old.txt"]


@pytest.mark.parametrize("name", ["dgemma.cli.text_files.mkstemp", "os.replace"])
def test_where_no_file_may_be_put_the_old_one_is_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As in a directory of somebody else, or of everybody's with the sticky bit."""
    path = tmp_path / "old.txt"
    path.write_bytes(b"old")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(name, refuse)
    put(path, "new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["old.txt"]
    path.write_bytes(b"old")
    whole = Path.write_bytes

    def run_full(self: Path, data: bytes) -> int:
        whole(self, data[:1])
        if data == b"old":
            return whole(self, data)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", run_full)
    with pytest.raises(DgemmaError, match="No space left on device; it is as it was"):
        put(path, "new")
    assert path.read_bytes() == b"old"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_directory_that_may_not_be_written_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes(b"old")
    tmp_path.chmod(0o555)
    try:
        put(path, "new")
    finally:
        tmp_path.chmod(0o755)
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_file_that_may_not_be_written_is_refused_before_any_work(call: Call, holed: Path) -> None:
    holed.chmod(0o444)
    for args in (["fill", holed, "--in-place"], ["edit", holed, "--apply"]):
        code, _, err = call(*args, "-m", "no such model")
        assert code == 2 and "may not be written" in err


# --- edit


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.txt"
    path.write_bytes(f"{WRONG}\r\n".encode())
    return path


def test_edit_prints_a_diff_and_applies_it_when_told(
    call: Call, knowing: Path, wrong: Path
) -> None:
    args = ["edit", wrong, "--do", REQUEST, "-m", knowing, *HERE]
    code, out, err = call(*args)
    assert (code, err) == (0, "") and wrong.read_bytes() == f"{WRONG}\r\n".encode()
    assert out.splitlines()[-2:] == [f"-{WRONG}".encode(), f"+{RIGHT}".encode()]
    assert call(*args, "--apply") == (0, b"", "")
    assert wrong.read_bytes() == f"{RIGHT}\r\n".encode()


def test_edit_says_that_nothing_changed(call: Call, knowing: Path, wrong: Path) -> None:
    wrong.write_text(RIGHT, encoding="utf-8")
    code, out, err = call("edit", wrong, "--do", REQUEST, "-m", knowing, *HERE, "--strength", "0")
    assert (code, out) == (0, b"")
    assert err.startswith("dgemma: nothing changed: ") and "--strength" in err


def test_edit_reports_as_json(call: Call, knowing: Path, wrong: Path) -> None:
    args = ["edit", wrong, "--do", REQUEST, "-m", knowing, *HERE, "--json", "--show"]
    _, out, err = call(*args)
    report = json.loads(out)
    assert (report["text"], err) == (f"{RIGHT}\r\n", "")
    [change] = report["changed"]
    assert change == {"start": 6, "end": 6, "old_start": 6, "old_end": 7, "old": "a", "new": ""}
    assert report.keys() >= set("diff opened passes steps canvases seconds seed model".split())


def test_edit_reads_stdin_and_keeps_to_its_lines(call: Call, knowing: Path) -> None:
    text = f"first\n{WRONG}\nlast\n".encode()
    args = ["edit", "-", "--do", REQUEST, "-m", knowing, *HERE, "--lines", "2", "--apply"]
    code, out, err = call(*args, stdin=text)
    assert (code, err) == (0, "")
    assert out.startswith(b"first\n") and out.endswith(b"last\n")


@pytest.mark.parametrize(
    ("args", "phrase"),
    [
        ("--lines two", "lines are 'two'"),
        ("--lines 2:9", "not in a text of 1 lines"),
        ("--strength 2", "strength is 2.0"),
        ("--passes 0", "passes is 0"),
    ],
)
def test_a_wrong_edit_is_one_sentence(call: Call, args: str, phrase: str) -> None:
    code, out, err = call("edit", "-", *args.split(), "-m", "no such model", stdin=b"text")
    assert (code, out) == (2, b"")
    assert err.startswith("dgemma: ") and err.count("\n") == 1 and phrase in err


@pytest.mark.parametrize("changed", ["another line\n", None])
def test_a_file_that_changed_meanwhile_is_not_overwritten(
    changed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late: before the write, or while the new file is made beside it."""
    path = tmp_path / "a.txt"
    for late in (False, True):
        path.write_text("old\n")

        def change(path: Path = path) -> None:
            path.unlink() if changed is None else path.write_text(changed)

        if late:
            monkeypatch.setattr("os.utime", lambda *_, **__: change())
        else:
            change()
        with pytest.raises(DgemmaError, match=r"meanwhile|while the result|could not be"):
            write_text(str(path), "new\n", "old\n")
        assert (path.read_text() if path.exists() else None) == changed
        assert [file for file in tmp_path.iterdir() if file != path] == []
    monkeypatch.undo()


def test_a_hard_link_that_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("another\n")
    (tmp_path / "b.txt").hardlink_to(path)
    with pytest.raises(DgemmaError, match="was changed while"):
        write_text(str(path), "new\n", "old\n")
    assert path.read_text() == "another\n"
