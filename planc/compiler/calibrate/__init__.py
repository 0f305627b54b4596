"""Calibration: in go a lifted graph and a text, out come the scales, ranges and offsets that lose the least."""

from planc.compiler.calibrate.calibrate import Calibration, calibrate, calibrate_model
from planc.compiler.calibrate.text import BUILTIN, LEAST, TOKENS, CalibrationText, calibration_text

__all__ = [
    "BUILTIN",
    "LEAST",
    "TOKENS",
    "Calibration",
    "CalibrationText",
    "calibrate",
    "calibrate_model",
    "calibration_text",
]
