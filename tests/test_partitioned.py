"""Adaptive friction, and the partitioned methods of chapter 3, against their equations."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import holonomic as hm
from helpers import Drawn, Stream
from holonomic import methods
from holonomic.methods import output_part

H = 0.2


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


X = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def loss_of(model: nn.Module) -> Tensor:
    return ((model(X.to(next(model.parameters()).dtype)) - Y) ** 2).mean()


def forces(model: nn.Module) -> list[Tensor]:
    """G = -gradient, of the hidden parameters and of the output's."""
    grads = torch.autograd.grad(loss_of(model), list(model.parameters()))
    return [-g for g in grads]


def step(model: nn.Module, opt: hm.Langevin) -> None:
    opt.zero_grad()
    loss_of(model).backward()
    opt.step()


# ---------------------------------------------------------------------- the letters
def test_bacdedcab_equals_its_equations():
    """(2.59) and (2.60) written out in p and h, with the numbers the optimizer draws."""
    eps, sigma, tau = 0.3, 0.4, 0.5
    model = net()
    q = [p.detach().clone() for p in model.parameters()]
    p = [torch.zeros_like(t) for t in q]
    xi, n = 0.1, sum(t.numel() for t in q)
    opt = methods.adaptive_langevin(
        model.parameters(), H**2, tau, eps, sigma, friction=xi, generator=Drawn(3)
    )
    numbers = Stream(3)
    ours = copy.deepcopy(model)

    def B(part: float) -> None:
        for a, t in zip(ours.parameters(), q, strict=True):
            a.data.copy_(t)
        for t, g in zip(p, forces(ours), strict=True):
            t += part * H * g

    def A(part: float) -> None:
        for t, m in zip(q, p, strict=True):
            t += part * H * m

    def C(part: float) -> None:
        for t in p:
            t *= math.exp(-part * H * xi)

    def D(part: float) -> None:
        for t in p:  # v = -p / h, so the optimizer's noise enters p with the other sign
            t -= sigma * math.sqrt(part * H) * numbers.like(t)

    for _ in range(5):
        B(0.5), A(0.5), C(0.5), D(0.5)
        xi += H * eps * (sum((t * t).sum().item() for t in p) - n * tau)
        D(0.5), C(0.5), A(0.5), B(0.5)
        step(model, opt)
        for t, a in zip(q, model.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), t, atol=1e-12, rtol=1e-12)
        assert opt.report().groups[0].friction == pytest.approx(xi, rel=1e-12)


@pytest.mark.parametrize("friction", [2.0, 1e-12, -0.5])
def test_f_is_the_exact_flow_of_c_and_d(friction):
    """One F has the variance sigma^2 (1 - e^(-2 h xi)) / (2 xi) of the Ornstein-Uhlenbeck process."""
    q = nn.Parameter(torch.zeros(200_000, dtype=torch.float64))
    opt = hm.Langevin(
        [q], lr=H**2, scheme="BFEFA", coupling=0.0, noise=0.7, friction=friction, seed=0
    )
    q.grad = torch.zeros_like(q)
    opt.step()
    p = -H * opt.state[q]["momentum_buffer"]
    exact = 0.7**2 * -math.expm1(-2 * H * friction) / (2 * friction)
    # The mean square of n normal numbers has the relative standard error sqrt(2 / n).
    assert abs(p.square().mean().item() / exact - 1) < 4 * math.sqrt(2 / q.numel())


def _sampled(scheme: str, gradient_noise: float, **settings) -> dict[str, float]:
    """Chains in a harmonic well, their gradients disturbed; each chain has its own thermostat."""
    chains, d, h = 400, 16, 0.1
    q = nn.Parameter(torch.randn(chains, d, dtype=torch.float64))
    generator = torch.Generator().manual_seed(5)
    opt = hm.Langevin(
        [q],
        lr=h * h,
        momentum=0.9,
        temperature=1.0,
        scheme=scheme,
        batch_dims=1,
        seed=0,
        **settings,
    )
    total, kinetic, friction, count = (
        torch.zeros(chains),
        torch.zeros(chains),
        torch.zeros(chains),
        0,
    )
    for k in range(3000):
        noise = torch.randn(chains, d, generator=generator, dtype=torch.float64)
        q.grad = q.detach() + gradient_noise * noise
        opt.step()
        if k >= 1000:
            total += q.detach().square().mean(1)
            kinetic += h * h * opt.state[q]["momentum_buffer"].square().mean(1)
            if isinstance(opt.param_groups[0]["friction"], Tensor):
                friction += opt.param_groups[0]["friction"][0]
            count += 1
    results = {}
    for name, sums in (("variance", total), ("kinetic", kinetic), ("friction", friction)):
        means = sums / count
        results[name] = means.mean().item()
        results[f"{name} error"] = (means.std() / chains**0.5).item()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["BACDEDCAB", "BAFEFAB"])
def test_adaptive_friction_takes_off_unknown_gradient_noise(scheme):
    """Noise of variance s^2 a component in the gradient heats BAOAB; a thermostat takes it off, and
    its friction settles at (sigma_A^2 + h s^2) / (2 tau)."""
    s = _sampled(scheme, 2.0, coupling=0.5, noise=1.0)
    # Measured after a whole kick, the kinetic temperature is off by O(h); the position is what counts.
    # The splitting's own bias is of second order: h^2 = 0.01 times a constant below 1.
    assert abs(s["variance"] - 1.0) < 4 * s["variance error"] + 0.005
    assert abs(s["friction"] - (1.0 + 0.1 * 4.0) / 2) < 4 * s["friction error"] + 0.01
    hot = _sampled("BAOAB", 2.0)
    assert (hot["variance"] - 1.0) / hot["variance error"] > 20


@pytest.mark.parametrize("thermostat", ["group", "tensor"])
def test_kinetic_temperature_is_held(thermostat):
    """Equipartition: what E compares is lr |v|^2 and N tau, so its time average is N tau for each."""
    model = net()
    opt = methods.adaptive_langevin(
        model.parameters(), 0.01, 0.3, 1.0, 0.5, thermostat=thermostat, seed=0
    )
    for _ in range(300):
        step(model, opt)
    start = opt.param_groups[0]["friction"].clone()
    for _ in range(1500):
        step(model, opt)
    drift = (opt.param_groups[0]["friction"] - start) / (1500 * 0.1 * 1.0)
    # xi changes by h eps (lr |v|^2 - N tau) per step, so the mean excess is its change over 1500 h eps:
    # bounded by the wandering of xi itself, which is of order 1.
    assert drift.abs().max() < 0.02
    assert opt.param_groups[0]["friction"].shape == ((1,) if thermostat == "group" else (4,))


# ---------------------------------------------------------------------- the methods
def test_dhsgd_equals_its_equations():
    """(3.27) to (3.30), from the first step on."""
    model, ours = net(), net()
    opt = methods.dhsgd(model, lr=H**2)
    parameters = list(ours.parameters())
    p = [torch.zeros_like(t) for t in parameters[:2]]
    for _ in range(20):
        g = forces(ours)
        for t, f in zip(p, g[:2], strict=True):
            t += H / 2 * f
        for t, m in zip(parameters[:2], p, strict=True):
            t.data += H * m
        for t, f in zip(parameters[2:], g[2:], strict=True):
            t.data += H**2 / 2 * f
        for t, f in zip(p, forces(ours)[:2], strict=True):
            t += H / 2 * f
        step(model, opt)
        for a, b in zip(model.parameters(), parameters, strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), atol=1e-13, rtol=1e-12)


def test_dhsgdc_steps_h_in_the_output():
    model, ours = net(), net()
    opt = methods.dhsgdc(model, lr=H**2)
    output = list(ours.parameters())[2:]
    expected = [t.detach() + H * f for t, f in zip(output, forces(ours)[2:], strict=True)]
    step(model, opt)
    for a, b in zip(list(model.parameters())[2:], expected, strict=True):
        torch.testing.assert_close(a.detach(), b, atol=1e-14, rtol=1e-13)


def test_dhsgd_conserves_energy_to_second_order():
    """With the output held, the hidden part is Verlet: |H - H_0| falls as h^2."""
    errors, sizes = [], [0.4, 0.2, 0.1, 0.05]
    for h in sizes:
        model = net()
        opt = methods.dhsgd(model, lr=h * h)
        for p in list(model.parameters())[2:]:
            p.requires_grad_(False)
        start, worst = loss_of(model).item(), 0.0
        for _ in range(round(20 / h)):
            opt.zero_grad()
            loss = loss_of(model)
            loss.backward()
            hidden = list(model.parameters())[:2]
            # p at the position of the gradient: the stored v stands half a kick before it.
            if opt.state:
                v = [opt.state[p]["momentum_buffer"] + p.grad / 2 for p in hidden]
                energy = loss.item() + h * h * sum((t * t).sum().item() for t in v) / 2
                worst = max(worst, abs(energy - start))
            opt.step()
        errors.append(worst)
    slope = torch.tensor(errors).log().diff().mean() / torch.tensor(sizes).log().diff().mean()
    assert abs(slope - 2) < 0.25


def test_lol_is_the_limit_of_infinite_friction():
    """(3.26): equal to Langevin in layers as the output's friction grows, with the same numbers."""
    gaps = []
    for gamma in (5.0, 50.0, 500.0):
        model, limit = net(), net()
        finite = methods.langevin_in_layers(
            model,
            {
                "0.*": {"momentum": 0.8, "temperature": 1e-3},
                "2.*": {"momentum": math.exp(-gamma * H), "temperature": 1e-4},
            },
            lr=H**2,
            seed=1,
        )
        opt = methods.lol(limit, H**2, 0.8, 1e-3, output_temperature=1e-4, seed=1)
        for _ in range(10):
            step(model, finite)
            step(limit, opt)
        gap = max(
            (a - b).abs().max().item()
            for a, b in zip(model.parameters(), limit.parameters(), strict=True)
        )
        gaps.append(gap)
    # The two differ by their first kick (half against whole), and by e^(-gamma h) after that.
    first = H**2 / 4 * max(f.abs().max().item() for f in forces(net())[2:])
    assert gaps[0] > gaps[2]
    assert gaps[2] < 2 * first


def test_lol_equals_its_equations():
    """(3.26) written out for the output part at tau_2 = 0: theta <- theta + h^2/2 G."""
    model, ours = net(), net()
    opt = methods.lol(model, H**2, 0.8, 0.0)
    for _ in range(5):
        for a, b in zip(ours.parameters(), model.parameters(), strict=True):
            a.data.copy_(b.data)
        expected = [
            t.detach() + H**2 / 2 * f
            for t, f in zip(list(ours.parameters())[2:], forces(ours)[2:], strict=True)
        ]
        step(model, opt)
        for a, b in zip(list(model.parameters())[2:], expected, strict=True):
            torch.testing.assert_close(a.detach(), b, atol=1e-14, rtol=1e-13)


LR, MU, TAU = 0.01, 0.9, 1e-3
METHODS = {
    "langevin": lambda m, **more: methods.langevin(m.parameters(), LR, MU, TAU, **more),
    "sgld": lambda m, **more: methods.sgld(m.parameters(), LR, TAU, **more),
    "layers": lambda m, **more: methods.langevin_in_layers(
        m, {"0.*": {"temperature": TAU}}, LR, **more
    ),
    "lol": lambda m, **more: methods.lol(m, LR, MU, TAU, **more),
    "dhsgd": lambda m, **more: methods.dhsgd(m, LR, **more),
    "dhsgdc": lambda m, **more: methods.dhsgdc(m, LR, **more),
    "adl": lambda m, **more: methods.adaptive_langevin(m.parameters(), LR, TAU, 0.1, 0.05, **more),
    "adlala": lambda m, **more: methods.adlala(m, LR, MU, TAU, 0.1, 0.05, **more),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_method_resumes_bit_for_bit(name, dtype, tmp_path):
    model = net(dtype=dtype)
    opt = METHODS[name](model, seed=4)
    for _ in range(5):
        step(model, opt)
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "a.pt")
    for _ in range(5):
        step(model, opt)
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    other = net(seed=9, dtype=dtype)
    again = METHODS[name](other, seed=8)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["opt"])
    for _ in range(5):
        step(other, again)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for g, h in zip(opt.param_groups, again.param_groups, strict=True):
        assert torch.equal(torch.as_tensor(g["friction"]), torch.as_tensor(h["friction"]))


@pytest.mark.parametrize("name", METHODS)
def test_no_method_moves_at_lr_zero(name):
    model = net()
    opt = METHODS[name](model, seed=4)
    for _ in range(3):
        step(model, opt)
    before = [p.detach().clone() for p in model.parameters()]
    friction = [torch.as_tensor(g["friction"]).clone() for g in opt.param_groups]
    for group in opt.param_groups:
        group["lr"] = 0.0
    step(model, opt)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for old, group in zip(friction, opt.param_groups, strict=True):
        assert torch.equal(old, torch.as_tensor(group["friction"]))


@pytest.mark.parametrize(
    "constraint",
    [
        hm.Circle(0.4),
        hm.Sphere(1.0),
        hm.Sphere(1.0, slack=False),
        hm.Orthogonal(),
        pytest.param(hm.LevelSet(lambda w: (w * w).sum() - 2), marks=pytest.mark.slow),
    ],
    ids=lambda c: type(c).__name__,
)
def test_adlala_with_a_constraint(constraint):
    """On the manifold, tangent, and at the temperature of its thermostat, constraints taken off N."""
    replicas = hm.Replicas(net, 16)
    opt = methods.adlala(
        *(replicas, 0.01, 0.9, 0.2, 1.0, 0.5),
        constraints={"0.weight": constraint},
        generator=replicas.noise(),
    )
    labels = [g["name"] for g in opt.param_groups]
    assert labels == ["hidden: 0.weight", "hidden", "output"]
    temperatures = []
    x, y = X.expand(16, *X.shape), Y.expand(16, *Y.shape)
    for k in range(300):
        replicas.backward(squared, x, y)
        opt.step()
        if k >= 150 and k % 10 == 0:
            temperatures.append(opt.report().groups[0].kinetic_temperature)
    group = opt.report().groups[0]
    assert group.residual < 1e-13
    assert group.cotangency < 1e-12
    assert group.friction != 0
    assert group.limited == 0
    # 150 steps of h = 0.1 in 16 replicas, read every 10, hold about 120 independent readings of relative
    # spread sqrt(2 / dof), dof about 20: 3 %; the reading after a whole kick is off by O(h).
    assert abs(sum(temperatures) / len(temperatures) / 0.2 - 1) < 0.15


def squared(output: Tensor, y: Tensor) -> Tensor:
    return ((output - y) ** 2).mean()


def test_each_replica_has_its_own_thermostat():
    def build(n: int, first: int) -> hm.Replicas:
        make = lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))  # noqa: E731
        replicas = hm.Replicas(make, n, seed=2, first=first)
        rules = {
            "0.*": {"scheme": "BACDEDCAB", "coupling": 0.5, "noise": 0.1},
            "2.weight": hm.Circle(1.0),
        }
        opt = hm.Langevin(
            replicas.groups(rules),
            lr=0.01,
            temperature=1e-2,
            scheme="BAOAB",
            generator=replicas.noise(),
        )
        order = replicas.order(X.float(), Y.float(), 10)
        for _ in range(30):
            for x, y in order:
                replicas.backward(squared, x, y)
                opt.step()
        return replicas, opt

    many, opt = build(5, 0)
    one, alone = build(1, 3)
    frictions = opt.param_groups[0]["friction"]
    assert frictions.shape == (1, 5)
    assert frictions.std() > 1e-6
    # Rounding of batched products, about 1e-7 a step over 90 steps.
    torch.testing.assert_close(
        frictions[:, 3:4], alone.param_groups[0]["friction"], atol=1e-5, rtol=1e-4
    )
    for (name, p), (_, q) in zip(many.named_parameters(), one.named_parameters(), strict=True):
        torch.testing.assert_close(p[3], q[0], atol=1e-5, rtol=1e-4, msg=name)


# ---------------------------------------------------------------------- checkpoints of frictions
def test_frictions_of_another_shape_are_refused_before_anything_changes():
    model = net()
    opt = METHODS["adl"](model, seed=0)
    step(model, opt)
    other = net()
    by_tensor = METHODS["adl"](other, seed=0, thermostat="tensor")
    step(other, by_tensor)
    before = copy.deepcopy(by_tensor.state_dict())
    with pytest.raises(
        hm.CheckpointError, match=r"shape \(1,\) and the optimizer's must have \(4,\)"
    ):
        by_tensor.load_state_dict(opt.state_dict())
    after = by_tensor.state_dict()
    assert torch.equal(after["param_groups"][0]["friction"], before["param_groups"][0]["friction"])


def test_a_checkpoint_without_newer_settings_loads():
    model = net()
    opt = METHODS["langevin"](model, seed=0)
    step(model, opt)
    saved = opt.state_dict()
    for key in ("friction", "coupling", "noise", "thermostat", "batch_dims", "last_lr"):
        del saved["param_groups"][0][key]
    opt.load_state_dict(saved)
    step(model, opt)
    assert opt.param_groups[0]["thermostat"] == "group"


def test_frictions_follow_their_parameters():
    model = net()
    opt = METHODS["adl"](model, seed=0)
    step(model, opt)
    group = opt.param_groups[0]
    expected = group["friction"].clone()
    group["friction"] = group["friction"].float()  # as a tool may leave it
    step(model, opt)
    assert group["friction"].dtype == torch.float64
    assert group["friction"].device == next(model.parameters()).device
    assert not torch.equal(group["friction"], expected)


# ---------------------------------------------------------------------- splits and bad input
def test_output_part():
    model = nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1)
    )
    assert output_part(model) == ["4.weight", "4.bias"]
    assert output_part(model, 2) == ["3.weight", "3.bias", "4.weight", "4.bias"]
    assert output_part(model, "4.*") == ["4.weight", "4.bias"]
    assert output_part(model, ["4.weight", "3.*"]) == ["3.weight", "3.bias", "4.weight"]
    assert output_part(model, nn.LayerNorm) == ["3.weight", "3.bias"]
    with pytest.raises(
        hm.SettingError, match=r"split='9\.\*' leaves the output part empty.*'0\.weight'"
    ):
        output_part(model, "9.*")
    with pytest.raises(hm.SettingError, match="split='\\*' leaves the hidden part empty"):
        output_part(model, "*")
    with pytest.raises(hm.SettingError, match="leaves the output part empty"):
        output_part(model, 0)
    with pytest.raises(hm.SettingError, match="leaves the hidden part empty"):
        methods.lol(nn.Linear(2, 2), 0.1, 0.9, 0.0)


def test_output_part_knows_tied_weights():
    model = nn.Module()
    model.embedding, model.body, model.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
    model.head.weight = model.embedding.weight
    assert output_part(model, "head.*") == ["embedding.weight", "head.bias"]
    assert output_part(model) == ["embedding.weight", "head.bias"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "BACDEDCAB", "coupling": 0.1, "friction": math.nan}, "friction is nan"),
        ({"scheme": "BACDEDCAB"}, "'BACDEDCAB' adapts its friction and needs a coupling"),
        ({"scheme": "BACDEDCAB", "coupling": -1.0}, "coupling is -1.0"),
        ({"scheme": "BACDEDCAB", "coupling": 0.1, "noise": -0.5}, "noise is -0.5"),
        ({"scheme": "BACDEDCAB", "coupling": 0.1, "noise": math.nan}, "noise is nan"),
        ({"scheme": "BACDEDCAB", "coupling": 0.1, "thermostat": "each"}, "thermostat is 'each'"),
        ({"scheme": "BAODAB", "coupling": 0.1}, "both O and letters of the adaptive friction"),
        ({"scheme": "BACDCAB", "coupling": 0.1}, "has no E"),
        ({"scheme": "BADEDAB", "coupling": 0.1}, "neither C nor F"),
        ({"scheme": "BACFEFAB", "coupling": 0.1}, "F beside C or D"),
    ],
)
def test_impossible_thermostats(settings, message):
    with pytest.raises(hm.SettingError, match=message):
        hm.Langevin([nn.Parameter(torch.zeros(2))], lr=0.1, **settings)


def test_a_thermostat_a_tensor_cannot_split_a_joint_constraint():
    joint = hm.LevelSet(lambda a, b: (a * b).sum().reshape(1) - 1)
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    with pytest.raises(hm.SettingError, match="thermostat='tensor' cannot go with LevelSet"):
        hm.Langevin(params, scheme="BAFEFAB", coupling=0.1, thermostat="tensor", constraint=joint)
