"""A plan for people: in goes a plan, out come tables of label and value, and the graph with its equal layers folded."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from planc.plans.schema import Accuracy, Calibration, Estimate, Plan, ProductTile
from planc.plans.tuning import Product

Rows = list[tuple[str, str]]
_LAYER = re.compile(r"\bl(\d+)\.|\blayers\.(\d+)\.|\bh\.(\d+)\.")
_OWN = re.compile(r" at 0x[0-9a-f]+|\b(layer|[kv](_scale)?_offset)=\d+")


def mib(n: int) -> str:
    """Bytes as MiB."""
    return f"{n / 2**20:,.1f} MiB"


def summary(plan: Plan) -> dict[str, Rows]:
    """Sections of (label, value) rows: model, limits, memory, cache, kernels, accuracy, goldens, passes."""
    return {
        "Model": _model(plan),
        "Limits": [(k, f"{v:,}") for k, v in vars(plan.limits).items()],
        "Memory" + _of_each(plan): _memory(plan),
        "Kernels": [(k.name, f"x{k.count}") for k in plan.kernels],
        **({"Tiles": _tiles(plan)} if plan.tiles else {}),
        **({"Blockings": _blockings(plan)} if plan.blockings else {}),
        **({"Estimates": _estimates(plan.estimates)} if plan.estimates else {}),
        **({"Calibration": _calibration(plan.calibration)} if plan.calibration else {}),
        "Accuracy": accuracy_rows(plan.accuracy),
        "Goldens": [
            (repr(g.prompt[:48]), f"{len(g.tokens)} tokens, least margin {min(g.margins):.3f}")
            if g.margins
            else (repr(g.prompt[:48]), f"{len(g.tokens)} tokens")
            for g in plan.goldens
        ],
        "Passes": [
            (p.name, f"{p.matches} of {p.expected}" if p.expected is not None else f"{p.matches}") for p in plan.passes
        ],
    }


def outcome(plan: Plan) -> Rows:
    """What a build says at its end: memory and accuracy, and of a GPU the time that steps should take."""
    m = plan.memory
    sizes = f"weights {mib(m.weights + m.constants)}, arena {mib(m.arena)}, {m.kv_token:,} B a KV token"
    steps = [row for row in _estimates(plan.estimates) if not row[0].startswith(" ")]
    return [("memory" + _of_each(plan), sizes), *steps, *accuracy_rows(plan.accuracy)]


def _of_each(plan: Plan) -> str:
    """What memory is counted by, where that is not the whole."""
    return f" of each of {plan.limits.ranks} ranks" if plan.limits.ranks > 1 else ""


def _model(plan: Plan) -> Rows:
    m = plan.model
    return [
        ("name", m.name),
        ("architecture", f"{m.architecture} ({m.model_type}), {m.num_layers} layers, {m.num_parameters / 1e6:,.1f} M"),
        ("fingerprint", m.fingerprint[:16]),
        ("target", plan.target),
        ("dtype", f"{plan.options.dtype} weights, {_cache(plan)} KV cache in blocks of {plan.kv.block_size}"),
        *[(f"fixed at {plan.limits.max_model_len:,} tokens", path) for path in m.fixed_regimes],
        *_ranks(plan),
        ("weights", "packed" if plan.has_weights else "none (built with --weights none)"),
        ("made with", ", ".join(f"{k} {v}" for k, v in plan.made_with.items())),
    ]


def _ranks(plan: Plan) -> Rows:
    """How the model is split, and what is not."""
    if plan.limits.ranks == 1:
        return []
    whole = f", {len(plan.replicated)} products whole on each, first {plan.replicated[0]}" if plan.replicated else ""
    return [("ranks", f"{plan.limits.ranks}, each with a part of every layer{whole}")]


def _cache(plan: Plan) -> str:
    scaled = any(layer.k_scale_offset is not None for layer in plan.kv.layers)
    return plan.options.kv_cache_dtype + (" (a scale a token and head)" if scaled else "")


def _memory(plan: Plan) -> Rows:
    m = plan.memory
    return [
        ("weights", mib(m.weights)),
        ("constants", mib(m.constants)),
        ("arena", mib(m.arena)),
        ("KV cache of a token", f"{m.kv_token:,} B"),
        ("KV cache of all full sequences", mib(m.kv_full)),
    ]


def _tiles(plan: Plan) -> Rows:
    """Of each product the tiles by its rows, neighbours of the same tile together, with what one should take."""
    products: dict[Product, list[ProductTile]] = {}
    for row in plan.tiles:
        products.setdefault(replace(row.product, rows=0), []).append(row)
    told = []
    for p, found in products.items():
        of = f" of {p.experts} experts" if p.experts else ""
        told.append((f"{p.op} [{p.n}, {p.k}]{of}", f"{p.weight} by rows of {p.x}"))
        found.sort(key=lambda row: row.product.rows)
        for _, same in groupby(found, key=lambda row: (row.tile, row.measured)):
            told.append(_tile(list(same)))
    return told


def _tile(same: list[ProductTile]) -> tuple[str, str]:
    first, last = same[0], same[-1]
    ends = dict.fromkeys((first.product.rows, last.product.rows))
    took = dict.fromkeys(f"{row.microseconds:,.1f}" for row in (first, last))
    bounds = ", ".join(dict.fromkeys(row.bound for row in same))
    by = "; measured by planc tune" if first.measured else ""
    label = f"  {' to '.join(map(str, ends))} row{'s' if last.product.rows > 1 else ''}"
    return label, f"{first.tile}: {' to '.join(took)} us, bound by {bounds}{by}"


def _blockings(plan: Plan) -> Rows:
    """Of each product that a tuning file has, what it chose."""
    return [(f"{b.product} x{b.launches}", f"{b.blocking}; measured by planc tune") for b in plan.blockings]


def _estimates(found: Iterable[Estimate]) -> Rows:
    """Of each step its time and rate, then the kernels that take 95 % of it, with what bounds them."""
    rows = []
    for e in found:
        size = f"{e.seqs} x {e.context:,} tokens" if e.step == "decode" else f"{e.tokens:,} tokens"
        rows.append((f"{e.step} {size}", f"{e.milliseconds:.2f} ms, {e.tokens_per_s:,.0f} tokens/s"))
        left = 0.95 * e.milliseconds
        for k in e.kernels:
            rows.append((f"  {k.op} x{k.launches}", f"{k.milliseconds:.2f} ms, bound by {k.bound}"))
            left -= k.milliseconds
            if left <= 0:
                break
    return rows


def accuracy_rows(a: Accuracy) -> Rows:
    """The accuracy section; says so when the build skipped the reference."""
    if a.mean_kl is None or a.perplexity is None or a.reference_perplexity is None or a.top1_agreement is None:
        return [("reference", "not measured (--reference none)")]
    return [
        ("reference", f"{a.reference}, {a.tokens} tokens"),
        ("mean KL", f"{a.mean_kl:.3g} nats"),
        ("top-1 agreement", f"{a.top1_agreement:.2%}"),
        ("perplexity", f"{a.perplexity:.4g} (reference {a.reference_perplexity:.4g})"),
        *_allowed(a),
        *_weight_errors(a),
    ]


def _calibration(c: Calibration) -> Rows:
    rows = [
        ("text", f"{c.text}, {c.tokens:,} tokens, sha256 {c.text_sha256[:16]}"),
        ("products", f"{c.products}, their inputs scaled in {c.scaled} places"),
    ]
    return rows + ([("inputs not scaled", f"{len(c.unscaled)}, first {c.unscaled[0]}")] if c.unscaled else [])


def _allowed(a: Accuracy) -> Rows:
    if a.most_kl is None or a.most_ppl_increase is None:
        return []
    rows = [("allowed", f"KL {a.most_kl:g} nats, perplexity +{a.most_ppl_increase:.2%}")]
    return rows + ([("widened to stay within that", f"{len(a.widened)} modules")] if a.widened else [])


def _weight_errors(a: Accuracy) -> Rows:
    """By scheme: how many weights, their mean relative error, and the worst."""
    schemes = dict.fromkeys(w.scheme for w in a.weights)
    rows = []
    for scheme in schemes:
        found = [w for w in a.weights if w.scheme == scheme]
        worst = max(found, key=lambda w: w.error)
        mean = sum(w.error for w in found) / len(found)
        told = f"{mean:.2g} of {len(found)} weights, worst {worst.error:.2g} in {worst.modules[0]}"
        rows.append((f"error of {scheme}", told))
    return rows


def fold_layers(text: str) -> str:
    """The graph's text with runs of equal layers after the first told in one line."""
    lines = text.splitlines()
    out: list[str] = []
    groups = [(k, list(g)) for k, g in groupby(lines, key=_layer_of)]
    previous: list[str] | None = None
    same: list[int] = []
    for layer, body in groups:
        spelt = [_normal(line, layer) for line in body] if layer is not None else None
        if spelt is not None and spelt == previous:
            same.append(layer or 0)
            continue
        out += _told(same)
        same, previous = [], spelt
        out += body
    return "\n".join([*out, *_told(same)]) + "\n"


def _told(same: list[int]) -> list[str]:
    if not same:
        return []
    span = f"layer {same[0]}" if len(same) == 1 else f"layers {same[0]}..{same[-1]}"
    return [f"  ... {span}: the same as the layer above"]


def _layer_of(line: str) -> int | None:
    loc = line.rpartition("  # ")[2] if "  # " in line else line
    found = _LAYER.search(loc if "  # " in line else line.split("=")[0])
    return int(next(g for g in found.groups() if g)) if found else None


def _normal(line: str, layer: int | None) -> str:
    """The line with its layer's number made relative and its addresses and offsets left out."""
    relative = _LAYER.sub(lambda m: f"L{int(next(g for g in m.groups() if g)) - (layer or 0)}.", line)
    return _OWN.sub("", relative)


def lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Rows as aligned plain lines."""
    table = list(rows)
    width = max((len(label) for label, _ in table), default=0)
    return [f"  {label:<{width}}  {value}" for label, value in table]
