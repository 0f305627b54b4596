"""What calibration chose for a build: scales that move from activations to weights, ranges of weights, offsets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class Choices:
    """`scales` by the name of a site (sites.py), f32[size]. `clips` by the name of a weight, as it is after `migrate`:
    the largest |w| that quantizing keeps (of floats: what the largest code stands for), in the shape of its scales
    ([.., K/g, N] or [.., N]). `offsets` by the name
    of a product's result: what it gains, to make up for what rounding takes from it on average, f32[.., N]; they
    count only where the weight is still in `clips` or `shifts`. `shifts` by the name of a weight: what is taken from
    the rows that it multiplies before they are rounded, f32[K]. `outliers` by the name of a weight: the features that
    both keep to two digits, i32[n].
    """

    scales: Mapping[str, np.ndarray] = field(default_factory=dict)
    clips: Mapping[str, np.ndarray] = field(default_factory=dict)
    offsets: Mapping[str, np.ndarray] = field(default_factory=dict)
    shifts: Mapping[str, np.ndarray] = field(default_factory=dict)
    outliers: Mapping[str, np.ndarray] = field(default_factory=dict)

    def without(self, weights: Collection[str]) -> "Choices":
        """The choices with none for how these weights are rounded."""
        given = (self.clips, self.shifts, self.outliers)
        clips, shifts, outliers = ({k: v for k, v in chosen.items() if k not in weights} for chosen in given)
        return replace(self, clips=clips, shifts=shifts, outliers=outliers)

    def of_parts(self) -> "Choices":
        """The choices with none that belong to whole weights, for weights that ranks share out."""
        return Choices(self.scales)
