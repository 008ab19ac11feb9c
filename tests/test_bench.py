"""The arithmetic of the benchmarks, with a clock that is made up: no test here depends on real time."""

import json

import numpy as np
import pytest
import torch
from benchmarks.bench import Bench, Pair, Unavailable, peer
from benchmarks.report import page, tally
from benchmarks.rows import Goal, Row
from benchmarks.sampling import Round, z_score
from benchmarks.scaling import peak_bytes
from benchmarks.stiefel_law import StiefelLaw, partitions
from benchmarks.timing import Effort, Spread, calls_for, exponent, interleave, ratios
from scipy.special import ive

from holonomic.errors import SettingError


class FakeClock:
    """Time passes only when work is done, and each piece of work says how much."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, seconds: float):
        def run() -> None:
            self.log.append(name)
            self.now += seconds

        return run


def test_contenders_take_turns_and_times_are_a_call():
    clock = FakeClock()
    works = {"a": clock.work("a", 1.0), "b": clock.work("b", 3.0)}
    taken = interleave(works, Effort(rounds=4, block=0.0, warmup=2), clock)
    assert taken == {"a": [1.0] * 4, "b": [3.0] * 4}
    assert clock.log[-8:] == ["a", "b"] * 4


def test_a_block_holds_as_many_calls_as_fit():
    clock = FakeClock()
    assert calls_for(clock.work("a", 0.25), 1.0, clock) == 4
    assert calls_for(clock.work("a", 5.0), 1.0, clock) == 1
    clock = FakeClock()
    taken = interleave({"a": clock.work("a", 0.125)}, Effort(rounds=2, block=1.0, warmup=0), clock)
    assert taken["a"] == [0.125, 0.125]
    assert len(clock.log) == 3 + 2 * 8  # 1 + 2 calls to calibrate, then two blocks of 8


def test_ratio_is_taken_round_by_round():
    """The machine slows down tenfold half way: the ratio of every round is 2 all the same."""
    peer_times = [1.0, 1.0, 10.0, 10.0]
    assert ratios([2 * t for t in peer_times], peer_times) == Spread(2.0, 2.0, 2.0)


def test_spread_is_the_quartiles():
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(2.0, 3.0, 4.0)


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0])
def test_exponent_of_a_power_law(p):
    sizes = [10.0, 20.0, 50.0, 400.0]
    assert exponent(sizes, [7 * n**p for n in sizes]) == pytest.approx(p, abs=1e-12)


@pytest.mark.parametrize(
    ("goal", "ratio", "verdict"),
    [
        (Goal(1.5), 1.5, "PASS"),
        (Goal(1.5), 1.51, "SHORT"),
        (Goal(20, faster=True), 20, "PASS"),
        (Goal(20, faster=True), 19.9, "SHORT"),
        (Goal(), 100, ""),
    ],
)
def test_verdicts(goal, ratio, verdict):
    assert goal.verdict(ratio) == verdict
    assert goal.verdict(ratio, sound=False) == ("SHORT" if verdict else "")


def test_rows_say_what_is_missing_and_the_rest_is_measured():
    clock = FakeClock()

    def absent():
        raise Unavailable("not installed: nowhere")

    def refused():
        raise SettingError("fused=True is not supported")

    def broken():
        raise RuntimeError("boom")

    bench = Bench(clock=clock, family="f")
    bench.compare(
        {
            "ours": lambda: clock.work("ours", 2.0),
            "peer": lambda: clock.work("peer", 8.0),
            "absent": absent,
            "refused": refused,
            "broken": broken,
        },
        [
            Pair("cost", "ours", "peer", Goal(0.5)),
            Pair("speed", "ours", "peer", Goal(5.0, faster=True)),
            Pair("absent", "ours", "absent", Goal(1.0)),
            Pair("refused", "refused", "peer", Goal(1.0)),
            Pair("broken", "ours", "broken", Goal(1.0)),
        ],
        Effort(3, 0.0, 0),
        counts=(1,),
    )
    rows = {row.what: row for row in bench.rows}
    assert (rows["cost"].ratio.median, rows["cost"].verdict) == (0.25, "PASS")
    assert (rows["speed"].ratio.median, rows["speed"].verdict) == (4.0, "SHORT")
    assert rows["absent"].note == "not installed: nowhere"
    assert rows["refused"].note == "not available: fused=True is not supported"
    assert rows["broken"].note == "failed: RuntimeError: boom"
    assert [rows[k].verdict for k in ("absent", "refused", "broken")] == ["", "", ""]
    assert len(bench.errors) == 1  # what is merely absent is no error
    assert tally(bench.rows) == {"PASS": 1, "SHORT": 1}


def test_a_peer_that_is_not_installed_is_named():
    with pytest.raises(Unavailable, match="not installed: no_such_peer"):
        peer("no_such_peer")


def test_the_page_keeps_its_columns_when_cells_hold_bars():
    row = Row("f", "|θ| ≤ 1", "peer", "1", ours=Spread(1e-3, 2e-3, 3e-3), note="why")
    text = page(Bench(rows=[row]), [], {"f": 1.0})
    (line,) = [x for x in text.splitlines() if "θ" in x]
    assert line.replace("\\|", "").count("|") == 11
    assert "2 [1, 3] ms" in line


# ---------------------------------------------------------------------- what sampling is judged by
@pytest.mark.parametrize(("n", "kappa"), [(2, 0.5), (3, 4.0), (20, 10.0)])
def test_mean_on_the_sphere_is_the_ratio_of_bessel_functions(n, kappa):
    exact = ive(n / 2, kappa) / ive(n / 2 - 1, kappa)
    assert StiefelLaw(n, 1, kappa).mean() == pytest.approx(exact, rel=1e-12)


def test_mean_on_the_stiefel_manifold_against_uniform_draws():
    """Uniform orthogonal frames weighted by the density; kappa small enough for the weights to be
    even. The error of a weighted mean is estimated from the draws, the bound is 4 of it."""
    law = StiefelLaw(6, 3, 1.5)
    g = torch.Generator().manual_seed(0)
    q, r = torch.linalg.qr(torch.randn(200_000, 6, 3, generator=g, dtype=torch.double))
    q = q * r.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
    top = q[:, :3].diagonal(dim1=1, dim2=2).sum(1)
    w = (law.kappa * top).exp()
    w = w / w.sum()
    mean = (w * top).sum() / 3
    error = ((w * (top / 3 - mean)) ** 2).sum().sqrt()
    assert error < 2e-3
    assert abs(mean - law.mean()) < 4 * error


def test_partitions_are_all_there_once():
    assert sorted(partitions(5, 2)) == [(3, 2), (4, 1), (5,)]
    assert len(set(partitions(10, 10))) == 42


def test_z_score_of_independent_draws():
    """With the true mean it is a standard normal number; 0.1 off it is 0.1 sqrt(N)."""
    x = np.random.default_rng(0).normal(size=(4, 2500, 1, 1))
    rounds = [Round.of(1.0, x[i : i + 1], 1) for i in range(4)]
    assert abs(z_score(rounds, 0.0)) < 3
    assert z_score(rounds, -0.1) - z_score(rounds, 0.0) == pytest.approx(10, rel=0.1)


def test_peak_memory_counts_what_is_held_at_once():
    """Two temporaries of 4 MB, one after the other, then two together."""
    x = torch.zeros(1_000_000)

    def apart() -> None:
        for _ in range(2):
            x.add(1)

    def together() -> None:
        _ = x.add(1), x.add(2)

    assert peak_bytes(apart) == pytest.approx(4e6, rel=0.01)
    assert peak_bytes(together) == pytest.approx(8e6, rel=0.01)


def test_rows_survive_being_written_down() -> None:
    """So that one family can be measured again, and the page keeps the others."""
    spread = Spread(1.0, 2.0, 3.0)
    goal = Goal(10, 30, faster=True)
    full = Row("f", "what", "peer", "1", ours=spread, theirs=spread, ratio=spread, goal=goal)
    empty = Row("f", "what", "peer", "2", note="not installed: x")
    for row in (full, empty):
        assert Row.of(json.loads(json.dumps(row.record()))) == row
