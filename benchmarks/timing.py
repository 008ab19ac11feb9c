"""Interleaved timing: contenders take turns, so that what disturbs the machine disturbs all of them."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

Work = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        return cls(low, median, high)


@dataclass(frozen=True)
class Effort:
    """How long to measure: ``rounds`` turns of about ``block`` seconds for every contender, after
    ``warmup`` calls."""

    rounds: int = 15
    block: float = 0.08
    warmup: int = 3


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def calls_for(work: Work, block: float, clock: Clock) -> int:
    """How many calls fill a block: doubled until they take a quarter of it, then scaled."""
    calls = 1
    while True:
        taken = _timed(work, calls, clock)
        if taken >= block / 4:
            return max(1, round(calls * block / taken))
        calls *= 2


def interleave(
    works: Mapping[str, Work], effort: Effort, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds a call of each, a number a round, in rounds A B C, A B C, ..."""
    with quiet():
        calls = {}
        for name, work in works.items():
            for _ in range(effort.warmup):
                work()
            calls[name] = calls_for(work, effort.block, clock)
        taken: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(effort.rounds):
            for name, work in works.items():
                taken[name].append(_timed(work, calls[name], clock) / calls[name])
    return taken


def ratios(ours: Sequence[float], peer: Sequence[float]) -> Spread:
    """Ours over the peer's, round by round: a slow stretch of the machine cancels."""
    return Spread.of([a / b for a, b in zip(ours, peer, strict=True)])


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The p of value = c size**p, by least squares in logarithms."""
    slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
    return float(slope)


def _timed(work: Work, calls: int, clock: Clock) -> float:
    start = clock()
    for _ in range(calls):
        work()
    return clock() - start
