"""What an experiment is: a complete, frozen description, and the registry of all of them."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from holonomic.constraints import Circle, Constraint, Orthogonal, Sphere
from holonomic.errors import SettingError

CONSTRAINTS: dict[str, Callable[..., Constraint]] = {
    "circle": Circle,
    "sphere": Sphere,
    "orthogonal": Orthogonal,
}


def slug(name: str) -> str:
    """A name as a file name."""
    return "".join(c if c.isalnum() or c in "-.=" else "_" for c in name)


@dataclass(frozen=True)
class Data:
    """A spiral and how it is used (see `holonomic.lab.data.spiral`)."""

    turns: int
    scale: float
    noise: float
    train: int
    test: int
    batch: int


@dataclass(frozen=True)
class Arm:
    """One method of an experiment. ``constraints`` maps a glob to (kind, arguments...)."""

    name: str
    lr: float
    widths: tuple[int, ...]
    scheme: str = "EM"
    momentum: float = 0.0
    temperature: float = 0.0
    weight_decay: float = 0.0
    constraints: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    orthogonal_init: tuple[str, ...] = ()
    penalty: float = 0.0
    penalized: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return slug(self.name)

    def rules(self) -> dict[Any, Constraint]:
        """The constraints as rules for `holonomic.groups`."""
        return {glob: CONSTRAINTS[kind](*args) for glob, (kind, *args) in self.constraints.items()}


@dataclass(frozen=True)
class Claim:
    """``better`` beats ``worse`` in ``metric``; which way is up is the metric's own."""

    text: str
    metric: str
    better: str
    worse: str


@dataclass(frozen=True)
class Experiment:
    """Everything that defines a run. ``runs`` replicas share one draw of the data, and ``draws`` more
    have a draw of their own each; all arms see the same draws, initializations and data orders."""

    id: str
    title: str
    setting: str
    data: Data
    arms: tuple[Arm, ...]
    epochs: int
    runs: int
    draws: int
    seed: int = 0
    device: str = "cpu"
    records: int = 50
    figures: tuple[str, ...] = ("curves",)
    metrics: tuple[str, ...] = ("test_accuracy", "test_loss")
    claims: tuple[Claim, ...] = ()
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: str = ""

    def config(self) -> dict[str, Any]:
        """What decides the numbers: two runs with equal config give equal results."""
        skip = ("title", "setting", "figures", "claims", "paper", "notes", "metrics")
        return {k: v for k, v in asdict(self).items() if k not in skip}


_REGISTRY: dict[str, Callable[[], Experiment]] = {}


E = TypeVar("E", bound=Experiment)


def recipe(make: Callable[[], E]) -> Callable[[], E]:
    """Register a function that returns an experiment under the experiment's name."""
    _REGISTRY[make().id] = make
    return make


def experiments() -> dict[str, Experiment]:
    """All experiments by name."""
    from holonomic.lab import recipes  # noqa: F401 (registers them)

    return {name: make() for name, make in _REGISTRY.items()}


#: Figures and tables that are measured in the run of another.
ALIASES = {"fig2": "fig1", "table1": "fig1", "fig4.11": "table4.5"}


def experiment(name: str) -> Experiment:
    """One experiment; an unknown name suggests the nearest."""
    known = experiments()
    name = ALIASES.get(name, name)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)
        raise SettingError(
            f"there is no experiment {name!r}; did you mean {', '.join(near)}? "
            f"`holonomic list` shows all."
        )
    return known[name]
