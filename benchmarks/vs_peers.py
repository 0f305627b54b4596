"""Is planc ahead of its peers? In go models and cases, out come a row a cell and a table with the ratios asked for.

Each side runs in a process of its own (benchmarks.peer_worker) with as many threads, and the sides take turns; figures
are medians. Install the peers first: benchmarks/peers.sh. What is measured:

  prefill-N   tokens of a prompt of N over the time to its first token
  decode-N    tokens a second of N sequences at once, 32 each, behind 512 tokens
  serve       output tokens a second of 16 requests of 512 tokens, 64 each, that come at once
  prefix      seconds to the first token of 4,096 tokens that an earlier request had and 128 new ones, over that one's
  load        seconds from the start of the process until it takes requests
  roofline    planc's own kernels by `planc bench`: shares of what the machine was measured to do
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import PLANC, median, row
from benchmarks.peer_files import Files
from benchmarks.peer_worker import SIDES
from planc.codegen.work import PRODUCTS

# The kinds of each peer that are nearest to planc's dtypes. Where a CPU has no bf16 instructions, f16 and f32 may be a
# peer's fastest way to run 16-bit weights.
KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "bf16": {
        "llama.cpp": ("BF16", "F16"), "openvino": ("fp16",), "vllm": ("bfloat16",), "onnxruntime": ("fp32",),
        "transformers": ("bfloat16", "float32"),
    },
    "int8": {"llama.cpp": ("Q8_0",), "openvino": ("int8",), "onnxruntime": ("int8",)},
    "int4": {"llama.cpp": ("Q4_0",), "openvino": ("int4",), "onnxruntime": ("int4",)},
}  # fmt: skip
PLANC_KINDS = {"bf16": "bf16", "int8": "int8", "int4": "int4-g64"}
ONE_AT_A_TIME = ("onnxruntime", "transformers")
KEEP_PREFIXES = ("planc", "openvino", "vllm")


@dataclass(frozen=True)
class Case:
    """Requests that are given at once. Those that are not `fresh` are the same each time: what an engine keeps of them
    spares filling its cache again.
    """

    unit: str
    requests: int
    prompt: int
    tokens: int
    fresh: bool = True
    better: float = 1.0  # -1 where less is better


CASES = {
    "decode-1": Case("tokens/s", 1, 512, 33, fresh=False),
    "prefill-512": Case("tokens/s", 1, 512, 1),
    "prefill-2048": Case("tokens/s", 1, 2048, 1),
    "decode-32": Case("tokens/s", 32, 512, 33, fresh=False),
    "decode-8": Case("tokens/s", 8, 512, 33, fresh=False),  # after those of 32, of which they are the first
    "serve": Case("tokens/s", 16, 512, 64),
    "prefix": Case("of the first", 1, 4096 + 128, 1, better=-1.0),
}
LOAD, ROOFLINE = "load", "roofline"

# (case, bits) to what planc's figure must be of the best peer's.
RATIOS = {
    ("decode-1", "bf16"): 1.0, ("decode-1", "int8"): 1.6, ("decode-1", "int4"): 2.0,
    ("prefill-512", "bf16"): 1.05, ("prefill-2048", "bf16"): 1.05,
    ("prefill-512", "int8"): 1.5, ("prefill-2048", "int8"): 1.5,
    **{(case, bits): 1.5 for case in ("decode-8", "decode-32") for bits in KINDS},
    **{("serve", bits): 1.8 for bits in KINDS},
}  # fmt: skip
# What planc's own figure must be: shares of the roofline at least, the time of a cached prefix at most.
DECODE_SHARE, LINEAR_SHARE = "decode-1, share of roofline", "prefill-{}, linear layers' share of peak"
WHOLE_SHARE = "prefill-{}, the same over the time of all kernels"
SHARES = {
    (DECODE_SHARE, "bf16"): 0.9,
    (DECODE_SHARE, "int8"): 0.8,
    **{(LINEAR_SHARE.format(n), bits): s for n in (512, 2048) for bits, s in (("bf16", 0.75), ("int8", 0.6))},
}
PREFIX_SHARE = 0.06


class Worker:
    """A side that has loaded its model."""

    def __init__(self, side: str, kind: str, path: Path, files: Files, threads: int) -> None:
        self.peer, self.name = side, side if side == "planc" else f"{side} {kind}"
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        command = [files.python(side), "-m", "benchmarks.peer_worker", side, str(path), kind, str(threads)]
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
            cwd=Path(__file__).parents[1], start_new_session=True,
        )  # fmt: skip
        try:
            self._answer()
        except RuntimeError:
            self.close()
            raise
        self.load_seconds = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        """Seconds until each token of each prompt."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended, as _answer says
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
            self._process.stdin.flush()
        times: list[list[float]] = self._answer()["times"]
        self._signal(signal.SIGSTOP)
        return times

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _signal(self, number: int) -> None:
        """To all of the side's processes. A side that waits for its turn is stopped: threads of some spin meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the process ended with {self._process.wait()}"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def figure(name: str, worker: Worker, prompts: list[list[int]]) -> float:
    """One measurement of a case."""
    case = CASES[name]
    if name == "prefix":
        first = worker.run([prompts[0][:4096] + prompts[0][:128]], 1)[0][0]
        return worker.run(prompts, 1)[0][0] / first
    times = worker.run(prompts, case.tokens)
    if name.startswith("prefill"):
        return case.prompt / times[0][0]
    if name == "serve":
        return case.requests * case.tokens / max(own[-1] for own in times)
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)  # while all of them decode
    return sum(begin < t <= end for own in times for t in own) / (end - begin)


def offers(peer: str, name: str) -> bool:
    """Whether the peer has what the case is about."""
    if name == "prefix":
        return peer in KEEP_PREFIXES
    return CASES[name].requests == 1 or peer not in ONE_AT_A_TIME


def prompts_of(case: Case, seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 1000) for _ in range(case.prompt)] for _ in range(case.requests)]


def measure(name: str, workers: list[Worker], repeats: int) -> Iterator[tuple[str, float]]:
    """The medians of a case, the sides taking turns; one that fails is named and left out."""
    case = CASES[name]
    found: dict[str, list[float]] = {w.name: [] for w in workers}
    for round_ in range(repeats + (not case.fresh)):
        for worker in workers:
            if worker.name not in found:
                continue
            try:
                value = figure(name, worker, prompts_of(case, f"{name} {round_}" if case.fresh else "kept"))
            except RuntimeError as e:
                print(f"{worker.name}, {name}: {e}", file=sys.stderr)
                del found[worker.name]
                continue
            if round_ or case.fresh:  # the first of the others has filled the cache
                found[worker.name].append(value)
    for side, values in found.items():
        yield side, median(values)


def shares(plan: Path, bits: str, threads: int) -> Iterator[tuple[str, float]]:
    """What `planc bench` says of the plan and the machine."""
    for length in (512, 2048):
        command = [*PLANC, "bench", str(plan), "--json", "--batch", "1", "--threads", str(threads)]
        done = subprocess.run([*command, "--input-len", str(length)], check=True, capture_output=True, text=True)
        report = json.loads(done.stdout)
        prefill, decode = report["cases"]
        if length == 512:
            yield from report["limits"].items()
            yield DECODE_SHARE, decode["roofline"]
        peak = report["limits"]["bf16_gops" if bits == "bf16" else "int_gops"]  # of planc's kinds, codes meet codes
        products = [k for k in prefill["kernels"] if k["kernel"].startswith(PRODUCTS)]
        done_gop = sum(k["gops"] * k["milliseconds"] / 1e3 for k in products)
        yield LINEAR_SHARE.format(length), done_gop / sum(k["milliseconds"] / 1e3 for k in products) / peak
        yield WHOLE_SHARE.format(length), done_gop / (prefill["milliseconds"] / 1e3) / peak


class Run:
    """All cells of a model at some bits."""

    def __init__(self, model: str, bits: str, args: argparse.Namespace, files: Files) -> None:
        self._model, self._bits, self._args, self._files = model, bits, args, files

    def rows(self) -> Iterator[dict]:
        """A row a cell, as soon as it is known."""
        sides = list(self._sides())
        cases = [c for c in CASES if c in self._args.cases]
        if LOAD in self._args.cases:
            yield from self._load(sides)
        if ROOFLINE in self._args.cases and (plan := next((s[2] for s in sides if s[0] == "planc"), None)):
            for name, value in shares(plan, self._bits, self._args.threads):
                yield self._row(name, "planc", value, "")
        workers = [w for s in sides if cases and (w := self._worker(*s))]
        try:
            for worker in workers:
                worker.run(prompts_of(Case("", 1, 64, 4), "first"), 4)
            for name in cases:
                able = [w for w in workers if offers(w.peer, name)]
                for side, value in measure(name, able, self._args.repeats):
                    yield self._row(name, side, value, CASES[name].unit)
        finally:
            for worker in workers:
                worker.close()

    def _sides(self) -> Iterator[tuple[str, str, Path]]:
        kinds = {"planc": (PLANC_KINDS[self._bits],), **KINDS[self._bits]}
        for peer in (p for p in SIDES if p in self._args.peers and p in kinds):
            if not self._files.has(peer):
                print(f"{peer}: not installed below {self._files.folder}; left out", file=sys.stderr)
                continue
            for kind in kinds[peer]:
                try:
                    yield peer, kind, self._files.get(self._model, peer, kind)
                except RuntimeError as e:
                    print(f"{peer} {kind}: {e}", file=sys.stderr)

    def _worker(self, peer: str, kind: str, path: Path) -> Worker | None:
        try:
            return Worker(peer, kind, path, self._files, self._args.threads)
        except RuntimeError as e:
            print(f"{peer} {kind}: {e}", file=sys.stderr)
            return None

    def _load(self, sides: list[tuple[str, str, Path]]) -> Iterator[dict]:
        found: dict[str, list[float]] = {}
        for _ in range(self._args.repeats):
            for side in sides:
                if worker := self._worker(*side):
                    worker.close()
                    found.setdefault(worker.name, []).append(worker.load_seconds)
        for name, values in found.items():
            yield self._row(LOAD, name, median(values), "s")

    def _row(self, case: str, side: str, value: float, unit: str) -> dict:
        return {
            "benchmark": "vs_peers", "model": self._model, "bits": self._bits, "case": case, "side": side,
            "value": value, "unit": unit, "threads": self._args.threads, "repeats": self._args.repeats,
        }  # fmt: skip


def table(rows: Iterable[dict]) -> Iterator[str]:
    """Markdown of the last row of each cell: for each model and bits a line a case, a column a side."""
    cells = {(r["model"], r["bits"], r["case"], r["side"]): r for r in rows}
    for model, bits in dict.fromkeys(k[:2] for k in cells):
        own = {k[2:]: r["value"] for k, r in cells.items() if k[:2] == (model, bits)}
        peers = [s for s in dict.fromkeys(side for _, side in own) if s != "planc"]
        yield ""
        yield (
            f"| {model}, {bits} | planc | " + "".join(f"{p} | " for p in peers) + "planc / best | to reach | reached |"
        )
        yield "|---" * (len(peers) + 5) + "|"
        order = [*CASES, LOAD]
        order += [c for c, _ in own if c not in order]
        for case in sorted({c for c, _ in own}, key=order.index):
            yield _line(case, bits, own, peers)


def _line(case: str, bits: str, own: dict[tuple[str, str], float], peers: list[str]) -> str:
    values = [own.get((case, side)) for side in ("planc", *peers)]
    mine, theirs = values[0], [v for v in values[1:] if v is not None]
    better = -1.0 if case == LOAD else CASES[case].better if case in CASES else 1.0
    ratio = mine / max(theirs, key=lambda v: v * better) if mine and theirs else None
    asked, has = RATIOS.get((case, bits)), ratio
    if asked is None and (asked := SHARES.get((case, bits))):
        has = mine
    least = "" if asked is None else f"{asked:g}"
    reached = "" if asked is None or has is None else "yes" if has >= asked else "no"
    if case == "prefix" and mine is not None:
        least, reached = f"at most {PREFIX_SHARE:g}", "yes" if mine <= PREFIX_SHARE else "no"
    cells = ["" if v is None else f"{v:.3g}" if abs(v) < 100 else f"{v:,.0f}" for v in values]
    shown = "" if ratio is None else f"{ratio:.2f}"
    return f"| {case} | {' | '.join(cells)} | {shown} | {least} | {reached} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--bits", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--peers", nargs="+", default=[*SIDES], choices=[*SIDES], help="sides, planc among them")
    parser.add_argument("--cases", nargs="+", default=[*CASES, LOAD, ROOFLINE], choices=[*CASES, LOAD, ROOFLINE])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=Path("peers-venvs"), help="of peers.sh; model files go there too"
    )
    parser.add_argument("--table", nargs="+", type=Path, metavar="ROWS", help="the table of rows printed before, alone")
    args = parser.parse_args()
    rows = [json.loads(line) for f in args.table or [] for line in f.read_text().splitlines() if line.startswith("{")]
    if not args.table:
        for model in args.models:
            for bits in args.bits:
                for found in Run(model, bits, args, Files(args.folder.resolve())).rows():
                    row(**found)
                    rows.append(found)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
