"""What people do between two steps: change weights, settings, state; and what must come of it.

The rule: what is in a parameter when `step()` begins is what the user wants. Slack follows it, momenta are
made tangent, weights off the manifold are put on the nearest point, and `report()` counts such steps.
"""

import copy
import json
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import holonomic as hm
from cases import CONSTRAINED, CONSTRAINTS, advance, build, copies, same, set_grads, state_tensors
from helpers import random_orthonormal
from holonomic import (
    CheckpointError,
    Circle,
    ConstraintError,
    Langevin,
    LevelSet,
    Orthogonal,
    SettingError,
    Sphere,
)
from holonomic.constraints.checks import follow_tolerance
from holonomic.thermostat import Thermostat

ENGINES = [pytest.param(None, id="default"), pytest.param(False, id="eager")]


def still(w: nn.Parameter, opt: Langevin) -> None:
    """A step without a force."""
    w.grad = torch.zeros_like(w)
    opt.step()


def changed(opt: Langevin) -> int:
    return opt.report().groups[0].changed


# ---------------------------------------------------------------------- weights changed between steps
@pytest.mark.parametrize("fused", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_weight_set_by_hand_stays_where_it_was_put_on_a_circle(fused, dtype):
    """0.5 set to 0.9 is 0.9 after a step without force; it was 0.72 when the old slack was kept."""
    w = nn.Parameter(torch.full((3, 4), 0.5, dtype=dtype))
    opt = Langevin([w], lr=0.1, constraint=Circle(1.0), fused=fused)
    still(w, opt)
    assert changed(opt) == 0
    w.data[1] = 0.9
    still(w, opt)
    expected = torch.full((3, 4), 0.5, dtype=dtype)
    expected[1] = 0.9
    # The pair is scaled to length 1, which rounds twice.
    assert torch.allclose(w.detach(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert changed(opt) == 1
    slack = opt.state[w]["slack"][1].double()
    assert (slack - math.sqrt(1 - 0.81)).abs().max() < 4 * torch.finfo(dtype).eps
    still(w, opt)
    assert changed(opt) == 1  # only once


@pytest.mark.parametrize("fused", ENGINES)
def test_slack_keeps_its_sign(fused):
    """Beyond the top of the circle the slack is negative: the motion goes on to the other side."""
    w = nn.Parameter(torch.full((2, 2), 0.99))
    opt = Langevin([w], lr=0.5, momentum=1.0, constraint=Circle(1.0), fused=fused)
    w.grad = torch.full_like(w, -3.0)
    opt.step()
    for _ in range(3):
        still(w, opt)
    assert (opt.state[w]["slack"] < 0).all()
    v = opt.state[w]["momentum_buffer"].clone()
    w.data.fill_(0.3)
    still(w, opt)
    # It rotates on from (0.3, -sqrt(0.91)) by the angle lr v.
    start = torch.atan2(torch.tensor(-math.sqrt(1 - 0.09)), torch.tensor(0.3))
    torch.testing.assert_close(w.detach(), torch.cos(start + 0.5 * v), atol=1e-6, rtol=0)


@pytest.mark.parametrize("fused", ENGINES)
@pytest.mark.parametrize("slack", [True, False])
def test_rows_changed_by_hand_on_spheres(fused, slack):
    g = torch.Generator().manual_seed(0)
    w = nn.Parameter(0.3 * torch.randn(6, 5, generator=g))
    opt = Langevin([w], lr=0.1, constraint=Sphere(1.0, slack=slack), fused=fused)
    still(w, opt)
    before = w.detach().clone()
    w.data[2] *= 0.5
    w.data[4] *= 30  # beyond the bound
    wanted = w.detach().clone()
    still(w, opt)
    assert changed(opt) == 1
    kept = [0, 1, 3, 5]
    assert torch.allclose(w.detach()[kept], before[kept], rtol=1e-6)
    direction = wanted / wanted.norm(dim=1, keepdim=True)
    assert torch.allclose(w.detach() / w.detach().norm(dim=1, keepdim=True), direction, atol=1e-6)
    norms = w.detach().norm(dim=1)
    if slack:
        assert norms[2].item() == pytest.approx(wanted[2].norm().item(), rel=1e-6)
        assert norms[4].item() == pytest.approx(1 - 1 / 256, rel=1e-6)  # placed a margin inside
    else:
        assert torch.allclose(norms, torch.ones(6), rtol=1e-6)


def polar(w: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(w.double(), full_matrices=False)
    return (U @ Vh).to(w.dtype)


DAMAGE = {
    "halved": lambda w: w.mul_(0.5),
    "row zeroed": lambda w: w[3].zero_(),
    "entry zeroed": lambda w: w[3, 1].zero_(),
    "replaced": lambda w: w.copy_(torch.randn(w.shape, generator=torch.Generator().manual_seed(5))),
}


@pytest.mark.parametrize("fused", ENGINES)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (200, 190)], ids=str)
def test_orthogonal_is_back_on_its_manifold_after_one_step(fused, damage, shape):
    """At the nearest orthogonal matrix; it took seven steps, or never came, when Q^T Q = I was assumed."""
    tall = random_orthonormal(max(shape), min(shape), dtype=torch.float32)
    w = nn.Parameter((tall if shape[0] >= shape[1] else tall.T).contiguous())
    opt = Langevin([w], lr=0.1, constraint=Orthogonal(), fused=fused)
    still(w, opt)
    DAMAGE[damage](w.data)
    expected = polar(w.detach())
    still(w, opt)
    assert changed(opt) == 1
    assert opt.report().groups[0].residual < 40 * 2**-23
    assert torch.allclose(w.detach(), expected, atol=1e-5)


@pytest.mark.parametrize("fused", ENGINES)
@pytest.mark.parametrize("lr", [1e-4, 0.05, 1.0])
def test_errors_too_small_to_be_noticed_shrink(fused, lr):
    """An error E of Q^T Q comes out of a step as M E M, with |M|^2 < 1/2, or is polished away."""
    Q = random_orthonormal(40, 30, dtype=torch.float32)
    w = nn.Parameter(Q.clone())
    opt = Langevin([w], lr=lr, momentum=0.5, constraint=Orthogonal(), fused=fused)
    g = torch.Generator().manual_seed(1)
    w.data.add_(3e-6 * torch.randn(w.shape, generator=g))
    off = opt.report().groups[0].residual
    for _ in range(3):
        w.grad = 0.2 * torch.randn(w.shape, generator=g)
        opt.step()
    assert changed(opt) == 0
    assert opt.report().groups[0].residual < 30 * 2**-23 < off


@pytest.mark.parametrize("name", CONSTRAINED)
@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "BACDEDCAB", "EM", "LM"])
def test_every_constraint_follows_a_change(name, scheme):
    """Early stopping, rollback, an EMA, averaging: other weights than the last step left."""
    params, opt = build(name, scheme, torch.float64, weight_decay=0.0)
    advance(params, opt, 3)
    old = copies(params)
    advance(params, opt, 5)
    assert changed(opt) == 0
    with torch.no_grad():
        for p, q in zip(params, old, strict=True):
            p.copy_(0.7 * q)
    advance(params, opt, 1)
    report = opt.report().groups[0]
    assert report.changed == 1
    assert report.residual < 1e-13
    assert report.cotangency < 1e-12
    advance(params, opt, 4)
    assert changed(opt) == 1


@pytest.mark.parametrize("name", CONSTRAINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_ordinary_runs_are_never_taken_for_changed(name, dtype):
    """Rounding stays below the tolerance that is stated for every type, noise and large steps included."""
    for scheme in ("OBA", "BAOAB", "EM"):
        lr = 0.02 if name.startswith("LevelSet") else 0.3
        params, opt = build(name, scheme, dtype, lr=lr, temperature=0.05, weight_decay=0.0)
        advance(params, opt, 25)
        assert changed(opt) == 0, scheme


def test_the_tolerance_is_stated():
    assert follow_tolerance(torch.float64) == pytest.approx(2.2e-14, rel=0.02)
    assert follow_tolerance(torch.float32) == pytest.approx(1.2e-5, rel=0.02)
    assert follow_tolerance(torch.float16) == pytest.approx(2.0e-3, rel=0.03)
    assert follow_tolerance(torch.bfloat16) == pytest.approx(1.6e-2, rel=0.03)


@pytest.mark.parametrize("fused", ENGINES)
@pytest.mark.parametrize("constraint", [Circle(1.0), Sphere(1.0)], ids=["Circle", "Sphere"])
def test_slack_opened_at_the_bound_does_not_count_as_changed(fused, constraint):
    """Weights that start at the bound get a slack to move with; also if a step at lr = 0 comes between."""
    w = nn.Parameter(torch.eye(4))
    opt = Langevin([w], lr=0.0, constraint=constraint, fused=fused)
    still(w, opt)
    assert torch.equal(w.detach(), torch.eye(4))
    opt.param_groups[0]["lr"] = 0.1
    for _ in range(3):
        w.grad = torch.ones_like(w)
        opt.step()
    assert changed(opt) == 0
    assert (w.detach().diagonal() < 1 - 1e-3).all()  # and they move
    # Clamped to the bound by hand: that is a change, and they move again.
    w.data.fill_diagonal_(1.0)
    w.grad = torch.ones_like(w)
    opt.step()
    assert changed(opt) == 1
    assert (w.detach().diagonal() < 1).all()


@pytest.mark.parametrize("name", CONSTRAINED)
def test_nan_put_into_weights_is_named_and_nothing_moves(name):
    params, opt = build(name, dtype=torch.float64)
    advance(params, opt, 2)
    params[0].data.view(-1)[0] = torch.nan
    set_grads(params)
    params[0].grad = torch.zeros_like(params[0])
    with pytest.raises(ConstraintError, match=r"'group 0, parameter 0'.*NaN"):
        opt.step()


@pytest.mark.parametrize("fused", ENGINES)
@pytest.mark.parametrize("scheme", ["OBA", "EM"])
def test_a_zeroed_row_of_fixed_length_is_named(fused, scheme):
    w = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    opt = Langevin(
        [("w", w)], lr=0.1, constraint=Sphere(1.0, slack=False), scheme=scheme, fused=fused
    )
    still(w, opt)
    w.data[2] = 0
    with pytest.raises(ConstraintError, match=r"'w': row 2 is zero.*slack=True"):
        still(w, opt)
    assert torch.equal(w.detach()[2], torch.zeros(3))  # no NaN


def test_frozen_weights_are_not_moved_by_building_an_optimizer():
    frozen = nn.Parameter(torch.full((3, 3), 5.0), requires_grad=False)
    free = nn.Parameter(torch.full((3, 3), 5.0))
    opt = Langevin([frozen, free], lr=0.1, constraint=Circle(1.0))
    assert torch.equal(frozen, torch.full((3, 3), 5.0))
    assert free.abs().max() < 1
    free.grad = torch.ones_like(free)
    opt.step()
    assert torch.equal(frozen, torch.full((3, 3), 5.0))
    frozen.requires_grad_()  # thawed: it is placed before it moves
    frozen.grad = torch.zeros_like(frozen)
    opt.step()
    assert frozen.abs().max() <= 1


def test_what_a_level_set_links_cannot_be_frozen_in_part():
    params = [("a", nn.Parameter(torch.ones(2))), ("b", nn.Parameter(torch.ones(2), False))]
    with pytest.raises(
        SettingError, match=r"'b' has requires_grad=False.*move it together with 'a'"
    ):
        Langevin(params, constraint=LevelSet(lambda a, b: (a * b).sum() - 1))
    both = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    opt = Langevin(both, constraint=LevelSet(lambda a, b: (a * b).sum() - 1))
    both[0].grad = torch.ones(2)
    both[1].requires_grad_(False)
    before = copies(both)
    with pytest.raises(SettingError, match="'group 0, parameter 1' has requires_grad=False"):
        opt.step()
    assert same(before, both)


# ---------------------------------------------------------------------- shapes, state and memory
@pytest.mark.parametrize("fused", ENGINES)
@pytest.mark.parametrize("constraint", [None, *CONSTRAINED[:1], "Sphere", "Orthogonal"])
def test_a_weight_of_another_shape_is_refused(fused, constraint):
    made = CONSTRAINTS[constraint]() if constraint else None
    w = nn.Parameter(0.1 * torch.randn(30, 20))
    opt = Langevin([("w", w)], lr=0.1, constraint=made, fused=fused)
    still(w, opt)
    w.data = torch.randn(1200, 800)
    w.grad = torch.zeros(1200, 800)
    with pytest.raises(
        SettingError, match=r"'w' has shape \(1200, 800\).*has \(30, 20\).*state.pop"
    ):
        opt.step()
    opt.state.pop(w)
    opt.step()  # the remedy works
    if made is not None:
        assert opt.report().groups[0].residual < 1e-4


@pytest.mark.parametrize(
    "other", [Circle(1.0), Sphere(1.0, slack=False), Orthogonal(), None], ids=repr
)
def test_a_constraint_cannot_be_replaced_once_there_is_state(other):
    w = nn.Parameter(torch.randn(30, 20))
    opt = Langevin([w], lr=0.1, constraint=Sphere(1.0))
    opt.param_groups[0]["constraint"] = Circle(1.0)  # nothing has been made yet
    still(w, opt)
    assert w.abs().max() <= 1
    opt = Langevin([w], lr=0.1, constraint=Sphere(1.0))
    still(w, opt)
    opt.param_groups[0]["constraint"] = other
    before = w.detach().clone()
    with pytest.raises(
        SettingError, match=r"constraint was Sphere\(radius=1.0.*is now .*new optimizer"
    ):
        still(w, opt)
    assert torch.equal(before, w.detach())
    opt.param_groups[0]["constraint"] = Sphere(1)  # the same manifold
    still(w, opt)


@pytest.mark.parametrize("key", ["momentum_buffer", "slack", "slack_momentum"])
def test_state_of_another_shape_in_a_checkpoint_is_refused(key):
    w = nn.Parameter(torch.randn(30, 20))
    opt = Langevin([("w", w)], lr=0.1, constraint=Sphere(1.0))
    still(w, opt)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0][key] = torch.zeros(7, 3)
    before = state_tensors(opt)
    with pytest.raises(CheckpointError, match=rf"'w' has shape \(30, 20\), so its {key} must have"):
        opt.load_state_dict(saved)
    saved["state"][0][key] = torch.full(opt.state[w][key].shape, torch.nan)
    with pytest.raises(CheckpointError, match=rf"{key} of 'w' in the checkpoint holds NaN"):
        opt.load_state_dict(saved)
    assert same(before, state_tensors(opt))


def test_parameters_in_another_order_are_refused():
    """Equal shapes would load without a word."""
    a, b = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
    opt = Langevin([("a", a), ("b", b)], lr=0.1)
    for p in (a, b):
        p.grad = torch.ones_like(p)
    opt.step()
    twin = Langevin([("b", b), ("a", a)], lr=0.1)
    with pytest.raises(CheckpointError, match="parameter 'a' where the optimizer has 'b'"):
        twin.load_state_dict(opt.state_dict())


def test_another_scheme_in_a_checkpoint_is_refused():
    params, opt = build("Circle", "BAOAB")
    advance(params, opt, 1)
    _, twin = build("Circle", "OBA")
    with pytest.raises(
        CheckpointError, match="saved with the scheme 'BAOAB' and is now built with 'OBA'"
    ):
        twin.load_state_dict(opt.state_dict())


# ---------------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("scheme", "BACDEDCAB", "needs a coupling"),
        ("scheme", "BAXAB", "unknown letter 'X'"),
        ("nonfinite", "foo", "nonfinite is 'foo'"),
        ("fused", 3, "fused is 3; it must be True, False or None"),
        ("foreach", "yes", "foreach is 'yes'"),
        ("maximize", "no", "maximize is 'no'"),
        ("thermostat", "row", "thermostat is 'row'"),
        ("batch_dims", -1, "batch_dims is -1"),
        ("constraint", Circle, "not a Constraint; write Circle"),
        ("constraint", 5, "constraint is 5"),
        ("lr", "fast", "lr is 'fast'; it must be one number"),
        ("temperature", -1.0, "temperature is -1.0"),
    ],
)
def test_settings_changed_later_are_checked_as_new_ones_are(key, value, words):
    params, opt = build("none")
    advance(params, opt, 1)
    before = [*copies(params), *state_tensors(opt)]
    opt.param_groups[0][key] = value
    set_grads(params)
    with pytest.raises(SettingError, match=words):
        opt.step()
    assert same(before, [*params, *state_tensors(opt)])
    with pytest.raises(SettingError, match=words):
        Langevin([nn.Parameter(torch.ones(3))], **{key: value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nesterov": True}, "nesterov=True is not supported"),
        ({"dampening": 0.1}, r"dampening=0\.1 is not supported"),
        ({"betas": (0.9, 0.99)}, "has no setting 'betas'"),
        ({"temperatur": 0.1}, "has no setting 'temperatur'; did you mean 'temperature'"),
        ({"seed": -3}, "seed is -3"),
        ({"seed": 0.5}, "seed is 0.5"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_arguments_that_are_not_ours(arguments, words):
    with pytest.raises(SettingError, match=words):
        Langevin([nn.Parameter(torch.ones(3))], **arguments)


def test_a_model_in_the_place_of_parameters():
    with pytest.raises(SettingError, match=r"was given a Linear.*model.named_parameters\(\)"):
        Langevin(nn.Linear(2, 2))
    with pytest.raises(SettingError, match=r"was given a Replicas.*replicas.groups"):
        Langevin(hm.Replicas(lambda: nn.Linear(2, 2), 2))


@pytest.mark.parametrize("name", CONSTRAINED)
def test_meta_tensors_are_named(name):
    with torch.device("meta"):
        w = nn.Parameter(torch.empty(6, 2))
    with pytest.raises(ConstraintError, match=r"'w'.*meta device.*materialize"):
        Langevin([("w", w)], constraint=CONSTRAINTS[name]())


@pytest.mark.parametrize(
    "constraint",
    [
        Circle(1.0, init="error"),
        Sphere(1.0, init="error"),
        Sphere(1.0, slack=False, init="error"),
        Sphere(1.0, slack=False),
        Orthogonal(),
        Orthogonal(init="orthogonal"),
        Orthogonal(init="error"),
    ],
    ids=lambda c: f"{type(c).__name__}-{c.init}",
)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_empty_tensors(constraint, shape):
    if isinstance(constraint, Sphere) and not constraint.slack and shape == (3, 0):
        with pytest.raises(ConstraintError, match=r"row 0 is zero|off the manifold"):
            Langevin([nn.Parameter(torch.empty(shape))], constraint=constraint)
        return
    w = nn.Parameter(torch.empty(shape))
    opt = Langevin([w], lr=0.1, temperature=0.1, constraint=constraint, seed=0)
    for _ in range(2):
        still(w, opt)
    assert opt.report().groups[0].residual == 0 or shape == (3, 0)


def test_a_matrix_without_rank_has_no_nearest_orthogonal_one():
    """LoRA's B starts at zero; it became the identity without a word."""
    for w in (torch.zeros(4, 3), torch.ones(3, 4), torch.tensor([[1.0, 2.0], [2.0, 4.0], [0, 0]])):
        w = nn.Parameter(w)
        before = w.detach().clone()
        with pytest.raises(
            ConstraintError, match=r"'w'.*linearly dependent (rows|columns).*init='orthogonal'"
        ):
            Langevin([("w", w)], constraint=Orthogonal())
        assert torch.equal(before, w.detach())
    w = nn.Parameter(torch.zeros(4, 3))
    Langevin([w], constraint=Orthogonal(init="orthogonal"), seed=0)
    assert torch.allclose(w.mT @ w, torch.eye(3), atol=1e-6)


def test_weight_decay_that_cannot_act_is_warned_of():
    w = nn.Parameter(torch.randn(4, 3))
    for constraint in (Orthogonal(), Sphere(1.0, slack=False)):
        with pytest.warns(UserWarning, match=r"weight_decay=0\.1 has no effect"):
            Langevin([w], weight_decay=0.1, constraint=constraint)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Langevin([w], weight_decay=0.1, constraint=Sphere(1.0))
        Langevin([w], weight_decay=0.1, constraint=Circle(1.0))


# ---------------------------------------------------------------------- adaptive friction
def test_a_thermostat_too_fast_for_its_step_is_refused():
    """Friction -2,400 and NaN after one step, before the condition was checked."""
    p = nn.Parameter(torch.randn(240))
    settings = {"lr": 0.01, "temperature": 100.0, "scheme": "BACDEDCAB"}
    opt = Langevin([p], coupling=1.0, constraint=Sphere(1.0, dim=None), **settings)
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with pytest.raises(
        SettingError, match=r"is 21\.9 and must be at most 1; lower the coupling to 0\.00208"
    ):
        opt.step()
    assert torch.equal(before, p.detach())
    opt.param_groups[0]["coupling"] = 0.00208  # the remedy
    opt.step()
    assert p.isfinite().all()


@pytest.mark.parametrize("scheme", ["BACDEDCAB", "BAFEFAB"])
def test_a_burst_of_energy_neither_blows_up_nor_freezes(scheme):
    """h xi stays above -1 and changes by at most 1 per E, and that is counted."""
    p = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    settings = {"lr": 0.01, "temperature": 1.0, "coupling": 0.5, "noise": 1.0, "seed": 0}
    opt = Langevin([p], scheme=scheme, **settings)
    for k in range(3000):
        p.grad = p.detach().clone()
        if k == 500:
            p.grad += 1e6  # a wild gradient
        opt.step()
        friction = opt.param_groups[0]["friction"].item()
        assert p.isfinite().all()
        assert friction >= -10
        if k > 2000:
            assert abs(friction) < 30  # long back from the burst
    report = opt.report().groups[0]
    assert report.limited > 0
    assert 0.3 < report.kinetic_temperature < 3


def test_the_condition_of_the_thermostat_is_that_of_an_oscillator():
    """Linearized about equilibrium, C and E are a symplectic map of angle h sqrt(2 coupling N tau)."""
    dof, tau, lr = 100.0, 2.0, 0.01
    for angle in (0.1, 0.9):
        coupling = angle**2 / (2 * lr * dof * tau)
        opt = Thermostat(
            *(
                torch.tensor([1e-6], dtype=torch.float64),
                [0],
                torch.tensor([dof], dtype=torch.float64),
            ),
            *(coupling, 0.0, lr, tau),
            tally=hm.phase.Tally(),
        )
        energy, turns, last = dof * tau, 0, 0.0
        for _ in range(4000):
            opt.regulate_([torch.tensor(energy / lr, dtype=torch.float64)], 1.0)
            energy *= opt.damping(1.0).item() ** 2
            xi = opt.friction.item()
            turns += last < 0 <= xi
            last = xi
        # A step turns by 2 asin(angle / 2).
        assert turns == pytest.approx(4000 * 2 * math.asin(angle / 2) / (2 * math.pi), abs=1.01)


# ---------------------------------------------------------------------- level sets
def length(*w: Tensor) -> Tensor:
    return torch.stack([(t * t).sum() for t in w]).sum() - 1


@pytest.mark.parametrize("scheme", ["OBA", "EM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_level_sets_hold_after_large_steps(scheme, dtype):
    """Off by 3e-2, when convergence was measured relative to the far point a step had gone to."""
    g = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(12, generator=g, dtype=dtype))
    opt = Langevin([w], lr=1.0, constraint=LevelSet(length), scheme=scheme)
    for size in (1.0, 10.0, 1e2, 1e3, 1e4):
        w.grad = size * torch.randn(12, generator=g, dtype=dtype)
        opt.step()
        # |q|^2 sums 12 products, each rounded; the search accepts 64 rounding errors of J q = 2.
        assert length(w.detach().double()).abs() < 128 * torch.finfo(dtype).eps
    assert opt.report().groups[0].changed == 0


# ---------------------------------------------------------------------- reports, placing
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_kinetic_temperature_does_not_jump_with_the_scheduler(temperature):
    """Momenta belong to the lr of the step that left them."""
    params, opt = build("Sphere", temperature=temperature, lr=0.05)
    advance(params, opt, 4)
    before = opt.report().groups[0].kinetic_temperature
    opt.param_groups[0]["lr"] = 0.005
    assert opt.report().groups[0].kinetic_temperature == before


def test_a_report_is_plain_json():
    params, opt = build("Circle", "EM")
    advance(params, opt, 1)
    (group,) = json.loads(json.dumps(opt.report().to_dict(), allow_nan=False))["groups"]
    assert group["constraint"] == "Circle"
    assert group["kinetic_temperature"] is None  # there is no momentum
    assert group["friction"] is None
    assert group["changed"] == 0
    params, opt = build("Orthogonal")
    advance(params, opt, 2)
    (group,) = opt.report().to_dict()["groups"]
    assert group["cotangency"] < 1e-12
    assert group["stored_cotangency"] > 1e-9  # a drift leaves a normal part to the next one


def test_place_puts_a_model_on_its_manifolds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    rules = {"0.weight": Orthogonal(2.0), "2.weight": Circle(0.1)}
    biases = model[0].bias.detach().clone()
    wanted = 2 * polar(model[0].weight.detach())
    hm.place(model, rules)
    assert torch.allclose(model[0].weight.detach(), wanted, atol=1e-6)
    assert model[2].weight.abs().max() <= 0.1
    assert torch.equal(model[0].bias.detach(), biases)
    again = copies(model.parameters())
    hm.place(model, rules)
    assert same(again, model.parameters())
    broken = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    broken[1].weight.data.zero_()
    before = copies(broken.parameters())
    with pytest.raises(ConstraintError, match=r"'1\.weight'"):
        hm.place(broken, {"0.weight": Circle(1e-3), "1.weight": Orthogonal()})
    assert same(before, broken.parameters())


@pytest.mark.parametrize("fused", ENGINES)
def test_scaled_orthogonal_is_the_unscaled_one_in_other_units(fused):
    """W = c Q: with lr / c^2 ... the motion of W / c under the gradient c g is that of Q."""
    c, g = 3.0, torch.Generator().manual_seed(0)
    Q = random_orthonormal(20, 7, dtype=torch.float32)
    A = torch.randn(20, 7, generator=g)
    one, other = nn.Parameter(Q.clone()), nn.Parameter(c * Q)
    a = Langevin([one], lr=0.1, constraint=Orthogonal(), fused=fused)
    b = Langevin([other], lr=0.1, constraint=Orthogonal(c), fused=fused)
    for _ in range(10):
        one.grad = A + one.detach() * A
        other.grad = c * (A + other.detach() / c * A)
        a.step()
        b.step()
    assert torch.allclose(other.detach() / c, one.detach(), atol=2e-6)
    assert torch.allclose(other.detach().mT @ other.detach(), c * c * torch.eye(7), atol=2e-5)


def test_radii_and_scales_that_cannot_be():
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(SettingError, match=r"scale is .*positive and finite"):
            Orthogonal(bad)
    with pytest.raises(SettingError, match="scale is a tensor"):
        Orthogonal(torch.ones(3))
