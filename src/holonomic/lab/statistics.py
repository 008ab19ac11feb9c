"""Means with their uncertainty, and verdicts on claims."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from holonomic.lab.experiment import Claim, Experiment
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
    """Mean and Student's 95 % interval of it, over the values that are finite."""
    sample = np.asarray(values, dtype=float)
    finite = sample[np.isfinite(sample)]
    lost = len(sample) - len(finite)
    if len(finite) == 0:
        nan = float("nan")
        return Summary(nan, nan, nan, nan, nan, 0, lost)
    spread = float(finite.std(ddof=1)) if len(finite) > 1 else 0.0
    error = spread / np.sqrt(len(finite))
    half = float(stdtrit(len(finite) - 1, 0.975)) * error if len(finite) > 1 else np.inf
    low, high = finite.mean() - half, finite.mean() + half
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


def _deviation(e: Experiment, curves: Mapping[str, Any]) -> list[float]:
    """How far every replica's accuracy is from the median of its kind. The mean of it measures the
    spread, and comparing means is the test of Brown and Forsythe."""
    last = np.array(curves["test_accuracy"][-1], dtype=float)
    parts = [part for part in (last[: e.runs], last[e.runs :]) if len(part)]
    return np.concatenate([np.abs(part - np.nanmedian(part)) for part in parts]).tolist()


def _loss_rise(e: Experiment, curves: Mapping[str, Any]) -> list[float]:
    """By how much the test loss at the end exceeds its minimum: overfitting."""
    loss = np.array(curves["test_loss"], dtype=float)
    return (loss[-1] - np.nanmin(loss, 0)).tolist()


def _steps_to_90(e: Experiment, curves: Mapping[str, Any]) -> list[float]:
    """Steps until 90 % of the test data are right, as fine as records go; all of them if never."""
    reached = np.array(curves["test_accuracy"], dtype=float) >= 90
    steps = e.data.steps * np.array(curves["epoch"], dtype=float)
    return np.where(reached.any(0), steps[reached.argmax(0)], steps[-1]).tolist()


#: Metrics that follow from the curves.
DERIVED: dict[str, Callable[[Experiment, Mapping[str, Any]], list[float]]] = {
    "deviation": _deviation,
    "loss_rise": _loss_rise,
    "steps_to_90": _steps_to_90,
}


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
    lost = int((~np.isfinite(better)).sum())
    word = _word(one, over) if not lost else f"no: {lost} of {len(better)} runs diverged"
    return Verdict(claim.text, one, over, wins, word)


def _word(one: Summary, over: Summary) -> str:
    def says(s: Summary) -> str:
        if s.n < 2:
            return "unknown"
        return "yes" if s.low > 0 else "no" if s.high < 0 else "unclear"

    words = (says(one), says(over))
    if words == ("yes", "yes"):
        return "reproduced"
    if words == ("no", "no"):
        return "the opposite is seen"
    if words == ("unknown", "unknown"):
        return "one run each: nothing is settled"
    if "unknown" in words:
        where = "on one draw" if words[1] == "unknown" else "over draws"
        seen = words[0] if words[1] == "unknown" else words[1]
        told = {"yes": "reproduced", "no": "the opposite is seen"}
        return f"{told[seen]} {where}" if seen in told else "not settled: the interval holds 0"
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
