"""Jobs side by side: one single-threaded process a core, which is faster than threads on small nets.

One thread each also makes the numbers independent of how many workers there are.
"""

import multiprocessing as mp
import os
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from holonomic.errors import HolonomicError
from holonomic.lab.experiment import Arm, Experiment
from holonomic.lab.train import Progress, Stop, Trained, train

Finish = Callable[[Experiment, Arm, Trained, Path], None]

MEASURING = -1  # progress while an arm is trained and being measured
DONE = -2


class WorkerError(HolonomicError):
    """A worker process failed; what is finished is kept."""


class Job(Protocol):
    """A piece of work that a process can take whole, and that can be pickled."""

    @property
    def name(self) -> str:
        """What it is called when it fails."""

    def work(self, out: Path, progress: Progress, warn: Callable[[str], None], stop: Stop) -> None:
        """Do it, and write the results below ``out``; KeyboardInterrupt if ``stop`` was asked for."""


@dataclass(frozen=True)
class ArmJob:
    """All replicas of an arm."""

    e: Experiment
    arm: Arm
    finish: Finish

    @property
    def name(self) -> str:
        return self.arm.name

    def work(self, out: Path, progress: Progress, warn: Callable[[str], None], stop: Stop) -> None:
        checkpoint = out / f"{self.arm.slug}.ckpt"
        trained = train(self.e, self.arm, checkpoint, progress, warn, stop)
        progress(MEASURING)
        self.finish(self.e, self.arm, trained, out)


def default_workers() -> int:
    """One worker a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_arms(
    e: Experiment,
    arms: list[Arm],
    out: Path,
    finish: Finish,
    show: Callable[[Arm, int], None],
    warn: Callable[[str], None],
    workers: int,
) -> None:
    """Train and finish arms, ``workers`` at a time; ``show`` gets an arm's epochs as they pass."""

    def shown(progress: Sequence[int]) -> None:
        for arm, epochs in zip(arms, progress, strict=True):
            show(arm, epochs)

    run_jobs([ArmJob(e, arm, finish) for arm in arms], out, shown, warn, workers)


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    show: Callable[[Sequence[int]], None],
    warn: Callable[[str], None],
    workers: int,
) -> None:
    """Do jobs, ``workers`` at a time; ``show`` gets every job's epochs (or a code) as they pass.

    Raises KeyboardInterrupt when stopped (after every worker has saved a checkpoint) and `WorkerError`
    when a worker fails."""
    context = mp.get_context("spawn")
    progress = context.Array("i", len(jobs))
    messages: Any = context.Queue()
    tasks: Any = context.Queue()
    for i in range(len(jobs)):
        tasks.put(i)
    halt = context.Event()
    arguments = (jobs, out, progress, messages, tasks, halt)
    with Stop() as stop:
        processes = [
            context.Process(target=_work, args=arguments, daemon=True)
            for _ in range(min(workers, len(jobs)))
        ]
        for process in processes:
            process.start()
        failures: list[str] = []
        while any(p.is_alive() for p in processes):
            time.sleep(0.25)
            if stop.asked:  # a signal may have reached this process alone
                halt.set()
            _drain(messages, warn, failures)
            show(progress[:])
        _drain(messages, warn, failures)
        show(progress[:])
    if failures:
        raise WorkerError(
            f"{len(failures)} of {len(jobs)} methods failed; the others are finished."
        )
    if stop.asked:
        raise KeyboardInterrupt
    lost = [p.exitcode for p in processes if p.exitcode]
    if lost:
        raise WorkerError(
            f"a worker process ended with code {lost[0]} (out of memory, or killed); repeat the "
            f"command to go on from the last checkpoint, with fewer --workers if memory is short."
        )


def _drain(messages: Any, warn: Callable[[str], None], failures: list[str]) -> None:
    while True:
        try:
            kind, text = messages.get_nowait()
        except queue.Empty:
            return
        warn(text)
        if kind == "failure":
            failures.append(text)


def _work(
    jobs: Sequence[Job], out: Path, progress: Any, messages: Any, tasks: Any, halt: Any
) -> None:
    """Take jobs from the queue until there are none, or until the parent says stop or is gone."""
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there is a process a core already
    parent = mp.parent_process()

    def told() -> bool:
        return halt.is_set() or (parent is not None and not parent.is_alive())

    with Stop(told) as stop:
        while not stop.asked:
            try:
                i = tasks.get(timeout=0.5)
            except queue.Empty:
                return

            def passed(epochs: int, i: int = i) -> None:
                progress[i] = epochs

            try:
                jobs[i].work(out, passed, lambda text: messages.put(("warning", text)), stop)
                progress[i] = DONE
            except KeyboardInterrupt:
                return
            except Exception:
                text = f"arm {jobs[i].name!r} failed:\n{traceback.format_exc()}"
                messages.put(("failure", text))
