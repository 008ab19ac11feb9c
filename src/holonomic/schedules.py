"""Temperature over time: objects that go beside a learning-rate scheduler, and are saved like one.

schedule = hm.schedules.Annealing(opt, steps=10_000)
for x, y in loader:
    ...; opt.step(); lr_scheduler.step(); schedule.step()
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from holonomic.errors import CheckpointError, NonFiniteError, SettingError
from holonomic.state import MOMENTA


class Schedule:
    """Constant temperature, and the base of the others: each group's temperature when the schedule
    is made, times `factor` of the steps taken."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0
        self.bases = [float(group["temperature"]) for group in optimizer.param_groups]
        self._apply()

    def factor(self, steps: int) -> float:
        """What the temperatures are multiplied by."""
        return 1.0

    def step(self) -> None:
        """Count a step of the optimizer and set the temperatures for the next."""
        self.steps += 1
        self._apply()

    def _apply(self) -> None:
        if len(self.bases) != len(self.optimizer.param_groups):
            raise SettingError(
                f"the optimizer has {len(self.optimizer.param_groups)} groups and the schedule was "
                f"made for {len(self.bases)}; make it after all groups have been added."
            )
        factor = self.factor(self.steps)
        for group, base in zip(self.optimizer.param_groups, self.bases, strict=True):
            group["temperature"] = base * factor

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on: plain values."""
        return {"steps": self.steps, "bases": list(self.bases)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        if len(state["bases"]) != len(self.optimizer.param_groups):
            raise CheckpointError(
                f"the schedule was saved with {len(state['bases'])} parameter groups and the "
                f"optimizer has {len(self.optimizer.param_groups)}; build it with the same groups."
            )
        self.steps, self.bases = int(state["steps"]), list(state["bases"])
        self._apply()


class Annealing(Schedule):
    """From the full temperature to ``final`` times it, in ``steps``; then it stays there.

    ``shape`` is "linear", "cosine" or "exponential" (which needs final > 0)."""

    def __init__(
        self, optimizer: Optimizer, steps: int, final: float = 0.0, shape: str = "linear"
    ) -> None:
        if steps < 1:
            raise SettingError(f"Annealing: steps is {steps}; it must be at least 1.")
        if shape not in ("linear", "cosine", "exponential"):
            raise SettingError(
                f"Annealing: shape is {shape!r}; it must be 'linear', 'cosine' or 'exponential'."
            )
        if not (final >= 0 and math.isfinite(final)) or (shape == "exponential" and final == 0):
            raise SettingError(
                f"Annealing: final is {final}; it must be a number >= 0, and above 0 for an "
                f"exponential (which never reaches 0)."
            )
        self.length, self.final, self.shape = steps, final, shape
        super().__init__(optimizer)

    def factor(self, steps: int) -> float:
        done = min(steps / self.length, 1.0)
        if self.shape == "exponential":
            return self.final**done
        share = done if self.shape == "linear" else (1 - math.cos(math.pi * done)) / 2
        return 1 + (self.final - 1) * share


class Cyclic(Schedule):
    """Cosine cycles of ``period`` steps: hot at the start of each, ``low`` times that at its end."""

    def __init__(self, optimizer: Optimizer, period: int, low: float = 0.0) -> None:
        if period < 1:
            raise SettingError(f"Cyclic: period is {period}; it must be at least 1.")
        if not (low >= 0 and math.isfinite(low)):
            raise SettingError(f"Cyclic: low is {low}; it must be a number >= 0.")
        self.period, self.low = period, low
        super().__init__(optimizer)

    def factor(self, steps: int) -> float:
        done = (steps % self.period) / self.period
        return self.low + (1 - self.low) * (1 + math.cos(math.pi * done)) / 2


class Tempering(Schedule):
    """Simulated tempering: a random walk on a ladder of temperatures that keeps every law exact.

    Every ``every`` steps a neighbour j of the present rung i is proposed and accepted with probability
    min(1, exp(E (1/tau_i - 1/tau_j) + w_j - w_i)), E being ``energy()``, the loss on the full data
    (times what the temperature refers to). Momenta are scaled by sqrt(tau_j / tau_i), so that they
    stay in equilibrium. ``weights`` w (0 by default) steer how often a rung is visited: all equally
    for w_i = -log Z_i. ``visits`` counts.

    All groups take the temperature of the rung."""

    def __init__(
        self,
        optimizer: Optimizer,
        ladder: Sequence[float],
        energy: Callable[[], float],
        *,
        every: int = 1,
        weights: Sequence[float] | None = None,
        seed: int = 0,
    ) -> None:
        ladder = [float(t) for t in ladder]
        if len(ladder) < 2 or any(not (t > 0 and math.isfinite(t)) for t in ladder):
            raise SettingError(
                f"Tempering: ladder is {ladder}; give at least two positive temperatures."
            )
        if every < 1:
            raise SettingError(f"Tempering: every is {every}; it must be at least 1.")
        if weights is not None and len(weights) != len(ladder):
            raise SettingError(
                f"Tempering: there are {len(weights)} weights for {len(ladder)} temperatures."
            )
        self.ladder, self.energy, self.every = ladder, energy, every
        self.weights = [0.0] * len(ladder) if weights is None else [float(w) for w in weights]
        self.rung = 0
        self.visits = [0] * len(ladder)
        self._generator = torch.Generator().manual_seed(seed)
        super().__init__(optimizer)

    def step(self) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self._move()
            self.visits[self.rung] += 1
        self._apply()

    def _move(self) -> None:
        up, chance = torch.rand(2, generator=self._generator, dtype=torch.float64).tolist()
        j = self.rung + (1 if up < 0.5 else -1)
        if not 0 <= j < len(self.ladder):
            return
        i = self.rung
        energy = float(self.energy())
        if not math.isfinite(energy):
            raise NonFiniteError(
                f"Tempering: the energy is {energy}, so no move can be judged; lower lr, or start from "
                f"weights that have not diverged."
            )
        gain = energy * (1 / self.ladder[i] - 1 / self.ladder[j])
        if chance < math.exp(min(0.0, gain + self.weights[j] - self.weights[i])):
            self.rung = j
            scale = math.sqrt(self.ladder[j] / self.ladder[i])
            for state in self.optimizer.state.values():
                for key in MOMENTA:
                    if key in state:
                        state[key].mul_(scale)

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["temperature"] = self.ladder[self.rung]

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "rung": self.rung,
            "visits": list(self.visits),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["visits"]) != len(self.ladder):
            raise CheckpointError(
                f"the schedule was saved with {len(state['visits'])} rungs and has "
                f"{len(self.ladder)}; give it the same ladder."
            )
        self.rung, self.visits = int(state["rung"]), list(state["visits"])
        self._generator.set_state(state["generator"].cpu().clone())
        super().load_state_dict(state)
