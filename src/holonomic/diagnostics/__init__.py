"""Looking at runs: autocorrelation, temperatures, weights, and the loss between states.

Each measurement is a function or a small recorder that returns plain arrays; `plots` draws them (it needs
matplotlib, which comes with ``holonomic[lab]``).
"""

from holonomic.diagnostics.autocorrelation import (
    autocorrelation,
    effective_sample_size,
    integrated_autocorrelation_time,
)
from holonomic.diagnostics.landscape import Line, Plane, loss_on_line, loss_on_plane
from holonomic.diagnostics.recorders import TemperatureRecorder, WeightRecorder

__all__ = [
    "Line",
    "Plane",
    "TemperatureRecorder",
    "WeightRecorder",
    "autocorrelation",
    "effective_sample_size",
    "integrated_autocorrelation_time",
    "loss_on_line",
    "loss_on_plane",
]
