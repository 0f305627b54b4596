"""Parts of ranks: what is gathered one behind the other ends where all_gather's reference puts it."""

import numpy as np
import pytest

from planc.codegen.cuda.call import Bucket
from planc.codegen.cuda.collective import GATHERED, elements, place
from planc.compiler.ir.graph import Node, Value
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import TensorType
from tests.codegen.cuda.harness import launch
from tests.kernels.harness import Buffer

RNG = np.random.default_rng(11)


@pytest.mark.parametrize(("starts", "width", "total"), [((0, 5), 5, 10), ((0, 40, 60), 40, 100), ((0, 700), 700, 1400)])
@pytest.mark.parametrize("rows", [1, 7])
def test_parts_go_to_their_columns(starts: tuple[int, ...], width: int, total: int, rows: int) -> None:
    whole = RNG.standard_normal((rows, total)).astype(np.float32)
    parts = [np.ascontiguousarray(whole[:, s : s + width]) for s in starts]
    x = TensorType("f32", ("T", width))
    attrs = {"starts": starts, "size": total, "ranks": len(starts)}
    node = Node("all_gather", ("x",), (Value("y", TensorType("f32", ("T", total))),), tuple(attrs.items()))
    bucket = Bucket(rows, rows, rows)
    assert elements(node, {"x": x}, bucket) == rows * width

    gathered = np.concatenate([p.reshape(-1) for p in parts])
    made = place(node, {"x": x}, bucket)
    source, out = Buffer(made.scratch[GATHERED]), Buffer(whole.nbytes)
    source.data[: gathered.nbytes] = gathered.view(np.uint8)
    launch(made, {GATHERED: source, "y": out})
    source.check(GATHERED)
    out.check("y")
    got = out.data[: whole.nbytes].view(np.float32).reshape(whole.shape)
    (want,) = OPS["all_gather"].ref(attrs, parts, [x])
    np.testing.assert_array_equal(want, whole)
    np.testing.assert_array_equal(got, want)
