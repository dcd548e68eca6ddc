"""The Ray Serve application: its deployments, for one machine and for a cluster.

On one machine the front runs in the process of `dgemma serve` (`local`). On a cluster it is a
deployment too, and Ray's proxies bring it requests: `serve run dgemma.scale.app:build model=nano`.
"""

import os
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from dgemma.errors import UsageError
from dgemma.scale.replica import Model, ReplicaOptions, rank_replicas
from dgemma.server.auth import Keys, read_keys
from dgemma.server.limits import Limits, default_max_body
from dgemma.server.service import Settings
from dgemma.weights.hub import ModelOptions

ROUTER = "dgemma.scale.app:PrefixRouter"
MAX_ONGOING = 1 << 16  # per replica: its own queue is fair between keys, Ray's is not
HEALTH_SECONDS = 1.0  # between checks: a replica that died is replaced after the next one
HUNG_SECONDS = 10.0  # without an answer to a check; after three such checks it is replaced
QUEUE_LENGTH_SECONDS = 3.0  # for a replica to report its queue length
SHARE_OF_ROWS = 0.75  # of a batch that a replica has on average, when autoscaling adds one


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes are untyped
    """Ranks replicas by prefix affinity and load."""

    # Ray's 0.1 s may be too short for a busy replica; its requests
    # would go to replicas without their prefixes.
    queue_len_response_deadline_s = QUEUE_LENGTH_SECONDS
    max_queue_len_response_deadline_s = QUEUE_LENGTH_SECONDS

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates, each in its own rank."""
        arguments: list[Any] = [] if pending_request is None else pending_request.args
        opening = getattr(arguments[0], "opening", "") if arguments else ""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        load = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in by_id.items()
        }
        return [[by_id[name]] for name in rank_replicas(opening, load)]


def model_app(
    arguments: ModelOptions,
    settings: Settings,
    options: ReplicaOptions,
    *,
    is_on_loopback: bool = False,
) -> Any:
    """Return the deployment of replicas. The front handles keys, Host names and limits per key."""
    limits = replace(settings.limits, max_queue=MAX_ONGOING)
    trusting = replace(settings, keys=Keys(), hosts=frozenset(), cors_origins=(), limits=limits)
    size: dict[str, Any] = {"num_replicas": options.replicas}
    if options.most > options.replicas:
        size = {"autoscaling_config": _autoscaling(settings.limits, options)}
    deployment = serve.deployment(
        name="Model",
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HUNG_SECONDS,
        graceful_shutdown_timeout_s=settings.limits.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **size,
    )(Model)
    return deployment.bind(arguments, trusting, is_on_loopback=is_on_loopback)


def _autoscaling(limits: Limits, options: ReplicaOptions) -> dict[str, Any]:
    return {
        "min_replicas": options.replicas,
        "max_replicas": options.most,
        "initial_replicas": options.replicas,
        "target_ongoing_requests": max(1.0, SHARE_OF_ROWS * limits.max_batch_size),
        "upscale_delay_s": options.upscale_seconds,
        "downscale_delay_s": options.downscale_seconds,
        "look_back_period_s": min(30.0, options.upscale_seconds),
        "metrics_interval_s": 1.0,
    }


# --- a cluster


class FrontIngress:
    """The front as a deployment behind Ray's HTTP proxies."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self.model, self.settings = model, settings

    def __serve_build_asgi_app__(self) -> Any:
        from dgemma.scale.front import make_front

        return make_front(self.model, self.settings)


def build(args: dict[str, Any]) -> Any:
    """Return the application of a Serve config: `args` are options of `dgemma serve`."""
    known = {*_names(ModelOptions), *_names(Limits), *_names(ReplicaOptions)}
    known |= {"name", "api_key_file", "allow_anonymous", "allow_host", "cors_origin"}
    unknown = sorted(args.keys() - known)
    if unknown:
        raise UsageError(f"{unknown[0]!r} is not an argument; use {', '.join(sorted(known))}")
    key_file = args.get("api_key_file")
    keys = read_keys(Path(key_file) if key_file else None, os.environ)
    if not keys and not args.get("allow_anonymous"):
        raise UsageError("a cluster needs keys; give api_key_file, or allow_anonymous: true")
    model = _of(ModelOptions, args)
    with suppress(UsageError):  # the checkpoint may be on the workers alone
        args = {"max_body": default_max_body(model.model, model.vision), **args}
    settings = Settings(
        names=tuple(args.get("name") or [model.model]),
        limits=_of(Limits, args),
        keys=keys,
        hosts=frozenset(args.get("allow_host") or ()),
        cors_origins=tuple(args.get("cors_origin") or ()),
    )
    replicas = model_app(model, settings, _of(ReplicaOptions, args))
    front = serve.deployment(name="Front", max_ongoing_requests=settings.limits.max_connections)
    return front(serve.ingress()(FrontIngress)).bind(replicas, settings)


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _of(kind: Any, args: dict[str, Any]) -> Any:
    return kind(**{name: args[name] for name in _names(kind) if name in args})
