"""Bad input: the error names the parameter, the value and the remedy, and nothing has changed."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holonomic as hm
from cases import (
    CONSTRAINTS,
    advance,
    build,
    copies,
    same,
    set_grads,
    state_tensors,
    weights,
)
from holonomic import (
    Circle,
    ConstraintError,
    Langevin,
    LevelSet,
    NonFiniteError,
    Orthogonal,
    SettingError,
    Sphere,
)


def refused(kind: type[Exception], words: str, params: Any = None, **settings: Any) -> None:
    """Building an optimizer so must raise, and leave the weights as they are."""
    params = weights() if params is None else params
    tensors = [t for p in params for t in (p["params"] if isinstance(p, dict) else [p])]
    tensors = [t[1] if isinstance(t, tuple) else t for t in tensors]
    before = copies(tensors)
    with pytest.raises(kind, match=words):
        Langevin(params, **settings)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, tensors, strict=True))


# ---------------------------------------------------------------------- settings
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("make", [Circle, Sphere])
def test_radius_must_be_positive_and_finite(make: Any, bad: float) -> None:
    with pytest.raises(SettingError, match=rf"radius is {bad:g}; it must be positive and finite"):
        make(bad)
    radii = torch.tensor([1.0, bad, 2.0])
    with pytest.raises(SettingError, match=rf"1 such entries as {bad:g}; it must be positive"):
        make(radii)


@pytest.mark.parametrize("bad", ["1", [1.0, 2.0], None, True])
def test_radius_must_be_a_number_or_a_tensor(bad: Any) -> None:
    with pytest.raises(SettingError, match=r"radius is .*; give a number or a tensor"):
        Circle(bad)


def test_numbers_of_numpy_are_radii() -> None:
    assert type(Circle(np.float32(0.5)).radius) is float
    with pytest.raises(SettingError, match="radius is an empty tensor"):
        Circle(torch.empty(0))


def test_radius_of_another_shape() -> None:
    named = [("fc.weight", weights()[0])]
    refused(
        ConstraintError, r"'fc\.weight': radius has shape \(6,\).*\(6, 5\); give one number", named,
        constraint=Circle(torch.ones(6)),
    )  # fmt: skip
    refused(
        ConstraintError, r"'fc\.weight': radius has 5 entries.*6 rows.*a vector of 6", named,
        constraint=Sphere(torch.ones(5)),
    )  # fmt: skip
    with pytest.raises(SettingError, match=r"radius has shape \(2, 2\); give one number"):
        Sphere(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheme": "BAXAB"}, r"'BAXAB' has the unknown letter 'X'; write it with A"),
        ({"scheme": "AO"}, r"'AO' has no B: without it the gradient is never used"),
        ({"scheme": "BO"}, r"'BO' has no A: without it nothing moves"),
        ({"scheme": "BA"}, r"'BA' has no O: .* set momentum=1"),
        ({"scheme": ""}, r"scheme is ''; it must be a word"),
        ({"scheme": None}, r"scheme is None; it must be a word"),
        ({"scheme": "OBABAB"}, r"kicks at \d positions"),
        ({"momentum": 1.1}, r"momentum is 1\.1; it must lie in \[0, 1\]"),
        ({"momentum": -0.1}, r"momentum is -0\.1"),
        ({"momentum": float("nan")}, r"momentum is nan"),
        ({"temperature": -1.0}, r"temperature is -1\.0; it must be a finite number >= 0"),
        ({"temperature": float("nan")}, r"temperature is nan"),
        ({"lr": -0.1}, r"lr is -0\.1; it must be a finite number >= 0"),
        ({"lr": float("inf")}, r"lr is inf"),
        ({"lr": "1e-3"}, r"lr is '1e-3'; it must be one number"),
        ({"lr": None}, r"lr is None; it must be one number"),
        ({"lr": torch.ones(2)}, r"lr is tensor.*it must be one number"),
        ({"weight_decay": -1.0}, r"weight_decay is -1\.0"),
        ({"nonfinite": "ignore"}, r"nonfinite is 'ignore'; it must be one of .*'skip'"),
        ({"constraint": Circle}, r"constraint is .*Circle'>, which is not a Constraint; write"),
        ({"constraint": 1.0}, r"constraint is 1\.0, which is not a Constraint"),
        ({"seed": 1, "generator": torch.Generator()}, r"seed=1 and a generator were both given"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], words: str) -> None:
    refused(SettingError, words, **settings)
    per_group = {k: v for k, v in settings.items() if k not in ("seed", "generator")}
    if per_group:
        refused(SettingError, words, [{"params": weights(), **per_group}])


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"constraints": Circle(1.0)}, r"unknown setting 'constraints'; write 'constraint'"),
        ({"temprature": 0.1}, r"unknown setting 'temprature'; write 'temperature'"),
        ({"nesterov": True}, r"nesterov=True is not supported"),
        ({"dampening": 0.1}, r"dampening=0\.1 is not supported"),
        ({"seed": 3}, r"seed is for all groups; give it to Langevin itself"),
    ],
)
def test_settings_that_would_be_ignored(group: dict[str, Any], words: str) -> None:
    refused(SettingError, words, [{"params": weights(), **group}])


def test_settings_of_schedulers_and_users_are_welcome() -> None:
    group = {"params": weights(), "name": "head", "initial_lr": 0.1, "max_lr": 1.0, "depth": 3}
    assert Langevin([group]).param_groups[0]["depth"] == 3


@pytest.mark.parametrize("make", [lambda i: Circle(1.0, init=i), lambda i: Orthogonal(init=i)])
def test_unknown_init(make: Any) -> None:
    with pytest.raises(SettingError, match=r"init is 'xavier'; it must be one of 'nearest'"):
        make("xavier")


# ---------------------------------------------------------------------- weights
@pytest.mark.parametrize(
    "constraint",
    [
        Circle(0.1, init="error"),
        Sphere(0.1, init="error"),
        Sphere(9.0, slack=False, init="error"),
        Orthogonal(init="error"),
        LevelSet(lambda w: (w * w).sum() - 1, init="error"),
        LevelSet(lambda w: (w * w).sum() - 1, inequality=True, init="error"),
    ],
)
def test_weights_off_the_manifold_under_init_error(constraint: Any) -> None:
    named = [("fc.weight", weights()[0])]
    words = r"'fc\.weight'.* off .*\d.*use init='nearest'"
    refused(ConstraintError, words, named, constraint=constraint)


@pytest.mark.parametrize("name", [n for n in CONSTRAINTS if n not in ("none",)])
def test_weights_with_nan_under_a_constraint(name: str) -> None:
    params = weights(name)
    with torch.no_grad():
        params[1].view(-1)[0] = torch.nan
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    words = r"'w1': the weights hold NaN or Inf; initialize them first"
    refused(ConstraintError, words, named, constraint=CONSTRAINTS[name]())


@pytest.mark.parametrize("name", [n for n in CONSTRAINTS if n not in ("none",)])
def test_weights_that_became_nan_before_the_first_step(name: str) -> None:
    """Also when another group, in order before it, could still have moved."""
    params, good = weights(name), weights(seed=4)
    optimizer = Langevin(
        [{"params": good, "constraint": Circle(0.3)},
         {"params": params, "constraint": CONSTRAINTS[name]()}], lr=0.1,
    )  # fmt: skip
    with torch.no_grad():
        params[0].view(-1)[0] = torch.nan
        good[0].fill_(5.0)  # loaded after building, and off its manifold
    set_grads(good)
    for p in params:
        p.grad = torch.ones_like(p)
    before = copies(good)
    with pytest.raises(ConstraintError, match=r"group 1, parameter 0.*NaN"):
        optimizer.step()
    assert same(before, good)
    assert not optimizer.state


def test_vectors_have_no_rows() -> None:
    bias = nn.Parameter(torch.ones(5))
    words = r"Orthogonal on 'fc\.bias': .*shape \(5,\), and at least 2 dimensions.*matrices only"
    refused(ConstraintError, words, [("fc.bias", bias)], constraint=Orthogonal())
    words = r"Sphere on 'fc\.bias': .*at least 2 dimensions are needed; use Sphere\(dim=None\)"
    refused(ConstraintError, words, [("fc.bias", bias)], constraint=Sphere(1.0))
    refused(
        ConstraintError, r"batch_dims=1", [("fc.bias", nn.Parameter(torch.ones(5, 5)))],
        constraint=Orthogonal(batch_dims=1),
    )  # fmt: skip


def test_sphere_along_a_dimension_that_is_not_there() -> None:
    words = r"'w'.*dim is 3.*shape \(6, 5\).*choose one of 0 to 1"
    refused(ConstraintError, words, [("w", weights()[0])], constraint=Sphere(1.0, dim=3))


def test_a_zero_row_has_no_direction() -> None:
    w = nn.Parameter(torch.ones(3, 2))
    with torch.no_grad():
        w[1] = 0
    words = r"'w': row 1 is zero and has no direction"
    refused(ConstraintError, words, [("w", w)], constraint=Sphere(1.0, slack=False))


def twice(w: torch.Tensor) -> torch.Tensor:
    return torch.stack([w.sum() - 1, 2 * w.sum() - 2])


def test_level_set_without_full_rank() -> None:
    words = r"'w': the Jacobian of fn, 2 equations in 30 unknowns, loses rank.*drop repeated ones"
    refused(ConstraintError, words, [("w", weights()[0])], constraint=LevelSet(twice))


def test_level_set_that_loses_rank_on_the_way_changes_nothing() -> None:
    """An equation that a schedule multiplies by 0 says nothing any more."""
    weight = [1.0]
    fading = LevelSet(lambda w: weight[0] * ((w * w).sum() - 1).reshape(1))
    q, other = nn.Parameter(torch.ones(3).double()), nn.Parameter(torch.ones(3).double())
    optimizer = Langevin(
        [{"params": [other]}, {"params": [q], "constraint": fading}], lr=0.1, temperature=0.1
    )
    q.grad, other.grad = torch.ones_like(q), torch.ones_like(other)
    optimizer.step()
    weight[0] = 0.0
    before = [*copies([q, other]), *state_tensors(optimizer)]
    with pytest.raises(ConstraintError, match=r"'group 1, parameter 0'.*loses rank here"):
        optimizer.step()
    assert same(before, [q, other, *state_tensors(optimizer)])


# ---------------------------------------------------------------------- parameters and groups
def test_an_empty_group() -> None:
    good = {"params": weights(), "constraint": Circle(0.1)}
    refused(SettingError, "parameter group 1 is empty; leave it out", [good, {"params": []}])


def test_a_set_has_no_order() -> None:
    with pytest.raises(SettingError, match=r"is a set, whose order changes.*give a list"):
        Langevin([{"params": set(weights())}])


def test_a_parameter_in_two_groups_or_twice_in_one() -> None:
    a, b, c, _ = weights()
    groups = [{"params": [("a", a), ("b", b)]}, {"params": [("c", c), ("again", b)]}]
    refused(SettingError, "'again' in group 1 is the same parameter as 'b' in group 0", groups)
    refused(SettingError, "'a2' in group 0 is the same parameter as 'a'", [("a", a), ("a2", a)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_parameters_that_are_not_real_numbers(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=False)
    words = rf"'codes' has dtype {dtype}; Langevin moves real floating-point parameters only"
    refused(SettingError, words, [("codes", p)])


def test_a_bad_group_after_a_good_one_leaves_the_good_one_unplaced() -> None:
    good, bad = weights(), [nn.Parameter(torch.ones(3))]
    groups = [
        {"params": good, "constraint": Circle(0.1)},
        {"params": bad, "constraint": Orthogonal()},
    ]
    refused(ConstraintError, "at least 2 dimensions", groups)


@pytest.mark.parametrize(
    "bad",
    [
        {"params": []},
        {"params": [nn.Parameter(torch.ones(3))], "constraint": Orthogonal()},
        {"params": [nn.Parameter(torch.ones(3))], "lr": -1.0},
        {"params": [nn.Parameter(torch.ones(3))], "tempreature": 1.0},
    ],
    ids=["empty", "shape", "lr", "typo"],
)
def test_a_bad_group_cannot_be_added(bad: dict[str, Any]) -> None:
    params, optimizer = build("Circle")
    advance(params, optimizer, 1)
    before = copies(params)
    with pytest.raises((SettingError, ConstraintError)):
        optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1
    assert same(before, params)
    advance(params, optimizer, 1)


# ---------------------------------------------------------------------- in the middle of a run
@pytest.mark.parametrize("key", ["temperature", "lr", "momentum", "weight_decay"])
def test_a_schedule_that_goes_wrong_raises_before_anything_moves(key: str) -> None:
    first, second = weights(seed=0), weights(seed=1)
    optimizer = Langevin([{"params": first}, {"params": second}], lr=0.1)
    set_grads(first)
    set_grads(second)
    optimizer.step()
    before = [*copies([*first, *second]), *state_tensors(optimizer)]
    optimizer.param_groups[1][key] = -0.5
    with pytest.raises(SettingError, match=rf"group 1: {key} is -0\.5"):
        optimizer.step()
    assert same(before, [*first, *second, *state_tensors(optimizer)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, d) for name in CONSTRAINTS for d in (torch.float32, torch.bfloat16)],
)
def test_nonfinite_gradients(name: str, value: float, dtype: torch.dtype) -> None:
    for policy in ("raise", "skip"):
        for steps in (0, 2):
            params, optimizer = build(name, "OBA", dtype, nonfinite=policy)
            advance(params, optimizer, steps)
            set_grads(params)
            params[1].grad.view(-1)[3] = value
            rng = optimizer.state_dict()["param_groups"][0]["rng_state"]["seeds"]
            before = [*copies(params), *state_tensors(optimizer), rng]
            if policy == "raise":
                words = r"'group 0, parameter 1' has 1 of \d+ entries NaN or Inf.*lr=0\.05 or clip"
                with pytest.raises(NonFiniteError, match=words):
                    optimizer.step()
            else:
                optimizer.step()
                assert optimizer.report().groups[0].skipped == 1
            rng = optimizer.state_dict()["param_groups"][0]["rng_state"]["seeds"]
            assert same(before, [*params, *state_tensors(optimizer), rng])
            advance(params, optimizer, 1)  # and goes on
            assert all(bool(p.isfinite().all()) for p in params)


def test_nonfinite_gradients_can_be_allowed() -> None:
    params, optimizer = build("none", nonfinite="allow")
    set_grads(params)
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    assert params[0].isnan().sum() == 1


def test_huge_gradients_are_not_mistaken_for_infinite_ones() -> None:
    """Their norm overflows, they do not."""
    for dtype in (torch.float32, torch.float16, torch.float64):
        params, optimizer = build("none", dtype=dtype, lr=1e-30, temperature=0.0)
        for p in params:
            p.grad = torch.full_like(p, torch.finfo(dtype).max / 2)
        optimizer.step()
        assert all(bool(p.isfinite().all()) for p in params)


def test_groups_may_treat_nonfinite_gradients_differently() -> None:
    first, second = weights(seed=0), weights(seed=1)
    optimizer = Langevin(
        [{"params": first, "nonfinite": "allow"}, {"params": second, "nonfinite": "skip"}], lr=0.1
    )
    set_grads(first)
    set_grads(second)
    second[0].grad[0, 0] = torch.inf
    before = copies([*first, *second])
    optimizer.step()
    assert same(before, [*first, *second])
    assert [g.skipped for g in optimizer.report().groups] == [1, 1]


def test_every_error_is_a_holonomic_error() -> None:
    for kind in (SettingError, ConstraintError, NonFiniteError, hm.CheckpointError):
        assert issubclass(kind, hm.HolonomicError)
    assert issubclass(SettingError, ValueError)  # what torch's optimizers raise


def test_a_stack_and_its_constraint_must_agree() -> None:
    stack = torch.nn.Parameter(torch.randn(5, 3, 4))
    before = stack.detach().clone()
    group = {"params": [stack], "batch_dims": 1}
    with pytest.raises(SettingError, match=r"give the constraint to Replicas\.groups"):
        Langevin([group], constraint=hm.Sphere(1.0, slack=False))
    with pytest.raises(SettingError, match="batch_dims is -1"):
        Langevin([stack], batch_dims=-1)
    other = torch.nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(SettingError, match="tensors of one group must be stacked alike"):
        Langevin([stack, other], batch_dims=1)
    noise = hm.Replicas(lambda: torch.nn.Linear(2, 2), 5).noise()
    with pytest.raises(SettingError, match="must be stacked over the replicas"):
        Langevin([other], generator=noise)
    assert torch.equal(stack, before)


@pytest.mark.parametrize("generator", [3, "seed"])
def test_a_generator_that_is_none(generator: object) -> None:
    with pytest.raises(SettingError, match=r"give a torch\.Generator, or a seed"):
        Langevin([torch.nn.Parameter(torch.zeros(1))], generator=generator)


@pytest.mark.parametrize("scheme", [["B", "A"], 3, ""])
def test_a_scheme_that_is_no_word(scheme: object) -> None:
    with pytest.raises(SettingError, match="it must be a word"):
        Langevin([torch.nn.Parameter(torch.zeros(1))], scheme=scheme)
