"""Configs, tokenizer and chat template of a model path (directory or GGUF file); assistants."""

from pathlib import Path
from typing import Any

from dgemma.config import (
    GenerationConfig,
    ModelConfig,
    config_to_json,
    load_config,
    load_generation_config,
)
from dgemma.config.strict_json import read_json
from dgemma.errors import CheckpointError, UsageError
from dgemma.model.assistant import Assistant, AssistantConfig
from dgemma.model.gemma import Gemma
from dgemma.text.chat import ChatTemplate
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.files import read_headers
from dgemma.weights.gguf_checkpoint import is_gguf, open_gguf
from dgemma.weights.gguf_tokenizer import (
    ChosenTemplate,
    TokenizerKeys,
    choose_template,
    metadata_keys,
    tokenizer_json,
    tokenizer_keys,
)
from dgemma.weights.safetensors_io import MappedTensors

__all__ = ["ChosenTemplate"]

TEMPLATE_FILE = "chat_template.jinja"
AUTO_TEMPLATE = "auto"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # tensors of an assistant


def model_config(path: Path) -> ModelConfig:
    return open_gguf(path).config if is_gguf(path) else load_config(path)


def generation_config(path: Path) -> GenerationConfig:
    return open_gguf(path).generation if is_gguf(path) else load_generation_config(path)


def config_json(path: Path) -> dict[str, Any]:
    """Return `config.json`, or its equivalent for a GGUF file."""
    if is_gguf(path):
        return config_to_json(open_gguf(path).config)
    return read_json(path / "config.json")


def load_tokenizer(path: Path) -> Tokenizer:
    return open_gguf(path).tokenizer() if is_gguf(path) else Tokenizer.load(path)


def check_template_choice(path: Path, choice: str) -> None:
    """Refuse a choice of templates where there is none to choose: only GGUF files have two."""
    if choice != AUTO_TEMPLATE and not is_gguf(path):
        raise UsageError(f"--template {choice} is for GGUF models; leave it out")


def load_template(path: Path, tokenizer: Tokenizer, choice: str = AUTO_TEMPLATE) -> ChosenTemplate:
    """Load the chat template; None if a directory has none."""
    check_template_choice(path, choice)
    if is_gguf(path):
        return choose_template(open_gguf(path).file.metadata, tokenizer, choice)
    if not (path / TEMPLATE_FILE).exists():
        return ChosenTemplate(None, "chat template: none; prompts are plain text")
    return ChosenTemplate(ChatTemplate.load(path, tokenizer), "chat template: the checkpoint's")


def source_notes(path: Path, template: ChosenTemplate | None = None) -> tuple[str, ...]:
    """Return notes on a GGUF file: types, assumptions, template."""
    if not is_gguf(path):
        return ()
    checkpoint = open_gguf(path)
    types = ", ".join(f"{count} {name}" for name, count in checkpoint.type_counts().items())
    chosen = () if template is None else (template.note,)
    return (f"{len(checkpoint.file.tensors)} tensors: {types}", *checkpoint.notes, *chosen)


def load_tokenizer_keys(path: Path) -> TokenizerKeys:
    """Return tokenizer and template in GGUF's format."""
    return metadata_keys(open_gguf(path).file.metadata) if is_gguf(path) else tokenizer_keys(path)


def write_tokenizer(path: Path, directory: Path) -> list[str]:
    """Write a GGUF file's tokenizer and template as files of a directory."""
    metadata = open_gguf(path).file.metadata
    text = tokenizer_json(metadata, path)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    template = metadata_keys(metadata).template
    if template is None:
        return ["tokenizer.json"]
    (directory / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    return ["tokenizer.json", TEMPLATE_FILE]


def load_assistant(path: Path, model: Gemma) -> Assistant:
    """Load a Gemma 4 assistant for a model, in its dtype and on its device."""
    config = AssistantConfig.read(read_json(path / "config.json"), str(path / "config.json"))
    config.check_target(model.config, path)
    assistant = Assistant(config, model.config)
    mapped = MappedTensors(read_headers(path))
    tensors = {name: mapped[name] for name in mapped.stored}
    head = tensors.pop(EMBEDDING, None)  # tied
    if HEAD not in tensors and head is not None:
        tensors[HEAD] = head
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in assistant.state_dict().items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    differing = sorted(name for name, _ in shapes.items() ^ found.items())
    if differing:
        raise CheckpointError(
            f"{path}: {differing[0]} is missing, unknown or of another shape; the weights are of "
            "another config"
        )
    assistant.load_state_dict(weights)
    weight = model.norm.weight
    return assistant.to(weight.device, weight.dtype).eval().requires_grad_(False)
