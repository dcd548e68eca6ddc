"""Coverage-guided fuzzing of the readers of untrusted bytes, by atheris.

    pip install atheris
    python -m tests.fuzz safetensors gguf --seconds 600 --out out/fuzz

Each target runs in a process of its own. An input that ends in anything but a result or a refusal,
or that takes two seconds of the processor, is written to `--out`, once for each line of the package
that raised; the search goes on. With `--keep`, inputs that reached new code replace the corpus of
the repository, a few of every size. The last line of each target is JSON; exits with 1 if anything
was found.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
SLOW = 2.0  # seconds of the processor
HUNG = 300  # seconds of the clock: a busy machine may stop the process for a while
MAX_BYTES = 1 << 16  # of an input
KEPT_BYTES = 4096  # of an input in the repository
KEPT_FILES = 40  # of a target
MEMORY = 10 << 30  # address space of a target


class Slow(BaseException):
    """An input took too long; not an Exception, so that no handler of the package hides it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--keep", action="store_true", help="renew the corpus of the repository")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # a child: fuzz this target
    args = parser.parse_args()
    if args.only:
        fuzz(args.only, args.seconds, args.out)
    from tests.fuzz.targets import TARGETS

    unknown = set(args.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    found = [run(name, args) for name in args.targets or TARGETS]
    return int(any(found))


def run(name: str, args: argparse.Namespace) -> int:
    """Fuzz a target in a child; returns the number of findings."""
    out = args.out / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.fuzz", "--only", name, "--out", str(out)]
    with (out / "log.txt").open("wb") as log:
        child = subprocess.run(
            [*command, "--seconds", str(args.seconds)], stdout=log, stderr=log, check=False
        )
    findings = sorted(out.glob("finding-*.txt"))
    if child.returncode:
        (out / "finding-crash.txt").write_text(f"the process ended with {child.returncode}\n")
        findings.append(out / "finding-crash.txt")
    for finding in findings:
        print(f"{finding}: {finding.read_text().splitlines()[0]}", file=sys.stderr)
    if args.keep:
        keep(name, out)
    stats = json.loads((out / "stats.json").read_text()) if (out / "stats.json").exists() else {}
    print(json.dumps({"target": name, **stats, "findings": len(findings)}), flush=True)
    return len(findings)


def keep(name: str, out: Path) -> None:
    """Replace the kept corpus by inputs of this run that reached new code, a few of every size."""
    kept = CORPUS / name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    files = [path for path in (out / "corpus").iterdir() if path.stat().st_size <= KEPT_BYTES]
    files.sort(key=lambda path: (path.stat().st_size, path.name))
    step = max(1, -(-len(files) // KEPT_FILES))
    for path in files[::step]:
        shutil.copyfile(path, kept / f"{path.name[:12]}.bin")


def fuzz(name: str, seconds: int, out: Path) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris
    import torch  # noqa: F401  # before the instrumentation: it would take minutes

    with atheris.instrument_imports(include=["dgemma", "jinja2"]):
        from tests.fuzz import targets

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    state = _State(name, out)
    corpus = out / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(targets.seeds(name)):
        (corpus / f"seed-{number}").write_bytes(seed)
    for path in (CORPUS / name).glob("*"):
        shutil.copyfile(path, corpus / path.name)
    signal.signal(signal.SIGPROF, _too_slow)

    def one(data: bytes) -> None:
        state.run(targets.check, data)

    escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in targets.words(name))
    (out / "words.txt").write_text("".join(f'"{word}"\n' for word in escaped))
    options = [
        f"-dict={out / 'words.txt'}",
        f"-timeout={HUNG}",
        f"-max_len={MAX_BYTES}",
        "-rss_limit_mb=0",
    ]
    atheris.Setup(["fuzz", f"-max_total_time={seconds}", *options, str(corpus)], one)
    atheris.Fuzz()


def _too_slow(signum: int, frame: object) -> None:
    raise Slow(f"it took longer than {SLOW} seconds")


class _State:
    """Counts inputs and keeps the first of each kind of finding."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.inputs, self.begun, self.slowest = 0, time.monotonic(), 0.0
        self.seen: set[str] = set()

    def run(self, check: Any, data: bytes) -> None:
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SLOW)
        try:
            check(self.name, data)
        except KeyboardInterrupt:
            raise
        except (Slow, MemoryError) as error:
            # A template of a checkpoint runs in a process with limits of both.
            if self.name != "template":
                self.record(error, data)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.record(error, data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.inputs += 1
        self.slowest = max(self.slowest, time.process_time() - begun)
        if self.inputs < 10 or self.inputs % 500 == 0:
            seconds = round(time.monotonic() - self.begun)
            stats = {"inputs": self.inputs, "seconds": seconds, "slowest_s": round(self.slowest, 2)}
            (self.out / "stats.json").write_text(json.dumps(stats))

    def record(self, error: BaseException, data: bytes) -> None:
        """Write an input with its traceback, unless the same line has raised before."""
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if f"{os.sep}dgemma{os.sep}" in frame.filename]
        last = (ours or frames)[-1]
        kind = f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
        if kind in self.seen:
            return
        self.seen.add(kind)
        stem = self.out / f"finding-{len(self.seen)}"
        stem.with_suffix(".bin").write_bytes(data)
        text = "".join(traceback.format_exception(error, limit=-8))
        stem.with_suffix(".txt").write_text(f"{kind}: {str(error)[:300]}\n\n{text}")


if __name__ == "__main__":
    memory = Path("/dev/shm")
    home = memory if memory.is_dir() else None  # a file system in memory is ten times faster
    with tempfile.TemporaryDirectory(prefix="dgemma-fuzz-", dir=home) as directory:
        tempfile.tempdir = directory
        sys.exit(main())
