"""A .gguf file becomes a ModelSource with transformers' names and layouts; one tensor is dequantized at a time.

Config, tensor names and tensor layouts are transformers' own knowledge (modeling_gguf_pytorch_utils), which loads whole
files; here the bytes of one tensor are read by offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from planc.compiler.source import gguf_blocks
from planc.compiler.source.base import (
    DTYPES,
    ModelSource,
    TensorInfo,
    new_model,
    normalize_generation,
    one_line,
    part_of,
)
from planc.compiler.source.files import SpanReader
from planc.compiler.source.gguf_config import load_config
from planc.compiler.source.gguf_header import GGUFTensor, corrupt, read_header
from planc.compiler.source.quantized.packed import NotFiniteError, Packed
from planc.errors import PlancError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Elements dequantized at a time; gguf works through several temporaries of this size.
_CHUNK = 1 << 19
_PLAIN = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Read into the config, not into a parameter.
_CONFIG_TENSORS = {"rope_freqs.weight"}


class GGUFSource(ModelSource):
    """A GGUF file. f16 and bf16 matrices keep their type; vectors, fused and quantized tensors read as f32. Matrices
    whose codes a scheme holds show these too.
    """

    requantizes = True

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path, self.name = path, name or path.stem
        self.header = read_header(path)
        self.architecture: str = self.header.metadata.get("general.architecture", "")
        if not isinstance(self.architecture, str) or not self.architecture:
            raise corrupt(path, "its metadata has no general.architecture")
        self._check_types()
        self._file = SpanReader(path)
        try:
            self._config = load_config(path, self.header, self.architecture, self._raw_vector)
            self._map_tensors()
        except BaseException:
            self._file.close()
            raise

    def config(self) -> PretrainedConfig:
        return self._config

    def read(self, name: str) -> np.ndarray[Any, Any]:
        plain, part = part_of(name)
        if part and plain in self._packed:
            return self._part(plain, part)
        if name not in self.tensors:
            raise PlancError(f"{self.path} has no tensor {name}; it has {len(self.tensors)} others.")
        stored = {part: self.header.tensors[part] for part in self._parts[name]}
        return self._checked(name, self._processed(name, stored), self.tensors[name].shape)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Of a stack of experts, those alone: no processing mixes experts."""
        if part_of(name)[0] in self._packed:
            return self.read(name)[start:stop]
        stored = {part: self.header.tensors[part] for part in self._parts.get(name, [])}
        info = self.tensors.get(name)
        if info is None or any(len(t.shape) != 3 or t.shape[0] != info.shape[0] for t in stored.values()):
            return self.read(name)[start:stop]
        some = {part: _rows(tensor, start, stop) for part, tensor in stored.items()}
        return self._checked(name, self._processed(name, some), (stop - start, *info.shape[1:]))

    def _part(self, plain: str, part: str) -> np.ndarray[Any, Any]:
        try:
            return self._packed[plain].part(part)
        except NotFiniteError as e:
            raise PlancError(f"{self.path}: tensor {plain} is damaged: {e}. Fetch the file again.") from None

    def _checked(self, name: str, made: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        array = np.ascontiguousarray(made, DTYPES[self.tensors[name].dtype])
        if array.shape != shape:
            raise PlancError(f"{self.path}: tensor {name} has shape {array.shape}, the config implies {shape}.")
        return array

    def generation_config(self) -> dict[str, Any]:
        ids = {key: self.header.metadata.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", *_EOS_KEYS)}
        eos = [token for key in _EOS_KEYS if (token := ids[key]) is not None]
        pad = self.header.metadata.get("tokenizer.ggml.padding_token_id")
        return normalize_generation({"bos_token_id": ids["bos_token_id"], "eos_token_id": eos, "pad_token_id": pad})

    def close(self) -> None:
        self._file.close()

    def _check_types(self) -> None:
        kinds = {tensor.ggml_type: name for name, tensor in self.header.tensors.items()}
        for kind, name in kinds.items():
            if not dequantizable(kind):
                raise PlancError(
                    f"{self.path}: tensor {name} has type {_type_name(kind)}, which the gguf package cannot "
                    "dequantize. Use another quantization of the model."
                )

    def _raw_vector(self, name: str) -> np.ndarray[Any, Any]:
        return dequantize_span(self._file, self.header.tensors[name])

    def _map_tensors(self) -> None:
        """Fills `tensors`, and for each the GGUF tensors that make it; what no parameter takes keeps its GGUF name."""
        model = new_model(self._config)
        self._processor, self._names = name_map(model, self._config, self.architecture)
        self._parts: dict[str, list[str]] = {}
        for raw in self.header.tensors:
            if raw not in _CONFIG_TENSORS:
                # a stack of experts is a parameter of its own in transformers, without `.weight`
                name = self._names.get(raw) or self._names.get(raw.removesuffix(".weight"), raw)
                self._parts.setdefault(name, []).append(raw)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.tensors = {name: self._info(parts, expected.get(name)) for name, parts in self._parts.items()}
        self._packed = {name: packed for name, parts in self._parts.items() if (packed := self._held(name, parts))}
        self.native = {name: packed.scheme for name, packed in self._packed.items() if packed.scheme}
        self.notes = tuple(self._left())
        for name, packed in self._packed.items():
            self.tensors |= {f"{name}:{part}": info for part, info in packed.parts.items()}

    def _left(self) -> Iterator[str]:
        """What no scheme holds of what the file has quantized."""
        left: dict[str, list[str]] = {}
        for name, parts in self._parts.items():
            kind = _type_name(self.header.tensors[parts[0]].ggml_type)
            if kind not in _PLAIN and name not in self._packed:
                left.setdefault(kind, []).append(name)
        for kind, names in left.items():
            what = "no scheme holds such blocks, or not of such a tensor, so they are dequantized"
            yield f"{len(names)} weights are {kind}, first {names[0]}: {what}"

    def _held(self, name: str, parts: list[str]) -> Packed | None:
        """The codes of a matrix whose rows the processor only moves, if a scheme holds them."""
        tensor = self.header.tensors[parts[0]]
        if len(parts) > 1 or tensor.shape != self.tensors[name].shape or not gguf_blocks.scheme_of(tensor):
            return None
        try:
            order = gguf_blocks.row_order(lambda numbers: self._process(parts[0], numbers), tensor.shape[0])
        except ValueError:
            return None
        return gguf_blocks.packed(self._file, tensor, order)

    def _process(self, part: str, weights: np.ndarray[Any, Any]) -> Any:
        return self._processor.process(
            weights=weights, name=part, tensor_key_mapping=self._names, parsed_parameters={"tensors": {}}
        ).weights

    def _info(self, parts: list[str], expected: tuple[int, ...] | None) -> TensorInfo:
        """The shape after the processor's reshaping: the parameter's if the sizes agree, else the file's own."""
        stored = [self.header.tensors[part] for part in parts]
        same_size = expected is not None and prod(expected) == sum(prod(tensor.shape) for tensor in stored)
        shape = expected if expected is not None and same_size else stored[0].shape
        matrix = len(stored) == 1 and len(stored[0].shape) == 2
        return TensorInfo(_PLAIN.get(_type_name(stored[0].ggml_type), "f32") if matrix else "f32", shape)

    def _processed(self, name: str, stored: dict[str, GGUFTensor]) -> np.ndarray[Any, Any]:
        """Runs transformers' processor (un-permute, norm offset, fuse experts) over the parts of one tensor."""
        load = dequantize_span if self.tensors[name].dtype == "f32" else _plain_span
        fused: dict[str, Any] = {}
        array: np.ndarray[Any, Any] | None = None
        for part, tensor in stored.items():
            result = self._processor.process(
                weights=load(self._file, tensor),
                name=part,
                tensor_key_mapping=self._names,
                parsed_parameters={"tensors": fused},
            )
            array = result.weights if result.name is not None else array
        if array is None:
            return fused[name].numpy()
        return array


class _Names:
    """As much of a model as transformers' name map looks at: config, parameter names, direct children.

    The real module would be walked to its leaves, with a new table of all layers' names at each (minutes for 80
    layers); names are matched from the root or, for checkpoints of a base model (bloom), from its child.
    """

    def __init__(self, config: PretrainedConfig, module: Any, children: bool = True) -> None:
        self.config, self._state = config, module.state_dict()
        self._children = [(name, _Names(config, c, False)) for name, c in module.named_children()] if children else []

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def named_children(self) -> list[tuple[str, _Names]]:
        return self._children


def name_map(model: Any, config: PretrainedConfig, architecture: str) -> tuple[Any, dict[str, str]]:
    """transformers' tensor processor for a GGUF architecture, and its map from GGUF tensor names to parameter names."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    try:
        return processor, get_gguf_hf_weights_map(_Names(config, model), processor)
    except NotImplementedError as e:
        raise PlancError(
            f"GGUF architecture {architecture}: {one_line(e)} Use the model's Hugging Face folder."
        ) from None


def dequantizable(ggml_type: int) -> bool:
    """Whether the gguf package turns this type into float32."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(ggml_type)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _type_name(ggml_type: int) -> str:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(ggml_type).name


def _rows(tensor: GGUFTensor, start: int, stop: int) -> GGUFTensor:
    """The span of some of a tensor's rows along its first axis."""
    row = tensor.nbytes // tensor.shape[0]
    shape = (stop - start, *tensor.shape[1:])
    return GGUFTensor(shape, tensor.ggml_type, tensor.offset + start * row, (stop - start) * row)


def _plain_span(file: SpanReader, tensor: GGUFTensor) -> np.ndarray[Any, Any]:
    dtype = DTYPES[_PLAIN[_type_name(tensor.ggml_type)]]
    return file.read(tensor.offset, tensor.nbytes).view(dtype).reshape(tensor.shape)


def dequantize_span(file: SpanReader, tensor: GGUFTensor) -> np.ndarray[Any, Any]:
    """float32 of the file's shape, a chunk of blocks at a time, so that memory is the result plus a few MiB."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.ggml_type)
    if kind == GGMLQuantizationType.F32:
        return _plain_span(file, tensor)
    block, size = GGML_QUANT_SIZES[kind]
    out = np.empty(prod(tensor.shape), np.float32)
    blocks, step = out.size // block, max(_CHUNK // block, 1)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        chunk = file.read(tensor.offset + first * size, (last - first) * size)
        out[first * block : last * block] = dequantize(chunk.reshape(1, -1), kind).reshape(-1)
    return out.reshape(tensor.shape)
