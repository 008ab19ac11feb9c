"""Saving and loading: plain values, bitwise resume, take-over from SGD, nothing half loaded."""

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import cases
import holonomic as hm
from cases import (
    CONSTRAINED,
    CONSTRAINTS,
    advance,
    build,
    copies,
    same,
    state_tensors,
    weights,
)
from holonomic import CheckpointError, Circle, Langevin, LevelSet, Orthogonal, Sphere

SCHEMES = ("OBA", "BAOAB", "BACDEDCAB", "EM", "LM")


def through_a_file(value: Any) -> Any:
    """What is left of a value after torch.save and the safe torch.load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tamper_free(params: list[Any], optimizer: Langevin) -> list[Tensor]:
    """Everything a refused checkpoint must leave as it was."""
    rng = optimizer.state_dict()["param_groups"][0]["rng_state"]
    numbers = torch.tensor(
        [[float(g[k]) for k in ("lr", "momentum", "temperature")] for g in optimizer.param_groups]
    )
    return [*copies(params), *state_tensors(optimizer), rng["seeds"], numbers]


# ---------------------------------------------------------------------- resume
@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_dict_is_plain_and_resumes_bitwise(name: str, scheme: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        params, optimizer = build(name, scheme, dtype, temperature=0.05)
        advance(params, optimizer, 3)
        saved = through_a_file({"params": copies(params), "optimizer": optimizer.state_dict()})
        advance(params, optimizer, 3)

        other, twin = build(name, scheme, dtype, seed=99, lr=0.5, temperature=0.0)
        with torch.no_grad():
            for p, q in zip(other, saved["params"], strict=True):
                p.copy_(q)
        twin.load_state_dict(copy.deepcopy(saved["optimizer"]))
        # users load weights before they build the optimizer, too: it must leave them alone
        early = [nn.Parameter(q.clone()) for q in saved["params"]]
        coupling = 0.1 if scheme == "BACDEDCAB" else None
        third = Langevin(early, constraint=CONSTRAINTS[name](), scheme=scheme, coupling=coupling)
        third.load_state_dict(saved["optimizer"])
        for q, o in ((other, twin), (early, third)):
            assert same(q, saved["params"])  # loading moves no weight
            advance(q, o, 3)
            assert same(params, q)
            assert same(state_tensors(optimizer), state_tensors(o))


def resume(folder: str) -> None:
    """Run in a new process: continue every run found in a folder."""
    saved = torch.load(Path(folder) / "saved.pt", weights_only=True)
    ends = {}
    for (name, scheme), run in saved.items():
        params, optimizer = cases.build(name, scheme)
        with torch.no_grad():
            for p, q in zip(params, run["params"], strict=True):
                p.copy_(q)
        optimizer.load_state_dict(run["optimizer"])
        cases.advance(params, optimizer, 3)
        ends[name, scheme] = cases.copies(params)
    torch.save(ends, Path(folder) / "ends.pt")


def test_a_new_process_continues_bitwise(tmp_path: Path) -> None:
    saved, ends = {}, {}
    for name in CONSTRAINTS:
        for scheme in SCHEMES:
            params, optimizer = build(name, scheme)
            advance(params, optimizer, 3)
            state = {"params": copies(params), "optimizer": optimizer.state_dict()}
            saved[name, scheme] = copy.deepcopy(state)
            advance(params, optimizer, 3)
            ends[name, scheme] = copies(params)
    torch.save(saved, tmp_path / "saved.pt")
    here = Path(__file__).parent
    code = f"import test_checkpoint; test_checkpoint.resume({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    continued = torch.load(tmp_path / "ends.pt", weights_only=True)
    assert continued.keys() == ends.keys()
    for run, end in ends.items():
        assert same(end, continued[run]), run


def test_noise_is_restored_also_when_none_was_drawn_before_saving() -> None:
    params, optimizer = build("none", seed=5)
    saved = through_a_file(optimizer.state_dict())
    other, twin = build("none", seed=6)
    advance(weights(), twin, 1)
    twin.load_state_dict(saved)
    advance(params, optimizer, 2)
    advance(other, twin, 2)
    assert same(params, other)


def test_noise_is_restored_into_a_generator_in_use() -> None:
    params, optimizer = build("none", seed=5)
    advance(params, optimizer, 2)
    generator = torch.Generator().manual_seed(0)
    other, twin = build("none", generator=generator)
    with torch.no_grad():
        for p, q in zip(other, params, strict=True):
            p.copy_(q)
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    advance(params, optimizer, 2)
    advance(other, twin, 2)
    assert same(params, other)


def test_a_checkpoint_of_version_0_1_goes_on_with_its_seed() -> None:
    """Its noise came from torch's generators: the seed is kept, and a warning says that numbers differ."""
    params, optimizer = build("Orthogonal", seed=5)
    advance(params, optimizer, 2)
    saved = through_a_file(optimizer.state_dict())
    group = saved["param_groups"][0]
    group["rng_state"] = {"seed": 5, "cpu": torch.Generator().manual_seed(5).get_state()}
    del group["constraint"]["scale"]
    for key in ("noise_keys", "changed", "limited"):
        del group[key]
    other, twin = build("Orthogonal", seed=6)
    with pytest.warns(UserWarning, match="version 0.1, which drew its noise otherwise"):
        twin.load_state_dict(saved)
    assert twin.state_dict()["param_groups"][0]["rng_state"]["seeds"].tolist() == [5]
    with torch.no_grad():
        for p, q in zip(other, params, strict=True):
            p.copy_(q)
    advance(params, optimizer, 2)
    advance(other, twin, 2)
    assert same(params, other)


def test_an_angular_circle_of_version_0_1_is_refused_with_the_remedy() -> None:
    params, optimizer = build("Circle")
    advance(params, optimizer, 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["constraint"]["type"] = "AngularCircle"
    with pytest.raises(CheckpointError, match="AngularCircle, which no longer exists; use Circle"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles_continue_the_same_noise(name: str, copied: Any) -> None:
    params, optimizer = build(name, "LM")
    advance(params, optimizer, 2)
    other, twin = copied((params, optimizer))
    assert twin.param_groups[0]["params"][0] is other[0]
    advance(params, optimizer, 3)
    advance(other, twin, 3)
    assert same(params, other)
    twin.add_param_group({"params": weights("Circle"), "constraint": Circle(0.1)})
    assert all(p.abs().max() <= 0.1 for p in twin.param_groups[1]["params"])


def test_settings_come_from_the_checkpoint() -> None:
    params, optimizer = build("Circle", "BAOAB", lr=0.02, momentum=0.7, temperature=0.3)
    advance(params, optimizer, 1)
    _, twin = build("Circle", "BAOAB")
    twin.load_state_dict(optimizer.state_dict())
    group = twin.param_groups[0]
    assert (group["lr"], group["momentum"], group["temperature"]) == (0.02, 0.7, 0.3)
    assert isinstance(group["constraint"], Circle)


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("saved", "built", "words"),
    [
        (Circle(0.4), Circle(0.5), r"Circle\(radius=0\.4.*Circle\(radius=0\.5"),
        (Circle(0.4), None, r"Circle\(radius=0\.4.*None"),
        (None, Orthogonal(), r"None.*Orthogonal"),
        (Circle(0.4), Sphere(0.4), r"Circle.*Sphere"),
        (Sphere(0.4), Sphere(0.4, slack=False), r"slack=True.*slack=False"),
        (Circle(torch.full((5,), 0.4)), Circle(0.4), r"radius=<\(5,\): 0\.4 to 0\.4>.*radius=0\.4"),
        (Circle(torch.full((5,), 0.4)), Circle(torch.full((5,), 0.3)), r"0\.4 to 0\.4.*0\.3 to"),
        (LevelSet(cases.energy), LevelSet(cases.energy, inequality=True), r"energy.*inequality"),
    ],
)
def test_another_constraint_is_refused_and_nothing_changed(
    saved: Any, built: Any, words: str
) -> None:
    def made(constraint: Any, seed: int) -> tuple[list[Any], Langevin]:
        params = weights(seed=seed)[:2]
        optimizer = Langevin(
            params, lr=0.1 / (1 + seed), temperature=1e-3, constraint=constraint, seed=seed
        )
        advance(params, optimizer, 2)
        return params, optimizer

    _, optimizer = made(saved, 0)
    params, twin = made(built, 1)
    before = tamper_free(params, twin)
    with pytest.raises(CheckpointError, match=words):
        twin.load_state_dict(optimizer.state_dict())
    assert same(before, tamper_free(params, twin))
    advance(params, twin, 1)


def test_the_same_constraint_written_differently_is_accepted() -> None:
    params = weights()
    optimizer = Langevin(params, constraint=Circle(1), lr=0.1)
    advance(params, optimizer, 1)
    saved = through_a_file(optimizer.state_dict())
    Langevin(weights(), constraint=Circle(1.0)).load_state_dict(saved)
    optimizer = Langevin(params, constraint=Orthogonal(max_iterations=9), lr=0.1)
    other = Langevin(weights(), constraint=Orthogonal(init="orthogonal"))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1  # taken over, not refused


def test_other_counts_and_shapes_are_refused_and_nothing_changed() -> None:
    params, optimizer = build("Circle")
    advance(params, optimizer, 2)
    before = tamper_free(params, optimizer)
    first, second = weights(seed=1), weights(seed=2)
    two_groups = Langevin([{"params": first}, {"params": second}], constraint=Circle(0.4))
    fewer = Langevin(weights()[:2], constraint=Circle(0.4))
    swapped = weights()[::-1]
    reordered = Langevin(swapped, constraint=Circle(0.4), lr=0.1)
    advance(swapped, reordered, 1)
    for other, words in (
        (two_groups.state_dict(), "2 parameter groups and the optimizer 1"),
        (fewer.state_dict(), "has 2 parameters and the optimizer's has 4"),
        (reordered.state_dict(), r"'group 0, parameter 0' has shape \(6, 5\).*\(3, 2, 2\)"),
        ({"model": {}, "optimizer": {}}, "has model, optimizer and not the state and param_groups"),
    ):
        with pytest.raises(CheckpointError, match=words):
            optimizer.load_state_dict(other)
        assert same(before, tamper_free(params, optimizer))


# ---------------------------------------------------------------------- from SGD
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_takes_over_from_sgd_bitwise(momentum: float) -> None:
    params = weights()
    sgd = torch.optim.SGD(params, lr=0.1, momentum=momentum, weight_decay=0.01, maximize=True)
    advance(params, sgd, 3)
    other = weights()
    with torch.no_grad():
        for p, q in zip(other, params, strict=True):
            p.copy_(q)
    optimizer = Langevin(other, lr=0.7)
    optimizer.load_state_dict(through_a_file(sgd.state_dict()))
    advance(params, sgd, 5)
    advance(other, optimizer, 5)
    assert same(params, other)


@pytest.mark.parametrize("name", CONSTRAINED)
@pytest.mark.parametrize("scheme", ["OBA", "EM"])
def test_takes_over_from_sgd_onto_a_manifold(name: str, scheme: str) -> None:
    params = weights(name)
    sgd = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    advance(params, sgd, 3)
    saved = sgd.state_dict()
    saved["state"][1]["momentum_buffer"] = None  # a parameter that never had a gradient
    optimizer = Langevin(
        params, scheme=scheme, constraint=CONSTRAINTS[name](), seed=0, coupling=0.1
    )
    optimizer.load_state_dict(saved)
    report = optimizer.report().groups[0]
    # float64, manifolds and momenta of size below 30
    assert report.residual < 1e-12
    assert report.cotangency < 1e-12
    if scheme == "OBA":
        assert report.kinetic_temperature > 0
    advance(params, optimizer, 3)
    assert optimizer.report().groups[0].residual < 1e-12


def test_momentum_taken_over_is_the_tangent_part() -> None:
    params = weights()[:1]
    sgd = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    advance(params, sgd, 2)
    v = sgd.state[params[0]]["momentum_buffer"].clone()
    optimizer = Langevin(params, constraint=Orthogonal())
    optimizer.load_state_dict(sgd.state_dict())
    Q = params[0].detach()
    S = Q.mT @ v
    # numbers of order 1, a handful of float64 roundings over sums of 6
    expected = v - Q @ ((S + S.mT) / 2)
    assert torch.allclose(optimizer.state[params[0]]["momentum_buffer"], expected, atol=1e-14)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda p: torch.optim.Adam(p, lr=0.1), r"neither Langevin's nor torch\.optim\.SGD's"),
        (lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9), "neither Langevin's nor"),
    ],
    ids=["nesterov", "dampening", "Adam", "RMSprop"],
)
def test_what_is_not_plain_sgd_is_refused(other: Any, words: str) -> None:
    theirs = weights()
    stranger = other(theirs)
    advance(theirs, stranger, 2)
    params, optimizer = build("Circle")
    advance(params, optimizer, 1)
    before = tamper_free(params, optimizer)
    with pytest.raises(CheckpointError, match=words):
        optimizer.load_state_dict(stranger.state_dict())
    assert same(before, tamper_free(params, optimizer))


def test_sgd_built_from_our_groups_can_be_taken_over() -> None:
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(hm.groups(model, {"weight": {}}), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    sgd.step()
    optimizer = Langevin(hm.groups(model, {"weight": Circle(0.5)}))
    optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert model.weight.abs().max() <= 0.5


# ---------------------------------------------------------------------- distributed checkpoints
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def net(seed: int | None, scheme: str, radius: Any = 0.3) -> tuple[Net, Langevin]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    rules = {"a.weight": Circle(radius), "b.weight": Orthogonal()}
    settings: dict[str, Any] = {
        "lr": 0.05,
        "temperature": 0.1,
        "weight_decay": 0.01,
        "coupling": 0.1,
    }
    return model, Langevin(hm.groups(model, rules), scheme=scheme, seed=seed, **settings)


def train(model: Net, optimizer: Langevin, steps: int) -> None:
    x = torch.linspace(-1, 1, 40).reshape(10, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_distributed_checkpoint_round_trip(
    scheme: str, flat: bool, where: str, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    radius = torch.full((6, 4), 0.3) if scheme == "OBA" else 0.3
    model, optimizer = net(5, scheme, radius)
    train(model, optimizer, 3)
    weights_then = copies(model.parameters())
    saved: Any = {"o": get_optimizer_state_dict(model, optimizer, options=options)}
    assert same(weights_then, model.parameters())
    other, twin = net(None, scheme, radius)
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    if where == "memory":
        saved = copy.deepcopy(saved)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # one process is what is meant
            dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
            saved = {"o": get_optimizer_state_dict(other, twin, options=options)}
            dcp.load(saved, checkpoint_id=tmp_path, no_dist=True)
    train(model, optimizer, 3)
    set_optimizer_state_dict(other, twin, saved["o"], options=options)
    assert same(weights_then, other.parameters())
    train(other, twin, 3)
    assert same(model.parameters(), other.parameters())


def test_distributed_checkpoint_of_another_radius_is_refused(tmp_path: Path) -> None:
    """Reading in place must not write into the constraint itself."""
    model, optimizer = net(5, "OBA", torch.full((6, 4), 0.3))
    train(model, optimizer, 1)
    other, twin = net(5, "OBA", torch.full((6, 4), 0.2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        saved: Any = {"o": get_optimizer_state_dict(model, optimizer)}
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        saved = {"o": get_optimizer_state_dict(other, twin)}
        dcp.load(saved, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"0\.3 to 0\.3.*0\.2 to 0\.2"):
        set_optimizer_state_dict(other, twin, saved["o"])
    assert bool((twin.param_groups[0]["constraint"].radius == 0.2).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_asking_a_new_optimizer_for_its_state_disturbs_nothing(scheme: str) -> None:
    """torch initializes state by a step at lr=0; the run after it is the run without it."""
    model, optimizer = net(5, scheme)
    other, twin = net(5, scheme)
    before = copies(model.parameters())
    for o in (optimizer, twin):
        for group in o.param_groups:
            group["weight_decay"] = 0.0  # its force reaches the momentum at lr=0, as in SGD
    get_optimizer_state_dict(model, optimizer)
    assert same(before, model.parameters())
    train(model, optimizer, 3)
    train(other, twin, 3)
    # -0.0 and 0.0 are equal; everything else must be the same bits
    assert same(model.parameters(), other.parameters())
