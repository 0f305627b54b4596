"""Compiled plans against transformers in float32: a prompt prefilled in chunks, then decoded."""

import numpy as np
import pytest

from tests.e2e.rig import run
from tests.lifted import hugging_face, relative_error
from tests.models import ARCHS


@pytest.mark.parametrize("arch", ARCHS)
def test_logits_equal_transformers(plan, model, arch: str) -> None:
    prompt = np.random.default_rng(7).integers(3, 300, 75)
    result = run(plan(arch), [prompt.tolist()], tokens=32, max_tokens=16)
    sequence = np.concatenate([prompt, result.tokens[0]])
    want = hugging_face(model(arch), sequence)[len(prompt) - 1 : -1]
    assert relative_error(result.logits[0], want) < 1e-4
    assert result.tokens[0] == want.argmax(-1).tolist()


BOUNDS = {"bf16": 0.05, "int8-wo": 0.05, "int8": 0.06, "fp8": 0.2, "awq-g32": 0.4, "int4-g32": 0.4, "int4-wo-g32": 0.4}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_narrow_weights_stay_close_to_transformers(plan, model, dtype: str) -> None:
    prompt = np.random.default_rng(8).integers(3, 300, 75)
    result = run(plan("llama", dtype), [prompt.tolist()], tokens=32, max_tokens=16)
    sequence = np.concatenate([prompt, result.tokens[0]])
    want = hugging_face(model("llama"), sequence)[len(prompt) - 1 : -1]
    assert 1e-6 < relative_error(result.logits[0], want) < BOUNDS[dtype]
