"""A TCP proxy whose connections a test can cut: a server that goes away and comes back with its data."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Proxy", "proxied"]

_BYTES = 2**16


class Proxy:
    """Forwards connections to a port of this machine until it is cut.

    Args:
        port: port of the server.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._left: float = float("inf")
        self.is_cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, count: int) -> None:
        """Cut all connections, and refuse new ones, after so many further bytes to the server."""
        self._left = count

    def mend(self) -> None:
        """Forward new connections again."""
        self._left = float("inf")
        self.is_cut.clear()

    def close(self) -> None:
        """End all connections."""
        self.cut_after(0)
        self._cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut.is_set():
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._server))
            self._open += [client, server]
            threading.Thread(target=self._forward, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_BYTES):
                if is_counted:
                    self._left -= len(data)
                    if self._left < 0:
                        self._cut()
                        return
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        self.is_cut.set()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """Yield a proxy of a server, and close it."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
