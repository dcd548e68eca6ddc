"""Access control: API keys, listening addresses, and the Host and Origin headers to accept.

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
from dgemma.server.errors import ApiError

ENVIRONMENT = "DGEMMA_API_KEYS"
MIN_KEY = 8  # characters
ANONYMOUS = "anonymous"
OPEN_PATHS = frozenset({"/health", "/ready", "/"})  # for supervisors, and the web page
PAGE = "/page/"  # static files without secrets; the page's requests need a key


@dataclass(frozen=True, slots=True)
class Keys:
    """The accepted API keys, as digests."""

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
        """Return the name of a key's owner, or None; compares all keys in constant time."""
        own = _digest(key)
        matches = [hmac.compare_digest(own, digest) for digest in self.digests]
        return f"key-{matches.index(True)}" if any(matches) else None


def read_keys(file: Path | None, environment: Mapping[str, str]) -> Keys:
    """Read keys from a file (one a line, `#` for comments) and DGEMMA_API_KEYS (with commas)."""
    return Keys.of(_key_texts(file, environment))


def _key_texts(file: Path | None, environment: Mapping[str, str]) -> list[str]:
    keys = re.split(r"[,\s]+", environment.get(ENVIRONMENT, ""))
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the key file {file} cannot be read: {error}") from None
        in_file = [line.strip() for line in lines if not line.lstrip().startswith("#")]
        if not any(in_file):
            raise UsageError(f"the key file {file} holds no key; write one a line")
        keys += in_file
    return [key for key in keys if key]


def read_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return a client's key, the first one that a server would read, or None."""
    return next(iter(_key_texts(file, environment)), None)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listening(host: str, keys: Keys, *, allow_anonymous: bool) -> None:
    """Refuse to listen beyond this machine without keys, unless explicitly allowed."""
    if not keys and not allow_anonymous and not is_loopback(host):
        raise UsageError(
            f"{host} is reachable from other machines, so a key is needed; give --api-key-file "
            f"or {ENVIRONMENT}, or --allow-anonymous to let everybody in"
        )


class Guard:
    """Middleware that requires a key, and a Host and Origin that this server accepts.

    A server on a loopback address accepts loopback names only: a web page that points its own name
    to 127.0.0.1 (DNS rebinding) gets a 403. So does a page of another origin, unless allowed by
    name: a browser would send its requests and only hide the answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Collection[str],
        origins: Collection[str] = (),
    ) -> None:
        self.app, self.keys, self.hosts, self.origins = app, keys, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
                self._check_host(headers.get(b"host", ""))
                self._check_origin(headers)
                scope.setdefault("state", {})["owner"] = self._owner(scope, headers)
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
        if self.hosts and name.strip("[]").lower() not in self.hosts:
            raise ApiError(403, "this Host name is not served; see --allow-host")

    def _check_origin(self, headers: Mapping[bytes, str]) -> None:
        origin = headers.get(b"origin")
        if origin is None or origin in self.origins or "*" in self.origins:
            return
        # A proxy may speak https to the browser and http to us, so schemes are not compared.
        if origin.lower().partition("://")[2] != headers.get(b"host", "").lower():
            raise ApiError(403, "this origin is not allowed; see --cors-origin")

    def _owner(self, scope: Scope, headers: Mapping[bytes, str]) -> str:
        """Return the owner of a request: its key, or without keys its client's address."""
        path = scope["path"]
        if not self.keys or path in OPEN_PATHS or path.startswith(PAGE):
            client = scope.get("client")
            return ANONYMOUS if client is None else f"{ANONYMOUS}@{client[0]}"
        scheme, _, key = headers.get(b"authorization", "").partition(" ")
        given = [key.strip()] if scheme.lower() == "bearer" else []
        given += [headers[b"x-api-key"].strip()] if b"x-api-key" in headers else []
        owner = next(filter(None, map(self.keys.owner, given)), None)
        if owner is None:
            reason = "is not known" if key or given else "is missing"
            sentence = f"the API key {reason}; send Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError(401, sentence, code="invalid_api_key")
        return owner


def names_of(host: str, allowed: Collection[str]) -> frozenset[str]:
    """Return the Host names accepted by a server bound to `host`; empty: all."""
    if not is_loopback(host):
        return frozenset(name.lower() for name in allowed)
    return frozenset({host, "localhost", "127.0.0.1", "::1", *(name.lower() for name in allowed)})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
