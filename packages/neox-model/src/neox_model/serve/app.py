"""The web application: routes, bodies, and errors in OpenAI's form."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from neox_model.serve.answers import Answer, ChatAnswer, CompletionAnswer
from neox_model.serve.bodies import ChatBody, CompletionBody, parsed
from neox_model.serve.calls import Call, Calls
from neox_model.serve.errors import ApiError, shown
from neox_model.serve.guard import Guard
from neox_model.serve.model import ServedModel

__all__ = ["build_app"]

logger = logging.getLogger(__name__)

_BODY_SECONDS = 60.0
_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_NO_CACHE = {"cache-control": "no-store"}


def build_app(
    model: ServedModel, calls: Calls, *, allowed_hosts: tuple[str, ...], key: str | None, max_body: int
) -> ASGIApp:
    """Return the web application.

    Args:
        model: the model.
        calls: where texts are requested.
        allowed_hosts: names of this server in the header Host.
        key: API key; None: no key.
        max_body: maximum size of a body in bytes.
    """
    handlers = _Handlers(model, calls, max_body)
    routes = [
        Route("/health", handlers.health),
        Route("/v1/models", handlers.models),
        Route("/v1/models/{name:path}", handlers.model),
        Route("/v1/completions", handlers.completions, methods=["POST"]),
        Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        *(Route(path, _page(*what)) for path, what in _PAGE.items()),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _bug,
        },
    )
    # Paths have one spelling.
    app.router.redirect_slashes = False
    return Guard(app, names=allowed_hosts, key=key)


class _Handlers:
    """The handlers of the API's paths."""

    def __init__(self, model: ServedModel, calls: Calls, max_body: int) -> None:
        self._model, self._calls, self._max_body = model, calls, max_body

    async def health(self, request: Request) -> Response:
        """Report whether requests are accepted."""
        if self._calls.refusal is not None:
            raise self._calls.refusal
        return JSONResponse({"status": "ok", "texts": self._calls.count}, headers=_NO_CACHE)

    async def models(self, request: Request) -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        self._model.check_name(request.path_params["name"])
        return JSONResponse(self._described())

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        body = parsed(CompletionBody, await self._body(request))
        return await self._answer(request, lambda: CompletionAnswer(self._model, body), body)

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        body = parsed(ChatBody, await self._body(request))
        return await self._answer(request, lambda: ChatAnswer(self._model, body), body)

    def _described(self) -> dict[str, Any]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "neox",
            "max_model_len": model.seq_length,
            "has_chat_template": model.template is not None,
        }

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            ApiError: it is too large, takes too long, or is not declared as JSON. Web pages of other sites
                can send other types without a question of the browser.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            declared = (
                f"the header Content-Type is {shown(kind)}" if kind else "there is no header Content-Type"
            )
            raise ApiError(400, f"{declared}; send the body as JSON, with Content-Type: application/json")
        content = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    content += part
                    if len(content) > self._max_body:
                        raise ApiError(
                            413, f"the body is larger than {self._max_body:,} bytes (serve.max-body-bytes)"
                        )
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:g} s") from error
        return bytes(content)

    async def _answer(
        self, request: Request, prepare: Callable[[], Answer], body: CompletionBody | ChatBody
    ) -> Response:
        self._model.check_name(body.model)
        # Before they are prepared: a small body can request millions of texts.
        self._calls.check_count(body.count)
        # Tokenizers take a second for megabytes of text; other clients are served meanwhile.
        answer = await asyncio.to_thread(prepare)
        call = self._calls.open(answer.requests)
        if body.stream:
            return _Stream(answer, self._calls, call)
        return await _unless_disconnected(request, answer, self._calls, call)


class _Stream(StreamingResponse):
    """A stream of the events of an answer; a client that disconnects, at any time, cancels its texts.

    Args:
        answer: the answer.
        calls: where its texts are requested.
        call: its texts.
    """

    def __init__(self, answer: Answer, calls: Calls, call: Call) -> None:
        super().__init__(answer.events(call), media_type="text/event-stream", headers=_NO_CACHE)
        self._calls, self._call = calls, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._calls.cancel(self._call)


async def _unless_disconnected(request: Request, answer: Answer, calls: Calls, call: Call) -> Response:
    """Return the whole answer; a client that disconnects cancels its texts."""
    making = asyncio.create_task(answer.whole(call))
    watching = asyncio.create_task(_disconnection(request))
    try:
        await asyncio.wait((making, watching), return_when=asyncio.FIRST_COMPLETED)
        if making.done():
            return JSONResponse(making.result(), headers=_NO_CACHE)
        raise ClientDisconnect
    finally:
        calls.cancel(call)
        for task in (making, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await task


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _page(name: str, kind: str) -> Callable[[Request], Response]:
    content = files("neox_model.serve").joinpath(name).read_bytes()

    def page(request: Request) -> Response:
        return Response(content, media_type=kind, headers=_NO_CACHE)

    return page


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    # The rest of a body that was not read is not the next request.
    headers = {"connection": "close"} if error.status in (408, 413) else {}
    if error.status == 429:
        headers["retry-after"] = "1"
    return JSONResponse(error.body(), error.status, headers)


async def _gone(request: Request, error: Exception) -> Response:
    """Return a response that is not sent: the client has closed the connection, which is no error."""
    # The status is what other web servers log.
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    paths = [route.path for route in request.app.routes if "{" not in route.path and route.path not in _PAGE]
    # A GET route also allows HEAD.
    allowed = (error.headers or {}).get("Allow", "").replace("HEAD, ", "").replace(", HEAD", "")
    messages = {
        404: f"there is no {request.url.path}; the paths are {', '.join(paths)}",
        405: f"{request.method} is not allowed for {request.url.path}; use {allowed}",
    }
    refusal = ApiError(error.status_code, messages.get(error.status_code, error.detail))
    return JSONResponse(refusal.body(), error.status_code, error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    """Answer after an error of this program, whose traceback Starlette passes on to the log of uvicorn."""
    refusal = ApiError(500, "the server failed to answer this request; its log contains the reason")
    return JSONResponse(refusal.body(), 500)
