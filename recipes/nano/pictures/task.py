"""Questions about pictures, and the rows that a frozen nano is trained on.

Every picture has a transcription: the grid, the line, or a caption. Soft token j imitates the
embedding of its token j. In the second phase the frozen model is asked too, and its own losses, of
canvases and of next tokens, reach the tower through the features.

B pictures, S soft tokens, P tokens of a prompt, R of a reply, L of a canvas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from dgemma.images import Image
from dgemma.programs.sudoku.grid import CELLS, grid_text
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.control_tokens import IMAGE_BEGIN, IMAGE_END, IMAGE_TOKEN, TURN_END
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.corruption import EOS_ID, NONE
from dgemma.train.objective import LossCounts, Losses, LossSettings, Objective
from dgemma.train.packing import Batch
from dgemma.weights.load import Checkpoint
from recipes.nano.pictures.compose import COLOURS, FORMS

SAY, WHAT = "What does it say?", "What is in the picture?"
SUDOKU_CANVAS, TEXT_CANVAS = 96, 64
MAX_OBJECTS = 4
NUMBERS = ("no", "one", "two", "three", "four")
FILLER = "\n"  # imitated by soft tokens after the transcription


@dataclass(frozen=True, slots=True)
class Scenes:
    """Objects of scenes and the captions' tokens, padded with -1."""

    form: Tensor
    colour: Tensor
    tokens: Tensor


def caption(objects: Sequence[tuple[int, int]]) -> str:
    """Name and count objects, given as form and colour: equal ones together, in a fixed order."""
    names = []
    for form, colour in sorted(set(objects)):
        count = objects.count((form, colour))
        noun = f"{list(COLOURS)[colour]} {FORMS[form]}"
        plural = "" if count == 1 else "es" if FORMS[form] == "cross" else "s"
        names.append(f"{NUMBERS[count]} {noun}{plural}")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def draw_objects(rng: Random) -> list[tuple[int, int]]:
    """Draw up to four objects; half of them repeat one before."""
    objects: list[tuple[int, int]] = []
    for _ in range(rng.randint(1, MAX_OBJECTS)):
        new = (rng.randrange(len(FORMS)), rng.randrange(len(COLOURS)))
        objects.append(rng.choice(objects) if objects and rng.random() < 0.5 else new)
    return objects


def make_scenes(tokenizer: Tokenizer, count: int, seed: int, device: torch.device) -> Scenes:
    rng = Random(seed)
    objects = [draw_objects(rng) for _ in range(count)]
    ids = [tokenizer.encode(caption(one)) for one in objects]
    form, colour = np.full((2, count, MAX_OBJECTS), -1), np.zeros((2, count, MAX_OBJECTS), int)
    for i, scene in enumerate(objects):
        form[0, i, : len(scene)] = [one[0] for one in scene]
        colour[0, i, : len(scene)] = [one[1] for one in scene]
    tokens = np.full((count, max(map(len, ids))), -1)
    for i, line in enumerate(ids):
        tokens[i, : len(line)] = line
    return Scenes(*(torch.from_numpy(x).to(device) for x in (form[0], colour[0], tokens)))


def grid_table(tokenizer: Tokenizer) -> Tensor:
    """Return the tokens of a grid's text by digit, [10, 89]; a newline is in every tenth place."""
    return torch.tensor([tokenizer.encode(grid_text(str(d) * CELLS)) for d in range(10)])


def grid_tokens(digits_B81: Tensor, table: Tensor) -> Tensor:
    """Return the tokens of grids' text."""
    place = torch.arange(table.shape[1], device=table.device)
    cell = (place // 10 * 9 + (place % 10).clamp(max=8)).clamp(max=CELLS - 1)
    return table[digits_B81[:, cell], place]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question's prompt around the soft tokens, with the picture first or last."""

    before: Tensor
    after: Tensor

    @classmethod
    def of(cls, question: str, checkpoint: Checkpoint, *, first: bool) -> "Asked":
        assert checkpoint.directory is not None
        tokenizer = Tokenizer.load(checkpoint.directory)
        template = ChatTemplate.load(checkpoint.directory, tokenizer)
        picture = Image(b"")
        parts = (picture, question) if first else (question, picture)
        ids = list(template.prompt([Message(role="user", content=parts)]).ids)
        control = tokenizer.control_ids
        at = ids.index(control[IMAGE_TOKEN])
        begin, end = control[IMAGE_BEGIN], control[IMAGE_END]
        return cls(torch.tensor([*ids[:at], begin]), torch.tensor([end, *ids[at + 1 :]]))


class SeeingObjective(Objective):
    """The published objective with features in place of the rows of soft tokens.

    The model is frozen: a gradient is taken of the features alone.
    """

    features_BSD: Tensor
    begin: int  # the position of the first soft token

    def _embed(self, batch: Batch, self_cond_TD: Tensor | None) -> Tensor:
        rows_TD = super()._embed(batch, self_cond_TD)
        whole = len(self.features_BSD) == len(batch.token)
        features = self.features_BSD if whole else self.features_BSD[::2]
        rows = rows_TD.view(*batch.token.shape, -1)
        before, after = rows[:, : self.begin], rows[:, self.begin + features.shape[1] :]
        return torch.cat([before, features.to(rows.dtype), after], 1).flatten(0, 1)


def frozen_objective(checkpoint: Checkpoint) -> SeeingObjective:
    model = checkpoint.model.requires_grad_(False)
    for layer in model.layers:
        layer.experts.requires_grad_(True)  # the path of training, though nothing is learnt
    return SeeingObjective(model, LossSettings(balance_weight=0.0))


def lm_losses(
    objective: SeeingObjective,
    features_BSD: Tensor,
    asked: Asked,
    reply_BR: Tensor,
    canvas_length: int,
    generator: torch.Generator,
) -> Losses:
    """Compute the frozen model's losses of replies, which end where -1 begins."""
    batch = make_batch(features_BSD, asked, reply_BR, canvas_length, generator, objective)
    objective.features_BSD, objective.begin = features_BSD, len(asked.before)
    return objective(batch, LossCounts.on_device(batch))


def make_batch(
    features_BSD: Tensor,
    asked: Asked,
    reply_BR: Tensor,
    canvas_length: int,
    generator: torch.Generator,
    objective: SeeingObjective,
) -> Batch:
    """Lay out prompt, reply and one noised canvas of each picture."""
    count, soft = features_BSD.shape[:2]
    device = features_BSD.device
    clean = reply_BR.where(reply_BR >= 0, EOS_ID)
    before, after = asked.before.to(device), asked.after.to(device)
    prompt = torch.cat([before, torch.zeros(soft, dtype=torch.long, device=device), after])
    length, replied = len(prompt), clean.shape[1]
    canvas = torch.full((count, canvas_length), EOS_ID, device=device)
    canvas[:, :replied] = clean
    level = torch.rand((count, 1), generator=generator, device=device)
    is_noise = torch.rand(canvas.shape, generator=generator, device=device) < level
    vocabulary = objective.model.config.vocab_size
    noise = torch.randint(vocabulary, canvas.shape, generator=generator, device=device)
    token = torch.cat([prompt.expand(count, -1), clean, torch.where(is_noise, noise, canvas)], 1)
    causal = torch.full((count, length + replied), NONE, device=device)
    causal[:, length - 1 : -1] = reply_BR
    position = torch.arange(length + replied, device=device)
    places = torch.cat([position, length + torch.arange(canvas_length, device=device)])
    rows = len(places)
    is_canvas = torch.arange(rows, device=device) >= length + replied
    begin = torch.where(is_canvas, length, places + 1)
    nothing = torch.zeros_like(token)
    return Batch(
        token=token,
        target=torch.cat([causal, canvas], 1),
        position=places.expand(count, -1),
        canvas=torch.where(is_canvas, 0, NONE).expand(count, -1),
        start=begin.expand(count, -1),
        pinned=nothing,
        example=nothing,
        rng_key=torch.full_like(token, NONE),
        weight=torch.ones_like(token),
    )


def with_end(tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Append the end of a turn to replies, which are padded with -1."""
    padded = torch.cat([tokens, torch.full_like(tokens[:, :1], -1)], 1)
    length = (tokens >= 0).sum(1, keepdim=True)
    return padded.scatter(1, length, tokenizer.control_ids[TURN_END])
