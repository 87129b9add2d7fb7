"""Refuse requests that this server must not answer, before anything of them is read.

- A web page of another site can send requests to a server of this machine through the user's browser. The
  browser names the page in the header Origin, which must then be this server.
- A page can have its own name resolved to the address of this machine (DNS rebinding), and is then of the
  same origin. The header Host contains that name, which must be one of this server's names. An address in
  numbers was not resolved by a name server.
- A key is compared in constant time.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neox_model.serve.errors import ApiError, shown

__all__ = ["Guard"]

_BEARER = "bearer "
# An address of version 6 in brackets, or another address or a name; then the port.
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:\[]*))(?::[0-9]+)?")
_DISCARDED_BYTES = 16 * 1024 * 1024
_DISCARD_SECONDS = 5.0
# Nothing is loaded from elsewhere, and no other page can show this one in a frame.
_SAFETY = (
    (
        b"content-security-policy",
        # The page's icon is empty, which a URL with data states.
        b"default-src 'self'; img-src data:; frame-ancestors 'none'; form-action 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class _Body:
    """The body of a request, of which what remains is read before the response is sent.

    A connection that is closed while its client sends may lose the response.

    Args:
        receive: receives messages from the web server.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_complete = False

    async def receive(self) -> Message:
        """Return the next message."""
        message = await self._receive()
        self._is_complete = not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read the rest, up to a limit of its size and of time."""
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._is_complete and size <= _DISCARDED_BYTES:
                    size += len((await self.receive()).get("body", b""))


class Guard:
    """Checks each request before the application receives it.

    Args:
        app: the application.
        names: names of this server, besides localhost and addresses in numbers.
        key: clients must send it to paths below /v1; None: no key.
    """

    def __init__(self, app: ASGIApp, *, names: Sequence[str], key: str | None) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower().rstrip(".") for name in names)}
        self._key = None if key is None else _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        body = _Body(receive)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_SAFETY]
                await body.discard()
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            # The body was not read, and is not the next request.
            response = JSONResponse(error.body(), error.status, {**headers, "connection": "close"})
            await response(scope, body.receive, send_safely)
            return
        await self._app(scope, body.receive, send_safely)

    def _check(self, path: str, headers: Headers) -> None:
        """Raise ApiError if the request must not be answered."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise ApiError(
                403,
                f"the header Host is {shown(', '.join(hosts))}, which does not name this server; use its "
                "address, localhost, or a name in serve.allowed-hosts",
                code="host_not_allowed",
            )
        origins = headers.getlist("origin")
        if origins and origins not in ([f"http://{hosts[0]}"], [f"https://{hosts[0]}"]):
            raise ApiError(
                403,
                f"the header Origin is {shown(', '.join(origins))}, and web pages of other sites may not use "
                f"this server; open http://{hosts[0]}",
                code="origin_not_allowed",
            )
        if self._key is not None and (path == "/v1" or path.startswith("/v1/")):
            given = headers.get("authorization", "")
            has_form = given[: len(_BEARER)].lower() == _BEARER
            if not has_form or not hmac.compare_digest(_digest(given[len(_BEARER) :].strip()), self._key):
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                )

    def _is_ours(self, host: str) -> bool:
        """Return whether a value of the header Host names this server; any port."""
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        in_brackets, name = match.groups(default="")
        return _is_address(in_brackets or name) or (not in_brackets and name.rstrip(".") in self._names)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    # Of equal length, so that the comparison does not reveal that of the key.
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
