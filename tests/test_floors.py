"""Imports only go down, and each floor takes only the third-party packages that it may."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "planc"

# Folder or file -> what of planc it may import, and which third-party packages. The longest key that fits counts.
IR = ("planc.compiler.ir", "planc.errors")
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "errors.py": ((), ()),
    "__init__.py": ((), ()),
    "plans": (("planc.plans", "planc.errors"), ("numpy",)),
    "compiler/ir": (IR, ("numpy", "ml_dtypes")),
    "compiler/onnx_export": (
        (
            "planc.compiler.onnx_export",
            "planc.compiler.progress",
            "planc.passes",
            "planc.plans",
            "planc.runtime.cpu",
            "planc.__version__",
            *IR,
        ),
        ("numpy", "onnx"),
    ),
    "passes": (
        (
            "planc.passes",
            "planc.plans",
            "planc.codegen.target",
            "planc.codegen.kernel",
            "planc.codegen.work",
            "planc.codegen.cuda.call",
            *IR,
        ),
        ("numpy",),
    ),
    "codegen/cuda/kernels": (("planc.codegen.cuda.kernels",), ("triton",)),
    "emulator": (
        (
            "planc.emulator",
            "planc.codegen.cuda.cubin",
            "planc.codegen.skus",
            "planc.runtime",
            "planc.plans",
            "planc.errors",
        ),
        ("numpy", "ml_dtypes", "triton"),
    ),
    "codegen": (("planc.codegen", "planc.plans", *IR), ("numpy", "jinja2", "triton")),
    "runtime": (
        ("planc.runtime", "planc.plans", "planc.errors", "planc.__version__"),
        ("numpy", "tokenizers", "jinja2", "pydantic", "starlette", "uvicorn", "prometheus_client"),
    ),
    "compiler": (
        ("planc",),
        ("numpy", "torch", "transformers", "safetensors", "huggingface_hub", "gguf", "ml_dtypes", "rich", "tokenizers"),
    ),
    "cli.py": (("planc",), ("click",)),
    "__main__.py": (("planc",), ()),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def rule(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    name = path.relative_to(PACKAGE).as_posix()
    fitting = [key for key in RULES if name == key or name.startswith(f"{key}/")]
    assert fitting, f"{name} is on no floor"
    return RULES[max(fitting, key=len)]


def imports(path: Path) -> list[str]:
    """Every module that the file imports, those inside functions included; `from planc import x` gives planc.x."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = str(node.module)
            found += [f"{module}.{a.name}" for a in node.names] if module == "planc" else [module]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_only_go_down(path: Path) -> None:
    ours, theirs = rule(path)
    for name in imports(path):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        allowed = any(name == a or name.startswith(f"{a}.") for a in ours) if top == "planc" else top in theirs
        assert allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("path", [*FILES, *sorted(PACKAGE.rglob("*.h"))], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def test_the_package_names_no_model_family() -> None:
    """A model is data: no file is named after one, and no code branches on one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    families = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if len(name) > 3}
    for path in FILES:
        assert path.stem not in families, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                literals = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                if path.name == "tokenizer.py":
                    literals.discard("gpt2")  # what GGUF calls byte-level BPE
                assert not literals & families, f"{path.relative_to(ROOT)}:{node.lineno} compares with a model's name"
