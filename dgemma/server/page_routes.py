"""The web page: a few files, read when the server starts, behind a strict policy.

The browser runs what these files say and nothing else: no script or style inside the markup,
nothing from other places, no frames. No path of a request is ever opened.
"""

import hashlib
from importlib import resources

from fastapi import APIRouter, Request, Response

from dgemma.server.faults import ApiError

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # asked for again each time, answered by 304
}
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def _read() -> dict[str, bytes]:
    files = resources.files("dgemma.server").joinpath("page").iterdir()
    return {file.name: file.read_bytes() for file in files if file.name.split(".")[-1] in KINDS}


FILES = _read()
router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    return _file(request, "index.html")


@router.get("/page/{name}")
async def file(request: Request, name: str) -> Response:
    if name not in FILES:
        raise ApiError(404, "the page has no such file")
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    data = FILES[name]
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=KINDS[name.split(".")[-1]])
