"""Experiments on real data: measures against mathematics, and small runs from end to end."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holonomic as hm
from holonomic.lab import data, models
from holonomic.lab.cli import app
from holonomic.lab.data import Corpus, Images, fetch
from holonomic.lab.experiment import _REGISTRY, Claim, experiment, experiments
from holonomic.lab.real import Method, RealExperiment, Search, Source, runner, task, train
from holonomic.lab.real.measures import (
    calibration_error,
    largest_weights,
    lipschitz_bound,
    margins,
)
from holonomic.lab.runner import adjusted
from holonomic.lab.screen import LABELS
from holonomic.lab.train import Stop
from lab_helpers import in_this_process, quiet

REAL = {name: e for name, e in experiments().items() if isinstance(e, RealExperiment)}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """No test fetches anything."""

    def refuse(*_, **__):
        raise fetch.urllib.error.URLError("no network in tests")

    monkeypatch.setattr(fetch.urllib.request, "urlopen", refuse)


def need(name: str) -> None:
    try:
        task._loaded(name)
    except data.DataError as error:
        pytest.skip(f"{name} is not here: {error}"[:160])


@pytest.fixture
def toy(monkeypatch):
    """Small made images and a small made text under the names of real ones, to test the rest fast."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(10, (300,), generator=g)
    x = torch.rand(300, 1, 6, 6, generator=g) + torch.nn.functional.one_hot(y, 36).reshape(
        -1, 1, 6, 6
    )
    images = Images(x[:200], y[:200], x[200:], y[200:])
    words = torch.randint(20, (700,), generator=g)
    corpus = Corpus(words[:400], words[400:550], words[550:], tuple(map(str, range(20))))
    known = {"fashion-mnist": images, "ptb": corpus}
    monkeypatch.setattr(task, "_loaded", known.__getitem__)


FREE = Method("SGD-m", lr=0.1, momentum=0.8)
CIRCLE = Method("c", lr=0.09, momentum=0.74, constraints={"1.weight": ("circle", 0.3)})
WARM = replace(CIRCLE, name="warm", temperature=1e-4)
IMAGES = RealExperiment(
    id="toy",
    title="made images",
    setting="a test",
    data=Source("fashion-mnist", batch=32),
    model=("mlp", 36, 12, 10),
    arms=(FREE, CIRCLE, WARM),
    epochs=3,
    runs=2,
    draws=0,
)
TEXT = replace(
    IMAGES,
    data=Source("ptb", batch=8, length=7),
    model=("transformer", 20, 12, 2, 12),
    arms=(replace(FREE, momentum=0.5),),
    metrics=("valid_loss", "valid_perplexity"),
    shown=("train_loss", "valid_loss"),
)


# ---------------------------------------------------------------------- measures
def test_calibration_error_of_a_known_case():
    # 100 predictions with confidence 0.8, 60 right, and 100 with 0.6, 60 right: (0.2 + 0) / 2.
    p = torch.tensor([0.8] * 100 + [0.6] * 100)
    logits = torch.stack([p.log(), (1 - p).log()], 1)
    y = torch.tensor(([0] * 60 + [1] * 40) * 2)
    assert calibration_error(logits, y) == pytest.approx(0.1, abs=1e-6)


def test_calibration_error_against_a_plain_loop():
    torch.manual_seed(0)
    logits, y = 2 * torch.randn(500, 5), torch.randint(5, (500,))
    confidence, chosen = logits.softmax(1).max(1)
    expected = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            hit = (chosen[inside] == y[inside]).float().mean()
            expected += inside.float().mean() * (hit - confidence[inside].mean()).abs()
    assert calibration_error(logits, y) == pytest.approx(float(expected), abs=1e-6)


def test_the_lipschitz_bound_bounds_and_the_safe_radius_is_safe():
    torch.manual_seed(0)
    net = models.image_mlp(12, 30, 4)
    bound = lipschitz_bound(net)
    x = torch.randn(400, 12)
    step = 0.1 * torch.randn(400, 12)
    ratio = (net(x + step) - net(x)).norm(dim=1) / step.norm(dim=1)
    assert ratio.max() <= bound
    y = net(x).argmax(1)
    radius = margins(net(x), y) / (math.sqrt(2) * bound)
    within = 0.999 * step * (radius / step.norm(dim=1))[:, None]
    assert torch.equal(net(x + within).argmax(1), y)
    assert (margins(net(x), (y + 1) % 4) <= 0).all()  # a wrong class trails
    line = nn.Linear(3, 3, bias=False)
    line.weight.data = torch.diag(torch.tensor([1.0, -5.0, 2.0]))
    assert lipschitz_bound(line) == pytest.approx(5.0, abs=1e-5)
    assert lipschitz_bound(models.resnet8()) is None


def test_largest_weights_leave_biases_out():
    net = models.image_mlp(4, 3, 2)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.1)
        net[1].bias.fill_(9.0)
        net[1].weight[2, 1] = -3.0
        net[3].weight[0, 0] = 2.0
    assert largest_weights(net) == (3.0, 2.0)


# ---------------------------------------------------------------------- language models do not leak
def test_the_loss_of_a_text_does_not_depend_on_how_it_is_divided():
    torch.manual_seed(0)
    model = models.TransformerLM(30, 16, 2, 16)
    stream = torch.randint(30, (523,))  # 74 pieces of 7 words, and 4 words left over
    pieces = task.pieces(stream, 7)
    scores = [task.score(model, pieces, chunk) for chunk in (1, 50, 10_000)]
    assert all(s.count == len(stream) - 1 for s in scores)  # every word but the first, once
    assert all(s.correct == scores[0].correct for s in scores)
    # Sums of 522 float32 losses of about 3.4, in another order.
    assert max(abs(s.mean_loss - scores[0].mean_loss) for s in scores) < 1e-5
    targets = torch.cat([y.flatten() for _, y in pieces])
    assert torch.equal(targets, stream[1:])
    assert model.training


def test_the_loss_of_a_text_is_that_of_every_word_alone():
    torch.manual_seed(0)
    model = models.TransformerLM(30, 16, 2, 16).eval()
    stream = torch.randint(30, (40,))
    total = 0.0
    for i in range(1, len(stream)):  # a word from the words before it in its piece, and no others
        start = (i - 1) // 6 * 6
        logits = model(stream[None, start:i])[0, -1]
        total -= logits.log_softmax(0)[stream[i]].item()
    found = task.score(model, task.pieces(stream, 6))
    assert found.mean_loss == pytest.approx(total / 39, abs=1e-5)


@pytest.mark.usefixtures("toy")
def test_a_part_of_a_text_is_its_beginning():
    part = task.make_task(replace(TEXT, data=replace(TEXT.data, train=100)), 0)
    whole = task.make_task(TEXT, 0)
    for mine, theirs in zip(part.train, whole.train, strict=True):
        assert torch.equal(mine, theirs[:14])  # pieces of 7 words
    assert [len(x) for x, _ in part.valid] == [len(x) for x, _ in whole.valid]
    for words in (5, 401):
        with pytest.raises(hm.errors.SettingError, match=f"ptb: train is {words} words"):
            task.make_task(replace(TEXT, data=replace(TEXT.data, train=words)), 0)


@pytest.mark.usefixtures("toy")
def test_the_test_text_chooses_nothing():
    text = task.make_task(TEXT, 0)
    curves = {
        "epoch": [1, 2, 3],
        "train_loss": [3.0, 2.0, 1.0],
        "valid_loss": [5.0, 4.0, 4.5],
        "test_loss": [3.0, 4.2, 2.0],
        "largest_weight": [1.0, 1.0, 1.0],
        "output_weight": [1.0, 1.0, 1.0],
    }
    finals = text.finals(nn.Identity(), curves)
    assert finals["valid_loss"] == 4.0
    assert finals["test_loss"] == 4.2
    assert finals["best_epoch"] == 2
    assert finals["valid_perplexity"] == pytest.approx(math.exp(4.0))


# ---------------------------------------------------------------------- draws and splits
def numbered(n_train: int, n_test: int) -> Images:
    """Images whose one pixel is their number."""
    x = torch.arange(float(n_train + n_test)).reshape(-1, 1, 1, 1)
    y = torch.arange(n_train + n_test)
    return Images(x[:n_train], y[:n_train], x[n_train:], y[n_train:])


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_learnt_and_what_is_measured_have_nothing_in_common(seed, swapped):
    source = Source("x", 1, train=20, test=8, swapped=swapped)
    (x, y), (x_test, y_test) = task._drawn(source, numbered(50, 30), seed)
    (x2, _), (held, _) = task._drawn(replace(source, validation=6), numbered(50, 30), seed)
    assert torch.equal(x.flatten().long(), y)
    assert (len(x), len(x_test), len(x2), len(held)) == (20, 8, 14, 6)
    assert not set(y.tolist()) & set(y_test.tolist())
    # The search sees training images only, and measures on those it does not learn from.
    assert set(x2.flatten().tolist()) | set(held.flatten().tolist()) == set(x.flatten().tolist())
    if seed is None:
        assert min(y.tolist()) == (50 if swapped else 0)


def test_normalization_knows_the_training_images_only(monkeypatch):
    images = numbered(50, 30)
    monkeypatch.setattr(task, "_loaded", lambda _: images)
    e = replace(IMAGES, data=Source("x", 1, train=20))
    made = task.make_task(e, 0)
    assert made.train[0].mean().abs() < 1e-6
    assert made.train[0].std() == pytest.approx(1.0, abs=1e-6)
    assert made.test[0].min() > 5  # far off the training images, and not centred


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"train": 201}, "train is 201, and there are 200 images"),
        ({"test": 101}, "test is 101, and there are 100 images"),
        ({"train": 20, "validation": 20}, "must leave some to learn from"),
    ],
)
def test_impossible_splits(source, says):
    with pytest.raises(hm.SettingError, match=says):
        task.make_task(replace(IMAGES, data=replace(IMAGES.data, **source)), 0)


@pytest.mark.usefixtures("toy")
def test_bad_descriptions():
    with pytest.raises(hm.SettingError, match="optimizer is 'adam'"):
        Method("x", lr=0.1, optimizer="adam")
    with pytest.raises(hm.SettingError, match="AdamW has no constraints"):
        Method("x", lr=0.1, optimizer="adamw", temperature=1.0)
    with pytest.raises(hm.SettingError, match=r"draws is 2.*one draw only"):
        task.make_task(replace(TEXT, draws=2), 0)
    table = replace(IMAGES, data=Source("krkopt", batch=1))
    with pytest.raises(hm.SettingError, match="krkopt is a table"):
        task._checked(table, data.Table(torch.zeros(1, 1), torch.zeros(1), 2))
    with pytest.raises(hm.SettingError, match="no model 'resnet43'; did you mean resnet34"):
        models.model("resnet43")


# ---------------------------------------------------------------------- training
def trained(e, arm, path, stop=None, progress=lambda _: None, index=0):
    return train.train(e, arm, index, path, "key", progress, pytest.fail, stop or Stop())


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.usefixtures("toy")
def test_free_training_is_that_of_torch():
    """The whole loop against one written down here with torch's fused SGD: equal to the last bit."""
    e = replace(IMAGES, epochs=2, milestones=(0.5,))
    arm = replace(FREE, weight_decay=1e-3)
    trainer = train.Trainer(e, arm, 0)
    model, _ = train.build(e, arm, 0)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.8, weight_decay=1e-3, fused=True
    )
    x, y = trainer.task.train
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.1**epoch
        seed = hm.replicas.child_seed(0, 0, train._ORDER, epoch)
        order = torch.randperm(200, generator=torch.Generator().manual_seed(seed))
        for chosen in order.split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen], reduction="sum")
            (loss / len(chosen)).backward()
            optimizer.step()
    while trainer.epoch < 2:
        trainer.advance()
    assert same(trainer.model.state_dict(), model.state_dict())


@pytest.mark.usefixtures("toy")
def test_small_pieces_of_a_batch_give_the_gradient_of_the_whole():
    whole = train.Trainer(IMAGES, FREE, 0)
    parts = train.Trainer(replace(IMAGES, micro=5), FREE, 0)
    for _ in range(10):
        whole.advance()
        parts.advance()
    for p, q in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)  # sums in another order, ten steps


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("e", "arm"),
    [
        (IMAGES, WARM),  # noise, constraints
        (TEXT, TEXT.arms[0]),  # dropout
        (IMAGES, Method("AdamW", lr=1e-3, optimizer="adamw")),
        (replace(IMAGES, data=replace(IMAGES.data, augment=True)), FREE),
    ],
    ids=["noise", "dropout", "adamw", "augmentation"],
)
def test_a_run_stopped_within_an_epoch_ends_bitwise_where_it_would_have(e, arm, tmp_path):
    whole = trained(e, arm, tmp_path / "whole.ckpt")
    path, count = tmp_path / "run.ckpt", 0

    class Soon(Stop):
        @property
        def asked(self):
            nonlocal count
            count += 1
            return count % 3 == 0  # after every third step

    for _ in range(100):
        try:
            resumed = trained(e, arm, path, Soon())
            break
        except KeyboardInterrupt:
            assert torch.load(path, weights_only=True)["trainer"]["place"] != [0, 0]
    assert resumed.curves == whole.curves
    assert resumed.finals == whole.finals


@pytest.mark.usefixtures("toy")
def test_a_checkpoint_of_another_run_is_not_used(tmp_path):
    path = tmp_path / "run.ckpt"
    stop = Stop()
    stop.ask()
    with pytest.raises(KeyboardInterrupt):
        trained(IMAGES, CIRCLE, path, stop)
    fresh = trained(IMAGES, FREE, tmp_path / "none.ckpt")
    other = train.train(IMAGES, FREE, 0, path, "other", lambda _: None, pytest.fail, Stop())
    assert other.curves == fresh.curves


@pytest.mark.usefixtures("toy")
def test_arms_share_weights_and_order_and_runs_do_not():
    free, warm = (train.build(IMAGES, arm, 0)[0].state_dict() for arm in (FREE, WARM))
    assert same(free, warm)  # the toy network starts within the circles
    assert not same(free, train.build(IMAGES, FREE, 1)[0].state_dict())
    a, b = train.Trainer(IMAGES, FREE, 0), train.Trainer(IMAGES, WARM, 0)
    assert torch.equal(a._order(), b._order())
    assert not torch.equal(a._order(), train.Trainer(IMAGES, FREE, 1)._order())


@pytest.mark.usefixtures("toy")
def test_a_run_that_diverges_is_told_apart(tmp_path):
    wild = replace(FREE, lr=1e30)
    run = trained(IMAGES, wild, tmp_path / "run.ckpt")
    assert run.curves["epoch"] == [1, 2, 3]
    assert all(math.isnan(v) for v in run.curves["test_loss"])
    part = {"curves": run.curves, "finals": run.finals, "seconds": 1.0}
    arm = runner._together(IMAGES, wild, "key", [part, part])
    assert all(math.isnan(v) for v in arm["finals"]["test_accuracy"])


def test_the_learning_rate_falls_at_its_milestones():
    e = experiment("fig6")
    rates = [e.factor(epoch) for epoch in (0, 49, 50, 99, 100, 149)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


# ---------------------------------------------------------------------- recipes
def test_recipes_of_real_data_are_complete():
    wanted = {"fig7", "table4.3", "sphere", "beyond", "table2", "table2-wikitext2"}
    assert wanted | {"fig6", "fig4.9", "fig6-small"} <= REAL.keys()
    for name, e in REAL.items():
        assert e.data.name in data.DATASETS, name
        model = models.model(*e.model)
        for arm in e.arms if e.search is None else e.searching().arms:
            hm.groups(model, arm.rules())  # every rule matches something
        for metric in (*e.metrics, *e.shown):
            assert metric in LABELS
    assert experiment("fig4.10").id == "fig7"
    assert experiment("table4.4").id == "table2"


def test_radii_of_the_transformer_reach_every_kind_of_layer():
    (ours, *_) = REAL["table2"].arms
    groups = hm.groups(models.model("transformer", 50), ours.rules())
    radius = {
        n: g["constraint"].radius for g in groups if g.get("constraint") for n, _ in g["params"]
    }
    assert radius["embedding.weight"] == 0.5
    assert radius["output.weight"] == radius["encoder.layers.1.linear2.weight"] == 0.1
    assert radius["encoder.layers.0.norm1.weight"] == 1.0
    assert radius["encoder.layers.0.self_attn.in_proj_weight"] == 1.0
    assert radius["encoder.layers.0.self_attn.out_proj.weight"] == 1.0
    assert not [name for name in radius if name.endswith("bias")]


def test_a_search_gives_every_method_as_many_tries_and_no_test_image():
    e = REAL["beyond"]
    assert {len(arm.candidates) for arm in e.arms} == {4}
    search = e.searching()
    assert search.data.validation == 2000
    assert len(search.arms) == 24

    def summary(mean, diverged=0):
        return {"test_accuracy": {"one_draw": {"mean": mean, "diverged": diverged}}}

    arm = e.arms[0]
    means = [summary(80.0), summary(None, 1), summary(85.0), summary(84.0)]
    found = {"arms": {f"{arm.name} #{k}": m for k, m in enumerate(means)}}
    chosen = runner.best(e, arm, found)
    assert (chosen.lr, chosen.momentum) == (0.1, 0.9)
    assert chosen.candidates == ()


# ---------------------------------------------------------------------- from end to end
def command(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_search_and_its_experiment_on_real_images_from_end_to_end(workers, tmp_path, monkeypatch):
    need("digits")
    if not workers:
        monkeypatch.setattr(runner, "run_jobs", in_this_process)
    e = REAL["beyond"]
    sgd, circle = e.arms[0], e.arms[3]
    e = replace(
        e,
        data=Source("digits", batch=32, train=400, test=300),
        model=("mlp", 64, 20, 10),
        arms=tuple(replace(arm, candidates=arm.candidates[:2]) for arm in (sgd, circle)),
        search=Search(epochs=1, runs=1, validation=100),
        claims=(Claim("c-CoLA-ud is better calibrated", "ece", circle.name, sgd.name),),
    )
    monkeypatch.setitem(_REGISTRY, e.id, lambda: e)
    out = tmp_path / "beyond"
    sizes = ("--runs", 2, "--epochs", 4, "--workers", workers or 1)
    said = command("run", "beyond", *sizes, "--out", out)
    assert "c-CoLA-ud is better calibrated" in said
    summary = json.loads((out / "summary.json").read_text())
    assert not summary["partial"]
    assert len(summary["arms"]["SGD-m"]["test_accuracy"]["values"]) == 2
    assert summary["arms"]["c-CoLA-ud"]["test_accuracy"]["one_draw"]["mean"] > 40  # chance is 10
    searched = json.loads((out / "search" / "summary.json").read_text())
    assert len(searched["arms"]) == 4
    stored = json.loads((out / "c-CoLA-ud.json").read_text())
    assert stored["settings"]["constraints"]["1.weight"][0] == "circle"
    assert stored["curves"]["epoch"] == [1, 2, 3, 4]
    assert not (out / runner.PARTS).exists()
    command("report", "beyond", "--out", out)
    assert (out / "report.html").read_text().count("data:image/png") == 2
    assert "Lipschitz bound" in (out / "README.md").read_text()
    assert "[beyond](beyond/README.md)" in (tmp_path / "README.md").read_text()
    # An equal arm of another experiment beside it is copied, not run (the search is run again).
    monkeypatch.setattr(runner, "run_jobs", in_this_process)
    same_sizes = adjusted(e, runs=2, epochs=4)
    again = replace(same_sizes, id="other", arms=e.arms[:1], claims=())
    runner.run(again, tmp_path / "other", quiet(), workers=1)
    assert (tmp_path / "other" / "SGD-m.json").read_bytes() == (out / "SGD-m.json").read_bytes()
    # So are the first runs of one that has more, whatever its curves are recorded at.
    fewer = replace(again, id="fewer", runs=1, records=2)
    runner.run(fewer, tmp_path / "fewer", quiet(), workers=1)
    found, whole = (
        json.loads((tmp_path / name / "SGD-m.json").read_text()) for name in ("fewer", "other")
    )
    assert found["curves"]["epoch"] == [1, 2, 3, 4]
    assert found["finals"] == {name: values[:1] for name, values in whole["finals"].items()}
    assert [len(row) for row in found["curves"]["test_loss"]] == [1] * 4


def small_cifar(name: str, **changes) -> RealExperiment:
    e = REAL[name]
    source = replace(e.data, train=256, test=200)
    return replace(e, data=source, model=("resnet8",), epochs=2, runs=1, **changes)


@pytest.mark.parametrize("name", ["fig6", "fig4.9"])
def test_the_recipe_for_residual_networks_trains_on_real_images(name, tmp_path):
    """The recipe as it is, but for the size of the network and the number of images."""
    need("cifar-10")
    e = small_cifar(name)
    for arm in e.arms:
        trainer = train.Trainer(e, arm, 0)
        assert trainer.task.train[0].is_contiguous(memory_format=torch.channels_last)
        losses = []
        for _ in range(4):
            trainer.advance()
            losses.append(trainer._loss)
        assert losses[1] < 2 * 2.4  # two batches, about log(10) each
        if arm.constraints:
            residuals = [g.residual for g in trainer.optimizer.report().groups]
            assert max(r for r in residuals if r is not None) < 5e-6  # float32, 576 columns
        assert math.isfinite(trainer.task.curves(trainer.model)["test_loss"])


def test_the_transformer_learns_real_text(tmp_path):
    need("ptb")
    e = REAL["table2"]
    e = replace(e, data=replace(e.data, batch=8), micro=4)
    for arm in e.arms[:2]:
        trainer = train.Trainer(e, arm, 0)
        losses = []
        for _ in range(6):
            before = trainer._loss
            trainer.advance()
            losses.append((trainer._loss - before) * len(trainer.task.train[0]) / 8)
        assert losses[0] == pytest.approx(math.log(10_000), abs=0.5)
        assert losses[-1] < losses[0] - 0.2


@pytest.mark.usefixtures("toy")
def test_sizes_can_be_changed_as_for_the_others():
    e = adjusted(REAL["fig7"], runs=1, epochs=2, draws=3, seed=4)
    assert isinstance(e, RealExperiment)
    assert (e.runs, e.epochs, e.draws, e.seed) == (1, 2, 3, 4)
    with pytest.raises(hm.SettingError, match="epochs is 0"):
        adjusted(e, epochs=0)
