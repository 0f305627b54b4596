"""Launch plans survive their file, and what contradicts itself is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from planc.errors import PlancError
from planc.plans import launches
from planc.plans.launches import Arg, Binary, Buffer, Launch, LaunchPlan, StepGraph, input_buffers
from planc.plans.sampling import RECORD


def plan() -> LaunchPlan:
    kernel = Binary("scale-f32", "scale", 128, 1024, ((0, 8), (8, 8), (16, 4), (24, 8), (32, 8)), 2)
    inputs = input_buffers((4, 2, 2), 8, samples=False)
    x, y = Buffer("x", "act", 0, 256), Buffer("y", "act", 256, 256)
    first = Launch("scale-f32", (2, 1, 1), (Arg("buffer", "x"), Arg("buffer", "y", 16), Arg("f32", 0.5)), ())
    second = Launch("scale-f32", (2, 1, 1), (Arg("buffer", "y"), Arg("buffer", "x"), Arg("i32", -3)), (0,))
    arenas = {"weights": 0, "kv": 0, "act": 512, "io": 256}
    return LaunchPlan(90, (kernel,), (x, y), arenas, (StepGraph(4, 2, 2, inputs, (first, second)),), "y", 8)


def with_inputs(change: Callable[[Buffer], Buffer]) -> LaunchPlan:
    """The plan with other inputs of its graph."""
    p = plan()
    (graph,) = p.graphs
    return replace(p, graphs=(replace(graph, inputs=tuple(change(b) for b in graph.inputs)),))


def changed(**launch: object) -> LaunchPlan:
    """The plan with some fields of its second launch replaced."""
    p = plan()
    graph = p.graphs[0]
    wrong = replace(graph.launches[1], **launch)
    return replace(p, graphs=(replace(graph, launches=(graph.launches[0], wrong)),))


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    launches.save(tmp_path, plan())
    assert launches.load(tmp_path) == plan()
    text = (tmp_path / launches.LAUNCHES).read_text()
    assert launches.to_json(launches.from_json(text)) == text


def test_inputs_lie_one_behind_the_other_and_records_are_those_of_plans_that_sample() -> None:
    found = input_buffers((3, 2, 1), 5, samples=True, start=512)
    assert [(b.name, b.offset, b.nbytes) for b in found] == [
        ("ids", 512, 12),
        ("positions", 528, 12),
        ("slots", 544, 12),
        ("page_table", 560, 40),
        ("query_start", 608, 12),
        ("logit_rows", 624, 4),
        ("records", 640, 4 * RECORD),
    ]
    assert StepGraph(3, 2, 1, found, ()).input_span == (512, 640 + 4 * RECORD)


def test_numbers_keep_their_type() -> None:
    read = launches.from_json(launches.to_json(changed(args=(Arg("buffer", "x"), Arg("buffer", "y"), Arg("f32", 2.0)))))
    value = read.graphs[0].launches[1].args[2].value
    assert value == 2.0
    assert isinstance(value, float)


def test_arguments_become_little_endian_bytes() -> None:
    assert launches.pack(Arg("buffer", "x", 16), 0x1000) == (0x1010).to_bytes(8, "little")
    assert launches.pack(Arg("i32", -2)) == b"\xfe\xff\xff\xff"
    assert launches.pack(Arg("i64", -2)) == b"\xfe" + b"\xff" * 7
    assert launches.pack(Arg("f32", 1.0)) == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (changed(deps=(1,)), "launch 1 of the graph of 4 tokens: scale-f32 depends on [1]"),
        (changed(kernel="scale-f16"), "there is no kernel 'scale-f16'"),
        (changed(args=(Arg("buffer", "x"),)), "has 1 arguments, expected 3"),
        (changed(args=(Arg("buffer", "x"), Arg("i32", 1), Arg("f32", 1.0))), "argument 1 of scale-f32 is 'i32'"),
        (changed(args=(Arg("buffer", "q"), Arg("buffer", "x"), Arg("f32", 1.0))), "there is no buffer 'q'"),
        (changed(grid=(1, 0, 1)), "has the grid [1, 0, 1]"),
        (replace(plan(), logits="z"), "there is no buffer 'z'"),
        (
            replace(plan(), arenas={"act": 511, "io": 384}),
            "buffer 'y' takes bytes 256 to 512 of the arena 'act'",
        ),
        (
            with_inputs(lambda b: replace(b, name="slots") if b.name == "ids" else b),
            "the graph of 4 tokens: its inputs are slots, positions, slots, page_table, query_start, logit_rows, exp",
        ),
        (
            with_inputs(lambda b: replace(b, nbytes=60) if b.name == "page_table" else b),
            "input 'page_table' has 60 bytes, expected 64",
        ),
        (
            with_inputs(lambda b: replace(b, offset=b.offset - 16) if b.name == "slots" else b),
            "input 'slots' begins at byte 16, expected a multiple of 16 from 32 on",
        ),
        (
            with_inputs(lambda b: replace(b, offset=b.offset + 4) if b.name == "logit_rows" else b),
            "input 'logit_rows' begins at byte 132, expected a multiple of 16 from 124 on",
        ),
        (
            replace(plan(), arenas={"act": 512, "io": 128}),
            "buffer 'logit_rows' takes bytes 128 to 136 of the arena 'io', which has 128",
        ),
        (
            replace(plan(), buffers=(*plan().buffers, Buffer("ids", "act", 0, 16))),
            "'ids' is there twice, as an input and as a buffer",
        ),
        (changed(args=(Arg("buffer", "x"), Arg("buffer", "records"), Arg("f32", 1.0))), "there is no buffer 'records'"),
        (replace(plan(), binaries=plan().binaries * 2), "'scale-f32' is there twice"),
    ],
)
def test_a_contradiction_is_named(wrong: LaunchPlan, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlancError) as caught:
        launches.from_json(launches.to_json(wrong))
    assert message in str(caught.value)
    with pytest.raises(ValueError, match=r"launch|buffer|twice|input"):
        launches.save(tmp_path, wrong)
    assert not (tmp_path / launches.LAUNCHES).exists()


@pytest.mark.parametrize("text", ["", "[]", '{"sm": 90}', "null"])
def test_what_is_no_launch_plan_is_refused(text: str) -> None:
    with pytest.raises(PlancError, match="is not a launch plan"):
        launches.from_json(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlancError, match=r"launches\.json cannot be read"):
        launches.load(tmp_path)
