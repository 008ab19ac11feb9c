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

from holonomic.lab.data import spiral
from holonomic.lab.experiment import Arm, Experiment
from holonomic.lab.files import load_checkpoint, save_checkpoint
from holonomic.lab.measures import binary_loss, evaluate
from holonomic.lab.models import mlp
from holonomic.langevin import Langevin
from holonomic.replicas import Penalty, Replicas, child_seed

#: Seconds between two checkpoints of a running arm.
CHECKPOINT_EVERY = 30.0

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
    """What training leaves behind: the replicas and every replica's curves."""

    replicas: Replicas
    epochs: int
    curves: dict[str, list[Any]]
    seconds: float


def draws(e: Experiment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and test data of every replica, (n, N, 2) and (n, N): the first ``runs`` share draw 0,
    the others have a draw each."""
    numbers = [0] * e.runs + list(range(1, e.draws + 1))
    made: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for k in set(numbers):
        d = e.data
        train, test = (
            spiral(n, d.turns, d.scale, d.noise, child_seed(e.seed, 100 + k, part))
            for part, n in enumerate((d.train, d.test))
        )
        made[k] = (*train, *test)
    x, y, x_test, y_test = (
        torch.stack([made[k][i] for k in numbers]).to(e.device) for i in range(4)
    )
    return x, y, x_test, y_test


def build(e: Experiment, arm: Arm) -> tuple[Replicas, Langevin]:
    """The replicas of an arm and their optimizer."""

    def make() -> nn.Module:
        net = mlp(*arm.widths)
        for name, p in net.named_parameters():
            if name in arm.orthogonal_init:
                nn.init.orthogonal_(p)
        return net

    replicas = Replicas(make, e.runs + e.draws, e.seed, device=e.device)
    optimizer = Langevin(
        replicas.groups(arm.rules()),
        lr=arm.lr,
        momentum=arm.momentum,
        temperature=arm.temperature,
        weight_decay=arm.weight_decay,
        scheme=arm.scheme,
        generator=replicas.noise() if arm.temperature else None,
        nonfinite="allow",  # a replica that diverges must not stop the others; it shows as NaN
    )
    return replicas, optimizer


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
    order = replicas.order(x, y, e.data.batch, own=True)
    curves: dict[str, list[Any]] = {
        k: [] for k in ("epoch", "train_loss", "test_loss", "test_accuracy")
    }
    done, seconds = 0, 0.0
    saved, warnings = load_checkpoint(checkpoint)
    for message in warnings:
        warn(message)
    if saved is not None:
        replicas.load_state_dict(saved["replicas"])
        optimizer.load_state_dict(saved["optimizer"])
        order.load_state_dict(saved["order"])
        curves, done, seconds = saved["curves"], saved["epoch"], saved["seconds"]

    def save() -> None:
        save_checkpoint(
            checkpoint,
            {
                "replicas": replicas.state_dict(),
                "optimizer": optimizer.state_dict(),
                "order": order.state_dict(),
                "curves": curves,
                "epoch": done,
                "seconds": seconds + time.monotonic() - started,
            },
        )

    points = set(record_points(e))
    penalty = _penalty(arm)
    started = last = time.monotonic()
    progress(done)
    while done < e.epochs:
        for xb, yb in order:
            replicas.backward(binary_loss, xb, yb, penalty)
            optimizer.step()
        done += 1
        if done in points:
            train_loss, _ = evaluate(replicas, x, y)
            test_loss, accuracy = evaluate(replicas, x_test, y_test)
            for key, value in (
                ("epoch", done),
                ("train_loss", train_loss.tolist()),
                ("test_loss", test_loss.tolist()),
                ("test_accuracy", accuracy.tolist()),
            ):
                curves[key].append(value)
        progress(done)
        if stop.asked or time.monotonic() - last > checkpoint_every:
            save()
            last = time.monotonic()
        if stop.asked:
            raise KeyboardInterrupt
    return Trained(replicas, done, curves, seconds + time.monotonic() - started)
