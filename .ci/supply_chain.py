"""The packages of the test environment: a bill of materials, and known weaknesses.

    python .ci/supply_chain.py sbom > out/sbom.cdx.json
    python .ci/supply_chain.py audit [all.zip]

`sbom` writes CycloneDX 1.6 from requirements.lock. `audit` compares the lock and constraints.txt
with advisories, without a network: a JSON file in OSV's form, a directory of them, or the dump of
an ecosystem (https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip). Without a file it
asks PyPI about each version, and names those about which there is no answer: a mirror may know the
newest version of a package alone. Exits with 1 if a version is affected.
"""

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
PYPI = "https://pypi.org"
TIMEOUT = 30  # seconds, of a question
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


def ask_pypi(
    lock: dict[str, tuple[str, list[str]]], url: str = PYPI
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return records in OSV's form about the locked versions, and packages without an answer."""
    records, silent = [], []
    with ThreadPoolExecutor(8) as pool:
        versions = [version.partition("+")[0] for version, _ in lock.values()]
        answers = pool.map(partial(_ask_version, url), lock, versions)
        for (name, (version, _)), answer in zip(lock.items(), answers, strict=True):
            if answer is None:
                silent.append(f"{name} {version}")
                continue
            affected = {"package": {"ecosystem": "PyPI", "name": name}, "versions": [version]}
            records += [{**found, "affected": [affected]} for found in answer]
    return records, silent


def _ask_version(url: str, name: str, version: str) -> list[dict[str, Any]] | None:
    """Return the weaknesses of a version; None: neither it nor the newest is this one."""
    for page in (f"{url}/pypi/{name}/{version}/json", f"{url}/pypi/{name}/json"):
        try:
            with urllib.request.urlopen(page, timeout=TIMEOUT) as reply:
                found = json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            continue
        if found["info"]["version"] == version:
            return list(found["vulnerabilities"] or [])
    return None


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


def audit(lock: dict[str, tuple[str, list[str]]], records: Iterable[dict[str, Any]]) -> list[str]:
    """Return a sentence for each locked version that an advisory names."""
    found = []
    for record in records:
        if record.get("withdrawn"):
            continue
        for affected in record.get("affected", []):
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem") != "PyPI" or name not in lock:
                continue
            if is_affected(lock[name][0], affected):
                summary = record.get("summary") or ""
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
    lock, silent = {**read_lock(ROOT / "constraints.txt"), **lock}, list[str]()
    if args.advisories is None:
        records, silent = ask_pypi(lock)
    elif args.advisories.exists():
        records = list(advisories(args.advisories))
    else:
        parser.error(f"{args.advisories} does not exist; give advisories in OSV's form, or nothing")
    found = audit(lock, records)
    print(
        "\n".join([*found, f"{len(found)} known weaknesses in {len(lock) - len(silent)} packages"])
    )
    if silent:
        print(f"no answer about {len(silent)}: {', '.join(silent)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
