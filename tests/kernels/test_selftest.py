"""Choice of the backend: by device, weights, and a self-test whose result is cached."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from dgemma import device
from dgemma.backends import choose
from dgemma.backends.choose import (
    CACHE,
    UNTESTED,
    WEIGHTS,
    cache_key,
    choose_backend,
    report,
)
from dgemma.backends.cuda import device as devices
from dgemma.backends.cuda.device import unsupported_reason
from dgemma.device import MAX_ENTRIES
from dgemma.errors import UsageError
from dgemma.model.gemma import Gemma
from dgemma.quant.head import quantize_head
from dgemma.weights.layer_formats import LAYER_FORMATS, LayerFormat, quantize_model
from dgemma.weights.load import random_model
from tests.kernels import small
from tests.kernels.small import CPU, SMALL
from tests.kernels.test_interpreted import needs_triton

GPU = torch.device("cuda", 0)
load_result = partial(device.load_result, CACHE)
store_result = partial(device.store_result, CACHE)


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees what another has kept, or what the user's machine has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("DGEMMA_PLAIN", "DGEMMA_SELFTEST", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that says it runs kernels, as under the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """A machine with GPUs of some capability; it can be changed."""
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)

    def has(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    has((9, 0))
    return has


# --- what a device says


def test_every_nvidia_gpu_with_bfloat16_has_kernels(
    gpu: Callable[[tuple[int, int]], None],
) -> None:
    for index in (None, 0, 1, 7):
        device = torch.device("cuda") if index is None else torch.device("cuda", index)
        assert unsupported_reason(device) is None
        assert unsupported_reason(device, torch.float16) is None
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        gpu(capability)
        assert unsupported_reason(GPU) is None
    gpu((7, 5))
    assert "no bfloat16" in (unsupported_reason(GPU) or "")


def test_a_reason_is_named_where_there_are_none(
    gpu: Callable[[tuple[int, int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "16-bit weights, not for float32" in (unsupported_reason(GPU, torch.float32) or "")
    assert "NVIDIA GPUs, not for cpu" in (unsupported_reason(CPU) or "")
    with monkeypatch.context() as patched:
        patched.setattr(torch.version, "hip", "6.4")
        assert "not for AMD GPUs" in (unsupported_reason(GPU) or "")
    with monkeypatch.context() as patched:
        patched.setattr(devices, "has_triton", lambda: False)
        assert unsupported_reason(GPU) == "triton is not installed"
    with monkeypatch.context() as patched:
        patched.setenv("DGEMMA_PLAIN", "1")
        assert unsupported_reason(GPU) == "DGEMMA_PLAIN is set"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert unsupported_reason(CPU, torch.float32) is None
    assert unsupported_reason(GPU) == "TRITON_INTERPRET is set"


# --- what is kept


def test_a_result_is_kept_for_what_it_holds_for() -> None:
    key = cache_key(SMALL, torch.float32, CPU)
    assert load_result(key) is None
    store_result(key, "")
    assert load_result(key) == ""
    for other in (
        cache_key(replace(SMALL, sliding_window=7), torch.float32, CPU),
        cache_key(SMALL, torch.bfloat16, CPU),
        {**key, "torch": "0"},
        {**key, WEIGHTS: "other"},
    ):
        assert load_result(other) is None
    store_result(key, "it is off")
    assert load_result(key) == "it is off"
    for number in range(MAX_ENTRIES):
        store_result({**key, WEIGHTS: str(number)}, "")
    assert load_result(key) is None  # the oldest goes


def test_facts_name_the_gpu_and_the_kernels_source(
    gpu: Callable[[tuple[int, int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    first = cache_key(SMALL, torch.bfloat16, GPU)
    assert first["device"] == "NVIDIA H200 9.0"
    # Another GPU of the same kind in the same machine.
    assert cache_key(SMALL, torch.bfloat16, torch.device("cuda", 1)) == first
    monkeypatch.setattr(choose, "_digest", lambda text: str(len(text)))
    assert cache_key(SMALL, torch.bfloat16, GPU)["dgemma"] != first["dgemma"]


def test_a_damaged_or_unwritable_file_means_another_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = cache_key(SMALL, torch.float32, CPU)
    store_result(key, "")
    (file,) = (tmp_path / "dgemma").iterdir()
    for text in ("{", "[1]", "{}", "null", json.dumps([{"key": key}])):
        file.write_text(text)
        assert load_result(key) is None
        store_result(key, "off")
        assert load_result(key) == "off"
    file.unlink()
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    store_result(key, "")
    assert load_result(key) is None


@pytest.mark.usefixtures("pretended")
def test_the_report_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    monkeypatch.setattr(choose, "has_triton", lambda: False)
    key = cache_key(SMALL, torch.float32, CPU)
    assert report(SMALL, torch.float32, CPU) == UNTESTED
    assert report(None, torch.float32, CPU) == UNTESTED
    store_result({**key, WEIGHTS: "a"}, "")
    assert report(SMALL, torch.float32, CPU) == "cuda"
    assert report(replace(SMALL, num_experts=8), torch.float32, CPU) == UNTESTED
    store_result({**key, WEIGHTS: "b"}, "it is off by 3")
    assert report(SMALL, torch.float32, CPU) == "reference: it is off by 3"
    monkeypatch.setenv("DGEMMA_PLAIN", "1")
    assert report(SMALL, torch.float32, CPU) == "reference: DGEMMA_PLAIN is set"


# --- which backend is chosen


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str | Exception]:
    """What self-tests find, one after the other; one that is not expected fails."""
    pytest.importorskip("triton")
    answers: list[str | Exception] = []

    def selftest(model: Gemma) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("dgemma.backends.cuda.selftest.selftest", selftest)
    return answers


@pytest.mark.usefixtures("pretended")
def test_a_self_test_that_passed_is_not_run_again(found: list[str | Exception]) -> None:
    found.append("")
    assert choose_backend(small.model()).name == "cuda"
    assert not found
    assert choose_backend(small.model()).name == "cuda"


@pytest.mark.usefixtures("pretended")
def test_a_model_that_fails_it_gets_the_reference_and_says_so_each_time(
    found: list[str | Exception], caplog: pytest.LogCaptureFixture
) -> None:
    found.append("entropies are off by 3")
    with caplog.at_level(logging.WARNING, logger="dgemma"):
        assert choose_backend(small.model()).name == "reference"
        assert choose_backend(small.model()).name == "reference"  # remembered
    first, second = (record.getMessage() for record in caplog.records)
    assert first == second
    assert "reference backend is used" in first and "entropies are off by 3" in first
    assert "DGEMMA_SELFTEST=warn" in first, "a way to go on is named"


@pytest.mark.usefixtures("pretended")
def test_the_kernels_can_be_used_although_they_fail_it(
    found: list[str | Exception],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DGEMMA_SELFTEST", "warn")
    found.append("entropies are off by 3")
    with caplog.at_level(logging.WARNING, logger="dgemma"):
        assert choose_backend(small.model()).name == "cuda"
    want = "the kernels are used although the self-test failed: entropies are off by 3"
    assert caplog.messages == [want]
    said = report(SMALL, torch.float32, CPU)
    assert said == "cuda, although the self-test failed: entropies are off by 3"
    monkeypatch.setenv("DGEMMA_SELFTEST", "off")
    with pytest.raises(UsageError, match=r"DGEMMA_SELFTEST is 'off'; set it to warn"):
        choose_backend(small.model())


@pytest.mark.usefixtures("pretended")
def test_each_form_of_weights_is_tested(found: list[str | Exception]) -> None:
    forms: list[Callable[[], Gemma]] = [
        small.model,
        lambda: quantize_model(small.model(), LayerFormat(dense="fp8")),
        lambda: quantize_model(small.model(), LAYER_FORMATS["fp8"]),
        lambda: quantize_head(small.model()),
        lambda: quantize_head(small.model(), soft=True),
    ]
    for make in forms:
        found.append("")
        assert choose_backend(make()).name == "cuda"
        assert not found, "another form's result was taken for this one's"


@pytest.mark.usefixtures("pretended")
def test_after_a_test_that_broke_the_device_the_next_start_uses_the_reference(
    found: list[str | Exception],
) -> None:
    from dgemma.backends.cuda.selftest import DeviceFault

    found.append(DeviceFault("an illegal address"))
    with pytest.raises(DeviceFault, match=r"an illegal address.*start again"):
        choose_backend(small.model())
    assert choose_backend(small.model()).name == "reference"


@pytest.mark.usefixtures("pretended")
def test_where_there_is_no_memory_for_it_the_next_start_tries_again(
    found: list[str | Exception], caplog: pytest.LogCaptureFixture
) -> None:
    found += [torch.cuda.OutOfMemoryError("tried to allocate"), ""]
    with caplog.at_level(logging.WARNING, logger="dgemma"):
        assert choose_backend(small.model()).name == "reference"
    assert "no memory for the self-test" in caplog.text
    assert choose_backend(small.model()).name == "cuda"


class Adapted(nn.Linear):
    """A linear with something added to it."""


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("where", ["layers.1.self_attn", "self_conditioning"])
def test_an_adapter_that_is_not_merged_gets_the_reference(
    found: list[str | Exception], where: str, tmp_path: Path
) -> None:
    """Without a test, so that nothing is said of the model without it."""
    model = small.model()
    name = "o_proj" if "attn" in where else "gate_proj"
    owner = model.get_submodule(where)
    setattr(owner, name, Adapted(4, 4))
    assert choose_backend(model).name == "reference"
    assert not list(tmp_path.iterdir())


def test_a_device_without_kernels_gets_the_reference_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="dgemma"):
        assert choose_backend(small.model()).name == "reference"
    assert not caplog.records


# --- the test itself


@needs_triton
def test_the_probe_has_a_layer_of_each_type_and_the_same_weights() -> None:
    from dgemma.backends.cuda.selftest import shallow
    from dgemma.config import FULL, SLIDING

    types = (SLIDING, SLIDING, FULL, SLIDING, FULL)
    model = random_model(replace(SMALL, layer_types=types), seed=1)
    probe = shallow(model)
    assert probe.config.layer_types == (SLIDING, FULL)
    for index, source in enumerate((0, 2)):
        mine, whole = probe.layers[index], model.layers[source]
        assert mine.self_attn.layer == index
        assert mine.mlp is whole.mlp
        assert mine.self_attn.q_proj is whole.self_attn.q_proj
    assert [layer.self_attn.layer for layer in model.layers] == [0, 1, 2, 3, 4]
    assert len(model.layers) == 5


@needs_triton
def test_a_test_that_raises_says_what_and_one_that_broke_the_device_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dgemma.backends.cuda import selftest

    model = small.model()

    def fails(probe: Gemma) -> None:
        raise RuntimeError("out of shared memory\nand more")

    def lacks(probe: Gemma) -> None:
        raise torch.cuda.OutOfMemoryError("tried to allocate")

    def dies(probe: Gemma) -> None:
        """Afterwards no number can be had, as of a device that does not answer."""
        gone_VD = model.embed_tokens.weight.to("meta")
        model.embed_tokens.weight = nn.Parameter(gone_VD, requires_grad=False)
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(selftest, "_checks", fails)
    assert selftest.selftest(model) == "the self-test raised RuntimeError: out of shared memory"
    monkeypatch.setattr(selftest, "_checks", lacks)
    with pytest.raises(torch.cuda.OutOfMemoryError):  # which says nothing about the kernels
        selftest.selftest(model)
    monkeypatch.setattr(selftest, "_checks", dies)
    with pytest.raises(selftest.DeviceFault, match=r"an illegal address.*start again"):
        selftest.selftest(model)


@needs_triton
def test_bounds_are_wider_where_rows_are_quantized() -> None:
    from dgemma.backends.cuda.selftest import BOUNDS_16, BOUNDS_FP8, Comparison

    wide = replace(SMALL, hidden_size=64, moe_intermediate_size=64)
    for fmt, bounds in (
        (LayerFormat(), BOUNDS_16),
        (LayerFormat(dense="fp8"), BOUNDS_FP8),
        (LAYER_FORMATS["fp8"], BOUNDS_FP8),
        (LAYER_FORMATS["nvfp4"], BOUNDS_FP8),
    ):
        model = quantize_model(random_model(wide, seed=3), fmt)
        assert Comparison.of(model).bounds == bounds


@needs_triton
def test_every_row_is_within_a_bound_and_wider_where_rounding_may_swap_experts() -> None:
    from dgemma.backends.cuda.selftest import HIDDEN, Comparison

    compare = Comparison.of(small.model())
    want_TD = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    clear_T, bound = torch.ones(200), compare.bounds.hidden
    near_tie_T = clear_T.clone()
    near_tie_T[7] = 0.01

    def wrong(error: float, gap_T: torch.Tensor | None, rows: slice = slice(7, 8)) -> str:
        got_TD = want_TD.clone()
        got_TD[rows] *= 1 + error
        return compare.relative(HIDDEN, got_TD, want_TD, bound, gap_T)

    assert not wrong(0.9 * bound, clear_T, slice(None))
    assert "off by 0.066, 0.06 is allowed" in wrong(1.1 * bound, near_tie_T, slice(None))
    assert not wrong(3.9 * bound, clear_T)
    assert "off by 0.25 in row 7, 0.24 is allowed" in wrong(4.1 * bound, clear_T)
    assert "in row 7" in wrong(4.1 * bound, None)
    assert not wrong(0.7, near_tie_T)
    assert "in row 7" in wrong(1.0, near_tie_T)
    assert "NaN" in wrong(float("nan"), near_tie_T)


@needs_triton
def test_router_gaps_are_recorded_by_pass_until_closed() -> None:
    from dgemma.backends.cuda.selftest import RouterGaps

    model = small.model()
    gaps = RouterGaps(model)
    want = [layer.router.probs(torch.ones(3, 32)).log() for layer in model.layers]
    for _ in range(2):
        for layer in model.layers:
            layer.router(torch.ones(3, 32))
    gaps.close()
    model.layers[0].router(torch.ones(3, 32))
    assert len(gaps.passes) == 2
    best = [p_TE.topk(3).values for p_TE in want]
    torch.testing.assert_close(
        gaps.passes[1], torch.stack([b[:, 1] - b[:, 2] for b in best]).amin(0)
    )
