"""The teacher's tokens, and how it is asked.

A GGUF file holds the vocabulary and merges of a byte-level BPE; what it does not hold is how text
is cut before that, which is Qwen2's.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from recipes.teacher.gguf import Gguf

CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = 3  # the type of such a token
FENCE = "```"
ENDS = ("<|im_end|>", "<|endoftext|>")
SYSTEM = "You write clear and correct Python. Reply with code only."


def read_tokenizer(file: Gguf) -> Tokenizer:
    tokens = file.facts["tokenizer.ggml.tokens"]
    types = file.facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in file.facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def stops(tokenizer: Tokenizer) -> list[int]:
    """Tokens behind which a reply has ended: those of a closing fence, and of a turn's end."""
    vocabulary = tokenizer.get_vocab()
    fences = [number for token, number in vocabulary.items() if FENCE in token]
    return sorted([*fences, *(vocabulary[end] for end in ENDS)])


def prompt(ask: str, begin: str) -> str:
    """A request in the teacher's own form, and the first words of its reply."""
    turns = {"system": SYSTEM, "user": ask}
    said = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns.items())
    return f"{said}<|im_start|>assistant\n{begin}"
