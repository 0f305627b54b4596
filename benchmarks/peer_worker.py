"""One side of benchmarks.vs_peers in a process of its own: requests come in on stdin, the times of their tokens go out.

`python -m benchmarks.peer_worker SIDE PATH KIND THREADS` loads and prints {"ready": true}. Each line of stdin is then
{"prompts": [[id, ..], ..], "tokens": n}: all are given at once, each gets n tokens, greedily. The answer is {"times":
[[seconds, ..], ..]}, from when they were given to when each token was there, or {"error": why}. Runs in the peer's venv
too, so nothing of planc is imported but by planc's own side.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

CACHE_BYTES = 1 << 30  # of keys and values: 32 sequences of 640 tokens, or one of 4,300
BATCHED = 2048  # tokens in a step, as planc's plans have it

Prompts = list[list[int]]


class Side:
    """An engine that has loaded a model. What it keeps of prompts that were sent before is its own affair."""

    def run(self, prompts: Prompts, tokens: int) -> list[list[float]]:
        """Times at which each prompt's tokens were there, by time.monotonic."""
        raise NotImplementedError


class Planc(Side):
    """A plan in planc's engine."""

    def __init__(self, path: Path, kind: str, threads: int) -> None:
        from planc.runtime.engine import Observer
        from planc.runtime.run import RunOptions, load

        class Clock(Observer):
            def sampled(_, seq: Any, now: float) -> None:
                self._times.setdefault(seq.id, []).append(now)

        self._times: dict[int, list[float]] = {}
        options = RunOptions(path, threads=threads, kv_cache_memory_bytes=CACHE_BYTES)
        self._engine = load(options, Clock()).engine

    def run(self, prompts: Prompts, tokens: int) -> list[list[float]]:
        from planc.runtime.sequence import SamplingParams

        self._times.clear()
        self._engine.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
        return [self._times[i] for i in sorted(self._times)]


class LlamaCpp(Side):
    """llama.cpp by its batch API: prompts in batches of 2,048 tokens, then a token of each sequence a step."""

    def __init__(self, path: Path, kind: str, threads: int) -> None:
        import llama_cpp

        self._ll, self._threads = llama_cpp, threads
        quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._quiet = quiet  # called for as long as the library lives
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts: list[tuple[int, int, Any, Prompts]] = []  # sequences, tokens of each, itself, what they hold

    def run(self, prompts: Prompts, tokens: int) -> list[list[float]]:
        context, held = self._context(len(prompts), len(prompts[0]) + tokens)
        memory = self._ll.llama_get_memory(context)
        work = []
        start = time.monotonic()
        for s, prompt in enumerate(prompts):
            kept = min(_common(prompt, held[s]), len(prompt) - 1)
            self._ll.llama_memory_seq_rm(memory, s, kept, -1)
            held[s] = prompt
            work += [(s, at, prompt[at], at == len(prompt) - 1) for at in range(kept, len(prompt))]
        times: list[list[float]] = [[start] for _ in prompts]
        last = self._decode(context, work, times)
        for i in range(1, tokens):
            last = self._decode(context, [(s, len(prompts[s]) + i - 1, last[s], True) for s in range(len(last))], times)
        return [t[1:] for t in times]

    def _context(self, sequences: int, length: int) -> tuple[Any, Prompts]:
        """One that holds so much, made when none does."""
        for most, longest, context, held in self._contexts:
            if most >= sequences and longest >= length:
                return context, held
        params = self._ll.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = sequences * length, sequences, False
        params.n_batch = BATCHED
        params.n_threads = params.n_threads_batch = self._threads
        context = self._ll.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"no context of {sequences} x {length} tokens")
        held: Prompts = [[] for _ in range(sequences)]
        self._contexts.append((sequences, length, context, held))
        return context, held

    def _decode(self, context: Any, work: list[tuple[int, int, int, bool]], times: list[list[float]]) -> dict[int, int]:
        """Runs (sequence, position, id, whether its logits are wanted); the next token of each sequence."""
        import numpy as np

        found = {}
        batch = self._ll.llama_batch_init(BATCHED, 0, 1)
        for first in range(0, len(work), BATCHED):
            part = work[first : first + BATCHED]
            batch.n_tokens = len(part)
            for i, (s, at, token, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, at, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, s
            if self._ll.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for i, (s, _, _, wanted) in enumerate(part):
                if wanted:
                    logits = self._ll.llama_get_logits_ith(context, i)
                    found[s] = int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())
                    times[s].append(time.monotonic())
        self._ll.llama_batch_free(batch)
        return found


class OpenVino(Side):
    """OpenVINO GenAI's continuous batching."""

    def __init__(self, path: Path, kind: str, threads: int) -> None:
        import openvino_genai

        self._genai = openvino_genai
        limits = openvino_genai.SchedulerConfig()
        limits.max_num_batched_tokens = BATCHED
        limits.cache_size = CACHE_BYTES >> 30
        limits.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipe = openvino_genai.ContinuousBatchingPipeline(path, limits, "CPU", properties)
        self._count = 0

    def run(self, prompts: Prompts, tokens: int) -> list[list[float]]:
        import numpy as np
        import openvino

        how = self._genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        start = time.monotonic()
        handles = []
        for prompt in prompts:
            self._count += 1
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipe.add_request(self._count, ids, how))
        times: list[list[float]] = [[start] for _ in prompts]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for handle, own in zip(handles, times, strict=True):
                if handle.can_read():
                    new = sum(len(out.generated_ids) for out in handle.read().values())
                    own += [time.monotonic()] * new
        return [t[1:] for t in times]


class OnnxRuntime(Side):
    """onnxruntime-genai's generator, which on a CPU takes one request at a time."""

    def __init__(self, path: Path, kind: str, threads: int) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(str(path))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = onnxruntime_genai.Model(config)

    def run(self, prompts: Prompts, tokens: int) -> list[list[float]]:
        (prompt,) = prompts
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=len(prompt) + tokens, min_length=len(prompt) + tokens, do_sample=False)
        generator = self._genai.Generator(self._model, params)
        times = []
        generator.append_tokens(prompt)
        for _ in range(tokens):
            generator.generate_next_token()
            times.append(time.monotonic())
        return [times]


class Vllm(Side):
    """vLLM's engine, in this process."""

    def __init__(self, path: Path, kind: str, threads: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_BYTES >> 30),
        }
        import vllm

        self._vllm, self._count = vllm, 0
        self._engine = vllm.LLM(
            str(path), dtype=kind, max_model_len=4608, max_num_seqs=64, max_num_batched_tokens=BATCHED,
            enable_prefix_caching=True,
        ).llm_engine  # fmt: skip

    def run(self, prompts: Prompts, tokens: int) -> list[list[float]]:
        params = self._vllm.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        times: dict[str, list[float]] = {}
        for prompt in prompts:
            self._count += 1
            times[str(self._count)] = []
            self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for out in self._engine.step():
                own = times[out.request_id]
                own += [time.monotonic()] * (len(out.outputs[0].token_ids) - len(own))
        return list(times.values())


class Transformers(Side):
    """transformers, eagerly, one request at a time."""

    def __init__(self, path: Path, kind: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, kind)).eval()

    def run(self, prompts: Prompts, tokens: int) -> list[list[float]]:
        (prompt,) = prompts
        times, cache = [], None
        ids = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            for _ in range(tokens):
                out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                times.append(time.monotonic())
        return [times]


SIDES: dict[str, Callable[[Path, str, int], Side]] = {
    "planc": Planc,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "onnxruntime": OnnxRuntime,
    "vllm": Vllm,
    "transformers": Transformers,
}


def _common(a: list[int], b: list[int]) -> int:
    """How many first tokens are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@contextlib.contextmanager
def own_stdout() -> Iterator[TextIO]:
    """What was stdout, for the answers alone: what libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def main() -> None:
    name, path, kind, threads = sys.argv[1:]
    with own_stdout() as answers:

        def answer(**fields: object) -> None:
            print(json.dumps(fields), file=answers, flush=True)

        try:
            side = SIDES[name](Path(path), kind, int(threads))
        except Exception as e:  # noqa: BLE001 - whatever a peer raises is what it has to say
            answer(error=f"{type(e).__name__}: {e}")
            return
        answer(ready=True)
        for line in sys.stdin:
            start = time.monotonic()
            try:
                times = side.run(**json.loads(line))
            except Exception as e:  # noqa: BLE001 - as above; others of its requests may go well
                answer(error=f"{type(e).__name__}: {e}")
            else:
                answer(times=[[t - start for t in own] for own in times])


if __name__ == "__main__":
    main()
