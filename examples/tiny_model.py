"""Make a tiny checkpoint that has memorized a few answers: tokenizer, template, weights.

    python -m examples.tiny_model DIRECTORY

It takes some seconds on a CPU and shows all of the machinery; it is not a language model.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from dgemma.config import FULL, SLIDING, GenerationConfig, ModelConfig
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.tokenizer import Tokenizer as Text
from dgemma.weights.load import Checkpoint, random_model
from dgemma.weights.save import save_checkpoint
from examples.memorize import memorize

CANVAS = 64
STEPS = 280
ANSWERS = {
    "What is a canvas?": "A block of tokens. It starts as noise, and settles.",
    "How is this text written?": (
        "Not from left to right: the words of a block appear together, the sure ones first, "
        "and each sees both of its sides."
    ),
    "Write a haiku.": "Noise on a blank page\nall the words arrive at once\nthe last one settles",
}
CONTROL = "<pad> <eos> <bos> <unk> <mask> <|channel> <channel|> <|turn> <turn|> <|think|>".split()
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{{- message.content | trim + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


def make_tokenizer() -> Tokenizer:
    """Make a tokenizer like the released one, without merges: every character is a token."""
    characters = sorted(set("".join([*ANSWERS, *ANSWERS.values(), TEMPLATE]).replace(" ", "▁")))
    pieces = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return bpe_tokenizer(vocabulary, [], CONTROL)


def bpe_tokenizer(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], control: Sequence[str]
) -> Tokenizer:
    """Make a tokenizer that splits, decodes and names control tokens as the released one does."""
    bpe = BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in control])
    return tokenizer


def make_text() -> Text:
    """Return the same tokenizer as the package reads it."""
    return Text(make_tokenizer())


def tiny_config(vocab_size: int, **changes: Any) -> ModelConfig:
    """Return the config of a tiny model; `changes` are other values of its fields."""
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=4,
        top_k_experts=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        layer_types=(SLIDING, SLIDING, FULL),
        sliding_window=64,
        max_position_embeddings=4096,
        canvas_length=CANVAS,
        dtype="float32",
    )
    return replace(config, **changes)


def make_checkpoint(directory: Path) -> None:
    """Train and save; progress on stderr."""
    directory.mkdir(parents=True, exist_ok=True)
    backend = make_tokenizer()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    text = Text.load(directory)
    template = ChatTemplate.load(directory, text)
    end = [text.control_ids["<turn|>"]]
    fill = text.control_ids["<eos>"]
    pairs = []
    for question, answer in ANSWERS.items():
        ids = [*text.encode(answer), *end]
        ids += [fill] * (-len(ids) % CANVAS)
        prompt = template.prompt([Message(role="user", content=question)])
        pairs.append((torch.tensor(prompt.ids), torch.tensor(ids)))
    torch.manual_seed(0)
    model = random_model(tiny_config(text.vocab_size), seed=0)
    for turn, loss in enumerate(memorize(model, pairs, STEPS), start=1):
        if turn % 20 == 0:
            print(f"\rlearning {turn}/{STEPS}, loss {loss:.3f} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    stops = GenerationConfig(stop_ids=(fill, *end), max_new_tokens=4 * CANVAS)
    save_checkpoint(Checkpoint(model=model, generation=stops), directory, overwrite=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make_checkpoint(Path(sys.argv[1]))
