"""Circles kept by their angles: the motion of `Circle`, and weights that are changed between steps."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import holonomic as hm
from cases import SCHEMES, advance, build, copies, same, set_grads, state_tensors
from holonomic import AngularCircle, CheckpointError, Circle, ConstraintError, Langevin
from holonomic.marks import RENEWED, renews

EPS = torch.finfo(torch.float32).eps


def at_rest(values: Tensor, radius: float = 1.0, **settings: Any) -> tuple[Any, Langevin]:
    """Weights that no force moves, after a first step that has made their state."""
    p = torch.nn.Parameter(values.clone())
    optimizer = Langevin([p], lr=0.1, constraint=AngularCircle(radius, **settings))
    p.grad = torch.zeros_like(p)
    optimizer.step()
    return p, optimizer


# ---------------------------------------------------------------------- the same motion
@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
@pytest.mark.parametrize("radius", [0.4, torch.linspace(0.2, 1.1, 5)], ids=["one", "radii"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_motion_is_that_of_circle(scheme, radius, temperature, momentum):
    """With weight decay, and a thermostat. 30 steps of roundings of 1e-16, which a rough motion may double
    every few steps."""
    if scheme == "BACDEDCAB" and not temperature:
        temperature = 1e-6  # a thermostat needs one to hold
    ends = []
    for make in (Circle, AngularCircle):
        generator = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64, generator=generator))
        settings: dict[str, Any] = {"lr": 0.05, "temperature": temperature, "weight_decay": 1e-2}
        settings["momentum"] = momentum
        if scheme == "BACDEDCAB":
            settings.update(coupling=0.1, noise=0.05)
        optimizer = Langevin([p], constraint=make(radius), scheme=scheme, seed=1, **settings)
        advance([p], optimizer, 30)
        ends.append((p.detach(), optimizer.state[p].get("momentum_buffer", p.detach())))
    for a, b in zip(*ends, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_free_motion_turns_by_the_angle_it_should():
    """psi falls by lr v a step, through many turns; whole turns are taken off on the way."""
    r, lr, n = 1.3, 0.04, 40 * RENEWED
    psi = torch.linspace(-1.2, 1.5, 9, dtype=torch.float64)
    v = torch.linspace(-3, 4, 9, dtype=torch.float64)
    p = torch.nn.Parameter(r * torch.sin(psi))
    optimizer = Langevin([p], lr=lr, momentum=1.0, constraint=AngularCircle(r, init="error"))
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.state[p]["momentum_buffer"].copy_(v)
    for _ in range(n):
        optimizer.step()
    turned = psi - n * lr * v
    assert turned.abs().max() > 8 * math.pi
    # n roundings of an angle of up to a few turns
    assert (p.detach() - r * torch.sin(turned)).abs().max() < 1e-11
    angle = optimizer.state[p]["angle"]
    assert angle.abs().max() <= math.pi + LONGEST * lr * 4 < turned.abs().max()


@pytest.mark.parametrize("radius", [1e-6, 1e3, 1e6, 1e12])
def test_the_motion_is_that_of_circle_for_any_radius(radius):
    """In units of the radius, with forces that grow with it: numbers like those above."""
    ends = []
    for make in (Circle, AngularCircle):
        start = torch.linspace(-0.9, 0.9, 12, dtype=torch.float64)
        p = torch.nn.Parameter(radius * start)
        optimizer = Langevin([p], lr=0.05, constraint=make(radius))
        for _ in range(30):
            p.grad = radius * torch.sin(3 * p.detach() / radius + 1)
            optimizer.step()
        ends.append(p.detach() / radius)
    assert (ends[0] - ends[1]).abs().max() < 1e-12
    assert (ends[0] - start).abs().max() > 0.1


def test_tensors_of_two_types_move_together():
    params = [
        torch.nn.Parameter(torch.full((3,), 0.2, dtype=d)) for d in (torch.float32, torch.double)
    ]
    optimizer = Langevin(params, lr=0.1, constraint=AngularCircle(0.5))
    advance(params, optimizer, 5)
    single = torch.nn.Parameter(torch.full((3,), 0.2, dtype=torch.double))
    alone = Langevin([single], lr=0.1, constraint=AngularCircle(0.5))
    for _ in range(5):
        single.grad = torch.sin(3 * single.detach() + 1) + 0.1  # that of the second tensor
        alone.step()
    assert torch.equal(single.detach(), params[1].detach())


def test_foreach_changes_no_number():
    """Each tensor takes the way it takes alone, whatever lies beside it."""
    ends = []
    for foreach in (True, False):
        wide = torch.linspace(-0.3, 0.3, 60).reshape(6, 10)
        params = [torch.nn.Parameter(wide.clone()), torch.nn.Parameter(wide.clone().T)]
        optimizer = Langevin(params, lr=0.1, constraint=AngularCircle(0.4), foreach=foreach)
        advance(params, optimizer, 10)
        ends.append(copies(params))
    assert same(*ends)


@pytest.mark.parametrize("lies", ["contiguous", "transposed", "channels last"])
def test_the_motion_does_not_depend_on_how_tensors_lie(lies):
    """Torch's kernel, which takes contiguous tensors, and the calls that others take: 10 steps of two
    roundings of an angle of at most 1."""

    def run(lies: str) -> Tensor:
        w = torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(0))
        if lies == "transposed":
            w = w.transpose(0, 1).contiguous().transpose(0, 1)
        if lies == "channels last":
            w = w.contiguous(memory_format=torch.channels_last)
        p = torch.nn.Parameter(w)
        assert p.is_contiguous() == (lies == "contiguous")
        optimizer = Langevin([p], lr=0.1, constraint=AngularCircle(0.4))
        advance([p], optimizer, 10)
        return p.detach()

    assert (run(lies) - run("contiguous")).abs().max() < 20 * EPS


def test_small_weights_keep_their_digits():
    """A weight of 1e-6 r moves by thousandths of itself, which an angle from the axis of the slack, about
    pi / 2, would round to nothing."""
    start = torch.tensor([1e-6, -3e-7])
    p = torch.nn.Parameter(start.clone())
    optimizer = Langevin([p], lr=1.0, momentum=0.0, constraint=AngularCircle(1.0))
    for _ in range(100):
        p.grad = start / 1000
        optimizer.step()
    expected = start.double() * (1 - 0.1)
    # A rounding a step, and cos(psi) = 1 to 1e-12
    assert ((p.detach() - expected) / expected).abs().max() < 101 * EPS


def test_weights_at_the_bound_can_leave_it():
    p = torch.nn.Parameter(torch.tensor([0.5, -0.5]))
    optimizer = Langevin([p], lr=0.1, momentum=0.0, constraint=AngularCircle(0.5))
    for _ in range(50):
        p.grad = p.detach().sign()
        optimizer.step()
    assert (p.detach().abs() < 0.49).all()


# ---------------------------------------------------------------------- weights changed in between
def by_copy(p: Any, new: Tensor) -> None:
    with torch.no_grad():
        p.copy_(new)


def by_entry(p: Any, new: Tensor) -> None:
    with torch.no_grad():
        for i in range(len(p)):
            p[i] = new[i]


def by_data(p: Any, new: Tensor) -> None:
    p.data = new.clone()


def by_vector(p: Any, new: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(new.clone(), [p])


def by_loading(p: Any, new: Tensor) -> None:
    module = torch.nn.Module()
    module.p = p
    module.load_state_dict({"p": new})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("change", [by_copy, by_entry, by_data, by_vector, by_loading])
def test_changed_weights_are_followed(change, dtype):
    """To the last digits of each, small ones and small changes too; and twice between two steps."""
    eps = torch.finfo(dtype).eps
    p, optimizer = at_rest(torch.tensor([0.3, -0.2, 0.0, 0.9, 4e-7, 1e-7, 0.5], dtype=dtype))
    new = torch.tensor([-0.4, 0.6, 0.1, 0.9, 0.0, 1.001e-7, 0.5 + 1e-6], dtype=dtype)
    change(p, torch.full_like(new, 0.7))
    change(p, new)
    for _ in range(3):
        optimizer.step()
    assert ((p.detach() - new).abs() <= 4 * eps * new.abs()).all()
    assert optimizer.report().groups[0].residual <= 8 * eps


def test_weights_changed_when_the_scheme_is_are_followed():
    """EM has made an angle and no momentum, so that OBA finds tensors whose state is not whole."""
    p = torch.nn.Parameter(torch.tensor([0.3, -0.2]))
    optimizer = Langevin([p], lr=0.1, scheme="EM", constraint=AngularCircle(1.0))
    p.grad = torch.zeros(2)
    optimizer.step()
    optimizer.param_groups[0]["scheme"] = "OBA"
    by_copy(p, torch.tensor([0.1, 0.6]))
    optimizer.step()
    assert (p.detach() - torch.tensor([0.1, 0.6])).abs().max() < EPS


def test_good_weights_end_a_motion_that_has_become_nan():
    p, optimizer = at_rest(torch.tensor([0.3, -0.2]))
    for name in ("angle", "momentum_buffer"):
        optimizer.state[p][name].fill_(math.nan)
    optimizer.step()
    assert p.isnan().all()
    by_copy(p, torch.tensor([0.1, 0.6]))
    optimizer.state[p]["momentum_buffer"].zero_()
    optimizer.step()
    assert (p.detach() - torch.tensor([0.1, 0.6])).abs().max() < EPS


def test_only_changed_weights_get_a_new_angle():
    p, optimizer = at_rest(torch.linspace(-0.9, 0.9, 7))
    before = optimizer.state[p]["angle"].clone()
    with torch.no_grad():
        p[2] = 0.5
    optimizer.step()
    after = optimizer.state[p]["angle"]
    same_as_before = after == before
    assert same_as_before.tolist() == [True, True, False, True, True, True, True]
    assert after[2].item() == pytest.approx(math.asin(0.5), abs=EPS)


def test_changed_weights_stay_on_their_side_of_the_circle():
    """xi < 0 there, and a force moves the weight the other way round."""
    p, optimizer = at_rest(torch.tensor([0.5, -0.5, 0.0, 0.5]))
    optimizer.state[p]["angle"].copy_(torch.tensor([2.0, -2.0, math.pi, 0.4]))
    optimizer.step()
    with torch.no_grad():
        p.copy_(torch.tensor([0.1, -0.1, 0.2, 0.1]))
    optimizer.step()
    s = math.asin(0.1)
    expected = torch.tensor([math.pi - s, s - math.pi, math.pi - math.asin(0.2), s])
    assert (optimizer.state[p]["angle"] - expected).abs().max() < 4 * EPS
    with torch.no_grad():
        p[2] = 0.0
    optimizer.step()
    assert abs(optimizer.state[p]["angle"][2].item()) == pytest.approx(math.pi)


def test_what_is_written_into_data_is_lost_and_the_report_says_so():
    p, optimizer = at_rest(torch.tensor([0.3, -0.2]))
    p.data.mul_(2)
    assert optimizer.report().groups[0].residual == pytest.approx(2 * 0.3, rel=1e-5)
    optimizer.step()
    assert (p.detach() - torch.tensor([0.3, -0.2])).abs().max() < EPS


def test_what_autograd_does_not_see_can_be_told():
    p, optimizer = at_rest(torch.tensor([0.3, -0.2]))
    p.data.mul_(2)
    torch.autograd.graph.increment_version(p)
    optimizer.step()
    assert (p.detach() - torch.tensor([0.6, -0.4])).abs().max() < EPS


def test_a_view_of_the_same_memory_is_noticed():
    p, optimizer = at_rest(torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
    p.data = p.data.T
    optimizer.step()
    assert (p.detach() - torch.tensor([[0.1, 0.3], [0.2, 0.4]])).abs().max() < EPS


def test_weights_changed_beyond_the_bound_are_placed():
    p, optimizer = at_rest(torch.tensor([0.3, -0.2]))
    by_copy(p, torch.tensor([5.0, -0.1]))
    optimizer.step()
    assert 0.99 < p[0].item() <= 1
    assert p[1].item() == pytest.approx(-0.1, abs=EPS)


@pytest.mark.parametrize(
    ("settings", "bad", "message"),
    [
        ({"init": "error"}, 1.5, r"AngularCircle on .*off the manifold by 0\.5"),
        ({}, math.nan, r"AngularCircle on .*NaN or Inf"),
    ],
)
def test_weights_changed_for_the_worse_are_refused_before_anything_moves(settings, bad, message):
    p, optimizer = at_rest(torch.tensor([0.3, -0.2]), **settings)
    other = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [other], "constraint": None})
    other.grad = torch.ones(2)
    before = state_tensors(optimizer)
    by_copy(p, torch.tensor([bad, -0.1]))
    with pytest.raises(ConstraintError, match=message):
        optimizer.step()
    assert same(state_tensors(optimizer), before)
    assert torch.equal(other.detach(), torch.ones(2))


def test_the_error_names_the_tensor_that_was_changed():
    a, b = (torch.nn.Parameter(torch.tensor([0.3, -0.2])) for _ in range(2))
    optimizer = Langevin([("a", a), ("b", b)], lr=0.1, constraint=AngularCircle(1.0))
    a.grad = torch.zeros(2)
    optimizer.step()
    b.grad = torch.zeros(2)  # b takes its first step now
    by_copy(a, torch.tensor([math.nan, 0.1]))
    with pytest.raises(ConstraintError, match=r"AngularCircle on 'a'"):
        optimizer.step()


def test_changed_weights_stay_as_they_are_if_another_group_fails():
    def fails(w: Tensor) -> Tensor:
        if broken:
            raise RuntimeError("no equation today")
        return (w * w).sum() - 1

    broken: list[int] = []
    p, q = torch.nn.Parameter(torch.tensor([0.3])), torch.nn.Parameter(torch.tensor([1.0, 0.1]))
    groups = [{"params": [p], "constraint": AngularCircle(1.0)}]
    groups.append({"params": [q], "constraint": hm.LevelSet(fails)})
    optimizer = Langevin(groups, lr=0.1)
    advance([p, q], optimizer, 2)
    broken.append(1)
    by_copy(p, torch.tensor([5.0]))
    with pytest.raises(RuntimeError, match="no equation today"):
        optimizer.step()
    assert p.item() == 5.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_refused(dtype):
    p = torch.nn.Parameter(torch.tensor([5.0], dtype=dtype))
    with pytest.raises(
        ConstraintError, match=r"AngularCircle on .* are torch\..*float16.*use Circle"
    ):
        Langevin([("w", p)], constraint=AngularCircle(1.0))
    assert p.item() == 5.0


def test_a_tensor_that_rests_is_followed_when_it_moves_again():
    p, optimizer = at_rest(torch.tensor([0.3, -0.2]))
    p.grad = None
    for _ in range(2):
        optimizer.step()
    by_copy(p, torch.tensor([0.1, 0.1]))
    optimizer.step()
    p.grad = torch.zeros(2)
    optimizer.step()
    assert (p.detach() - 0.1).abs().max() < EPS


# ---------------------------------------------------------------------- checkpoints and copies
def test_resuming_is_exact_when_angles_wind():
    """Fast enough to go round between two renewals, and saved between them."""

    def make() -> tuple[Any, Langevin]:
        params, optimizer = build("AngularCircle", dtype=torch.float32, lr=0.5, temperature=1.0)
        return params, optimizer

    params, optimizer = make()
    advance(params, optimizer, RENEWED + 10)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copies(params)
    furthest = max(t.abs().max().item() for t in (optimizer.state[p]["angle"] for p in params))
    assert furthest > math.pi
    advance(params, optimizer, RENEWED)

    again, twin = make()
    for p, w in zip(again, weights, strict=True):
        p.data.copy_(w)
    twin.load_state_dict(saved)
    advance(again, twin, RENEWED)
    assert same(copies(again), copies(params))
    assert same(state_tensors(twin), state_tensors(optimizer))


def test_angles_are_renewed_however_seldom_a_tensor_moves():
    """Two tensors in turns, and one that moves every fourth step."""
    params = [torch.nn.Parameter(torch.tensor([0.1], dtype=torch.float64)) for _ in range(3)]
    optimizer = Langevin(params, lr=1.0, momentum=1.0, constraint=AngularCircle(1.0))
    every, steps = (2, 2, 4), 64 * RENEWED
    furthest = 0.0
    for k in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.zeros_like(p) if k % every[i] == i % every[i] else None
        optimizer.step()
        for p in params:
            if k == 4:  # all have their state
                optimizer.state[p]["momentum_buffer"].fill_(1.0)
            if p.grad is not None:
                furthest = max(furthest, abs(optimizer.state[p]["angle"].item()))
    assert math.pi < furthest < math.pi + LONGEST < steps / 4


#: Moves between two renewals. The gaps are like those of draws of one in `RENEWED`, of which none of many
#: thousands is beyond 12 times the mean (e^-12 = 6e-6 each).
LONGEST = 12 * RENEWED


def test_no_rhythm_of_moves_evades_renewal():
    for n in range(1, 300):
        gap = longest = 0
        for k in range(40 * RENEWED):
            gap = 0 if renews(n * k) else gap + 1
            longest = max(longest, gap)
        assert longest < LONGEST, n
    share = sum(map(renews, range(100_000))) / 100_000
    # A standard deviation of sqrt(p / n) is 0.00056.
    assert share == pytest.approx(1 / RENEWED, abs=0.0025)


def test_one_nan_does_not_keep_other_angles_from_being_renewed():
    p, optimizer = at_rest(torch.tensor([0.3, -0.2]))
    optimizer.state[p]["angle"].copy_(torch.tensor([math.nan, 100.0]))
    optimizer.param_groups[0]["steps_taken"] = 0  # a step that renews
    optimizer.step()
    assert optimizer.state[p]["angle"][1].abs() <= math.pi


def test_without_time_nothing_is_renewed():
    p, optimizer = at_rest(torch.linspace(-0.9, 0.9, 50))
    optimizer.state[p]["angle"].add_(10 * math.pi)
    optimizer.param_groups[0]["lr"] = 0.0
    before = optimizer.state[p]["angle"].clone()
    weights = p.detach().clone()
    for steps in range(2 * RENEWED):
        optimizer.param_groups[0]["steps_taken"] = steps
        optimizer.step()
    assert torch.equal(optimizer.state[p]["angle"], before)
    assert torch.equal(p.detach(), weights)


def test_a_deep_copy_goes_its_own_way():
    p, optimizer = at_rest(torch.tensor([0.3, -0.2]))
    q, twin = copy.deepcopy((p, optimizer))
    by_copy(q, torch.tensor([0.1, 0.1]))
    q.grad = torch.zeros(2)
    twin.step()
    optimizer.step()
    assert (q.detach() - 0.1).abs().max() < EPS
    assert (p.detach() - torch.tensor([0.3, -0.2])).abs().max() < EPS


def test_a_checkpoint_of_the_other_form_is_refused():
    params, optimizer = build("Circle")
    advance(params, optimizer, 1)
    _, twin = build("AngularCircle")
    with pytest.raises(CheckpointError, match=r"Circle\(radius=0\.4.*AngularCircle\(radius=0\.4"):
        twin.load_state_dict(optimizer.state_dict())


def test_the_state_is_an_angle_and_a_momentum():
    params, optimizer = build("AngularCircle", temperature=0.0)
    set_grads(params)
    optimizer.step()
    assert all(set(optimizer.state[p]) == {"angle", "momentum_buffer"} for p in params)


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_large_tensors_go_in_pieces_to_the_same_numbers(monkeypatch, temperature):
    """5 steps of roundings of 1e-16: an entry may be computed by another width of vector."""
    runs = []
    for block in (AngularCircle.block, 7):
        monkeypatch.setattr(AngularCircle, "block", block)
        params, optimizer = build("AngularCircle", dtype=torch.float64, temperature=temperature)
        advance(params, optimizer, 5)
        runs.append(copies(params) + state_tensors(optimizer))
    assert all((a - b).abs().max() < 1e-14 for a, b in zip(*runs, strict=True))


def test_from_sgd():
    """The momentum becomes an angular velocity: its projection on the tangent of the circle."""
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(hm.groups(model, {"weight": AngularCircle(2.0)}), lr=0.01, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    sgd.step()
    optimizer = Langevin(hm.groups(model, {"weight": AngularCircle(2.0)}))
    optimizer.load_state_dict(sgd.state_dict())
    state = optimizer.state[model.weight]
    slack = 2.0 * state["angle"].cos()
    # (p, 0) along the tangent (xi, -theta), whose length is r: v = p xi / r^2, and r = 2.
    momentum = sgd.state[model.weight]["momentum_buffer"]
    assert (state["momentum_buffer"] - slack * momentum / 4).abs().max() < 4 * EPS
