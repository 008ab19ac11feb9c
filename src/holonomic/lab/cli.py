"""The command line: list, run, report, demo, doctor."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from holonomic.doctor import main as examine
from holonomic.errors import HolonomicError
from holonomic.lab.experiment import ALIASES, CHAPTERS, Experiment, experiment, experiments
from holonomic.lab.files import write_text
from holonomic.lab.screen import Screen

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Run the experiments of the papers, and see ours beside theirs.\n\n"
    "`holonomic demo` takes two minutes; `holonomic list` shows all; `holonomic run fig1` runs one "
    "(stop with Ctrl-C, repeat the command to go on).",
)
screen = Screen()

Out = Annotated[Path | None, typer.Option(help="Folder of the results [default: runs/NAME].")]

Workers = Annotated[
    int | None, typer.Option(help="Processes side by side [default: one per core].", min=1)
]


@app.command("list")
def list_() -> None:
    """List the experiments."""
    for chapter, title in CHAPTERS.items():
        columns = ("name", "what", "methods", "epochs", "runs + draws")
        table = Table(*columns, title=f"chapter {chapter}: {title}", title_justify="left")
        known = {name: e for name, e in experiments().items() if e.chapter == chapter}
        for name, e in sorted(known.items(), key=_numbers):
            also = [alias for alias, run_as in ALIASES.items() if run_as == name]
            name = ", ".join([name, *also])
            table.add_row(name, e.title, str(len(e.arms)), f"{e.epochs:,}", f"{e.runs} + {e.draws}")
        screen.console.print(table)


def _numbers(item: tuple[str, Experiment]) -> list[int]:
    """The numbers in a name: fig3.9 comes before fig3.10."""
    return [int(n) for n in re.findall(r"\d+", item[0])]


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="An experiment; see `holonomic list`.")],
    runs: Annotated[int | None, typer.Option(help="Runs on one draw of the data.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of training.")] = None,
    data_draws: Annotated[
        int | None, typer.Option(help="More runs, each on a draw of its own.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to train: cpu, cuda, ...")] = None,
    out: Out = None,
    workers: Workers = None,
    force: Annotated[bool, typer.Option(help="Replace results of another configuration.")] = False,
) -> None:
    """Run an experiment, or go on with one that was stopped; ends with a table and a report."""
    from holonomic.lab.runner import adjusted

    e = adjusted(
        experiment(name), runs=runs, epochs=epochs, draws=data_draws, seed=seed, device=device
    )
    _run(e, out or Path("runs") / e.id, force, workers)


@app.command()
def report(
    name: Annotated[str, typer.Argument(help="The experiment the folder is of.")], out: Out = None
) -> None:
    """Draw the figures of a folder of results again, and write its pages: report.html, README.md
    (with what remarks.md beside it says), and the overview of all experiments one folder up."""
    e = experiment(name)
    _report(e, out or Path("runs") / e.id)


@app.command()
def doctor() -> None:
    """Say what this installation has (torch, processor, compiled kernels, threads), and why not more."""
    examine()


@app.command()
def demo(out: Out = None, workers: Workers = None) -> None:
    """Five methods on the two-turn spiral at a reduced size, in about two minutes."""
    e = experiment("fig1")
    small = replace(
        e,
        epochs=1000,
        runs=10,
        draws=0,
        records=25,
        figures=("boundaries", "curves", "slopes"),
        metrics=("test_accuracy", "test_loss"),
        claims=tuple(c for c in e.claims if not c.metric.startswith("curvature")),
        title="noise and magnitude constraints on the two-turn spiral, at a tenth of the epochs",
    )
    _run(small, out or Path("runs") / "demo", True, workers)


def _run(e: Experiment, out: Path, force: bool, workers: int | None) -> None:
    from holonomic.lab import runner
    from holonomic.lab.real import RealExperiment
    from holonomic.lab.real import runner as real_runner
    from holonomic.lab.report import write_report

    screen.console.print(f"[bold]{e.id}[/]: {e.title}\n{e.setting}.", highlight=False)
    try:
        if isinstance(e, RealExperiment):
            summary = real_runner.run(e, out, screen, force=force, workers=workers)
        else:
            summary = runner.run(e, out, screen, force=force, workers=workers)
    except KeyboardInterrupt:
        screen.warn(f"stopped; what is done is in {out}. Repeat the command to go on.")
        raise typer.Exit(130) from None
    screen.table(e, summary)
    screen.console.print(f"report: {write_report(e, summary, out, screen.warn)}", soft_wrap=True)


def _report(e: Experiment, out: Path) -> None:
    from holonomic.lab.report import markdown, overview, write_report
    from holonomic.lab.runner import adjusted

    path = out / "summary.json"
    if not path.exists():
        raise typer.BadParameter(
            f"{path} is missing; run `holonomic run {e.id} --out {out}` first."
        )
    summary = json.loads(path.read_text())
    config = summary["config"]
    sizes = {k: config[k] for k in ("runs", "epochs", "draws", "seed")}
    e = adjusted(e, **sizes)
    page = write_report(e, summary, out, screen.warn)
    remarks = out / "remarks.md"
    text = markdown(e, summary, remarks.read_text() if remarks.exists() else "")
    write_text(out / "README.md", text)
    write_text(out.parent / "README.md", overview(out.parent, experiments()))
    screen.console.print(f"report: {page}", soft_wrap=True)


def main() -> None:
    """Run the command line; errors of ours are shown without a traceback."""
    try:
        app()
    except HolonomicError as error:
        screen.console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
