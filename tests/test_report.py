"""What the optimizer says of itself."""

import math
from dataclasses import fields

import pytest
import torch
from torch import nn

import holonomic as hm
from cases import CONSTRAINED, CONSTRAINTS, advance, build, set_grads, weights
from holonomic import Circle, Langevin, Orthogonal, Sphere
from holonomic.report import GroupReport

# Parameters less constraints, for tensors of 6 x 5, 6 x 5, 4 x 5 and 3 x 2 x 2 (92 numbers). A slack
# takes off the equation it comes with. Orthogonal: s(s+1)/2 equations for the smaller side s.
DOF = {
    "none": 92,
    "Circle": 92,
    "Circle-tensor": 12 + 12 + 2,
    "Sphere": 92,
    "Sphere-equality": 92 - (6 + 6 + 4 + 3),
    "Sphere-whole": 92,
    "Orthogonal": 92 - (15 + 15 + 10 + 6),
    "LevelSet": 92 - 1,
    "LevelSet-inequality": 92,
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_degrees_of_freedom(name: str) -> None:
    params, optimizer = build(name)
    for _ in range(2):
        report = optimizer.report().groups[0]
        assert report.parameters == sum(p.numel() for p in params)
        assert report.dof == DOF[name]
        advance(params, optimizer, 1)


def test_degrees_of_freedom_of_a_stack() -> None:
    stack = nn.Parameter(torch.randn(7, 6, 5))
    report = Langevin([stack], constraint=Orthogonal(batch_dims=1)).report().groups[0]
    assert report.dof == 7 * (30 - 15)
    stack = nn.Parameter(torch.randn(7, 6, 5))
    report = Langevin([stack], constraint=Sphere(slack=False, batch_dims=1)).report().groups[0]
    assert report.dof == 7 * (30 - 6)


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("scheme", ["OBA", "EM"])
def test_fields_before_and_after_the_first_step(name: str, scheme: str) -> None:
    params, optimizer = build(name, scheme)
    before = optimizer.report().groups[0]
    assert math.isnan(before.kinetic_temperature)
    assert before.cotangency == 0
    advance(params, optimizer, 3)
    after = optimizer.report().groups[0]
    for report in (before, after):
        assert report.name == "0"
        assert report.constraint == name.split("-")[0].replace("none", "-")
        assert report.scheme == scheme
        assert report.temperature == 1e-3
        assert report.fallbacks == report.skipped == 0
        assert report.residual < 1e-13  # float64, at most 92 numbers of size below 4
        assert report.cotangency < 1e-12
    assert math.isnan(after.kinetic_temperature) == (scheme == "EM")


@pytest.mark.parametrize("name", CONSTRAINED)
def test_weights_moved_off_the_manifold_show(name: str) -> None:
    for steps in (0, 2):
        params, optimizer = build(name)
        advance(params, optimizer, steps)
        with torch.no_grad():
            for p in params:
                p.add_(10.0)
        assert optimizer.report().groups[0].residual > 1.0


def tangent_square(name: str, q: torch.Tensor, state: dict) -> float:
    """|P(q) v|^2, written out: momenta in the state may have a normal part."""
    v = state["momentum_buffer"]
    if name == "none":
        return float(v.square().sum())
    q, v = q.flatten(1), v.flatten(1)
    if name == "Orthogonal":
        q, v = (q, v) if len(q) >= q.shape[1] else (q.T, v.T)
        S = q.T @ v
        return float((v - q @ (S + S.T) / 2).square().sum())
    if "slack" in state:
        q = torch.cat([q, state["slack"].flatten(1)], 1)
        v = torch.cat([v, state["slack_momentum"].flatten(1)], 1)
    radial = (q * v).sum(1) / q.norm(dim=1)
    return float(v.square().sum() - radial.square().sum())


def test_kinetic_temperature_is_lr_v2_over_dof() -> None:
    for name in ("none", "Sphere", "Sphere-equality", "Orthogonal"):
        params, optimizer = build(name)
        advance(params, optimizer, 3)
        v2 = sum(tangent_square(name, p.detach(), optimizer.state[p]) for p in params)
        expected = 0.05 * v2 / DOF[name]
        measured = optimizer.report().groups[0].kinetic_temperature
        assert measured == pytest.approx(expected, rel=1e-13)  # sums of at most 111 numbers
    params, optimizer = build("Circle")  # the momentum is an angular velocity: |p| = r |v|
    advance(params, optimizer, 3)
    v2 = sum(float((0.4 * optimizer.state[p]["momentum_buffer"]).square().sum()) for p in params)
    measured = optimizer.report().groups[0].kinetic_temperature
    assert measured == pytest.approx(0.05 * v2 / 92, rel=1e-13)


def test_kinetic_temperature_counts_only_what_moves() -> None:
    params, optimizer = build("none", momentum=0.0, temperature=0.0, weight_decay=0.0)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    # momentum 0 and a gradient of ones: v = 1 for the 30 numbers that move
    assert optimizer.report().groups[0].kinetic_temperature == pytest.approx(0.05, rel=1e-15)


@pytest.mark.parametrize("name", ["Circle", "Orthogonal"])
def test_reading_changes_nothing(name: str) -> None:
    params, optimizer = build(name)
    other, twin = build(name)
    for _ in range(3):
        optimizer.report()
        advance(params, optimizer, 1)
        advance(other, twin, 1)
    optimizer.report()
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))
    for p, q in zip(params, other, strict=True):
        momenta = (optimizer.state[p]["momentum_buffer"], twin.state[q]["momentum_buffer"])
        assert torch.equal(*momenta)


def test_printing_gives_a_table() -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
    rules = {"0.weight": Circle(0.1), "1.weight": {"scheme": "EM", "constraint": Orthogonal()}}
    optimizer = Langevin(hm.groups(model, rules, lr=0.1, temperature=0.25), seed=0)
    for _ in range(2):
        lines = str(optimizer.report()).splitlines()
        assert len(lines) == 2 + 3  # header, rule, three groups
        assert lines[0].split()[:5] == ["group", "constraint", "scheme", "parameters", "dof"]
        assert set(lines[1]) == {"-"}
        assert lines[2].split()[:5] == ["0.weight", "Circle", "OBA", "1,200", "1,200"]
        assert lines[3].split()[:5] == ["1.weight", "Orthogonal", "EM", "60", "57"]
        assert lines[4].split()[:5] == ["rest", "-", "OBA", "32", "32"]
        assert all("0.25" in line for line in lines[2:])
        assert lines[3].split()[6] == "-"  # no momentum, so no cotangency
        model(torch.ones(4, 40)).sum().backward()
        optimizer.step()
    hidden = {"stored_cotangency", "limited"}  # for those who ask
    assert len(fields(GroupReport)) - len(hidden) == len(lines[2].split())


def test_fallbacks_are_counted() -> None:
    w = nn.Parameter(torch.eye(3).double())
    optimizer = Langevin([w], lr=1.0, constraint=Orthogonal())
    w.grad = 100 * torch.tensor([[0.0, 1, 2], [-1, 0, 3], [-2, -3, 0]]).double()
    optimizer.step()
    report = optimizer.report().groups[0]
    assert report.fallbacks == 1
    assert report.residual < 1e-14  # nine numbers below 1


def test_weights_at_the_bound_can_leave_it_without_noise() -> None:
    for constraint in (Circle(0.5), Sphere(0.5)):
        w = nn.Parameter(torch.zeros(3, 2).double())
        with torch.no_grad():
            w[:, 0] = 0.5
        optimizer = Langevin([w], lr=0.01, constraint=constraint)
        assert bool((w[:, 0] == 0.5).all())  # inside: not placed
        for _ in range(50):
            w.grad = w.detach().clone()
            optimizer.step()
            assert w.abs().max() <= 0.5 + 1e-16
        assert w.abs().max() < 0.4
        assert optimizer.report().groups[0].residual < 1e-15


def test_skipped_steps_are_counted() -> None:
    params = weights()
    optimizer = Langevin(params, lr=0.1, nonfinite="skip")
    for k in range(4):
        set_grads(params)
        if k % 2:
            params[0].grad[0, 0] = math.nan
        optimizer.step()
    assert optimizer.report().groups[0].skipped == 2
