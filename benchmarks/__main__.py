"""`python -m benchmarks`: run the families, show the table, write the page."""

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks import (
    elementwise,
    level_set,
    orthogonal,
    replicas,
    report,
    sampling,
    scaling,
    training,
)
from benchmarks.bench import Bench, Chart
from benchmarks.rows import Row

FAMILIES: dict[str, tuple[str, Callable[[Bench], None]]] = {
    "elementwise": ("Circles, spheres and noise", elementwise.run),
    "orthogonal": ("Orthogonal matrices", orthogonal.run),
    "level_set": ("Level sets", level_set.run),
    "training": ("Whole training steps", training.run),
    "replicas": ("Replicas", replicas.run),
    "sampling": ("Sampling", sampling.run),
    "scaling": ("Growth", scaling.run),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "families", nargs="*", help=f"of {', '.join(FAMILIES)}; all of them if none"
    )
    parser.add_argument("--quick", action="store_true", help="a check in about two minutes")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    a = parser.parse_args()
    unknown = [f for f in a.families if f not in FAMILIES]
    if unknown:
        parser.error(f"no family {', '.join(unknown)}; choose of {', '.join(FAMILIES)}")
    warnings.filterwarnings("ignore", category=FutureWarning)  # what peers say of their own parts
    console = Console()
    again = [FAMILIES[key][0] for key in a.families or FAMILIES]
    rows, charts, minutes = report.earlier(a.out, again)
    bench = Bench(quick=a.quick)
    for key in a.families or FAMILIES:
        bench.family, run = FAMILIES[key]
        start = time.perf_counter()
        with console.status(f"measuring: {bench.family}"):
            run(bench)
        minutes[bench.family] = (time.perf_counter() - start) / 60
        console.print(f"{bench.family}: {minutes[bench.family]:.1f} min")
        report.write(_joined(bench, rows, charts), a.out, minutes)  # so far: the next may take long
    report.show(bench, console)
    console.print(f"{sum(minutes.values()):.1f} minutes; the page is {a.out / 'README.md'}")
    return 1 if bench.errors else 0


def _joined(bench: Bench, rows: list[Row], charts: list[Chart]) -> Bench:
    """With what an earlier run measured of other families."""
    order = [name for name, _ in FAMILIES.values()]
    new = {chart.name for chart in bench.charts}
    return replace(
        bench,
        rows=sorted([*rows, *bench.rows], key=lambda row: order.index(row.family)),
        charts=[*(c for c in charts if c.name not in new), *bench.charts],
    )


if __name__ == "__main__":
    raise SystemExit(main())
