"""What a family of benchmarks is given: it says who competes, and gets rows."""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.rows import NO_GOAL, Goal, Row
from benchmarks.timing import Clock, Effort, Spread, Work, interleave, ratios, threads
from holonomic.errors import SettingError

Maker = Callable[[], Work]


class Unavailable(Exception):
    """A contender that is not here; the message is the note of its row."""


def peer(module: str) -> Any:
    """A peer's module, if it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else module
        raise Unavailable(f"not installed: {missing}") from error


@dataclass(frozen=True)
class Pair:
    """One row: who of the contenders is compared with whom."""

    what: str
    ours: str
    peer: str
    goal: Goal = NO_GOAL


@dataclass(frozen=True)
class Line:
    """A curve of a log-log chart: cost (and memory) against size, with the exponent fitted to the
    sizes from ``fit_from`` on."""

    name: str
    sizes: list[float]
    seconds: list[float]
    bytes: list[float] = field(default_factory=list)
    fit_from: float = 0.0


@dataclass(frozen=True)
class Chart:
    """Lines over one axis."""

    name: str
    title: str
    size: str
    lines: list[Line]
    note: str = ""


@dataclass
class Bench:
    """Collects the rows and charts of all families."""

    quick: bool = False
    clock: Clock = time.perf_counter
    rows: list[Row] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    family: str = ""

    @property
    def effort(self) -> Effort:
        return Effort(5, 0.03, 2) if self.quick else Effort()

    def slow(self) -> Effort:
        """For work of a second and more."""
        return Effort(2 if self.quick else 4, 0.0, 0)

    def compare(
        self,
        contenders: Mapping[str, Maker],
        pairs: Sequence[Pair],
        effort: Effort | None = None,
        counts: Sequence[int] = (1, 2),
    ) -> None:
        """Measure all contenders together, for each number of threads, and add a row a pair."""
        for count in counts:
            with threads(count):
                works, absent = self._made(contenders)
                taken = interleave(works, effort or self.effort, self.clock)
            for pair in pairs:
                self.rows.append(self._row(pair, taken, absent, str(count)))

    def measure(
        self, contenders: Mapping[str, Maker], effort: Effort | None = None
    ) -> dict[str, float]:
        """Median seconds of each contender that is there, in one thread: the points of a chart."""
        with threads(1):
            works, _ = self._made(contenders)
            taken = interleave(works, effort or self.effort, self.clock)
        return {name: Spread.of(values).median for name, values in taken.items()}

    def _made(self, contenders: Mapping[str, Maker]) -> tuple[dict[str, Work], dict[str, str]]:
        """Build every contender and call it once; those that cannot, with the reason."""
        works, absent = {}, {}
        for name, make in contenders.items():
            try:
                work = make()
                work()
                works[name] = work
            except Unavailable as reason:
                absent[name] = str(reason)
            except SettingError as error:
                absent[name] = f"not available: {_brief(error)}"
            except Exception as error:  # a peer may fail in any way, and the rest must still run
                absent[name] = f"failed: {type(error).__name__}: {_brief(error)}"
                self.errors.append(f"{self.family}, {name}: {type(error).__name__}: {error}")
        return works, absent

    def _row(
        self, pair: Pair, taken: Mapping[str, list[float]], absent: Mapping[str, str], count: str
    ) -> Row:
        notes = [absent[name] for name in (pair.ours, pair.peer) if name in absent]
        if notes:
            return Row(
                self.family, pair.what, pair.peer, count, goal=pair.goal, note="; ".join(notes)
            )
        ours, theirs = taken[pair.ours], taken[pair.peer]
        ratio = ratios(theirs, ours) if pair.goal.faster else ratios(ours, theirs)
        return Row(
            self.family,
            pair.what,
            pair.peer,
            count,
            ours=Spread.of(ours),
            theirs=Spread.of(theirs),
            ratio=ratio,
            goal=pair.goal,
        )


def _brief(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return first if len(first) <= 120 else first[:117] + "..."
