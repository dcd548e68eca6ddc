"""Prometheus metrics. Speed counts committed tokens only, no discarded work."""

from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
STEPS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64)


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = self._counter("requests", "HTTP requests", "path", "status")
        self.finished = self._counter("answers", "Answers by how they ended", "mode", "finish")
        self.tokens = self._counter("committed_tokens", "Tokens of answers")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self.reused_tokens = self._counter("reused_tokens", "Prompt tokens found in the cache")
        self.cache_hits = self._counter("cache_hits", "Answers whose prompt began in the cache")
        self.steps = self._counter("steps", "Denoising steps and AR tokens")
        self.retries = self._counter("retries", "Canvases done again")
        self.cancelled = self._counter("cancelled", "Answers nobody waited for")
        self.failed_passes = self._counter("failed_passes", "Passes that raised")
        self.queued = self._gauge("queue_length", "Requests that wait")
        self.running = self._gauge("running", "Requests that run")
        self.prefix_bytes = self._gauge("prefix_bytes", "Memory of the prefix cache")
        self.prefixes = self._gauge("prefixes", "Cached prefixes")
        self.steps_per_block = self._histogram("steps_per_block", "Steps of a canvas", STEPS)
        self.first_block = self._histogram(
            "time_to_first_block_seconds", "From arrival to the first final text", SECONDS
        )
        self.seconds = self._histogram("answer_seconds", "From arrival to the end", SECONDS)

    def _counter(self, name: str, note: str, *labels: str) -> Counter:
        return Counter(f"dgemma_{name}", note, labels, registry=self.registry)

    def _gauge(self, name: str, note: str) -> Gauge:
        return Gauge(f"dgemma_{name}", note, registry=self.registry)

    def _histogram(self, name: str, note: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"dgemma_{name}", note, buckets=buckets, registry=self.registry)

    def watch_device(self, engine: "Engine") -> None:
        """Read a GPU's memory whenever the metrics are read."""
        if engine.device.type == "cuda":
            import torch

            used = self._gauge("device_bytes", "GPU memory in use")
            used.set_function(lambda: torch.cuda.memory_allocated(engine.device))

    def count(self, done: "Done", seconds: float) -> None:
        """Count a finished answer."""
        self.finished.labels(done.mode, done.finish).inc()
        self.tokens.inc(done.tokens)
        self.prompt_tokens.inc(done.prompt_tokens)
        self.reused_tokens.inc(done.reused_tokens)
        self.cache_hits.inc(done.reused_tokens > 0)
        self.steps.inc(done.steps)
        self.retries.inc(done.retries)
        self.seconds.observe(seconds)
        if done.blocks and done.mode == "diffusion":
            self.steps_per_block.observe(done.steps / done.blocks)

    def page(self) -> bytes:
        return generate_latest(self.registry)
