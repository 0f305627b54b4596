"""What calibration chose for a build: scales that move from activations to weights, ranges of weights, offsets."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Choices:
    """`scales` by the name of a site (sites.py), f32[size]. `clips` by the name of a weight, as it is after `migrate`:
    the largest |w| that quantizing keeps, in the shape of its scales ([.., K/g, N] or [.., N]). `offsets` by the name
    of a product's result: what it gains, to make up for what rounding takes from it on average, f32[.., N]; they
    count only where the weight is still in `clips`.
    """

    scales: Mapping[str, np.ndarray] = field(default_factory=dict)
    clips: Mapping[str, np.ndarray] = field(default_factory=dict)
    offsets: Mapping[str, np.ndarray] = field(default_factory=dict)
