"""Training one run of one arm on real data, with checkpoints between steps."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from holonomic.groups import groups
from holonomic.lab.data import crop_and_flip
from holonomic.lab.files import load_checkpoint, save_checkpoint
from holonomic.lab.models import model as make_model
from holonomic.lab.real.experiment import Method, RealExperiment
from holonomic.lab.real.measures import largest_weights
from holonomic.lab.real.task import make_task
from holonomic.lab.train import CHECKPOINT_EVERY, Progress, Stop, record_points
from holonomic.langevin import Langevin
from holonomic.replicas import child_seed

# Which random numbers of a run: its weights, data order, augmentation, dropout, noise.
_INIT, _ORDER, _AUGMENT, _DROPOUT, _NOISE = range(5)


@dataclass
class Run:
    """What training leaves behind."""

    curves: dict[str, list[Any]]
    finals: dict[str, float]
    seconds: float


def build(e: RealExperiment, arm: Method, index: int) -> tuple[nn.Module, Optimizer]:
    """The model of a run, the same for every arm before it is put on a manifold, and its optimizer."""
    torch.manual_seed(child_seed(e.seed, index, _INIT))
    model = make_model(*e.model).to(e.device)
    if e.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if arm.optimizer == "adamw":
        return model, AdamW(model.parameters(), lr=arm.lr, weight_decay=arm.weight_decay)
    return model, Langevin(
        groups(model, arm.rules()),
        lr=arm.lr,
        momentum=arm.momentum,
        temperature=arm.temperature,
        weight_decay=arm.weight_decay,
        scheme=arm.scheme,
        seed=child_seed(e.seed, index, _NOISE),
        nonfinite="allow",  # a run that diverges shows as NaN
    )


class Trainer:
    """A run at work. Its state is the model, the optimizer, the place in the data, the curves so far and
    torch's generator (dropout); the data order and augmentation follow from the place alone."""

    def __init__(self, e: RealExperiment, arm: Method, index: int) -> None:
        self._e, self._arm, self._index = e, arm, index
        self.task = make_task(e, draw=max(0, index - e.runs + 1))
        self.model, self.optimizer = build(e, arm, index)
        torch.manual_seed(child_seed(e.seed, index, _DROPOUT))
        self._gpu = torch.device(e.device).type == "cuda"
        self._forward: Callable[[Tensor], Tensor] = self.model
        if e.compile and self._gpu:
            self._forward = torch.compile(self.model)
        self.epoch, self.step, self._loss = 0, 0, 0.0
        self._permutation, self._ordered = torch.empty(0), -1
        names = ("epoch", "train_loss", *self.task.names, "largest_weight", "output_weight")
        self.curves: dict[str, list[Any]] = {name: [] for name in names}

    def steps(self) -> int:
        """Steps an epoch; the last batch may be smaller."""
        return math.ceil(len(self.task.train[0]) / self._e.data.batch)

    def advance(self) -> None:
        """One step; after the last of an epoch, the next epoch begins."""
        e = self._e
        if self.step == 0:
            self._loss = 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = self._arm.lr * e.factor(self.epoch)
        x, y = self._batch()
        size = e.micro or len(x)
        total = torch.zeros((), device=x.device)
        self.optimizer.zero_grad(set_to_none=True)
        for xb, yb in zip(x.split(size), y.split(size), strict=True):
            amp = e.amp and self._gpu
            with torch.autocast("cuda", torch.bfloat16) if amp else nullcontext():
                logits = self._forward(xb)
            loss = cross_entropy(logits.flatten(0, -2).float(), yb.flatten(), reduction="sum")
            loss = loss / y.numel()
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self._loss += total.item() * len(x) / len(self.task.train[0])
        self.step += 1
        if self.step == self.steps():
            self.epoch, self.step = self.epoch + 1, 0

    def record(self) -> None:
        """Add a point to every curve (the training loss is the mean over the epoch's batches)."""
        largest, output = largest_weights(self.model)
        found = {
            "epoch": self.epoch,
            "train_loss": self._loss,
            **self.task.curves(self.model),
            "largest_weight": largest,
            "output_weight": output,
        }
        for name, value in found.items():
            self.curves[name].append(value)

    @property
    def diverged(self) -> bool:
        """Whether a loss was not a number: nothing can come of such a run."""
        return not math.isfinite(self._loss)

    def _batch(self) -> tuple[Tensor, Tensor]:
        x, y = self.task.train
        batch = self._e.data.batch
        chosen = self._order()[self.step * batch : (self.step + 1) * batch].to(x.device)
        xb, yb = x[chosen], y[chosen]
        if self._e.data.augment:
            seed = child_seed(self._e.seed, self._index, _AUGMENT, self.epoch, self.step)
            xb = crop_and_flip(xb, torch.Generator().manual_seed(seed))
        return xb, yb

    def _order(self) -> Tensor:
        """The order of the data in this epoch."""
        if self._ordered != self.epoch:
            seed = child_seed(self._e.seed, self._index, _ORDER, self.epoch)
            generator = torch.Generator().manual_seed(seed)
            self._permutation = torch.randperm(len(self.task.train[0]), generator=generator)
            self._ordered = self.epoch
        return self._permutation

    # ------------------------------------------------------------------ checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run goes on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "place": [self.epoch, self.step],
            "loss": self._loss,
            "curves": self.curves,
            "rng": torch.get_rng_state(),
            "rng_gpu": torch.cuda.get_rng_state() if self._gpu else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run stood."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step = state["place"]
        self._loss, self.curves = state["loss"], state["curves"]
        torch.set_rng_state(state["rng"])
        if self._gpu and state["rng_gpu"] is not None:
            torch.cuda.set_rng_state(state["rng_gpu"])


def train(
    e: RealExperiment,
    arm: Method,
    index: int,
    checkpoint: Path,
    key: str,
    progress: Progress,
    warn: Callable[[str], None],
    stop: Stop,
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> Run:
    """Train run ``index`` of an arm from its last checkpoint to the end. ``progress`` gets the epochs
    done so far; a checkpoint with another ``key`` is of another run and is not used.

    When ``stop`` is asked for, the step is finished, a checkpoint saved and KeyboardInterrupt raised.
    """
    trainer = Trainer(e, arm, index)
    seconds = 0.0
    saved, warnings = load_checkpoint(checkpoint)
    for message in warnings:
        warn(message)
    if saved is not None and saved["key"] == key:
        trainer.load_state_dict(saved["trainer"])
        seconds = saved["seconds"]
    points = set(record_points(e))
    started = last = time.monotonic()
    progress(trainer.epoch)
    while trainer.epoch < e.epochs and not trainer.diverged:
        trainer.advance()
        if trainer.step == 0:
            if trainer.epoch in points and not trainer.diverged:
                trainer.record()
            progress(trainer.epoch)
        asked = stop.asked  # once: a wish that comes after the checkpoint waits for the next step
        if asked or time.monotonic() - last > checkpoint_every:
            state = {"key": key, "trainer": trainer.state_dict()}
            save_checkpoint(checkpoint, {**state, "seconds": seconds + time.monotonic() - started})
            last = time.monotonic()
        if asked:
            raise KeyboardInterrupt
    finals = {}
    if trainer.diverged:
        _fill(trainer.curves, sorted(points))
    else:
        finals = trainer.task.finals(trainer.model, trainer.curves)
    return Run(trainer.curves, finals, seconds + time.monotonic() - started)


def _fill(curves: dict[str, list[Any]], points: list[int]) -> None:
    """NaN at the epochs that a run which diverged never came to."""
    missing = [p for p in points if p not in curves["epoch"]]
    for name, values in curves.items():
        values += missing if name == "epoch" else [math.nan] * len(missing)
