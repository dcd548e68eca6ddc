"""Report on a checkpoint at first contact with its weights: load, memory, answers, logits.

    python bench/first_contact.py DIRECTORY [--device auto] [--dtype auto] [--no-reference]
                                  [--max-tokens 256] [--out report.md]

Loads all shards strictly and scans them for NaN and infinity, counts parameters, answers ten
prompts with time and memory, and compares logits with transformers on a few prompts. Ours is freed
before the reference is loaded, so memory for one model is enough. The last line is JSON.
"""

import argparse
import gc
import json
import resource
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from dgemma.backends.cpu import pack
from dgemma.device import choose_device, choose_dtype, describe_device
from dgemma.engine import Engine, SamplingParams
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.load import Checkpoint, count_parameters, load_model, short_count

PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about snow.",
    "List three prime numbers larger than 100.",
    "Translate to French: The cat sleeps on the sofa.",
    "What is 17 * 23? Answer with the number only.",
    "Write a Python function that reverses a string.",
    "Summarize in one sentence: water boils at a lower temperature on a mountain.",
    "Give a JSON object with the keys name and age for a fictional person.",
    "Correct the spelling: I recieved teh packege yesturday.",
    "Continue: Once upon a time there was a small robot who",
)
COMPARED = 3  # prompts whose logits are compared


def memory(device: torch.device) -> float:
    """Return the peak memory so far in GiB: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def write_prompt(engine_text: Tokenizer, template: ChatTemplate | None, prompt: str) -> list[int]:
    if template is None:
        return engine_text.encode(prompt)
    return list(template.prompt([Message(role="user", content=prompt)]).ids)


def first_canvas(checkpoint: Checkpoint, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (checkpoint.config.canvas_length,)
    return torch.randint(checkpoint.config.vocab_size, shape, generator=generator)


@torch.inference_mode()
def our_logits(checkpoint: Checkpoint, ids: list[int], canvas: torch.Tensor) -> torch.Tensor:
    model = checkpoint.model
    weight = model.embed_tokens.weight
    capacity = Capacity(tokens=len(ids) + len(canvas), segment=max(len(ids), len(canvas)))
    cache = KVCache(checkpoint.config, capacity, weight.dtype, weight.device)
    prompt = ForwardBatch([Segment(cache, len(ids), commit=True)])
    model.encode(torch.tensor(ids, device=weight.device), prompt)
    prompt.close()
    over = ForwardBatch([Segment(cache, len(canvas), commit=False)])
    return model.logits(model.denoise(canvas.to(weight.device), None, over)).cpu()


def load_reference(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import DiffusionGemmaForBlockDiffusion

    return DiffusionGemmaForBlockDiffusion.from_pretrained(directory, dtype=dtype).to(device)


@torch.inference_mode()
def reference_logits(reference: Any, ids: list[int], canvas: torch.Tensor) -> torch.Tensor:
    from transformers import DynamicCache

    device = reference.device
    cache = DynamicCache(config=reference.config.get_text_config())
    tokens = torch.tensor([ids], device=device)
    reference.model.encoder(input_ids=tokens, past_key_values=cache)
    output = reference(decoder_input_ids=canvas[None].to(device), past_key_values=cache)
    return output.logits[0].float().cpu()


def compare(mine: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    log_mine, log_theirs = mine.log_softmax(-1), theirs.log_softmax(-1)
    divergence = (log_theirs.exp() * (log_theirs - log_mine)).sum(-1)
    return {
        "largest_difference": (mine - theirs).abs().max().item(),
        "same_top_token": (mine.argmax(-1) == theirs.argmax(-1)).float().mean().item(),
        "mean_kl": divergence.mean().item(),
    }


def answer_all(engine: Engine, max_tokens: int) -> list[dict[str, Any]]:
    rows = []
    for number, prompt in enumerate(PROMPTS):
        done = engine.generate(prompt, SamplingParams(seed=number, max_tokens=max_tokens))
        rows.append(
            {
                "prompt": prompt,
                "text": done.text,
                "finish": done.finish,
                "tokens": done.tokens,
                "steps": done.steps,
                "blocks": done.blocks,
                "unconverged_blocks": done.unconverged_blocks,
                "seconds": round(done.seconds, 3),
                "tokens_per_second": round(done.tokens / done.seconds, 1),
            }
        )
        print(
            f"  {number + 1:2}/{len(PROMPTS)} {done.tokens} tokens, {done.steps} steps", flush=True
        )
    return rows


def about(checkpoint: Checkpoint) -> dict[str, Any]:
    count = count_parameters(checkpoint.config)
    return {
        "family": checkpoint.config.family,
        "parameters": f"{count.total} ({short_count(count.total)})",
        "active_parameters": f"{count.active} ({short_count(count.active)})",
        "vision_tensors": len(checkpoint.vision),
    }


def report(facts: dict[str, Any]) -> str:
    lines = [
        f"# First contact: {facts['directory']}",
        "",
        f"{facts['date']}, {facts['device']}",
        "",
    ]
    lines += [f"- {key}: {facts[key]}" for key in facts if key not in ("answers", "agreement")]
    if facts["agreement"]:
        lines += ["", "## Logits against transformers (first step, random canvas)", ""]
        lines += ["| prompt | largest difference | same top token | mean KL |", "|---|---|---|---|"]
        for row in facts["agreement"]:
            lines.append(
                f"| {row['prompt']} | {row['largest_difference']:.2e} | "
                f"{row['same_top_token']:.2%} | {row['mean_kl']:.2e} |"
            )
    lines += ["", "## Ten prompts", ""]
    for row in facts["answers"]:
        lines += [f"### {row['prompt']}", "", row["text"] or "(no text)", ""]
        lines.append(
            f"{row['tokens']} tokens, {row['steps']} steps, {row['blocks']} blocks "
            f"({row['unconverged_blocks']} unconverged), {row['seconds']} s, "
            f"{row['tokens_per_second']} tokens/s, finish: {row['finish']}"
        )
        lines.append("")
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    device = choose_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, device)
    begin = time.perf_counter()
    checkpoint = load_model(arguments.directory, device=device, dtype=dtype, verify=True)
    loaded = time.perf_counter() - begin
    tokenizer = Tokenizer.load(arguments.directory)
    has_template = (arguments.directory / "chat_template.jinja").is_file()
    template = ChatTemplate.load(arguments.directory, tokenizer) if has_template else None
    prompts = [write_prompt(tokenizer, template, prompt) for prompt in PROMPTS[:COMPARED]]
    canvases = [first_canvas(checkpoint, seed) for seed in range(COMPARED)]
    mine = [our_logits(checkpoint, *pair) for pair in zip(prompts, canvases, strict=True)]
    print("answering", flush=True)
    generation = checkpoint.generation
    engine = Engine(pack(checkpoint.model), tokenizer, template, generation)
    answers = answer_all(engine, arguments.max_tokens)
    tokens, seconds, steps, blocks = (
        sum(row[key] for row in answers) for key in ("tokens", "seconds", "steps", "blocks")
    )
    facts: dict[str, Any] = {
        "directory": arguments.directory.name,
        "date": str(date.today()),
        "device": describe_device(device),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        **about(checkpoint),
        "load_seconds": round(loaded, 1),
        "peak_gib": round(memory(device), 2),
        "committed_tokens_per_second": round(tokens / seconds, 1),
        "steps_per_block": round(steps / blocks, 2),
        "agreement": [],
        "answers": answers,
    }
    del engine, checkpoint
    gc.collect()
    if not arguments.no_reference:
        reference = load_reference(arguments.directory, dtype, device)
        facts["agreement"] = [
            {"prompt": prompt, **compare(mine[n], reference_logits(reference, ids, canvases[n]))}
            for n, (prompt, ids) in enumerate(zip(PROMPTS, prompts, strict=False))
        ]
    text = report(facts)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    print(json.dumps({"bench": "first_contact", **facts}))


if __name__ == "__main__":
    main()
