"""Embeddings from row-major tables and from the packed weight of a tied head: exact in every format."""

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.harness import Case, Library, assert_same_bits, case, f32, i32, random, tensor

TABLES = [("f32", "row"), ("bf16", "row"), ("f32", "n64"), ("bf16", "n64k2"), ("i8", "row"), ("i8", "n64u4")]
COUNT, WIDTH = 130, 37
IDS = np.array([0, 63, 64, 65, 127, 128, 129, 0], np.int32)


def embedding(dtype: str, layout: str) -> Case:
    table = tensor(dtype, COUNT, WIDTH, layout=layout)
    if dtype == "i8":
        return case("qembedding", table, f32(COUNT), i32("T"), scheme="int8-wo")
    return case("embedding", table, i32("T"))


CASES = [embedding(*t) for t in TABLES]


def arrays(c: Case) -> list[np.ndarray]:
    if c.op == "qembedding":
        codes = np.random.default_rng(0).integers(-127, 128, (COUNT, WIDTH)).astype(np.int8)
        return [codes, np.abs(random(COUNT)) + 0.01, IDS]
    return [random(COUNT, WIDTH).astype(ml_dtypes.bfloat16 if c.types[0].dtype == "bf16" else np.float32), IDS]


@pytest.mark.parametrize("c", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_exact(library: Library, c: Case, threads: int) -> None:
    given = arrays(c)
    want = given[0].astype(np.float32)[IDS]
    if c.op == "qembedding":
        want = want * given[1][IDS][:, None]
    assert_same_bits(library.run(c, given, len(IDS), threads=threads)[0], want, c)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_an_id_outside_the_table_reads_nothing(library: Library, c: Case) -> None:
    given = arrays(c)
    given[-1] = np.array([-1, COUNT, 2**31 - 1], np.int32)
    assert (library.run(c, given, 3)[0] == 0).all()
