"""How far does each scheme move a model? Mean KL, top-1 agreement and perplexity of plans and of peers.

The truth is transformers in float32 on the very weights that planc compiles. All sides see the same windows of the same
text, one window after the other, and are judged by the same code, so that nothing larger than the logits of a window is
held. The text comes with Python: its manual's topics and sources of its standard library; --text takes another.
Peers that are not installed are named and left out.
"""

import argparse
import ctypes
import importlib
import inspect
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.accuracy_peers import PEERS
from benchmarks.common import PLANC, load_weights, row
from planc.compiler.source import ModelSource, open_source
from planc.plans import store
from planc.runtime.cpu import CpuExecutor
from planc.runtime.goldens import Scorer
from planc.runtime.tokenizer import Tokenizer

MODELS = ("smollm2-135m", "gemma3-270m")
SCHEMES = ("bf16", "int8-wo", "int8", "fp8", "fp8-block", "awq-g64", "awq-g128", "int4-wo-g64", "int4-wo-g128")
CACHES = ("fp8", "int8")
SOURCES = ("argparse", "ast", "asyncio.base_events", "collections", "decimal", "difflib", "email.message", "inspect")
ELEMENTS = 1 << 19  # of logits, compared at a time: they stay in the caches
SEQS = 256
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's

# What each should reach: most KL, least agreement. `kv` is what the cache may add to bf16.
ASKED = {"int8": (0.01, 0.96), "fp8": (0.02, 0.94), "kv": (0.005, 0.98)}
ASKED_OF_AWQ = 0.8  # of round-to-nearest's KL at the same group

Logits = Callable[[list[int]], np.ndarray]


class Truth:
    """What the model says of a window: logits f32[n, vocab] as they are, probabilities, and each row's first."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = torch.from_numpy(np.ascontiguousarray(logits))
        self.norm = self.logits.logsumexp(-1)
        self.p = (self.logits - self.norm[:, None]).exp_()
        self.first = self.logits.argmax(-1)


@dataclass
class Side:
    """Something that gives logits f32[n, vocab] of a window, and its sums so far."""

    name: str
    logits: Logits
    facts: dict[str, object] = field(default_factory=dict)
    rows: int = 0
    same: int = 0
    predicted: int = 0
    kl: float = 0.0
    nll: float = 0.0
    seconds: float = 0.0

    def add(self, truth: Truth, ids: list[int]) -> None:
        """Takes a window. With d = q's logits less p's, KL(p, q) = log E_p[e^d] - E_p[d]: small numbers stay exact."""
        start = time.perf_counter()
        logits = torch.from_numpy(np.ascontiguousarray(self.logits(ids)))
        self.seconds += time.perf_counter() - start
        rows = max(1, ELEMENTS // logits.shape[1])
        for at in range(0, len(ids), rows):
            mine = slice(at, at + rows)
            p, q, first = truth.p[mine], logits[mine], truth.first[mine]
            d = q - truth.logits[mine]
            offset = d.gather(1, first[:, None])
            d -= offset
            mean = torch.linalg.vecdot(p, d).double()
            more = torch.linalg.vecdot(p, d.expm1_()).double().log1p()  # log E[e^d]
            self.kl += float((more - mean).sum())
            self.same += int((first == q.argmax(-1)).sum())
            after = torch.tensor(ids[at + 1 : at + 1 + rows])
            norm = truth.norm[mine].double() + offset[:, 0].double() + more
            self.nll += float((norm[: len(after)] - q[: len(after)].gather(1, after[:, None])[:, 0]).sum())
            self.predicted += len(after)
            self.rows += len(p)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "mean_kl": self.kl / self.rows,
            "top1": self.same / self.rows,
            "perplexity": float(np.exp(self.nll / self.predicted)),
        }


def held_out(path: Path | None) -> tuple[str, ...]:
    """Texts to cut windows from, in turn."""
    if path is not None:
        return (path.read_text(encoding="utf-8"),)
    from pydoc_data.topics import topics

    manual = "\n\n".join(topics[name] for name in sorted(topics))
    code = "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES)
    return manual, code


def windows(tokenizer: Tokenizer, texts: tuple[str, ...], tokens: int, width: int) -> list[list[int]]:
    """Windows of `width` tokens, each as a text of its own: with the token that opens one, where the model has it."""
    opened = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    opening = [tokenizer.bos_token_id] if opened and tokenizer.bos_token_id is not None else []
    step = width - len(opening)
    cut = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        cut.append([opening + ids[i : i + step] for i in range(0, len(ids) - step + 1, step)])
    turns = [w for group in zip(*cut, strict=False) for w in group]
    turns += [w for group in cut for w in group[min(map(len, cut)) :]]
    wanted = -(-tokens // width)
    if len(turns) < wanted:
        raise SystemExit(f"the text has {len(turns) * width} tokens in whole windows, fewer than --tokens {tokens}")
    return turns[:wanted]


def truth_of(source: ModelSource) -> torch.nn.Module:
    """The model in transformers, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(source.config(), dtype=torch.float32, attn_implementation="eager")
    load_weights(model, source)
    return model.eval()


def of_module(model: torch.nn.Module) -> Logits:
    """Logits of a transformers model."""

    def logits(ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()

    return logits


def built(model: str, folder: Path, scheme: str, cache: str, width: int, reuse: bool, flags: list[str]) -> Side:
    """A plan as a side; builds it unless it is there."""
    name = scheme if cache == "auto" else f"{scheme} kv {cache}"
    out = folder / f"{Path(model).stem}-{name.replace(' ', '-')}"
    facts: dict[str, object] = {}
    if not (reuse and out.exists()):
        command = [*PLANC, "build", "--model", model, "-o", str(out), "--force", "--dtype", scheme, *flags]
        command += ["--kv-cache-dtype", cache, "--max-model-len", str(width), "--max-num-seqs", str(SEQS)]
        start = time.perf_counter()
        command += ["--max-kl", "1e9", "--max-ppl-increase", "1e9"]  # a table also shows what is far off
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"the build ended with {done.returncode}"])[-1])
        stages = dict(re.findall(r"^(.+?) +([\d.]+) s$", done.stderr, re.MULTILINE))
        facts = {"build_s": time.perf_counter() - start, "weights_s": float(stages.get("weights", 0))}
        facts |= {f"{k}_s": float(v) for k, v in stages.items() if k.startswith("calib")}
    plan = store.load(out)
    if "weights_s" in facts:
        billions = plan.model.num_parameters / 1e9
        facts["s_per_billion"] = sum(float(str(v)) for k, v in facts.items() if k != "build_s") / billions
    executor = CpuExecutor(out, plan, num_blocks=-(-width // plan.kv.block_size))
    scorer = Scorer(executor, plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens)
    facts |= {"weight_mb": plan.memory.weights / 1e6, "errors": _error(plan)}
    print(f"# {out}: {facts}", flush=True)
    return Side(f"planc {name}", lambda ids: scorer.logits(ids, 0), facts)


def _error(plan: object) -> float | None:
    found = plan.accuracy.weights  # type: ignore[attr-defined]
    return sum(w.error for w in found) / len(found) if found else None


def sides(model: str, source: ModelSource, truth: torch.nn.Module, args: argparse.Namespace) -> Iterator[Side]:
    """Plans first, then peers; what cannot be had is said in a row."""
    wanted = [(scheme, "auto") for scheme in args.schemes] + [("bf16", cache) for cache in args.caches]
    for scheme, cache in wanted:
        try:
            yield built(model, args.plans, scheme, cache, args.window, args.reuse, args.flags)
        except RuntimeError as e:
            row(benchmark="accuracy", model=model, side=f"planc {scheme} kv {cache}", failed=str(e))
    for name in args.peers:
        try:
            logits = PEERS[name](model, truth, args.window)
        except (ImportError, RuntimeError, NotImplementedError) as e:
            row(benchmark="accuracy", model=model, side=name, missing=f"{type(e).__name__}: {e}"[:200])
        else:
            yield Side(name, of_module(logits) if isinstance(logits, torch.nn.Module) else logits)


def measure(model: str, args: argparse.Namespace) -> list[Side]:
    """Every side of a model over all windows; prints a row each."""
    with open_source(model) as source:
        truth = truth_of(source)
        found = list(sides(model, source, truth, args))
    name = next(p for p in sorted(args.plans.iterdir()) if p.name.startswith(f"{Path(model).stem}-"))
    cut = windows(Tokenizer.load(name / "tokenizer"), held_out(args.text), args.tokens, args.window)
    own = Side("transformers float32", of_module(truth))
    ask = of_module(truth)
    for number, ids in enumerate(cut, 1):
        known = Truth(ask(ids))
        said = known.logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        own.nll += float((known.norm[:-1] - said).sum(dtype=torch.float64))
        own.predicted += len(ids) - 1
        for side in found:
            side.add(known, ids)
        if not number % 10:
            far = ", ".join(f"{s.name} {s.kl / s.rows:.4f} {s.same / s.rows:.1%}" for s in found)
            print(f"# {model}: window {number} of {len(cut)}: {far}", flush=True)
    perplexity = float(np.exp(own.nll / own.predicted))
    for side in found:
        row(
            benchmark="accuracy", model=model, side=side.name, tokens=side.rows, window=args.window, **side.figures,
            truth_perplexity=perplexity, ppl_increase=side.figures["perplexity"] / perplexity - 1,
            tokens_per_s=side.rows / side.seconds, **side.facts,
        )  # fmt: skip
    return found


def table(model: str, found: list[Side]) -> str:
    """The rows as markdown, with what they should reach."""
    kl = {s.name: s.figures["mean_kl"] for s in found}
    lines = [f"| {model} | mean KL | top-1 agreement | perplexity | asked |", "|---|---|---|---|---|"]
    for s in found:
        f = s.figures
        cells = (f"{f['mean_kl']:.5f}", f"{f['top1']:.2%}", f"{f['perplexity']:.3f}", verdict(s, kl))
        lines.append(f"| {s.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(side: Side, kl: dict[str, float]) -> str:
    """What a side should reach, and whether it does; nothing for the others."""
    f, name = side.figures, side.name.removeprefix("planc ")
    if side.name == name:
        return ""
    if name in ("int8", "fp8"):
        most, least = ASKED[name]
        return _held(f["mean_kl"] <= most and f["top1"] >= least, f"KL <= {most}, top-1 >= {least:.0%}")
    if " kv " in name and "planc bf16" in kl:
        most, least = ASKED["kv"]
        added = f["mean_kl"] - kl["planc bf16"]
        return _held(added <= most and f["top1"] >= least, f"adds {added:.5f} <= {most}, top-1 >= {least:.0%}")
    nearest = kl.get(f"rtn int4 g{name.partition('-g')[2]}")
    if name.startswith("awq") and nearest:
        ratio = f["mean_kl"] / nearest
        return _held(ratio <= ASKED_OF_AWQ, f"{ratio:.2f} of round-to-nearest <= {ASKED_OF_AWQ}")
    return ""


def _held(ok: bool, text: str) -> str:
    return f"{'yes' if ok else 'NO'}: {text}"


def keep_memory() -> None:
    """Memory that is freed stays with the process: each window's logits are as large, and new pages cost as much time
    as what is computed on them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="aliases or folders")
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    parser.add_argument("--caches", nargs="*", default=list(CACHES), help="KV cache dtypes, beside bf16 weights")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--tokens", type=int, default=51200)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--plans", type=Path, default=Path("accuracy-plans"), help="where plans are kept")
    parser.add_argument("--reuse", action="store_true", help="take plans that are there")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="last: more flags of planc build")
    args = parser.parse_args()
    args.plans.mkdir(parents=True, exist_ok=True)
    tables = [table(model, measure(model, args)) for model in args.models]
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
