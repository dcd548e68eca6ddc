"""Train nano's image tower on composed pictures; the language model is frozen.

    python -m recipes.nano.pictures.train --data out/pictures.npz --out OUT --seconds 215
    python -m recipes.nano.pictures.train ... --state out/state.safetensors --ask-from 0

Two phases, by shares of the time. In both, soft token j learns the embedding of token j of the
transcription, and three linear heads after the fourth layer, dropped afterwards, learn what each
patch shows and where. In the second the frozen model is asked about lines and shapes, and its
losses count too; grids are read off the soft tokens, since a frozen nano that sees a grid solves it
(LOG.md). Writes `tower.safetensors` (the integer layout, under the released names),
`state.safetensors` (float32, to go on from) and `results.json` of pictures in held-out fonts.

B pictures, S soft tokens, P patches, D width.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgemma.programs.sudoku.grid import READ_TASK, TASK
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.int_layout import to_int_layout
from dgemma.weights.load import load_model
from recipes.nano.pictures import task
from recipes.nano.pictures.compose import NO_INDEX, NO_OFFSET, NUM_KINDS, Pictures
from recipes.nano.pictures.source import Sample, Source
from recipes.nano.pictures.tower import CONFIG, MAX_INDEX, SeeingTower, run_layer

PREFIX = "model.encoder."
TEMPERATURE = 0.05
COMPILE_STEPS = 3


class Shares(NamedTuple):
    """Pictures of a step by kind."""

    sudoku: int
    line: int
    shapes: int


# --- losses


def local_loss(local: Tensor, pictures: Pictures) -> Tensor:
    """Cross-entropy of what each patch's centre shows, its token, and its character there."""
    size = CONFIG.patch_size
    kind, index, offset = (
        x[:, size // 2 :: size, size // 2 :: size].flatten()
        for x in (pictures.kind, pictures.index, pictures.offset)
    )
    index = torch.where(index == NO_INDEX, MAX_INDEX, index)
    logits = local.float().flatten(0, 1).split([NUM_KINDS, MAX_INDEX + 1, NO_OFFSET + 1], -1)
    return sum(
        (F.cross_entropy(x, y) for x, y in zip(logits, (kind, index, offset), strict=True)),
        start=local.new_zeros(()),
    )


def token_loss(
    features_BSD: Tensor, tokens: Tensor, table_VD: Tensor, filler: int
) -> tuple[Tensor, Tensor]:
    """Pull soft tokens to the embeddings of the transcription; returns the loss and hits [B, K].

    Positions after it imitate the filler, with a tenth of the weight. A hit is the nearest
    embedding's token being right; there is none, and no miss, where a transcription has ended.
    """
    count = min(tokens.shape[1] + 6, features_BSD.shape[1])
    target = F.pad(tokens, (0, count - tokens.shape[1]), value=-1)
    is_token = target >= 0
    target = target.where(is_token, filler)
    features = features_BSD[:, :count].float()
    table = F.normalize(table_VD.float(), dim=1)
    logits = F.normalize(features, dim=-1) @ table.T / TEMPERATURE
    weight = torch.where(is_token, 1.0, 0.1)
    nearest = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    wanted = table_VD.float()[target]
    scale = table_VD.shape[1] ** 0.5
    error = (features / scale - wanted).square().sum(-1) / wanted.square().sum(-1).clamp(min=1e-6)
    loss = ((nearest.view_as(weight) + 0.3 * error) * weight).sum() / weight.sum()
    return loss, (logits.argmax(-1) == target) | ~is_token


class Trainer:
    """The tower, the frozen model and the optimizer; `clock` is the share of time that is spent."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        is_cuda = self.device.type == "cuda"
        torch.manual_seed(options.seed)
        checkpoint = load_model(
            NANO_DIRECTORY, device=self.device, dtype=torch.bfloat16 if is_cuda else torch.float32
        )
        self.objective = task.frozen_objective(checkpoint)
        self.table = checkpoint.model.embed_tokens.weight.detach()
        self.tower = SeeingTower(checkpoint.config.hidden_size).to(self.device)
        if options.state:
            self.tower.load_state_dict(load_file(options.state, device=str(self.device)))
        if is_cuda and not options.eager:
            torch._dynamo.config.suppress_errors = True
            torch._dynamo.config.recompile_limit = 64
            self.tower.run_layer = torch.compile(run_layer, dynamic=False)
        self.source = Source(options.data, self.device, options.seed, held_out=False)
        self.filler = self.source.tokenizer.encode(task.FILLER)[0]
        self.asked = {
            (question, first): task.Asked.of(question, checkpoint, first=first)
            for question in (READ_TASK, task.SAY, TASK, task.WHAT)
            for first in (False, True)
        }
        self.optimizers = self._optimizers()
        self.generator = torch.Generator(self.device).manual_seed(options.seed + 1)
        self.autocast = (lambda: torch.autocast("cuda", torch.bfloat16)) if is_cuda else nullcontext
        self.log: list[dict[str, float]] = []

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of layers, AdamW for the rest."""
        matrices, others = [], []
        for name, weight in self.tower.named_parameters():
            inside = ".layers." in name and weight.dim() == 2
            (matrices if inside else others).append(weight)
        rate = self.options.rate
        return [
            torch.optim.Muon(matrices, rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def step(self, *, asks: int, rate: float) -> dict[str, Tensor]:
        """Take one step; `asks`: pictures of each kind that the frozen model is asked about."""
        metrics: dict[str, Tensor] = {}
        shares = Shares(*self.options.shares)
        # Square pictures share a pass of the tower, so that compiled code sees two shapes.
        for names in (("sudoku", "shapes"), ("line",)):
            counts = [getattr(shares, name) for name in names]
            samples = [self._draw(*pair, asks) for pair in zip(names, counts, strict=True)]
            pixels = torch.cat([sample.pictures.pixels for sample in samples])
            with self.autocast():
                features, local = self.tower(pixels, samples[0].grid)
            loss = features.new_zeros((), dtype=torch.float32)
            parts = zip(names, samples, features.split(counts), local.split(counts), strict=True)
            for name, sample, own_features, own_local in parts:
                weight = len(own_features) / sum(shares)
                loss = loss + weight * self._loss(
                    name, sample, own_features, own_local, asks, metrics
                )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.tower.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return metrics

    def _draw(self, name: str, count: int, asks: int) -> Sample:
        solved = {"solved": True} if name == "sudoku" and asks and self.options.ask_sudoku else {}
        sample: Sample = getattr(self.source, name)(count, **solved)
        return sample

    def _loss(
        self,
        name: str,
        sample: Sample,
        features: Tensor,
        local: Tensor,
        asks: int,
        metrics: dict[str, Tensor],
    ) -> Tensor:
        near, hits = token_loss(features, sample.tokens, self.table, self.filler)
        patches = local_loss(local, sample.pictures)
        metrics[f"{name}.tokens"], metrics[f"{name}.patches"] = near.detach(), patches.detach()
        metrics[f"{name}.right"] = hits[:, : sample.tokens.shape[1]].all(1).float().mean()
        options = self.options
        loss = (options.near_later if asks else options.near) * near + 0.5 * patches
        asks = min(asks, len(features)) // 2 * 2
        if not asks or (name == "sudoku" and not options.ask_sudoku):
            return loss
        for question, answer in questions(name, sample):
            leaf = features[:asks].detach().requires_grad_()
            asked = self.asked[question, bool(self.source.rng.integers(2))]
            canvas = task.SUDOKU_CANVAS if name == "sudoku" else task.TEXT_CANVAS
            reply = task.with_end(answer[:asks], self.source.tokenizer)
            losses = task.lm_losses(self.objective, leaf, asked, reply, canvas, self.generator)
            (grad,) = torch.autograd.grad(losses.denoise + losses.causal, leaf)
            loss = loss + options.lm * (features[:asks].float() * grad.float()).sum()
            metrics[f"{question} denoise"] = losses.denoise.detach()
            metrics[f"{question} causal"] = losses.causal.detach()
        return loss

    def train(self) -> None:
        """Train for the time given; its first steps, which compile, are not in the schedule."""
        options, start, step, shown = self.options, time.perf_counter(), 0, -1e9
        begin, total = start, options.seconds
        while True:
            now = time.perf_counter()
            if step == COMPILE_STEPS:
                begin, total = now, options.seconds - (now - start)
            share = step / options.steps if options.steps else max(0.0, (now - begin) / total)
            share = 0.0 if step < COMPILE_STEPS else share
            if share >= 1:
                break
            warm = min(1.0, (step + 1) / options.warmup)
            rate = options.rate * warm * max(0.005, min(1.0, (1 - share) / (1 - options.hold)))
            metrics = self.step(asks=options.asks if share >= options.ask_from else 0, rate=rate)
            step += 1
            if now - shown > options.every:
                shown = now
                numbers = {name: round(float(value), 4) for name, value in metrics.items()}
                self.log.append({"step": step, "seconds": round(now - start, 1), **numbers})
                line = "  ".join(f"{name} {value:.3f}" for name, value in numbers.items())
                print(f"{step}, {now - start:.0f} s: {line}", flush=True)
        print(f"{step} steps in {time.perf_counter() - start:.0f} s", flush=True)


def questions(name: str, sample: Sample) -> Iterator[tuple[str, Tensor]]:
    """Return what is asked about a picture, and the answers' tokens."""
    if name == "sudoku":
        yield READ_TASK, sample.tokens
        assert sample.solution is not None
        yield TASK, sample.solution
    else:
        yield (task.SAY if name == "line" else task.WHAT), sample.tokens


# --- evaluation


@torch.no_grad()
def evaluate(trainer: Trainer, count: int, batch: int = 64) -> dict[str, Any]:
    """Measure on held-out fonts and sentences, composed pictures.

    `tokens` and `whole`: soft tokens whose nearest embedding is right, and pictures without a
    fault. `ar`: replies whose every next token is the likeliest, which is greedy decoding's exact
    match. `first_step`: tokens that one denoising step of pure noise gets right.
    """
    source = Source(trainer.options.data, trainer.device, 99, held_out=True)
    trainer.tower.run_layer = run_layer  # other shapes: not worth compiling
    found: dict[str, list[Tensor]] = {}
    for name in Shares._fields:
        for _ in range(max(1, count // batch)):
            solved = {"solved": True} if name == "sudoku" else {}
            sample: Sample = getattr(source, name)(batch, **solved)
            with trainer.autocast():
                features, _ = trainer.tower(sample.pictures.pixels, sample.grid)
            _, hits = token_loss(features, sample.tokens, trainer.table, trainer.filler)
            is_token = sample.tokens >= 0
            hits = hits[:, : sample.tokens.shape[1]]
            found.setdefault(f"{name}.tokens", []).append(hits[is_token].float())
            found.setdefault(f"{name}.whole", []).append(hits.all(1).float())
            for question, answer in questions(name, sample):
                for key, value in ask(trainer, features, question, answer, name).items():
                    found.setdefault(f"{question} {key}", []).append(value)
    return {name: float(torch.cat(values).mean()) for name, values in found.items()}


def ask(
    trainer: Trainer, features: Tensor, question: str, answer: Tensor, name: str
) -> Mapping[str, Tensor]:
    """Ask the frozen model: next tokens in one causal pass, and one step from pure noise."""
    canvas = task.SUDOKU_CANVAS if name == "sudoku" else task.TEXT_CANVAS
    reply = task.with_end(answer, trainer.source.tokenizer)
    objective, asked = trainer.objective, trainer.asked[question, False]
    batch = task.make_batch(features, asked, reply, canvas, trainer.generator, objective)
    noise = torch.randint_like(batch.token, objective.model.config.vocab_size)
    batch.token.copy_(torch.where(batch.is_canvas, noise, batch.token))
    objective.features_BSD, objective.begin = features, len(asked.before)
    from dgemma.train.masks import PackedContext

    context = PackedContext(objective.model.config, batch)
    zero = torch.zeros(batch.token.numel(), features.shape[-1], device=features.device)
    rows = objective.embed(batch, zero.to(trainer.table.dtype))
    hidden, _ = objective.run_layers(rows, context)
    right = objective.model.raw_logits(hidden).argmax(-1).view_as(batch.target) == batch.target
    is_reply = (batch.target >= 0) & ~batch.is_canvas
    of_canvas = right[:, -canvas:][:, : answer.shape[1]]
    return {
        "ar exact": (right | ~is_reply).all(1).float(),
        "ar tokens": right[is_reply].float(),
        "first_step tokens": of_canvas[answer >= 0].float(),
    }


def save(trainer: Trainer, results: Mapping[str, Any]) -> None:
    out: Path = trainer.options.out
    out.mkdir(parents=True, exist_ok=True)
    state = {
        name: x.detach().float().cpu().contiguous()
        for name, x in trainer.tower.state_dict().items()
    }
    save_file(state, out / "state.safetensors")
    weights = {
        PREFIX + name.removeprefix("encoder."): x
        for name, x in state.items()
        if name.startswith("encoder.")
    }
    save_file(to_int_layout(weights), out / "tower.safetensors")
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    sizes = {p.name: p.stat().st_size for p in sorted(out.iterdir()) if p.is_file()}
    print(json.dumps(sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("out/pictures.npz"))
    add("--out", type=Path, required=True)
    add("--state", type=Path, help="state.safetensors of an earlier call, to go on from")
    add("--seconds", type=float, default=240.0)
    add("--steps", type=int, default=0, help="stop after so many steps instead")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--shares", type=int, nargs=3, default=(192, 192, 64), help="pictures of a step")
    add("--asks", type=int, default=48, help="pictures of a kind that the frozen model is asked")
    add("--ask-from", type=float, default=0.5, help="share of the time before the second phase")
    add("--near", type=float, default=1.0, help="weight of imitating embeddings")
    add("--near-later", type=float, default=1.0, help="the same in the second phase")
    add("--ask-sudoku", action="store_true", help="ask the frozen model about grids too")
    add("--lm", type=float, default=1.0, help="weight of the frozen model's losses")
    add("--rate", type=float, default=2e-3)
    add("--hold", type=float, default=0.3, help="share of the time before the rate falls")
    add("--warmup", type=int, default=200)
    add("--every", type=float, default=10.0, help="seconds between reports")
    add("--evaluate", type=int, default=512, help="held-out pictures of each kind")
    add("--seed", type=int, default=1)
    add("--eager", action="store_true", help="do not compile the layers")
    options = parser.parse_args()
    trainer = Trainer(options)
    trainer.train()
    before = time.perf_counter()
    save(trainer, {"log": trainer.log})  # kept even if the evaluation fails
    measured = evaluate(trainer, options.evaluate)
    for name, value in measured.items():
        print(f"{value:8.4f}  {name}")
    settings = {name: str(value) for name, value in vars(options).items()}
    save(trainer, {"held_out": measured, "settings": settings, "log": trainer.log})
    print(f"evaluated in {time.perf_counter() - before:.0f} s")


if __name__ == "__main__":
    main()
