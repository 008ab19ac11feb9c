"""The lab: data, measures, statistics, files, and runs that survive being stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import holonomic as hm
from holonomic.lab import files, workers
from holonomic.lab.cli import app, main
from holonomic.lab.data import spiral
from holonomic.lab.experiment import _REGISTRY, Claim, experiment, experiments
from holonomic.lab.measures import binary_loss, boundary, curvature
from holonomic.lab.models import mlp
from holonomic.lab.real import RealExperiment
from holonomic.lab.report import markdown, overview, write_report
from holonomic.lab.runner import _borrow, adjusted, is_done, run
from holonomic.lab.screen import LABELS, result_rows
from holonomic.lab.statistics import judge, summarize
from holonomic.lab.train import Stop, draws, record_points, train
from holonomic.lab.workers import WorkerError
from lab_helpers import in_this_process, quiet

SMALL = replace(
    adjusted(experiment("fig1"), runs=2, epochs=6, draws=2),
    records=3,
    figures=("boundaries", "curves", "slopes"),
    metrics=("test_accuracy", "test_loss"),
    claims=(Claim("C-SGLD is more accurate", "test_accuracy", "C-SGLD", "SGD"),),
)


# ---------------------------------------------------------------------- data and models
def test_spiral_follows_its_equation():
    x, y = spiral(4000, turns=2, scale=1.0, noise=0.0, seed=0)
    radius = x.norm(dim=1)
    angle = 4 * np.pi * radius + np.pi * y
    torch.testing.assert_close(x[:, 0], radius * angle.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(x[:, 1], radius * angle.sin(), atol=1e-5, rtol=0)
    assert y.sum() == 2000
    # t = radius^2 is uniform: its mean has a standard error of 1 / sqrt(12 n).
    assert abs(radius.square().mean() - 0.5) < 4 / (12 * 4000) ** 0.5


def test_spiral_noise_and_seeds():
    clean, _ = spiral(3000, 4, 2.0, 0.0, seed=5)
    noisy, _ = spiral(3000, 4, 2.0, 0.02, seed=5)
    # The spread of 6000 normal numbers is known to 1 part in sqrt(12000).
    assert abs((noisy - clean).std() / 0.02 - 1) < 4 / 12000**0.5
    assert torch.equal(noisy, spiral(3000, 4, 2.0, 0.02, seed=5)[0])
    assert not torch.equal(noisy, spiral(3000, 4, 2.0, 0.02, seed=6)[0])


def test_mlp_layers_and_parameter_count():
    net = mlp(2, 500, 1)
    assert [name for name, _ in net.named_parameters()] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert sum(p.numel() for p in net.parameters()) == 2 * 500 + 500 + 500 + 1


def test_binary_loss_is_torchs():
    z, y = torch.randn(50, 1) * 30, (torch.rand(50) > 0.5).float()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(z.squeeze(-1), y)
    torch.testing.assert_close(binary_loss(z, y), expected)


def test_draws_share_the_first_and_differ_after():
    x, y, x_test, _ = draws(replace(SMALL, runs=3, draws=2))
    assert x.shape == (5, 100, 2)
    assert y.shape == (5, 100)
    assert x_test.shape == (5, 2000, 2)
    assert torch.equal(x[0], x[2])
    assert not torch.equal(x[2], x[3])
    assert not torch.equal(x[3], x[4])


# ---------------------------------------------------------------------- curvature
def resample(piece: np.ndarray, spacing: float) -> np.ndarray:
    """Points along a contour at equal distances: what `curvature` needs to be well behaved."""
    steps = np.hypot(*np.diff(piece, axis=0).T)
    length = np.concatenate([[0.0], np.cumsum(steps)])
    count = max(int(length[-1] / spacing), 1) + 1
    at = np.linspace(0, length[-1], count)
    return np.stack([np.interp(at, length, piece[:, k]) for k in (0, 1)], 1)


def _field(points: int, shape: str) -> tuple[np.ndarray, np.ndarray]:
    axis = np.linspace(-1.5, 1.5, points)
    x, y = np.meshgrid(axis, axis)
    forms = {
        "circle": x**2 + y**2 - 0.64,
        "ellipse": x**2 + 4 * y**2 - 1,
        "cut circle": (x - 1.2) ** 2 + y**2 - 0.64,
        "two circles": np.minimum((x - 0.7) ** 2 + y**2, (x + 0.7) ** 2 + y**2) - 0.25,
        "none": x**2 + y**2 + 1,
    }
    return axis, forms[shape]


def test_curvature_of_a_circle():
    pieces = [resample(p, 0.02) for p in boundary(*_field(1000, "circle"))]
    kappa = curvature(pieces)
    # Marching squares places points to within (grid step)^2 = 9e-6 of the circle, and two central
    # differences at spacing 0.02 divide that by 4e-4: 2 % a point, less in the median.
    assert abs(np.median(kappa) - 1 / 0.8) < 0.01
    assert abs(curvature(boundary(*_field(1000, "circle"))).mean() / 1.25 - 1) < 1.0


def test_curvature_of_an_ellipse():
    (piece,) = boundary(*_field(1000, "ellipse"))
    piece = resample(piece, 0.02)
    kappa = curvature([piece])
    x, y = piece[: len(kappa), 0], piece[: len(kappa), 1]
    # x = a cos t, y = b sin t has curvature ab / (a^2 sin^2 t + b^2 cos^2 t)^(3/2); a = 1, b = 1/2.
    exact = 0.5 / ((2 * y) ** 2 + (x / 2) ** 2) ** 1.5
    assert np.median(np.abs(kappa / exact - 1)) < 0.03
    assert abs(kappa.max() / 4 - 1) < 0.1  # at the ends of the long axis: a / b^2


def test_curvature_of_a_boundary_that_leaves_the_window_or_is_in_pieces():
    (arc,) = boundary(*_field(500, "cut circle"))
    assert not np.array_equal(arc[0], arc[-1])
    assert abs(np.median(curvature([resample(arc, 0.02)])) - 1.25) < 0.02
    two = boundary(*_field(500, "two circles"))
    assert len(two) == 2
    assert abs(np.median(curvature([resample(p, 0.02) for p in two])) - 2.0) < 0.03
    assert len(curvature(boundary(*_field(100, "none")))) == 0
    assert len(curvature([np.zeros((4, 2))])) == 0  # too short to have a curvature
    assert len(curvature([np.zeros((9, 2))])) == 0  # points that coincide


# ---------------------------------------------------------------------- statistics
def test_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        s = summarize(rng.normal(2.0, 1.0, 40))
        covered += s.low <= 2.0 <= s.high
    # 95 % of 300 have a standard error of 1.3 %.
    assert 0.9 <= covered / 300 <= 1.0
    few = [summarize(rng.normal(2.0, 1.0, 3)) for _ in range(300)]
    assert 0.9 <= np.mean([s.low <= 2.0 <= s.high for s in few]) <= 1.0  # with three values, too


def test_summary_sets_diverged_runs_apart():
    s = summarize([1.0, 2.0, float("nan"), float("inf")])
    assert (s.mean, s.n, s.diverged) == (1.5, 2, 2)
    assert summarize([float("nan")]).diverged == 1


@pytest.mark.parametrize(
    ("one", "over", "word"),
    [
        (1.0, 1.0, "reproduced"),
        (-1.0, -1.0, "the opposite is seen"),
        (1.0, -1.0, "depends on the draw of the data"),
        (0.0, 0.0, "not settled: the intervals hold 0"),
    ],
)
def test_verdicts(one, over, word):
    rng = np.random.default_rng(1)
    base = rng.normal(80, 1, 40)
    better = base + np.repeat([one, over], 20) + rng.normal(0, 0.2, 40)
    finals = {"a": {"test_accuracy": better.tolist()}, "b": {"test_accuracy": base.tolist()}}
    claim = Claim("a beats b", "test_accuracy", "a", "b")
    assert judge(claim, finals, 20).verdict == word
    lower = {k: {"test_loss": v["test_accuracy"]} for k, v in finals.items()}
    mirrored = judge(replace(claim, metric="test_loss"), lower, 20)
    assert np.sign(mirrored.one_draw.mean) == -np.sign(judge(claim, finals, 20).one_draw.mean)


def test_diverged_runs_speak_against_a_claim():
    claim = Claim("a beats b", "test_accuracy", "a", "b")
    a, b = [90.0, 91.0] + [float("nan")] * 18, [80.0, 80.5] * 10
    finals = {"a": {"test_accuracy": a}, "b": {"test_accuracy": b}}
    assert judge(claim, finals, 20).verdict == "no: 18 of 20 runs diverged"


def test_one_draw_is_said_to_be_one():
    claim = Claim("a beats b", "curvature_median", "a", "b")
    low, high = [1.0, 1.1, 0.9, 1.0], [2.0, 2.1, 1.9, 2.0]
    finals = {"a": {"curvature_median": low}, "b": {"curvature_median": high}}
    assert judge(claim, finals, 4).verdict == "reproduced on one draw"


# ---------------------------------------------------------------------- files
def test_files_are_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_json(path, {"x": float("nan"), "y": [1.0, 2]})
    assert json.loads(path.read_text()) == {"x": None, "y": [1.0, 2]}

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        files.write_json(path, {"z": 1})
    assert json.loads(path.read_text())["y"] == [1.0, 2]
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_corrupt_checkpoint_is_named_kept_and_passed_over(tmp_path):
    path = tmp_path / "a.ckpt"
    files.save_checkpoint(path, {"epoch": 1})
    files.save_checkpoint(path, {"epoch": 2})
    path.write_bytes(path.read_bytes()[:100])
    saved, warnings = files.load_checkpoint(path)
    assert saved == {"epoch": 1}
    assert "a.ckpt cannot be read" in warnings[0]
    assert (tmp_path / "a.ckpt.corrupt").exists()
    assert files.load_checkpoint(tmp_path / "none.ckpt") == (None, [])


# ---------------------------------------------------------------------- runs
def test_recipes_are_complete():
    known = experiments()
    assert {"fig1", "fig3", "table4.5", "fig4", "fig5", "fig4.8"} <= known.keys()
    for name, e in known.items():
        assert e.id == name
        assert len({arm.slug for arm in e.arms}) == len(e.arms)
        names = {arm.name for arm in e.arms}
        assert {c.better for c in e.claims} | {c.worse for c in e.claims} <= names
        assert e.paper.keys() <= names
        for arm in e.arms if not isinstance(e, RealExperiment) else ():  # those: test_real.py
            hm.groups(mlp(*arm.widths), arm.rules())  # every glob matches something
        assert record_points(e)[-1] == e.epochs


def test_figures_measured_in_another_run():
    assert experiment("table1") == experiment("fig2") == experiment("fig1")
    assert experiment("fig4.11").id == "table4.5"


def test_unknown_experiment_suggests_the_nearest():
    with pytest.raises(hm.SettingError, match=r"no experiment 'fig11'; did you mean fig1"):
        experiment("fig11")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("fig1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "run_jobs", in_this_process)
        return out, run(SMALL, out, quiet())


class Addresses(HTMLParser):
    """What the elements and style sheets of a page load or lead to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "poster", "action"):
                self.found.append(value or "")
            else:
                self.handle_data(value or "")

    def handle_data(self, data):
        self.found += re.findall(r"""(?:url\(|@import)\s*["']?([^"')]*)""", data)


def assert_nothing_from_elsewhere(page: str) -> None:
    for address in Addresses(page).found:
        parts = urlsplit(address)
        assert parts.scheme in ("", "data"), address[:100]
        assert not parts.netloc, address[:100]


def test_addresses_of_a_page_are_found():
    page = (
        '<style>a { background: url("//x/1.png") } b { src: url(2.png) } @import "http://3"; </style>'
        '<img src="data:image/png;base64,http"><a href="#top" style="background: url(http://4)">http</a>'
    )
    found = ["//x/1.png", "2.png", "http://3", "data:image/png;base64,http", "#top", "http://4"]
    assert Addresses(page).found == found
    for address in ("//x/1.png", "http://3"):
        with pytest.raises(AssertionError, match=address):
            assert_nothing_from_elsewhere(f'<img src="{address}">')
    assert_nothing_from_elsewhere(
        '<img src="data:image/png;base64,http"><a href="a.html#b">http</a>'
    )


def test_a_run_gives_summary_figures_and_report(finished):
    out, summary = finished
    assert list(summary["arms"]) == [arm.name for arm in SMALL.arms]
    accuracy = summary["arms"]["SGD"]["test_accuracy"]
    assert len(accuracy["values"]) == 4
    assert accuracy["one_draw"]["n"] == accuracy["over_draws"]["n"] == 2
    assert accuracy["paper"] == 81.0
    assert summary["verdicts"][0]["claim"] == "C-SGLD is more accurate"
    page = write_report(SMALL, summary, out).read_text()
    assert page.count("data:image/png;base64,") == 4
    assert_nothing_from_elsewhere(page)
    text = markdown(SMALL, summary)
    assert "| SGD |" in text
    for name in ("boundaries", "curves", "slopes", "finals"):
        assert (out / f"{name}.svg").exists()
    curves = json.loads((out / "SGD.json").read_text())["curves"]
    assert curves["epoch"] == [2, 4, 6]
    assert np.array(curves["test_loss"]).shape == (3, 4)
    assert not list(out.glob("*.ckpt*"))


def test_results_of_another_configuration_are_not_overwritten(finished):
    out, _ = finished
    with pytest.raises(hm.SettingError, match=r"another configuration.*--force"):
        run(replace(SMALL, seed=1), out, quiet())
    assert json.loads((out / "config.json").read_text())["seed"] == 0


def _stopped(stop: Stop, after: int):
    def progress(done: int) -> None:
        if done >= after:
            stop.ask()

    return progress


def test_a_stopped_arm_goes_on_where_it_was(tmp_path):
    arm = SMALL.arms[-1]  # noise and constraints
    whole = train(SMALL, arm, tmp_path / "whole.ckpt", lambda _: None, print, Stop())
    path = tmp_path / "arm.ckpt"
    stop = Stop()
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, arm, path, _stopped(stop, 3), print, stop)
    resumed = train(SMALL, arm, path, lambda _: None, print, Stop())
    assert resumed.curves == whole.curves
    for (_, p), (_, q) in zip(
        whole.replicas.named_parameters(), resumed.replicas.named_parameters(), strict=True
    ):
        assert torch.equal(p, q)


def test_a_signal_to_the_main_process_leaves_a_partial_result(tmp_path, monkeypatch):
    quick = replace(SMALL.arms[0], name="quick", widths=(2, 4, 1))
    long = replace(SMALL.arms[4], name="long", widths=(2, 20_000, 1))  # a hundred times as long
    two = replace(SMALL, arms=(long, quick), claims=(), figures=("curves",))
    monkeypatch.setitem(_REGISTRY, "fig1", lambda: two)

    def interrupt() -> None:
        deadline = time.monotonic() + 90
        while not (tmp_path / "quick.json").exists():
            if time.monotonic() > deadline:
                return  # and let the run come to its end
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    sizes = ["--runs", "2", "--data-draws", "0", "--epochs", "20", "--workers", "2"]
    done = CliRunner().invoke(app, ["run", "fig1", "--out", str(tmp_path), *sizes])
    assert done.exit_code == 130, done.output
    assert "Repeat the command to go on" in " ".join(done.output.split())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["partial"]
    assert list(summary["arms"]) == ["quick"]
    assert (tmp_path / "long.ckpt").exists()


def test_force_removes_what_an_experiment_wrote_and_nothing_else(finished, tmp_path):
    out, _ = finished
    folder = tmp_path / "mine"
    shutil.copytree(out, folder)
    shutil.copytree(out, tmp_path / "other")  # the arm is copied from here
    (folder / "remarks.md").write_text("keep me")
    run(replace(SMALL, arms=SMALL.arms[:1], claims=()), folder, quiet(), force=True)
    assert (folder / "remarks.md").read_text() == "keep me"
    assert (folder / "SGD.json").exists()
    assert not (folder / "SGLD.json").exists()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights.bin").write_text("precious")
    with pytest.raises(hm.SettingError, match="is not of an experiment"):
        run(SMALL, model, quiet(), force=True)
    assert sorted(os.listdir(model)) == ["config.json", "weights.bin"]


def test_a_failed_arm_is_told_and_the_others_go_on_as_they_would_in_this_process(
    finished, tmp_path
):
    bad = replace(SMALL.arms[0], name="bad", constraints={"nothing": ("circle", 1.0)})
    good = SMALL.arms[-1]  # noise and constraints
    failing = replace(SMALL, arms=(bad, good), claims=())
    out = tmp_path / "alone"  # nothing beside it to copy from
    said: list[str] = []
    screen = quiet()
    screen.warn = said.append
    with pytest.raises(WorkerError, match="1 of 2 methods failed"):
        run(failing, out, screen, workers=1)
    assert "arm 'bad' failed" in said[0]
    theirs, ours = (
        json.loads((folder / f"{good.slug}.json").read_text()) for folder in (out, finished[0])
    )
    assert theirs["curves"] == ours["curves"]
    assert theirs["finals"] == ours["finals"]


# ---------------------------------------------------------------------- command line
def test_list_and_help_teach():
    runner = CliRunner()
    listed = runner.invoke(app, ["list"])
    assert listed.exit_code == 0
    assert "fig4.8" in listed.output
    shown = runner.invoke(app, ["run", "--help"]).output
    assert "--data-draws" in shown
    assert "holonomic list" in shown


def test_the_papers_column_is_there_where_the_paper_has_a_number():
    e = replace(
        SMALL, paper={"SGD": {"test_loss": 0.5}}, metrics=("test_accuracy", "test_loss"), draws=0
    )
    number = {"mean": 1.0, "n": 1, "diverged": 0, "low": None, "high": None}

    def measured(paper):
        return {"one_draw": number, "over_draws": number, "paper": paper}

    arms = {
        name: {"test_accuracy": measured(None), "test_loss": measured(p)}
        for name, p in (("SGD", 0.5), ("b", None))
    }
    rows = result_rows(e, {"arms": arms})
    assert rows[0] == ["method", LABELS["test_accuracy"], LABELS["test_loss"], "paper"]
    assert [row[-1] for row in rows[1:]] == ["0.5", ""]


def test_report_without_results_says_what_to_run(tmp_path):
    result = CliRunner().invoke(app, ["report", "fig1", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "holonomic run fig1" in " ".join(result.output.replace("│", " ").split())


def test_errors_have_no_traceback(tmp_path, monkeypatch, capsys):
    command = [sys.executable, "-m", "holonomic.lab.cli", "run", "figg1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    for words, says in (
        (["--runs", "0"], "runs is 0; it must be at least 1"),
        (["--device", "nowhere"], "device 'nowhere' cannot be used here"),
    ):
        monkeypatch.setattr(
            sys, "argv", ["holonomic", "run", "fig1", *words, "--out", str(tmp_path)]
        )
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert says in " ".join(capsys.readouterr().out.split())
    assert not list(tmp_path.iterdir())


def test_an_arm_run_elsewhere_in_the_same_way_is_not_run_again(finished):
    out, _ = finished
    shared = replace(SMALL, id="other", arms=SMALL.arms[:2], claims=(), title="other")
    beside = out.parent / f"{out.name}-beside"
    run(shared, beside, quiet(), workers=1)
    for arm in shared.arms:
        assert (beside / f"{arm.slug}.json").read_text() == (out / f"{arm.slug}.json").read_text()
    longer = replace(shared, epochs=7)
    third = out.parent / f"{out.name}-longer"
    for arm in longer.arms:
        _borrow(longer, arm, third)
        assert not is_done(arm, third)


def test_the_overview_leaves_out_what_has_no_page(tmp_path):
    (tmp_path / "fig1").mkdir()
    summary = {
        "config": {"runs": 1, "draws": 0, "epochs": 2},
        "seconds": 0,
        "arms": {},
        "verdicts": [],
    }
    (tmp_path / "fig1" / "summary.json").write_text(json.dumps(summary))
    assert "fig1" not in overview(tmp_path, experiments())
    (tmp_path / "fig1" / "README.md").write_text("a page")
    assert "[fig1](fig1/README.md)" in overview(tmp_path, experiments())
