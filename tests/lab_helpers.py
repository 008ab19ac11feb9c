"""What tests of the lab share."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from holonomic.lab.screen import Screen
from holonomic.lab.train import Stop
from holonomic.lab.workers import DONE, Job


def quiet() -> Screen:
    """A screen that shows nothing."""
    return Screen(Console(quiet=True))


def in_this_process(
    jobs: Sequence[Job],
    out: Path,
    show: Callable[[Sequence[int]], None],
    warn: Callable[[str], None],
    workers: int,
) -> None:
    """`holonomic.lab.workers.run_jobs` without waiting for processes to start."""
    progress = [0] * len(jobs)
    for i, job in enumerate(jobs):
        job.work(out, partial(progress.__setitem__, i), warn, Stop())
        progress[i] = DONE
        show(progress)
