"""What the terminal shows: progress while it runs, a table when it is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from holonomic.lab.experiment import Arm, Experiment
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
}


class Bars:
    """One bar an arm, and one for all."""

    def __init__(self, progress: Progress, e: Experiment) -> None:
        self._progress = progress
        self._epochs = e.epochs
        self._tasks = {arm.name: progress.add_task(arm.name, total=e.epochs) for arm in e.arms}

    def show(self, arm: Arm, epochs: int) -> None:
        """Take the epochs done of an arm (or a code below 0: trained, and being measured or done)."""
        note = " (measuring)" if epochs == MEASURING else ""
        done = self._epochs if epochs < 0 else epochs
        self._progress.update(self._tasks[arm.name], completed=done, description=arm.name + note)


class Screen:
    """The console of the command line."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def warn(self, message: str) -> None:
        self.console.print(f"[yellow]warning:[/] {message}", soft_wrap=True)

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

    def table(self, e: Experiment, summary: dict[str, Any]) -> None:
        """Every arm's final numbers, ours beside the paper's, then the verdicts."""
        n_runs, n_draws = e.runs, e.draws
        title = f"{e.id}: {e.title}\n{n_runs} runs on one draw of the data"
        table = Table(title=title + (f", {n_draws} draws with a run each" if n_draws else ""))
        table.add_column("method")
        for metric in e.metrics:
            table.add_column(LABELS[metric], justify="right")
            if n_draws:
                table.add_column("over draws", justify="right")
            table.add_column("paper", justify="right")
        for arm, metrics in summary["arms"].items():
            cells = [arm]
            for metric in e.metrics:
                m = metrics[metric]
                cells.append(shown(m["one_draw"]))
                if n_draws:
                    cells.append(shown(m["over_draws"]))
                cells.append("-" if m["paper"] is None else f"{m['paper']:.4g}")
            table.add_row(*cells)
        self.console.print(table)
        for v in summary["verdicts"]:
            self.console.print(f"  {v['claim']}: [bold]{v['verdict']}[/]")


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
