"""Training one arm of an experiment on all replicas at once, with checkpoints."""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holonomic import methods
from holonomic.errors import SettingError
from holonomic.lab.experiment import Arm, Experiment
from holonomic.lab.files import load_checkpoint, save_checkpoint
from holonomic.lab.measures import evaluate, histograms
from holonomic.lab.models import mlp
from holonomic.langevin import Langevin
from holonomic.native import reason as no_kernels
from holonomic.replicas import Penalty, Replicas

#: Seconds between two checkpoints of a running arm.
CHECKPOINT_EVERY = 30.0

#: Steps of a run from which compiling its gradient pays.
WORTH_COMPILING = 100_000

Progress = Callable[[int], None]


class Stop:
    """Ctrl-C (or a termination) as a wish: work goes on to the next point where it can be resumed.

    ``also`` is another way to be told. A second Ctrl-C ends the program at once."""

    def __init__(self, also: Callable[[], bool] = lambda: False) -> None:
        self._asked = False
        self._also = also

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return self._asked or self._also()

    def ask(self) -> None:
        """Wish for a stop."""
        self._asked = True

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in getattr(self, "_before", {}).items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self.ask()


@dataclass
class Trained:
    """What training leaves behind: the replicas, every replica's curves, and histograms of weights by
    the epoch."""

    replicas: Replicas
    epochs: int
    curves: dict[str, list[Any]]
    weights: dict[int, dict[str, list[int]]]
    seconds: float


def draws(e: Experiment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and test data of every replica, (n, N, ...) and (n, N): the first ``runs`` share draw 0,
    the others have a draw each. Data that all share comes as one set, (N, ...) and (N,)."""
    if e.data.shared:
        if e.draws:
            raise SettingError(
                f"{e.id} has one set of data, so it cannot be drawn again; set the number of draws "
                f"(--data-draws) to 0, it is {e.draws}."
            )
        x, y, x_test, y_test = (t.to(e.device) for t in e.data.draw(e.seed, 0))
        return x, y, x_test, y_test
    numbers = [0] * e.runs + list(range(1, e.draws + 1))
    made = {k: e.data.draw(e.seed, k) for k in set(numbers)}
    x, y, x_test, y_test = (
        torch.stack([made[k][i] for k in numbers]).to(e.device) for i in range(4)
    )
    return x, y, x_test, y_test


def build(e: Experiment, arm: Arm) -> tuple[Replicas, Optimizer]:
    """The replicas of an arm as they start, and their optimizer."""

    def make() -> nn.Module:
        net = mlp(*arm.widths)
        for name, p in net.named_parameters():
            if name in arm.orthogonal_init:
                nn.init.orthogonal_(p)
            elif arm.gaussian and p.dim() > 1:
                nn.init.normal_(p, std=arm.gaussian)
        return net

    long = e.epochs * e.data.steps >= WORTH_COMPILING
    compile_ = long and e.device == "cpu" and no_kernels() is None  # there is a compiler, then
    replicas = Replicas(make, e.runs + e.draws, e.seed, device=e.device, compile=compile_)
    if e.starts:
        start = [i % e.starts for i in range(replicas.n)]
        replicas.load_state_dict({k: t[start] for k, t in replicas.state_dict().items()})
    return replicas, optimizer_of(arm.at(0), replicas)


def optimizer_of(arm: Arm, replicas: Replicas) -> Optimizer:
    """The optimizer of an arm. A replica that diverges must not stop the others (``nonfinite``); it
    shows as NaN."""
    if arm.method == "adam":  # goes element by element, so replicas stay independent
        return torch.optim.Adam(replicas.parameters(), lr=arm.lr)
    if arm.method:
        return _PARTITIONED[arm.method](
            replicas,
            lr=arm.lr,
            constraints=arm.rules(),
            generator=replicas.noise(),
            nonfinite="allow",
            **arm.settings,
        )
    return Langevin(
        replicas.groups(arm.rules()),
        lr=arm.lr,
        momentum=arm.momentum,
        temperature=arm.temperature,
        weight_decay=arm.weight_decay,
        scheme=arm.scheme,
        generator=replicas.noise() if arm.temperature else None,
        nonfinite="allow",
    )


_PARTITIONED: dict[str, Callable[..., Langevin]] = {
    "adlala": methods.adlala,
    "dhsgd": methods.dhsgd,
    "dhsgdc": methods.dhsgdc,
    "lol": methods.lol,
}


def _penalty(arm: Arm) -> Penalty | None:
    """lambda |W W^T - I|^2 over the penalized layers: the soft constraint."""
    if not arm.penalty:
        return None

    def penalty(parameters: dict[str, Tensor]) -> Tensor:
        weights = [parameters[name] for name in arm.penalized]
        eyes = [torch.eye(len(w), device=w.device) for w in weights]
        terms = [((w @ w.mT - eye) ** 2).sum() for w, eye in zip(weights, eyes, strict=True)]
        return arm.penalty * torch.stack(terms).sum()

    return penalty


def record_points(e: Experiment) -> list[int]:
    """Epochs after which curves are recorded: evenly spread, the last included."""
    points = np.linspace(0, e.epochs, min(e.records, e.epochs) + 1)[1:]
    return sorted({round(p) for p in points})


def snapshot_points(e: Experiment) -> set[int]:
    """Epochs after which weights are counted: none, or those asked for and the last."""
    return {k for k in e.snapshots if k < e.epochs} | {e.epochs} if e.snapshots else set()


def train(
    e: Experiment,
    arm: Arm,
    checkpoint: Path,
    progress: Progress,
    warn: Callable[[str], None],
    stop: "Stop",
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> Trained:
    """Train an arm from its last checkpoint to the end. ``progress`` gets the epochs done so far.

    When ``stop`` is asked for, the epoch is finished, a checkpoint saved and KeyboardInterrupt raised.
    """
    x, y, x_test, y_test = draws(e)
    replicas, optimizer = build(e, arm)
    own, criterion = not e.data.shared, e.data.criterion
    order = replicas.order(x, y, e.data.batch, own=own)
    curves: dict[str, list[Any]] = {
        k: [] for k in ("epoch", "train_loss", "test_loss", "test_accuracy")
    }
    weights: dict[int, dict[str, list[int]]] = {}
    done, seconds = 0, 0.0
    saved, warnings = load_checkpoint(checkpoint)
    for message in warnings:
        warn(message)
    if saved is not None:
        replicas.load_state_dict(saved["replicas"])
        optimizer = optimizer_of(arm.at(saved["epoch"]), replicas)
        optimizer.load_state_dict(saved["optimizer"])
        order.load_state_dict(saved["order"])
        curves, done, seconds = saved["curves"], saved["epoch"], saved["seconds"]
        weights = saved.get("weights", {})

    def save() -> None:
        save_checkpoint(
            checkpoint,
            {
                "replicas": replicas.state_dict(),
                "optimizer": optimizer.state_dict(),
                "order": order.state_dict(),
                "curves": curves,
                "weights": weights,
                "epoch": done,
                "seconds": seconds + time.monotonic() - started,
            },
        )

    points, snapshots = set(record_points(e)), snapshot_points(e)
    penalty = _penalty(arm)
    started = last = time.monotonic()
    progress(done)
    while done < e.epochs:
        for xb, yb in order:
            replicas.backward(criterion.loss, xb, yb, penalty)
            optimizer.step()
        done += 1
        if arm.at(done) is not arm.at(done - 1):
            optimizer = optimizer_of(arm.at(done), replicas)
        if done in snapshots:
            weights[done] = histograms(replicas, e.runs)
        if done in points:
            train_loss, _ = evaluate(replicas, criterion, x, y, own=own)
            test_loss, accuracy = evaluate(replicas, criterion, x_test, y_test, own=own)
            for key, value in (
                ("epoch", done),
                ("train_loss", train_loss.tolist()),
                ("test_loss", test_loss.tolist()),
                ("test_accuracy", accuracy.tolist()),
            ):
                curves[key].append(value)
        progress(done)
        asked = stop.asked  # once: a wish that comes after the checkpoint waits for the next epoch
        if asked or time.monotonic() - last > checkpoint_every:
            save()
            last = time.monotonic()
        if asked:
            raise KeyboardInterrupt
    return Trained(replicas, done, curves, weights, seconds + time.monotonic() - started)
