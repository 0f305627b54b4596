"""The kernel table: names hold what specialises a kernel, layouts are checked, a gap lists what exists."""

import jinja2
import pytest

from planc.codegen.axes import elementwise
from planc.codegen.kernel import layouts
from planc.codegen.render import kernel_source, render
from planc.codegen.target import parse
from planc.compiler.ir.ops import OPS
from planc.errors import PlancError
from tests.kernels.harness import Case, case, f32, i32, tensor

V3 = parse("cpu:x86-64-v3")
KV = {"layer": 0, "heads": 2, "k_dim": 16, "v_dim": 16, "block": 16, "dtype": "f32"}
KV |= {"k_offset": 0, "v_offset": 2048, "page_bytes": 4096}


def linear(n: int = 64, k: int = 32, dtype: str = "bf16", layout: str = "n64k2", **attrs: bool) -> Case:
    types = [f32("T", k), tensor(dtype, n, k, layout=layout), *([f32(n)] if attrs else [])]
    return case("linear", *types, **attrs)


def test_a_name_holds_what_specialises() -> None:
    variants = [
        linear(),
        linear(n=65),
        linear(k=33),
        linear(dtype="f32", layout="n64"),
        linear(bias=True),
        case("linear", f32("T", 32, layout="strides:40"), tensor("bf16", 64, 32, layout="n64k2")),
        case("linear", f32("T", 3, 32), tensor("bf16", 64, 32, layout="n64k2")),
        case("rms_norm", f32("T", 8), f32(8), eps=1e-5),
        case("rms_norm", f32("T", 8), f32(8), eps=1e-6),
        case("rms_norm", f32("T", 8), eps=1e-6),
        case("mul", f32("T", 8), scalar=2.0),
        case("mul", f32("T", 8), scalar=-2.0),
        case("div", f32("T", 8), scalar=2.0),
        case("div", f32("T", 8), scalar=2.0, reversed=True),
        case("cast", f32("T", 8), dtype="f32"),
        case("cast", f32("T", 8), dtype="i32"),
        case("cast", i32("T", 8), dtype="f32"),
        case("act_mul", f32("T", 8), f32("T", 8), act="silu"),
        case("act_mul", f32("T", 8), f32("T", 8), act="gelu"),
        case("kv_append", f32("T", 2, 16), f32("T", 2, 16), i32("T"), tensor("u8", "P", 4096), **KV),
        case(
            "kv_append", f32("T", 2, 16), f32("T", 2, 16), i32("T"), tensor("u8", "P", 4096), **KV | {"dtype": "bf16"}
        ),
    ]
    names = [c.kernel(V3).name for c in variants]
    assert len(set(names)) == len(names)
    assert all(n.isidentifier() for n in names)


def test_equal_names_are_equal_sources() -> None:
    """Layers differ in where their cache lies; that is an argument, so that they share a kernel."""
    types = (f32("T", 2, 16), f32("T", 2, 16), i32("T"), tensor("u8", "P", 4096))
    one, two = (case("kv_append", *types, **KV | {"layer": i, "k_offset": 64 * i}).kernel(V3) for i in (0, 1))
    assert one == two
    assert kernel_source(one) == kernel_source(two)


def test_rendering_is_deterministic() -> None:
    assert kernel_source(linear().kernel(V3)) == kernel_source(linear().kernel(V3))


def test_long_names_end_in_a_digest() -> None:
    parts = [f32("T", 2, 3 + i) for i in range(12)]
    one, two = (case("concat", *p, axis=2).kernel(V3).name for p in (parts, parts[::-1]))
    assert max(len(one), len(two)) <= 150
    assert one != two


def test_codes_of_chains_that_differ_in_signs_differ_in_name() -> None:
    codes = ("mul(i0,1e+16);neg(t0)", "mul(i0,1e-16);neg(t0)")
    assert len({case("fused", f32("T", 4), code=code).kernel(V3).name for code in codes}) == 2


def test_layouts_that_inputs_must_have() -> None:
    c = case("linear", f32("T", 32), tensor("bf16", 64, 32))
    assert layouts(c.node, c.types, V3) == ("any", "n64k2")
    c = case("qlinear", f32("T", 32), tensor("i8", 64, 32), f32(64), scheme="int8-wo")
    assert layouts(c.node, c.types, V3) == ("any", "n64u4", "row")
    c = case("embedding", tensor("bf16", 64, 32, layout="n64k2"), i32("T"))
    assert layouts(c.node, c.types, V3) == ("any", "row")


def test_a_wrong_layout_is_named() -> None:
    with pytest.raises(PlancError, match=r"linear at .*%in1: bf16\[64, 32\] must have layout 'n64k2'"):
        linear(layout="row").kernel(V3)


@pytest.mark.parametrize(
    ("c", "says"),
    [
        (case("add", tensor("f16", "T", 4), tensor("f16", "T", 4)), "kernels of add: f32 or i32"),
        (case("linear", f32("T", 4), tensor("f16", 8, 4)), "kernels of linear: x f32"),
        (case("attention", *[f32("T", 2, 8)] * 3, scale=1.0, kind="causal", window=0, softcap=0.0, layer=0), "none"),
        (case("concat", tensor("f16", "T", 4), tensor("f16", "T", 4), axis=1), "kernels of concat: f32 or i32"),
    ],
    ids=lambda v: getattr(v, "op", None),
)
def test_a_gap_lists_what_exists(c: Case, says: str) -> None:
    with pytest.raises(PlancError, match=f"{c.op} at top level has no kernel for .*{says}"):
        c.kernel(V3)


def test_every_op_of_the_canonical_graph_has_a_kernel() -> None:
    from planc.codegen.cpu_table import TABLE

    paged_later = {"attention"}
    views = {name for name, op in OPS.items() if op.view}
    assert {r.op for r in TABLE} == set(OPS) - views - paged_later


def test_an_undefined_variable_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="row_bytes"):
        render("take_rows.cpp.jinja", {"name": "x", "x_stride_bytes": 4})


def test_axes_fold_what_everyone_walks_as_one() -> None:
    axes = elementwise(f32("T", 2, 3, 5), [f32("T", 2, 3, 5), f32(5)])
    assert axes.extent == (1, 6, 5)
    assert axes.out == (30, 0, 5, 1)
    assert axes.inputs == ((30, 0, 5, 1), (0, 0, 0, 1))
