"""Rules to parameter groups."""

from typing import Any

import pytest
import torch
from torch import nn

import holonomic as hm
from holonomic import Circle, Langevin, Orthogonal, SettingError, Sphere


def members(groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {g["name"]: [name for name, _ in g["params"]] for g in groups}


def constraints(groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: g.get("constraint") for g in groups for name, _ in g["params"]}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 1))


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)
    )


def test_globs() -> None:
    groups = hm.groups(mlp(), {"0.*": Circle(1.0), "[23].weight": Orthogonal()})
    assert members(groups) == {
        "0.*": ["0.weight"],
        "0.* (biases, norms)": ["0.bias"],
        "[23].weight": ["2.weight", "3.weight"],
        "rest": ["1.weight", "1.bias", "2.bias", "3.bias"],
    }
    assert isinstance(groups[0]["constraint"], Circle)
    assert groups[1]["constraint"] is None


def test_module_types_and_globs_together() -> None:
    groups = hm.groups(convnet(), {nn.Conv2d: Orthogonal(), "4.weight": Sphere(1.0)})
    assert members(groups) == {
        "Conv2d": ["0.weight"],
        "Conv2d (biases, norms)": ["0.bias"],
        "4.weight": ["4.weight"],
        "rest": ["1.weight", "1.bias", "4.bias"],
    }
    optimizer = Langevin(groups, lr=0.1)
    W = optimizer.param_groups[0]["params"][0].detach().flatten(1)
    # rows of 27 float32 numbers
    assert torch.allclose(W @ W.mT, torch.eye(8), atol=27 * 2**-23)


def test_a_type_stands_for_all_modules_below_it() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 1))
    groups = hm.groups(model, {nn.TransformerEncoderLayer: {"lr": 0.1}})
    inside = [n for n, _ in model.named_parameters() if n.startswith("0.")]
    assert members(groups) == {"TransformerEncoderLayer": inside, "rest": ["1.weight", "1.bias"]}


def test_values() -> None:
    rules = {"0.weight": Circle(1.0), "2.*": {"lr": 0.5, "scheme": "EM"}, "3.*": None}
    groups = hm.groups(mlp(), rules, lr=0.1, temperature=0.2)
    by_name = {g["name"]: g for g in groups}
    assert by_name["0.weight"]["lr"] == 0.1
    assert by_name["2.*"]["lr"] == 0.5
    assert by_name["2.*"]["scheme"] == "EM"
    assert by_name["2.*"]["temperature"] == 0.2
    assert "constraint" not in by_name["2.*"]
    assert by_name["3.*"]["constraint"] is None
    assert by_name["rest"]["temperature"] == 0.2


def test_none_takes_parameters_out_of_the_other_rules() -> None:
    groups = hm.groups(mlp(), {"*weight": Circle(1.0), "3.*": None})
    held = constraints(groups)
    assert isinstance(held["2.weight"], Circle)
    assert held["3.weight"] is None
    assert members(groups)["3.*"] == ["3.weight", "3.bias"]


def test_a_rule_that_matches_nothing() -> None:
    words = r"the rule 'encoder\.\*' matches no trainable parameter; the model has '0\.weight', "
    with pytest.raises(SettingError, match=words):
        hm.groups(mlp(), {"encoder.*": Circle(1.0)})
    with pytest.raises(SettingError, match="the rule Conv2d matches no trainable parameter"):
        hm.groups(mlp(), {nn.Conv2d: Circle(1.0)})


def test_two_rules_that_claim_one_parameter() -> None:
    words = r"the rules '0\.\*' and Linear both claim '0\.weight'; make one of them narrower"
    with pytest.raises(SettingError, match=words):
        hm.groups(mlp(), {"0.*": Circle(1.0), nn.Linear: Orthogonal()})


@pytest.mark.parametrize("bad", [Circle, 1.0, "Circle"])
def test_a_value_that_is_no_setting(bad: Any) -> None:
    with pytest.raises(SettingError, match=r"rule '\*' has the value .*; give a constraint"):
        hm.groups(mlp(), {"*": bad})


def test_a_key_that_is_no_rule() -> None:
    rules: Any = {3: Circle(1.0)}
    with pytest.raises(SettingError, match="3 is not a rule; write a name, a glob or a module"):
        hm.groups(mlp(), rules)


@pytest.mark.parametrize("rule", ["*", "0.*", "1.*", nn.Linear, nn.Module, nn.Sequential])
def test_biases_and_norms_stay_free(rule: Any) -> None:
    held = constraints(hm.groups(mlp(), {rule: Circle(1.0)}))
    assert held["0.bias"] is None
    assert held["1.weight"] is None
    assert held["1.bias"] is None


@pytest.mark.parametrize(
    ("rule", "asked"),
    [
        ("0.bias", {"0.bias"}),
        ("*bias", {"0.bias", "2.bias", "3.bias"}),
        ("1.weight", {"1.weight"}),
        ("1.bias", {"1.bias"}),
        (nn.LayerNorm, {"1.weight"}),
    ],
)
def test_biases_and_norms_are_constrained_if_asked_for(rule: Any, asked: set[str]) -> None:
    held = constraints(hm.groups(mlp(), {rule: Circle(1.0)}))
    assert {name for name, c in held.items() if c is not None} == asked


def test_a_default_constraint_spares_biases_and_norms_too() -> None:
    held = constraints(hm.groups(mlp(), {"3.*": {"lr": 0.1}}, constraint=Circle(1.0)))
    assert {n for n, c in held.items() if c is not None} == {"0.weight", "2.weight", "3.weight"}


def test_other_settings_reach_biases_and_norms() -> None:
    for g in hm.groups(mlp(), {"*": {"lr": 0.3, "constraint": Circle(1.0)}}):
        assert g["lr"] == 0.3


def test_norms_that_are_not_torchs_own() -> None:
    class LlamaRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = nn.Sequential(nn.Linear(4, 4), LlamaRMSNorm())
    Langevin(hm.groups(model, {"*weight": Circle(0.5)}))
    assert bool((model[1].weight == 1).all())


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.InstanceNorm1d(4, affine=True)],
    ids=lambda m: type(m).__name__,
)
def test_every_norm_of_torch(norm: nn.Module) -> None:
    held = constraints(hm.groups(nn.Sequential(nn.Linear(4, 4), norm), {"*": Circle(1.0)}))
    assert {n for n, c in held.items() if c is not None} == {"0.weight"}


def test_attention_and_recurrent_biases() -> None:
    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    held = constraints(hm.groups(attention, {"*": Circle(1.0)}))
    assert {n for n, c in held.items() if c is None} == {
        "in_proj_bias", "out_proj.bias", "bias_k", "bias_v",
    }  # fmt: skip
    held = constraints(hm.groups(nn.LSTM(3, 4), {"*": Orthogonal()}))
    assert {n for n, c in held.items() if c is not None} == {"weight_ih_l0", "weight_hh_l0"}


def test_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7)
            self.head.weight = self.embed.weight

    groups = hm.groups(Tied(), {"head.weight": Sphere(1.0)})  # by its other name
    assert members(groups)["head.weight"] == ["embed.weight"]
    Langevin(groups)
    with pytest.raises(SettingError, match=r"both claim 'embed\.weight'"):
        hm.groups(Tied(), {"head.weight": Sphere(1.0), "embed.*": Circle(1.0)})


def test_frozen_parameters_are_left_out() -> None:
    model = mlp()
    model[2].requires_grad_(False)
    groups = hm.groups(model, {"*weight": Circle(1.0)})
    names = [n for g in groups for n, _ in g["params"]]
    assert names == ["0.weight", "3.weight", "1.weight", "0.bias", "1.bias", "3.bias"]
    with pytest.raises(SettingError, match=r"'2\.weight' matches no trainable parameter"):
        hm.groups(model, {"2.weight": Circle(1.0)})


def test_a_model_that_is_one_layer() -> None:
    assert members(hm.groups(nn.Linear(2, 2), {"weight": Circle(1.0)})) == {
        "weight": ["weight"],
        "rest": ["bias"],
    }


def test_every_trainable_parameter_is_in_one_group() -> None:
    model = nn.Sequential(convnet(), nn.TransformerEncoderLayer(8, 2, 16))
    rules = {"0.*": Orthogonal(), nn.MultiheadAttention: {"lr": 0.1, "constraint": Sphere(1.0)}}
    names = [n for g in hm.groups(model, rules) for n, _ in g["params"]]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())


OTHERS = [
    cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda cls: cls.__name__)
def test_an_optimizer_that_would_ignore_a_constraint_refuses_the_group(other) -> None:
    """`torch.optim` keeps settings that it does not know, and never looks at them."""
    groups = hm.groups(mlp(), {"*weight": Circle(0.1)})
    if other is torch.optim.LBFGS:
        groups = groups[:1]
    weights = [p for _, p in groups[0]["params"]]
    for p in weights:
        p.grad = torch.zeros_like(p)
    with pytest.raises(
        SettingError, match=r"Circle, which an optimizer with the setting .* would ignore"
    ):
        other([groups[0]])


def test_groups_without_constraints_serve_other_optimizers() -> None:
    model = mlp()
    sgd = torch.optim.SGD(hm.groups(model, {"*weight": {"lr": 0.5}}, lr=0.5), lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    sgd.step()
    assert [g["lr"] for g in sgd.param_groups] == [0.5] * len(sgd.param_groups)
