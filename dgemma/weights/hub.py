"""Resolves `--model` to a directory or a GGUF file: a path, the hub's cache, or the built-in model.

Only `download` uses the network. The hub package is imported at use, since its import is slow and
most calls name a directory.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dgemma.errors import CheckpointError, UsageError
from dgemma.options import option
from dgemma.weights.files import (
    COMPANIONS,
    CONFIGS,
    ENTRY_POINTS,
    GGUF_SUFFIX,
    INT8_SHARDS,
    SHARDS,
    find_weights,
    listing,
    verify_digests,
    whole_checkpoint,
)

# Set before the hub package is imported anywhere: it reads the variable once.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
NANO = "nano"
NANO_DIRECTORY = Path(__file__).resolve().parents[1] / "models" / NANO
NEEDED_FILES = [*CONFIGS, *COMPANIONS, *ENTRY_POINTS, SHARDS, INT8_SHARDS]
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A checkpoint and how it is loaded; these fields are command-line options."""

    model: str = option(
        NANO, "A checkpoint directory, a GGUF file, a downloaded hub id, or nano.", "--model", "-m"
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps.")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16.")
    quant: str = option(
        "auto", "Weights in memory: auto, none (16 or 32 bits), int8, fp8 or nvfp4."
    )
    adapter: Path | None = option(None, "A LoRA adapter to put on the model: a directory or file.")
    template: str = option(
        "auto", "Chat template of a GGUF file: auto (dgemma's for the released tokenizer) or file."
    )
    vision: str = option(
        "auto",
        "Image tower of a GGUF model: auto (an mmproj file beside it), none, or the path of an "
        "mmproj or safetensors file.",
    )


def find_checkpoint(name: str) -> Path:
    """Return the directory or GGUF file of a `--model` value. Never uses the network."""
    if name == NANO:
        return _find_nano()
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():
        return _check_directory(path)
    if path.suffix.lower() == GGUF_SUFFIX:
        if not path.is_file():
            raise UsageError(f"{name} does not exist; check the path of the GGUF file")
        return path
    if HUB_NAME.fullmatch(name):
        _refuse_gguf_repository(name)
        return _find_cached(name)
    raise UsageError(
        f"{name!r} names no model; it must be a directory that exists, a GGUF file, a hub name "
        f"such as google/diffusiongemma-26B-A4B-it, or {NANO}"
    )


def _check_directory(path: Path) -> Path:
    """Refuse a directory with GGUF files but no checkpoint: the file must be given."""
    files = sorted(file.name for file in path.glob(f"*{GGUF_SUFFIX}"))
    if files and not (path / CONFIGS[0]).is_file():
        raise UsageError(
            f"{path} holds GGUF files and no {CONFIGS[0]}; name one of them: {listing(files)}"
        )
    return whole_checkpoint(path)


def download(repo_id: str, revision: str | None = None, directory: Path | None = None) -> Path:
    """Fetch a checkpoint's files into the hub cache or `directory`; return the directory."""
    if not HUB_NAME.fullmatch(repo_id):
        raise UsageError(f"{repo_id!r} is not a hub name; those look like owner/name")
    _refuse_gguf_repository(repo_id)
    from huggingface_hub import errors, snapshot_download

    # From whichever HTTP package the installed version uses.
    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        path = snapshot_download(
            repo_id, revision=revision, local_dir=directory, allow_patterns=NEEDED_FILES
        )
    # The hub's transfer extension reports failures as RuntimeError.
    except (http_error, errors.EntryNotFoundError, OSError, RuntimeError) as error:
        raise CheckpointError(_explain(repo_id, revision, error)) from None
    except errors.HFValidationError as error:
        raise UsageError(f"{repo_id!r} is not a hub name: {_first_line(error)}") from None
    # If the hub is unreachable, the files already in `directory` are returned as the download.
    _check_complete(Path(path), repo_id)
    verify_digests(Path(path))
    return Path(path)


def _refuse_gguf_repository(name: str) -> None:
    """Refuse a repository of GGUF files: the file to fetch must be given."""
    if name.lower().endswith("-gguf"):
        raise UsageError(
            f"{name} holds GGUF files of several types; fetch one with `hf download {name} "
            "FILE.gguf`, and give its path"
        )


def _find_nano() -> Path:
    if not NANO_DIRECTORY.is_dir():
        raise UsageError(
            f"the built-in model {NANO} is not part of this build yet; give a directory or a hub "
            "name instead"
        )
    return NANO_DIRECTORY


def _find_cached(name: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        path = snapshot_download(name, local_files_only=True, allow_patterns=NEEDED_FILES)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        raise UsageError(
            f"{name} is neither a directory nor wholly in the hub cache of this machine; check the "
            f"path, or run `dgemma download {name}`"
        ) from None
    _check_complete(Path(path), name)
    return Path(path)


def _check_complete(directory: Path, name: str) -> None:
    try:
        find_weights(directory)
        if not (directory / "config.json").is_file():
            raise CheckpointError(f"{directory} holds no config.json")
    except CheckpointError as error:
        raise CheckpointError(
            f"{name} is not a whole checkpoint: {error}; run `dgemma download {name}` or check the "
            "name"
        ) from None


def _explain(repo_id: str, revision: str | None, error: Exception) -> str:
    """Return one sentence on what failed and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo_id} is gated: accept its terms at https://huggingface.co/{repo_id}, then log "
            "in with `hf auth login` and try again"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub has no {repo_id} that you may see; check the spelling, or log in with "
            "`hf auth login` if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}; leave it out for the newest"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"the hub could not be reached for {repo_id}, and the cache does not hold it; check "
            "the connection and HF_HUB_OFFLINE, and try again"
        )
    return (
        f"downloading {repo_id} failed ({_first_line(error)}); try again, files already fetched "
        "are kept"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
