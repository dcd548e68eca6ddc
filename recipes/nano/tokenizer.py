"""Learn nano's tokenizer: byte-fallback BPE of the released kind, single digits, released names.

The released file has no real pre-tokenizer: text is one long piece and the merges decide alone. So
words, digits, punctuation and line ends are separated while the merges are *learned*, and the file
is saved as the released one: a pair that was never adjacent in training has no merge.

Learns and writes; `dgemma.text.tokenizer` reads.
"""

import json
import random
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from dgemma.errors import UsageError
from dgemma.weights.hub import NANO_DIRECTORY
from recipes.nano import raw

TEMPLATE = NANO_DIRECTORY / "chat_template.jinja"
# Characters sampled of each kind of text; prose, code and conversations weigh about the same.
SAMPLE_SIZES = {
    "sentences": 6_000_000,
    "stories": 4_500_000,
    "books": 2_500_000,
    "code": 12_000_000,
    "dialogues": 2_000_000,
    "calls": 1_500_000,
    "instruct": 4_000_000,
}
# The released names; the first five have the released ids.
CONTROL = (
    "<pad> <eos> <bos> <unk> <mask> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
    '<tool_response|> <|"|> <|think|> <|channel> <channel|> <|turn> <turn|> '
    "<|image> <|audio> <|image|> <|audio|> <image|> <audio|> <|video|>"
).split()
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"
ASCII = [SPACE, "\n", "\t", *string.digits, *string.ascii_letters, *string.punctuation]
MAX_RUN = {SPACE: 24, "\n": 4, "\t": 4}
# Non-ASCII characters of English text; every other one is encoded as bytes.
OTHER = [*"àáâäåæçèéêëíîïñóôöøúûüßÀÉ", *"–—‘’“”…•°£€×→"]
MAX_PIECE = 16
# Runs and digits have fixed merges, so nothing is learned from them.
SKIPPED = rf"{SPACE}{{2,}}|{SPACE}?\p{{N}}|[\n\t\r]+"
# A word, a run of underscores or a run of other punctuation, each with the space before it.
PIECES = rf"{SPACE}?\p{{L}}+|{SPACE}?_+|{SPACE}?[^\s\p{{L}}\p{{N}}_{SPACE}]+|{SPACE}"


def learn(texts: Iterable[str], vocab_size: int = 8192) -> Tokenizer:
    """Learn a tokenizer of exactly `vocab_size` tokens, the same for the same texts."""
    pieces = [*CONTROL, *BYTES, *fixed_pieces()]
    if vocab_size <= len(pieces):
        raise UsageError(
            f"vocab_size is {vocab_size}; {len(pieces)} tokens are fixed, ask for more"
        )
    merges = fixed_merges()
    known = set(pieces)
    for left, right in learn_merges(texts, vocab_size):
        if left + right not in known:
            pieces.append(left + right)
            known.add(left + right)
        merges.append((left, right))
        if len(pieces) == vocab_size:
            break
    if len(pieces) != vocab_size:
        raise UsageError(
            f"the text gives {len(pieces)} tokens and not {vocab_size}; "
            "give more text or ask for a smaller vocabulary"
        )
    backend = make_backend(pieces, merges)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return backend


def fixed_pieces() -> list[str]:
    """List single characters, runs of spaces and line ends, and each digit after a space."""
    runs = [mark * count for mark, most in MAX_RUN.items() for count in range(2, most + 1)]
    return [*ASCII, *OTHER, *runs, *(SPACE + digit for digit in string.digits)]


def fixed_merges() -> list[tuple[str, str]]:
    """List merges of runs, the longest first, as in the released file: a run is one token."""
    runs = [
        (mark * left, mark * (count - left))
        for mark, most in MAX_RUN.items()
        for count in range(2, most + 1)
        for left in range(1, count)
    ]
    runs.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
    return [*runs, *((SPACE, digit) for digit in string.digits)]


def learn_merges(texts: Iterable[str], vocab_size: int) -> list[tuple[str, str]]:
    """Learn merges, most frequent first; rather too many, since some pieces are fixed already."""
    backend = Tokenizer(BPE())
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SKIPPED), "removed"),
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=[*ASCII, *OTHER],
        limit_alphabet=len(ASCII) + len(OTHER),
        max_token_length=MAX_PIECE,
        show_progress=False,
    )
    backend.train_from_iterator(without_marks(texts), trainer)
    model = json.loads(backend.to_str())["model"]
    return [(left, right) for left, right in model["merges"]]


def without_marks(texts: Iterable[str]) -> Iterator[str]:
    """Drop the space mark itself, which is always encoded as bytes (see text/tokenizer.py)."""
    return (text.replace(SPACE, " ") for text in texts)


def make_backend(pieces: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    """Build a tokenizer with the released normalizer, decoder and control tokens."""
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=["$A:0"], pair=["$A:0", "$B:1"], special_tokens=[]
    )
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL])
    return backend


def write(backend: Tokenizer, template: str, directory: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"), pretty=True)
    settings = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def tokenizer_config() -> dict[str, Any]:
    """Return `tokenizer_config.json`: transformers' settings, with the released token names."""
    named = {
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "sot_token": "<|turn>",
        "eot_token": "<turn|>",
        "soc_token": "<|channel>",
        "eoc_token": "<channel|>",
        "think_token": "<|think|>",
        "escape_token": '<|"|>',
        "std_token": "<|tool>",
        "etd_token": "<tool|>",
        "stc_token": "<|tool_call>",
        "etc_token": "<tool_call|>",
        "str_token": "<|tool_response>",
        "etr_token": "<tool_response|>",
    }
    return {
        "tokenizer_class": "GemmaTokenizer",
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
        "padding_side": "left",
        **named,
    }


def make_tokenizer(data: Path, out: Path, seed: int = 0) -> None:
    """Learn the tokenizer from a sample of the data directory and write it with its template."""
    write(learn(sample_texts(data, seed)), TEMPLATE.read_text(encoding="utf-8"), out)


def sample_texts(data: Path, seed: int) -> list[str]:
    rng = random.Random(seed)
    kinds = texts_by_kind(data)
    return [text for name, size in SAMPLE_SIZES.items() for text in take(kinds[name], size, rng)]


def texts_by_kind(data: Path) -> dict[str, list[str]]:
    stories = [*raw.storybook(data), *raw.tales(data)]
    calls = raw.read_lines(data / "train" / "sgd_calls.jsonl.xz")
    instructions = raw.read_lines(data / "train" / "instruct.jsonl.xz")
    return {
        "sentences": raw.sentences(data),
        "stories": [document.text for document in stories],
        "books": [text for book in raw.books(data) for text in book.text.split("\n\n")],
        "code": [function.code for function in raw.functions(data)],
        "dialogues": [document.text for document in raw.dialogues(data)],
        "calls": [json.dumps(call["call"], separators=(",", ":")) for call in calls],
        "instruct": [f"{record['prompt']}\n\n{record['reply']}" for record in instructions],
    }


def take(texts: Sequence[str], size: int, rng: random.Random) -> list[str]:
    """Draw texts until `size` characters are reached."""
    chosen, total = [], 0
    for text in rng.sample(texts, len(texts)):
        if total >= size:
            break
        chosen.append(text)
        total += len(text)
    return chosen
