"""What a run leaves of itself over time: call them every now and then in the training loop."""

import numpy as np
from numpy.typing import NDArray
from torch import nn

from holonomic.langevin import Langevin

Array = NDArray[np.float64]


class TemperatureRecorder:
    """The kinetic temperature (and adaptive friction) of every group at the steps it was called.

    temperatures = TemperatureRecorder(opt)
    ...
    temperatures.record(step)
    """

    def __init__(self, optimizer: Langevin) -> None:
        self._optimizer = optimizer
        self.names = [str(g.get("name", i)) for i, g in enumerate(optimizer.param_groups)]
        self.steps: list[int] = []
        self._kinetic: list[list[float]] = []
        self._friction: list[list[float]] = []

    def record(self, step: int) -> None:
        """Take a reading."""
        groups = self._optimizer.report().groups
        self.steps.append(step)
        self._kinetic.append([g.kinetic_temperature for g in groups])
        self._friction.append([g.friction for g in groups])

    @property
    def kinetic(self) -> Array:
        """Readings (times, groups); NaN for groups without momentum."""
        return np.array(self._kinetic).reshape(len(self.steps), len(self.names))

    @property
    def friction(self) -> Array:
        """Adaptive frictions (times, groups); NaN for groups that have none."""
        return np.array(self._friction).reshape(len(self.steps), len(self.names))


class WeightRecorder:
    """Histograms of every parameter at the steps it was called, over a fixed range.

    What lies outside the range is counted in its first and last bin, so that nothing gets lost."""

    def __init__(self, module: nn.Module, bins: int = 60, limit: float = 3.0) -> None:
        self._module = module
        self.edges = np.linspace(-limit, limit, bins + 1)
        self.steps: list[int] = []
        self._counts: dict[str, list[Array]] = {name: [] for name, _ in module.named_parameters()}

    def record(self, step: int) -> None:
        """Take a reading."""
        self.steps.append(step)
        for name, p in self._module.named_parameters():
            values = np.clip(
                p.detach().double().cpu().numpy().ravel(), self.edges[0], self.edges[-1]
            )
            self._counts[name].append(np.histogram(values, self.edges)[0].astype(float))

    @property
    def counts(self) -> dict[str, Array]:
        """By parameter, counts (times, bins)."""
        shape = (len(self.steps), len(self.edges) - 1)
        return {name: np.array(c).reshape(shape) for name, c in self._counts.items()}
