"""Chat templates: compiled and rendered by jinja, in this process or in one with limits.

Every control token that a template writes is marked, in its parsed tree, with half a surrogate
pair; `chat` has the reason.

The template of an untrusted checkpoint is a program: a few characters of it count to a billion, or
double a string forty times, already when it is compiled. The sandbox of jinja keeps it from files
and attributes, not from that. So it is compiled and rendered in a child, which is killed when it
takes too long and cannot allocate beyond its limit. Children are kept for the next request; a
child serves one at a time, and runs this file.

    request: length, JSON {source, control, variables}
    reply:   kind, length, UTF-8 text or sentence
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NoReturn

from dgemma.errors import CheckpointError, DgemmaError, UsageError

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MARK = "\ud800"
# Raised by template code on unexpected data, besides jinja's own errors.
TEMPLATE_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,  # of an infinite constant: jinja writes it as `inf`
    RuntimeError,
    TypeError,
    ValueError,
)
MAX_SECONDS = 10.0  # of one rendering; the released template takes milliseconds
MAX_START_SECONDS = 60.0  # of a child, on a machine that is busy
MAX_MEMORY = 1 << 30  # bytes of a child's address space
MAX_CHARACTERS = 1 << 25  # of a rendered prompt
MAX_IDLE = 4  # children that are kept
HEAD, REPLY = struct.Struct("<Q"), struct.Struct("<cQ")
TEXT, REFUSED, BROKEN, READY = b"T", b"U", b"C", b"R"  # kinds of a reply
PIECE = 1 << 16


def control_pattern(names: Sequence[str], mark: str = "") -> re.Pattern[str]:
    """Match a control token written after `mark`; the longest wins where two begin alike."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"{re.escape(mark)}({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


@lru_cache(maxsize=16)
def compile_template(source: str, control: tuple[str, ...]) -> Template:
    """Compile a template that marks the control tokens it writes."""
    from jinja2 import TemplateSyntaxError

    environment = make_environment()
    try:
        tree = environment.parse(source)
        mark_written(tree, control_pattern(control))
        return environment.from_string(tree)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from None
    except (*TEMPLATE_FAULTS, SyntaxError) as error:  # of constants that jinja computes in advance
        raise CheckpointError(f"the chat template cannot be compiled: {error}") from None


def render(template: Template, variables: Mapping[str, object]) -> str:
    """Render a conversation; the text has marks before its control tokens."""
    from jinja2 import TemplateError

    try:
        return template.render(variables)
    except (TemplateError, *TEMPLATE_FAULTS) as error:
        reason = str(error).replace(MARK, "")
        raise UsageError(f"the chat template cannot render this conversation: {reason}") from error


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the jinja environment in which transformers renders chat templates."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; unlike jinja's own filter, keeps HTML and non-ASCII characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def mark_written(tree: nodes.Node, pattern: re.Pattern[str]) -> None:
    """Mark the control tokens in the strings a template writes, not in those it searches for."""
    from jinja2 import nodes

    def marked(text: str) -> str:
        return pattern.sub(lambda match: MARK + match[0], text)

    def visit(node: nodes.Node) -> None:
        if isinstance(node, nodes.TemplateData):
            node.data = marked(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            node.value = marked(node.value)
        skipped = searched(node)
        for child in node.iter_child_nodes():
            if not any(child is other for other in skipped):
                visit(child)

    visit(tree)


def searched(node: nodes.Node) -> Sequence[nodes.Node]:
    """Return the children of `node` that content is compared with; they are not written."""
    from jinja2 import nodes

    if isinstance(node, nodes.Compare):
        return [node.expr, *node.ops]
    if isinstance(node, nodes.Test):
        return node.args or []
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        # Of text.replace(old, new) the second is written.
        return node.args[:1] if node.node.attr == "replace" else node.args
    if isinstance(node, nodes.Filter) and node.name == "replace":
        return (node.args or [])[:1]
    return []


# --- in a process with limits


def render_bounded(source: str, control: tuple[str, ...], variables: Mapping[str, object]) -> str:
    """Render in a child; a template that exceeds its limits is refused in a sentence."""
    request = {"source": source, "control": control, "variables": variables}
    kind, text = _ask(json.dumps(request, default=dict).encode())
    if kind == TEXT:
        return text
    raise UsageError(text) if kind == REFUSED else CheckpointError(text)


# --- the parent


class _Child:
    """A process that renders templates, until it is killed or its input ends."""

    def __init__(self) -> None:
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        # A file and not a module: with `-m` the current directory could replace the library.
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C stops an answer, not this
            env={**os.environ, "PYTHONPATH": path},
            bufsize=0,
        )
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)
        try:
            self.exchange(b"", MAX_START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def exchange(self, request: bytes, seconds: float) -> tuple[bytes, str]:
        """Send a request while reading the reply; raises TimeoutError or EOFError."""
        stdin, stdout = self._pipes()
        end, unsent, reply = time.monotonic() + seconds, memoryview(request), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if unsent:
                selector.register(stdin, selectors.EVENT_WRITE)
            while len(reply) < REPLY.size or len(reply) < REPLY.size + REPLY.unpack_from(reply)[1]:
                events = selector.select(max(0.0, end - time.monotonic()))
                if not events:
                    raise TimeoutError
                for key, _ in events:
                    if key.fileobj is stdin:
                        unsent = unsent[os.write(stdin.fileno(), unsent[:PIECE]) :]
                        if not unsent:
                            selector.unregister(stdin)
                        continue
                    piece = os.read(stdout.fileno(), PIECE)
                    if not piece:
                        raise EOFError
                    reply += piece
        kind: bytes = REPLY.unpack_from(reply)[0]
        return kind, reply[REPLY.size :].decode("utf-8", "surrogatepass")

    def kill(self) -> None:
        self.process.kill()
        for pipe in self._pipes():
            pipe.close()
        self.process.wait()


_lock = threading.Lock()
_idle: list[tuple[int, _Child]] = []  # with the process that started them: a fork must not share


@contextlib.contextmanager
def _borrowed() -> Iterator[_Child]:
    """Take a child that is idle, or start one; it is killed unless the exchange succeeds."""
    with _lock:
        mine = [entry for entry in _idle if entry[0] == os.getpid()]
        _idle[:] = mine[:-1]
    child = mine[-1][1] if mine else _Child()
    try:
        yield child
    except BaseException:
        child.kill()
        raise
    with _lock:
        if len(_idle) < MAX_IDLE:
            _idle.append((os.getpid(), child))
            return
    child.kill()


@atexit.register
def _kill_idle() -> None:
    with _lock:
        for owner, child in _idle:
            if owner == os.getpid():
                child.kill()
        _idle.clear()


def _ask(body: bytes) -> tuple[bytes, str]:
    try:
        with _borrowed() as child:
            return child.exchange(HEAD.pack(len(body)) + body, MAX_SECONDS)
    except TimeoutError:
        raise CheckpointError(
            f"the chat template did not finish within {MAX_SECONDS:g} seconds; use another one"
        ) from None
    except (EOFError, OSError) as error:
        reason = str(error) or f"it needs more than {MAX_MEMORY >> 20} MiB, or crashes"
        raise CheckpointError(
            f"the chat template could not be rendered: {reason}; use another one"
        ) from None


# --- the child


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    _reply(replies, READY, "")
    while len(head := requests.read(HEAD.size)) == HEAD.size:
        (length,) = HEAD.unpack(head)
        _reply(replies, *_answer(requests.read(length)))


def _answer(body: bytes) -> tuple[bytes, str]:
    try:
        request: dict[str, Any] = json.loads(body)
        template = compile_template(request["source"], tuple(request["control"]))
        text = render(template, request["variables"])
        if len(text) > MAX_CHARACTERS:
            sentence = f"the chat template writes {len(text)} characters; at most {MAX_CHARACTERS}"
            return REFUSED, f"{sentence} are allowed: shorten the conversation"
        return TEXT, text
    except DgemmaError as error:
        return (REFUSED if isinstance(error, UsageError) else BROKEN), str(error)
    except MemoryError:
        limit = MAX_MEMORY >> 20
        return BROKEN, f"the chat template needs more than {limit} MiB; use another one"
    except Exception as error:  # of jinja itself, on a template that it did not expect
        return BROKEN, f"the chat template fails ({type(error).__name__}); use another one"


def _reply(replies: BinaryIO, kind: bytes, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    replies.write(REPLY.pack(kind, len(data)) + data)
    replies.flush()


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # not on this system: time is limited all the same


if __name__ == "__main__":
    _limit_memory()
    _serve(sys.stdin.buffer, sys.stdout.buffer)
