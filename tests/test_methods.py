"""The literature's names are the settings they stand for."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import holonomic as hm
from cases import copies, same, set_grads, weights
from helpers import Drawn, Stream
from holonomic import Circle, Langevin, Orthogonal, Sphere, methods


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def fit(model: nn.Module, optimizer: Langevin, steps: int) -> list[float]:
    """Train on a small regression; the loss at every step."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 2, generator=generator)
    y = (x[:, :1] * x[:, 1:]).tanh()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def test_sgld_is_the_update_written_by_hand() -> None:
    lr, tau = 0.01, 0.3
    params = weights()
    optimizer = methods.sgld(params, lr=lr, temperature=tau, generator=Drawn(7))
    q = copies(params)
    stream = Stream(7)
    for _ in range(10):
        set_grads(params)
        for i, p in enumerate(params):
            R = stream.like(q[i])
            q[i] = q[i].add(p.grad, alpha=-lr).add(R, alpha=math.sqrt(2 * tau * lr))
        optimizer.step()
    assert same(params, q)


PRESETS: list[tuple[Any, dict[str, Any], type, str]] = [
    (methods.c_cola_od, {"radius": 1.0}, Circle, "EM"),
    (methods.c_cola_ud, {"radius": 1.0}, Circle, "OBA"),
    (methods.s_cola_od, {"radius": 1.5}, Sphere, "EM"),
    (methods.s_cola_ud, {"radius": 1.5}, Sphere, "OBA"),
    (methods.o_cola_od, {}, Orthogonal, "EM"),
    (methods.o_cola_ud, {}, Orthogonal, "OBA"),
]


@pytest.mark.parametrize(("preset", "where", "kind", "scheme"), PRESETS, ids=lambda v: str(v)[:20])
def test_presets_train_on_their_manifold(preset: Any, where: Any, kind: type, scheme: str) -> None:
    model = network()
    lr = 0.1 if scheme == "EM" else 0.05
    optimizer = preset(model, lr=lr, temperature=1e-6, seed=0, **where)
    constrained, rest = optimizer.param_groups
    assert isinstance(constrained["constraint"], kind)
    assert constrained["param_names"] == ["0.weight", "2.weight", "4.weight"]
    assert rest["constraint"] is None
    assert {g["scheme"] for g in optimizer.param_groups} == {scheme}
    assert {g["temperature"] for g in optimizer.param_groups} == {1e-6}
    losses = fit(model, optimizer, 200)
    assert losses[-1] < 0.5 * losses[0]
    report = optimizer.report().groups[0]
    # float32; rows of at most 8 numbers, radius^2 at most 2.25
    assert report.residual < 8 * 2.25 * 2**-23
    assert report.fallbacks == 0


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_underdamped_presets_take_a_momentum(momentum: float | None) -> None:
    given = {} if momentum is None else {"momentum": momentum}
    for preset, where, _, scheme in PRESETS:
        if scheme == "OBA":
            optimizer = preset(network(), lr=0.1, **where, **given)
            assert optimizer.param_groups[0]["momentum"] == (momentum or 0.9)


def test_a_preset_is_its_settings_bit_for_bit() -> None:
    model, other = network(), network()
    preset = methods.c_cola_ud(model, radius=0.5, lr=0.1, momentum=0.8, temperature=1e-4, seed=3)
    groups = hm.groups(other, {"*weight": Circle(0.5)})
    written = Langevin(groups, lr=0.1, momentum=0.8, temperature=1e-4, seed=3)
    fit(model, preset, 5)
    fit(other, written, 5)
    assert same(model.parameters(), other.parameters())


def test_other_schemes_go_through() -> None:
    optimizer = methods.o_cola_ud(network(), lr=0.1, scheme="BAOAB", weight_decay=0.1)
    assert {g["scheme"] for g in optimizer.param_groups} == {"BAOAB"}


def test_a_dictionary_of_radii() -> None:
    model = network()
    optimizer = methods.c_cola_od(model, radius={"0.weight": 0.2, "4.*": 0.3}, lr=0.1, seed=0)
    fit(model, optimizer, 20)
    assert model[0].weight.abs().max() <= 0.2 * (1 + 2**-23)
    assert model[4].weight.abs().max() <= 0.3 * (1 + 2**-23)
    assert [g["name"] for g in optimizer.param_groups] == [
        "0.weight", "4.*", "4.* (biases, norms)", "rest",
    ]  # fmt: skip


def test_where_the_orthogonal_weights_are() -> None:
    one = methods.o_cola_od(network(), lr=0.1, where="2.weight")
    two = methods.o_cola_od(network(), lr=0.1, where=["2.weight", "0.weight"])
    held = [
        [n for g in o.param_groups if g["constraint"] is not None for n in g["param_names"]]
        for o in (one, two)
    ]
    assert held == [["2.weight"], ["2.weight", "0.weight"]]
