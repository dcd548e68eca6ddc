"""Servers on real sockets, with the tiny taught model behind them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import httpx
import openai
import pytest
import torch

from dgemma.engine import Engine
from dgemma.engine.generation import Generation
from dgemma.server.app import App, make_app, make_routes
from dgemma.server.lifecycle import Server, bind, make_server
from dgemma.server.limits import Limits
from dgemma.server.service import Service, Settings
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.messages import read_tools
from dgemma.weights.load import random_model
from examples.memorize import memorize
from tests.taught import CANVAS, GENERATION, taught_config
from tests.text.small import TEMPLATE, small_tokenizer

T = TypeVar("T")
MODEL = "taught"
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "the", "parameters": {"type": "object"}}}
]
CALLS = (
    '<|tool_call>call:the{a:<|"|>é<|"|>}<tool_call|><|tool_call>call:the{b:[1,true]}<tool_call|>'
)
QUESTION = "call"


OPEN: list[Any] = []  # clients of the running test


def opened(client: T) -> T:
    OPEN.append(client)
    return client


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@dataclass(frozen=True)
class Running:
    """A server in a thread of this process."""

    url: str
    server: Server
    service: Service

    def client(self, key: str = "unused-key") -> openai.OpenAI:
        url = f"{self.url}/v1"
        return opened(openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60))

    def anthropic(self, **key: str) -> anthropic.Anthropic:
        named: Any = key or {"api_key": "unused-key"}
        client = anthropic.Anthropic(base_url=self.url, max_retries=0, timeout=60, **named)
        return opened(client)

    def post(self, path: str, body: object, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **more)

    def ask(self, question: str, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": question}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})


@contextmanager
def running(engine: Engine, settings: Settings) -> Iterator[Running]:
    taken = bind("127.0.0.1", 0)
    server = make_server(make_app(engine, settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        host, port = taken.getsockname()
        app = server.config.loaded_app
        service = server.config.app.state.service  # type: ignore[union-attr]
        assert app is not None
        yield Running(f"http://{host}:{port}", server, service)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
    assert not thread.is_alive()


def is_cancelling(worker: Any) -> bool:
    """True if the thread is to cancel a request after its pass."""
    return any(work.func == worker._cancel for work in list(worker._inbox))


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def load(checkpoint: Path) -> Engine:
    """The taught model with a third of the steps: what it was not taught does not converge."""
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    engine.sampler = replace(engine.sampler, max_denoising_steps=16)
    return engine


@pytest.fixture(scope="session")
def shared(checkpoint: Path) -> Iterator[Running]:
    """A server with default settings that all tests may ask, and none may change."""
    with running(load(checkpoint), Settings(names=(MODEL, "alias"))) as server:
        yield server


@pytest.fixture
def serve(checkpoint: Path) -> Iterator[Callable[..., Running]]:
    """Make a server of one's own: limits and settings by name."""
    with ExitStack() as stack:

        def make(*, limits: dict[str, Any] | None = None, **settings: Any) -> Running:
            chosen = Settings(names=(MODEL,), limits=Limits(**(limits or {})), **settings)
            return stack.enter_context(running(load(checkpoint), chosen))

        yield make


@pytest.fixture(scope="session")
def caller() -> Iterator[Running]:
    """A server of a tiny model that was taught to call a tool twice."""
    tokenizer = small_tokenizer()
    template = ChatTemplate(TEMPLATE, tokenizer)
    prompt = template.prompt([Message(role="user", content=QUESTION)], read_tools(TOOLS))
    ids = [*tokenizer.encode_control(CALLS), tokenizer.control_ids["<|tool_response>"]]
    ids += [GENERATION.stop_ids[0]] * (-len(ids) % CANVAS)
    model = random_model(taught_config(), seed=0)
    for _ in memorize(model, [(torch.tensor(prompt.ids), torch.tensor(ids))], 100):
        pass
    engine = Engine(model, tokenizer, template, GENERATION)
    with running(engine, Settings(names=("caller",))) as server:
        yield server


@pytest.fixture(scope="module")
def routes(checkpoint: Path) -> Iterator[App]:
    """An application without a socket, and its engine at work."""
    app = make_routes(load(checkpoint), Settings(names=(MODEL,)))
    app.state.service.worker.start()
    yield app
    app.state.service.worker.stop()


def fail_one(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
    """Let a method of generations raise where the seed is 666."""
    real = getattr(Generation, method)

    def broken(self: Generation, *arguments: Any) -> None:
        if self.noise.seed == 666:
            raise error
        real(self, *arguments)

    monkeypatch.setattr(Generation, method, broken)
