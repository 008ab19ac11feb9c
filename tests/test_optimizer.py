"""An honest torch optimizer: SGD to the last bit, and everything users do to optimizers."""

import copy
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel

import holonomic as hm
from cases import (
    CONSTRAINED,
    CONSTRAINTS,
    SCHEMES,
    advance,
    build,
    copies,
    same,
    set_grads,
    state_tensors,
    weights,
)
from holonomic import Circle, Langevin, LevelSet, Orthogonal, SettingError, Sphere
from holonomic.constraints import Constraint, Free

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LOW = (torch.bfloat16, torch.float16)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def loss_of(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 4, generator=generator)
    return (model(x) - 1).square().mean()


def test_the_battery_has_every_constraint() -> None:
    classes = {type(make()) for make in CONSTRAINTS.values()} - {type(None)}
    known = {c for _, c in inspect.getmembers(hm.constraints, inspect.isclass)}
    assert classes == known - {Constraint, Free}


# ---------------------------------------------------------------------- SGD
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_sgd_bitwise(
    dtype: torch.dtype, foreach: bool | None, momentum: float, maximize: bool, weight_decay: float
) -> None:
    """By default that is SGD(fused=True), which rounds the ends of tensors otherwise than SGD does; with
    foreach given, it is SGD itself. Without momentum, and in bfloat16, where torch's SGD has three ways to
    round, ours is SGD's own default."""
    ours, theirs = weights(dtype=dtype), weights(dtype=dtype)
    settings: dict[str, Any] = {"maximize": maximize, "weight_decay": weight_decay}
    settings.update(lr=0.1, momentum=momentum)
    a = Langevin(ours, **settings, foreach=foreach)
    fused = foreach is None and momentum > 0 and dtype is not torch.bfloat16
    way = {"fused": True} if fused else {"foreach": foreach and dtype is not torch.bfloat16}
    b = torch.optim.SGD(theirs, **settings, **way)
    for step in range(100):
        for group in (*a.param_groups, *b.param_groups):
            group["lr"] = 0.1 / (1 + step % 7)
            group["momentum"] = momentum * (1 - 0.01 * (step % 11))
            group["weight_decay"] = weight_decay * (step % 3)
            group["maximize"] = maximize and step % 10 != 0
        advance(ours, a, 1)
        advance(theirs, b, 1)
        assert same(ours, theirs), f"step {step}"
    if momentum:
        buffers = [b.state[p]["momentum_buffer"] for p in theirs]
        assert same([a.state[p]["momentum_buffer"] for p in ours], buffers)


@pytest.mark.parametrize("lying", ["transposed", "strided", "channels_last", "expanded"])
@pytest.mark.parametrize("what", ["weight", "gradient"])
def test_sgd_does_not_depend_on_how_tensors_lie_in_memory(lying: str, what: str) -> None:
    """torch's fused step would, and reads beyond an expanded gradient."""

    def laid(t: torch.Tensor) -> torch.Tensor:
        if lying == "transposed":
            return t.transpose(0, 1).contiguous().transpose(0, 1)
        if lying == "strided":
            return torch.stack([t, t], -1)[..., 0]
        return t.contiguous(memory_format=torch.channels_last) if lying == "channels_last" else t

    q = torch.randn(6, 5, 4, 3, generator=torch.Generator().manual_seed(0))
    g = torch.randn(6, 5, 4, 3, generator=torch.Generator().manual_seed(1))
    if lying == "expanded":
        if what == "weight":
            pytest.skip("an expanded weight cannot be moved by anybody")
        g = torch.tensor(0.3).expand(6, 5, 4, 3)
    ours = nn.Parameter(laid(q) if what == "weight" else q.clone())
    theirs = nn.Parameter(q.clone())
    a, b = Langevin([ours], lr=0.1), torch.optim.SGD([theirs], lr=0.1, momentum=0.9, foreach=False)
    for _ in range(3):
        ours.grad, theirs.grad = laid(g) if what == "gradient" else g.clone(), g.clone()
        version = ours._version
        a.step()
        b.step()
        assert ours._version > version  # autograd must know
    assert torch.equal(ours.detach(), theirs.detach())


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: StepLR(o, 3, gamma=0.5),
        lambda o: OneCycleLR(o, max_lr=0.2, total_steps=30, cycle_momentum=True),
        lambda o: LambdaLR(o, lambda step: min(step / 5, 1.0)),
        lambda o: CosineAnnealingLR(o, T_max=10),
    ],
    ids=["StepLR", "OneCycleLR", "warmup from 0", "CosineAnnealingLR"],
)
def test_schedulers_drive_it_as_they_drive_sgd(scheduler: Any) -> None:
    trained = []
    for kind in (Langevin, torch.optim.SGD):
        model = network()
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        schedule = scheduler(optimizer)
        for _ in range(25):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            schedule.step()
        trained.append((copies(model.parameters()), optimizer.param_groups[0]["lr"]))
    assert same(trained[0][0], trained[1][0])
    assert trained[0][1] == trained[1][1]


def test_warmup_from_zero_starts_baoab_with_half_a_kick() -> None:
    """Steps at lr=0 take no time: the first step that moves is the scheme's first step."""
    params, optimizer = build("none", "BAOAB", temperature=0.0, momentum=1.0, weight_decay=0.0)
    start = copies(params)
    optimizer.param_groups[0]["lr"] = 0.0
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, q in zip(params, start, strict=True):
        expected = q - 0.05 * 0.5
        # two half drifts of 0.025: a few roundings of numbers of order 1
        assert torch.allclose(p, expected, rtol=0, atol=4e-16)


# ---------------------------------------------------------------------- groups
def test_groups_with_any_mix_of_settings_move_as_if_alone() -> None:
    mixes: list[dict[str, Any]] = [
        {"lr": 0.1, "momentum": 0.5, "constraint": Circle(0.4)},
        {"lr": 0.02, "scheme": "BAOAB", "constraint": Orthogonal(), "maximize": True},
        {"scheme": "EM", "weight_decay": 0.1},
        {"momentum": 1.0, "scheme": "ABO", "constraint": Sphere(0.8)},
    ]
    together = [weights(seed=k) for k in range(len(mixes))]
    groups = [{"params": p, **m} for p, m in zip(together, mixes, strict=True)]
    joint = Langevin(groups, lr=0.05)
    for _ in range(10):
        for params in together:
            set_grads(params)
        joint.step()
    for k, mix in enumerate(mixes):
        alone = weights(seed=k)
        advance(alone, Langevin(alone, **{"lr": 0.05, **mix}), 10)
        assert same(alone, together[k]), mix


def test_only_the_group_with_a_temperature_is_shaken() -> None:
    cold, warm = weights(seed=0), weights(seed=1)
    optimizer = Langevin([{"params": cold}, {"params": warm, "temperature": 0.1}], lr=0.05, seed=0)
    for _ in range(5):
        set_grads(cold)
        set_grads(warm)
        optimizer.step()
    alone, quiet = weights(seed=0), weights(seed=1)
    advance(alone, Langevin(alone, lr=0.05), 5)
    advance(quiet, Langevin(quiet, lr=0.05), 5)
    assert same(cold, alone)
    assert not any(torch.equal(a, b) for a, b in zip(warm, quiet, strict=True))


def test_named_parameters_keep_their_names() -> None:
    model = network()
    optimizer = Langevin(model.named_parameters(), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]
    model[2].weight.grad = torch.full_like(model[2].weight, torch.nan)
    with pytest.raises(hm.NonFiniteError, match=r"'2\.weight' has 24 of 24"):
        optimizer.step()


def test_add_param_group_places_and_moves_the_newcomers() -> None:
    first, second = weights(seed=0), weights(seed=1)
    optimizer = Langevin(first, lr=0.05)
    advance(first, optimizer, 3)
    optimizer.add_param_group({"params": second, "constraint": Circle(0.1), "scheme": "BAOAB"})
    assert all(p.abs().max() <= 0.1 for p in second)
    before = copies(second)
    set_grads(first)
    advance(second, optimizer, 3)
    assert not any(torch.equal(a, b) for a, b in zip(before, second, strict=True))
    assert all(p.abs().max() <= 0.1 for p in second)


def test_a_group_is_not_changed_by_being_added() -> None:
    group = {"params": weights(), "constraint": Circle(1.0)}
    Langevin([group], lr=0.1)
    assert set(group) == {"params", "constraint"}


# ---------------------------------------------------------------------- the step
def test_closure_runs_once_with_gradients_enabled_and_its_loss_is_returned() -> None:
    model, other = network(), network()
    a, b = Langevin(model.parameters(), lr=0.1), Langevin(other.parameters(), lr=0.1)
    calls = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        a.zero_grad()
        loss = loss_of(model)
        loss.backward()
        calls.append(loss.item())
        return loss

    for _ in range(3):
        with torch.no_grad():
            returned = a.step(closure=closure)
            assert not torch.is_grad_enabled()
        assert returned.item() == calls[-1]
        b.zero_grad()
        loss_of(other).backward()
        assert b.step() is None
    assert len(calls) == 3
    assert same(model.parameters(), other.parameters())


def test_zero_grad() -> None:
    params, optimizer = build("Circle")
    set_grads(params)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_step_without_any_gradient_moves_nothing() -> None:
    for name in CONSTRAINTS:
        params, optimizer = build(name)
        before = copies(params)
        optimizer.step()
        assert same(before, params)
        assert not optimizer.state


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_foreach_and_tensor_by_tensor_agree_bitwise(name: str, scheme: str) -> None:
    dtypes = (torch.float32, torch.bfloat16) if name == "Sphere" else (torch.float32,)
    for dtype in dtypes:
        one, a = build(name, scheme, dtype, foreach=True)
        two, b = build(name, scheme, dtype, foreach=False)
        advance(one, a, 5)
        advance(two, b, 5)
        assert same(one, two)
        assert same(state_tensors(a), state_tensors(b))


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_maximize_is_descent_on_the_negative_gradient(name: str) -> None:
    up, a = build(name, maximize=True, weight_decay=0.0)
    down, b = build(name, weight_decay=0.0)
    for _ in range(5):
        set_grads(up)
        set_grads(down)
        for p in down:
            p.grad.neg_()
        a.step()
        b.step()
    assert same(up, down)


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_unsupported_flags_raise(flag: str) -> None:
    with pytest.raises(SettingError, match=f"{flag}=True is not supported"):
        Langevin(weights(), **{flag: True})
    with pytest.raises(SettingError, match=f"{flag}=True is not supported"):
        Langevin([{"params": weights(), flag: True}])
    Langevin(weights(), **{flag: False})


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "EM", "LM"])
def test_gradients_are_never_written(name: str, scheme: str) -> None:
    dtypes = (torch.float64, torch.bfloat16)
    for maximize, dtype in itertools.product((True, False), dtypes):
        params, optimizer = build(name, scheme, dtype, maximize=maximize, weight_decay=0.1)
        for _ in range(2):
            set_grads(params)
            before = copies(p.grad for p in params)
            optimizer.step()
            assert same(before, [p.grad for p in params])


@pytest.mark.parametrize("name", [n for n in CONSTRAINTS if not n.startswith("LevelSet")])
@pytest.mark.parametrize("scheme", ["OBA", "LM"])
def test_parameters_without_a_gradient_are_left_alone(name: str, scheme: str) -> None:
    params, optimizer = build(name, scheme)
    start = copies(params)
    for _ in range(3):
        set_grads(params)
        params[1].grad = None
        optimizer.step()
    assert torch.equal(params[1], start[1])
    assert not torch.equal(params[0], start[0])
    assert params[1] not in optimizer.state
    moved = copies(params)
    advance(params, optimizer, 1)  # and takes part as soon as it has one
    assert not torch.equal(params[1], moved[1])


def test_a_joint_constraint_moves_tensors_without_gradient_too() -> None:
    """One equation links them: a tensor without a force still has momentum and noise."""
    params, optimizer = build("LevelSet", temperature=0.0, weight_decay=0.0)
    set_grads(params)
    params[1].grad = None
    optimizer.step()
    assert optimizer.report().groups[0].residual < 1e-13  # 4 (the sum) times some ulps


def test_sparse_gradients_raise() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Langevin(table.named_parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    before = copies(table.parameters())
    with pytest.raises(SettingError, match=r"gradient of 'weight' is sparse.*sparse=False"):
        optimizer.step()
    assert same(before, table.parameters())


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_lr_zero_moves_nothing(name: str, scheme: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        params, optimizer = build(name, scheme, dtype, temperature=0.5, lr=0.0)
        before = copies(params)
        advance(params, optimizer, 3)
        assert same(before, params)
        optimizer.param_groups[0]["lr"] = 0.1
        advance(params, optimizer, 1)
        assert not same(before, params)


def test_settings_changed_between_steps_take_effect() -> None:
    params, optimizer = build("Circle", temperature=0.0)
    other, twin = build("Circle", temperature=0.0)
    advance(params, optimizer, 2)
    advance(other, twin, 2)
    assert same(params, other)
    optimizer.param_groups[0]["temperature"] = 0.1
    advance(params, optimizer, 1)
    advance(other, twin, 1)
    assert not same(params, other)

    params, optimizer = build("none", temperature=0.0)
    other, twin = build("none", temperature=0.0)
    optimizer.param_groups[0]["lr"] *= 2
    start = copies(params)
    advance(params, optimizer, 1)
    advance(other, twin, 1)
    for p, q, s in zip(params, other, start, strict=True):
        # twice the way; two roundings of numbers below 4
        assert torch.allclose(p - s, 2 * (q - s), rtol=0, atol=2e-15)


@pytest.mark.parametrize("name", ["none", "Circle", "Orthogonal"])
def test_tensor_lr(name: str) -> None:
    params, optimizer = build(name, lr=torch.tensor(0.05, dtype=torch.float64))
    other, twin = build(name, lr=0.05)
    schedules = [StepLR(o, 2, gamma=0.5) for o in (optimizer, twin)]
    for _ in range(5):
        advance(params, optimizer, 1)
        advance(other, twin, 1)
        for s in schedules:
            s.step()
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert same(params, other)


# ---------------------------------------------------------------------- the neighbours
def test_grad_scaler_skips_steps_with_inf() -> None:
    scaled, plain = network(), network()
    a = Langevin(hm.groups(scaled, {"*.weight": Circle(0.4)}), lr=0.1, temperature=1e-3, seed=0)
    b = Langevin(hm.groups(plain, {"*.weight": Circle(0.4)}), lr=0.1, temperature=1e-3, seed=0)
    # powers of two: scaling is exact, so both runs agree bit for bit
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(8):
        a.zero_grad()
        scaler.scale(loss_of(scaled)).backward()
        if step == 4:
            scaled[0].weight.grad[0, 0] = torch.inf
            before = copies(scaled.parameters())
        scaler.step(a)
        if step == 4:
            assert same(before, scaled.parameters())
        else:
            b.zero_grad()
            loss_of(plain).backward()
            b.step()
        scaler.update()
    assert same(scaled.parameters(), plain.parameters())


def test_gradient_clipping() -> None:
    model = network()
    optimizer = Langevin(model.parameters(), lr=1.0, momentum=0.0)
    before = copies(model.parameters())
    (1e3 * loss_of(model)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before, strict=True)])
    # float32 differences of weights of order 1: 2^-24 each, over 59 of them
    assert moved.norm().item() == pytest.approx(0.01, abs=59**0.5 * 2**-24)


def test_averaged_model_follows_and_does_not_disturb() -> None:
    model, other = network(), network()
    a = Langevin(hm.groups(model, {"*.weight": Sphere(0.8)}), lr=0.1)
    b = Langevin(hm.groups(other, {"*.weight": Sphere(0.8)}), lr=0.1)
    averaged = AveragedModel(model)
    seen = []
    for _ in range(4):
        for m, o in ((model, a), (other, b)):
            o.zero_grad()
            loss_of(m).backward()
            o.step()
        averaged.update_parameters(model)
        seen.append(model[0].weight.detach().clone())
    assert same(model.parameters(), other.parameters())
    # a running mean of 4 float32 numbers below 1
    assert torch.allclose(averaged.module[0].weight, torch.stack(seen).mean(0), atol=4 * 2**-24)


def test_step_hooks_are_called() -> None:
    params, optimizer = build("Orthogonal")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    advance(params, optimizer, 2)
    assert calls == ["pre", "post", "pre", "post"]


def test_convolutions_in_channels_last_train_orthogonally() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 2)
    ).to(memory_format=torch.channels_last)
    optimizer = Langevin(hm.groups(model, {nn.Conv2d: Orthogonal()}), lr=0.05, nonfinite="raise")
    x = torch.randn(32, 3, 6, 6)
    y = (x.mean((1, 2, 3)) > 0).long()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    Q = model[0].weight.detach().flatten(1).double()
    # rows of 27 float32 numbers: a Gram entry rounds by a few 2^-23
    assert (Q @ Q.mT - torch.eye(8)).abs().max() < 27 * 2**-23


# ---------------------------------------------------------------------- noise
@pytest.mark.parametrize("name", ["none", "Circle", "Sphere", "Orthogonal", "LevelSet"])
def test_a_seed_is_all_the_randomness(name: str) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    runs = []
    for seed in (3, 3, 4):
        params, optimizer = build(name, "LM", seed=seed)
        advance(params, optimizer, 3)
        runs.append(copies(params))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_without_a_seed_torch_manual_seed_decides() -> None:
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        params, optimizer = build("none", seed=None)
        advance(params, optimizer, 2)
        runs.append(copies(params))
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_without_noise_torch_random_numbers_are_not_touched() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    params, optimizer = build("Circle", temperature=0.0, seed=None)
    advance(params, optimizer, 2)
    optimizer.state_dict()
    optimizer.report()
    assert torch.equal(torch.get_rng_state(), state)


def test_two_unseeded_optimizers_differ() -> None:
    runs = []
    for _ in range(2):
        params, optimizer = build("none", seed=None)
        advance(params, optimizer, 1)
        runs.append(copies(params))
    assert not same(*runs)


def test_a_generator_gives_the_seed_and_is_advanced() -> None:
    generator = torch.Generator().manual_seed(1)
    params, optimizer = build("none", generator=generator)
    before = generator.get_state()
    advance(params, optimizer, 2)
    assert not torch.equal(generator.get_state(), before)
    seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(1)))
    other, twin = build("none", seed=seed)
    advance(other, twin, 2)
    assert same(params, other)
    third, again = build("none", generator=generator)  # the next seed of the same generator
    advance(third, again, 2)
    assert not same(params, third)


# ---------------------------------------------------------------------- placing
@pytest.mark.parametrize("name", CONSTRAINED)
def test_weights_loaded_after_building_are_placed(name: str) -> None:
    params, optimizer = build(name, temperature=0.0)
    fresh = weights(name, seed=9)
    with torch.no_grad():
        for p, f in zip(params, fresh, strict=True):
            p.copy_(f)
    optimizer.param_groups[0]["lr"] = 0.0
    advance(params, optimizer, 1)
    Langevin(fresh, constraint=CONSTRAINTS[name]())
    assert same(params, fresh)  # placed, and not moved


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, d) for name in CONSTRAINED for d in (torch.float64, torch.float32, *LOW)],
)
def test_placing_twice_changes_nothing(name: str, dtype: torch.dtype) -> None:
    params, _ = build(name, dtype=dtype)
    once = copies(params)
    Langevin(params, constraint=CONSTRAINTS[name]())
    assert same(once, params)


def test_orthogonal_init_draws_once_and_from_its_own_seed() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    constraint = Orthogonal(init="orthogonal")
    one, two, three = (weights() for _ in range(3))
    optimizer = Langevin(one, lr=0.0, constraint=constraint, seed=1)
    Langevin(two, constraint=constraint, seed=1)
    Langevin(three, constraint=constraint, seed=2)
    assert same(one, two)
    assert not same(one, three)
    drawn = copies(one)
    advance(one, optimizer, 2)
    assert same(one, drawn)
    assert torch.equal(torch.get_rng_state(), state)


def test_orthogonal_init_keeps_weights_that_are_loaded_later() -> None:
    params, optimizer = build("Orthogonal", constraint=Orthogonal(init="orthogonal"), lr=0.0)
    loaded, _ = build("Orthogonal")
    with torch.no_grad():
        for p, q in zip(params, loaded, strict=True):
            p.copy_(q)
    advance(params, optimizer, 1)
    assert same(params, loaded)


# ---------------------------------------------------------------------- precision
def misfit(constraint: Constraint, q: torch.Tensor) -> float:
    """How far weights are from their manifold, relative to its size, computed in double."""
    w = q.detach().double()
    if isinstance(constraint, Circle):
        return (w.abs().max() / constraint.radius - 1).item()
    if isinstance(constraint, Sphere):
        norms = w.norm() if constraint.dim is None else w.flatten(1).norm(dim=1)
        off = norms / constraint.radius - 1
        return (off if constraint.slack else off.abs()).max().item()
    if isinstance(constraint, Orthogonal):
        m = w.flatten(1)
        m = m.mT if m.shape[0] < m.shape[1] else m
        return (m.mT @ m - torch.eye(m.shape[1])).abs().max().item()
    return abs(constraint.fn(w).item())


@pytest.mark.parametrize(
    "constraint",
    [
        Circle(0.3),
        Sphere(0.7),
        Sphere(0.7, slack=False),
        Sphere(3.0, slack=False, dim=None),
        Orthogonal(),
        Orthogonal(init="orthogonal"),
        LevelSet(lambda w: (w * w).mean() - 1.0),
    ],
    ids=lambda c: f"{type(c).__name__}-{c.init}-{'xi' in c.lists}",
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (24, 4, 3, 3)])
def test_constraints_hold_to_the_rounding_of_the_weights(
    constraint: Constraint, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    # Rounding weights by a relative eps/2 changes norms by eps/2, Gram matrices and mean squares by
    # eps: 2^-7 in bfloat16. Float32 and float64 also round the sums over up to 64 rows.
    eps = torch.finfo(dtype).eps
    bound = eps if dtype in LOW else 64 * eps
    torch.manual_seed(0)
    for spread in (0.05, 1.0):
        w = nn.Parameter((spread * torch.randn(shape)).to(dtype))
        optimizer = Langevin([w], lr=0.01, temperature=1e-4, constraint=constraint, seed=0)
        assert misfit(constraint, w) <= bound
        for _ in range(10):
            w.grad = torch.randn_like(w)
            optimizer.step()
            assert misfit(constraint, w) <= bound
        assert optimizer.report().groups[0].fallbacks == 0


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_almost_orthogonal_low_precision_weights_are_placed(dtype: torch.dtype) -> None:
    Q = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0]
    w = nn.Parameter((1.05 * Q).to(dtype))  # off by 0.1
    Langevin([w], constraint=Orthogonal())
    assert misfit(Orthogonal(), w) <= torch.finfo(dtype).eps


def test_deepcopied_model_and_optimizer_run_on_alike() -> None:
    model = network()
    optimizer = Langevin(
        hm.groups(model, {"*.weight": Circle(0.4)}), lr=0.1, temperature=1e-3, seed=0
    )
    loss_of(model).backward()
    optimizer.step()
    other, twin = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (other, twin)):
        for _ in range(3):
            o.zero_grad()
            loss_of(m).backward()
            o.step()
    assert same(model.parameters(), other.parameters())


@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "BACDEDCAB"])
def test_with_noise_a_larger_step_does_not_heat_the_weights(scheme: str) -> None:
    """In equilibrium p = -sqrt(lr) v has the variance tau whatever lr is, so p is what a change of
    lr keeps. (v kept instead would make the kinetic temperature jump by the ratio, here 1e4.)"""
    q = torch.nn.Parameter(torch.zeros(20_000))
    opt = Langevin(
        [q],
        lr=1e-5,
        momentum=0.5,
        temperature=1e-2,
        scheme=scheme,
        seed=0,
        coupling=1e-4,
        noise=0.1,
    )

    def advance_once() -> float:
        q.grad = q.detach().clone()
        opt.step()
        return opt.report().groups[0].kinetic_temperature

    for _ in range(30):
        cold = advance_once()
    opt.param_groups[0]["lr"] = 0.1
    hot = advance_once()
    assert hot < 3 * max(cold, 1e-2)
    assert q.detach().std() < 3 * 0.1  # its spread in equilibrium is sqrt(tau) = 0.1


def test_loading_keeps_the_constraint_itself() -> None:
    params, opt = build("LevelSet")
    advance(params, opt, 2)
    constraint = opt.param_groups[0]["constraint"]
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["constraint"] is constraint
