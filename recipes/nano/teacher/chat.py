"""The teacher's tokenizer and chat format.

A GGUF file holds vocabulary and merges of a byte-level BPE, but not its pre-tokenizer, which is
Qwen2's.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from dgemma.weights.gguf import GGUFFile

PRE_TOKENS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = 3  # GGUF's token type of control tokens
FENCE = "```"
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
SYSTEM = "You write clear and correct Python. Reply with code only."


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer from the file's metadata."""
    tokens = file.value("tokenizer.ggml.tokens", list)
    types = file.value("tokenizer.ggml.token_type", list)
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end a reply: those of a closing fence, and of the end of a turn."""
    vocabulary = tokenizer.get_vocab()
    fences = [number for token, number in vocabulary.items() if FENCE in token]
    return sorted([*fences, *(vocabulary[token] for token in END_TOKENS)])


def render(prompt: str, prefix: str) -> str:
    """Render a request in the teacher's chat format, with the beginning of the reply."""
    roles = {"system": SYSTEM, "user": prompt}
    text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in roles.items())
    return f"{text}<|im_start|>assistant\n{prefix}"
