"""The packages of the test environment: a bill of materials, and known weaknesses, without network.

    python .ci/supply_chain.py sbom > out/sbom.cdx.json
    python .ci/supply_chain.py audit all.zip

`sbom` writes CycloneDX 1.6 from requirements.lock. `audit` compares the lock and constraints.txt
with advisories in OSV's form: a JSON file, a directory of them, or the dump of an ecosystem
(https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip), fetched wherever there is a
network. Exits with 1 if a version is affected.
"""

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def read_lock(path: Path) -> dict[str, tuple[str, list[str]]]:
    """Return version and SHA-256 digests by package; constraints have no digests."""
    packages: dict[str, tuple[str, list[str]]] = {}
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if pin := PIN.match(line):
            name = canonicalize_name(pin[1])
            packages[name] = (pin[2], [])
        packages.get(name, ("", []))[1].extend(HASH.findall(line))
    return packages


def sbom(lock: dict[str, tuple[str, list[str]]]) -> dict[str, Any]:
    components = [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "hashes": [{"alg": "SHA-256", "content": digest} for digest in digests],
        }
        for name, (version, digests) in sorted(lock.items())
    ]
    project = {"type": "application", "name": "dgemma", "bom-ref": "dgemma"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": project},
        "components": components,
    }


def advisories(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, a directory or a zip."""
    if source.suffix == ".zip":
        with zipfile.ZipFile(source) as archive:
            yield from (json.loads(archive.read(name)) for name in archive.namelist())
        return
    for path in sorted(source.glob("*.json")) if source.is_dir() else [source]:
        raw = json.loads(path.read_text(encoding="utf-8"))
        yield from raw if isinstance(raw, list) else [raw]


def is_affected(version: str, affected: dict[str, Any]) -> bool:
    """True if an advisory's entry names a version, or has a range that contains it."""
    if version in affected.get("versions", []):
        return True
    ranges = [entry for entry in affected.get("ranges", []) if entry.get("type") == "ECOSYSTEM"]
    return any(_contains(entry.get("events", []), Version(version)) for entry in ranges)


def _contains(events: list[dict[str, str]], version: Version) -> bool:
    inside = False
    for event in events:  # in order of versions, as the format has them
        ((kind, stated),) = event.items()
        try:
            bound = Version("0" if stated == "0" else stated)
        except InvalidVersion:
            continue
        if kind == "introduced" and version >= bound:
            inside = True
        elif (kind == "fixed" and version >= bound) or (
            kind == "last_affected" and version > bound
        ):
            inside = False
    return inside


def audit(lock: dict[str, tuple[str, list[str]]], source: Path) -> list[str]:
    """Return a sentence for each locked version that an advisory names."""
    found = []
    for record in advisories(source):
        if record.get("withdrawn"):
            continue
        for affected in record.get("affected", []):
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem") != "PyPI" or name not in lock:
                continue
            if is_affected(lock[name][0], affected):
                summary = record.get("summary", "")
                found.append(f"{name} {lock[name][0]}: {record.get('id')} {summary}".strip())
    return sorted(set(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["sbom", "audit"])
    parser.add_argument("advisories", nargs="?", type=Path)
    args = parser.parse_args()
    lock = read_lock(ROOT / "requirements.lock")
    if args.command == "sbom":
        print(json.dumps(sbom(lock), indent=1))
        return 0
    if args.advisories is None or not args.advisories.exists():
        parser.error("give the advisories: a JSON file, a directory of them, or OSV's all.zip")
    lock = {**read_lock(ROOT / "constraints.txt"), **lock}
    found = audit(lock, args.advisories)
    print("\n".join(found) or f"none of {len(lock)} packages is named")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
