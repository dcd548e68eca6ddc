"""Versions, digests and advisories of the packages that the tests run with."""

import importlib.util
import json
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "supply_chain.py"
NOT_HASHED = {"torch", "triton"}  # the CPU build and its companion: SECURITY.md has the reason


@pytest.fixture(scope="module")
def chain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("supply_chain", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lock_has_the_versions_of_the_constraints_and_digests(chain: ModuleType) -> None:
    lock = chain.read_lock(ROOT / "requirements.lock")
    pins = chain.read_lock(ROOT / "constraints.txt")
    # `make locked` installs what is not in the lock yet by its version alone.
    stale = {name: version for name, (version, _) in lock.items() if pins[name][0] != version}
    assert not stale, "run `make lock`"
    assert not NOT_HASHED & lock.keys()
    assert all(digests for _, digests in lock.values())


def test_every_dependency_is_pinned_within_its_range(chain: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = chain.read_lock(ROOT / "constraints.txt")
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["serve"], *extras["train"], *extras["test"]]:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pins[name][0]), line
        assert any(part.operator == ">=" for part in requirement.specifier), line


def test_the_workflow_runs_targets_that_there_are() -> None:
    """Lint, tests, lowest versions, locked versions, packages and advisories: each is run."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (matrix,) = re.findall(r"make: \[(.*)\]", workflow)
    named = {*re.findall(r"[a-z-]+", matrix), *re.findall(r"run: make ([a-z-]+)", workflow)}
    assert named <= targets
    assert {"lint", "test-lowest", "locked", "dist", "audit"} <= named
    assert "run: .ci/run" in workflow and "make test" in (ROOT / ".ci" / "run").read_text()


def test_an_advisory_is_found_by_version_and_by_range(chain: ModuleType, tmp_path: Path) -> None:
    lock = {"jinja2": ("3.1.6", ["0" * 64]), "rich": ("15.0.0", [])}

    def record(number: int, name: str, **affected: object) -> dict[str, object]:
        package = {"ecosystem": "PyPI", "name": name}
        return {"id": f"TEST-{number}", "affected": [{"package": package, **affected}]}

    def events(*pairs: tuple[str, str]) -> dict[str, object]:
        listed = [{kind: version} for kind, version in pairs]
        return {"ranges": [{"type": "ECOSYSTEM", "events": listed}]}

    records = [
        record(1, "Jinja2", **events(("introduced", "0"), ("fixed", "3.1.7"))),
        record(2, "jinja2", **events(("introduced", "0"), ("fixed", "3.1.6"))),
        record(3, "rich", versions=["15.0.0"]),
        record(4, "rich", **events(("introduced", "14"), ("last_affected", "15.0.0"))),
        record(5, "other", versions=["1"]),
        {**record(6, "rich", versions=["15.0.0"]), "withdrawn": "2026-01-01T00:00:00Z"},
    ]
    (tmp_path / "all.json").write_text(json.dumps(records))
    found = chain.audit(lock, chain.advisories(tmp_path))
    assert [line.split()[2] for line in found] == ["TEST-1", "TEST-3", "TEST-4"]


def test_pypi_is_asked_about_versions_and_a_mirror_about_the_newest(chain: ModuleType) -> None:
    weak = {"id": "TEST-1", "summary": None, "fixed_in": ["2"], "withdrawn": None}
    pages: dict[str, tuple[str, list[Any]]] = {
        "/pypi/weak/1/json": ("1", [weak]),
        "/pypi/newest/3/json": ("", []),
        "/pypi/newest/json": ("3", [{**weak, "id": "TEST-2"}]),
        "/pypi/older/json": ("5", [weak]),
        "/pypi/good/1/json": ("1", []),
    }

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            version, found = pages.get(self.path, ("", []))
            body = json.dumps({"info": {"version": version}, "vulnerabilities": found}).encode()
            self.send_response(200 if version else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    versions = {"weak": "1+cpu", "newest": "3", "older": "4", "good": "1"}
    lock = {name: (version, list[str]()) for name, version in versions.items()}
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever).start()
        records, silent = chain.ask_pypi(lock, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert silent == ["older 4"]
    assert chain.audit(lock, records) == ["newest 3: TEST-2", "weak 1+cpu: TEST-1"]


def test_the_bill_of_materials_lists_every_package_with_its_digests(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "sbom"], capture_output=True, text=True, check=True
    )
    bill = json.loads(done.stdout)
    assert bill["bomFormat"] == "CycloneDX" and len(bill["components"]) > 80
    assert all(part["purl"].startswith("pkg:pypi/") for part in bill["components"])
    assert all(part["hashes"] for part in bill["components"])
    wrong = [sys.executable, str(SCRIPT), "audit", str(tmp_path / "none")]
    assert subprocess.run(wrong, capture_output=True, check=False).returncode == 2
