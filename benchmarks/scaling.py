"""How time and memory grow with the number of weights."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import nn
from torch.profiler import ProfilerActivity, profile

import holonomic as hm
from benchmarks.bench import Bench, Chart, Line, Maker
from benchmarks.orthogonal import GRAM, geoopt_step, gram, matrices
from benchmarks.subjects import ours, sgd, weights
from benchmarks.timing import Effort, Work, threads

MEMORY_NOTE = (
    "Memory is the largest amount that torch's allocator holds at once during a step beyond what it "
    "held before (weights, gradients and state are not in it), from torch's profiler."
)
FLOATS_A_WEIGHT = 10  # gradients (two of them), state and temporaries of 1e8 weights must fit


def run(bench: Bench) -> None:
    circle(bench)
    orthogonal(bench)


def circle(bench: Bench) -> None:
    sizes = [10**k for k in range(4, 8 if bench.quick else 9)]
    sizes = [n for n in sizes if FLOATS_A_WEIGHT * 4 * n < available_memory()]

    def contenders(n: int) -> dict[str, Maker]:
        def make() -> list[nn.Parameter]:
            return weights([(n,)])

        circle = hm.Circle(1.0)
        return {
            "Circle, eager": ours(make, constraint=circle, foreach=True),
            "Circle": ours(make, constraint=circle),
            "SGD-m": sgd(make),
        }

    grow(bench, "circle", "c-CoLA-ud on n weights, τ = 0", "weights n", sizes, contenders, 1e6)


def orthogonal(bench: Bench) -> None:
    sizes = [2**k for k in range(5, 11 if bench.quick else 12)]

    def contenders(n: int) -> dict[str, Maker]:
        return {
            "Orthogonal": ours(matrices((n, n)), constraint=hm.Orthogonal()),
            "geoopt, euclidean": geoopt_step((n, n), "euclidean"),
            GRAM: gram((n, n)),
        }

    title = "o-CoLA-ud on an n × n matrix (r s² = n³)"
    grow(bench, "orthogonal", title, "size n", sizes, contenders, 256)


def grow(
    bench: Bench,
    name: str,
    title: str,
    axis: str,
    sizes: list[int],
    contenders: Callable[[int], dict[str, Maker]],
    fit_from: float,
) -> None:
    """One chart: every contender at every size. The large ones take turns too, but fewer."""
    lines: dict[str, Line] = {}
    for n in sizes:
        large = n >= sizes[-1] / 10 and n > 512
        effort = Effort(3, 0.0, 1) if large else bench.effort
        makers = contenders(n)
        taken = bench.measure(makers, effort) if not large else _one_by_one(bench, makers, effort)
        for label, seconds in taken.items():
            line = lines.setdefault(label, Line(label, [], [], [], fit_from))
            line.sizes.append(n)
            line.seconds.append(seconds)
            line.bytes.append(_memory(makers[label]))
    bench.charts.append(Chart(name, title, axis, list(lines.values()), MEMORY_NOTE))


def _one_by_one(bench: Bench, makers: dict[str, Maker], effort: Effort) -> dict[str, float]:
    """Not all in memory at once."""
    return {
        k: v for label in makers for k, v in bench.measure({label: makers[label]}, effort).items()
    }


def _memory(make: Maker) -> float:
    with threads(1):
        work = make()
        work()
        return float(peak_bytes(work))


def peak_bytes(work: Work) -> int:
    """The most that is allocated at once during a call, beyond what was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    moves = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    held = peak = 0
    for _, size in moves:
        held += size
        peak = max(peak, held)
    return peak


def available_memory() -> float:
    """Bytes that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4e9
