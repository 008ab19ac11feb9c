"""How many run-steps a second: stacked replicas against an ordinary PyTorch loop over one run.

The setting is Figure 1's: a 2-500-1 ReLU network, batches of 2, plain SGD steps. The peer is the loop
a user would write, `torch.optim.SGD` on one module.
"""

import multiprocessing as mp
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import holonomic as hm
from benchmarks.bench import Bench, Chart, Line
from benchmarks.rows import Goal, Row
from benchmarks.timing import Spread, quiet, ratios, threads
from holonomic import native
from holonomic.lab.data import spiral
from holonomic.lab.measures import binary_loss
from holonomic.lab.models import mlp

N = 100
STEPS = 50  # of an epoch: 100 points in batches of 2
CIRCLES: dict[Any, hm.Constraint] = {"0.weight": hm.Circle(1.0), "2.weight": hm.Circle(5.0)}


class Case(NamedTuple):
    """What is trained: plain SGD, or with noise and circles; and whether the gradient is compiled."""

    noisy: bool
    compiled: bool

    @property
    def goal(self) -> Goal:
        return Goal(10, 30, faster=True) if self.noisy else Goal(20, 60, faster=True)

    def __str__(self) -> str:
        return ("τ > 0, circles" if self.noisy else "τ = 0") + (
            ", compiled" if self.compiled else ""
        )


def cases() -> list[Case]:
    ways = (False, True) if native.reason() is None else (False,)  # is there a compiler?
    return [Case(noisy, compiled) for noisy in (False, True) for compiled in ways]


Epoch = Callable[[], int]


def run(bench: Bench) -> None:
    seconds, rounds = (0.3, 2) if bench.quick else (1.5, 5)
    rates: dict[tuple[Any, ...], list[float]] = {}
    with threads(1):
        single, stacks = ordinary(), {case: stacked(N, case) for case in cases()}
        for work in (single, *stacks.values()):
            work()
        with quiet():
            for _ in range(rounds):
                rates.setdefault(("peer",), []).append(speed(single, seconds))
                for case, work in stacks.items():
                    rates.setdefault((case, 1), []).append(speed(work, seconds))
                    rates.setdefault((case, 2), []).append(two_processes(N, case, seconds))
    for case in stacks:
        for processes, label in ((1, "1"), (2, "2 processes")):
            values = rates[case, processes]
            bench.rows.append(
                Row(
                    bench.family,
                    f"run-steps of {N} replicas, {case}",
                    "loop over one run, SGD",
                    label,
                    unit="/s",
                    ours=Spread.of(values),
                    theirs=Spread.of(rates["peer",]),
                    ratio=ratios(values, rates["peer",]),
                    goal=case.goal,
                )
            )
    growth(bench)


def growth(bench: Bench) -> None:
    """Seconds a step of the whole stack, against the number of replicas; not of compiled ones, which
    would be compiled anew for every number."""
    sizes = (1, 10, 100) if bench.quick else (1, 3, 10, 30, 100, 300, 1000)
    lines = []
    for case in (Case(False, False), Case(True, False)):
        seconds = [
            bench.measure({"epoch": partial(stacked, n, case)}, bench.slow())["epoch"] / STEPS
            for n in sizes
        ]
        lines.append(Line(str(case), list(map(float, sizes)), seconds, fit_from=sizes[-3]))
    bench.charts.append(
        Chart(
            "replicas",
            "A step of n stacked replicas, gradient included (2-500-1 network, batches of 2)",
            "replicas n",
            lines,
        )
    )


def ordinary() -> Epoch:
    """One run with `torch.optim.SGD`: a function that takes an epoch and counts run-steps."""
    x, y = _data()
    net = mlp(2, 500, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)

    def epoch() -> int:
        for index in torch.randperm(100).split(2):
            opt.zero_grad()
            loss = binary_cross_entropy_with_logits(net(x[index]).squeeze(-1), y[index])
            loss.backward()
            opt.step()
        return STEPS

    return epoch


def stacked(n: int, case: Case) -> Epoch:
    """n replicas in one program."""
    x, y = _data()
    replicas = hm.Replicas(lambda: mlp(2, 500, 1), n, compile=case.compiled)
    opt = hm.Langevin(
        replicas.groups(CIRCLES if case.noisy else {}),
        lr=0.05,
        scheme="EM",
        temperature=5e-5 if case.noisy else 0.0,
        generator=replicas.noise() if case.noisy else None,
        nonfinite="allow",
    )
    order = replicas.order(x, y, 2)

    def epoch() -> int:
        for xs, ys in order:
            replicas.backward(binary_loss, xs, ys)
            opt.step()
        return STEPS * n

    return epoch


def speed(work: Epoch, seconds: float) -> float:
    """Run-steps a second over about that many seconds."""
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        done += work()
    return done / (time.perf_counter() - start)


def two_processes(n: int, case: Case, seconds: float) -> float:
    """What the lab does: a process a core, each with half of the work."""
    context = mp.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    arguments = (n // 2, case, seconds, ready, results)
    processes = [context.Process(target=_process, args=arguments) for _ in range(2)]
    for p in processes:
        p.start()
    total = sum(results.get(timeout=300) for _ in processes)
    for p in processes:
        p.join()
    return total


def _process(n: int, case: Case, seconds: float, ready: Any, results: Any) -> None:
    torch.set_num_threads(1)
    work = stacked(n, case)
    work()
    ready.wait()
    results.put(speed(work, seconds))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    return spiral(100, 2, 1.0, 0.05, seed=0)
