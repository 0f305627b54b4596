"""`planc run`: options go in; a served plan, or the text of one prompt, comes out."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from planc.errors import PlancError, UsageError
from planc.plans import store
from planc.plans.host import usable_cores, usable_cpus
from planc.plans.schema import Plan
from planc.runtime.cpu import check_file, check_paths, kv_blocks
from planc.runtime.engine import Engine, Observer
from planc.runtime.executors import kv_memory, open_executor
from planc.runtime.output import Output
from planc.runtime.ranks import RankedExecutor
from planc.runtime.scheduler import SchedulerLimits
from planc.runtime.sequence import SamplingParams, model_defaults
from planc.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from planc.runtime.server import Service

log = logging.getLogger("planc")
YIELD_SECONDS = 0.005  # for what takes 1 ms at 32 streams
Echo = Callable[[str], None]


@dataclass(frozen=True)
class RunOptions:
    """The flags of `planc run`. None means the plan's own limit, all CPUs, or no key.

    Memory of the KV cache is kv_cache_memory_bytes, or else memory_utilization of what the machine has available after
    weights and activations; in no case more than max_num_seqs full sequences need.
    """

    plan: Path
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    threads: int | None = None
    seed: int | None = None
    shutdown_timeout: int = 45

    def __post_init__(self) -> None:
        if not 0 < self.memory_utilization <= 1:
            raise UsageError(f"--memory-utilization is {self.memory_utilization}; pass a share in (0, 1]")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port is {self.port}; pass 0 to 65535, 0 for any that is free")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is {self.threads}, expected at least 1; leave it out to use every CPU")
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise UsageError(
                "--api-key is empty or has spaces around it; pass a key without, or leave it out to serve without one"
            )


@dataclass(frozen=True)
class Loaded:
    """A plan that is ready to serve."""

    plan: Plan
    engine: Engine
    tokenizer: Tokenizer


def load(options: RunOptions, observer: Observer | None = None) -> Loaded:
    """Open a plan: check its limits against the options, map weights, size the KV cache. The engine is not started."""
    plan = store.load(options.plan)
    check_paths(options.plan, plan)
    limits = _limits(plan, options)
    blocks = kv_blocks(plan, _kv_memory(plan, options), limits.max_num_seqs)
    for name in plan.files:
        if name.startswith("tokenizer/"):
            check_file(options.plan, plan, name)
    tokenizer = Tokenizer.load(options.plan / "tokenizer")
    executor = open_executor(options.plan, plan, blocks, options.threads)  # last: it may start processes
    engine = Engine(
        executor,
        tokenizer,
        limits,
        eos_token_ids=tuple(dict.fromkeys((*plan.model.eos_token_ids, *tokenizer.eos_token_ids))),
        prefix_caching=options.enable_prefix_caching,
        seed=options.seed,
        observer=observer,
    )
    if engine.limits.max_model_len < limits.max_model_len:
        log.warning(
            "the KV cache holds %d tokens, so sequences are limited to that instead of the plan's %d; "
            "--kv-cache-memory-bytes %d would hold one of full length",
            engine.limits.max_model_len,
            limits.max_model_len,
            engine.pool.blocks_for(limits.max_model_len) * plan.kv.page_bytes * plan.limits.ranks,
        )
    return Loaded(plan, engine, tokenizer)


def serve(options: RunOptions, echo: Echo | None = None) -> None:
    """Serve a plan over HTTP until SIGINT or SIGTERM, then let running requests end (shutdown_timeout seconds).

    The port is claimed first, so that a port in use is known at once, and opens when the model is ready.
    """
    echo = echo or (lambda line: _write_out(line + "\n"))
    started = time.monotonic()
    with claim_port(options.host, options.port) as listener:
        from planc.runtime.metrics import Metrics
        from planc.runtime.server import Service

        name = options.served_model_name or store.load(options.plan).model.name
        metrics = Metrics(name)
        loaded = load(options, metrics)
        service = Service(
            loaded.engine,
            loaded.tokenizer,
            name,
            metrics,
            api_key=options.api_key,
            defaults=model_defaults(loaded.tokenizer.generation),
            fingerprint=loaded.plan.model.fingerprint[:16],
            yield_seconds=YIELD_SECONDS if _takes_every_cpu(loaded.plan, options) else 0.0,
        )
        metrics.watch(loaded.engine, loaded.plan.kv.dtype)
        loaded.engine.start()
        try:
            ready = partial(_announce, service, listener, time.monotonic() - started, echo)
            asyncio.run(_served(loaded, service, listener, options.shutdown_timeout, ready))
        finally:
            loaded.engine.close()


async def _served(
    loaded: Loaded, service: Service, listener: socket.socket, shutdown_timeout: int, ready: Callable[[], None]
) -> None:
    """Serves until a signal asks to stop, or a rank is gone: that ends the server as a signal does, and is an error."""
    from planc.runtime.web import serve_app

    executor, loop = loaded.engine.executor, asyncio.get_running_loop()
    if not isinstance(executor, RankedExecutor):
        await serve_app(service, listener, shutdown_timeout, ready)
        return

    def stop(why: str) -> None:
        loop.call_soon_threadsafe(signal.raise_signal, signal.SIGTERM)

    executor.on_failure(stop)
    await serve_app(service, listener, shutdown_timeout, ready)
    if executor.failure is not None:
        raise PlancError(f"{executor.failure}; start the server again")


def run_prompt(
    options: RunOptions, prompt: str, max_tokens: int | None = None, write: Callable[[str], object] | None = None
) -> Output:
    """Write the answer to one prompt as it is generated, and return its last Output.

    The prompt is the user's turn of a conversation when the model has a chat template, else the text to go on from.
    Greedy, unless the model's generation_config.json says otherwise.
    """
    write = write or _write_out
    loaded = load(options)
    tokenizer, engine = loaded.tokenizer, loaded.engine
    if tokenizer.chat_template is not None:
        ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": prompt}]), add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt)
    params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **model_defaults(tokenizer.generation)})
    arrived: SimpleQueue[Output] = SimpleQueue()
    engine.start()
    try:
        engine.submit(ids, params, arrived.put)
        while True:
            output = arrived.get()
            write(output.text)
            if output.finish_reason == "error":
                raise PlancError(f"{output.error or 'the engine failed'}; planc check {options.plan} looks for a cause")
            if output.finish_reason is not None:
                return output
    finally:
        engine.close()


def _limits(plan: Plan, options: RunOptions) -> SchedulerLimits:
    seqs = _within("--max-num-seqs", options.max_num_seqs, plan.limits.max_num_seqs)
    tokens = _within("--max-num-batched-tokens", options.max_num_batched_tokens, plan.limits.max_num_batched_tokens)
    if tokens < seqs:
        raise UsageError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}: a step must hold a token of every "
            f"sequence; raise it, or pass --max-num-seqs {tokens}"
        )
    return SchedulerLimits(plan.limits.max_model_len, seqs, tokens)


def _within(flag: str, wanted: int | None, limit: int) -> int:
    if wanted is None:
        return limit
    if wanted < 1:
        raise UsageError(f"{flag} is {wanted}; pass 1 to {limit}, or leave it out for the plan's {limit}")
    if wanted > limit:
        raise PlancError(
            f"{flag} {wanted} is above this plan's {limit}; pass at most that, or build with {flag} {wanted}"
        )
    return wanted


def _kv_memory(plan: Plan, options: RunOptions) -> int:
    """Bytes for the KV cache of a rank."""
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes // plan.limits.ranks
    return kv_memory(options.plan, plan, options.memory_utilization)


def _takes_every_cpu(plan: Plan, options: RunOptions) -> bool:
    """Whether the threads of a step leave no CPU to the server."""
    return plan.target.startswith("cpu:") and (options.threads or usable_cores()) >= usable_cpus()


def claim_port(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the model is ready. PlancError if taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as e:
        raise PlancError(f"--host {host}: {e.strerror or e}; pass an address of this machine, or 0.0.0.0") from e
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each token waits 40 ms for an ACK
        listener.bind(address)
    except OSError as e:
        listener.close()
        raise PlancError(f"cannot listen on {host}:{port} ({e.strerror}); choose another --port or --host") from e
    return listener


def _announce(service: Service, listener: socket.socket, seconds: float, echo: Echo) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    pool, limits = service.engine.pool, service.engine.limits
    echo(
        f"{service.model_name}: loaded in {seconds:.2f} s; {limits.max_num_seqs} sequences of up to "
        f"{limits.max_model_len} tokens, KV cache of {pool.num_blocks * pool.block_size} tokens"
    )
    echo(f"serving on http://{shown}:{port}")


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
