"""Whole training steps, forward and backward included: what a user would notice."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holonomic as hm
from benchmarks.bench import Bench, Maker, Pair
from benchmarks.rows import Goal
from benchmarks.subjects import LR, MOMENTUM
from benchmarks.timing import Effort, Work
from holonomic.lab.models import TransformerLM, mlp, resnet18

Rules = Mapping[Any, hm.Constraint]
Data = tuple[Tensor, Tensor]

CIRCLE, ORTHOGONAL = Goal(1.10), Goal(1.25)
WORDS, LENGTH = 10_000, 35


def run(bench: Bench) -> None:
    digits = (torch.randn(128, 784), torch.randint(10, (128,)))
    _model(
        bench,
        "784-1000-10, batch 128",
        lambda: mlp(784, 1000, 10),
        digits,
        {"circle": {"*.weight": hm.Circle(1.0)}},
    )
    words = torch.randint(WORDS, (20, LENGTH + 1))
    _model(
        bench,
        f"transformer, {WORDS:,} words, batch 20 × {LENGTH}",
        lambda: TransformerLM(WORDS, dropout=0.0),
        (words[:, :-1], words[:, 1:]),
        {
            "circle": {"*weight": hm.Circle(1.0)},
            "orthogonal": {"encoder.*linear*.weight": hm.Orthogonal()},
        },
        bench.slow(),
    )
    batch = 16 if bench.quick else 64
    images = (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))
    _model(
        bench,
        f"ResNet-18, batch {batch}",
        resnet18,
        images,
        {"circle": {nn.Conv2d: hm.Circle(1.0)}, "orthogonal": {nn.Conv2d: hm.Orthogonal()}},
        bench.slow(),
        counts=(2,),  # a step takes seconds
    )


def _model(
    bench: Bench,
    name: str,
    factory: Callable[[], nn.Module],
    data: Data,
    constraints: Mapping[str, Rules],
    effort: Effort | None = None,
    counts: tuple[int, ...] = (1, 2),
) -> None:
    contenders = {"SGD-m": _training(factory, data, _sgd)}
    pairs = []
    for constraint, rules in constraints.items():
        goal = CIRCLE if constraint == "circle" else ORTHOGONAL
        for way, settings in ((", default", {}), (", fused=True", {"fused": True})):
            label = f"{constraint}{way}"
            contenders[label] = _training(factory, data, _langevin(rules, **settings))
            pairs.append(Pair(f"training step, {name}: {label}", label, "SGD-m", goal))
    bench.compare(contenders, pairs, effort, counts)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LR, MOMENTUM)


def _langevin(rules: Rules, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: hm.Langevin(hm.groups(model, rules), lr=LR, momentum=MOMENTUM, **settings)


def _training(
    factory: Callable[[], nn.Module],
    data: Data,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> Maker:
    def build() -> Work:
        torch.manual_seed(0)
        model = factory()
        opt = optimizer(model)
        x, y = data

        def work() -> None:
            opt.zero_grad()
            cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            opt.step()

        return work

    return build
