"""The table in the terminal, and the page with charts."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.bench import Bench, Chart, Line
from benchmarks.rows import COLUMNS, Row, median
from benchmarks.timing import exponent
from holonomic.lab.files import write_json, write_text
from holonomic.lab.plots import COLOURS

MARKERS = "osD^vP*"
STYLE = {"PASS": "green", "SHORT": "bold red"}


def show(bench: Bench, console: Console) -> None:
    """Every row, by family, narrow enough for a terminal; quartiles of times are on the page."""
    for family, rows in groupby(bench.rows, key=lambda r: r.family):
        table = Table(title=family, title_justify="left", pad_edge=False)
        table.add_column("what, against", ratio=1)
        for column in ("thr.", "ours", "peer", "ratio", "reach", ""):
            table.add_column(column, no_wrap=True)
        for row in rows:
            note = f"\n[dim]{escape(row.note)}[/]" if row.note else ""
            table.add_row(
                f"{escape(row.what)}\n  [dim]{escape(row.peer)}[/]{note}",
                row.threads.replace(" processes", "p"),
                median(row.ours, row.unit),
                median(row.theirs, row.unit),
                median(row.ratio, ""),
                row.goal.shown(row.goal.reach),
                f"[{STYLE[row.verdict]}]{row.verdict}[/]" if row.verdict else "",
            )
        console.print(table)
    counts = tally(bench.rows)
    console.print(f"[green]{counts['PASS']} PASS[/], [bold red]{counts['SHORT']} SHORT[/]")
    for error in bench.errors:
        console.print(f"[yellow]failed:[/] {error}", soft_wrap=True, highlight=False)


def tally(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows with a goal reached it, and how many did not."""
    return {v: sum(r.verdict == v for r in rows) for v in ("PASS", "SHORT")}


def write(bench: Bench, out: Path, minutes: dict[str, float]) -> None:
    """bench.json, README.md and the charts."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = [(c.title, _save(draw(c), out / f"{c.name}.png"), c.note) for c in bench.charts]
    judged = [r for r in bench.rows if r.ratio and r.goal.reach is not None]
    if judged:
        figure = _save(draw_verdicts(judged), out / "verdicts.png")
        pictures.insert(0, ("Every goal", figure, "Left of the line, or on it, passes."))
    record = {
        "quick": bench.quick,
        "machine": machine(),
        "minutes": minutes,
        "rows": [r.record() for r in bench.rows],
        "charts": [asdict(c) for c in bench.charts],
        "errors": bench.errors,
    }
    write_json(out / "bench.json", record)
    write_text(out / "README.md", page(bench, pictures, minutes))


def earlier(out: Path, again: Sequence[str]) -> tuple[list[Row], list[Chart], dict[str, float]]:
    """What an earlier run left in a folder, less the families that are measured again."""
    path = out / "bench.json"
    if not path.exists():
        return [], [], {}
    record = json.loads(path.read_text())
    rows = [Row.of(r) for r in record["rows"] if r["family"] not in again]
    charts = [Chart(**{**c, "lines": [Line(**x) for x in c["lines"]]}) for c in record["charts"]]
    minutes = {k: v for k, v in record["minutes"].items() if k not in again}
    return rows, charts, minutes


def machine() -> dict[str, Any]:
    """What it ran on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load before": round(os.getloadavg()[0], 2),
    }


def page(bench: Bench, pictures: list[tuple[str, str, str]], minutes: dict[str, float]) -> str:
    """The page as Markdown."""
    counts = tally(bench.rows)
    facts = ", ".join(f"{k} {v}" for k, v in machine().items())
    lines = [
        "# Benchmarks",
        "",
        f"Written by `make bench`{' QUICK=1 (few rounds: a check, not a result)' if bench.quick else ''}."
        f" {counts['PASS']} PASS, {counts['SHORT']} SHORT. {sum(minutes.values()):.1f} minutes. "
        f"Machine: {facts}.",
        "",
        "A row compares two things measured in the same run, taking turns (A B A B ...). Numbers are "
        "medians with [quartiles]; the ratio is taken round by round. With a reach of ≤ the ratio is our "
        "cost over the peer's, with ≥ how many times faster ours is. Rows marked (peer) have the peer's "
        "cost in the place of ours.",
    ]
    for family, rows in groupby(bench.rows, key=lambda r: r.family):
        lines += ["", f"## {family}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(row.cells()) for row in rows]
    lines += ["", "## Charts"]
    for title, name, note in pictures:
        lines += ["", f"![{title}]({name})"]
        lines += ["", note] if note else []
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


# ---------------------------------------------------------------------- charts
def draw(chart: Chart) -> Figure:
    """Seconds (and memory, if measured) against size, log-log, exponents in the legend."""
    with_memory = any(line.bytes for line in chart.lines)
    figure, axes = plt.subplots(
        1, 2 if with_memory else 1, figsize=(9.5 if with_memory else 5.5, 3.8), squeeze=False
    )
    figure.set_layout_engine("constrained")
    figure.suptitle(chart.title, fontsize=10)
    _loglog(axes[0][0], chart, "seconds a step", lambda line: line.seconds)
    if with_memory:
        _loglog(
            axes[0][1],
            chart,
            "peak memory of a step / MB",
            lambda line: np.array(line.bytes) / 1e6,
            1e-3,
        )
    return figure


def _loglog(axis: Axes, chart: Chart, label: str, values: Any, least: float = 0) -> None:
    for i, line in enumerate(chart.lines):
        y = np.array(values(line), dtype=float)
        positive = y > least
        sizes = np.array(line.sizes)
        axis.plot(
            sizes[positive],
            y[positive],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=4,
            label=legend(line, sizes[positive], y[positive]),
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(chart.size)
    axis.set_ylabel(label)
    axis.legend(fontsize=7)


def legend(line: Line, sizes: Any, values: Any) -> str:
    """The name with the fitted exponent, where there are points to fit."""
    if not len(sizes):
        return f"{line.name}: none"
    top = sizes >= line.fit_from
    if top.sum() < 2:
        return line.name
    return f"{line.name}: exponent {exponent(sizes[top], values[top]):.2f} from {line.fit_from:,.0f} on"


def draw_verdicts(rows: Sequence[Row]) -> Figure:
    """Ratio over reach, 1 and less passes; the inverse for goals of speed."""
    figure, axis = plt.subplots(figsize=(8.5, 0.22 * len(rows) + 1.2), constrained_layout=True)
    axis.axvline(1.0, color="black", linewidth=1)
    for y, row in enumerate(rows):
        assert row.ratio is not None
        low, mid, high = (_share(row, x) for x in (row.ratio.low, row.ratio.median, row.ratio.high))
        passed = row.verdict == "PASS"
        colour, marker = (COLOURS[0], "o") if passed else (COLOURS[4], "X")
        axis.plot([low, high], [y, y], color=colour, linewidth=1.5)
        axis.plot(mid, y, color=colour, marker=marker, markersize=5)
    axis.set_yticks(range(len(rows)), [f"{r.what} ({r.threads})" for r in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xscale("log")
    axis.set_xlabel(
        "cost relative to the reach (circles pass, crosses fall short; in brackets the threads)"
    )
    return figure


def _share(row: Row, ratio: float) -> float:
    assert row.goal.reach is not None
    return row.goal.reach / ratio if row.goal.faster else ratio / row.goal.reach


def _save(figure: Figure, path: Path) -> str:
    figure.savefig(path)
    plt.close(figure)
    return path.name


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
