"""Builds that calibrate: told in the manifest, bit-equal again, and refused for a text that does not serve."""

import hashlib
import json
from pathlib import Path

import pytest

from planc.compiler.build import BuildRequest, build
from planc.compiler.calibrate.text import FILE
from planc.compiler.progress import Progress
from planc.errors import PlancError, UsageError
from planc.plans import schema, store
from planc.plans.diff import diff
from tests.models import tiny

WEIGHTS = ("weights/rank0.safetensors", "weights/constants.safetensors", "graph.ir")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("model"))


def built(model: Path, out: Path, **fields: object) -> schema.Plan:
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "reference": "none", "calib_tokens": 1024}
    request = BuildRequest(str(model), out, **{"dtype": "awq-g32", **sizes, **fields})  # type: ignore[arg-type]
    with Progress(quiet=True) as progress:
        return build(request, progress)


def bytes_of(plan: Path) -> list[bytes]:
    return [(plan / name).read_bytes() for name in WEIGHTS]


def test_the_manifest_tells_and_a_rebuild_is_bit_equal(model: Path, tmp_path: Path) -> None:
    plan = built(model, tmp_path / "first")
    found = plan.calibration
    assert found is not None
    assert (found.text, found.tokens, found.products, found.unscaled) == ("builtin", 1024, 8, ())
    assert found.text_sha256 == hashlib.sha256(FILE.read_bytes()).hexdigest()
    log = json.loads((tmp_path / "first" / store.LOG).read_text())
    assert log["seconds"]["calibration"] > 0
    assert log["peak_rss_bytes"] > 1 << 26
    assert found.scaled > 0
    assert store.load(tmp_path / "first").calibration == found
    built(model, tmp_path / "second")
    assert diff(tmp_path / "first", tmp_path / "second") == []
    copied = tmp_path / "other.txt"
    copied.write_text(FILE.read_text().replace("---", "***")[::-1])
    built(model, tmp_path / "third", calib=str(copied))
    assert bytes_of(tmp_path / "first")[0] != bytes_of(tmp_path / "third")[0]


def test_without_calibration_weights_are_rounded_as_they_are(model: Path, tmp_path: Path) -> None:
    assert built(model, tmp_path / "plan", calib="none").calibration is None
    assert built(model, tmp_path / "other", dtype="int8-wo").calibration is None


def test_a_text_that_does_not_serve_leaves_no_plan(model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(PlancError, match="too few to calibrate with"):
        built(model, tmp_path / "plan", calib=str(tmp_path / "short.txt"))
    with pytest.raises(UsageError, match="--calib-tokens must be at least 512, got 9"):
        built(model, tmp_path / "plan", calib_tokens=9)
    assert not (tmp_path / "plan").exists()
