"""Models served by `dgemma serve`, for the command `llm`.

Which servers there are is kept in llm's own directory. A server is asked for the name of its model
when it is first used: listing models opens no connection.
"""

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import click
import llm
from llm.default_plugins.openai_models import Chat
from pydantic import Field

DEFAULT_URL = "http://127.0.0.1:8080"
# Options of an answer that stand in the server's extension object.
EXTENSION = ("mode", "max_denoising_steps", "regex", "pace")


def base_url(url: str) -> str:
    """The address as clients of OpenAI's API want it."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def servers_file() -> Path:
    return llm.user_dir() / "dgemma.json"


def read_servers() -> dict[str, str]:
    """Names and addresses that `llm dgemma add` has noted."""
    file = servers_file()
    servers: dict[str, str] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return servers


class Dgemma(Chat):
    """The model of one server."""

    needs_key = None
    key_env_var = "DGEMMA_API_KEY"

    class Options(llm.Options):
        temperature: float | None = Field(
            default=None, ge=0, le=2, description="1 is the model's own; 0 takes the likeliest"
        )
        max_tokens: int | None = Field(default=None, ge=1, description="Longest answer")
        seed: int | None = Field(default=None, ge=0, description="Same seed, same answer")
        stop: str | None = Field(default=None, description="The answer ends before this text")
        thinking: bool | None = Field(default=None, description="Whether to think first")
        mode: Literal["diffusion", "ar", "hybrid", "auto"] | None = Field(
            default=None, description="How the answer is written: diffusion, ar, hybrid or auto"
        )
        max_denoising_steps: int | None = Field(
            default=None, ge=1, description="Most steps of a canvas"
        )
        regex: str | None = Field(default=None, description="What the whole answer must match")
        pace: float | None = Field(default=None, gt=0, description="Characters a second, streamed")

    def __init__(self, model_id: str, url: str) -> None:
        super().__init__(
            model_id,
            api_base=base_url(url),
            supports_schema=True,
            supports_tools=True,
            vision=True,  # llm asks before it knows the server, which refuses what it cannot read
        )

    def __str__(self) -> str:
        return f"dgemma: {self.model_id} at {self.api_base}"

    @property
    def model_name(self) -> str:
        """What the server calls its model."""
        return self._served

    @model_name.setter
    def model_name(self, name: object) -> None:
        """llm sets one when it makes a model; the server knows better."""

    @cached_property
    def _served(self) -> str:
        try:
            return str(self.get_client(None).models.list().data[0].id)
        except Exception as error:
            raise llm.ModelError(f"no answer from {self.api_base}: {error}") from error

    def get_client(self, key: str | None, *, async_: bool = False) -> Any:
        import openai

        known = llm.get_key(explicit_key=key, key_alias="dgemma", env_var=self.key_env_var)
        make = openai.AsyncOpenAI if async_ else openai.OpenAI
        return make(base_url=self.api_base, api_key=known or "unused")

    def build_kwargs(self, prompt: Any, stream: bool) -> dict[str, Any]:
        kwargs: dict[str, Any] = super().build_kwargs(prompt, stream)
        extension = {name: kwargs.pop(name) for name in EXTENSION if name in kwargs}
        body: dict[str, Any] = {"dgemma": extension} if extension else {}
        if "thinking" in kwargs:
            body["chat_template_kwargs"] = {"enable_thinking": kwargs.pop("thinking")}
        return {**kwargs, "extra_body": body}


@llm.hookimpl
def register_models(register: Any) -> None:
    register(Dgemma("dgemma", os.environ.get("DGEMMA_URL", DEFAULT_URL)))
    for name, url in read_servers().items():
        register(Dgemma(f"dgemma/{name}", url))


@llm.hookimpl
def register_commands(cli: Any) -> None:
    @cli.group()
    def dgemma() -> None:
        """Servers of dgemma"""

    @dgemma.command(name="list")
    def list_() -> None:
        """Names and addresses of servers"""
        for name, url in read_servers().items():
            click.echo(f"dgemma/{name} {url}")

    @dgemma.command()
    @click.argument("name")
    @click.argument("url")
    def add(name: str, url: str) -> None:
        """Note a server; its model is dgemma/NAME"""
        if not url.startswith(("http://", "https://")):
            raise click.ClickException(f"{url} is no address; it begins with http:// or https://")
        write_servers({**read_servers(), name: url})

    @dgemma.command()
    @click.argument("name")
    def remove(name: str) -> None:
        """Forget a server"""
        servers = read_servers()
        if name not in servers:
            raise click.ClickException(f"{name} is not noted; see llm dgemma list")
        write_servers({known: url for known, url in servers.items() if known != name})


def write_servers(servers: dict[str, str]) -> None:
    servers_file().parent.mkdir(parents=True, exist_ok=True)
    servers_file().write_text(json.dumps(servers, indent=2) + "\n", "utf-8")
