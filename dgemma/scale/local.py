"""Replicas on this machine: a private Ray that is closed to the network.

By default Ray reports usage statistics, listens on all interfaces, and lets anyone who reaches a
port run code. `private_environment` configures it otherwise; tests check the open sockets.
"""

import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.errors import DgemmaError, UsageError
from dgemma.scale.replica import FAULTS, ReplicaOptions
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from dgemma.server.service import Settings

NAME = "dgemma"
MAX_TEMPORARY = 19  # characters: Ray's socket paths add 84; the limit is 103 or 107
OBJECT_STORE_BYTES = 100 << 20  # replies are small
START_SECONDS = 180  # for parts of Ray to start; its own limits are too short on a busy machine
logger = logging.getLogger("dgemma.scale")


def private_environment(environment: MutableMapping[str, str], directory: Path) -> None:
    """Set the variables that Ray reads on import: no reports, loopback only, a new secret."""
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    environment.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # makes the address of the only node 127.0.0.1
        RAY_memory_monitor_refresh_ms="0",  # it would kill a loading replica
        RAY_gcs_server_port_wait_time_s=str(START_SECONDS),
        RAY_agent_register_timeout_ms=str(1000 * START_SECONDS),
        RAY_worker_register_timeout_seconds=str(START_SECONDS),
        RAY_DEDUP_LOGS="0",
        **{FAULTS: str(directory / "faults")},
        RAY_SERVE_LOG_TO_STDERR="0",
    )
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_SERVE_ENABLE_HA_PROXY"):
        environment.pop(name, None)


def short_directory() -> str:
    """Return a temporary directory with a path short enough for Ray's sockets."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= MAX_TEMPORARY else "/tmp"


def local_options(
    replicas: int, max_replicas: int | None, gpus: float | None, cpus: int | None, device: str
) -> ReplicaOptions:
    """Return the resources per replica: a GPU each, or an equal share of the cores."""
    most = max_replicas or replicas
    if ":" in device:
        raise UsageError(
            f"--device is {device}, but each replica has a GPU of its own; use cuda, and choose "
            "cards by CUDA_VISIBLE_DEVICES"
        )
    found = 0 if device in ("cpu", "mps") else num_gpus(os.environ)
    each = gpus if gpus is not None else float(found > 0)
    if each * most > found:
        raise UsageError(
            f"{most} replicas of {each:g} GPUs are asked for, but {found} GPUs are seen; use fewer "
            "replicas, or --gpus-per-replica 0 with --device cpu"
        )
    share = max(1, (os.cpu_count() or 1) // most)
    return ReplicaOptions(
        replicas=replicas, max_replicas=max_replicas, gpus=each, cpus=float(cpus or share)
    )


def num_gpus(environment: Mapping[str, str]) -> int:
    """Count NVIDIA GPUs without loading torch into the front."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


class Fleet:
    """The replicas of one model. `update` replaces them one by one."""

    def __init__(
        self, arguments: ModelOptions, settings: "Settings", options: ReplicaOptions
    ) -> None:
        self.arguments, self.settings, self.options = arguments, settings, options
        self._lock = threading.Lock()

    def update(self, options: ReplicaOptions | None = None) -> "DeploymentHandle[Any]":
        """Start replicas that load the model anew; old ones finish their requests."""
        from ray import serve

        from dgemma.scale.app import model_app

        with self._lock:
            self.options = options or self.options
            app = model_app(self.arguments, self.settings, self.options, is_on_loopback=True)
            try:
                return serve.run(app, name=NAME, route_prefix=None)
            except RuntimeError as error:
                raise DgemmaError(f"the replicas did not start: {error}") from None

    def update_in_background(self) -> None:
        threading.Thread(target=self._try_update, name="update", daemon=True).start()

    def _try_update(self) -> None:
        try:
            self.update()
        except Exception:
            logger.exception("the replicas could not be replaced")


@contextmanager
def wait_for_slow_node() -> Iterator[None]:
    """Make a starting Ray wait START_SECONDS for its node to register.

    Ray waits 30 s without a setting for it, which is too short on a busy machine.
    """
    from ray._private import services

    get_node = services.get_node
    limit = time.monotonic() + START_SECONDS

    def get_node_with_retries(*arguments: Any) -> Any:
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # not registered yet
                if time.monotonic() > limit:
                    raise
            time.sleep(0.2)

    services.get_node = get_node_with_retries
    try:
        yield
    finally:
        services.get_node = get_node


def _start_ray(options: ReplicaOptions, directory: Path) -> None:
    import ray

    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=int((options.most + 1) * options.cpus) + 1,
            num_gpus=math.ceil(options.most * options.gpus),
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(directory),  # world-accessible, in a private directory
        )
    except Exception as error:  # Ray raises no specific type
        raise DgemmaError(
            f"Ray did not start: {error}; it needs room in {directory}, 1 GiB of memory and a "
            "machine that is not overloaded"
        ) from None


@contextmanager
def private_ray(options: ReplicaOptions) -> Iterator[None]:
    """Run a private Ray cluster that ends with this process."""
    directory = Path(tempfile.mkdtemp(prefix="dgemma-", dir=short_directory()))
    private_environment(os.environ, directory)
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        with wait_for_slow_node():
            _start_ray(options, directory / "ray")
        serve.start(
            proxy_location="Disabled",
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        yield
    finally:
        if ray.is_initialized():  # else Serve would start a Ray in order to stop it
            # What Ray prints of the controller's own calls, which end with it:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                serve.shutdown()
                ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def report_faults(path: Path, seconds: float = 0.5) -> None:
    """Print what replicas write when they end, each sentence once."""
    path.touch(mode=0o600)
    with path.open(encoding="utf-8", errors="replace") as file:
        last = ""
        while path.exists():
            if (line := file.readline()) and line != last:
                last = line
                print(f"{line.rstrip()} (a replica; it is started again)", file=sys.stderr)
            elif not line:
                time.sleep(seconds)


def serve_replicas(
    fleet: Fleet, listening: socket.socket, banner: str, on_drain: Callable[[int], None]
) -> None:
    """Serve until a signal: the first drains, the second quits; SIGHUP replaces the replicas."""
    from dgemma.weights.hub import find_checkpoint

    require_ray()
    find_checkpoint(fleet.arguments.model)  # refuse here, not in every replica
    with private_ray(fleet.options):
        from dgemma.scale.front import make_front
        from dgemma.server.lifecycle import make_server

        faults = Path(os.environ[FAULTS])
        threading.Thread(target=report_faults, args=[faults], name="faults", daemon=True).start()
        app = make_front(fleet.update(), fleet.settings)
        server = make_server(app, on_drain)
        signal.signal(signal.SIGHUP, lambda *_: fleet.update_in_background())
        count = fleet.options.replicas
        by = "1 replica" if count == 1 else f"{count} replicas"
        print(f"{banner}, by {by}", file=sys.stderr, flush=True)
        server.run(sockets=[listening])


def require_ray() -> None:
    if find_spec("ray") is None:
        raise DgemmaError("ray is not installed; pip install 'dgemma[serve,scale]'")
