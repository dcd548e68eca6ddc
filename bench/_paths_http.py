"""Diffusion and AR over HTTP by number of clients, for `bench/paths.py`.

The server runs in the process of the engine. Its clients are this file run as a script in another
process, so that they do not share an interpreter lock with the engine:

    echo '{"port": 8000, "clients": 4, "bodies": [...]}' | python bench/_paths_http.py
"""

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _paths_common import Bench, Report

ROWS = 16
PROMPT = 128
MIN_REQUESTS, MAX_REQUESTS = 8, 64  # of each number of clients: two for each, within these bounds
MODES = ("diffusion", "ar")
Response = tuple[int, int, float]  # status, tokens, seconds


@contextmanager
def serving(bench: "Bench") -> Iterator[int]:
    """Serve the bench's engine on a free port; its own samplers take all their steps meanwhile."""
    from dgemma.server.app import make_app
    from dgemma.server.lifecycle import bind, make_server
    from dgemma.server.limits import Limits
    from dgemma.server.service import Settings

    engine = bench.engine
    usual, rows = engine.sampler, engine.max_batch_size
    engine.sampler = bench.sampler(bench.arguments.steps)
    settings = Settings(names=("bench",), limits=Limits(max_batch_size=ROWS, max_queue=1024))
    address, server = bind("127.0.0.1", 0), make_server(make_app(engine, settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield int(address.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        engine.sampler, engine.scheduler.max_batch_size = usual, rows


def http_table(bench: "Bench", report: "Report", counts: Sequence[int]) -> None:
    """Print tokens/s and median latency of both modes by number of clients."""
    columns = ["clients"]
    for mode in MODES:
        columns += [f"{mode} tokens/s", f"{mode} median s"]
    report.table(f"HTTP, {bench.canvas_length} tokens a reply, up to {ROWS} in a pass", columns)
    over = []
    with serving(bench) as port:
        for mode in MODES:
            send(port, 1, [body(bench, mode)])
            send(port, ROWS, [body(bench, mode, tokens=8) for _ in range(ROWS)])
        for clients in counts:
            count = max(clients, MIN_REQUESTS, min(2 * clients, MAX_REQUESTS))
            cells: list[float] = []
            for mode in MODES:
                bodies = [body(bench, mode) for _ in range(count)]
                responses, seconds = send(port, clients, bodies)
                lost = [one for one in responses if one[0] != 200]
                if lost:
                    report.failures.append(f"HTTP: {len(lost)} failed, the first with {lost[0]}")
                cells.append(sum(tokens for _, tokens, _ in responses) / seconds)
                cells.append(statistics.median(latency for _, _, latency in responses))
            report.row(clients, *cells)
            over += [clients] if cells[2] > cells[0] else []
    where = f"with {', '.join(map(str, over))} clients" if over else "with no number of clients"
    report.note(f"AR gives more tokens/s than diffusion {where}.")


def body(bench: "Bench", mode: str, tokens: int | None = None) -> dict[str, Any]:
    extension: dict[str, Any] = {"mode": mode, **({"retries": 0} if mode == "diffusion" else {})}
    length = min(PROMPT, bench.arguments.prompt)
    return {
        "prompt": list(bench.prompt(length).ids),
        "max_tokens": tokens or bench.canvas_length,
        "seed": bench.count,
        "dgemma": extension,
    }


def send(port: int, clients: int, bodies: Sequence[dict[str, Any]]) -> tuple[list[Response], float]:
    """Let clients of another process send the bodies; returns their responses and the seconds."""
    given = json.dumps({"port": port, "clients": clients, "bodies": bodies})
    command = [sys.executable, __file__]
    found = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    reply = json.loads(found.stdout)
    return [tuple(one) for one in reply["responses"]], reply["seconds"]


def post(port: int, body: dict[str, Any]) -> Response:
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    reply = json.loads(response.read())
    connection.close()
    tokens = reply["usage"]["completion_tokens"] if response.status == 200 else 0
    return response.status, tokens, time.perf_counter() - begin


def main() -> None:
    given = json.load(sys.stdin)
    begin = time.perf_counter()
    with ThreadPoolExecutor(given["clients"]) as pool:
        responses = list(pool.map(lambda one: post(given["port"], one), given["bodies"]))
    print(json.dumps({"responses": responses, "seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
