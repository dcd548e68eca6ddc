"""Train nano's image tower on composed pictures, without the language model.

    python -m recipes.nano.pictures.train --data out/pictures.npz --out OUT --seconds 200

A soft token learns the embedding of the one token that it stands for (`spelling.py`), and two
linears after earlier layers, which are dropped afterwards, what each patch shows and what its
column is to end with. Writes, every 40 seconds and at the end, `state.safetensors` (float32, for
`ship.py` or to go on from), and `results.json` of pictures in held-out fonts.

B pictures, S soft tokens, K classes of them, D width of the language model.
"""

import argparse
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.load import load_model
from recipes.nano.pictures.compose import NO_CHAR
from recipes.nano.pictures.source import FILLER_CLASS, Classes, Sample, Source
from recipes.nano.pictures.spelling import edit_distance
from recipes.nano.pictures.tower import CONFIG, IDS, ROWS, SeeingTower, Seen

TEMPERATURE = 0.05
FILLER_WEIGHT, ERROR_WEIGHT, LOCAL_WEIGHT = 0.1, 0.3, 0.5
COMPILE_STEPS = 3
KINDS = ("sheet", "line", "line", "scene")  # of a step's pictures, in passes of their own


def local_loss(seen: Seen, sample: Sample) -> Tensor:
    """Cross-entropy of what each patch's centre shows."""
    return F.cross_entropy(seen.local.float().flatten(0, 1), shown(sample).flatten())


def column_loss(seen: Seen, sample: Sample) -> Tensor:
    """Cross-entropy of what the columns of a line's patches end with, where they show something.

    It leads characters to their columns, from where the last row can take them.
    """
    last = sample.target.unflatten(1, (sample.grid.rows // 2, -1))[:, -1:]
    below = last.repeat_interleave(2, 2).expand(-1, sample.grid.rows, -1)
    target = below.where(shown(sample) != NO_CHAR, -1).flatten()
    logits = seen.column.float().flatten(0, 1)
    total = F.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
    return total / (target >= 0).sum().clamp(min=1)


def shown(sample: Sample) -> Tensor:
    """Return what the centres of patches show, [B, rows, columns]."""
    size = CONFIG.patch_size
    return sample.kind[:, size // 2 :: size, size // 2 :: size]


def spelling_loss(features_BSD: Tensor, target_BS: Tensor, rows_KD: Tensor) -> Tensor:
    """Pull soft tokens to the embeddings of their tokens: to be the nearest, and to be equal."""
    features, target = features_BSD.float().flatten(0, 1), target_BS.flatten()
    wanted = rows_KD[target.clamp(min=0)]
    weight = torch.where(target == FILLER_CLASS, FILLER_WEIGHT, 1.0) * (target >= 0)
    logits = nearness(features, rows_KD) / TEMPERATURE
    nearest = F.cross_entropy(logits, target.clamp(min=0), reduction="none")
    error = (features - wanted).square().sum(-1) / wanted.square().sum(-1)
    return ((nearest + ERROR_WEIGHT * error) * weight).sum() / weight.sum().clamp(min=1)


def nearness(features: Tensor, rows_KD: Tensor) -> Tensor:
    """Return the cosines of features and the embeddings of all classes."""
    return F.normalize(features.float(), dim=-1) @ F.normalize(rows_KD, dim=-1).T


class Trainer:
    """The tower, the embeddings that it imitates, and the optimizers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        is_cuda = self.device.type == "cuda"
        torch.manual_seed(options.seed)
        self.classes = Classes.of(Tokenizer.load(NANO_DIRECTORY), self.device)
        model = load_model(NANO_DIRECTORY, device=torch.device("cpu")).model
        with torch.no_grad():
            rows_KD = model.embed(torch.tensor(self.classes.ids)).float()
        self.rows_KD = rows_KD.to(self.device)
        layers, width = options.layers, options.width
        config = replace(
            CONFIG,
            hidden_size=width,
            intermediate_size=width * CONFIG.intermediate_size // CONFIG.hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=width // CONFIG.head_dim,
            num_key_value_heads=width // CONFIG.head_dim,
        )
        self.tower = SeeingTower(rows_KD.shape[1], config, len(rows_KD)).to(self.device)
        if options.state:
            state = load_file(options.state, device=str(self.device))
            del state[IDS], state[ROWS]
            self.tower.load_state_dict(state)
        if is_cuda and not options.eager:
            self.tower.compile_layers()
        self.source = Source(options.data, self.device, options.seed, held_out=False)
        self.optimizers = self._optimizers()
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

    def step(self, rate: float) -> dict[str, Tensor]:
        """Take one step, of some pictures of each kind."""
        metrics: dict[str, Tensor] = {}
        for kind, count in zip(KINDS, self.options.pictures, strict=True):
            if not count:
                continue
            sample: Sample = getattr(self.source, kind)(count, self.classes)
            with self.autocast():
                seen = self.tower(sample.pixels, sample.grid)
            near = spelling_loss(seen.features, sample.target, self.rows_KD)
            patches = local_loss(seen, sample)
            metrics[kind], metrics[f"{kind} patches"] = near.detach(), patches.detach()
            if kind == "line":
                columns = column_loss(seen, sample)
                metrics["line columns"] = columns.detach()
                patches = patches + columns
            (near + LOCAL_WEIGHT * patches).backward()
        torch.nn.utils.clip_grad_norm_(self.tower.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return metrics

    def train(self) -> None:
        """Train for the time given; its first steps, which compile, are not in the schedule."""
        options, start, step = self.options, time.perf_counter(), 0
        begin, total, shown, saved = start, options.seconds, start - options.every, start
        while True:
            now = time.perf_counter()
            if step == COMPILE_STEPS:
                begin, total = now, options.seconds - (now - start)
            share = step / options.steps if options.steps else (now - begin) / max(total, 1e-3)
            share = share if step >= COMPILE_STEPS else 0.0
            if share >= 1:
                break
            warm = min(1.0, (step + 1) / options.warmup)
            rate = options.rate * warm * max(0.005, min(1.0, (1 - share) / (1 - options.hold)))
            metrics = self.step(rate)
            step += 1
            if now - shown > options.every:
                shown = now
                numbers = {name: round(float(value), 4) for name, value in metrics.items()}
                self.log.append({"step": step, "seconds": round(now - start, 1), **numbers})
                line = "  ".join(f"{name} {value:.3f}" for name, value in numbers.items())
                print(f"{step}, {now - start:.0f} s: {line}", flush=True)
            if now - saved > options.save_every:
                saved = now
                save(self, {"log": self.log})
        print(f"{step} steps in {time.perf_counter() - start:.0f} s", flush=True)


@torch.no_grad()
def evaluate(trainer: Trainer, count: int, batch: int = 32) -> dict[str, float]:
    """Measure on held-out fonts and sentences, composed pictures.

    `cells`: soft tokens that stand for something, and whose nearest embedding is right; `whole`:
    pictures without a fault. `errors`: edit distance of lines over their length.
    """
    source = Source(trainer.options.data, trainer.device, 99, held_out=True)
    trainer.tower.interpret_layers()  # without gradients they would be compiled anew
    found: dict[str, float] = {}
    for kind in dict.fromkeys(KINDS):
        right, whole, wrong, letters = [], [], 0, 0
        for _ in range(max(1, count // batch)):
            sample: Sample = getattr(source, kind)(min(batch, count), trainer.classes)
            with trainer.autocast():
                seen = trainer.tower(sample.pixels, sample.grid)
            guess = nearness(seen.features, trainer.rows_KD).argmax(-1)
            kept = (sample.target >= 0).all(1)
            guess, target = guess[kept], sample.target[kept]
            right.append((guess == target)[target != FILLER_CLASS].float())
            whole.append((guess == target).all(1).float())
            for a, b in zip(guess.tolist(), target.tolist(), strict=True):
                said, wanted = trainer.classes.text(a), trainer.classes.text(b)
                wrong, letters = wrong + edit_distance(wanted, said), letters + len(wanted)
        found[f"{kind} cells"] = float(torch.cat(right).mean())
        found[f"{kind} whole"] = float(torch.cat(whole).mean())
        found[f"{kind} errors"] = wrong / max(1, letters)
    return found


def save(trainer: Trainer, results: Mapping[str, Any]) -> None:
    """Write the tower with the embeddings that it was trained towards, and results."""
    out: Path = trainer.options.out
    out.mkdir(parents=True, exist_ok=True)
    state = {name: x.detach().float().cpu() for name, x in trainer.tower.state_dict().items()}
    state |= {IDS: torch.tensor(trainer.classes.ids), ROWS: trainer.rows_KD.cpu()}
    partial = out / "state.partial"
    save_file({name: x.contiguous() for name, x in state.items()}, partial)
    partial.replace(out / "state.safetensors")
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("out/pictures.npz"))
    add("--out", type=Path, required=True)
    add("--state", type=Path, help="state.safetensors of an earlier call, to go on from")
    add("--seconds", type=float, default=200.0)
    add("--steps", type=int, default=0, help="stop after so many steps instead")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--pictures", type=int, nargs=4, default=(64, 72, 72, 24), help=f"of a step: {KINDS}")
    add("--width", type=int, default=CONFIG.hidden_size)
    add("--layers", type=int, default=CONFIG.num_hidden_layers)
    add("--rate", type=float, default=3e-3)
    add("--hold", type=float, default=0.3, help="share of the time before the rate falls")
    add("--warmup", type=int, default=100)
    add("--every", type=float, default=10.0, help="seconds between reports")
    add("--save-every", type=float, default=40.0, help="seconds between saved weights")
    add("--evaluate", type=int, default=256, help="held-out pictures of each kind")
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
