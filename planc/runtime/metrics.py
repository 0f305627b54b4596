"""Prometheus metrics: what the engine and the server do goes in, the text of /metrics comes out, in vLLM's names.

Names carry the prefix vllm: and the labels model_name and engine, so that routers and dashboards made for vLLM read
them unchanged. Times are monotonic seconds: queue is arrival to first scheduled, prefill from there to the first
token, decode from the first to the last token; preemption resets none. prefix_cache_queries and _hits count tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from planc.runtime.engine import Observer
from planc.runtime.output import Output
from planc.runtime.scheduler import Chunk
from planc.runtime.sequence import Sequence

if TYPE_CHECKING:
    from planc.runtime.engine import Engine

LABELS = ("model_name", "engine")
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_REQUEST = (0.01, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 600.0)
_COUNT = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_FEW = (0, 1, 2, 5, 10, 20, 50, 100)

_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", _TTFT),
    ("inter_token_latency_seconds", "Between two tokens of a sequence.", _TOKEN),
    ("request_time_per_output_token_seconds", "Decode time over output tokens after the first.", _TOKEN),
    ("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST),
    ("request_queue_time_seconds", "From arrival to being scheduled.", _REQUEST),
    ("request_prefill_time_seconds", "From being scheduled to the first token.", _REQUEST),
    ("request_decode_time_seconds", "From the first token to the last.", _REQUEST),
    ("request_inference_time_seconds", "From being scheduled to the last token.", _REQUEST),
    ("request_prompt_tokens", "Prompt tokens of a request.", _COUNT),
    ("request_generation_tokens", "Generated tokens of a request.", _COUNT),
    ("request_params_max_tokens", "max_tokens of a request.", _COUNT),
    ("request_params_n", "n of a request.", _FEW[1:]),
    ("request_prefill_kv_computed_tokens", "Prompt tokens not found in the prefix cache.", _COUNT),
    ("request_num_preemptions", "How often a request was preempted.", _FEW),
    ("iteration_tokens_total", "Tokens of a step.", _COUNT),
)


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Metrics(Observer):
    """An engine's and a server's metrics in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, "0")
        ProcessCollector(registry=self.registry)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry).labels(*self._values)
            for name, text, buckets in _HISTOGRAMS
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success", "Requests ended.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._http = Counter("http_requests", "HTTP requests.", ("method", "handler", "status"), registry=self.registry)
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "HTTP requests.", ("method", "handler"), registry=self.registry
        )

    def watch(self, engine: Engine, cache_dtype: str = "auto") -> None:
        """Read the engine's gauges and counts whenever the metrics are read."""
        self.registry.register(_EngineCollector(engine, self._values, cache_dtype))

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self.registry)

    def requested(self, samples: int) -> None:
        """A generation request was accepted."""
        self._histograms["request_params_n"].observe(samples)

    def served(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An HTTP response was sent. Methods that no route has share a label: clients must not make series."""
        method = method if method in _METHODS else "other"
        self._http.labels(method, handler, str(status)).inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def stepped(self, chunks: Items[Chunk], now: float) -> None:
        """A step has run."""
        self._histograms["iteration_tokens_total"].observe(sum(chunk.count for chunk in chunks))

    def sampled(self, seq: Sequence, now: float) -> None:
        """A token was added."""
        self._generation_tokens.inc()
        if seq.times.last_token is None:
            self._prompt_tokens.inc(seq.prompt_len)
            self._histograms["time_to_first_token_seconds"].observe(now - seq.times.arrival)
        else:
            self._histograms["inter_token_latency_seconds"].observe(now - seq.times.last_token)

    def finished(self, seq: Sequence, output: Output, now: float) -> None:
        """A sequence has ended."""
        self._success.labels(*self._values, output.finish_reason).inc()
        for name, value in _measures(seq, now):
            self._histograms[name].observe(value)

    def _counter(self, name: str, text: str) -> Any:
        return Counter(f"vllm:{name}", text, LABELS, registry=self.registry).labels(*self._values)


def _measures(seq: Sequence, now: float) -> Iterator[tuple[str, float]]:
    times, limit = seq.times, seq.params.max_tokens
    yield "e2e_request_latency_seconds", now - times.arrival
    yield "request_prompt_tokens", seq.prompt_len
    yield "request_generation_tokens", seq.output_len
    yield "request_num_preemptions", seq.preemptions
    if limit is not None:
        yield "request_params_max_tokens", limit
    if times.scheduled is None:
        return
    yield "request_queue_time_seconds", times.scheduled - times.arrival
    if times.first_token is None or times.last_token is None:
        return
    decode = times.last_token - times.first_token
    yield "request_prefill_time_seconds", times.first_token - times.scheduled
    yield "request_decode_time_seconds", decode
    yield "request_inference_time_seconds", times.last_token - times.scheduled
    yield "request_prefill_kv_computed_tokens", seq.prompt_len - (seq.cached or 0)
    if seq.output_len > 1:
        yield "request_time_per_output_token_seconds", decode / (seq.output_len - 1)


class _EngineCollector:
    """Gauges and counters that the engine keeps anyway."""

    def __init__(self, engine: Engine, labels: tuple[str, str], cache_dtype: str) -> None:
        scheduler, pool = engine.scheduler, engine.pool
        self._labels = labels
        self._gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("num_requests_running", "Requests that hold pages.", lambda: len(scheduler.running)),
            ("num_requests_waiting", "Requests in the queue.", lambda: len(scheduler.waiting)),
            ("kv_cache_usage_perc", "Pages in use, 1 is all.", lambda: pool.num_used / pool.num_blocks),
        )
        self._counters: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("num_preemptions", "Preemptions.", lambda: scheduler.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda: scheduler.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda: scheduler.prefix_hits),
        )
        self._config = {
            "block_size": str(pool.block_size),
            "num_gpu_blocks": str(pool.num_blocks),
            "cache_dtype": cache_dtype,
            "enable_prefix_caching": str(scheduler.prefix_caching),
        }

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each reading."""
        for name, text, value in self._gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value())
            yield gauge
        for name, text, value in self._counters:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value())
            yield counter
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=(*LABELS, *self._config))
        info.add_metric((*self._labels, *self._config.values()), 1)
        yield info
