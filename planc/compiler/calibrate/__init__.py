"""Calibration: in go a graph before quantization and a text, out come the scales and ranges that lose the least."""

from planc.compiler.calibrate.calibrate import Calibration, calibrate
from planc.compiler.calibrate.text import BUILTIN, CalibrationText, calibration_text

__all__ = ["BUILTIN", "Calibration", "CalibrationText", "calibrate", "calibration_text"]
