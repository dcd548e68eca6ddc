"""A Ray cluster of two nodes on this machine, and the application of a Serve config on it.

    python -m tests.scale.cluster CHECKPOINT

Prints the address of the HTTP proxy, then serves; a line on stdin ends the node that has no proxy.
"""

import os
import socket
import sys
from typing import Any


def main() -> None:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "OMP_NUM_THREADS": "1"}
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from dgemma.scale.app import build
    from dgemma.scale.local import wait_for_slow_node

    size: dict[str, Any] = {"object_store_memory": 100 << 20, "include_dashboard": False}
    with wait_for_slow_node():
        cluster = Cluster(initialize_head=True, head_node_args={**size, "num_cpus": 2})
        other = cluster.add_node(**size, num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    arguments = {"model": sys.argv[1], "device": "cpu", "dtype": "float32", "quant": "none"}
    app = build({**arguments, "name": ["taught"], "replicas": 2, "allow_anonymous": True})
    serve.run(app, name="dgemma", route_prefix="/")
    print(f"http://127.0.0.1:{port}", flush=True)
    sys.stdin.readline()
    cluster.remove_node(other, allow_graceful=False)
    print("removed", flush=True)
    sys.stdin.readline()
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
