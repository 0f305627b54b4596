"""`planc export`: in goes a plan directory, out comes its ONNX file, whole or not at all."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from planc import __version__
from planc.compiler.ir import text
from planc.compiler.onnx_export import model, writer
from planc.compiler.onnx_export.weights import Weights
from planc.compiler.progress import Progress
from planc.errors import PlancError, UsageError
from planc.plans import store
from planc.plans.schema import Plan
from planc.runtime.cpu import check_file, check_paths


@dataclass(frozen=True)
class ExportRequest:
    """What `planc export` was asked for."""

    plan: Path
    onnx: Path
    force: bool = False


@dataclass(frozen=True)
class Exported:
    """What was written: the plan, the nodes of the ONNX graph, bytes of weights, the data file if there is one."""

    plan: Plan
    nodes: int
    weight_bytes: int
    data: Path | None


def export(request: ExportRequest, progress: Progress) -> Exported:
    """Writes the plan's graph and weights as ONNX.

    Raises UsageError when the file cannot be written there, PlancError when the plan is not whole or has no weights.
    """
    plan = store.load(request.plan)
    out = request.onnx.resolve()
    data = out.with_name(out.name + ".data")
    _check_place(request, out, data)
    if not plan.has_weights:
        raise PlancError(f"{request.plan} was built with --weights none; add them with `planc pack`, then export it.")
    if plan.limits.ranks > 1:
        raise PlancError(
            f"{request.plan} is split over {plan.limits.ranks} ranks, and an ONNX file holds a whole model; build it "
            "with --tp 1, then export it."
        )
    check_paths(request.plan, plan)
    check_file(request.plan, plan, store.GRAPH)
    graph = text.read(request.plan / store.GRAPH)
    weights = Weights(request.plan, plan, graph)
    proto = model.graph_proto(graph)
    layout = writer.layout(weights, proto)
    total = sum(weights.nbytes(name) for name in weights.types)
    report = progress.bytes("weights", total)
    with _replacing(out, data, layout.external) as (model_path, data_path):
        with open(data_path, "wb") as f:
            writer.write_data(f, weights, layout, report)
        with open(model_path, "wb") as f:
            writer.write_model(f, _header(plan), proto, weights, layout, data.name, report)
    return Exported(plan, len(proto.node), total, data if layout.external else None)


def _check_place(request: ExportRequest, out: Path, data: Path) -> None:
    """No file of the plan, nothing that exists without --force, nothing but an ONNX file with it."""
    if out.is_relative_to(request.plan.resolve()):
        raise UsageError(f"{request.onnx} lies inside the plan, whose files are sealed; write it elsewhere.")
    for path in (out, data):
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is no file; choose another --onnx.")
        if path.exists() and not request.force:
            raise UsageError(f"{path} exists; pass --force to replace it, or choose another --onnx.")
    if out.exists() and out.stat().st_size and not _looks_like_onnx(out):
        raise UsageError(f"{out} is not an ONNX file, so --force will not replace it; choose another --onnx.")


def _looks_like_onnx(path: Path) -> bool:
    """A model opens with its version: field 1, a small number."""
    with open(path, "rb") as f:
        head = f.read(2)
    return len(head) == 2 and head[0] == 8 and 0 < head[1] < 64


def _header(plan: Plan) -> ModelProto:
    m, limits = plan.model, plan.limits
    doc = (
        f"{m.name} ({m.architecture}), weights {plan.options.dtype}: one prefill of at most {limits.max_model_len} "
        "tokens from position 0"
    )
    about = {
        "model": m.name,
        "architecture": m.architecture,
        "fingerprint": m.fingerprint,
        "plan": plan.digest,
        "dtype": plan.options.dtype,
        "kv_cache_dtype": plan.kv.dtype,
        "max_model_len": str(limits.max_model_len),
    }
    return model.header("planc", __version__, doc, about)


@contextmanager
def _replacing(out: Path, data: Path, external: bool) -> Iterator[tuple[Path, Path]]:
    """Two scratch files beside `out` that become it and its data when the block succeeds, and vanish when it fails.

    An older pair goes first: at no time does a model lie beside another's data.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".exporting", dir=out.parent) as scratch:
            parts = (Path(scratch) / out.name, Path(scratch) / data.name)
            yield parts
            out.unlink(missing_ok=True)
            data.unlink(missing_ok=True)
            if external:
                os.rename(parts[1], data)
            os.rename(parts[0], out)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PlancError(f"no space left on the disk of {out.parent}; free some and export again.") from e
        raise PlancError(f"writing {out} failed: {e.strerror or e}; nothing was left behind.") from e
