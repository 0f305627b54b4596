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

from planc.errors import PlancError
from planc.runtime.server import Service, create_app

log = logging.getLogger("planc.server")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_SECONDS = 5
MAX_HEAD_BYTES = 64 * 1024  # of a request line and headers


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
    # Not httptools, where that is installed: uvicorn's use of it keeps endless headers and trailers, loses the body of
    # a request that offers an upgrade, and does not hear that a client which pipelined requests has left.
    settings |= {"http": "h11", "h11_max_incomplete_event_size": MAX_HEAD_BYTES}
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
