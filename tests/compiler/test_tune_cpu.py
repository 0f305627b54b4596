"""What tuning concludes from measured times: which blockings are run again, and when one is faster than another."""

import pytest

from planc.compiler.tune_cpu import best_of
from planc.compiler.tune_cpu_measure import ratio_of
from planc.plans.tuning import Blocking


def test_the_best_of_each_choice_are_tried_alone_and_together() -> None:
    alone = {
        Blocking(): 1.0,
        Blocking(panel_from=8): 0.9,
        Blocking(panel_from=24): 0.8,
        Blocking(chunk_rows=96): 1.2,
        Blocking(tile_rows=4): 0.9,
    }
    together = Blocking(panel_from=24, tile_rows=4)
    assert list(best_of(alone)) == [Blocking(panel_from=24), Blocking(panel_from=8), together]
    assert list(best_of({Blocking(): 1.0, Blocking(tile_rows=4): 0.995})) == []


def test_a_kernel_is_as_fast_as_its_median_and_its_best_say() -> None:
    assert ratio_of([2.0, 2.0, 2.0], [4.0, 4.0, 4.0]) == pytest.approx(0.5)
    assert ratio_of([4.0, 2.0, 2.0], [4.0, 4.0, 4.0]) == pytest.approx(0.5)
    assert ratio_of([4.0, 4.0, 4.0], [8.0, 8.0, 4.0]) == pytest.approx(1.0), "the first was held up"
    assert ratio_of([4.0, 4.0, 1.0], [4.0, 4.0, 4.0]) == pytest.approx(1.0), "one of its times alone is short"
