"""The thread of the web server."""

import asyncio
import logging
import socket
from concurrent.futures import ThreadPoolExecutor, wait

import uvicorn
from starlette.types import ASGIApp

from neox_config.errors import NeoXError
from neox_launcher.protocol.claims import bound_socket, cannot_listen

__all__ = ["WebServer", "listening_socket"]

logger = logging.getLogger(__name__)

# For answers that are complete to reach their clients.
_LAST_SECONDS = 5
_START_SECONDS = 30.0
# Connections that wait until they are accepted; uvicorn's default.
_BACKLOG = 2048


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address. Connections wait until `WebServer` accepts them.

    Raises:
        NeoXError: the address is not one of this machine, or is in use.
    """
    bound = bound_socket(host, port)
    try:
        # Two sockets may be bound to an address, but only one can listen.
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise cannot_listen(host, port, error) from error
    return bound


class WebServer:
    """Serves an application in a thread, and accepts connections when it is built.

    Args:
        app: the application.
        bound: where it listens.

    Raises:
        NeoXError: the server cannot start.
    """

    def __init__(self, app: ASGIApp, bound: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            http="h11",
            loop="asyncio",
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        self._server = uvicorn.Server(config)
        # Of each start and end of the server, at the level of information.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._is_stopping = False
        thread = ThreadPoolExecutor(1, thread_name_prefix="web server")
        self._running = thread.submit(lambda: asyncio.run(self._server.serve(sockets=[bound])))
        for _ in range(int(_START_SECONDS * 100)):
            self.check()
            if self._server.started:
                return
            wait([self._running], 0.01)
        raise NeoXError(f"the web server has not started within {_START_SECONDS:g} s; run the command again")

    def check(self) -> None:
        """Raise an error if the server has ended.

        Raises:
            NeoXError: it has ended by itself.
        """
        if self._running.done() and not self._is_stopping:
            error = self._running.exception()
            raise NeoXError(f"the web server has ended: {error}; run the command again") from error

    def stop(self) -> None:
        """Complete the answers, close all connections, and end."""
        self._is_stopping = True
        self._server.should_exit = True
        if not wait([self._running], 2 * _LAST_SECONDS).done:
            logger.warning("connections of clients are closed before they received their answers")
