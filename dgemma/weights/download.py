"""Where a model comes from: the hub, the hub's local cache, a directory, or the package itself.

Only `download` uses the network. Knows which files a checkpoint needs, not what is in them.
The hub package is imported at use: it is slow to import, and most calls name a directory.
"""

import os
import re
from pathlib import Path

from dgemma.errors import CheckpointError, UsageError
from dgemma.weights.files import (
    COMPANIONS,
    CONFIGS,
    ENTRY_POINTS,
    INT8_SHARDS,
    SHARDS,
    find_weights,
)

NANO = "nano"
NANO_DIRECTORY = Path(__file__).resolve().parents[1] / "models" / NANO
NEEDED_FILES = [*CONFIGS, *COMPANIONS, *ENTRY_POINTS, SHARDS, INT8_SHARDS]
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def find_checkpoint(name: str) -> Path:
    """The directory a `--model` value stands for. Never uses the network."""
    if name == NANO:
        return _find_nano()
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():
        return path
    if HUB_NAME.fullmatch(name):
        return _find_cached(name)
    raise UsageError(
        f"{name!r} names no model; it must be a directory that exists, a hub name such as "
        f"google/diffusiongemma-26B-A4B-it, or {NANO}"
    )


def download(repo_id: str, revision: str | None = None, directory: Path | None = None) -> Path:
    """Fetch the files of a checkpoint into the hub cache or `directory`, and return where."""
    if not HUB_NAME.fullmatch(repo_id):
        raise UsageError(f"{repo_id!r} is not a hub name; those look like owner/name")
    from huggingface_hub import errors, snapshot_download

    # The class of the http package beneath, whichever that is in the installed version.
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
    # An unreachable hub passes off whatever lies in `directory` as the download.
    _check_whole(Path(path), repo_id)
    return Path(path)


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
    _check_whole(Path(path), name)
    return Path(path)


def _check_whole(directory: Path, name: str) -> None:
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
    """One sentence: what was asked, and what to do."""
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
