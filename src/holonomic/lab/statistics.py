"""Means with their uncertainty, and verdicts on claims."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from holonomic.lab.experiment import Claim
from holonomic.lab.measures import LESS_IS_BETTER


@dataclass(frozen=True)
class Summary:
    """A sample: its mean with a 95 % interval, spread and size (values that are not finite apart)."""

    mean: float
    low: float
    high: float
    std: float
    median: float
    n: int
    diverged: int


def summarize(values: ArrayLike) -> Summary:
    """The percentile bootstrap interval of the mean (4,000 resamples, fixed seed)."""
    sample = np.asarray(values, dtype=float)
    finite = sample[np.isfinite(sample)]
    lost = len(sample) - len(finite)
    if len(finite) == 0:
        nan = float("nan")
        return Summary(nan, nan, nan, nan, nan, 0, lost)
    rng = np.random.default_rng(0)
    means = finite[rng.integers(0, len(finite), (4000, len(finite)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    spread = float(finite.std(ddof=1)) if len(finite) > 1 else 0.0
    return Summary(
        float(finite.mean()),
        float(low),
        float(high),
        spread,
        float(np.median(finite)),
        len(finite),
        lost,
    )


@dataclass(frozen=True)
class Verdict:
    """A claim judged twice: on one draw of the data (runs), and over draws, paired."""

    claim: str
    one_draw: Summary
    over_draws: Summary
    wins: float
    verdict: str


def judge(claim: Claim, finals: dict[str, dict[str, list[float]]], runs: int) -> Verdict:
    """Positive differences speak for the claim. Replicas are paired: same data, initialization and
    data order in both arms."""
    better, worse = (
        np.array(finals[arm][claim.metric], dtype=float) for arm in (claim.better, claim.worse)
    )
    difference = worse - better if claim.metric in LESS_IS_BETTER else better - worse
    one, over = summarize(difference[:runs]), summarize(difference[runs:])
    apart = difference[runs:]
    wins = float(np.mean(apart > 0)) if len(apart) else float("nan")
    return Verdict(claim.text, one, over, wins, _word(one, over))


def _word(one: Summary, over: Summary) -> str:
    def says(s: Summary) -> str:
        if s.n < 2:
            return "unknown"
        return "yes" if s.low > 0 else "no" if s.high < 0 else "unclear"

    words = (says(one), says(over))
    if words == ("yes", "yes") or set(words) == {"yes", "unknown"}:
        return "reproduced"
    if words == ("no", "no") or set(words) == {"no", "unknown"}:
        return "the opposite is seen"
    if "yes" in words and "no" in words:
        return "depends on the draw of the data"
    if words[0] == "yes":
        return "on the one draw only; not settled over draws"
    if words[1] == "yes":
        return "over draws; not settled on the one draw"
    if "no" in words:
        return "rather the opposite"
    return "not settled: the intervals hold 0"


def as_plain(value: Any) -> dict[str, Any]:
    """A summary or verdict as nested dictionaries."""
    return {k: as_plain(v) if isinstance(v, Summary) else v for k, v in vars(value).items()}
