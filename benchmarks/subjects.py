"""Weights with gradients, and optimizers on them as contenders."""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

import holonomic as hm
from benchmarks.bench import Maker
from benchmarks.timing import Work

LR, MOMENTUM, TEMPERATURE = 0.01, 0.9, 1e-5
MLP = ((1000, 784), (1000,), (10, 1000), (10,))  #: the tensors of a 784-1000-10 network

_CYCLE = 8


def weights(shapes: Sequence[tuple[int, ...]], scale: float = 0.03) -> list[nn.Parameter]:
    """The same random weights every time."""
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(scale * torch.randn(s, generator=g)) for s in shapes]


def gradients(params: Sequence[Tensor], scale: float = 0.01) -> Callable[[], None]:
    """A function that gives the parameters their next gradient.

    A few random ones with mean zero come round again and again: under one constant gradient the
    weights would come to rest, and an iteration that stops on its residual would look too cheap."""
    g = torch.Generator().manual_seed(1)
    count = _CYCLE if sum(p.numel() for p in params) < 2e7 else 2
    drawn = [[scale * torch.randn(p.shape, generator=g) for _ in range(count)] for p in params]
    centred = [[t - sum(ts) / count for t in ts] for ts in drawn]
    turns = cycle(zip(*centred, strict=True))

    def advance() -> None:
        for p, grad in zip(params, next(turns), strict=True):
            p.grad = grad

    return advance


def stepping(params: Sequence[nn.Parameter], opt: torch.optim.Optimizer) -> Work:
    """A step with the next gradient."""
    advance = gradients(params)

    def work() -> None:
        advance()
        opt.step()

    return work


def ours(make: Callable[[], list[nn.Parameter]], **settings: Any) -> Maker:
    """`holonomic.Langevin` on fresh parameters."""

    def build() -> Work:
        params = make()
        chosen = {"lr": LR, "momentum": MOMENTUM, "seed": 0, **settings}
        return stepping(params, hm.Langevin(params, **chosen))

    return build


def sgd(make: Callable[[], list[nn.Parameter]], noise: bool = False) -> Maker:
    """`torch.optim.SGD` with momentum, foreach; with ``noise`` also one randn a weight, added."""

    def build() -> Work:
        params = make()
        step = stepping(params, torch.optim.SGD(params, LR, MOMENTUM, foreach=True))
        generator = torch.Generator().manual_seed(0)

        @torch.no_grad()
        def noisy() -> None:
            step()
            drawn = [torch.empty_like(p).normal_(generator=generator) for p in params]
            torch._foreach_add_(list(params), drawn, alpha=1e-4)

        return noisy if noise else step

    return build
