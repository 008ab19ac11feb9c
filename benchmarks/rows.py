"""A row of the table: two costs measured in the same run, their ratio, and what was hoped for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.timing import Spread


@dataclass(frozen=True)
class Goal:
    """What the ratio should be: at most ``reach`` times the peer's cost or, if ``faster``, at least
    ``reach`` times as fast. ``aim`` is what would be better still. Without a reach a row only informs."""

    reach: float | None = None
    aim: float | None = None
    faster: bool = False

    def verdict(self, ratio: float, sound: bool = True) -> str:
        """PASS, SHORT or nothing; a result that is not ``sound`` (a biased sampler) does not pass."""
        if self.reach is None:
            return ""
        met = ratio >= self.reach if self.faster else ratio <= self.reach
        return "PASS" if met and sound else "SHORT"

    def shown(self, bound: float | None) -> str:
        return "" if bound is None else f"{'≥' if self.faster else '≤'} {bound:g}"


NO_GOAL = Goal()


@dataclass(frozen=True)
class Row:
    """``unit`` says what ours and peer are: "s" (seconds a call), "/s" (so many a second), "" (a
    number). A row without a ratio has a ``note`` that says why."""

    family: str
    what: str
    peer: str
    threads: str
    unit: str = "s"
    ours: Spread | None = None
    theirs: Spread | None = None
    ratio: Spread | None = None
    goal: Goal = NO_GOAL
    note: str = ""
    sound: bool = True

    @property
    def verdict(self) -> str:
        return "" if self.ratio is None else self.goal.verdict(self.ratio.median, self.sound)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Row":
        """From JSON."""
        values = {k: v for k, v in record.items() if k != "verdict"}
        for key in ("ours", "theirs", "ratio"):
            values[key] = values[key] and Spread(**values[key])
        return cls(**{**values, "goal": Goal(**values["goal"])})

    def cells(self) -> list[str]:
        """For tables: see `COLUMNS`."""
        return [
            self.what,
            self.peer,
            self.threads,
            quantity(self.ours, self.unit),
            quantity(self.theirs, self.unit),
            quantity(self.ratio, ""),
            self.goal.shown(self.goal.reach),
            self.goal.shown(self.goal.aim),
            self.verdict,
            self.note,
        ]


COLUMNS = ("what", "against", "threads", "ours", "peer", "ratio", "reach", "aim", "", "note")


def quantity(s: Spread | None, unit: str) -> str:
    """A median with its quartiles, in a unit that suits its size."""
    if s is None or s.low == s.high:
        return median(s, unit)
    scale, name = _scaled(s.median, unit)
    low, high = (_number(x * scale) for x in (s.low, s.high))
    return f"{_number(s.median * scale)} [{low}, {high}] {name}".strip()


def median(s: Spread | None, unit: str) -> str:
    """The median alone."""
    if s is None:
        return ""
    scale, name = _scaled(s.median, unit)
    return f"{_number(s.median * scale)} {name}".strip()


def _scaled(x: float, unit: str) -> tuple[float, str]:
    if unit != "s":
        return 1.0, unit
    return next(((k, n) for k, n in ((1.0, "s"), (1e3, "ms")) if x * k >= 1), (1e6, "µs"))


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"
