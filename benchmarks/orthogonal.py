"""Steps on the Stiefel manifold, in units of the one product no method can do without: Q^T Q."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import holonomic as hm
from benchmarks.bench import Bench, Maker, Pair, peer
from benchmarks.rows import Goal
from benchmarks.subjects import LR, MOMENTUM, gradients, ours, sgd, stepping
from benchmarks.timing import Effort, Work

SHAPES = ((512, 512), (256, 2304))
WAYS: dict[str, dict[str, Any]] = {"eager": {"foreach": True}, "default": {}}
GRAM = "Gram product QᵀQ"
GEOOPT = {"euclidean": "EuclideanStiefel", "canonical": "CanonicalStiefel"}


def run(bench: Bench) -> None:
    for shape in SHAPES:
        single(bench, shape)
    many(bench)


def matrices(shape: tuple[int, ...], count: int = 1) -> Callable[[], list[nn.Parameter]]:
    """Orthogonal matrices: orthonormal rows if wide, columns if tall."""

    def make() -> list[nn.Parameter]:
        g = torch.Generator().manual_seed(0)
        return [
            nn.Parameter(nn.init.orthogonal_(torch.empty(shape), generator=g)) for _ in range(count)
        ]

    return make


def gram(shape: tuple[int, ...]) -> Maker:
    """One product Q^T Q of the tall orientation."""

    def build() -> Work:
        (q,) = matrices(shape)()
        tall = q.detach() if shape[0] >= shape[1] else q.detach().T
        out = torch.empty(min(shape), min(shape))

        def work() -> None:
            torch.mm(tall.T, tall, out=out)

        return work

    return build


def geoopt_step(shape: tuple[int, ...], metric: str, count: int = 1) -> Maker:
    """geoopt's RiemannianSGD with momentum; its matrices are tall, a stack of them one tensor."""

    def build() -> Work:
        geoopt = peer("geoopt")
        manifold = getattr(geoopt, GEOOPT[metric])()
        tall = torch.stack([_tall(q.detach()) for q in matrices(shape, count)()])
        start = tall if count > 1 else tall[0]
        point = geoopt.ManifoldParameter(start.contiguous(), manifold)
        return stepping([point], geoopt.optim.RiemannianSGD([point], lr=LR, momentum=MOMENTUM))

    return build


def geoopt_loop(shape: tuple[int, ...], count: int) -> Maker:
    """geoopt with a parameter a matrix, as the layers of a network are."""

    def build() -> Work:
        geoopt = peer("geoopt")
        manifold = geoopt.EuclideanStiefel()
        points = [
            geoopt.ManifoldParameter(_tall(q.detach()).contiguous(), manifold)
            for q in matrices(shape, count)()
        ]
        return stepping(points, geoopt.optim.RiemannianSGD(points, lr=LR, momentum=MOMENTUM))

    return build


def pogo_step(shape: tuple[int, ...]) -> Maker:
    """POGO with SGD-m inside; its matrices are wide, in a batch."""

    def build() -> Work:
        pogo, base = peer("pogo"), peer("pogo.base")
        (q,) = matrices(shape)()
        wide = q.detach() if shape[0] <= shape[1] else q.detach().T
        points = [nn.Parameter(wide.unsqueeze(0).contiguous())]
        return stepping(points, pogo.POGO(points, base.SGD(momentum=MOMENTUM), lr=LR))

    return build


def parametrized(shape: tuple[int, ...], attach: Callable[[nn.Module], Any]) -> Maker:
    """A parametrized weight: its forward, the backward through it, and a step of SGD-m."""

    def build() -> Work:
        layer = nn.Linear(shape[1], shape[0], bias=False)
        attach(layer)
        probe = nn.Parameter(torch.empty(shape))
        advance = gradients([probe])
        opt = torch.optim.SGD(layer.parameters(), LR, MOMENTUM, foreach=True)

        def work() -> None:
            advance()
            opt.zero_grad()
            layer.weight.backward(probe.grad)
            opt.step()

        return work

    return build


def single(bench: Bench, shape: tuple[int, int]) -> None:
    make = matrices(shape)
    size = f"{shape[0]} × {shape[1]}"
    peers = {
        "geoopt RSGD-m, euclidean": geoopt_step(shape, "euclidean"),
        "geoopt RSGD-m, canonical": geoopt_step(shape, "canonical"),
        "pogo-torch": pogo_step(shape),
    }
    slow_peers = {  # seconds a step for the wide matrix
        "torch parametrization": parametrized(shape, nn.utils.parametrizations.orthogonal),
        "geotorch": parametrized(shape, lambda layer: peer("geotorch").orthogonal(layer, "weight")),
    }
    bench.compare(
        {
            GRAM: gram(shape),
            **_ways(make),
            **peers,
        },
        [
            *(Pair(f"o-CoLA-ud step, {size}, {way}", way, GRAM, Goal(6.5, 5.0)) for way in WAYS),
            *(Pair(f"(peer) {name}, {size}", name, GRAM) for name in peers),
        ],
    )
    bench.compare(
        {GRAM: gram(shape), **slow_peers},
        [Pair(f"(peer) {name}, {size}", name, GRAM) for name in slow_peers],
        Effort(2, 0.0, 0),
        counts=(1,),
    )


def many(bench: Bench) -> None:
    """Fifty matrices of 64 x 64."""
    shape, count = (64, 64), 50
    make = matrices(shape, count)
    what, geoopt = f"o-CoLA-ud step, {count} matrices of 64 × 64", "geoopt, a parameter a matrix"
    bench.compare(
        {
            geoopt: geoopt_loop(shape, count),
            "geoopt, stacked": geoopt_step(shape, "euclidean", count),
            "SGD-m foreach": sgd(make),
            **_ways(make),
        },
        [
            *(Pair(f"{what}, {way}", way, geoopt, Goal(5.0, 10.0, faster=True)) for way in WAYS),
            Pair(f"{what}, default", "default", "geoopt, stacked", Goal(faster=True)),
            Pair(f"{what}, default", "default", "SGD-m foreach"),
        ],
    )


def _ways(make: Callable[[], list[nn.Parameter]]) -> dict[str, Maker]:
    return {
        way: ours(make, constraint=hm.Orthogonal(), **settings) for way, settings in WAYS.items()
    }


def _tall(q: Tensor) -> Tensor:
    return q if q.shape[0] >= q.shape[1] else q.T
