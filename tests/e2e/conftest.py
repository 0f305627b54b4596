"""Plans of tiny random models, built once a session and shared by the tests that run them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from planc.compiler.build import BuildRequest, build
from planc.compiler.progress import Progress
from tests.models import tiny
from tests.moe import MOE

BuildTiny = Callable[..., Path]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Callable[[str], Path]:
    """A tiny model folder by architecture."""
    return cache(lambda arch: tiny(arch, tmp_path_factory.mktemp("model"), **MOE.get(arch, {})))


@pytest.fixture(scope="session")
def plan(tmp_path_factory, model) -> BuildTiny:
    """A plan by architecture, dtype, cache and ranks, without a reference pass: tests compare with transformers
    themselves.
    """

    @cache
    def make(arch: str, dtype: str = "f32", target: str = "cpu", kv: str = "auto", tp: int = 1) -> Path:
        out = tmp_path_factory.mktemp("plan") / f"{arch}-{dtype}"
        request = BuildRequest(
            str(model(arch)), out, dtype=dtype, target=target, max_model_len=256, max_num_seqs=16,
            max_num_batched_tokens=64, reference="none", kv_cache_dtype=kv,
            calib_tokens=1024, tp=tp,
        )  # fmt: skip
        with Progress(quiet=True) as progress:
            build(request, progress)
        return out

    return make
