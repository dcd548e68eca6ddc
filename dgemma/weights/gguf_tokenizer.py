"""Tokenizer and chat template of a GGUF file: read from its metadata, and written to it.

Kind `gemma4` is a BPE over UTF-8 with byte fallback. Rebuilt from pieces, merges and types, the
released tokenizer equals the released `tokenizer.json` byte for byte. Scores are not used, and
`add_bos_token` is ignored: the chat template writes <bos> itself.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.errors import CheckpointError, UsageError
from dgemma.text.chat import ChatTemplate
from dgemma.text.control_tokens import (
    CHANNEL,
    CHANNEL_END,
    STRING_QUOTE,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_RESPONSE,
)
from dgemma.text.tokenizer import SPACE_MARK, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

KIND = "gemma4"
MODEL, TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"
MERGES, TYPES = "tokenizer.ggml.merges", "tokenizer.ggml.token_type"
SCORES, UNKNOWN = "tokenizer.ggml.scores", "tokenizer.ggml.unknown_token_id"
CHAT_TEMPLATE = "tokenizer.chat_template"
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # token types
SCORE = -1000.0  # score of every piece, as in the reference converter
# Pieces marked as control tokens by some converters, but not by the released tokenizer.
PLAIN_PIECES = ("<s>", "</s>")
# Control tokens that the reference converter marks as user-defined, to print them.
VISIBLE = {
    CHANNEL,
    CHANNEL_END,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_RESPONSE,
    TOOL_RESPONSE.replace("<|", "<").replace(">", "|>"),
    STRING_QUOTE,
}
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
NORMALIZER = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
# SHA-256 of the released pieces and merges.
RELEASED_DIGEST = "20ce819120147107df35c5a8f77914ad7d76d59363932ce592f07926457e247c"
RELEASED_TEMPLATE = Path(__file__).resolve().parents[1] / "text" / "gemma4.jinja"

TEMPLATE_OPTIONS = ("auto", "file")


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """A chat template and a note on its origin."""

    template: ChatTemplate | None
    note: str


def read_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Build the tokenizer of a file."""
    return Tokenizer(_backend(metadata, path))


def tokenizer_json(metadata: Mapping[str, Any], path: Path) -> str:
    """Return the tokenizer of a file in the format of `tokenizer.json`."""
    text: str = _backend(metadata, path).to_str(pretty=True)
    return text


def is_released(metadata: Mapping[str, Any]) -> bool:
    """True if pieces and merges are those of the released tokenizer."""
    return digest(metadata.get(TOKENS, ()), metadata.get(MERGES, ())) == RELEASED_DIGEST


def digest(tokens: list[str], merges: list[str]) -> str:
    text = "\0".join(tokens) + "\0\0" + "\0".join(merges)
    return hashlib.sha256(text.encode()).hexdigest()


def choose_template(
    metadata: Mapping[str, Any], tokenizer: Tokenizer, choice: str = "auto"
) -> ChosenTemplate:
    """Choose the chat template: this package's for the released tokenizer, else the file's.

    Templates in published files are older than the release's. `file` selects the file's.
    """
    if choice not in TEMPLATE_OPTIONS:
        raise UsageError(f"template {choice!r} is not known; use {' or '.join(TEMPLATE_OPTIONS)}")
    stored = metadata.get(CHAT_TEMPLATE)
    if choice == "auto" and is_released(metadata):
        source = RELEASED_TEMPLATE.read_text(encoding="utf-8")
        note = "the released tokenizer: dgemma's current template, not the file's"
        return ChosenTemplate(ChatTemplate(source, tokenizer), f"chat template: {note}")
    if not isinstance(stored, str):
        return ChosenTemplate(None, "chat template: none in the file; prompts are plain text")
    note = f"the file's own, {len(stored.encode())} bytes"
    return ChosenTemplate(ChatTemplate.of_checkpoint(stored, tokenizer), f"chat template: {note}")


def _backend(metadata: Mapping[str, Any], path: Path) -> "Backend":
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    tokens, merges, types = _check(metadata, path)
    unknown = metadata.get(UNKNOWN, 3)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise CheckpointError(f"{path}: {UNKNOWN} is {unknown!r}; it should be an id of a token")
    try:
        model = models.BPE(
            vocab={piece: index for index, piece in enumerate(tokens)},
            merges=merges,
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:
        # The library raises exactly Exception, for one for a merge of pieces it does not have.
        if type(error) is not Exception:
            raise
        raise CheckpointError(f"{path}: its tokenizer cannot be built ({error})") from None
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="$A:0", pair="$A:0 $B:1", special_tokens=[]
    )
    control = [
        AddedToken(piece, normalized=False, special=True)
        for piece, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED) and piece not in PLAIN_PIECES
    ]
    backend.add_special_tokens(control)
    return backend


def _check(
    metadata: Mapping[str, Any], path: Path
) -> tuple[list[str], list[tuple[str, str]], list[int]]:
    """Return pieces, merges and types; refuses another kind of tokenizer, and damaged lists."""
    kind = metadata.get(MODEL)
    if kind != KIND:
        raise CheckpointError(
            f"{path}: {MODEL} is {kind!r}; this build reads {KIND!r}, which converters write for "
            "Gemma 4; convert the model again"
        )
    tokens, types = _list(metadata, TOKENS, str, path), _list(metadata, TYPES, int, path)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: {TYPES} has {len(types)} values for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: {TOKENS} holds a piece twice")
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, MERGES, str, path)]
    odd = next((merge for merge in merges if len(merge) != 2), None)
    if odd is not None:
        raise CheckpointError(
            f"{path}: {MERGES} holds {' '.join(odd)!r}; a merge is two pieces with a space between"
        )
    return tokens, merges, types


def _list(metadata: Mapping[str, Any], key: str, kind: type, path: Path) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        held = "missing" if values is None else "of another type"
        raise CheckpointError(
            f"{path}: {key} is {held}; it should be a list of {kind.__name__}s: the file has no "
            "tokenizer"
        )
    return values


@dataclass(frozen=True, slots=True)
class TokenizerKeys:
    """Pieces, types, merges and chat template of a tokenizer, as GGUF stores them."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    template: str | None

    def id_of(self, piece: str) -> int | None:
        return self.tokens.index(piece) if piece in self.tokens else None


def metadata_keys(metadata: Mapping[str, Any]) -> TokenizerKeys:
    """Return the tokenizer of an open file, to write it again."""
    template = metadata.get(CHAT_TEMPLATE)
    return TokenizerKeys(
        metadata[TOKENS],
        metadata[TYPES],
        metadata[MERGES],
        template if isinstance(template, str) else None,
    )


def tokenizer_keys(directory: Path) -> TokenizerKeys:
    """Read the tokenizer of a checkpoint directory as GGUF stores it."""
    path = directory / "tokenizer.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        model, added = raw["model"], raw["added_tokens"]
        vocab: dict[str, int] = model["vocab"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    _check_kind(raw, path)
    tokens = [piece for piece, _ in sorted(vocab.items(), key=lambda item: item[1])]
    control = {entry["content"] for entry in added}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    template = directory / "chat_template.jinja"
    return TokenizerKeys(
        tokens=tokens,
        types=[_type(piece, control) for piece in tokens],
        merges=merges,
        template=template.read_text(encoding="utf-8") if template.is_file() else None,
    )


def _type(piece: str, control: set[str]) -> int:
    if piece in VISIBLE and piece in control:
        return USER_DEFINED
    if piece in control:
        return CONTROL
    return BYTE if BYTE_PIECE.fullmatch(piece) else NORMAL


def _check_kind(raw: Mapping[str, Any], path: Path) -> None:
    """Refuse a tokenizer that GGUF kind `gemma4` cannot represent."""
    model, vocab = raw["model"], raw["model"]["vocab"]
    added = raw["added_tokens"]
    reasons = {
        "it is no BPE with byte fallback": model.get("type") != "BPE"
        or model.get("byte_fallback") is not True,
        "its normalizer is another": raw.get("normalizer") != NORMALIZER,
        "its ids have gaps": sorted(vocab.values()) != list(range(len(vocab))),
        "it adds tokens that the vocabulary lacks": any(
            vocab.get(entry["content"]) != entry["id"] for entry in added
        ),
        "it adds tokens that are not special": not all(entry["special"] for entry in added),
        "its pieces hold spaces": any(" " in piece for piece in vocab),
    }
    wrong = [reason for reason, holds in reasons.items() if holds]
    if wrong:
        raise CheckpointError(
            f"{path} cannot be stored as a GGUF tokenizer of the kind {KIND!r}: {'; '.join(wrong)}"
        )
