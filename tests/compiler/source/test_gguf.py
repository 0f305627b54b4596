"""GGUF files: layouts, types and configs come out as transformers has them; damage is one clear line."""

import contextlib
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.recipe import evaluate
from planc.compiler.ir.types import DTYPES
from planc.compiler.source import bind, gguf_blocks, new_model, open_source
from planc.compiler.source.files import SpanReader
from planc.compiler.source.gguf import GGUFSource, dequantizable, dequantize_span
from planc.compiler.source.gguf_config import llama3_parameters
from planc.compiler.source.gguf_header import GGUFTensor, outline, read_header, shortest
from planc.errors import PlancError
from tests.compiler.source.gguf_files import write, write_experts
from tests.compiler.source.quantized.checks import check_parts
from tests.models import tiny
from tests.moe import MOE

Type = gguf.GGMLQuantizationType
DEQUANTIZABLE = [kind for kind in Type if dequantizable(kind)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("llama"), tokenizer=False, rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def sound(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "model.gguf"
    write(llama, path)
    return path.read_bytes()


def opens(path: Path, data: bytes) -> GGUFSource:
    path.write_bytes(data)
    source = open_source(str(path))
    assert isinstance(source, GGUFSource)
    return source


def fails(path: Path, *words: str) -> None:
    with pytest.raises(PlancError) as caught:
        open_source(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_1], ids=lambda kind: kind.name)
def test_llama_reads_as_the_original(llama: Path, tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """q and k come back un-permuted, float matrices keep their type, the rest is float32."""
    expected = write(llama, tmp_path / "model.gguf", kind)
    with open_source(str(tmp_path / "model.gguf")) as source:
        binding = bind(new_model(source.config()), source)
        assert binding.unused == []
        for name, weights in expected.items():
            array = source.read(binding.recipe(name).loads[0])
            assert array.shape == source.tensors[name].shape == weights.shape
            assert array.flags.writeable
            assert array.flags.c_contiguous
            np.testing.assert_array_equal(array.astype(np.float32), weights)
        stored = {Type.F16: "f16", Type.BF16: "bf16"}.get(kind, "f32")
        assert source.tensors["model.embed_tokens.weight"].dtype == stored
        assert source.tensors["model.norm.weight"].dtype == "f32"


@pytest.mark.parametrize("arch", ["qwen2", "gemma2"])
def test_other_architectures_read_as_the_original(arch: str, tmp_path: Path) -> None:
    """qwen2: biases. gemma2: norms are stored plus one, the head is tied, soft caps and window are in the metadata."""
    folder = tiny(arch, tmp_path, tokenizer=False)
    expected = write(folder, tmp_path / "model.gguf")
    with open_source(str(tmp_path / "model.gguf")) as source, open_source(str(folder)) as original:
        assert bind(new_model(source.config()), source).unused == []
        for name, weights in expected.items():
            np.testing.assert_array_equal(source.read(name), weights)
        for field in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "tie_word_embeddings"):
            assert getattr(source.config(), field, None) == getattr(original.config(), field, None), field


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2"])
def test_equals_the_whole_file_loader(arch: str, tmp_path: Path) -> None:
    """Every tensor is bitwise what transformers makes of a quantized file when it loads all of it."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    write(tiny(arch, tmp_path, tokenizer=False), tmp_path / "model.gguf", Type.Q4_0)
    with open_source(str(tmp_path / "model.gguf")) as source:
        model = new_model(source.config())
        loaded = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=model)["tensors"]
        assert set(loaded) == set(source.plain_names)
        for name, tensor in loaded.items():
            np.testing.assert_array_equal(source.read(name), tensor.numpy())


HELD = {Type.Q4_0: "int4-wo-g32", Type.Q4_1: "q4_1", Type.Q5_0: "q8_0", Type.Q8_0: "q8_0"}


@pytest.mark.parametrize("kind", HELD, ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2"])
def test_codes_are_kept(arch: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Rows of q and k that the file permutes are put back in order, the codes as the floats."""
    folder = tiny(arch, tmp_path, tokenizer=False)
    write(folder, tmp_path / "model.gguf", kind)
    with open_source(str(tmp_path / "model.gguf")) as source, open_source(str(folder)) as original:
        matrices = [name for name, info in original.tensors.items() if len(info.shape) == 2]
        assert dict(source.native) == dict.fromkeys(matrices, HELD[kind])
        assert bind(new_model(source.config()), source).unused == []
        check_parts(source)


@pytest.mark.parametrize("kind", [*HELD, Type.Q4_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_any_block_is_what_gguf_makes_of_it(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Blocks of random bytes; in some the scale is zero, or all of them are the group's minimum."""
    rng = np.random.default_rng(0)
    width = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (6, 4, width), np.uint8)
    halves = {Type.Q6_K: [208]}.get(kind, [0, 2] if kind in (Type.Q4_1, Type.Q4_K) else [0])
    for at in halves:
        blocks[..., at : at + 2] = rng.normal(0, 0.01, (6, 4, 1)).astype("<f2").view(np.uint8)
    blocks[3, :, halves[0] : halves[0] + 2] = 0
    blocks[4, 1, halves[-1] : halves[-1] + 2] = 0
    path = tmp_path / "blocks"
    path.write_bytes(blocks.tobytes())
    want = gguf.quants.dequantize(blocks.reshape(6, -1), kind)
    order = np.array([5, 0, 1, 2, 4, 3])
    with contextlib.closing(SpanReader(path)) as file:
        held = gguf_blocks.packed(file, GGUFTensor(want.shape, kind, 0, blocks.nbytes), order)
        assert held.scheme is not None
        row = SCHEMES[held.scheme]
        made = row.dequantize(*(held.part(p) for p in row.parts))
        np.testing.assert_allclose(made, want[order], rtol=0, atol=1e-6 * np.abs(want).max())
        np.testing.assert_array_equal(held.floats(1, 3), made[1:3])
        assert held.part("q").dtype == DTYPES[row.codes]


def test_codes_that_no_scheme_holds_are_floats_alone(tmp_path: Path) -> None:
    write(tiny("llama", tmp_path, tokenizer=False), tmp_path / "m.gguf", Type.Q5_1)
    with open_source(str(tmp_path / "m.gguf")) as source:
        assert source.native == {}
        assert "16 weights are Q5_1, first lm_head.weight: no scheme holds such blocks" in source.notes[0]


@pytest.mark.parametrize(
    ("kind", "byte", "number", "part", "words"),
    [(Type.Q4_0, 0, np.nan, "s", "its sca"), (Type.Q4_1, 2, np.inf, "z", "its zero points")],
    ids=["scale", "minimum"],
)
def test_what_is_not_a_number_is_named(
    kind: gguf.GGMLQuantizationType, byte: int, number: float, part: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write(tiny("llama", tmp_path, tokenizer=False), path, kind)
    with GGUFSource(path) as source:
        at = source.header.tensors["blk.1.ffn_up.weight"].offset + byte
    data = bytearray(path.read_bytes())
    data[at : at + 2] = np.array([number], "<f2").tobytes()
    path.write_bytes(data)
    with (
        GGUFSource(path) as source,
        pytest.raises(PlancError, match=rf"layers.1.mlp.up_proj.weight is damaged: {words}"),
    ):
        source.read(f"model.layers.1.mlp.up_proj.weight:{part}")


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
def test_stacks_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: gguf.GGMLQuantizationType) -> None:
    """gate and up lie apart in the file, one tensor each; some experts are read without the others."""
    from transformers import AutoModelForCausalLM

    fields = MOE["qwen3_moe"] | dict(moe_intermediate_size=64, mlp_only_layers=[], num_hidden_layers=2)
    folder = tiny("qwen3_moe", tmp_path, tokenizer=False, **fields)
    state = {name: t.numpy() for name, t in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
    write_experts(folder, tmp_path / "model.gguf", state, kind)
    with open_source(str(tmp_path / "model.gguf")) as source:
        binding = bind(new_model(source.config()), source)
        assert binding.unused == []
        for name, weights in state.items():
            made = evaluate(binding.recipe(name), source.read, {})
            if weights.ndim < 3 or kind == Type.F32:
                np.testing.assert_array_equal(made, weights)
                continue
            assert np.abs(made - weights).max() < np.abs(weights).max() / 100
            monkeypatch.setattr(source, "read", lambda name: pytest.fail(f"all of {name} was read"))
            np.testing.assert_array_equal(source.read_rows(binding.recipe(name).loads[0], 1, 3), made[1:3])
            monkeypatch.undo()
        np.testing.assert_array_equal(source.read_rows("lm_head.weight", 2, 9), state["lm_head.weight"][2:9])


@pytest.mark.parametrize("kind", DEQUANTIZABLE, ids=lambda kind: kind.name)
@np.errstate(all="ignore")
def test_every_type_dequantizes_as_gguf_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: gguf.GGMLQuantizationType
) -> None:
    """Random blocks, read from an offset in chunks of three blocks."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    monkeypatch.setattr("planc.compiler.source.gguf._CHUNK", 3 * block)
    data = np.random.default_rng(0).integers(0, 256, (5, 2 * size), dtype=np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(b"before" + data.tobytes())
    file = SpanReader(path)
    read = dequantize_span(file, GGUFTensor((5, 2 * block), kind, 6, data.nbytes))
    file.close()
    np.testing.assert_array_equal(read, gguf.dequantize(data, kind).reshape(5, 2 * block))


def test_types_cover_the_common_files() -> None:
    names = {kind.name for kind in DEQUANTIZABLE}
    assert names >= {
        "F32",
        "F16",
        "BF16",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
    }
    assert names >= {"IQ4_NL", "IQ4_XS", "IQ2_XS", "IQ3_S", "TQ1_0", "MXFP4"}


def test_config_has_the_shortest_decimals(sound: bytes, tmp_path: Path) -> None:
    config = opens(tmp_path / "model.gguf", sound).config()
    assert config.rms_norm_eps == 1e-5
    assert config.vocab_size == 330
    assert config.architectures == ["LlamaForCausalLM"]
    assert not config.tie_word_embeddings
    assert shortest(struct.unpack("<f", struct.pack("<f", 0.1))[0]) == 0.1


def test_generation_config_has_every_end_token(llama: Path, tmp_path: Path) -> None:
    write(llama, tmp_path / "model.gguf", extra={"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2})
    generation = open_source(str(tmp_path / "model.gguf")).generation_config()
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 9], "pad_token_id": 0}


def test_yarn_survives(llama: Path, tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    write(llama, tmp_path / "model.gguf", extra={f"llama.rope.scaling.{key}": value for key, value in scaling.items()})
    rope = open_source(str(tmp_path / "model.gguf")).config().rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 64)


def test_llama3_scaling_is_recovered_from_its_tensor(llama: Path, tmp_path: Path) -> None:
    """The divisors that llama.cpp stores, made here as transformers computes inverse frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=stated)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    divisors = (10000.0 ** (-np.arange(64) / 64) / scaled).astype(np.float32)
    assert llama3_parameters(divisors, 10000.0) == {k: v for k, v in stated.items() if k != "rope_theta"}
    with pytest.raises(PlancError, match="Llama 3"):
        llama3_parameters(divisors * np.linspace(1, 2, 64, dtype=np.float32), 10000.0)
    write(llama, tmp_path / "model.gguf", tensors={"rope_freqs.weight": np.full(8, 3, np.float32)})
    fails(tmp_path / "model.gguf", "rope_freqs.weight")


def test_what_the_loader_would_drop_is_refused(llama: Path, tmp_path: Path) -> None:
    write(llama, tmp_path / "model.gguf", extra={"llama.attention.sliding_window": 4})
    fails(tmp_path / "model.gguf", "llama.attention.sliding_window", "Hugging Face folder")
    write(llama, tmp_path / "long.gguf", extra={"llama.rope.scaling.type": "longrope"})
    fails(tmp_path / "long.gguf", "longrope")


def test_unmapped_tensors_are_unused(llama: Path, tmp_path: Path) -> None:
    write(llama, tmp_path / "model.gguf", tensors={"blk.9.strange": np.zeros(3, np.float32)})
    source = open_source(str(tmp_path / "model.gguf"))
    assert bind(new_model(source.config()), source).unused == ["blk.9.strange"]


def test_missing_tensor_is_named(llama: Path, sound: bytes, tmp_path: Path) -> None:
    source = opens(tmp_path / "model.gguf", sound.replace(b"blk.0.attn_v.weight", b"blk.0.attn_V.weight"))
    with pytest.raises(PlancError, match=r"lacks 1 .*model\.layers\.0\.self_attn\.v_proj\.weight"):
        bind(new_model(source.config()), source)


def test_unknown_architecture(sound: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(sound.replace(b"llama", b"lllll"))
    fails(tmp_path / "model.gguf", "lllll", "Hugging Face folder")


def _renumber(sound: bytes, kind: int) -> bytes:
    """The last tensor's ggml type replaced."""
    position = sound.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    return sound[:position] + struct.pack("<I", kind) + sound[position + 4 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], tuple[str, ...]]] = {
    "empty": (lambda data: b"", ("magic",)),
    "magic": (lambda data: b"GGML" + data[4:], ("magic",)),
    "version": (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], ("version is 9",)),
    "tensor count": (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], ("sound",)),
    "string length": (lambda data: data[:24] + struct.pack("<Q", 1 << 62) + data[32:], ("leave the file",)),
    "head cut": (lambda data: data[:500], ("leave the file",)),
    "data cut": (lambda data: data[:-400], ("truncated", "tensor")),
    "unknown type": (lambda data: _renumber(data, 999), ("output_norm.weight", "999")),
    "type that nothing dequantizes": (lambda data: _renumber(data, int(Type.I32)), ("output_norm.weight", "I32")),
    "no architecture": (
        lambda data: data.replace(b"general.architecture", b"general.Architecture"),
        ("general.architecture",),
    ),
    "no embedding": (lambda data: data.replace(b"token_embd", b"token_embD"), ("token_embd.weight",)),
    "not utf-8": (
        lambda data: data.replace(b"general.architecture", b"general.archi\xff\xff\xff\xff\xff\xff\xff"),
        ("UTF-8",),
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage(sound: bytes, tmp_path: Path, kind: str) -> None:
    change, words = DAMAGES[kind]
    (tmp_path / "model.gguf").write_bytes(change(sound))
    fails(tmp_path / "model.gguf", "model.gguf", *words)


def test_missing_file(tmp_path: Path) -> None:
    fails(tmp_path / "none.gguf", "none.gguf", "does not exist")


def test_random_damage_never_escapes(sound: bytes, tmp_path: Path) -> None:
    """Flipped bytes anywhere in the head: a header or a PlancError, nothing else, and soon."""
    rng, path = random.Random(0), tmp_path / "model.gguf"
    end = min(tensor.offset for tensor in _header(path, sound).tensors.values())
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(end)] = rng.randrange(256)
        with contextlib.suppress(PlancError):
            _header(path, bytes(data))


def _header(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    return read_header(path)


def test_outline_is_small_and_keeps_names(sound: bytes, tmp_path: Path) -> None:
    header = _header(tmp_path / "model.gguf", sound)
    again = _header(tmp_path / "outline.gguf", outline(header))
    assert list(again.tensors) == list(header.tensors)
    assert again.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
    assert "tokenizer.ggml.tokens" not in again.metadata
