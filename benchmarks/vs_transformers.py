"""How much faster than transformers? Decode and prefill tokens per second of both on the same weights, in one run.

The sides alternate; figures are medians, in the same number of threads. transformers runs eagerly with its KV cache.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks.common import load_weights, median, row
from planc.plans import store
from planc.runtime.batch import Batch
from planc.runtime.cpu import CpuExecutor


class Planc:
    """A plan's executor on one sequence, pages in order."""

    name = "planc"

    def __init__(self, plan: Path, threads: int, tokens: int) -> None:
        loaded = store.load(plan)
        self._most = loaded.limits.max_num_batched_tokens
        self._block = loaded.kv.block_size
        self._executor = CpuExecutor(plan, loaded, -(-tokens // self._block) + 1, threads)

    def prefill(self, ids: np.ndarray) -> None:
        for start in range(0, len(ids), self._most):
            self._step(ids[start : start + self._most], start)

    def decode(self, start: int, count: int) -> None:
        for i in range(count):
            self._step(np.array([100 + i % 50]), start + i)

    def _step(self, ids: np.ndarray, start: int) -> None:
        positions = np.arange(start, start + len(ids), dtype=np.int32)
        pages = np.arange(-(-(start + len(ids)) // self._block), dtype=np.int32)[None].copy()
        ends = np.array([0, len(ids)], np.int32)
        rows = np.array([len(ids) - 1], np.int32)
        self._executor.step(Batch(ids.astype(np.int32), positions, positions.copy(), pages, ends, rows)).argmax()


class Transformers:
    """The same weights in transformers."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from planc.compiler.source import open_source

        torch.set_num_threads(threads)
        self._torch = torch
        self.name = f"transformers {dtype}"
        with open_source(model) as source:
            config = source.config()
            built = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
            load_weights(built, source)
        self._model = built.eval()
        self._cache = None

    def prefill(self, ids: np.ndarray) -> None:
        with self._torch.inference_mode():
            out = self._model(self._torch.tensor(ids[None]), use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values

    def decode(self, start: int, count: int) -> None:
        with self._torch.inference_mode():
            for i in range(count):
                token = self._torch.tensor([[100 + i % 50]])
                out = self._model(token, past_key_values=self._cache, use_cache=True)
                out.logits[0, -1].argmax()


def seconds(fn, *args) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="what the plan was built from")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    sides = [Planc(args.plan, args.threads, args.prompt + args.tokens)]
    sides += [Transformers(args.model, d, args.threads) for d in args.dtypes]
    ids = np.random.default_rng(0).integers(100, 1000, args.prompt)
    prefill: dict[str, list[float]] = {s.name: [] for s in sides}
    decode: dict[str, list[float]] = {s.name: [] for s in sides}
    for run in range(args.runs + 1):
        for side in sides:
            p = seconds(side.prefill, ids)
            d = seconds(side.decode, args.prompt, args.tokens)
            if run:  # the first round warms up
                prefill[side.name].append(args.prompt / p)
                decode[side.name].append(args.tokens / d)
    for side in sides:
        row(
            benchmark="vs_transformers", side=side.name, plan=args.plan.name, threads=args.threads,
            prompt=args.prompt, prefill_tokens_per_s=median(prefill[side.name]),
            decode_tokens_per_s=median(decode[side.name]),
            prefill_ratio=median(prefill["planc"]) / median(prefill[side.name]),
            decode_ratio=median(decode["planc"]) / median(decode[side.name]),
        )  # fmt: skip


if __name__ == "__main__":
    main()
