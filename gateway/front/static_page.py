"""The web pages at `/` and `/cluster`: the files of `gateway/front/page/`, read once, under a policy that lets
nothing else into them. Knows nothing of what they do."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Own files and own requests only, no inline code or style; what a model says can never become markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page(name: str) -> Callable[[], Response]:
    """Answers with that file, as often as it is called; for where a route also has something else to say."""
    content, kind = (FOLDER / name).read_bytes(), MEDIA_TYPES[Path(name).suffix]
    headers = {**HEADERS, "vary": "accept"}
    return lambda: Response(content, headers=headers, media_type=kind)


def page_routes() -> list[Route]:
    """`/` for index.html, `/page/NAME` for every file that is no page."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES and path.suffix != ".html")
    return [
        Route("/", _serve("index.html"), methods=["GET"]),
        *(Route(f"/page/{path.name}", _serve(path.name), methods=["GET"]) for path in files),
    ]


def _serve(name: str) -> Callable[[Request], Awaitable[Response]]:
    answer = page(name)

    async def respond(request: Request) -> Response:
        return answer()

    return respond
