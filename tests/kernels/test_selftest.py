"""Which backend a model gets: what the device says, and a self-test that is remembered."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dgemma.backends.choose import choose_backend
from dgemma.backends.cuda import selftest_cache, support
from dgemma.backends.cuda.selftest_cache import FORM, MAX_ENTRIES, UNTESTED, facts, load, report
from dgemma.backends.cuda.selftest_cache import store as keep
from dgemma.backends.cuda.support import unsupported_reason
from dgemma.model.gemma import Gemma
from dgemma.quant.fp8_head import shrink_head
from dgemma.weights.packed import FORMS, Form, shrink_model
from dgemma.weights.random import random_model
from tests.kernels import small
from tests.kernels.small import CPU, SMALL
from tests.kernels.test_interpreted import needs_triton

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees what another has kept, or what the user's machine has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("DGEMMA_PLAIN", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that says it runs kernels, as under the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """A machine with GPUs of some capability; it can be changed."""
    monkeypatch.setattr(support, "has_triton", lambda: True)
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
        patched.setattr(support, "has_triton", lambda: False)
        assert unsupported_reason(GPU) == "triton is not installed"
    with monkeypatch.context() as patched:
        patched.setenv("DGEMMA_PLAIN", "1")
        assert unsupported_reason(GPU) == "DGEMMA_PLAIN is set"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert unsupported_reason(CPU, torch.float32) is None
    assert unsupported_reason(GPU) == "TRITON_INTERPRET is set"


# --- what is kept


def test_a_result_is_kept_for_what_it_holds_for() -> None:
    key = facts(SMALL, torch.float32, CPU)
    assert load(key) is None
    keep(key, "")
    assert load(key) == ""
    for other in (
        facts(replace(SMALL, sliding_window=7), torch.float32, CPU),
        facts(SMALL, torch.bfloat16, CPU),
        {**key, "torch": "0"},
        {**key, FORM: "other"},
    ):
        assert load(other) is None
    keep(key, "it is off")
    assert load(key) == "it is off"
    for number in range(MAX_ENTRIES):
        keep({**key, FORM: str(number)}, "")
    assert load(key) is None  # the oldest goes


def test_facts_name_the_gpu_and_the_kernels_source(
    gpu: Callable[[tuple[int, int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    first = facts(SMALL, torch.bfloat16, GPU)
    assert first["device"] == "NVIDIA H200 9.0"
    # Another GPU of the same kind in the same machine.
    assert facts(SMALL, torch.bfloat16, torch.device("cuda", 1)) == first
    monkeypatch.setattr(selftest_cache, "_digest", lambda text: str(len(text)))
    assert facts(SMALL, torch.bfloat16, GPU)["dgemma"] != first["dgemma"]


def test_a_damaged_or_unwritable_file_means_another_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = facts(SMALL, torch.float32, CPU)
    keep(key, "")
    (file,) = (tmp_path / "dgemma").iterdir()
    for text in ("{", "[1]", "{}", "null", json.dumps([{"facts": key}])):
        file.write_text(text)
        assert load(key) is None
        keep(key, "off")
        assert load(key) == "off"
    file.unlink()
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    keep(key, "")
    assert load(key) is None


@pytest.mark.usefixtures("pretended")
def test_what_a_person_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "has_triton", lambda: True)
    monkeypatch.setattr(selftest_cache, "has_triton", lambda: False)
    key = facts(SMALL, torch.float32, CPU)
    assert report(SMALL, torch.float32, CPU) == UNTESTED
    assert report(None, torch.float32, CPU) == UNTESTED
    keep({**key, FORM: "a"}, "")
    assert report(SMALL, torch.float32, CPU) == "cuda"
    assert report(replace(SMALL, num_experts=8), torch.float32, CPU) == UNTESTED
    keep({**key, FORM: "b"}, "it is off by 3")
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
    want = "the reference backend is used: entropies are off by 3"
    assert [record.getMessage() for record in caplog.records] == [want] * 2


@pytest.mark.usefixtures("pretended")
def test_each_form_of_weights_is_tested(found: list[str | Exception]) -> None:
    forms: list[Callable[[], Gemma]] = [
        small.model,
        lambda: shrink_model(small.model(), Form(dense="fp8")),
        lambda: shrink_model(small.model(), FORMS["fp8"]),
        lambda: shrink_head(small.model()),
        lambda: shrink_head(small.model(), soft=True),
    ]
    for make in forms:
        found.append("")
        assert choose_backend(make()).name == "cuda"
        assert not found, "another form's result was taken for this one's"


@pytest.mark.usefixtures("pretended")
def test_after_a_test_that_took_the_device_down_the_next_start_goes_on(
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
def test_the_probe_has_a_layer_of_each_type_and_shares_its_weights() -> None:
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
def test_a_test_that_raises_says_what_and_one_that_took_the_device_says_so(
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
    from dgemma.backends.cuda.selftest import BOUNDS_16, BOUNDS_FP8, _bounds

    wide = replace(SMALL, hidden_size=64, moe_intermediate_size=64)
    for form, bounds in (
        (Form(), BOUNDS_16),
        (Form(dense="fp8"), BOUNDS_FP8),
        (FORMS["fp8"], BOUNDS_FP8),
        (FORMS["nvfp4"], BOUNDS_FP8),
    ):
        assert _bounds(shrink_model(random_model(wide, seed=3), form)) == bounds
