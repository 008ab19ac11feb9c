"""What generality costs: a constraint written as a function against its closed form."""

import numpy as np
from torch import Tensor, nn

import holonomic as hm
from benchmarks.bench import Bench, Chart, Line, Pair
from benchmarks.rows import Goal, Row
from benchmarks.subjects import ours, weights
from benchmarks.timing import Spread, exponent

WEIGHTS = 4096
EQUATIONS = (8, 16, 32, 64, 128, 256, 512)
SLACK_IN_EXPONENT = 0.15  # what caches may add to the operations that are counted


def run(bench: Bench) -> None:
    circle(bench)
    growth(bench)


def _inside(theta: Tensor) -> Tensor:
    return theta**2 - 1


def circle(bench: Bench) -> None:
    """|theta| <= 1 for 64 weights, once as 64 equations and once in closed form."""

    def make() -> list[nn.Parameter]:
        return weights([(64,)])

    bench.compare(
        {
            "Circle": ours(make, constraint=hm.Circle(1.0)),
            "LevelSet": ours(make, constraint=hm.LevelSet(_inside, inequality=True)),
        },
        [Pair("LevelSet, |θ| ≤ 1 for 64 weights", "LevelSet", "Circle")],
    )


def operations(m: int, n: int) -> float:
    """Of one Jacobian and one solve, up to a factor: m backward passes over n weights, the m x m
    products J J^T, and its factors."""
    return m * n + m * m * n + m**3 / 3


def growth(bench: Bench) -> None:
    """m block norms fixed among 4,096 weights: the time against m."""

    def blocks(m: int) -> hm.LevelSet:
        return hm.LevelSet(lambda q: q.reshape(m, -1).square().sum(1) - 1)

    def make() -> list[nn.Parameter]:
        return weights([(WEIGHTS,)])

    sizes = EQUATIONS[:-2] if bench.quick else EQUATIONS
    seconds = [
        bench.measure({"ours": ours(make, constraint=blocks(m))}, bench.effort)["ours"]
        for m in sizes
    ]
    top = sizes[len(sizes) // 2 :]
    measured = exponent(top, seconds[-len(top) :])
    predicted = exponent(top, [operations(m, WEIGHTS) for m in top])
    bench.rows.append(
        Row(
            bench.family,
            f"LevelSet, m equations in {WEIGHTS:,} weights: exponent of m",
            "operations counted",
            "1",
            unit="",
            ours=_single(measured),
            theirs=_single(predicted),
            ratio=_single(measured / predicted),
            goal=Goal(round(1 + SLACK_IN_EXPONENT / predicted, 2)),
            note=f"fitted to m = {top[0]} ... {top[-1]}",
        )
    )
    model = [operations(m, WEIGHTS) for m in sizes]
    unit = float(np.median(np.array(seconds[-len(top) :]) / np.array(model[-len(top) :])))
    bench.charts.append(
        Chart(
            "level_set",
            f"LevelSet: a step with m equations in {WEIGHTS:,} weights",
            "equations m",
            [
                Line("LevelSet", list(map(float, sizes)), seconds, fit_from=top[0]),
                Line(
                    "operations counted, scaled",
                    list(map(float, sizes)),
                    [unit * c for c in model],
                    fit_from=top[0],
                ),
            ],
        )
    )


def _single(x: float) -> Spread:
    return Spread(x, x, x)
