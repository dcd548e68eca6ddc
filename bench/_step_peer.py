"""Time the denoising step of transformers in a process of its own, in turn with ours.

    python bench/_step_peer.py [--caches dynamic static] [--prompt 512] [--layers 30] [--uneven]
                                [--shapes released|example|tiny] [--device auto]

`bench/step.py --peer` starts it. Its weights are drawn as ours are for the same shapes, so that
routing is the same. Its steps run inside its own `generate`, with its own cache and, for the static
one, its own compilation; stopping is off, and a step's time is the difference of two lengths. Once
every cache kind is warm it writes a line of JSON about itself; then it answers each line that names
a kind with `{"ms": ...}`. Everything else goes to standard error. One process for each kind of
cache: what ends one loses neither the other's numbers nor ours, and a compiled static cache failed
to launch in a process that also had our CUDA graphs.
"""

import argparse
import json
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TextIO

import torch
from common import EXAMPLE, SHAPES, Facts, build, random_tokens, shape, wait
from torch import Tensor, nn

from dgemma.config import config_to_json
from dgemma.device import choose_device
from dgemma.model.gemma import Gemma

CACHES = ("dynamic", "static")
MIN_STEPS, MAX_STEPS = 4, 20  # steps; everything that is not a step is in both
NO_PAD = -1  # a padding id that no token of a canvas has
WARM = 2  # rounds: a captured pass is compiled, then recorded, then replayed
ROUNDS = 5
WARM_S, ANSWER_S, EXIT_S = 400.0, 60.0, 10.0  # compiling takes some 180 s
LINES, WIDTH = 12, 300  # of standard error that an error shows


# --- their model


@contextmanager
def without_memory() -> Iterator[None]:
    """Create parameters on the meta device: a shape and no memory; buffers are real."""
    register = nn.Module.register_parameter

    def empty(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None:
            self._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def transformers_model(model: Gemma) -> Any:
    """Return transformers' model on our tensors; its vision tower is small, and zero."""
    # transformers uses a package named `kernels` if there is one; bench/kernels.py is not it.
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    raw = config_to_json(replace(model.config, vision=EXAMPLE.vision))
    with without_memory():
        peer = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**raw))
    weights = {f"model.decoder.{name}": w for name, w in model.state_dict().items()}
    for name in [name for name in weights if name.endswith("layer_scalar")]:
        weights[name.replace(".decoder.", ".encoder.language_model.")] = weights[name]
    unknown = peer.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    assert not unknown, f"transformers has no such weights: {unknown[:4]}"
    peer.tie_weights()
    dtype, device = model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
    for module in peer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                zeros = torch.zeros(parameter.shape, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(zeros, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return peer.eval().requires_grad_(False)


class Peer:
    """Their model after a prompt, timed by cache kind."""

    def __init__(self, model: Gemma, prompt: int) -> None:
        self.model, self.device = transformers_model(model), model.embed_tokens.weight.device
        self.length = model.config.canvas_length
        self.prompt_1T = random_tokens(model.config.vocab_size, prompt, self.device)[None]

    def seconds(self, steps: int, cache: str) -> float:
        """Seconds of one canvas of so many steps, the prompt included."""
        options = {} if cache == "dynamic" else {"cache_implementation": cache}
        begin = time.perf_counter()
        out = self.model.generate(
            input_ids=self.prompt_1T,
            attention_mask=torch.ones_like(self.prompt_1T),
            max_new_tokens=self.length,
            max_denoising_steps=steps,
            confidence_threshold=1e-12,
            pad_token_id=NO_PAD,
            **options,
        )
        wait(self.device)
        found = time.perf_counter() - begin
        tokens = (out.sequences[0, self.prompt_1T.shape[1] :] != NO_PAD).sum()  # as it counts them
        taken = round((tokens / out.tokens_per_forward[0]).item())
        assert taken == steps, f"it took {taken} steps instead of {steps}"
        return found

    def ms(self, cache: str) -> float:
        few, many = (self.seconds(steps, cache) for steps in (MIN_STEPS, MAX_STEPS))
        return 1000 * (many - few) / (MAX_STEPS - MIN_STEPS)

    def warm_s(self, cache: str) -> float:
        begin = time.perf_counter()
        for _ in range(WARM):
            self.ms(cache)
        return round(time.perf_counter() - begin, 1)

    def experts_hit(self) -> float | None:
        """Fraction of all layers' experts that a step reads; None where routers do not say."""
        found: list[Tensor] = []

        def note(_module: nn.Module, _given: Any, out: Sequence[Tensor]) -> None:
            found.extend(each for each in out if not each.is_floating_point())

        layers = self.model.model.decoder.layers
        hooks = [layer.router.register_forward_hook(note) for layer in layers]
        self.seconds(1, "dynamic")
        for hook in hooks:
            hook.remove()
        count = self.model.config.text_config.num_experts
        return sum(ids.unique().numel() for ids in found) / (count * len(found)) if found else None

    def facts(self) -> Facts:
        import transformers

        text = self.model.config.text_config
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": getattr(text, "_attn_implementation", None),
            "experts": getattr(text, "_experts_implementation", None),
            "experts_hit": self.experts_hit(),
            "prompt": self.prompt_1T.shape[1],
        }


# --- our side


class PeerError(Exception):
    """The peer ended, or did not answer; with the last lines of its standard error."""


@dataclass(frozen=True, slots=True)
class PeerProcess:
    process: subprocess.Popen[str]
    lines: "queue.SimpleQueue[str]"
    errors: IO[str]

    def answer(self, seconds: float) -> Facts:
        """Return its next line. A dead peer is noticed even while its workers hold its output."""
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
                return dict(json.loads(line))
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

    def failure(self, reason: str) -> PeerError:
        self.process.kill()  # it writes to the file that is read next
        self.process.wait()
        self.errors.seek(0)
        lines = [line.rstrip()[:WIDTH] for line in self.errors if line.strip()]
        # A crash ends in a list of addresses; its reason is above them.
        lines = [line for line in lines if not line.startswith("frame #")]
        return PeerError("\n".join([reason, *lines[-LINES:]]))


def read_lines(source: IO[str], lines: "queue.SimpleQueue[str]") -> None:
    with source:
        for line in source:
            lines.put(line)


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[PeerProcess]:
    """Start a peer; it is ended afterwards, whatever happens."""
    program = Path(__file__).resolve()
    paths = [str(program.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, str(program), *arguments],
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
            yield PeerProcess(process, lines, errors)
        finally:
            end(process)
            reader.join(timeout=EXIT_S)


def end(process: subprocess.Popen[str]) -> None:
    """Close its input, and kill it if it does not exit."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def alternate(peer: PeerProcess, cache: str, our_ms: Callable[[], float], rounds: int) -> Facts:
    """Measure theirs, ours, theirs, ours: drift affects both."""
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


def compare(
    our_ms: Callable[[], float],
    caches: Sequence[str],
    arguments: Sequence[str],
    *,
    rounds: int = ROUNDS,
    warm_s: float = WARM_S,
) -> Facts:
    """Return both sides' milliseconds for each kind of cache, or the reason there are none."""
    facts: Facts = {}
    for cache in caches:
        found = facts[cache] = {}
        try:
            with started([*arguments, "--caches", cache]) as peer:
                found |= peer.answer(warm_s)
                found["warm_s"] = found["warm_s"][cache]
                found |= alternate(peer, cache, our_ms, rounds)
        except PeerError as error:
            found["failed"] = str(error)
    return facts


# --- the process


def own_output() -> TextIO:
    """Return standard output; from here on its number leads to standard error."""
    found = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    return found


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--shapes", choices=list(SHAPES), default="released")
    parser.add_argument("--layers", type=int, help="fewer of them")
    parser.add_argument("--uneven", action="store_true", help="routing as weights are drawn")
    parser.add_argument("--device", default="auto")
    return parser.parse_args(given)


@torch.inference_mode()
def main(given: Sequence[str] | None = None) -> None:
    arguments, output = parse(given), own_output()
    config, device = shape(arguments.shapes, arguments.layers), choose_device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build(config, device=device, dtype=dtype, even=not arguments.uneven)
    peer = Peer(model, arguments.prompt)
    facts = peer.facts()
    facts["warm_s"] = {cache: peer.warm_s(cache) for cache in arguments.caches}
    print(json.dumps(facts), file=output, flush=True)
    for line in sys.stdin:
        cache = line.strip()
        if cache not in arguments.caches:
            raise SystemExit(f"not a warm cache: {cache!r}; there are {arguments.caches}")
        print(json.dumps({"ms": peer.ms(cache)}), file=output, flush=True)


if __name__ == "__main__":
    main()
