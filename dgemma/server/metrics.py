"""Numbers for Prometheus. Speed is committed tokens; work that was thrown away is not counted."""

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
    """One server's numbers, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        ProcessCollector(registry=own)
        self.requests = Counter(
            "dgemma_requests", "HTTP requests", ["path", "status"], registry=own
        )
        self.finished = Counter(
            "dgemma_answers", "Answers by how they ended", ["mode", "finish"], registry=own
        )
        self.tokens = Counter("dgemma_committed_tokens", "Tokens of answers", registry=own)
        self.prompt_tokens = Counter("dgemma_prompt_tokens", "Tokens of prompts", registry=own)
        self.reused_tokens = Counter(
            "dgemma_reused_tokens", "Tokens of prompts found in the cache", registry=own
        )
        self.cache_hits = Counter(
            "dgemma_cache_hits", "Answers whose prompt began in the cache", registry=own
        )
        self.steps = Counter("dgemma_steps", "Denoising steps and AR tokens", registry=own)
        self.retries = Counter("dgemma_retries", "Canvases done again", registry=own)
        self.cancelled = Counter("dgemma_cancelled", "Answers nobody waited for", registry=own)
        self.failed_passes = Counter("dgemma_failed_passes", "Passes that raised", registry=own)
        self.steps_per_block = Histogram(
            "dgemma_steps_per_block", "Steps a canvas took", buckets=STEPS, registry=own
        )
        self.first_block = Histogram(
            "dgemma_time_to_first_block_seconds",
            "From arrival to the first promised text",
            buckets=SECONDS,
            registry=own,
        )
        self.seconds = Histogram(
            "dgemma_answer_seconds", "From arrival to the end", buckets=SECONDS, registry=own
        )
        self.queued = Gauge("dgemma_queue_length", "Requests that wait", registry=own)
        self.running = Gauge("dgemma_running", "Requests that run", registry=own)
        self.prefix_bytes = Gauge("dgemma_prefix_bytes", "Memory of kept prefixes", registry=own)
        self.prefixes = Gauge("dgemma_prefixes", "Kept prefixes", registry=own)

    def watch_device(self, engine: "Engine") -> None:
        """Ask a GPU for its memory whenever the numbers are read."""
        if engine.device.type == "cuda":
            import torch

            used = Gauge("dgemma_device_bytes", "GPU memory in use", registry=self.registry)
            used.set_function(lambda: torch.cuda.memory_allocated(engine.device))

    def count(self, done: "Done", seconds: float) -> None:
        """Take an answer that has ended."""
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
