"""Errors sent to clients: one sentence, in the error format of the route's API."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import Scope

from dgemma.errors import DeadlineExceeded, PromptTooLong, UsageError

logger = logging.getLogger("dgemma.server")
INVALID, BUSY, BROKEN = "invalid_request_error", "overloaded_error", "server_error"
# Pydantic's names of union members in error locations.
UNION_BRANCH = re.compile(r"str|int|list\[.*\]")
CLIENT_GONE = 499  # counted in metrics, never sent
MESSAGES_PATH, OLLAMA_PATH = "/v1/messages", "/api/"  # routes with their own error format
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A refusal with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": printable(self.message),
            "type": _kind(self.status),
            "param": None if self.param is None else printable(self.param),
            "code": self.code,
        }
        return {"error": error}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the body in the error format of this path's API."""
        if path.startswith(MESSAGES_PATH):
            kind = ANTHROPIC_KINDS.get(self.status, INVALID if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": printable(self.message)}}
        if path.startswith(OLLAMA_PATH):
            return {"error": printable(self.message)}
        return self.body

    def response(self, scope: Scope) -> JSONResponse:
        """Return the error reply to the request of this scope."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        body = self.body_for(scope["path"])
        if body.get("type") == "error":
            body["request_id"] = scope.get("state", {}).get("request_id")
        return JSONResponse(body, self.status, headers=headers)


def from_engine(error: Exception) -> ApiError:
    """Return an engine error without internals, for a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DeadlineExceeded):
        return ApiError(503, f"{error}; try again", code="timeout", retry_after=5)
    if isinstance(error, UsageError):
        return from_usage(error)
    logger.error("a request failed in the engine", exc_info=error)
    return ApiError(500, "the engine failed on this request")


def from_usage(error: UsageError) -> ApiError:
    """Return the reply to a call refused by the engine or the message parser."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(400, str(error), code=code)


def from_validation(errors: list[Mapping[str, Any]]) -> ApiError:
    """Return pydantic's first error as a sentence that names the field."""
    first = errors[0]
    context = first.get("ctx") or {}
    where = _place(first["loc"])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context.get('error', 'it cannot be read')}")
    if first["type"] == "missing":
        return ApiError(400, f"{where} is missing; it is required", param=where)
    if where == "body":
        return ApiError(400, "the body must be a JSON object sent as application/json")
    if first["type"] == "extra_forbidden":
        sentence = f"the field {where[:60]!r} is not known; docs/serve.md lists those that are"
        return ApiError(400, sentence, param=where, code="unsupported_parameter")
    reason = first["msg"][:1].lower() + first["msg"][1:].partition(" after validation")[0]
    return ApiError(400, f"{where} is {shown(first.get('input'))}: {reason}", param=where)


def shown(value: object) -> str:
    """Return a short version of a value for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    """Replace what UTF-8 cannot encode, such as half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def _place(location: tuple[int | str, ...]) -> str:
    """Write a location in a body like `dgemma.max_denoising_steps` or `stop[2]`."""
    parts = location[1:] if location[:1] == ("body",) else location
    named = [part for part in parts if not UNION_BRANCH.fullmatch(str(part))]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in named)
    return place.removeprefix(".") or "body"


def _kind(status: int) -> str:
    if status in (429, 503):
        return BUSY
    if status == 401:
        return "authentication_error"
    return INVALID if status < 500 else BROKEN
