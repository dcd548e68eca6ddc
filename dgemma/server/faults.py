"""What a client is told when a request cannot be served: one sentence, in OpenAI's error shape."""

import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from dgemma.errors import PromptTooLong, UsageError

INVALID, BUSY, BROKEN = "invalid_request_error", "overloaded_error", "server_error"
# How pydantic names the kinds a value may be of, in the place of an error.
UNION_BRANCH = re.compile(r"str|int|list\[.*\]")
CLIENT_GONE = 499  # nobody is left to read it; it is counted, not sent


class ApiError(Exception):
    """A refusal with its status."""

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

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers=headers)


def from_usage(error: UsageError) -> ApiError:
    """A call the engine or the reader of messages refuses."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(400, str(error), code=code)


def from_validation(errors: list[Mapping[str, Any]]) -> ApiError:
    """What pydantic found, the first of it, as a sentence that names the field."""
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
    """A value as an error may show it: short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    """Text that can be sent: half a surrogate pair cannot."""
    return text.encode("utf-8", "replace").decode()


def _place(location: tuple[int | str, ...]) -> str:
    """`dgemma.max_denoising_steps`, `stop[2]`: how people write a place in a body."""
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
