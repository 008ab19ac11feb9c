"""Temperatures over time."""

import math

import pytest
import torch
from torch import nn

import holonomic as hm
from holonomic.schedules import Annealing, Cyclic, Schedule, Tempering


def two_groups() -> hm.Langevin:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    groups = [{"params": [a], "temperature": 1.0}, {"params": [b], "temperature": 0.5}]
    return hm.Langevin(groups, lr=0.1, seed=0)


def temperatures(opt: hm.Langevin) -> list[float]:
    return [g["temperature"] for g in opt.param_groups]


def test_constant():
    opt = two_groups()
    schedule = Schedule(opt)
    opt.param_groups[0]["temperature"] = 9.0
    schedule.step()
    assert temperatures(opt) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("shape", "final", "middle"),
    [("linear", 0.0, 0.5), ("cosine", 0.2, 0.6), ("exponential", 0.01, 0.1)],
)
def test_annealing(shape, final, middle):
    opt = two_groups()
    schedule = Annealing(opt, steps=10, final=final, shape=shape)
    assert temperatures(opt) == [1.0, 0.5]
    for _ in range(5):
        schedule.step()
    assert temperatures(opt) == pytest.approx([middle, middle / 2])
    for _ in range(20):
        schedule.step()
    assert temperatures(opt) == pytest.approx([final, final / 2])


def test_cyclic():
    opt = two_groups()
    schedule = Cyclic(opt, period=4, low=0.2)
    seen = []
    for _ in range(8):
        seen.append(temperatures(opt)[0])
        schedule.step()
    assert seen == pytest.approx(
        2 * [1.0, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5)]
    )


def test_composes_with_a_learning_rate_scheduler_and_is_saved():
    opt = two_groups()
    rates = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.1)
    schedule = Annealing(opt, steps=10)
    for _ in range(4):
        for g in opt.param_groups:
            for p in g["params"]:
                p.grad = torch.zeros_like(p)
        opt.step()
        rates.step()
        schedule.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.001)
    assert temperatures(opt)[0] == pytest.approx(0.6)
    other = two_groups()
    again = Annealing(other, steps=10)
    again.load_state_dict(schedule.state_dict())
    again.step()
    assert temperatures(other) == pytest.approx([0.5, 0.25])
    with pytest.raises(hm.CheckpointError, match="2 parameter groups and the optimizer has 1"):
        Annealing(hm.Langevin([nn.Parameter(torch.zeros(1))]), 10).load_state_dict(
            schedule.state_dict()
        )


def _tempered(weights: list[float], steps: int) -> tuple[Tempering, list[float]]:
    """A harmonic well in d = 4 dimensions at temperatures 1 and 3."""
    q = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    opt = hm.Langevin([q], lr=0.25, momentum=0.5, temperature=1.0, scheme="BAOAB", seed=0)
    schedule = Tempering(
        opt, [1.0, 3.0], lambda: 0.5 * q.detach().square().sum().item(), weights=weights, seed=1
    )
    cold: list[float] = []
    for _ in range(steps):
        q.grad = q.detach().clone()
        opt.step()
        schedule.step()
        if schedule.rung == 0:
            cold.append(q.detach().square().mean().item())
    return schedule, cold


def test_tempering_visits_rungs_as_their_weights_say():
    """P(i) is proportional to Z_i e^(w_i) with Z_i = (2 pi tau_i)^(d/2)."""
    steps = 12_000
    for weights, odds in (([0.0, -2 * math.log(3.0)], 1.0), ([0.0, 0.0], 9.0)):
        schedule, cold = _tempered(weights, steps)
        assert sum(schedule.visits) == steps
        share = schedule.visits[1] / steps
        expected = odds / (1 + odds)
        # Visits stay together for some ten steps: 12,000 of them count as about 600.
        error = math.sqrt(expected * (1 - expected) / 600)
        assert abs(share - expected) < 4 * error
        # At the cold rung the law is that of temperature 1; BAOAB is exact there. The mean square of
        # 4 components has the spread sqrt(2 / 4), with as few independent readings as above.
        assert abs(sum(cold) / len(cold) - 1) < 4 * math.sqrt(0.5 / (600 * (1 - expected)))


def test_tempering_is_saved_and_scales_momenta():
    schedule, _ = _tempered([0.0, 0.0], 50)
    state = schedule.state_dict()
    fresh, _ = _tempered([0.0, 0.0], 3)
    fresh.load_state_dict(state)
    assert (fresh.rung, fresh.visits) == (schedule.rung, schedule.visits)
    assert temperatures(fresh.optimizer) == [fresh.ladder[fresh.rung]]
    draws = [torch.rand(3, generator=s._generator) for s in (schedule, fresh)]
    assert torch.equal(*draws)

    opt = two_groups()
    for g in opt.param_groups:
        for p in g["params"]:
            p.grad = torch.ones_like(p)
    opt.step()
    before = [s["momentum_buffer"].clone() for s in opt.state.values()]
    always = Tempering(opt, [1.0, 4.0], lambda: 1e9, seed=0)  # such an energy always goes up
    while always.rung == 0:
        always.step()
    for v, s in zip(before, opt.state.values(), strict=True):
        torch.testing.assert_close(s["momentum_buffer"], 2 * v)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: Annealing(o, 0), "steps is 0"),
        (lambda o: Annealing(o, 5, shape="steep"), "shape is 'steep'"),
        (lambda o: Annealing(o, 5, final=-1.0), "final is -1.0"),
        (lambda o: Annealing(o, 5, shape="exponential"), "above 0 for an exponential"),
        (lambda o: Cyclic(o, 0), "period is 0"),
        (lambda o: Cyclic(o, 3, low=-0.1), "low is -0.1"),
        (lambda o: Tempering(o, [1.0], float), "at least two positive"),
        (lambda o: Tempering(o, [1.0, -2.0], float), "at least two positive"),
        (lambda o: Tempering(o, [1.0, 2.0], float, weights=[0.0]), "1 weights for 2"),
        (lambda o: Tempering(o, [1.0, 2.0], float, every=0), "every is 0"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(hm.SettingError, match=message):
        make(two_groups())


def test_an_energy_that_is_not_finite_is_refused():
    schedule = Tempering(two_groups(), [1.0, 2.0], lambda: float("nan"), seed=0)

    def steps() -> None:
        for _ in range(20):
            schedule.step()

    with pytest.raises(hm.NonFiniteError, match="the energy is nan"):
        steps()


def test_groups_added_later_are_noticed():
    opt = two_groups()
    schedule = Cyclic(opt, 4)
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(hm.SettingError, match="has 3 groups and the schedule was made for 2"):
        schedule.step()
