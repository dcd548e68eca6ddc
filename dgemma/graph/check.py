"""A short check of every kernel family on the model at hand, before any is used.

One layer of each kind runs a chunk of prompt, a commit merged with a canvas, and single tokens:
once with the family's kernels alone, once by definition with the same choice of experts, which is
judged for itself. Row statistics are held against their definition in float64, what else is done at
the ends of a step against its own. This finds kernels that are broken on a device or for a shape,
not the last digit: that is what `bench/gpu_check.py` and the tests are for.

T tokens of a pass, D width, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.config import FULL, LayerType, ModelConfig
from dgemma.errors import DgemmaError
from dgemma.graph.check_ends import end_checks, ends_off, head_off
from dgemma.graph.check_routes import Routes
from dgemma.graph.check_soft import exactly, soft_off
from dgemma.graph.reading import Reading, dense_mean_16, read_by_kernels, sparse_mean
from dgemma.model import Gemma, Layer, TokenTable
from dgemma.ops.fast import FAMILIES, Family, switched
from dgemma.ops.row_stats import Query, draw_misses, row_stats_reference
from dgemma.stack import Attend, ByContext, ByTable, Places, Stack, layers_of

SINGLES = 7  # tokens that pass one by one
LONGEST = 4096  # tokens of prompts that an engine on a GPU gives to one pass
TRIED = (9, 0)  # the GPUs on which passes of all lengths were tried when kernels were cut
STREAM = 0.1  # size of the stream that enters: a layer's own part is then what is compared
ENTROPY, MISS, SOFT = 1e-3, 1e-5, 0.02  # nats; probability; of an embedding, relative
STAT_ROWS = 8


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far rows may be off: of a row, relative; of scores, see `check_routes.py`."""

    half: float  # of half of the rows
    worst: float  # of all
    lack: float  # of what the router chose


# Rounding alone gives at most (0.012, 0.035, 0.03) in 16 bits: the definition beside itself in
# float32, for a small trained model and for the released shapes with narrower experts. What is
# quantized to 8 bits may be rounded another way for the last of 16, and single tokens are not
# quantized as by definition they are: (0.08, 0.16, 0.27), by rows left whole or shaken a little.
BITS_16, BITS_8 = Bounds(0.04, 0.2, 0.2), Bounds(0.12, 0.4, 0.6)

Verdicts = dict[Family, str]  # empty: it may be used; else why not
logger = logging.getLogger("dgemma")


class DeviceFault(DgemmaError):
    """The device no longer answers; `verdicts` names what was being checked."""

    def __init__(self, verdicts: Verdicts, reason: str) -> None:
        super().__init__(
            f"the GPU failed while its kernels were checked ({reason}); start again: what failed "
            "is then left out"
        )
        self.verdicts = verdicts


@torch.inference_mode()
def check(model: Gemma, stack: Stack, known: Verdicts | None = None) -> Verdicts:
    """Try every family not known yet; a kernel that fails does not raise, a dead device does."""
    verdicts: Verdicts = dict(known or {})
    for family in [family for family in FAMILIES if family not in verdicts]:
        try:
            if family == "row_stats":
                verdicts[family] = _statistics_off(model) or ends_off(model, stack)
            else:
                verdicts[family] = _layers_off(model, stack, family)
            if family == "layer" and not verdicts[family]:
                verdicts[family] = head_off(model)
        except torch.cuda.OutOfMemoryError:
            raise  # says nothing about the kernel
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0][:200]
            verdicts[family] = f"its check raised {type(error).__name__}: {first_line}"
            still_answers(model, verdicts, first_line)
    return verdicts


def launching(model: Gemma, stack: Stack) -> Iterator[Callable[[], object]]:
    """The parts of all checks that launch kernels, one by one; what they say means nothing alone.

    For whoever wants the kernels made before they are checked.
    """
    for family in FAMILIES:
        for kind in dict.fromkeys(model.config.layer_types):
            if family != "row_stats":
                probe = _one_layer(model.config, stack, kind)
                yield partial(_by_kernels, model, probe, kind, family)
    yield partial(_statistics_off, model)
    yield partial(head_off, model)
    yield partial(soft_off, model)
    yield from end_checks(model, stack)


def still_answers(model: Gemma, verdicts: Verdicts, reason: str) -> None:
    """A kernel that reads beyond its memory takes the whole process's device with it."""
    try:
        model.embed_tokens.weight[:1].float().sum().item()
    except RuntimeError as error:
        raise DeviceFault(verdicts, reason) from error


# --- layers


def _layers_off(model: Gemma, stack: Stack, family: Family) -> str:
    """What is wrong with a family, by a layer of each kind; nothing if nothing is."""
    for number, kind in enumerate(dict.fromkeys(model.config.layer_types)):
        if wrong := _layer_off(model, stack, family, kind):
            return f"{wrong}, layer {model.config.layer_types.index(kind)} of {number + 1} tried"
    return ""


def _layer_off(model: Gemma, stack: Stack, family: Family, kind: LayerType) -> str:
    """The kernels run first: the definition is then given what they chose."""
    probe, routes = _one_layer(model.config, stack, kind), Routes()
    probe.watch = routes.note
    got_TD = _by_kernels(model, probe, kind, family)
    if not routes.are_choices(model.config.num_experts):
        return "it chooses experts that are none, or one of them twice"
    if not bool(got_TD.isfinite().all()):
        return "it gives numbers that are none"
    probe.watch = routes.give
    with switched(()):
        want_TD = _passes(model, probe, kind, by_table=False)
    off_T = (got_TD - want_TD).norm(dim=-1) / want_TD.norm(dim=-1).clamp(min=1e-6)
    lack = routes.lack_T().max().item()
    logger.debug(
        "%s, %s: off by %.2g, %.2g at worst, single tokens %.2g; choices lack %.2g",
        *(family, kind, off_T.median(), off_T.max(), off_T[-SINGLES:].max(), lack),
    )
    bounds = _bounds(layers_of(model)[model.config.layer_types.index(kind)])
    if wrong := _rows_off(off_T, bounds):
        return wrong
    return f"it chooses experts that score {lack:.2g} too low" if lack > bounds.lack else ""


def _bounds(layer: Layer) -> Bounds:
    stored = (*layer.parameters(), *layer.buffers())
    return BITS_8 if any(weight.element_size() == 1 for weight in stored) else BITS_16


def _one_layer(config: ModelConfig, stack: Stack, kind: LayerType) -> Stack:
    """The same stack with its first layer of a kind alone, which is then layer 0."""
    probe = copy(stack)
    probe.layers = [replace(stack.layers[config.layer_types.index(kind)], index=0)]
    return probe


def _by_kernels(model: Gemma, probe: Stack, kind: LayerType, family: Family) -> Tensor:
    """The layer's passes with one family's kernels alone."""
    with switched({family}):
        return _passes(model, probe, kind, by_table=family == "attention")


def _passes(model: Gemma, probe: Stack, kind: LayerType, *, by_table: bool) -> Tensor:
    """What the layer makes of a few passes, one behind the other; rows of all, [T, D]."""
    weight = model.embed_tokens.weight
    config = replace(model.config, layer_types=(kind, FULL))  # the last one is always full
    length, window = config.canvas_length, config.attention(0).window or config.canvas_length
    chunk = max(window + length, _untried(weight.device))
    room = Room(tokens=chunk + 3 * length + SINGLES, span=chunk)
    cache = KVCache(config, room, weight.dtype, weight.device)
    generator = torch.Generator(weight.device).manual_seed(0)
    outs = []

    def run(*spans: Span) -> None:
        context = Pass(spans)
        size = (len(context.positions_T), config.hidden_size)
        x_TD = torch.randn(size, generator=generator, device=weight.device) * STREAM
        turns = model.turns(context.positions_T)
        outs.append(probe.run(x_TD.to(weight.dtype), turns, _attend(context, probe, by_table)))
        context.close()

    run(Span(cache, chunk, commit=True))
    run(Span(cache, length, commit=True), Span(cache, length, commit=False))
    for _ in range(SINGLES):
        run(Span(cache, 1, commit=True))
    return torch.cat(outs).float()


def _untried(device: torch.device) -> int:
    """The length to try where nobody has: long passes are cut otherwise, and want more memory."""
    is_tried = device.type != "cuda" or torch.cuda.get_device_capability(device) == TRIED
    return 0 if is_tried else LONGEST


def _attend(context: Pass, probe: Stack, by_table: bool) -> Attend:
    if not by_table:
        return ByContext(context, probe.eps)
    places = Places.of(context)
    assert places is not None
    return ByTable(places, probe)


def _rows_off(off_T: Tensor, bounds: Bounds) -> str:
    """Judged apart: all rows, and the single tokens, which have kernels of their own."""
    for name, part in (("a chunk", off_T[:-SINGLES]), ("single tokens", off_T[-SINGLES:])):
        half, worst = part.median().item(), part.max().item()
        if half > bounds.half or worst > bounds.worst:
            return f"{name}: it is off by {half:.2g} ({worst:.2g} at worst) of what it should give"
    return ""


# --- row statistics


def _statistics_off(model: Gemma) -> str:
    """The same for flat and for sharp distributions over the model's vocabulary."""
    table = model.embed_tokens
    device, vocab = table.weight.device, model.config.vocab_size
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.arange(STAT_ROWS, device=device)

    def draw(make: Callable[..., Tensor], *size: int, **of: torch.dtype) -> Tensor:
        return make(size, generator=generator, device=device, **of)

    raw_LV = draw(torch.randn, STAT_ROWS, vocab)
    sharp = slice(STAT_ROWS // 2)
    for place in range(5):  # in these rows a few tokens hold nearly all
        raw_LV[sharp, (7 + 101 * place) % vocab] = 20.0 - place
    raw_LV = raw_LV.to(table.weight.dtype)
    query = Query(
        heat_T=0.4 + 0.4 * rows / STAT_ROWS,
        uniform_T=draw(torch.rand, STAT_ROWS, dtype=torch.float64),
        held_T=rows % vocab,
    )
    softcap = model.config.final_logit_softcapping
    want = row_stats_reference(raw_LV, softcap, query)
    with switched({"row_stats"}):
        reading = read_by_kernels(raw_LV.clone(), softcap, query)
        few = read_by_kernels(raw_LV[sharp].clone(), softcap, query.rows(sharp))
        got, soft_LD, whole_LD = reading.stats, *_softs(table, few, reading)
    exact_LD = _soft_exactly(model, raw_LV, query)
    # Equal logits leave the likeliest token open; its probability is not.
    wrong = {
        "likeliest token": (got.top_p_T - want.top_p_T).abs().max().item() > ENTROPY,
        "entropy": (got.entropy_T - want.entropy_T).abs().max().item() > ENTROPY,
        "draw": draw_misses(raw_LV, softcap, query, got.draw_T).max().item() > MISS,
        "held token": (got.held_p_T - want.held_p_T).abs().max().item() > ENTROPY,
        "soft embedding": _far(whole_LD, exact_LD) > SOFT,
        "sparse soft embedding": _far(soft_LD, exact_LD[sharp]) > SOFT,
        "likely tokens": not bool(few.is_sparse()),
    }
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    return f"wrong: {', '.join(found)}" if found else ""


def _softs(table: TokenTable, sharp: Reading, any_: Reading) -> list[Tensor]:
    """Soft embeddings by few tokens, and by all; nothing is pinned."""
    from dgemma.ops.kernels.sparse import Into

    made = []
    for reading, mean in ((sharp, sparse_mean), (any_, dense_mean_16)):
        top_L = reading.stats.top_T
        soft_LD = table.weight.new_empty(len(top_L), table.weight.shape[1])
        mean(table, reading, Into(soft_LD, top_L, torch.zeros_like(top_L).bool(), table.scale))
        made.append(soft_LD)
    return made


def _soft_exactly(model: Gemma, raw_LV: Tensor, query: Query) -> Tensor:
    cap, table = model.config.final_logit_softcapping, model.embed_tokens
    p_LV = exactly(raw_LV, cap, query)
    return p_LV.to(table.weight.dtype) @ table.weight * table.scale


def _far(got_LD: Tensor, want_LD: Tensor) -> float:
    """The difference as a share of the wanted, over all rows together."""
    off = (got_LD.float() - want_LD.float()).norm() / want_LD.float().norm()
    return float(off) if bool(off.isfinite()) else float("inf")
