"""What calibration chose for a build: scales that move from activations to weights, and ranges of weights to keep."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Choices:
    """`scales` by the name of a site (sites.py), f32[size]. `clips` by the name of a weight, as it is after `migrate`:
    the largest |w| that quantizing keeps, in the shape of its scales ([.., K/g, N] or [.., N]).
    """

    scales: Mapping[str, np.ndarray] = field(default_factory=dict)
    clips: Mapping[str, np.ndarray] = field(default_factory=dict)
