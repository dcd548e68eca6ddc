"""Sentinels in prompts: editors' holes inside one prompt, and regions to edit in messages.

Editors mark a hole with the sentinels of the model they were made for. Here sentinels are plain
text to split at; none is a token of this model.
"""

import re
from dataclasses import dataclass

from dgemma.errors import UsageError
from dgemma.text.control_tokens import FILL_MARK

# Prefix, suffix and middle of each family; the text between them is used verbatim.
FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<PRE> ", " <SUF>", " <MID>"),  # CodeLlama
)
CODESTRAL = ("[SUFFIX]", "[PREFIX]")  # the suffix comes first
FILE_MARKS = re.compile(r"<\|(?:repo_name|file_sep|file_separator)\|>|<(?:reponame|file_sep)>")


@dataclass(frozen=True, slots=True)
class HoleContext:
    """The texts before and after a hole."""

    before: str
    after: str


def find_hole(prompt: str) -> HoleContext | None:
    """Return the hole of a prompt with sentinels; None if they are missing or out of order."""
    for family in FAMILIES:
        hole = _between(prompt, *family)
        if hole is not None:
            return hole
    suffix_mark, prefix_mark = CODESTRAL
    head, _, rest = prompt.partition(suffix_mark)
    after, found, before = rest.partition(prefix_mark)
    if found and not head.strip():
        return HoleContext(before, after)
    before, marked, after = prompt.partition(FILL_MARK)
    return HoleContext(before, after) if marked and FILL_MARK not in after else None


def _between(prompt: str, prefix: str, suffix: str, middle: str) -> HoleContext | None:
    if any(prompt.count(mark) != 1 for mark in (prefix, suffix, middle)):
        return None
    context, _, rest = prompt.partition(prefix)
    before, parted, rest = rest.partition(suffix)
    after, ended, tail = rest.partition(middle)
    if not (parted and ended) or tail.strip():
        return None
    return HoleContext(FILE_MARKS.sub("\n", context).lstrip("\n") + before, after)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a file that may change, and the latest changes."""

    before: str
    old: str
    after: str
    history: str

    @property
    def text(self) -> str:
        return self.before + self.old + self.after


def read_region(message: str) -> Region:
    """Read a next-edit message in Mercury format."""
    file = _inside(message, "current_file_content")
    file = re.sub(r"\A\n?current_file_path:[^\n]*\n", "", file)
    before, opened, rest = file.partition("<|code_to_edit|>\n")
    old, closed, after = rest.partition("<|/code_to_edit|>")
    if not (opened and closed):
        raise UsageError("the message has no <|code_to_edit|> ... <|/code_to_edit|> on lines apart")
    history = _inside(message, "edit_diff_history", wanted=False).strip("\n")
    return Region(before, old.replace("<|cursor|>", ""), after.removeprefix("\n"), history)


def read_update(message: str) -> tuple[str, str]:
    """Return the file and the snippet of an apply message in Mercury format."""
    original = _inside(message, "original_code").removeprefix("\n")
    return original, _inside(message, "update_snippet").strip("\n")


def _inside(message: str, tag: str, *, wanted: bool = True) -> str:
    _, opened, rest = message.partition(f"<|{tag}|>")
    text, closed, _ = rest.partition(f"<|/{tag}|>")
    if wanted and not (opened and closed):
        raise UsageError(f"the message has no <|{tag}|> ... <|/{tag}|>; docs/serve.md shows one")
    return text if closed else ""
