"""What devices can do, as far as a prediction needs it, and the number formats weights come in.

Where somebody measured a rate it is used as it is; else a datasheet's is cut to the share of it
that measured devices reached: 0.9 of bandwidth (an H200 copies at 4.3 of 4.8 TB/s) and 0.8 of
arithmetic (790 of 989 TFLOP/s). Datasheet rates are dense, with sums in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

OF_BANDWIDTH, OF_ARITHMETIC = 0.9, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How many bits a weight takes, and what share of the floor a real kernel reaches."""

    name: str
    experts: float
    dense: float  # attention, dense MLP, self-conditioning
    head: float = 16.0  # and the embedding, which is the same table
    exact: float = 16.0  # router and norms; activations, keys and values too
    efficiency: float  # of the roofline floor; see docs/fit.md for where it comes from

    def bits(self, kind: str) -> float:
        return float(getattr(self, kind, self.exact))


BF16 = Format(name="bf16", experts=16, dense=16, efficiency=0.88)
FP8 = Format(name="fp8", experts=8, dense=8, efficiency=0.79)
# 4 bits and an 8-bit scale for every 16 of them.
FOUR_BIT = Format(name="4-bit", experts=4.5, dense=8, efficiency=0.59)
FLOAT32 = Format(name="float32", experts=32, dense=32, head=32, exact=32, efficiency=0.88)
FORMATS = (BF16, FP8, FOUR_BIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Rates in 10^9 bytes and 10^12 operations a second, memory in 10^9 bytes."""

    name: str
    bandwidth: float
    rates: Mapping[int, float] = field(hash=False)  # by bits; what is missing runs in more bits
    memory: float
    runtime: float = 0.8  # memory that is gone before the first weight: driver, libraries, kernels
    layer_micros: float = 15.0  # launches and gaps of a layer, beside its work
    efficiency: float = 1.0  # of what the format's kernels reach elsewhere
    backend: str = "cuda"  # that runs here; times are predicted for fused kernels alone
    source: str

    def rate(self, bits: float) -> float:
        """Operations a second on numbers of so many bits."""
        # Four-bit weights are multiplied as 16-bit numbers: their scales change every 16.
        wanted = 16 if bits < 8 else bits
        return 1e12 * self.rates[min(have for have in self.rates if have >= wanted)]


def format_on(kind: Format, device: Device) -> Format:
    """The format as it is loaded on a device: without fp8, 4-bit models keep the rest in 16."""
    has_fp8 = device.backend != "cuda" or 8 in device.rates
    return kind if kind is not FOUR_BIT or has_fp8 else replace(FOUR_BIT, dense=16)


def obstacle(kind: Format, device: Device) -> str:
    """Say why a format has no predicted speed on a device; empty if it has one."""
    if device.backend == "reference":
        return "no fused kernels here: it runs on the reference backend, at no predicted speed"
    if device.backend == "cpu" and kind in (FP8, FOUR_BIT):
        return "a CPU has no kernels for this format"
    if kind is FP8 and 8 not in device.rates:
        return "the GPU has no fp8 arithmetic"
    return ""


def _sheet(name: str, bandwidth: float, rates: Mapping[int, float], memory: float) -> Device:
    return Device(
        name=name,
        bandwidth=OF_BANDWIDTH * bandwidth,
        rates={bits: OF_ARITHMETIC * rate for bits, rate in rates.items()},
        memory=memory,
        source="datasheet",
    )


def _apple(name: str, bandwidth: float, rate: float, memory: float) -> Device:
    """The system keeps a quarter of the shared memory from the GPU."""
    return Device(
        name=name,
        bandwidth=OF_BANDWIDTH * bandwidth,
        rates={16: OF_ARITHMETIC * rate, 32: OF_ARITHMETIC * rate},
        memory=0.75 * memory,
        layer_micros=40.0,
        backend="reference",
        source="datasheet",
    )


DEVICES: dict[str, Device] = {
    "h200": Device(
        name="NVIDIA H200",
        bandwidth=4300,
        rates={8: 1450, 16: 790, 32: 50},
        memory=141,
        source="measured, but for 8-bit arithmetic",
    ),
    "h100": Device(
        name="NVIDIA H100 SXM",
        bandwidth=3000,
        rates={8: 1400, 16: 760, 32: 50},
        memory=80,
        source="datasheet, cut as the H200 was",
    ),
    "rtx5090": _sheet("RTX 5090", 1792, {8: 419, 16: 209.5, 32: 104.8}, 32),
    "rtx4090": _sheet("RTX 4090 (24 GB)", 1008, {8: 330.3, 16: 165.2, 32: 82.6}, 24),
    "rtx3090": _sheet("RTX 3090 (24 GB)", 936, {16: 71, 32: 35.6}, 24),
    "rtx5080": _sheet("RTX 5080 (16 GB)", 960, {8: 225, 16: 112.6, 32: 56.3}, 16),
    "rtx4060ti": _sheet("RTX 4060 Ti (16 GB)", 288, {8: 88, 16: 44, 32: 22}, 16),
    # From 1 PFLOP/s in 4 bits with sparsity: half without, and half again at each doubling.
    "spark": _sheet("DGX Spark", 273, {8: 250, 16: 125, 32: 31}, 128),
    "m4max": _apple("Apple M4 Max (128 GB)", 546, 18.4, 128),
    "m3ultra": _apple("Apple M3 Ultra (96 GB)", 819, 28.4, 96),
    "cpu": Device(
        name="2 CPU cores, AVX-512",
        bandwidth=25,
        rates={8: 0.9, 16: 0.25, 32: 0.25},
        memory=23,
        runtime=0.5,
        layer_micros=700.0,
        efficiency=0.7,
        backend="cpu",
        source="measured on two Intel cores",
    ),
}
