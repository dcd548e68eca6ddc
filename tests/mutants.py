"""Faults put into the code on purpose, each of which a test must find.

    python -m tests.mutants [WORD]

Each mutant changes one text of one file, in a copy of the tree, and runs the tests named for it.
Prints a row for each and exits with 1 if one survives. `tests/test_mutants.py` holds that every
text still occurs once.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns

ROOT = Path(__file__).resolve().parents[1]
TREES = ("dgemma", "tests", "examples", "recipes")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: `old` becomes `new` in `file`, and `test` fails."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    Mutant(
        "Host is compared by suffix",
        "dgemma/server/auth.py",
        'name.strip("[]").lower() not in self.hosts',
        'not name.strip("[]").lower().endswith(tuple(self.hosts))',
        "server/test_hardening.py::test_a_host_is_compared_as_a_whole",
    ),
    Mutant(
        "a torn cache is used after a failed pass",
        "dgemma/engine/core.py",
        "if not all(given.cache.is_consistent for given in inputs):",
        "if False:",
        "engine/test_requests.py::test_a_torn_cache_is_not_used_after_a_failed_pass",
    ),
    Mutant(
        "a torn cache is kept for other requests",
        "dgemma/engine/request.py",
        "if keep and cache.is_consistent and cache.length == self.num_committed:",
        "if keep and cache.length == self.num_committed:",
        "engine/test_requests.py::test_a_torn_cache_is_not_remembered",
    ),
    Mutant(
        "a token id equal to the vocabulary size is taken",
        "dgemma/server/body_params.py",
        "most = engine.tokenizer.vocab_size - 1",
        "most = engine.tokenizer.vocab_size",
        "server/test_hardening.py::test_a_token_id_equal_to_the_vocabulary_size_is_refused",
    ),
    Mutant(
        "a stop id equal to the vocabulary size is taken",
        "dgemma/config/model_config.py",
        "if not _is_whole(token, 0, vocab_size - 1):",
        "if not _is_whole(token, 0, vocab_size):",
        "weights/test_hostile.py::test_a_stop_id_equal_to_the_vocabulary_size_is_refused",
    ),
    Mutant(
        "a training state may run code",
        "dgemma/train/checkpoint.py",
        "weights_only=True",
        "weights_only=False",
        "train/test_files.py::test_a_state_executes_nothing_that_it_contains",
    ),
    Mutant(
        "a training state is written in place",
        "dgemma/train/checkpoint.py",
        "partial = path.with_suffix(PARTIAL)",
        "partial = path",
        "train/test_files.py::test_a_write_that_fails_leaves_the_state_that_was",
    ),
    Mutant(
        "numbers beyond a float are taken",
        "dgemma/server/service.py",
        "if not isfinite(value := float(number)):",
        "if (value := float(number)) != value:",
        "server/test_faults.py::test_any_value_of_a_body_may_be_odd",
    ),
    Mutant(
        "an opening that is no Unicode stops the router",
        "dgemma/scale/replica.py",
        '.encode("utf-8", "surrogatepass")',
        ".encode()",
        "scale/test_replay.py::test_an_opening_that_is_no_unicode_has_a_replica_too",
    ),
    Mutant(
        "a replica that was silent is counted twice",
        "dgemma/scale/front.py",
        "self._silent.pop(name, None)",
        "self._silent.get(name)",
        "scale/test_front.py::test_a_replica_that_was_silent_for_a_while_is_counted_once",
    ),
    Mutant(
        "tokens of restarts are not counted",
        "dgemma/programs/sudoku/solve.py",
        "prompt_tokens += done.prompt_tokens",
        "prompt_tokens = done.prompt_tokens",
        "programs/test_sudoku_cli.py::test_only_what_does_not_converge_is_begun_again",
    ),
]


def mutated_tree(mutant: Mutant, directory: Path) -> None:
    """Copy the tree by links, but for the file that is changed."""
    for tree in TREES:
        links = ignore_patterns("__pycache__")
        copytree(ROOT / tree, directory / tree, copy_function=os.symlink, ignore=links)
    (directory / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = directory / mutant.file
    changed.unlink()
    changed.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")


def is_found(mutant: Mutant) -> bool:
    """True if the mutant's test fails, and not for another reason."""
    with tempfile.TemporaryDirectory() as folder:
        mutated_tree(mutant, Path(folder))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"tests/{mutant.test}"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, 1) or "ImportError" in done.stdout:
        sys.exit(f"{mutant.name}: the test did not run\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main() -> None:
    word, survivors = " ".join(sys.argv[1:]), 0
    for mutant in MUTANTS:
        if word in mutant.name:
            began = time.perf_counter()
            found = is_found(mutant)
            survivors += not found
            verdict = "found" if found else "SURVIVES"
            print(f"{verdict:9} {time.perf_counter() - began:5.1f} s  {mutant.name}", flush=True)
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
