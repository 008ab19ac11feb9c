"""Running an experiment on real data: every run of every arm is a job; arms are put together from
them."""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from holonomic.lab.experiment import described
from holonomic.lab.files import previous, write_json
from holonomic.lab.measures import LESS_IS_BETTER
from holonomic.lab.real.experiment import Method, RealExperiment
from holonomic.lab.real.task import prefetch
from holonomic.lab.real.train import train
from holonomic.lab.runner import claim_folder, write_summary
from holonomic.lab.screen import Screen
from holonomic.lab.train import Progress, Stop
from holonomic.lab.workers import DONE, default_workers, run_jobs

#: The folder of finished runs and checkpoints, until their arm is complete.
PARTS = "parts"


def run(
    e: RealExperiment, out: Path, screen: Screen, *, force: bool = False, workers: int | None = None
) -> dict[str, Any]:
    """Run what is not yet done of an experiment, and write ``out/summary.json``.

    If the experiment has a search, it is run first, as an experiment of its own in ``out/search``."""
    with screen.fetching() as progress:
        prefetch(e, progress)  # before the workers, which show no progress
    claim_folder(e, out, force)
    started = time.monotonic()
    if e.search is not None:
        found = run(e.searching(), out / "search", screen, force=force, workers=workers)
        e = replace(e, arms=tuple(best(e, arm, found) for arm in e.arms))
    for arm in e.arms:
        _borrow(e, arm, out)
    todo = [arm for arm in e.arms if not _path(arm, out).exists()]
    jobs = [RunJob(e, arm, i) for arm in todo for i in range(e.runs + e.draws)]
    if workers is None:
        workers = default_workers() if torch.device(e.device).type == "cpu" else 1
    try:
        with screen.running(e) as bars:

            def shown(progress: Sequence[int]) -> None:
                for arm in e.arms:
                    mine = [p for job, p in zip(jobs, progress, strict=True) if job.arm == arm]
                    epochs = [e.epochs if p == DONE else p for p in mine]
                    bars.show(arm, sum(epochs) // len(epochs) if epochs else DONE)

            shown([0] * len(jobs))
            run_jobs(jobs, out, shown, screen.warn, workers)
    except BaseException:
        write_summary(e, out, partial=True, seconds=time.monotonic() - started)
        raise
    shutil.rmtree(out / PARTS, ignore_errors=True)
    return write_summary(e, out, partial=False, seconds=time.monotonic() - started)


@dataclass(frozen=True)
class RunJob:
    """One run of one arm."""

    e: RealExperiment
    arm: Method
    index: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}, run {self.index}"

    def work(self, out: Path, progress: Progress, warn: Callable[[str], None], stop: Stop) -> None:
        """Train, write the run down, and put the arm together if this was its last run."""
        key = _key(self.e, self.arm)
        if _part(self.arm, self.index, out, key) is None:
            checkpoint = _part_path(self.arm, self.index, out).with_suffix(".ckpt")
            done = train(self.e, self.arm, self.index, checkpoint, key, progress, warn, stop)
            write_json(
                _part_path(self.arm, self.index, out),
                {"key": key, "seconds": done.seconds, "curves": done.curves, "finals": done.finals},
            )
            for leftover in (checkpoint, previous(checkpoint)):
                leftover.unlink(missing_ok=True)
        parts = [_part(self.arm, i, out, key) for i in range(self.e.runs + self.e.draws)]
        finished = [part for part in parts if part is not None]
        if len(finished) == len(parts):
            write_json(_path(self.arm, out), _together(self.e, self.arm, key, finished))


def _path(arm: Method, out: Path) -> Path:
    return out / f"{arm.slug}.json"


def _part_path(arm: Method, index: int, out: Path) -> Path:
    return out / PARTS / f"{arm.slug}.{index}.json"


def _part(arm: Method, index: int, out: Path, key: str) -> dict[str, Any] | None:
    """A finished run, if there is one of exactly this arm."""
    path = _part_path(arm, index, out)
    if not path.exists():
        return None
    part: dict[str, Any] = json.loads(path.read_text())
    return part if part["key"] == key else None


def _together(
    e: RealExperiment, arm: Method, key: str, parts: list[dict[str, Any]]
) -> dict[str, Any]:
    """The runs of an arm in the form of every experiment: lists over runs."""
    curves = {"epoch": parts[0]["curves"]["epoch"]}
    for name in parts[0]["curves"].keys() - {"epoch"}:
        curves[name] = [list(row) for row in zip(*(p["curves"][name] for p in parts), strict=True)]
    names = dict.fromkeys([*e.metrics, *(name for p in parts for name in p["finals"])])
    return {
        "arm": arm.name,
        "key": key,
        "settings": described(arm),
        "seconds": sum(p["seconds"] for p in parts),
        "curves": curves,
        "finals": {name: [p["finals"].get(name, math.nan) for p in parts] for name in names},
    }


def _key(e: RealExperiment, arm: Method) -> str:
    """Equal keys, equal numbers: everything an arm's results depend on."""
    parts = {**e.config(), "arms": described(arm), "search": None, "metrics": e.metrics}
    del parts["id"]
    if not e.draws:  # the first runs are the same, however many follow
        del parts["runs"]
    if "valid_loss" not in e.metrics:  # that is the lowest of all records; the others are the last
        del parts["records"]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _borrow(e: RealExperiment, arm: Method, out: Path) -> None:
    """Copy an arm that another experiment beside this one has run already, exactly so; of more runs
    than are asked for, the first."""
    mine, key, wanted = _path(arm, out), _key(e, arm), e.runs + e.draws
    for other in sorted(out.parent.glob("*/*.json")):
        if mine.exists() or other.name != mine.name:
            continue
        found = json.loads(other.read_text())
        there = max((len(values) for values in found.get("finals", {}).values()), default=0)
        if found.get("key") != key or there < wanted:
            continue
        curves = {
            name: values if name == "epoch" else [row[:wanted] for row in values]
            for name, values in found["curves"].items()
        }
        finals = {name: values[:wanted] for name, values in found["finals"].items()}
        seconds = found["seconds"] * wanted / there
        write_json(mine, {**found, "seconds": seconds, "curves": curves, "finals": finals})


def best(e: RealExperiment, arm: Method, found: dict[str, Any]) -> Method:
    """An arm with the best of its candidates, by the mean over the runs of the search; candidates
    that diverged are out of the question, and the first of equals wins."""
    if e.search is None or not arm.candidates:
        return arm
    metric = e.search.metric
    sign = 1 if metric in LESS_IS_BETTER else -1

    def order(k: int) -> tuple[int, float]:
        s = found["arms"][f"{arm.name} #{k}"][metric]["one_draw"]
        return (s["diverged"], sign * s["mean"]) if s["mean"] is not None else (10**9, 0.0)

    k = min(range(len(arm.candidates)), key=order)
    return replace(arm, candidates=(), **arm.candidates[k])
