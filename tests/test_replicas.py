"""Stacked replicas are the single runs they stand for."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import holonomic as hm
from holonomic.noise import Noise, ReplicaNoise

X = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
Y = (X[:, :1] * X[:, 1:] > 0).float()


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((output - y) ** 2).mean()


RULES = {
    "free": {},
    "circle": {"0.weight": hm.Circle(0.7), "4.weight": hm.Circle(0.5)},
    "sphere": {"0.weight": hm.Sphere(1.0), "2.weight": hm.Sphere(1.0, slack=False)},
    "orthogonal": {"2.weight": hm.Orthogonal()},
    "level set": {"0.bias": hm.LevelSet(lambda b: (b**2).sum() - 0.5)},
}


def trained(n: int, first: int, rules: str, scheme: str, temperature: float, steps: int = 200):
    replicas = hm.Replicas(net, n, seed=3, first=first)
    opt = hm.Langevin(
        replicas.groups(RULES[rules]),
        lr=0.01,
        scheme=scheme,
        temperature=temperature,
        generator=replicas.noise(),
    )
    order = replicas.order(X, Y, 8)
    done = 0
    while done < steps:
        for x, y in order:
            replicas.backward(loss, x, y)
            opt.step()
            done += 1
    return replicas, opt


CASES = [
    pytest.param(
        *(rules, scheme, temperature),
        marks=[pytest.mark.slow]
        if rules == "level set" and (not temperature or scheme == "EM")
        else [],
        id=f"{rules}-{scheme}-{temperature}",
    )
    for rules in RULES
    for scheme in ("EM", "BAOAB")
    for temperature in (0.0, 1e-4)
]


@pytest.mark.parametrize(("rules", "scheme", "temperature"), CASES)
def test_replica_of_eight_equals_the_same_run_alone(rules, scheme, temperature):
    together, _ = trained(8, 0, rules, scheme, temperature)
    alone, _ = trained(1, 5, rules, scheme, temperature)
    for (name, many), (_, one) in zip(
        together.named_parameters(), alone.named_parameters(), strict=True
    ):
        # Batched and single matrix products round differently, by about 1e-7 a step, and 200 steps
        # of a smooth network do not amplify that by more than 50.
        torch.testing.assert_close(many[5], one[0], atol=1e-5, rtol=1e-4, msg=name)
        assert not torch.allclose(many[4], many[5], atol=1e-3)


def test_gradients_are_those_of_the_modules_alone():
    replicas = hm.Replicas(net, 3)
    x, y = torch.randn(3, 7, 2), torch.randn(3, 7, 1)
    losses = replicas.backward(loss, x, y)
    for i in range(3):
        module = replicas[i]
        value = loss(module(x[i]), y[i])
        value.backward()
        torch.testing.assert_close(losses[i], value)
        for (name, p), (_, stacked) in zip(
            module.named_parameters(), replicas.named_parameters(), strict=True
        ):
            torch.testing.assert_close(stacked.grad[i], p.grad, atol=1e-6, rtol=1e-5, msg=name)
    torch.testing.assert_close(replicas(x)[1], replicas[1](x[1]))
    replicas(x).square().sum().backward()  # the differentiable call works too


def test_a_penalty_is_added_to_every_replica():
    replicas = hm.Replicas(net, 3)
    x, y = torch.randn(3, 7, 2), torch.randn(3, 7, 1)
    plain = replicas.backward(loss, x, y)
    penalized = replicas.backward(loss, x, y, lambda p: (p["0.weight"] ** 2).sum())
    extra = (dict(replicas.named_parameters())["0.weight"].detach() ** 2).sum((1, 2))
    torch.testing.assert_close(penalized, plain + extra)


def test_replicas_differ_and_are_reproducible():
    a, b = hm.Replicas(net, 4, seed=0), hm.Replicas(net, 4, seed=0)
    other = hm.Replicas(net, 4, seed=1)
    for (_, p), (_, q), (_, r) in zip(
        a.named_parameters(), b.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(p, q)
        assert not torch.equal(p, r)
        assert not torch.equal(p[0], p[1])
    before = torch.get_rng_state()
    hm.Replicas(net, 2)
    assert torch.equal(before, torch.get_rng_state())


def test_predict_shared_and_own_inputs():
    replicas = hm.Replicas(net, 11)
    shared = replicas.predict(X, chunk=4)
    assert shared.shape == (11, 40, 1)
    torch.testing.assert_close(shared[9], replicas[9](X))
    own = torch.randn(11, 5, 2)
    torch.testing.assert_close(replicas.predict(own, own=True, chunk=4)[7], replicas[7](own[7]))


def test_order_goes_through_the_data_once_an_epoch_each_in_its_own_way():
    replicas = hm.Replicas(net, 3)
    numbers = torch.arange(10.0)
    order = replicas.order(numbers.unsqueeze(1), numbers, 4)
    assert len(order) == 3
    epochs = [torch.cat([y for _, y in order], dim=1) for _ in range(2)]
    for epoch in epochs:
        for row in epoch:
            assert torch.equal(row.sort().values, numbers)
    assert not torch.equal(epochs[0][0], epochs[0][1])
    assert not torch.equal(epochs[0], epochs[1])
    own = torch.arange(30.0).reshape(3, 10)
    rows = torch.cat([y for _, y in replicas.order(own.unsqueeze(2), own, 5, own=True)], dim=1)
    assert torch.equal(rows.sort(1).values, own)


def drawn(noise: Noise, rows: int, size: int, step: int = 0) -> torch.Tensor:
    return noise.like(torch.empty(rows, size), noise.stream("w"), step, 0)


def test_noise_of_a_replica_does_not_depend_on_the_others():
    few, many = ReplicaNoise([11, 12]), ReplicaNoise([10, 11, 12])
    for size in (5, 21_000, 6, 40_001):
        assert torch.equal(drawn(few, 2, size), drawn(many, 3, size)[1:])


def test_noise_of_a_replica_is_that_of_an_optimizer_with_its_seed():
    for step in (0, 7, 2**40):
        stacked = drawn(ReplicaNoise([10, 11]), 2, 999, step)
        assert torch.equal(stacked[1:], drawn(Noise(11), 1, 999, step))


def test_noise_of_replicas_is_standard_normal_and_independent():
    n = 100_000
    numbers = drawn(ReplicaNoise(list(range(8))), 8, n).double()
    # Means and second and fourth moments of n numbers have standard errors sqrt(1, 2, 96) / sqrt(n);
    # 8 streams and a bound of 4.5 of them leave a chance of 2e-4 per line, at a fixed seed.
    assert (numbers.mean(1).abs() < 4.5 / n**0.5).all()
    assert ((numbers**2).mean(1) - 1).abs().max() < 4.5 * (2 / n) ** 0.5
    assert ((numbers**4).mean(1) - 3).abs().max() < 4.5 * (96 / n) ** 0.5
    correlation = numbers @ numbers.T / n - torch.diag((numbers**2).mean(1))
    assert correlation.abs().max() < 4.5 / n**0.5
    lagged = (numbers[:, 1:] * numbers[:, :-1]).mean(1)
    assert lagged.abs().max() < 4.5 / n**0.5


def test_noise_of_replicas_is_restored():
    noise, fresh = ReplicaNoise([1, 2]), ReplicaNoise([7, 8])
    fresh.restore(noise.state())
    assert torch.equal(drawn(noise, 2, 99), drawn(fresh, 2, 99))
    with pytest.raises(hm.CheckpointError, match="2 replicas, and there are 3"):
        ReplicaNoise([1, 2, 3]).restore(noise.state())
    with pytest.raises(hm.CheckpointError, match="noise of 2 replicas; build"):
        Noise(0).restore(noise.state())


@pytest.mark.parametrize("scheme", ["EM", "LM", "BAOAB"])
def test_a_stack_resumes_bit_for_bit(scheme):
    def parts():
        replicas = hm.Replicas(net, 3, seed=5)
        opt = hm.Langevin(
            replicas.groups(RULES["circle"]),
            lr=0.01,
            scheme=scheme,
            temperature=1e-3,
            generator=replicas.noise(),
        )
        return replicas, opt, replicas.order(X, Y, 8)

    def epochs(n, replicas, opt, order):
        for _ in range(n):
            for x, y in order:
                replicas.backward(loss, x, y)
                opt.step()

    whole = parts()
    epochs(20, *whole)
    begun = parts()
    epochs(9, *begun)
    saved = copy.deepcopy([part.state_dict() for part in begun])
    resumed = parts()
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    epochs(11, *resumed)
    for (_, p), (_, q) in zip(
        whole[0].named_parameters(), resumed[0].named_parameters(), strict=True
    ):
        assert torch.equal(p, q)


def test_constraints_hold_in_every_replica():
    replicas, opt = trained(6, 0, "orthogonal", "BAOAB", 1e-3)
    w = dict(replicas.named_parameters())["2.weight"].detach()
    error = (w.mT @ w - torch.eye(16)).abs().amax((1, 2))
    assert error.max() < 1e-6  # the core's bound for float32
    assert opt.report().groups[0].dof == 6 * (256 - 16 * 17 // 2)


def test_running_mean_over_samples_and_replicas():
    mean = hm.RunningMean()
    with pytest.raises(hm.SettingError, match="no sample"):
        _ = mean.value
    replicas = hm.Replicas(net, 4)
    for p in replicas.predict(X):
        mean.add(p.sigmoid())
    torch.testing.assert_close(mean.value, replicas.predict(X).sigmoid().mean(0))
    assert mean.count == 4


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "running statistics"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "'1' \\(Dropout\\).*set p=0"),
        (lambda: nn.ReLU(), "without parameters"),
        (lambda: nn.Linear(2, int(torch.randint(1, 99, ()))), "different shapes"),
    ],
)
def test_modules_that_cannot_be_stacked(factory, message):
    with pytest.raises(hm.SettingError, match=message):
        hm.Replicas(factory, 5)


def test_batch_norm_without_statistics_works():
    replicas = hm.Replicas(
        lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False)), 3
    )
    x = torch.randn(3, 9, 2)
    torch.testing.assert_close(replicas(x)[2], replicas[2](x[2]))


def test_bad_input_is_named():
    replicas = hm.Replicas(net, 3)
    with pytest.raises(hm.SettingError, match="n is 0"):
        hm.Replicas(net, 0)
    with pytest.raises(hm.SettingError, match=r"x has shape \(40, 2\).*3 replicas"):
        replicas(X)
    with pytest.raises(hm.SettingError, match=r"y has shape"):
        replicas.backward(loss, torch.zeros(3, 2, 2), torch.zeros(2, 1))
    with pytest.raises(IndexError, match="replica 3 of 3"):
        replicas[3]
    with pytest.raises(hm.SettingError, match="batch_size is 41"):
        replicas.order(X, Y, 41)
    with pytest.raises(hm.SettingError, match=r"x has shape \(40, 2\) and y \(39, 1\)"):
        replicas.order(X, Y[:-1], 4)
    with pytest.raises(hm.CheckpointError, match=r"0.weight"):
        replicas.load_state_dict({"0.weight": torch.zeros(1)})
    with pytest.raises(hm.SettingError, match="must be stacked over the replicas"):
        hm.Langevin([nn.Parameter(torch.zeros(4, 2))], generator=replicas.noise())


def test_copies_of_an_optimizer_go_on_with_the_same_noise():
    _, opt = trained(3, 0, "circle", "BAOAB", 1e-3, steps=20)
    twin = pickle.loads(pickle.dumps(opt._noise))
    assert torch.equal(drawn(opt._noise, 3, 50), drawn(twin, 3, 50))
    assert copy.deepcopy(opt).param_groups[0]["name"] == opt.param_groups[0]["name"]


def test_tied_weights_and_passing_buffers_can_be_taken_out():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight
            self.register_buffer("m", torch.ones(1), persistent=False)

        def forward(self, x):
            return self.b(self.a(x)) * self.m

    replicas = hm.Replicas(Tied, 3)
    x = torch.randn(4, 2)
    torch.testing.assert_close(replicas[1](x), replicas.predict(x)[1])


def test_shared_inputs_are_never_taken_for_own_ones():
    replicas = hm.Replicas(lambda: nn.Linear(4, 1), 8)
    shared = torch.randn(8, 2, 4)  # a batch of 8 sequences, as many as there are replicas
    assert replicas.predict(shared).shape == (8, 8, 2, 1)
    data = torch.randn(8, 4)
    x, y = next(iter(replicas.order(data, data, 2)))
    assert x.shape == y.shape == (8, 2, 4)


def test_a_loss_made_anew_every_step_is_warned_of():
    replicas = hm.Replicas(net, 1)
    x, y = torch.zeros(1, 2, 2), torch.zeros(1, 2, 1)

    def steps():
        for k in range(40):
            replicas.backward(lambda o, t, k=k: (o - t).square().mean() * k, x, y)

    with pytest.warns(UserWarning, match="define it once, outside"):
        steps()


def test_a_compiled_gradient_is_the_same_to_rounding():
    """Where there is no compiler it warns, and the gradient is the same all the more."""
    x, y = torch.randn(3, 4, 2), torch.rand(3, 4, 1)

    def loss(output, target):
        return ((output - target) ** 2).mean()

    grads = []
    for compiled in (False, True):
        replicas = hm.Replicas(lambda: nn.Linear(2, 1), 3, seed=1, compile=compiled)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "compile=True has no effect")
            losses = replicas.backward(loss, x, y)
        grads.append([losses, *(p.grad for p in replicas.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
