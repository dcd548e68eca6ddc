"""Spoilt pictures: decoded, or refused by a sentence, in flat memory.

python -m tests.images.fuzz [COUNT] [--http]

With `--http` each is sent to a server with a tiny tower, in turn by the four forms that take
pictures, while another client asks short questions and takes its time.
"""

import argparse
import base64
import resource
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from dgemma.errors import UsageError
from dgemma.images import Image
from tests.images.tiny_tower import TOWER, encoded, photo, png_of, seeing_engine

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("GIF", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
]
BOMBS = ((12_000, 12_000), (40_000, 4_000), (30_000, 30_000))  # pixels that a header claims


def spoilt(data: bytes, generator: np.random.Generator) -> bytes:
    """Cut, flip, repeat or insert bytes."""
    values = bytearray(data)
    for _ in range(int(generator.integers(1, 6))):
        at, kind = int(generator.integers(len(values))), int(generator.integers(4))
        if kind == 0:
            values = values[: max(at, 8)]
        elif kind == 1:
            values[at] ^= 1 << int(generator.integers(8))
        elif kind == 2:
            values[at:at] = values[at : at + 20]
        else:
            values[at : at + 4] = generator.integers(0, 256, 4, dtype=np.uint8).tobytes()
    return bytes(values)


def num_refused(count: int, seed: int = 0) -> int:
    """Prepare spoilt pictures; anything but a refusal by a sentence is raised."""
    generator = np.random.default_rng(seed)
    sound = [encoded(photo(60, 40), form, **options) for form, options in FORMS]
    refused = 0
    for index in range(count):
        try:
            Image(spoilt(sound[index % len(sound)], generator), tokens=70).prepare(TOWER)
        except UsageError:
            refused += 1
    return refused


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- over HTTP


def request_of(index: int, data: bytes) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request that shows a picture, each in another API's form."""
    text, more = base64.b64encode(data).decode(), {"dgemma": {"image_tokens": 70}}
    url = f"data:image/png;base64,{text}"
    match index % 4:
        case 0:
            part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
            return "/v1/chat/completions", {**asking(part), "max_tokens": 1, **more}
        case 1:
            part = {"type": "input_image", "image_url": url}
            asked = asking(part)["messages"]
            return "/v1/responses", {"input": asked, "max_output_tokens": 1, **more}
        case 2:
            source = {"type": "base64", "media_type": "image/png", "data": text}
            part = {"type": "image", "source": source}
            return "/v1/messages", {**asking(part), "max_tokens": 1, **more}
        case _:
            asked = {"prompt": "x", "images": [text], "options": {"num_predict": 1}}
            return "/api/generate", {**asked, "stream": False, **more}


def asking(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


@dataclass
class Neighbour:
    """Asks short questions until it is stopped; keeps the seconds that each took."""

    url: str
    seconds: list[float] = field(default_factory=list)
    is_done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.is_done.wait(0.05):
                begin = time.perf_counter()
                client.post("/v1/chat/completions", json=body).raise_for_status()
                self.seconds.append(time.perf_counter() - begin)


@dataclass(frozen=True, kw_only=True)
class Findings:
    statuses: Counter[int]
    megabytes: list[float]  # of the process after each quarter
    neighbour: Neighbour


def over_http(url: str, count: int, seed: int = 1) -> Findings:
    """Send spoilt pictures and bombs to a server of this process."""
    generator = np.random.default_rng(seed)
    sound = [encoded(photo(60, 40), form, **options) for form, options in FORMS]
    bombs = [png_of(*size) for size in BOMBS]
    statuses: Counter[int] = Counter()
    neighbour = Neighbour(url)
    thread = threading.Thread(target=neighbour.run)
    thread.start()
    megabytes = []
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            for index in range(count):
                is_bomb = index % 20 == 19
                data = bombs[index % 3] if is_bomb else spoilt(sound[index % 6], generator)
                path, body = request_of(index // 2, data)
                reply = client.post(path, json=body)
                statuses[reply.status_code] += 1
                assert reply.status_code in (200, 400), reply.text
                assert not is_bomb or "64 megapixels" in reply.text
                if (index + 1) % (count // 4) == 0:
                    megabytes.append(resident_megabytes())
    finally:
        neighbour.is_done.set()
        thread.join()
    return Findings(statuses=statuses, megabytes=megabytes, neighbour=neighbour)


def resident_megabytes() -> float:
    """Return the memory of this process, which is the server's too; Linux alone tells it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    from dgemma.server.service import Settings
    from tests.server.conftest import running

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=2000)
    parser.add_argument("--http", action="store_true")
    given = parser.parse_args()
    if given.http:
        engine = seeing_engine(prefix_bytes=1 << 20)
        engine.tower().max_bytes = 1 << 20  # full within the first quarter, as the prefix cache is
        with running(engine, Settings(names=("seeing",))) as server:
            found = over_http(server.url, given.count)
        waits = sorted(found.neighbour.seconds)
        print(
            f"{given.count} spoilt pictures over HTTP: {dict(found.statuses)}, "
            f"{', '.join(f'{size:.0f}' for size in found.megabytes)} MB after each quarter; "
            f"{len(waits)} requests beside them, median {waits[len(waits) // 2]:.3f} s, longest "
            f"{waits[-1]:.3f} s"
        )
        return
    num_refused(given.count // 10)  # what a process allocates once
    before = peak_megabytes()
    refused = num_refused(given.count, seed=1)
    grown = peak_megabytes() - before
    decoded = given.count - refused
    print(f"{given.count} spoilt pictures: {refused} refused, {decoded} decoded; +{grown:.1f} MB")


if __name__ == "__main__":
    main()
