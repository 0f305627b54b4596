"""What sides of benchmarks.vs_peers load: in go a model, a peer and a kind, out comes its file or folder, made once.

All are made from the same weights: planc's plans and llama.cpp's files from the source itself, those of the others from
a Hugging Face folder that holds them in bf16.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import build, load_weights
from planc import compiler

Maker = Callable[[str, str, Path, "Files"], None]


class Files:
    """Model files below `folder`, peers' venvs beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def python(self, peer: str) -> str:
        """The interpreter that has the peer; planc and transformers are in this one."""
        return sys.executable if peer in ("planc", "transformers") else str(self.folder / peer / "bin" / "python")

    def has(self, peer: str) -> bool:
        """Whether benchmarks/peers.sh has installed it."""
        return Path(self.python(peer)).exists()

    def get(self, model: str, peer: str, kind: str) -> Path:
        """What the peer loads of a model; RuntimeError with its last line when its tools do not make it."""
        maker, name = MAKERS[peer], _SHARED.get(peer) or f"{peer}-{kind}"
        out = self.folder / "models" / Path(model).name / name
        if not out.exists():
            print(f"making {out}", file=sys.stderr, flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = out.with_name(f"{name}.partial")
            maker(model, kind, partial, self)
            partial.rename(out)
        return out

    def tool(self, peer: str, *args: object) -> None:
        """Runs a module or file with the peer's interpreter."""
        command = [self.python(peer), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "it failed").splitlines()[-1])


def _plan(model: str, kind: str, out: Path, files: Files) -> None:
    build(model, out, "--dtype", kind)


def _hugging_face(model: str, kind: str, out: Path, files: Files) -> None:
    """The source's weights in bf16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from planc.compiler.source import open_source
    from planc.compiler.tokenizer import load_tokenizer

    with open_source(model) as source:
        built = AutoModelForCausalLM.from_config(source.config(), dtype=torch.bfloat16)
        load_weights(built, source)
        built.save_pretrained(out)
        load_tokenizer(source).save_pretrained(out)


def _llama_cpp(model: str, kind: str, out: Path, files: Files) -> None:
    """A GGUF file by llama.cpp's own quantizer."""
    from planc.compiler.source.aliases import ALIASES, locate

    source = locate(model) if model in ALIASES else Path(model)
    if source.suffix != ".gguf":
        raise RuntimeError("llama.cpp starts from a GGUF file, which this model has none of")
    files.tool("llama.cpp", "-c", _REQUANTIZE, source, out, f"LLAMA_FTYPE_MOSTLY_{kind}")


_REQUANTIZE = """
import sys, llama_cpp as ll
source, out, kind = sys.argv[1:]
params = ll.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = getattr(ll, kind), True
sys.exit(ll.llama_model_quantize(source.encode(), out.encode(), params))
"""


def _openvino(model: str, kind: str, out: Path, files: Files) -> None:
    source, flags = files.get(model, "transformers", "bfloat16"), ["--weight-format", kind]
    if kind == "int4":  # every layer in 4 bits, as the others do; the head and the embedding in 8
        flags += ["--group-size", "64", "--ratio", "1.0"]
    command = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--task", "text-generation-with-past")
    files.tool("openvino", *command, "--model", source, *flags, out)


def _onnxruntime(model: str, kind: str, out: Path, files: Files) -> None:
    source = files.get(model, "transformers", "bfloat16")
    flags = [] if kind == "fp32" else ["--extra_options", "block_size=64", "accuracy_level=4"]
    command = ("-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-c", files.folder / "models" / "cache")
    files.tool("onnxruntime", *command, "-i", source, "-o", out, "-p", kind, *flags)


def _llm_compressor(model: str, kind: str, out: Path, files: Files) -> None:
    """AWQ by llm-compressor in groups of `kind`, as a compressed checkpoint. Calibration sees the first 4,096 tokens of
    planc's own text: on two cores it takes half an hour for SmolLM2, and more than two for all of it.
    """
    source, text = files.get(model, "transformers", "bfloat16"), Path(compiler.__file__).with_name("data") / "calib.txt"
    files.tool("llm-compressor", "-c", _AWQ, source, text, kind.removeprefix("awq-g"), out)


_AWQ = """
import sys
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
source, text, group, out = sys.argv[1:]
torch.Tensor.pin_memory = lambda self, *_: self  # of a machine without a GPU
tokenizer = AutoTokenizer.from_pretrained(source)
ids = tokenizer(open(text, encoding="utf-8").read(), add_special_tokens=False)["input_ids"]
rows = [ids[i : i + 512] for i in range(0, 4096, 512)]
weights = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=int(group))
scheme = QuantizationScheme(targets=["Linear"], weights=weights)
oneshot(
    model=AutoModelForCausalLM.from_pretrained(source, dtype="float32"), tokenizer=tokenizer,
    dataset=Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 512 for _ in rows]}),
    recipe=[AWQModifier(), QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])],
    max_seq_length=512, num_calibration_samples=len(rows), output_dir=out,
)
"""

_SHARED = {"transformers": "huggingface", "vllm": "huggingface"}
MAKERS: dict[str, Maker] = {
    "planc": _plan,
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
    "llm-compressor": _llm_compressor,
    "transformers": _hugging_face,
    "vllm": _hugging_face,
}
