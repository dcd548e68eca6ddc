"""Runs a generated program apart from this one, and says whether it came to its end.

A fresh interpreter (`python -I`, no environment, an empty directory that is removed afterwards)
limits itself before it reads the program: CPU seconds, memory, no file of any size, no more
processes; and it takes the functions that delete, move and start things out of reach. It is killed
when its time is up. The program has passed if it reached its last line: the interpreter then
answers with a word that the program is not told, so leaving early is not passing.

This holds off accidents of a small model's code. It is not a wall against an adversary: the program
can still read files and open connections. Run evaluations of models you do not trust in a
container or on a machine of no value.
"""

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

SECONDS = 5.0
MEMORY = 1 << 30  # bytes of address space
WORKERS = 4
KEEPER = """
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


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Whether the program runs to its end, without an error and in time."""
    word = secrets.token_hex(16)
    command = [sys.executable, "-I", "-c", KEEPER, str(int(seconds) + 1), str(MEMORY)]
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


def passing(programs: Sequence[str], seconds: float = SECONDS) -> list[bool]:
    """Whether each passes, some at a time."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(lambda program: passes(program, seconds), programs))
