"""Cross-entropy on held-out text: of the next token, and of noised canvases as in training."""

from collections.abc import Sequence

from dgemma.engine import Engine
from dgemma.engine.fill import end_id
from dgemma.eval.answers import show
from dgemma.eval.data import Data, MissingData
from dgemma.eval.likelihood import Denoised, causal_losses, denoising_losses
from dgemma.eval.measure import Case, Measure

TASK = "cross_entropy"
SETS = ("stories", "code", "dialogue")
LEVELS = tuple(round(0.1 * i, 1) for i in range(1, 10))
LIMIT = 200
TOKENS = 512  # of a text, in whole canvases; what lies beyond is not read
NATS, NATS_A_BYTE = "nats/token", "nats/byte"


def cross_entropy(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Causal and denoising losses on stories, code and dialogue."""
    measures = []
    for name in SETS:
        try:
            texts = data.texts(f"{name}.jsonl", limit or LIMIT)
        except MissingData as reason:
            measures.append(Case(TASK, prefix=f"{name}: ").skipped(str(reason)))
            continue
        ids = [_ids(engine, text) for text in texts]
        measures += _causal(engine, name, ids)
        if engine.model.config.can_denoise:
            measures += _denoising(engine, name, ids, seed)
    return measures


def _ids(engine: Engine, text: str) -> list[int]:
    """The beginning of texts, the text, and its end, as far as it is read."""
    config = engine.model.config
    ids = [config.bos_token_id, *engine.tokenizer.encode(text), end_id(engine)]
    return ids[: 1 + max(1, TOKENS // config.canvas_length) * config.canvas_length]


def _causal(engine: Engine, name: str, texts: Sequence[list[int]]) -> list[Measure]:
    losses = [sum(loss) for loss in causal_losses(engine.model, texts)]
    case = Case(TASK, "ar", f"{name}: ")
    # The closing token is predicted like the others; it is no bytes.
    sizes = [len(engine.tokenizer.decode_bytes(ids[1:], skip_control=True)) for ids in texts]
    tokens = [(loss, float(len(ids) - 1)) for loss, ids in zip(losses, texts, strict=True)]
    bytes_ = [(loss, float(size)) for loss, size in zip(losses, sizes, strict=True)]
    return [
        case.rate("next token", tokens, NATS),
        case.rate("next token, per byte", bytes_, NATS_A_BYTE),
    ]


def _denoising(engine: Engine, name: str, texts: Sequence[list[int]], seed: int) -> list[Measure]:
    by_level: dict[float, list[Denoised]] = {}
    for number, level in enumerate(LEVELS, start=1):
        fill = end_id(engine)
        by_level[level] = denoising_losses(engine.model, texts, level, fill, seed)
        show(f"{TASK}, {name}", number, len(LEVELS))
    case = Case(TASK, "diffusion", f"{name}: ")
    per_text = list(zip(*by_level.values(), strict=True))
    measures = [
        case.rate(
            f"denoising, {what}, {'with' if told else 'without'} self-conditioning",
            [_summed(levels, told, what == "noised") for levels in per_text],
            NATS,
            "levels 0.1 to 0.9 together",
        )
        for what in ("all", "noised")
        for told in (True, False)
    ]
    for level, denoised in by_level.items():
        parts = [_summed([one], True, False) for one in denoised]
        measures.append(case.rate(f"denoising at {level}", parts, NATS, "with self-conditioning"))
    return measures


def _summed(levels: Sequence[Denoised], told: bool, only_noised: bool) -> tuple[float, float]:
    """The losses of one text, all or at its noised positions, and how many they are."""
    chosen = [
        loss
        for one in levels
        for loss, is_noised in zip(
            one.conditioned if told else one.plain, one.is_noised, strict=True
        )
        if is_noised or not only_noised
    ]
    return sum(chosen), float(len(chosen))
