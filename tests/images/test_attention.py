"""Prompts with pictures through the stack, against transformers under both attention rules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache
from transformers.models.gemma4.modeling_gemma4 import (
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from dgemma.backends.base import ForwardInput, ImageRows
from dgemma.backends.reference import ReferenceBackend
from dgemma.config import ModelConfig
from dgemma.diffusion.canvas import NO_PINS
from dgemma.diffusion.denoise import start
from dgemma.diffusion.reference_step import denoise
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.model.vision import Grid, ImageEncoder
from tests.images.tiny_tower import (
    BOI,
    EOI,
    IMAGE,
    SEEING,
    TOWER,
    encoder_of,
    padded,
    random_patches,
    reference_of,
)
from tests.reference import recording
from tests.tiny import CPU, gemma4_twin, ours, shake

TOLERANCE = 1e-4
Rule = Literal["sliding", "all"]


@dataclass
class SeenPrompt:
    """A prompt with pictures: ids, patches and grids of the pictures, their first tokens."""

    ids: Tensor
    pictures: list[tuple[Tensor, Grid]]
    begins: list[int]

    @property
    def types(self) -> Tensor:
        return (self.ids == IMAGE).long()[None]

    def rows(self, encoder: ImageEncoder) -> list[ImageRows]:
        with torch.inference_mode():
            features = [encoder(patches[None], grid)[0] for patches, grid in self.pictures]
        return [ImageRows(b, f) for b, f in zip(self.begins, features, strict=True)]


def seen_prompt(texts: Sequence[int], sizes: Sequence[tuple[int, int]], seed: int) -> SeenPrompt:
    """Text of given lengths, with a picture of given soft tokens between each two."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    pictures, begins = [], []
    for index, length in enumerate(texts):
        ids += torch.randint(3, 50, (length,), generator=generator).tolist()
        if index < len(sizes):
            rows, columns = sizes[index]
            grid = Grid(3 * rows, 3 * columns)
            pictures.append((random_patches(TOWER, grid, seed + index), grid))
            begins.append(len(ids) + 1)
            ids += [BOI, *[IMAGE] * rows * columns, EOI]
    return SeenPrompt(torch.tensor(ids), pictures, begins)


def cache_of(config: ModelConfig, tokens: int = 64) -> KVCache:
    return KVCache(config, Capacity(tokens=tokens, segment=16, slack=3), torch.float32, CPU)


def commit_prompt(
    model: Gemma, cache: KVCache, ids: Tensor, images: Sequence[ImageRows], cuts: Sequence[int]
) -> None:
    """Commit a prompt in pieces that end at `cuts` and at its end; no cut is inside a picture."""
    backend, begin = ReferenceBackend(model), 0
    for end in [*cuts, len(ids)]:
        inside = [
            ImageRows(image.begin - begin, image.features_SD)
            for image in images
            if begin <= image.begin < end
        ]
        tokens = tuple(ids[begin:end].tolist())
        if tokens:
            backend.run([ForwardInput(cache=cache, tokens=tokens, images=tuple(inside))])
        begin = end


@torch.no_grad()
def reference_logits(
    reference: Any, prompt: SeenPrompt, canvas: Tensor, rule: Rule
) -> dict[str, Tensor]:
    text = reference.config.get_text_config()
    cache, ids = DynamicCache(config=text), prompt.ids[None]
    positions = torch.arange(len(prompt.ids))[None]
    common = {
        "inputs_embeds": torch.empty(*ids.shape, 0),
        "attention_mask": torch.ones_like(ids),
        "past_key_values": cache,
        "position_ids": positions,
    }
    if rule == "sliding":
        blocks = get_block_sequence_ids_for_mask(prompt.types, CPU)
        masks = create_masks_for_vision_model(config=text, block_sequence_ids=blocks, **common)
        # The reference cuts the window to the past alone, Google's own code to both sides.
        near = (positions[0, :, None] - positions[0, None]).abs() < text.sliding_window
        masks["sliding_attention"] = masks["sliding_attention"] & near
    else:
        masks = reference.model.encoder.create_masks_for_generate(
            config=reference.config, mm_token_type_ids=prompt.types, **common
        )
    pixels, places = padded(prompt.pictures)
    hidden = reference.model.encoder(
        input_ids=ids,
        attention_mask=masks,
        past_key_values=cache,
        position_ids=positions,
        pixel_values=pixels,
        image_position_ids=places,
    ).last_hidden_state
    cap = reference.final_logit_softcapping
    seen = torch.ones(1, len(prompt.ids) + len(canvas), dtype=torch.bool)
    denoised = reference(
        decoder_input_ids=canvas[None], past_key_values=cache, decoder_attention_mask=seen
    ).logits
    prefill = cap * torch.tanh(reference.lm_head(hidden) / cap)
    return {"prefill": prefill[0, -1], "canvas": denoised[0]}


@torch.inference_mode()
def our_logits(
    model: Gemma, prompt: SeenPrompt, images: Sequence[ImageRows], canvas: Tensor, cuts: list[int]
) -> dict[str, Tensor]:
    cache = cache_of(model.config)
    commit_prompt(model, cache, prompt.ids[:-1], images, cuts)
    batch = ForwardBatch([Segment(cache, 1, commit=True)])
    hidden = model.encode(prompt.ids[-1:], batch)
    batch.close()
    over = ForwardBatch([Segment(cache, len(canvas), commit=False)])
    return {
        "prefill": model.logits(hidden)[0],
        "canvas": model.logits(model.denoise(canvas, None, over)),
    }


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    count = draw(st.integers(1, 3))
    side = st.integers(1, 4)
    return {
        "sizes": draw(st.lists(st.tuples(side, side), min_size=count, max_size=count)),
        "texts": [*draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)), 3],
        "window": draw(st.sampled_from([2, 5, 12, 40])),
        "rule": draw(st.sampled_from(["sliding", "all"])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(deadline=None, derandomize=True, database=None, max_examples=24)
@given(case=cases())
def test_logits_agree_with_the_reference_under_both_rules(case: dict[str, Any]) -> None:
    config = replace(SEEING, sliding_window=case["window"], image_attention=case["rule"])
    reference = reference_of(config, case["seed"])
    model, encoder = ours(config, reference), encoder_of(config, reference)
    prompt = seen_prompt(case["texts"], case["sizes"], case["seed"])
    canvas = torch.randint(3, 50, (config.canvas_length,))
    theirs = reference_logits(reference, prompt, canvas, case["rule"])
    images = prompt.rows(encoder)
    before_images = [begin - 1 for begin in prompt.begins]
    for cuts in ([], before_images):
        mine = our_logits(model, prompt, images, canvas, cuts)
        for name in theirs:
            difference = (theirs[name] - mine[name]).abs().max().item()
            assert difference < TOLERANCE, f"{name} differs by {difference} with cuts {cuts}"


def test_the_rules_differ_and_pictures_are_seen() -> None:
    reference = reference_of(SEEING, 1)
    encoder = encoder_of(SEEING, reference)
    prompt, other = (seen_prompt([3, 4], [(2, 3)], seed) for seed in (1, 2))
    canvas = torch.arange(8)
    logits = {}
    for rule in ("sliding", "all", "causal"):
        model = ours(replace(SEEING, image_attention=rule), reference)
        logits[rule] = our_logits(model, prompt, prompt.rows(encoder), canvas, [])["canvas"]
    for first, second in (("sliding", "all"), ("sliding", "causal"), ("all", "causal")):
        assert (logits[first] - logits[second]).abs().max() > 0.01
    model = ours(SEEING, reference)
    another = our_logits(model, prompt, other.rows(encoder), canvas, [])["canvas"]
    assert (another - logits["sliding"]).abs().max() > 0.01


def test_the_autoregressive_sibling_agrees_with_its_own_class() -> None:
    """`Gemma4ForConditionalGeneration.forward` follows Google's rule by itself."""
    config = replace(SEEING, family="gemma4", sliding_window=12)
    reference = gemma4_twin(config)
    shake(reference, 4)
    model = ours(config, reference, prefix="model.language_model.")
    encoder = encoder_of(config, reference, prefix="model.")
    prompt = seen_prompt([4, 2, 3], [(2, 2), (1, 4)], 4)
    pixels, places = padded(prompt.pictures)
    theirs = reference(
        input_ids=prompt.ids[None],
        pixel_values=pixels,
        image_position_ids=places,
        mm_token_type_ids=prompt.types,
    ).logits[0, -1]
    cache = cache_of(config)
    commit_prompt(model, cache, prompt.ids[:-1], prompt.rows(encoder), [])
    with torch.inference_mode():
        batch = ForwardBatch([Segment(cache, 1, commit=True)])
        mine = model.logits(model.encode(prompt.ids[-1:], batch))[0]
    assert (mine - theirs).abs().max() < TOLERANCE


def make_sampler(max_steps: int) -> Sampler:
    return Sampler(rule=EntropyBound(entropy_bound=0.5), max_denoising_steps=max_steps)


@pytest.mark.parametrize("seed", range(4))
def test_generation_gives_the_reference_tokens_and_steps(seed: int) -> None:
    """With the reference's own noise and rule, over two blocks."""
    config = replace(SEEING, image_attention="all")
    reference = reference_of(config, seed, size=0.08)
    model, encoder = ours(config, reference), encoder_of(config, reference)
    prompt = seen_prompt([3, 2, 4], [(2, 2), (1, 3)], seed)
    pixels, places = padded(prompt.pictures)
    max_steps = 12
    options = {"max_denoising_steps": max_steps, "max_new_tokens": 2 * config.canvas_length}
    sampler_config = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.5}
    generation = type(reference.generation_config)(**options, sampler_config=sampler_config)
    torch.manual_seed(seed)
    with recording(reference) as recorded:
        reference.generate(
            prompt.ids[None],
            generation_config=generation,
            pixel_values=pixels,
            image_position_ids=places,
            mm_token_type_ids=prompt.types,
        )
    cache, sampler = cache_of(config), make_sampler(max_steps)
    commit_prompt(model, cache, prompt.ids, prompt.rows(encoder), [])
    assert len(recorded) == 2
    for block in recorded:
        *_, (converged,) = denoise(
            model, [cache], [start(sampler, block.noise(0, max_steps), NO_PINS)]
        )
        assert converged.canvas.guess_L.tolist() == block.canvas_BL[0].tolist()
        assert converged.canvas.num_steps == block.steps_B[0]
        commit_prompt(model, cache, converged.canvas.guess_L, [], [])


def test_rows_with_and_without_pictures_share_a_pass() -> None:
    reference = reference_of(SEEING, 2)
    model, encoder = ours(SEEING, reference), encoder_of(SEEING, reference)
    prompts = [seen_prompt([3, 5], [(2, 2)], 1), seen_prompt([6], [], 2)]
    prompts.append(seen_prompt([0, 0, 7], [(1, 3), (2, 1)], 3))
    inputs = [
        ForwardInput(
            cache=cache_of(SEEING), tokens=tuple(p.ids.tolist()), images=tuple(p.rows(encoder))
        )
        for p in prompts
    ]
    ReferenceBackend(model).run(inputs)
    for item in inputs:
        alone = cache_of(SEEING)
        ReferenceBackend(model).run([replace(item, cache=alone)])
        assert item.cache.length == alone.length == len(item.tokens)
        for mine, theirs in zip(item.cache.buffers, alone.buffers, strict=True):
            first = max(mine.base, theirs.base)
            (a,), (b,) = ([x.read(first, alone.length)] for x in (mine, theirs))
            assert (a.k_SMH - b.k_SMH).abs().max() < 1e-5
