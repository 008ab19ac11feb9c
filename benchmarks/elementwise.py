"""Steps whose cost is that of passing over the weights: circles, spheres, and noise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import holonomic as hm
from benchmarks.bench import Bench, Maker, Pair, peer
from benchmarks.rows import Goal, Row
from benchmarks.subjects import (
    LR,
    MLP,
    MOMENTUM,
    TEMPERATURE,
    gradients,
    ours,
    sgd,
    stepping,
    weights,
)
from benchmarks.timing import Spread, Work


def run(bench: Bench) -> None:
    circle_step(bench)
    circle_noise(bench)
    state_memory(bench)
    sphere_step(bench)
    samplers_of_networks(bench)


def _mlp() -> list[nn.Parameter]:
    return weights(MLP)


def _matrices() -> list[nn.Parameter]:
    return weights([s for s in MLP if len(s) == 2])


def circle_step(bench: Bench) -> None:
    """Eager is torch alone."""
    circle = hm.Circle(1.0)
    peer_name = "SGD-m foreach"
    bench.compare(
        {
            peer_name: sgd(_mlp),
            "eager": ours(_mlp, constraint=circle, foreach=True),
            "default": ours(_mlp, constraint=circle),
        },
        [
            Pair("c-CoLA-ud step, τ = 0, eager", "eager", peer_name, Goal(3.0, 1.2)),
            Pair("c-CoLA-ud step, τ = 0, default", "default", peer_name, Goal(1.5, 1.2)),
        ],
    )


def circle_noise(bench: Bench) -> None:
    circle: dict[str, Any] = {"constraint": hm.Circle(1.0), "temperature": TEMPERATURE}
    peer_name = "SGD-m foreach + randn"
    bench.compare(
        {
            peer_name: sgd(_mlp, noise=True),
            "eager": ours(_mlp, **circle, foreach=True),
            "default": ours(_mlp, **circle),
        },
        [
            Pair("c-CoLA-ud step, τ > 0, eager", "eager", peer_name, Goal(1.3, 1.1)),
            Pair("c-CoLA-ud step, τ > 0, default", "default", peer_name, Goal(1.3, 1.1)),
        ],
    )


def state_memory(bench: Bench) -> None:
    """Tensors of state a weight tensor, by their bytes."""

    def held(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Spread:
        params = _mlp()
        opt = make(params)
        gradients(params)()
        opt.step()
        state = sum(
            t.nbytes for s in opt.state.values() for t in s.values() if isinstance(t, Tensor)
        )
        tensors = state / sum(p.nbytes for p in params)
        return Spread(tensors, tensors, tensors)

    mine = held(lambda p: hm.Langevin(p, lr=LR, momentum=MOMENTUM, constraint=hm.Circle(1.0)))
    adam = held(lambda p: torch.optim.Adam(p))
    bench.rows.append(
        Row(
            bench.family,
            "state of c-CoLA-ud, in tensors of the weights' size",
            "Adam",
            "-",
            unit="tensors",
            ours=mine,
            theirs=adam,
            ratio=mine,
            goal=Goal(2.0),
            note="the ratio column is our count",
        )
    )


def sphere_step(bench: Bench) -> None:
    bound, norm = hm.Sphere(1.0), hm.Sphere(1.0, slack=False)
    bench.compare(
        {
            "SGD-m foreach": sgd(_matrices),
            "geoopt Sphere": _geoopt_sphere(),
            "slack, eager": ours(_matrices, constraint=bound, foreach=True),
            "slack": ours(_matrices, constraint=bound),
            "no slack, eager": ours(_matrices, constraint=norm, foreach=True),
            "no slack": ours(_matrices, constraint=norm),
        },
        [
            Pair("s-CoLA-ud step, ‖w‖ ≤ r, eager", "slack, eager", "SGD-m foreach", Goal(3.0)),
            Pair("s-CoLA-ud step, ‖w‖ = r, eager", "no slack, eager", "SGD-m foreach", Goal(3.0)),
            Pair("s-CoLA-ud step, ‖w‖ ≤ r, default", "slack", "SGD-m foreach", Goal(3.0)),
            Pair("s-CoLA-ud step, ‖w‖ = r, default", "no slack", "SGD-m foreach", Goal(3.0)),
            Pair("s-CoLA-ud step, ‖w‖ = r, default", "no slack", "geoopt Sphere"),
        ],
    )


def _geoopt_sphere() -> Maker:
    def build() -> Work:
        geoopt = peer("geoopt")
        sphere = geoopt.Sphere()
        points = [geoopt.ManifoldParameter(sphere.projx(p.data), sphere) for p in _matrices()]
        return stepping(points, geoopt.optim.RiemannianSGD(points, lr=LR, momentum=MOMENTUM))

    return build


def samplers_of_networks(bench: Bench) -> None:
    """Both take the gradient of the same linear loss; posteriors does so itself."""
    bench.compare(
        {
            "posteriors SGLD": _posteriors("sgld"),
            "posteriors SGHMC": _posteriors("sghmc"),
            "EM": _sampling(scheme="EM"),
            "OBA": _sampling(scheme="OBA"),
        },
        [
            Pair("SGLD step (EM) with gradient", "EM", "posteriors SGLD"),
            Pair("SGHMC step (OBA) with gradient", "OBA", "posteriors SGHMC"),
        ],
    )


def _linear_loss(params: list[Tensor], slopes: list[Tensor]) -> Tensor:
    return torch.stack([(p * g).sum() for p, g in zip(params, slopes, strict=True)]).sum()


def _slopes() -> list[Tensor]:
    return [g.detach() for g in weights(MLP, scale=0.01)]


def _sampling(**settings: Any) -> Maker:
    def build() -> Work:
        params, slopes = _mlp(), _slopes()
        opt = hm.Langevin(params, lr=LR, temperature=TEMPERATURE, seed=0, **settings)

        def work() -> None:
            opt.zero_grad()
            _linear_loss(list(params), slopes).backward()
            opt.step()

        return work

    return build


def _posteriors(name: str) -> Maker:
    def build() -> Work:
        method = getattr(peer("posteriors.sgmcmc"), name)
        slopes = _slopes()

        def log_posterior(params: dict[str, Tensor], batch: object) -> tuple[Tensor, Tensor]:
            value = -_linear_loss(list(params.values()), slopes)
            return value, value.detach()

        transform = method.build(log_posterior, lr=LR, temperature=TEMPERATURE)
        state = transform.init({str(i): p.detach() for i, p in enumerate(_mlp())})

        def work() -> None:
            nonlocal state
            state, _ = transform.update(state, None, inplace=True)

        return work

    return build
