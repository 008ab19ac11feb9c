"""Running an experiment: every arm, its measurements, and the folder of results."""

import glob
import hashlib
import io
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import holonomic
from holonomic.diagnostics import Line, Plane, loss_on_line, loss_on_plane
from holonomic.errors import SettingError
from holonomic.lab.experiment import Arm, Experiment, described, slug
from holonomic.lab.files import previous, write_bytes, write_json, write_text
from holonomic.lab.measures import Window, boundary, curvature, logits_on_grid, slope
from holonomic.lab.screen import Screen
from holonomic.lab.statistics import DERIVED, as_plain, judge, summarize
from holonomic.lab.train import Trained, build, draws
from holonomic.lab.workers import DONE, default_workers, run_arms
from holonomic.replicas import Replicas

FIGURES = (
    "boundaries curves curvature slopes finals weights lines planes map training".split()  # noqa: SIM905
)
#: Figures that need measurements of their own.
MEASURED = {"boundaries", "curvature", "slopes", "lines", "planes"}
CURVES = ("train_loss", "test_loss", "test_accuracy")


def adjusted(
    e: Experiment,
    *,
    runs: int | None = None,
    epochs: int | None = None,
    draws: int | None = None,
    seed: int | None = None,
    device: str | None = None,
) -> Experiment:
    """The experiment with other sizes; impossible ones raise."""
    given = {"runs": runs, "epochs": epochs, "draws": draws, "seed": seed, "device": device}
    changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    for key, least in (("runs", 1), ("epochs", 1), ("draws", 0)):
        if key in changes and changes[key] < least:
            raise SettingError(f"{key} is {changes[key]}; it must be at least {least}.")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise SettingError(f"device {device!r} cannot be used here: {reason}") from None
    return replace(e, **changes)


def run(
    e: Experiment, out: Path, screen: Screen, *, force: bool = False, workers: int | None = None
) -> dict[str, Any]:
    """Run what is not yet done of an experiment, and write ``out/summary.json``.

    The folder holds ``config.json``, one ``<arm>.json`` (curves) and ``<arm>.npz`` (pictures' data)
    a finished arm, and the checkpoints of arms at work. It belongs to one configuration."""
    draws(e)  # what cannot be had is missed here, once, and not in every worker
    claim_folder(e, out, force)
    started = time.monotonic()
    for arm in e.arms:
        _borrow(e, arm, out)
    todo = [arm for arm in e.arms if not is_done(arm, out)]
    try:
        with screen.running(e) as bars:
            for arm in e.arms:
                if arm not in todo:
                    bars.show(arm, DONE)
            run_arms(e, todo, out, _finish, bars.show, screen.warn, workers or default_workers())
    except BaseException:
        write_summary(e, out, partial=True, seconds=time.monotonic() - started)
        raise
    return write_summary(e, out, partial=False, seconds=time.monotonic() - started)


def _key(e: Experiment, arm: Arm) -> str:
    """Equal keys, equal numbers: everything an arm's results depend on."""
    parts = {**e.config(), "arms": described(arm), "figures": sorted(set(e.figures) & MEASURED)}
    del parts["id"]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _borrow(e: Experiment, arm: Arm, out: Path) -> None:
    """Copy an arm that another experiment beside this one has run already, exactly so."""
    mine = out / f"{arm.slug}.json"
    for other in sorted(out.parent.glob(f"*/{glob.escape(mine.name)}")):
        if is_done(arm, out) or not is_done(arm, other.parent):
            continue
        if json.loads(other.read_text()).get("key") == _key(e, arm):
            for path in (other.with_suffix(".npz"), other):
                write_bytes(out / path.name, path.read_bytes())


def claim_folder(e: Experiment, out: Path, force: bool) -> None:
    """Make the folder that of an experiment's configuration, or raise if it is another's."""
    config = json.loads(json.dumps(e.config()))
    path = out / "config.json"
    if path.exists():
        held = json.loads(path.read_text())
        if isinstance(held, dict):
            held.pop("native", None)  # a setting of version 0.1
        if held == config:
            return
        if not force:
            raise SettingError(
                f"{out} holds results of another configuration; choose another --out, or pass "
                f"--force to replace them."
            )
        _clear(out, path)
    write_text(path, json.dumps(config, indent=1) + "\n")  # exactly: it is compared when resumed


def _clear(out: Path, config: Path) -> None:
    """Remove the files of an earlier run, and no others."""
    old = json.loads(config.read_text())
    if not (isinstance(old, dict) and "arms" in old and "records" in old):
        raise SettingError(
            f"{config} is not of an experiment, so nothing in {out} is replaced; choose another --out."
        )
    names = {"config.json", "summary.json", "report.html"}
    names |= {f"{figure}.{kind}" for figure in FIGURES for kind in ("png", "svg")}
    stems = [slug(arm["name"]) for arm in old["arms"]]
    kinds = ("json", "npz", "ckpt", "ckpt.previous", "ckpt.corrupt", "ckpt.previous.corrupt")
    names |= {f"{stem}.{kind}" for stem in stems for kind in kinds}
    for name in names:
        (out / name).unlink(missing_ok=True)


def is_done(arm: Arm, out: Path) -> bool:
    """Whether an arm's results are in a folder, all of them."""
    return all((out / f"{arm.slug}.{kind}").exists() for kind in ("json", "npz"))


def _finish(e: Experiment, arm: Arm, trained: Trained, out: Path) -> None:
    """Measure a trained arm and write it down; the JSON comes last and marks the arm as done."""
    finals = {key: trained.curves[key][-1] for key in CURVES}
    arrays: dict[str, Any] = {}
    if "boundaries" in e.figures:
        axis, up, values = logits_on_grid(trained.replicas, 0, e.data.window, 200)
        arrays.update(axis=axis, up=up, logits=values)
    if "curvature" in e.figures:
        found = [_curvature(trained.replicas, i, e.data.window) for i in range(trained.replicas.n)]
        for key in found[0]:
            finals[key] = [f[key] for f in found]
    if "slopes" in e.figures:
        s = slope(trained.replicas, e.data.window[1])
        arrays["slopes"] = s.mean(0)
        finals["slope"] = s.max(2).mean(1).tolist()
    if "lines" in e.figures:
        lines = _lines(e, arm, trained)
        arrays.update(line_at=lines[0].alpha, lines=np.array([line.loss for line in lines]))
        finals["barrier"] = [float(line.loss.max() - line.loss[0]) for line in lines]
    if "planes" in e.figures and 0 < e.starts < e.runs:
        plane = _plane(e, arm, trained)
        arrays.update(plane_along=plane.alpha, plane_across=plane.beta, plane=plane.loss)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_bytes(out / f"{arm.slug}.npz", buffer.getvalue())
    write_json(
        out / f"{arm.slug}.json",
        {
            "arm": arm.name,
            "key": _key(e, arm),
            "seconds": trained.seconds,
            "curves": trained.curves,
            "finals": finals,
            **({"weights": trained.weights} if trained.weights else {}),
        },
    )
    checkpoint = out / f"{arm.slug}.ckpt"
    for leftover in (checkpoint, previous(checkpoint)):
        leftover.unlink(missing_ok=True)


def _test_loss(e: Experiment) -> Callable[[int], Callable[[nn.Module], Tensor]]:
    """For a replica, the test loss of a module."""
    _, _, x, y = draws(e)

    def of(i: int) -> Callable[[nn.Module], Tensor]:
        mine = (x, y) if e.data.shared else (x[i], y[i])
        return lambda module: e.data.criterion.loss(module(mine[0]), mine[1])

    return of


def _lines(e: Experiment, arm: Arm, trained: Trained) -> list[Line]:
    """The test loss on every replica's line from its start to its end (3.34)."""
    start, _ = build(e, arm)
    loss = _test_loss(e)
    ends = [trained.replicas[i] for i in range(trained.replicas.n)]
    return [
        loss_on_line(end, loss(i), start[i].state_dict(), end.state_dict())
        for i, end in enumerate(ends)
    ]


def _plane(e: Experiment, arm: Arm, trained: Trained) -> Plane:
    """The test loss on the surface through the start and the ends of two replicas that share it."""
    start, _ = build(e, arm)
    first, second = trained.replicas[0], trained.replicas[e.starts]
    states = (start[0].state_dict(), first.state_dict(), second.state_dict())
    return loss_on_plane(first, _test_loss(e)(0), *states)


def _curvature(replicas: Replicas, i: int, window: Window) -> dict[str, float]:
    """Curvature of one replica's boundary on a 1000 x 1000 grid."""
    axis, _, logits = logits_on_grid(replicas, i, window, 1000)
    kappa = curvature(boundary(axis, logits))
    if not len(kappa):
        nan = float("nan")
        return {
            "curvature_mean": nan,
            "curvature_std": nan,
            "curvature_max": nan,
            "curvature_median": nan,
        }
    return {
        "curvature_mean": float(kappa.mean()),
        "curvature_std": float(kappa.std()),
        "curvature_max": float(kappa.max()),
        "curvature_median": float(np.median(kappa)),
    }


def load_arms(e: Experiment, out: Path) -> dict[str, dict[str, Any]]:
    """The finished arms of a folder, by name."""
    paths = {arm.name: out / f"{arm.slug}.json" for arm in e.arms}
    return {name: json.loads(p.read_text()) for name, p in paths.items() if p.exists()}


def _derived(e: Experiment, arm: dict[str, Any]) -> dict[str, list[float]]:
    """The metrics of the experiment that follow from curves and final numbers."""
    return {m: DERIVED[m](e, arm["curves"]) for m in e.metrics if m in DERIVED}


def write_summary(e: Experiment, out: Path, *, partial: bool, seconds: float) -> dict[str, Any]:
    """Write ``summary.json`` from the finished arms of a folder."""
    arms = load_arms(e, out)
    finals = {name: {**arm["finals"], **_derived(e, arm)} for name, arm in arms.items()}
    summary = {
        "experiment": e.id,
        "partial": partial,
        "config": e.config(),
        "versions": {
            "holonomic": holonomic.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "seconds": sum(arm["seconds"] for arm in arms.values()),
        "wall_seconds": seconds,
        "arms": {
            name: {
                metric: {
                    "one_draw": as_plain(summarize(values[: e.runs])),
                    "over_draws": as_plain(summarize(values[e.runs :])),
                    "paper": e.paper.get(name, {}).get(metric),
                    "values": values,
                }
                for metric, values in found.items()
            }
            for name, found in finals.items()
        },
        "verdicts": [
            as_plain(judge(c, finals, e.runs))
            for c in e.claims
            if c.better in finals and c.worse in finals
        ],
    }
    write_json(out / "summary.json", summary)
    loaded: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return loaded


def train_set(e: Experiment) -> tuple[Any, Any]:
    """The points and classes of the one draw that ``runs`` replicas share."""
    x, y, _, _ = draws(replace(e, runs=1, draws=0))
    return x[0].numpy(), y[0].numpy()
