"""Peers of benchmarks.accuracy: in go a model's name and its module in float32, out comes what gives logits.

A peer is a module (a copy, its linear layers but the head quantized), or a function from token ids to logits. One that
is not installed raises ImportError.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.peer_files import Files

Peer = Callable[[str, nn.Module, int], Any]


def linears(model: nn.Module) -> list[nn.Linear]:
    """Linear layers but the head, which all of these peers leave as it is."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]


def _weights_through(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    made = copy.deepcopy(model)
    with torch.no_grad():
        for layer in linears(made):
            layer.weight.copy_(change(layer.weight))
    return made


def nearest(name: str, model: nn.Module, window: int, *, group: int) -> nn.Module:
    """Round to nearest in 4 bits: a scale and a zero point for each group of input channels, nothing searched."""

    def change(w: torch.Tensor) -> torch.Tensor:
        size = next(g for g in (group, 64, 32) if w.shape[1] % g == 0)
        rows = w.reshape(-1, size)
        low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-12)
        zero = (-low / scale).round()
        return (((rows / scale).round() + zero).clamp(0, 15) - zero).mul(scale).reshape(w.shape)

    return _weights_through(model, change)


def fp8(name: str, model: nn.Module, window: int) -> nn.Module:
    """E4M3 by torch's own casts: weights by channel, activations by token, as FP8 kernels of GPUs have them."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    made = _weights_through(model, rounded)
    for layer in linears(made):
        layer.register_forward_pre_hook(lambda module, args: (rounded(args[0]), *args[1:]))
    return made


def torchao(name: str, model: nn.Module, window: int, *, config: str) -> nn.Module:
    """torchao's own quantization of the linear layers."""
    import torchao.quantization as ao

    made = copy.deepcopy(model)
    chosen = set(linears(made))
    ao.quantize_(made, getattr(ao, config)(), filter_fn=lambda module, _: module in chosen)
    return made


def gguf(name: str, model: nn.Module, window: int, *, kind: str) -> nn.Module:
    """llama.cpp's block format by the gguf package, weights only."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    kinds = GGMLQuantizationType[kind]

    def change(w: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.array(dequantize(quantize(w.numpy(), kinds), kinds))).reshape(w.shape)

    return _weights_through(model, change)


def llama_cpp(name: str, model: nn.Module, window: int, *, kind: str) -> Callable[[list[int]], np.ndarray]:
    """llama.cpp itself on its own file of the kind, made by it from the alias's GGUF file: head and activations too."""
    import llama_cpp as ll

    from planc.compiler.source.aliases import ALIASES, locate
    from planc.plans.host import cache_dir

    if name not in ALIASES:
        raise NotImplementedError("llama.cpp starts from a GGUF file, which this model has none of")
    out = cache_dir() / "models" / f"{name}-{kind}.gguf"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        _requantize(ll, locate(name), out, kind)
    engine = ll.Llama(str(out), n_ctx=window, n_batch=window, logits_all=True, verbose=False)

    def logits(ids: list[int]) -> np.ndarray:
        engine.reset()
        engine.eval(ids)
        return np.array(engine.scores[: len(ids)], np.float32)

    return logits


def llm_compressor(name: str, model: nn.Module, window: int, *, kind: str) -> nn.Module:
    """AWQ by llm-compressor, dequantized by transformers."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    path = _files("llm-compressor").get(name, "llm-compressor", kind)
    config = CompressedTensorsConfig(run_compressed=False)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config).eval()


def openvino(name: str, model: nn.Module, window: int, *, kind: str) -> Callable[[list[int]], np.ndarray]:
    """OpenVINO's own export, run as its CPU plugin does by default: activations of its products in 8 bits."""
    import openvino as ov

    compiled = ov.Core().compile_model(_files("openvino").get(name, "openvino", kind) / "openvino_model.xml", "CPU")

    def logits(ids: list[int]) -> np.ndarray:
        request, tokens = compiled.create_infer_request(), np.array([ids])
        given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "beam_idx": np.zeros(1, np.int32)}
        given["position_ids"] = np.arange(len(ids))[None]
        names = {n for port in compiled.inputs for n in port.names}
        return np.array(request.infer({n: v for n, v in given.items() if n in names})["logits"][0], np.float32)

    return logits


def _files(peer: str) -> Files:
    """Model files of benchmarks.vs_peers; ImportError when benchmarks/peers.sh has not installed the peer."""
    files = Files(Path("peers-venvs").resolve())
    if not files.has(peer):
        raise ImportError(f"benchmarks/peers.sh has not installed {peer} below {files.folder}")
    return files


def _requantize(ll: Any, source: Path, out: Path, kind: str) -> None:
    params = ll.llama_model_quantize_default_params()
    params.ftype = getattr(ll, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    partial_out = out.with_suffix(".partial")
    if ll.llama_model_quantize(str(source).encode(), str(partial_out).encode(), params):
        raise RuntimeError(f"llama.cpp could not make {kind} of {source.name}")
    partial_out.rename(out)


PEERS: dict[str, Peer] = {
    "rtn int4 g64": partial(nearest, group=64),
    "rtn int4 g128": partial(nearest, group=128),
    "torch fp8": fp8,
    "torchao fp8 weights": partial(torchao, config="Float8WeightOnlyConfig"),
    "torchao int8": partial(torchao, config="Int8DynamicActivationInt8WeightConfig"),
    "gguf Q8_0 weights": partial(gguf, kind="Q8_0"),
    "gguf Q4_0 weights": partial(gguf, kind="Q4_0"),
    "llama.cpp Q8_0": partial(llama_cpp, kind="Q8_0"),
    "llama.cpp Q4_0": partial(llama_cpp, kind="Q4_0"),
    "llama.cpp Q4_K_M": partial(llama_cpp, kind="Q4_K_M"),
    "openvino int8": partial(openvino, kind="int8"),
    "llm-compressor awq g64": partial(llm_compressor, kind="awq-g64"),
    "llm-compressor awq g128": partial(llm_compressor, kind="awq-g128"),
}
