"""Who may ask: API keys, the addresses a server may listen on, the names it answers to.

Keys come from a file or the environment, never from the command line, where others could read them.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from dgemma.errors import UsageError
from dgemma.server.faults import ApiError

ENVIRONMENT = "DGEMMA_API_KEYS"
MIN_KEY = 8  # characters
ANONYMOUS = "anonymous"
OPEN_PATHS = frozenset({"/health", "/ready", "/"})  # for those who watch the server, and the page
PAGE = "/page/"  # its files, which hold no secrets; what it asks for needs a key


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that are let in, as digests."""

    digests: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.digests)

    @classmethod
    def of(cls, keys: Iterable[str]) -> "Keys":
        keys = list(dict.fromkeys(keys))
        short = [key for key in keys if len(key) < MIN_KEY]
        if short:
            raise UsageError(f"an API key is shorter than {MIN_KEY} characters; make it longer")
        return cls(tuple(_digest(key) for key in keys))

    def owner(self, key: str) -> str | None:
        """A name for whoever holds this key, or None. Every key is compared, in equal time."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self.digests]
        return f"key-{matches.index(True)}" if any(matches) else None


def read_keys(file: Path | None, environment: Mapping[str, str]) -> Keys:
    """Keys of a file, one a line, `#` for comments; and of DGEMMA_API_KEYS, parted by commas."""
    keys = re.split(r"[,\s]+", environment.get(ENVIRONMENT, ""))
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the key file {file} cannot be read: {error}") from None
        found = [line.strip() for line in lines if not line.lstrip().startswith("#")]
        if not any(found):
            raise UsageError(f"the key file {file} holds no key; write one a line")
        keys += found
    return Keys.of(key for key in keys if key)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listening(host: str, keys: Keys, *, allow_anonymous: bool) -> None:
    """Refuse to serve everybody in reach unless that is said in so many words."""
    if not keys and not allow_anonymous and not is_loopback(host):
        raise UsageError(
            f"{host} is reachable from other machines, so a key is needed; give --api-key-file "
            f"or {ENVIRONMENT}, or --allow-anonymous to let everybody in"
        )


class Guard:
    """Lets in requests with a key, addressed to a name the server goes by.

    A server on a loopback address answers to loopback names alone: a web page that points its own
    name at 127.0.0.1 gets nothing.
    """

    def __init__(self, app: ASGIApp, keys: Keys, hosts: Collection[str]) -> None:
        self.app, self.keys, self.hosts = app, keys, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
                self._check_host(headers.get(b"host", ""))
                scope.setdefault("state", {})["owner"] = self._owner(scope["path"], headers)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
        if self.hosts and name.strip("[]").lower() not in self.hosts:
            raise ApiError(403, "this server does not go by that name; see --allow-host")

    def _owner(self, path: str, headers: Mapping[bytes, str]) -> str:
        if not self.keys or path in OPEN_PATHS or path.startswith(PAGE):
            return ANONYMOUS
        scheme, _, key = headers.get(b"authorization", "").partition(" ")
        owner = self.keys.owner(key.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            told = "is not known" if key else "is missing"
            raise ApiError(
                401, f"the API key {told}; send Authorization: Bearer KEY", code="invalid_api_key"
            )
        return owner


def names_of(host: str, allowed: Collection[str]) -> frozenset[str]:
    """The names a server bound to `host` answers to; none: to all."""
    if not is_loopback(host):
        return frozenset(name.lower() for name in allowed)
    return frozenset({host, "localhost", "127.0.0.1", "::1", *(name.lower() for name in allowed)})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
