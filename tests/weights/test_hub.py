"""Finding and fetching checkpoints, with a hub that is never reached."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from dgemma.errors import CheckpointError, UsageError
from dgemma.weights import hub as module
from dgemma.weights.hub import NEEDED_FILES, download, find_checkpoint

# The http package beneath the hub's, whose name depends on the installed version.
http = import_module(errors.HTTPError.__module__.partition(".")[0])
NAME = "google/diffusiongemma-26B-A4B-it"
COMMIT = "f7f5b7f5fa82ffc52addd066915886d497f5517b"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def fill_cache(cache: Path, *names: str) -> Path:
    repository = cache / ("models--" + NAME.replace("/", "--"))
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def hub_answers(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[dict[str, Any]]:
    """Replace the hub by one answer: a path, or an error to raise."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **rest: Any) -> str:
        calls.append({"repo_id": repo_id, **rest})
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def http_error(kind: type[errors.HfHubHTTPError], status: int = 404) -> errors.HfHubHTTPError:
    request = http.Request("GET", "https://huggingface.co")
    return kind("no\nsuch thing", response=http.Response(status, request=request))


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path)) == tmp_path


def test_a_home_directory_may_be_abbreviated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert find_checkpoint("~/model") == tmp_path / "model"


def test_a_hub_name_is_found_in_the_cache(cache: Path) -> None:
    snapshot = fill_cache(cache, "config.json", "model.safetensors")
    assert find_checkpoint(NAME) == snapshot


def test_a_hub_name_that_is_not_cached_asks_for_the_download(cache: Path) -> None:
    with pytest.raises(UsageError, match=f"dgemma download {NAME}"):
        find_checkpoint(NAME)


@pytest.mark.parametrize("names", [["config.json"], ["model.safetensors"]])
def test_a_partly_cached_model_asks_for_the_download(names: list[str], cache: Path) -> None:
    fill_cache(cache, *names)
    with pytest.raises(CheckpointError, match=f"dgemma download {NAME}"):
        find_checkpoint(NAME)


@pytest.mark.parametrize("name", ["", "nowhere", "./nowhere", "a/b/c", "/no/where", "owner/na me"])
def test_other_names_are_refused_with_what_is_allowed(name: str, cache: Path) -> None:
    with pytest.raises(UsageError, match=r"directory.*hub name.*nano") as caught:
        find_checkpoint(name)
    assert repr(name) in str(caught.value)


def test_nano_is_the_directory_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.NANO_DIRECTORY.parts[-3:] == ("dgemma", "models", "nano")
    monkeypatch.setattr(module, "NANO_DIRECTORY", tmp_path)
    assert find_checkpoint("nano") == tmp_path
    monkeypatch.setattr(module, "NANO_DIRECTORY", tmp_path / "absent")
    with pytest.raises(UsageError, match="not part of this build"):
        find_checkpoint("nano")


def test_a_download_asks_only_for_what_is_needed(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = hub_answers(monkeypatch, single)
    assert download(NAME, "main", tmp_path) == single
    asked = {"revision": "main", "local_dir": tmp_path, "allow_patterns": NEEDED_FILES}
    assert calls == [{"repo_id": NAME, **asked}]
    assert "tokenizer.json" in NEEDED_FILES and "chat_template.jinja" in NEEDED_FILES


def test_a_download_without_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_answers(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match=rf"{NAME}.*model\.safetensors"):
        download(NAME)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (http_error(errors.GatedRepoError, 403), "accept its terms"),
        (http_error(errors.RepositoryNotFoundError, 401), "hf auth login"),
        (http_error(errors.RevisionNotFoundError), "no revision 'v9'"),
        (http_error(errors.HfHubHTTPError, 500), "try again"),
        (errors.LocalEntryNotFoundError("no connection"), "check the connection"),
        (http.ProxyError("the proxy said no"), "the proxy said no"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("Data processing error"), "Data processing error"),
    ],
)
def test_a_failed_download_says_what_was_asked_and_what_to_do(
    error: Exception, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_answers(monkeypatch, error)
    with pytest.raises(CheckpointError) as caught:
        download(NAME, "v9")
    message = str(caught.value)
    assert NAME in message and advice in message and "\n" not in message


def test_a_download_without_a_network_says_so(cache: Path) -> None:
    with pytest.raises(CheckpointError, match=f"could not be reached for {NAME}"):
        download(NAME)


@pytest.mark.parametrize("name", ["diffusiongemma", "a/b/c", "../x/y", ""])
def test_a_download_needs_a_hub_name(name: str) -> None:
    with pytest.raises(UsageError, match="owner/name"):
        download(name)


def test_a_hub_name_the_hub_finds_malformed_is_a_usage_error(cache: Path) -> None:
    for attempt in (download, find_checkpoint):
        with pytest.raises(UsageError, match="own--er/name"):
            attempt("own--er/name")


def test_finding_a_directory_imports_neither_torch_nor_the_hub(tmp_path: Path) -> None:
    code = (
        "import sys; from dgemma.weights.hub import find_checkpoint; "
        f"find_checkpoint({str(tmp_path)!r}); "
        "sys.exit(bool({'torch', 'huggingface_hub'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
