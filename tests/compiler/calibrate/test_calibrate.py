"""Calibration as a whole: the same choices each time, logits nearer to the model's, and what it must leave alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planc.compiler.calibrate import Calibration, CalibrationText, calibrate
from planc.compiler.ir.hadamard import block
from planc.compiler.ir.interp import execute, weights_of
from planc.compiler.ir.quant import quantize_rows, scheme
from planc.compiler.progress import Progress
from planc.errors import PlancError
from planc.passes import pipeline
from planc.passes.choices import Choices
from planc.passes.migrate import migrate
from planc.passes.options import Options
from planc.passes.schemes import QuantConfig
from planc.passes.sites import weight_of
from tests.lifted import Lifted, inputs, lifted
from tests.models import tiny
from tests.passes.test_pipeline import options

FIRST = [p.name for p in pipeline.PIPELINE].index("migrate")
TEXT = CalibrationText(
    "x", "", tuple(np.random.default_rng(i).integers(3, 300, 128).astype(np.int32) for i in range(8))
)


def prepared(path: Path, arch: str, given: Options, **config: int) -> Lifted:
    """A model of which some channels behind norms are far larger than others, as those of trained models are."""
    model = lifted(tiny(arch, path, **config))
    read = model.source.read

    def uneven(name: str) -> np.ndarray:
        array = read(name)
        if array.ndim > 1 or "norm" not in name:
            return array
        noise = np.random.default_rng(len(name)).standard_normal(array.shape)
        return array + (np.exp(noise) - 1).astype(
            array.dtype
        )  # weights of norms have the mean 1, or 0 and then 1 added

    model.source.read = uneven  # type: ignore[method-assign]
    model.source.read_rows = lambda name, start, stop: uneven(name)[start:stop]  # type: ignore[method-assign]
    return replace(model, graph=pipeline.run(model.graph, given, pipeline=pipeline.PIPELINE[:FIRST])[0])


def calibrated(model: Lifted, given: Options) -> Calibration:
    return calibrate(model.graph, model.source, given, TEXT, Progress(quiet=True))


def errors(model: Lifted, given: Options, choices: Choices) -> list[float]:
    """Of each product, what rounding changes in its results for text that calibration did not see, relative to them."""
    graph, _ = migrate(model.graph, replace(given, choices=choices))
    weights = weights_of(graph, model.source.read, graph.constants)
    ids = np.random.default_rng(99).integers(3, 300, 90)
    env = {**inputs(graph, ids, list(range(90))), **weights}
    found = []
    for n in graph.nodes:
        execute(n, env, graph)
        if n.op == "linear" and str(n.attr("store")) == given.dtype:
            clip = choices.clips.get(weight_of(n))
            shift = choices.shifts.get(weight_of(n))
            outliers = choices.outliers.get(weight_of(n))
            got = rounded(env[n.inputs[0]], weights[weight_of(n)], clip, shift, given.dtype, outliers)
            got += weights[n.inputs[2]] if n.attr("bias", False) else 0
            want = env[n.out.name] - choices.offsets.get(n.out.name, np.float32(0))
            found.append(float(np.square(got - want).sum() / np.square(env[n.out.name]).sum()))
    return found


def rounded(
    x: np.ndarray,
    w: np.ndarray,
    clip: np.ndarray | None,
    shift: np.ndarray | None,
    name: str,
    outliers: np.ndarray | None,
) -> np.ndarray:
    """x @ w.T as the scheme computes it."""
    row = scheme(name)
    size = block(w.shape[1]) if row.turns else 1
    if row.act:
        codes, scale = quantize_rows(x, row.act, size, shift, outliers, row.rows_group)
        x = codes * (scale[:, None] if row.rows_group is None else np.repeat(scale, row.rows_group, axis=1))
    return np.asarray(x @ row.dequantize(*(row.part(w, p, clip, size, outliers) for p in row.parts)).T)


CASES = [("llama", "awq-g32"), ("gemma3_text", "awq-g32"), ("qwen2", "int8"), ("llama", "fp8"), ("gpt2", "fp8-block")]
CASES += [("llama", "int4-g32")]


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_products_lose_less_and_choices_are_the_same_again(arch: str, name: str, tmp_path: Path) -> None:
    given = options(dtype=name)
    model = prepared(tmp_path, arch, given)
    found = calibrated(model, given)
    assert found.products == 8 + name.startswith("int4")  # and its head, in int8
    assert bool(found.choices.scales) == (not name.startswith("fp8"))
    assert bool(found.choices.clips) == (name.startswith(("awq", "int4")) or name == "fp8")
    assert bool(found.choices.shifts) == name.startswith("fp8")
    assert bool(found.choices.offsets) == (name != "int8")
    before, after = errors(model, given, Choices()), errors(model, given, found.choices)
    ratios = np.array(after) / before
    assert ratios.max() < 1.02
    assert ratios.mean() < (0.9 if name == "int8" else 0.75)
    again = calibrated(model, given).choices
    for one, other in zip(vars(found.choices).values(), vars(again).values(), strict=True):
        assert one.keys() == other.keys()
        assert all((one[k] == other[k]).all() for k in one)


def test_features_that_stand_out_get_a_second_digit(tmp_path: Path) -> None:
    given = options(dtype="fp8")
    model = prepared(tmp_path, "llama", given, hidden_size=256, intermediate_size=288)
    choices = calibrated(model, given).choices
    assert {len(found) for found in choices.outliers.values()} == {32}
    assert all(model.graph.types[name].shape[-1] == 288 for name in choices.outliers)  # of 256, 64 would be a quarter
    pairs = zip(errors(model, given, choices), errors(model, given, replace(choices, outliers={})), strict=True)
    ratios = [one / other for one, other in pairs if one != other]
    assert len(ratios) == len(choices.outliers) > 0
    assert max(ratios) < 0.8
    graph, _ = pipeline.run(model.graph, replace(given, choices=choices), pipeline=pipeline.PIPELINE[FIRST:])
    rows = [n for n in graph.nodes if "quantize" in n.op and "i32" in {graph.types[i].dtype for i in n.inputs}]
    assert [n.out.type.shape[-1] for n in rows] == [288 + 64] * len(choices.outliers)


def test_a_weight_whose_rows_an_embedding_reads_has_no_second_digits(tmp_path: Path) -> None:
    quant = QuantConfig("bf16", kinds={"head": "fp8", "embedding": "fp8"})
    given = options(dtype="fp8", quant=quant)
    model = prepared(tmp_path, "gemma3_text", given, hidden_size=576, head_dim=32)
    (table,) = (n.inputs[0] for n in model.graph.nodes if n.op == "embedding")
    assert {n.op for n in model.graph.users[table]} == {"embedding", "linear"}
    choices = calibrated(model, given).choices
    assert table in choices.clips
    assert not choices.outliers
    pipeline.run(model.graph, replace(given, choices=choices), pipeline=pipeline.PIPELINE[FIRST:])


def test_experts_are_calibrated_matrix_by_matrix(tmp_path: Path) -> None:
    given = options(dtype="awq-g32")
    model = prepared(tmp_path, "mixtral", given, intermediate_size=128)
    found = calibrated(model, given)
    assert found.products == 8  # q k v, o, and both of the experts, in each of two layers
    assert found.choices.clips["l0.mlp.experts.gate_up_proj"].shape == (4, 3, 256)
    assert found.choices.offsets["l0.mlp.experts.expert_linear"].shape == (4, 256)
    assert not [n for n in found.choices.offsets if n.endswith("experts.expert_linear.2")]  # slots have no one mean
    pipeline.run(model.graph, replace(given, choices=found.choices), pipeline=pipeline.PIPELINE[FIRST:])


def test_a_model_without_such_schemes_is_not_run(tmp_path: Path) -> None:
    given = options(dtype="int8-wo")
    model = prepared(tmp_path, "llama", given)
    assert calibrated(model, given) == Calibration(Choices(), 0, ())


def test_inputs_that_no_scale_reaches_are_told(tmp_path: Path) -> None:
    given = options(dtype="awq-g32")
    model = prepared(tmp_path, "gpt2", given)
    found = calibrated(model, given)
    assert found.unscaled == ("transformer.h.0.mlp.c_proj", "transformer.h.1.mlp.c_proj")  # behind a gelu
    assert {"h0.mlp.c_proj.weight", "h0.attn.c_attn.weight"} <= {
        n.replace("transformer.", "") for n in found.choices.clips
    } or found.choices.clips


def test_weights_that_the_checkpoint_holds_in_codes_stay(tmp_path: Path) -> None:
    native = {f"model.layers.0.mlp.{n}_proj.weight": "awq-g32" for n in ("gate", "up", "down")}
    given = options(dtype="awq-g32", quant=QuantConfig("awq-g32", native=native))
    model = prepared(tmp_path, "llama", given)
    found = calibrated(model, given).choices
    assert not [name for name in (*found.scales, *found.clips, *found.offsets) if name.startswith("l0.mlp")]
    assert "l0.post_attention_layernorm.mul.2" not in found.scales
    assert "l1.mlp.down_proj.weight" in found.clips


def test_an_activation_that_is_not_finite_is_named(tmp_path: Path) -> None:
    given = options(dtype="awq-g32")
    model = prepared(tmp_path, "llama", given)
    read, huge = model.source.read, np.float32(3e38)

    def spoilt(name: str) -> np.ndarray:
        array = read(name)
        return array * 0 + huge if name == "model.layers.0.mlp.up_proj.weight" else array

    model.source.read = spoilt  # type: ignore[method-assign]
    model.source.read_rows = lambda name, start, stop: spoilt(name)[start:stop]  # type: ignore[method-assign]
    with pytest.raises(
        PlancError, match=r"what model\.layers\.0\.mlp\.down_proj reads holds NaN or infinity \(%l0\.mlp"
    ):
        calibrated(model, given)
