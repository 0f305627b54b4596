"""A server over the fake model on a port of 127.0.0.1, in threads of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator

import httpx

from planc.runtime.engine import Engine
from planc.runtime.metrics import Metrics
from planc.runtime.run import claim_port
from planc.runtime.scheduler import SchedulerLimits
from planc.runtime.server import Service
from planc.runtime.web import make_server
from tests.runtime.fake import FakeExecutor, tiny_tokenizer

VOCAB = 400
TOKENIZER = tiny_tokenizer(VOCAB)


def make_service(executor=None, *, model_len=256, seqs=16, tokens=64, defaults=None, **settings) -> Service:
    """A service with a started engine."""
    metrics = Metrics("fake")
    engine = Engine(
        executor or FakeExecutor(200, 16, VOCAB),
        TOKENIZER,
        SchedulerLimits(model_len, seqs, tokens),
        eos_token_ids=TOKENIZER.eos_token_ids,
        observer=metrics,
    )
    metrics.watch(engine)
    engine.start()
    return Service(engine, TOKENIZER, "fake", metrics, defaults=defaults or {}, **settings)


@contextlib.contextmanager
def serving(service: Service) -> Iterator[str]:
    """Serve in a thread; yields the base URL. At the end the books must balance."""
    listener = claim_port("127.0.0.1", 0)
    listener.listen()
    server = make_server(service, 2)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        settle(service)
    finally:
        server.should_exit = True
        thread.join(10)
        service.engine.close()
    service.engine.scheduler.check_integrity()
    assert service.engine.pool.num_used == 0


def settle(service: Service, seconds: float = 5.0) -> None:
    """Wait until the engine is idle."""
    wait_for(lambda: not service.engine.scheduler.has_work and service.engine.pool.num_used == 0, seconds)


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Poll until a condition that another thread brings about holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[dict]:
    """The JSON events of a whole SSE response, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[len("data: ") :]) for line in lines[:-1]]


def text_of(chunks: list[dict], choice: int = 0) -> str:
    """The concatenated text of one choice of a stream, chat or completion."""
    found = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in found)
