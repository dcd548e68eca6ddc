"""The files of deploy/: read by the tools that read them, where those are there."""

import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from dgemma.scale.replica import ReplicaOptions
from dgemma.server.limits import Limits
from dgemma.server.metrics import Metrics
from dgemma.weights.hub import ModelOptions

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ARGS = {"name", "api_key_file", "allow_anonymous", "allow_host", "cors_origin"}
OF_FRONT = {"dgemma_replays", "dgemma_lost_requests", "dgemma_replicas"}
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def serve_configs() -> list[dict[str, Any]]:
    kube = list(yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text(encoding="utf-8")))
    return [load("serve.yaml"), yaml.safe_load(kube[0]["spec"]["serveConfigV2"])]


@pytest.mark.parametrize("index", [0, 1])
def test_serve_configs_are_what_ray_and_the_application_read(index: int) -> None:
    config = serve_configs()[index]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pydantic, when Ray declares its fields
        schema = pytest.importorskip("ray.serve.schema")
    parsed = schema.ServeDeploySchema.model_validate(config)
    (app,) = config["applications"]
    known = {name for kind in (ModelOptions, Limits, ReplicaOptions) for name in kind.__slots__}
    assert app["args"].keys() <= known | ARGS
    assert app["import_path"] == "dgemma.scale.app:build"
    names = [deployment.name for deployment in parsed.applications[0].deployments]
    assert names == ["Front", "Model"]


def test_the_cluster_s_pods_have_no_rights_they_do_not_need() -> None:
    service, policy = yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text(encoding="utf-8"))
    assert (service["kind"], policy["kind"]) == ("RayService", "NetworkPolicy")
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert group["rayStartParams"]["disable-usage-stats"] == "true"
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert groups[1]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]


def metric_names(text: str) -> set[str]:
    return {SUFFIX.sub("", name) for name in re.findall(r"dgemma_\w+", text)}


def test_alerts_and_board_ask_for_metrics_that_exist() -> None:
    known = {metric.name for metric in Metrics().registry.collect()} | OF_FRONT
    rules = [rule for group in load("alerts.yml")["groups"] for rule in group["rules"]]
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    targets = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = metric_names(" ".join([*(rule["expr"] for rule in rules), *targets]))
    assert asked - {"dgemma_keys"} <= known
    assert all(rule["annotations"]["summary"] for rule in rules)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_image_runs_as_nobody_in_particular_and_says_when_it_is_ready(kind: str) -> None:
    text = (DEPLOY / f"Dockerfile.{kind}").read_text(encoding="utf-8")
    joined = text.replace("\\\n", " ")
    steps = [line.split(None, 1) for line in joined.splitlines() if line and line[0] != "#"]
    words = [step[0] for step in steps]
    assert words[0] == "FROM"
    assert ":" in steps[0][1] and "latest" not in steps[0][1]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")
    assert dict(steps)["USER"] != "0"
    assert "/ready" in dict(steps)["HEALTHCHECK"]
    for word in ("ENTRYPOINT", "CMD"):
        assert isinstance(json.loads(dict(steps)[word]), list)
    installs = [step[1] for step in steps if "pip install" in step[1]]
    assert installs
    assert all("-c /opt/dgemma/constraints.txt" in line for line in installs)


def test_dockerfiles_pass_their_linter() -> None:
    run("hadolint", "Dockerfile.cpu", "Dockerfile.cuda")


def test_the_build_context_holds_only_what_is_copied() -> None:
    """A checkout has gigabytes of environments, and keys."""
    kept = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    assert kept == ["dist/*.whl", "constraints.txt"]
    for kind in ("cpu", "cuda"):
        text = (DEPLOY / f"Dockerfile.{kind}").read_text(encoding="utf-8")
        copied = {line.split()[1] for line in text.splitlines() if line.startswith("COPY")}
        assert copied == {"constraints.txt", "dist/dgemma-*-py3-none-any.whl"}


def test_the_compose_file_listens_on_loopback_and_drains() -> None:
    compose = load("compose.yaml")
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    server = compose["services"]["dgemma"]
    grace = int(server["stop_grace_period"].removesuffix("s"))
    assert grace > Limits().drain_seconds
    assert (DEPLOY / server["build"]["dockerfile"].removeprefix("deploy/")).exists()


def run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=DEPLOY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheus_takes_the_rules() -> None:
    run("promtool", "check", "rules", "alerts.yml")
    run("promtool", "check", "config", "--syntax-only", "prometheus.yml")


def test_nginx_takes_its_config(tmp_path: Path) -> None:
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    config = str(DEPLOY / "nginx.conf")
    command = ["nginx", "-t", "-p", str(tmp_path), "-c", config, "-g", "pid p; error_log e;"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "syntax is ok" in done.stderr  # its folders need not exist here
