"""Our steps and transformers' in turn, theirs in a process of its own (`bench/gpu_peer.py`).

One process for each kind of cache: what ends one loses neither the other's numbers nor ours. It is
started and warmed while nothing is measured, and is idle while ours runs.
"""

import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import IO, Any

PROGRAM = Path(__file__).with_name("gpu_peer.py")
ROUNDS = 5
WAIT_S = 400.0  # until it is warm: compiling takes some 180 s
ANSWER_S = 60.0
LEAVE_S = 10.0
LINES, WIDTH = 12, 300  # of what it wrote last
Facts = dict[str, Any]


class PeerError(Exception):
    """It ended, or said nothing for too long; with the last lines of its standard error."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A started peer: its process, its lines as they come, and what it complains of."""

    process: subprocess.Popen[str]
    lines: "queue.SimpleQueue[str]"
    errors: IO[str]

    def answer(self, seconds: float) -> Facts:
        """Its next line. A dead peer is seen at once, though its workers may hold its output."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            is_over = self.process.poll() is not None
            try:
                line = self.lines.get(timeout=0.2)
            except queue.Empty:
                if is_over:
                    raise self.failure(f"it ended with {self.process.returncode}") from None
                continue
            try:
                return dict(loads(line))
            except ValueError:
                raise self.failure(f"not an answer: {line[:WIDTH]!r}") from None
        raise self.failure(f"no answer in {seconds:.0f} s")

    def ms(self, cache: str) -> float:
        assert self.process.stdin is not None
        try:
            print(cache, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self.failure("it ended between two rounds") from None
        return float(self.answer(ANSWER_S)["ms"])

    def failure(self, what: str) -> PeerError:
        self.process.kill()  # it writes where we read
        self.process.wait()
        self.errors.seek(0)
        told = [line.rstrip()[:WIDTH] for line in self.errors if line.strip()]
        # A crash ends in its addresses, and what it was stands above them.
        told = [line for line in told if not line.startswith("frame #")]
        return PeerError("\n".join([what, *told[-LINES:]]))


def read_lines(source: IO[str], lines: "queue.SimpleQueue[str]") -> None:
    with source:
        for line in source:
            lines.put(line)


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[Peer]:
    """A peer that is being built; it is gone in the end, whatever happens."""
    paths = [str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=environment,
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=read_lines, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            yield Peer(process, lines, errors)
        finally:
            end(process)
            reader.join(timeout=LEAVE_S)


def end(process: subprocess.Popen[str]) -> None:
    """No more questions; and if that does not end it, by force."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def in_turn(peer: Peer, cache: str, our_ms: Callable[[], float], rounds: int) -> Facts:
    """Theirs, ours, theirs, ours: what drifts, drifts for both."""
    our_ms()
    pairs = [(peer.ms(cache), our_ms()) for _ in range(rounds)]
    ratios = [theirs / ours for theirs, ours in pairs]
    return {
        "their_ms": statistics.median(theirs for theirs, _ in pairs),
        "our_ms": statistics.median(ours for _, ours in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "rounds": pairs,
    }


def beside(
    our_ms: Callable[[], float],
    caches: Sequence[str],
    arguments: Sequence[str],
    *,
    rounds: int = ROUNDS,
    wait_s: float = WAIT_S,
) -> Facts:
    """For each kind of cache both sides' milliseconds, or why there are none."""
    facts: Facts = {}
    for cache in caches:
        found = facts[cache] = {}
        try:
            with started([*arguments, "--caches", cache]) as peer:
                found |= peer.answer(wait_s)
                found["warm_s"] = found["warm_s"][cache]
                found |= in_turn(peer, cache, our_ms, rounds)
        except PeerError as error:
            found["failed"] = str(error)
    return facts
