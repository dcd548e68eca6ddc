"""Run the examples of README and docs on nano, and write the outputs that the pages show.

    python docs/make_outputs.py [--check] [PAGE ...]

With `--check` nothing is written: a shown output that differs, or an example that fails, ends
with 1.

- Python blocks run in order, in one namespace for a page, other models replaced by `nano`. Comment
  lines right below a statement are its output: what it prints, or the value of an expression.
- In a block with `$ command` lines, what follows a command is its output; `$ cat FILE` shows a file
  that the next commands read.
- Of other blocks the commands that `nano` answers in seconds are run, `curl` against a server of
  its own, and must succeed.

Weights are float32, so that texts differ between machines only where two tokens are equally likely
up to the last digits. Seconds are not compared.
"""

import argparse
import ast
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/fill-and-edit.md",
    "docs/python.md",
    "docs/serve.md",
    "docs/structure.md",
)
BLOCK = re.compile(r"^```(python|console|)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODELS = re.compile(r'"(?:path/to/checkpoint|google/diffusiongemma-26B-A4B-it|nano)"')
NANO = ROOT / "dgemma" / "models" / "nano"
EXACT = "--device cpu --dtype float32"
# Commands of a block without outputs; of others a person has to choose the model or the file.
RUNNABLE = re.compile(r"dgemma (?:sudoku|generate|fit|info) |echo .* dgemma fill |curl ")
PLACEHOLDER = re.compile(r"\b(?:[A-Z]{4,}|google/\S+ --device auto)|--model google|photo|page\.png")
ADDRESS = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8080")
SECONDS = re.compile(r"\d+\.\d+ s\b")
MAX_SECONDS = 240
SHIM = """#!/bin/sh
case $1 in generate|fill|edit|sudoku|serve) set -- "$@" {exact} ;; esac
exec {python} -m dgemma "$@"
"""


class ExampleFailed(Exception):
    """An example of a page ended with an error."""


@dataclass
class Runner:
    """The examples of one page: a directory with its files, a namespace, a server once needed."""

    directory: Path
    namespace: dict[str, object] = field(default_factory=dict)
    url: str = ""
    server: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        shim = self.directory / "bin" / "dgemma"
        shim.parent.mkdir()
        shim.write_text(SHIM.format(exact=EXACT, python=sys.executable), encoding="utf-8")
        shim.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
        }

    def block(self, kind: str, text: str) -> str:
        """Run a block; return it with the outputs that it shows."""
        if kind == "python":
            return self.python(text)
        if text.startswith("$ "):
            return self.console(text)
        for command in commands(text):
            if RUNNABLE.match(command) and not PLACEHOLDER.search(command):
                self.shell(command)
        return text

    def python(self, text: str) -> str:
        source = MODELS.sub(repr(str(NANO)), text)
        source = source.replace("Engine.load(", "load_exact(")
        if ADDRESS.search(source):
            source = ADDRESS.sub(self.serve(), source)
        self.namespace.setdefault("load_exact", load_exact)
        lines, shown = text.splitlines(keepends=True), list[str]()
        position = 0
        for node in ast.parse(source).body:
            assert node.end_lineno is not None
            shown += lines[position : node.end_lineno]
            position = node.end_lineno
            output = self.statement(node)
            if position < len(lines) and lines[position].startswith("# "):
                while position < len(lines) and lines[position].startswith("#"):
                    position += 1
                shown += [f"# {line}\n" for line in output.splitlines()]
        return "".join([*shown, *lines[position:]])

    def statement(self, node: ast.stmt) -> str:
        """Run a statement; return what it prints, or the value of an expression."""
        printed, value = StringIO(), None
        with redirect_stdout(printed):
            if isinstance(node, ast.Expr):
                code = compile(ast.Expression(node.value), "<page>", "eval")
                value = eval(code, self.namespace)
            else:
                exec(compile(ast.Module([node], []), "<page>", "exec"), self.namespace)
        if printed.getvalue() or value is None:
            return printed.getvalue()
        return value if isinstance(value, str) else repr(value)

    def console(self, text: str) -> str:
        shown = []
        for part in re.split(r"^(?=\$ )", text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            if line.startswith("$ cat "):
                (self.directory / line.removeprefix("$ cat ")).write_text(output, encoding="utf-8")
            else:
                output = self.shell(line.removeprefix("$ "), may_fail=True)
            shown.append(f"{line}\n{output}")
        return "".join(shown)

    def shell(self, command: str, *, may_fail: bool = False) -> str:
        if command.startswith("curl "):
            command = ADDRESS.sub(self.serve(), command).replace("curl ", "curl -fsS ", 1)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=MAX_SECONDS,
            check=False,
        )
        if done.returncode and not may_fail:
            raise ExampleFailed(f"{command}\nended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def serve(self) -> str:
        """Start a server with the first request for one; return its address."""
        if self.server is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            call = [str(self.directory / "bin" / "dgemma"), "serve", "--port", str(port)]
            self.server = subprocess.Popen(call, env=self.environment, stderr=subprocess.DEVNULL)
            wait_for(f"{self.url}/health")
        return self.url

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait()


def load_exact(model: str = "nano", **options: object) -> object:
    """`Engine.load`, in float32 on the CPU."""
    from dgemma import Engine

    return Engine.load(model, **{"device": "cpu", "dtype": "float32", **options})  # type: ignore[arg-type]


def wait_for(url: str) -> None:
    end = time.monotonic() + MAX_SECONDS
    while time.monotonic() < end:
        try:
            urlopen(url, timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise ExampleFailed(f"no server answers at {url}")


def commands(text: str) -> Iterator[str]:
    """Split a block into commands; one goes on while a quotation is open or a line ends with \\."""
    command = ""
    for line in text.splitlines():
        command = f"{command}\n{line}" if command else line
        if command.count("'") % 2 == 0 and not line.endswith("\\"):
            yield command.strip()
            command = ""


@contextmanager
def scratch() -> Iterator[Runner]:
    """A directory to run the examples of a page in."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(Path(directory))
        os.chdir(directory)
        try:
            yield runner
        finally:
            os.chdir(before)
            runner.close()


def rendered(page: str) -> str:
    """Run the examples of a page; return it with the outputs that it shows."""
    with scratch() as runner:
        return BLOCK.sub(
            lambda found: f"```{found[1]}\n{runner.block(found[1], found[2])}```", page
        )


def same(page: str, new: str) -> bool:
    return SECONDS.sub("N s", page) == SECONDS.sub("N s", new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    stale = []
    for name in given.pages:
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        new = rendered(page)
        if same(page, new):
            print(f"{name}: as shown", file=sys.stderr)
            continue
        stale.append(name)
        if given.check:
            print(f"{name} shows another output than:", file=sys.stderr)
            old = set(page.splitlines())
            print(
                *(line for line in new.splitlines() if line not in old), sep="\n", file=sys.stderr
            )
        else:
            path.write_text(new, encoding="utf-8")
            print(f"{name}: written", file=sys.stderr)
    sys.exit(1 if given.check and stale else 0)


if __name__ == "__main__":
    main()
