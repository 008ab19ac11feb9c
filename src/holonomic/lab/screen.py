"""What the terminal shows: progress while it runs, a table when it is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from holonomic.lab.experiment import Experiment
from holonomic.lab.workers import MEASURING

LABELS = {
    "test_accuracy": "test accuracy / %",
    "test_loss": "test loss",
    "train_loss": "train loss",
    "curvature_mean": "mean curvature",
    "curvature_std": "std of curvature",
    "curvature_max": "max curvature",
    "curvature_median": "median curvature",
    "slope": "steepest slope",
    "valid_loss": "validation loss",
    "valid_perplexity": "validation perplexity",
    "test_perplexity": "test perplexity",
    "largest_weight": "largest weight",
    "output_weight": "largest weight, last layer",
    "ece": "calibration error / %",
    "lipschitz": "Lipschitz bound",
    "safe_radius": "median safe radius",
    "deviation": "deviation of accuracy / %",
    "loss_rise": "rise of test loss above its minimum",
    "steps_to_90": "steps to 90 %",
    "barrier": "barrier of loss above the start",
}


class Named(Protocol):
    """An arm of any experiment."""

    @property
    def name(self) -> str: ...


class Bars:
    """One bar an arm, and one for all."""

    def __init__(self, progress: Progress, e: Experiment) -> None:
        self._progress = progress
        self._epochs = e.epochs
        self._tasks = {arm.name: progress.add_task(arm.name, total=e.epochs) for arm in e.arms}

    def show(self, arm: Named, epochs: int) -> None:
        """Take the epochs done of an arm (or a code below 0: trained, and being measured or done)."""
        note = " (measuring)" if epochs == MEASURING else ""
        done = self._epochs if epochs < 0 else epochs
        self._progress.update(self._tasks[arm.name], completed=done, description=arm.name + note)


class Screen:
    """The console of the command line."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def warn(self, message: str) -> None:
        self.console.print(f"[yellow]warning:[/] {escape(message)}", soft_wrap=True)

    @contextmanager
    def running(self, e: Experiment) -> Iterator[Bars]:
        """Progress bars for every arm, with the time left."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epochs"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console, refresh_per_second=2) as progress:
            yield Bars(progress, e)

    @contextmanager
    def fetching(self) -> Iterator[Callable[[str, int, int], None]]:
        """Takes (name, bytes so far, bytes in all) of files that are being fetched."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            tasks: dict[str, TaskID] = {}

            def show(name: str, done: int, total: int) -> None:
                if name not in tasks:
                    tasks[name] = progress.add_task(f"fetching {name}")
                progress.update(tasks[name], completed=done, total=total or None)

            yield show

    def table(self, e: Experiment, summary: dict[str, Any]) -> None:
        """Every arm's final numbers, ours beside the paper's, then the verdicts."""
        step = 1 if e.draws else 2  # what fits a terminal of 80 columns
        for i in range(0, len(e.metrics), step):
            head, *rows = result_rows(e, summary, e.metrics[i : i + step])
            table = Table(title=f"{e.id}: {e.title}\n{sizes(e)}" if i == 0 else None)
            for k, column in enumerate(head):
                table.add_column(column, justify="right" if k else "left")
            for row in rows:
                table.add_row(*map(escape, row))
            self.console.print(table)
        for v in summary["verdicts"]:
            self.console.print(f"  {v['claim']}: [bold]{v['verdict']}[/]")


def sizes(e: Experiment) -> str:
    """How many runs of what."""
    over = f" and {e.draws} more with a draw of their own each" if e.draws else ""
    runs, epochs = ("s" if n != 1 else "" for n in (e.runs, e.epochs))
    return f"{e.runs} run{runs} on one draw of the data{over}; {e.epochs:,} epoch{epochs}."


def result_rows(
    e: Experiment, summary: dict[str, Any], metrics: tuple[str, ...] | None = None
) -> list[list[str]]:
    """The table of results as text: a head, and a row a method, ours beside the paper's if it has any."""
    chosen = e.metrics if metrics is None else metrics
    printed = {metric for numbers in e.paper.values() for metric in numbers}
    head = ["method"]
    for metric in chosen:
        head.append(LABELS[metric])
        head += ["over draws"] if e.draws else []
        head += ["paper"] if metric in printed else []
    rows = [head]
    for arm, measured in summary["arms"].items():
        row = [arm]
        for metric in chosen:
            m = measured[metric]
            row.append(shown(m["one_draw"]))
            if e.draws:
                row.append(shown(m["over_draws"]))
            if metric in printed:
                row.append("" if m["paper"] is None else f"{m['paper']:.4g}")
        rows.append(row)
    return rows


def shown(s: dict[str, Any]) -> str:
    """mean [95 % interval]."""
    if s["mean"] is None:
        return "-"
    lost = f" ({s['diverged']} diverged)" if s["diverged"] else ""
    if s["n"] < 2:
        return f"{s['mean']:.3g}{lost}"
    digits = 1 if abs(s["mean"]) >= 20 else 2 if abs(s["mean"]) >= 2 else 3
    if abs(s["mean"]) >= 1e4:
        return f"{s['mean']:.2e}{lost}"
    return f"{s['mean']:.{digits}f} [{s['low']:.{digits}f}, {s['high']:.{digits}f}]{lost}"
