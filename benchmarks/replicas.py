"""How many run-steps a second: stacked replicas against an ordinary PyTorch loop over one run.

The setting is Figure 1's: a 2-500-1 ReLU network, batches of 2, plain SGD steps. The peer is the loop
a user would write, `torch.optim.SGD` on one module, measured in the same run and interleaved. Every
number is a median over repetitions.

    python benchmarks/replicas.py
"""

import argparse
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import holonomic as hm
from holonomic.lab.data import spiral
from holonomic.lab.measures import binary_loss
from holonomic.lab.models import mlp

X, Y = spiral(100, 2, 1.0, 0.05, seed=0)
CIRCLES = {"0.weight": hm.Circle(1.0), "2.weight": hm.Circle(5.0)}
REACH = {"plain": 20, "noise + circles": 10}


def ordinary() -> Callable[[], int]:
    """One run with `torch.optim.SGD`; returns a function that takes an epoch and counts run-steps."""
    net = mlp(2, 500, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)

    def epoch() -> int:
        for index in torch.randperm(100).split(2):
            opt.zero_grad()
            loss = binary_cross_entropy_with_logits(net(X[index]).squeeze(-1), Y[index])
            loss.backward()
            opt.step()
        return 50

    return epoch


def stacked(n: int, noisy: bool) -> Callable[[], int]:
    """n replicas in one program."""
    replicas = hm.Replicas(lambda: mlp(2, 500, 1), n)
    opt = hm.Langevin(
        replicas.groups(CIRCLES if noisy else {}),
        lr=0.05,
        scheme="EM",
        temperature=5e-5 if noisy else 0.0,
        generator=replicas.noise() if noisy else None,
        nonfinite="allow",
    )
    order = replicas.order(X, Y, 2)

    def epoch() -> int:
        for x, y in order:
            replicas.backward(binary_loss, x, y)
            opt.step()
        return 50 * n

    return epoch


def speed(work: Callable[[], int], seconds: float) -> float:
    """Run-steps a second over about that many seconds."""
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        done += work()
    return done / (time.perf_counter() - start)


def _process(n: int, noisy: bool, seconds: float, ready: Any, results: Any) -> None:
    torch.set_num_threads(1)
    work = stacked(n, noisy)
    work()
    ready.wait()
    results.put(speed(work, seconds))


def two_processes(n: int, noisy: bool, seconds: float) -> float:
    """What the lab does: a process a core, each with half of the work."""
    context = mp.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    arguments = (n // 2, noisy, seconds, ready, results)
    processes = [context.Process(target=_process, args=arguments) for _ in range(2)]
    for p in processes:
        p.start()
    total = sum(results.get() for _ in processes)
    for p in processes:
        p.join()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    a = parser.parse_args()
    torch.set_num_threads(1)
    single = ordinary()
    ours = {"plain": stacked(a.n, False), "noise + circles": stacked(a.n, True)}
    for work in (single, *ours.values()):
        work()
    peer: list[float] = []
    one: dict[str, list[float]] = {k: [] for k in ours}
    two: dict[str, list[float]] = {k: [] for k in ours}
    for _ in range(a.repeats):
        peer.append(speed(single, a.seconds))
        for name, work in ours.items():
            one[name].append(speed(work, a.seconds))
            two[name].append(two_processes(a.n, name != "plain", a.seconds))
    base = statistics.median(peer)
    print(f"torch.optim.SGD, one run, one thread: {base:,.0f} run-steps/s")
    for name in ours:
        for label, values in (("one process ", one[name]), ("two processes", two[name])):
            mid = statistics.median(values)
            verdict = "PASS" if mid / base >= REACH[name] else "SHORT"
            print(
                f"{name:16s} n={a.n} {label}: {mid:10,.0f} run-steps/s = {mid / base:5.1f} x "
                f"({min(values) / base:.1f} to {max(values) / base:.1f}; reach {REACH[name]}) {verdict}"
            )


if __name__ == "__main__":
    main()
