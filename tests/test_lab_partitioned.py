"""The experiments of chapter 3: data, partitioned arms, stages, resuming, and every recipe once."""

import json
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holonomic as hm
from holonomic import methods
from holonomic.lab import problem
from holonomic.lab.cli import app
from holonomic.lab.experiment import Arm, Experiment, experiment, experiments
from holonomic.lab.measures import BINARY, EDGES, MULTICLASS, evaluate, histograms
from holonomic.lab.models import mlp
from holonomic.lab.plots import draw
from holonomic.lab.problem import Spiral, Stored
from holonomic.lab.runner import _finish, adjusted, claim_folder, load_arms, write_summary
from holonomic.lab.statistics import DERIVED
from holonomic.lab.train import Stop, build, draws, optimizer_of, train

RESULTS = Path(__file__).parent.parent / "results"
CHAPTER3 = [name for name in experiments() if name.startswith("fig3.")]
HAS_DATA = (Path(os.environ.get("HOLONOMIC_DATA") or "no data") / "SHA256SUMS").exists()

W = (2, 8, 1)
ADAM = Arm("Adam", lr=0.01, widths=W, method="adam")
ADLALA = Arm(
    "AdLaLa",
    lr=0.04,
    widths=W,
    method="adlala",
    settings={"momentum": 0.9, "temperature": 1e-3, "coupling": 0.1, "noise": 0.1, "friction": 0.1},
)
LOL = Arm("LOL", lr=0.04, widths=W, method="lol", settings={"momentum": 0.9, "temperature": 1e-3})
DHSGD = Arm("DHSGD", lr=0.04, widths=W, method="dhsgd")
STAGED = Arm("staged", lr=0.1, widths=W, temperature=1e-3, first=LOL, first_epochs=3)

SMALL = Experiment(
    id="small",
    title="",
    setting="",
    data=Spiral(turns=1, scale=2.0, noise=0.02, train=20, test=30, batch=5),
    arms=(ADAM, ADLALA, LOL, STAGED),
    epochs=6,
    runs=2,
    draws=1,
    records=3,
)


@pytest.fixture(scope="module", autouse=True)
def _files_are_read_once():
    with pytest.MonkeyPatch.context() as patch:
        for name, read in problem._POOLS.items():
            patch.setitem(problem._POOLS, name, cache(read))
        yield


@pytest.fixture
def table(monkeypatch):
    """A set of real data of our own making: 40 rows, 3 classes, the first column the row's number."""
    x = torch.arange(40.0).unsqueeze(1).repeat(1, 2)
    monkeypatch.setitem(problem._POOLS, "chess", lambda: ((x, torch.arange(40) % 3),))
    shrunk = [replace(arm, widths=(2, 8, 3)) for arm in (ADAM, ADLALA)]
    return replace(
        SMALL, data=Stored("chess", train=24, test=10, batch=6), arms=tuple(shrunk), draws=0
    )


def trained(e, arm, path, stop=None, progress=lambda _: None):
    return train(e, arm, path, progress, print, stop or Stop())


# ---------------------------------------------------------------------- descriptions
@pytest.mark.parametrize("name", ["fig1", "fig4"])
def test_descriptions_of_results_on_disk_stay_what_they_were(name):
    written = (RESULTS / name / "config.json").read_text()
    assert json.dumps(experiment(name).config(), indent=1) + "\n" == written


def test_folders_of_results_are_those_of_the_experiments(tmp_path):
    """Also with "native", a setting of version 0.1."""
    for path in sorted(RESULTS.glob("*/config.json")):
        config = json.loads(path.read_text())
        e = adjusted(experiment(path.parent.name), epochs=config["epochs"])
        for begun in (config, {**config, "native": True}):
            (tmp_path / "config.json").write_text(json.dumps(begun))
            claim_folder(e, tmp_path, force=False)


def test_a_report_of_results_on_disk(tmp_path):
    out = tmp_path / "fig3.9"
    shutil.copytree(RESULTS / "fig3.9", out)
    (out / "README.md").unlink()
    done = CliRunner().invoke(app, ["report", "fig3.9", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "README.md").read_text() == (RESULTS / "fig3.9" / "README.md").read_text()
    assert (out / "report.html").exists()


def test_a_field_of_later_days_is_described_once_it_is_used():
    plain = SMALL.config()
    assert "power" not in plain["data"]
    assert "starts" not in plain
    assert "method" in plain["arms"][0]
    assert "method" not in plain["arms"][3]
    assert plain["arms"][3]["first"]["settings"] == LOL.settings
    other = replace(SMALL, starts=1, data=replace(SMALL.data, power=1.0)).config()
    assert (other["starts"], other["data"]["power"]) == (1, 1.0)
    assert replace(SMALL, in_steps=True, panels=(("all", ("Adam",)),)).config() == plain


# ---------------------------------------------------------------------- data
def test_a_table_is_split_without_overlap(table):
    x, y, x_test, y_test = draws(table)
    rows, tests = set(x[:, 0].tolist()), set(x_test[:, 0].tolist())
    assert (len(rows), len(tests)) == (24, 10)
    assert not rows & tests
    assert torch.equal(y, x[:, 0].long() % 3)
    assert torch.equal(y_test, x_test[:, 0].long() % 3)
    assert torch.equal(x, draws(table)[0])
    assert not torch.equal(x, draws(replace(table, seed=1))[0])


def test_one_set_of_data_cannot_be_drawn_again(table):
    with pytest.raises(hm.SettingError, match=r"one set of data.*--data-draws.*it is 2"):
        draws(replace(table, draws=2))


def test_epochs_of_steps():
    data = Spiral(turns=4, scale=2.0, noise=0.02, train=1000, test=10, batch=30)
    assert data.steps == 34  # the last batch is smaller
    assert (data.epochs(34), data.epochs(35)) == (1, 2)


def test_the_power_of_a_spiral_is_that_of_its_radius():
    data = Spiral(turns=4, scale=2.0, noise=0.0, train=4000, test=10, batch=10, power=1.0)
    radius = data.draw(0, 0)[0].norm(dim=1) / 2
    # uniform with p = 1: mean 1/2, standard error 1 / sqrt(12 n)
    assert abs(radius.mean() - 0.5) < 4 / (12 * 4000) ** 0.5


@pytest.mark.parametrize("criterion", [BINARY, MULTICLASS])
def test_scores_are_torchs(criterion):
    outputs = 1 if criterion is BINARY else 3
    replicas = hm.Replicas(lambda: mlp(2, 8, outputs), 3, seed=0)
    x, y = torch.randn(3, 50, 2), torch.randint(0, outputs + (outputs == 1), (3, 50))
    y = y.float() if criterion is BINARY else y
    loss, accuracy = evaluate(replicas, criterion, x, y, own=True)
    shared, _ = evaluate(replicas, criterion, x[1], y[1], own=False)
    for i in range(3):
        z = replicas[i](x[i])
        if criterion is BINARY:
            expected = nn.functional.binary_cross_entropy_with_logits(z.squeeze(-1), y[i])
            right = (z.squeeze(-1) > 0) == (y[i] > 0)
        else:
            expected, right = nn.functional.cross_entropy(z, y[i]), z.argmax(1) == y[i]
        torch.testing.assert_close(torch.tensor(loss[i]).float(), expected)
        torch.testing.assert_close(criterion.loss(z, y[i]), expected)
        assert accuracy[i] == pytest.approx(100 * right.float().mean().item())
    assert shared[1] == pytest.approx(loss[1])


# ---------------------------------------------------------------------- arms
@pytest.mark.parametrize(
    "make",
    [
        lambda m: methods.lol(m, lr=0.04, momentum=0.9, temperature=0.0),
        lambda m: methods.dhsgd(m, lr=0.04),
        lambda m: methods.adlala(m, 0.04, 0.9, 1e-3, coupling=0.5, noise=0.0, friction=0.1,
                                 output_temperature=0.0),
        lambda m: methods.c_cola_ud(m, 0.5, lr=0.04),
        lambda m: methods.langevin_in_layers(m, {"0.*": {"momentum": 0.5}}, lr=0.04),
    ],
    ids=["lol", "dhsgd", "adlala", "c-cola", "layers"],
)  # fmt: skip
def test_methods_take_replicas(make):
    """Without noise, each replica is what the method makes of it alone."""
    replicas = hm.Replicas(lambda: mlp(2, 8, 1), 3, seed=0)
    alone = replicas[1]
    stacked, single = make(replicas), make(alone)
    x = torch.randn(3, 10, 2, generator=torch.Generator().manual_seed(0))
    y = (x[..., 0] > 0).float()
    for _ in range(20):
        replicas.backward(BINARY.loss, x, y)
        stacked.step()
        single.zero_grad()
        BINARY.loss(alone(x[1]), y[1]).backward()
        single.step()
    for (name, p), q in zip(replicas.named_parameters(), alone.parameters(), strict=True):
        # rounding of batched products over 20 steps
        torch.testing.assert_close(p[1], q, atol=1e-5, rtol=1e-4, msg=name)


def test_adam_on_the_stack_is_adam_on_each():
    replicas, optimizer = build(SMALL, ADAM)
    alone = replicas[2]
    single = torch.optim.Adam(alone.parameters(), lr=ADAM.lr)
    x, y, _, _ = draws(SMALL)
    for _ in range(20):
        replicas.backward(BINARY.loss, x, y)
        optimizer.step()
        single.zero_grad()
        BINARY.loss(alone(x[2]), y[2]).backward()
        single.step()
    for (name, p), q in zip(replicas.named_parameters(), alone.parameters(), strict=True):
        # Adam divides small gradients by their size, so rounding shows at the scale of lr * 1e-3
        torch.testing.assert_close(p[2], q, atol=2e-5, rtol=1e-4, msg=name)


def test_the_second_stage_begins_where_the_first_ended(tmp_path):
    arm = replace(STAGED, first=DHSGD, temperature=0.0)
    whole = trained(SMALL, arm, tmp_path / "a")
    replicas, optimizer = build(SMALL, DHSGD)
    x, y, _, _ = draws(SMALL)
    order = replicas.order(x, y, 5, own=True)
    for epoch in range(6):
        if epoch == 3:
            optimizer = torch.optim.SGD(replicas.parameters(), lr=0.1)
        for xb, yb in order:
            replicas.backward(BINARY.loss, xb, yb)
            optimizer.step()
    for (name, p), (_, q) in zip(
        whole.replicas.named_parameters(), replicas.named_parameters(), strict=True
    ):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6, msg=name)


def test_gaussian_weights_and_shared_starts():
    wide = replace(ADAM, widths=(2, 4000, 1), gaussian=0.01)
    replicas, _ = build(SMALL, wide)
    weights = dict(replicas.named_parameters())
    # 24,000 numbers: their spread is known to 1 part in sqrt(48,000)
    assert abs(weights["0.weight"].std().item() / 0.01 - 1) < 4 / 48_000**0.5
    assert weights["0.bias"].std() > 0.1  # torch's own
    paired, _ = build(replace(SMALL, runs=4, draws=0, starts=2), ADAM)
    p = dict(paired.named_parameters())["0.weight"]
    assert torch.equal(p[0], p[2])
    assert torch.equal(p[1], p[3])
    assert not torch.equal(p[0], p[1])


# ---------------------------------------------------------------------- resuming
@pytest.mark.parametrize("after", [2, 3, 4])
@pytest.mark.parametrize("arm", SMALL.arms, ids=lambda arm: arm.name)
def test_every_kind_of_arm_goes_on_bitwise(arm, after, tmp_path):
    e = replace(SMALL, snapshots=(1, 4))
    _assert_resumed_bitwise(e, arm, after, tmp_path)


def test_arms_on_shared_data_go_on_bitwise(table, tmp_path):
    for arm in table.arms:
        _assert_resumed_bitwise(table, arm, 3, tmp_path / arm.slug)


def _assert_resumed_bitwise(e, arm, after, folder):
    whole = trained(e, arm, folder / "whole")
    stop = Stop()

    def progress(done):
        if done >= after:
            stop.ask()

    with pytest.raises(KeyboardInterrupt):
        trained(e, arm, folder / "part", stop, progress)
    resumed = trained(e, arm, folder / "part")
    assert resumed.curves == whole.curves
    assert resumed.weights == whole.weights
    for (_, p), (_, q) in zip(
        whole.replicas.named_parameters(), resumed.replicas.named_parameters(), strict=True
    ):
        assert torch.equal(p, q)


# ---------------------------------------------------------------------- measures
def test_histograms_count_everything_once():
    replicas = hm.Replicas(lambda: mlp(*W), 3, seed=0)
    with torch.no_grad():
        dict(replicas.named_parameters())["0.bias"][0, 0] = 100.0
    counts = histograms(replicas, 2)
    assert {name: sum(c) for name, c in counts.items()} == {
        "0.weight": 32,
        "0.bias": 16,
        "2.weight": 16,
        "2.bias": 2,
    }
    assert counts["0.bias"][-1] == 1
    assert len(EDGES) == len(counts["0.bias"]) + 1


def test_derived_metrics():
    e = replace(SMALL, runs=3, draws=2)
    curves = {
        "epoch": [10, 20, 30],
        "test_accuracy": [[50, 95, 50, 1, 1], [91, 95, 60, 1, 1], [80, 95, 70, 4, 10]],
        "test_loss": [[1.0, 0.5, 2.0, 1, 1], [0.4, 0.6, 1.0, 1, 1], [0.6, 0.7, 0.5, 1, 1]],
    }
    # 4 steps an epoch; the third run never gets there and counts with all its steps
    assert DERIVED["steps_to_90"](e, curves)[:3] == [80, 40, 120]
    assert DERIVED["deviation"](e, curves) == [0, 15, 10, 3, 3]  # medians 80 and 7
    assert DERIVED["loss_rise"](e, curves) == pytest.approx([0.2, 0.2, 0, 0, 0])


def test_lines_run_from_the_start_to_the_end_of_training(tmp_path):
    e = replace(SMALL, figures=("lines", "planes"), runs=4, draws=1, starts=2)
    result = trained(e, ADLALA, tmp_path / "a.ckpt")
    _finish(e, ADLALA, result, tmp_path)
    start, _ = build(e, ADLALA)
    _, _, x, y = draws(e)
    before, _ = evaluate(start, BINARY, x, y, own=True)
    after, _ = evaluate(result.replicas, BINARY, x, y, own=True)
    with np.load(tmp_path / "AdLaLa.npz") as stored:
        lines, plane = stored["lines"], stored["plane"]
    np.testing.assert_allclose(lines[:, 0], before, rtol=1e-5)
    np.testing.assert_allclose(lines[:, -1], after, rtol=1e-5)
    # beta = 1 is the first end, beta = 0 the second, which began at the same weights
    np.testing.assert_allclose(plane[-1, -1], after[0], rtol=1e-5)
    other = BINARY.loss(result.replicas[2](x[0]), y[0])
    np.testing.assert_allclose(plane[0, -1], other.item(), rtol=1e-5)
    np.testing.assert_allclose(plane[:, 0], before[0], rtol=1e-5)
    finals = json.loads((tmp_path / "AdLaLa.json").read_text())["finals"]
    np.testing.assert_allclose(finals["barrier"], lines.max(1) - lines[:, 0], rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- recipes
def kinds(e: Experiment) -> tuple[Arm, ...]:
    """One arm of each kind: the others differ by numbers."""
    of = {(a.method, a.first is None, a.temperature > 0, a.gaussian > 0): a for a in e.arms}
    return tuple(of.values())


@pytest.mark.parametrize("name", CHAPTER3)
def test_every_arm_can_be_built(name):
    e = replace(experiment(name), runs=1, draws=0)
    for arm in e.arms:
        replicas, optimizer = build(e, arm)
        assert optimizer_of(arm.at(e.epochs), replicas) is not None
        assert len(optimizer.param_groups) == (2 if arm.at(0).method not in ("", "adam") else 1)
    shown = [n for _, members in e.panels for n in members]
    assert set(shown) in (set(), {arm.name for arm in e.arms})


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAPTER3)
def test_every_recipe_runs(name, tmp_path):
    e = experiment(name)
    if isinstance(e.data, Stored) and not HAS_DATA:
        pytest.skip("the data sets are not here (set HOLONOMIC_DATA)")
    drawn = name in ("fig3.4", "fig3.6", "fig3.16")  # every kind of picture that is new here
    arms = kinds(e)[-2:] if drawn else kinds(e)
    few = replace(e.data, train=2 * e.data.batch, test=100)
    e = replace(e, data=few, arms=arms, records=1, starts=min(e.starts, 1))
    e = adjusted(e, runs=2, epochs=2, draws=0 if e.data.shared else 1)
    for arm in arms:
        _finish(e, arm, trained(e, arm, tmp_path / f"{arm.slug}.ckpt"), tmp_path)
    summary = write_summary(e, tmp_path, partial=False, seconds=0.0)
    assert list(summary["arms"]) == [arm.name for arm in arms]
    for found in summary["arms"].values():
        assert set(e.metrics) <= found.keys()
        assert found["test_accuracy"]["one_draw"]["n"] == 2
    if drawn:
        pictures = draw(e, load_arms(e, tmp_path), tmp_path, pytest.fail)
        assert [p.stem for p in pictures] == list(dict.fromkeys((*e.figures, "finals")))
