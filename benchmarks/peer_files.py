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


_SHARED = {"transformers": "huggingface", "vllm": "huggingface"}
MAKERS: dict[str, Maker] = {
    "planc": _plan,
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
    "transformers": _hugging_face,
    "vllm": _hugging_face,
}
