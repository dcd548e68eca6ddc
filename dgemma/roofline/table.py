"""The ops of one pass, from a config alone: arithmetic, weights and activations of each.

    step    a canvas is denoised: all its rows at once, head, statistics, soft embedding
    commit  a settled canvas enters the cache: the stack alone, causal
    token   one token in autoregressive mode: the stack for one row, and the head

Counted is what a fused implementation moves to and from memory. Head norms, rotations and gates
happen on the way and cost nothing; an expert is read if any row chose it, all being equally likely.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dgemma.config import FULL, SLIDING, AttentionShape, ModelConfig

Kind = Literal["experts", "dense", "head", "exact", "attention"]
PassName = Literal["step", "commit", "token"]

NORM_TRAFFIC = 16  # times a layer's norms and sums read or write the stream
NORMS = 7  # of a layer, all as wide as the stream

# The released google/diffusiongemma-26B-A4B-it.
RELEASED = ModelConfig(
    vocab_size=262_144,
    hidden_size=2816,
    intermediate_size=2112,
    moe_intermediate_size=704,
    num_experts=128,
    top_k_experts=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    head_dim=256,
    global_head_dim=512,
    layer_types=((SLIDING,) * 5 + (FULL,)) * 5,
    sliding_window=1024,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kind of work, over all layers that have it."""

    name: str
    kind: Kind
    flop: float = 0.0
    weights: float = 0.0  # numbers the model stores for it
    read: float = 1.0  # share of them that is read
    moved: float = 0.0  # activations, and the keys and values behind them, in numbers
    is_again: bool = False  # another op already counts these weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What runs: how many rows, over which keys, with or without the vocabulary."""

    name: PassName
    rows: int
    context: int

    def keys(self, window: int | None) -> float:
        """Keys a row sees on average."""
        before = self.context if window is None else min(self.context, window - 1)
        # A committed row sees those of its canvas that come before it.
        return before + (self.rows if self.name != "commit" else (self.rows + 1) / 2)


def passes(config: ModelConfig, context: int) -> tuple[Pass, Pass, Pass]:
    """The three passes of a model behind `context` tokens."""
    rows = config.canvas_length
    return (
        Pass(name="step", rows=rows, context=context),
        Pass(name="commit", rows=rows, context=context),
        Pass(name="token", rows=1, context=context),
    )


def ops(config: ModelConfig, run: Pass) -> list[Op]:
    """All work of a pass."""
    found = [*_entry(config, run)]
    for kind in (SLIDING, FULL):
        count = config.layer_types.count(kind)
        if count:
            shape = config.attention(config.layer_types.index(kind))
            name = "sliding" if kind == SLIDING else "full"
            found += _attention(config, shape, run, (name, count))
    found += [*_feed_forward(config, run), *_norms(config, run)]
    return found + ([] if run.name == "commit" else [*_vocabulary(config, run)])


def stored_parameters(config: ModelConfig) -> dict[Kind, float]:
    """Weights of the text model by kind, each once."""
    found: dict[Kind, float] = {}
    for op in ops(config, passes(config, 0)[0]):
        if not op.is_again:
            found[op.kind] = found.get(op.kind, 0) + op.weights
    return found


def active_parameters(config: ModelConfig) -> float:
    """Weights that one token uses."""
    found = stored_parameters(config)
    unused = found["experts"] * (1 - config.top_k_experts / config.num_experts)
    return sum(found.values()) - unused


def cache_numbers(config: ModelConfig, context: int) -> float:
    """Keys and values kept for a context, with room for a canvas."""
    total = 0.0
    for layer in range(config.num_hidden_layers):
        shape = config.attention(layer)
        before = context if shape.window is None else min(context, shape.window - 1)
        total += 2 * shape.num_kv_heads * shape.head_dim * (before + config.canvas_length)
    return total


def _entry(config: ModelConfig, run: Pass) -> Iterator[Op]:
    width, inner = config.hidden_size, config.intermediate_size
    yield Op(name="embed", kind="exact", moved=2 * run.rows * width)
    if run.name == "step" and config.can_denoise:
        weights = 3 * width * inner
        yield Op(
            name="self-conditioning",
            kind="dense",
            flop=2 * run.rows * weights,
            weights=weights,
            moved=run.rows * (4 * width + 4 * inner),
        )


def _attention(
    config: ModelConfig, shape: AttentionShape, run: Pass, where: tuple[str, int]
) -> Iterator[Op]:
    (name, count), width = where, config.hidden_size
    query = config.num_attention_heads * shape.head_dim
    key = shape.num_kv_heads * shape.head_dim
    inputs = query + key * (2 if shape.has_value else 1)
    keys = run.keys(shape.window)
    for part, outputs in ((f"qkv {name}", inputs), (f"output {name}", query)):
        yield Op(
            name=part,
            kind="dense",
            flop=2 * count * run.rows * width * outputs,
            weights=count * width * outputs,
            moved=count * run.rows * (width + outputs),
        )
    yield Op(
        name=f"attention {name}",
        kind="attention",
        flop=4 * count * run.rows * query * keys,
        moved=count * (2 * run.rows * query + 2 * key * keys),
    )


def _feed_forward(config: ModelConfig, run: Pass) -> Iterator[Op]:
    layers, width, rows = config.num_hidden_layers, config.hidden_size, run.rows
    inner, choices = config.moe_intermediate_size, run.rows * config.top_k_experts
    dense = layers * 3 * width * config.intermediate_size
    yield Op(
        name="dense MLP",
        kind="dense",
        flop=2 * rows * dense,
        weights=dense,
        moved=layers * rows * (2 * width + 4 * config.intermediate_size),
    )
    router = layers * width * config.num_experts
    yield Op(
        name="router",
        kind="exact",
        flop=2 * rows * router,
        weights=router,
        moved=layers * rows * (width + 2 * config.num_experts),
    )
    for name, outputs, moved in (
        ("experts gate and up", 2 * inner, width + 2 * inner),
        ("experts down", inner, width + inner),
    ):
        yield Op(
            name=name,
            kind="experts",
            flop=2 * layers * choices * width * outputs,
            weights=layers * config.num_experts * width * outputs,
            read=_share_hit(config, rows),
            moved=layers * choices * moved,
        )


def _share_hit(config: ModelConfig, rows: int) -> float:
    """Expected share of a layer's experts that at least one row chooses."""
    return 1 - (1 - config.top_k_experts / config.num_experts) ** rows


def _norms(config: ModelConfig, run: Pass) -> Iterator[Op]:
    layers, width = config.num_hidden_layers, config.hidden_size
    # Beside the norms of the stream: the router's two scales, and the layer's own.
    weights = layers * ((NORMS + 1) * width + config.num_experts + 1) + width
    weights += sum(2 * config.attention(layer).head_dim for layer in range(layers))
    if config.can_denoise:
        weights += width
    yield Op(
        name="norms and sums",
        kind="exact",
        weights=weights,
        moved=layers * NORM_TRAFFIC * run.rows * width,
    )


def _vocabulary(config: ModelConfig, run: Pass) -> Iterator[Op]:
    width, vocab, rows = config.hidden_size, config.vocab_size, run.rows
    flop = 2 * rows * width * vocab
    logits = rows * vocab
    yield Op(
        name="head", kind="head", flop=flop, weights=width * vocab, moved=rows * width + logits
    )
    if run.name == "token":
        yield Op(name="statistics and draw", kind="exact", moved=logits)
        return
    yield Op(name="statistics and draw", kind="exact", moved=logits)
    yield Op(
        name="soft embedding",
        kind="head",
        flop=flop,
        weights=width * vocab,
        moved=2 * logits + rows * width,
        is_again=True,
    )
