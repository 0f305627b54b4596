"""uvicorn around the app: a bound socket and a service go in, requests are served until a signal asks to stop."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from planc.errors import PlancError
from planc.runtime.server import Service, create_app

log = logging.getLogger("planc.server")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_SECONDS = 5
MAX_HEAD_BYTES = 64 * 1024  # of a request line and headers, beyond the first piece of them


class _Protocol(HttpToolsProtocol):
    """uvicorn's, which keeps a request's headers however many come; here their sender is cut off."""

    _head: int | None = None  # bytes of the headers that are being received

    def data_received(self, data: bytes) -> None:
        """Parse what came. A piece in which headers begin is not counted: it may be the end of a body besides."""
        if self._head is not None:
            self._head += len(data)
            if self._head > MAX_HEAD_BYTES:
                self.send_400_response(f"The headers are longer than {MAX_HEAD_BYTES} bytes.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The next request's headers begin."""
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """They have ended; a body is bounded by what reads it."""
        self._head = None
        super().on_headers_complete()


class _Server(uvicorn.Server):
    """Drains at the first signal: /health is 503, new requests are refused, running ones end. A second one aborts."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signals are not raised again afterwards: draining is a clean end."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or stop at once when already draining."""
        self.force_exit = self._service.draining
        self._service.draining = True
        self.should_exit = True


def make_server(service: Service, shutdown_timeout: int) -> uvicorn.Server:
    """A uvicorn server of the app. Setting its should_exit ends it as a signal does."""
    settings: dict[str, Any] = {"access_log": False, "log_level": "warning", "lifespan": "off", "ws": "none"}
    settings["http"] = _Protocol
    config = uvicorn.Config(
        create_app(service),
        timeout_graceful_shutdown=shutdown_timeout,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        **settings,
    )
    return _Server(config, service)


async def serve_app(
    service: Service, listener: socket.socket, shutdown_timeout: int, listening: Callable[[], None] = lambda: None
) -> None:
    """Listen on the socket and serve until SIGINT or SIGTERM; running requests get shutdown_timeout seconds to end.

    `listening` is called once a client that connects is no longer refused.
    """
    try:
        listener.listen(2048)
    except OSError as e:
        raise PlancError(f"cannot listen on {listener.getsockname()} ({e.strerror}); choose another --port") from e
    listening()
    await make_server(service, shutdown_timeout).serve(sockets=[listener])
