"""What an experiment is: a complete, frozen description, and the registry of all of them."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from holonomic.constraints import Circle, Constraint, Orthogonal, Sphere
from holonomic.errors import SettingError
from holonomic.lab.problem import QUIET, Data

CONSTRAINTS: dict[str, Callable[..., Constraint]] = {
    "circle": Circle,
    "sphere": Sphere,
    "orthogonal": Orthogonal,
}


def slug(name: str) -> str:
    """A name as a file name."""
    return "".join(c if c.isalnum() or c in "-.=" else "_" for c in name)


def described(value: Any) -> Any:
    """A description as nested dictionaries, without the quiet fields that have their default value."""
    if is_dataclass(value):
        own = [(f, getattr(value, f.name)) for f in fields(value)]
        return {
            f.name: described(v) for f, v in own if not ("quiet" in f.metadata and v == _usual(f))
        }
    if isinstance(value, Mapping):
        return {k: described(v) for k, v in value.items()}
    return [described(v) for v in value] if isinstance(value, tuple | list) else value


def _usual(f: "Field[Any]") -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


@dataclass(frozen=True)
class Arm:
    """One method of an experiment. ``constraints`` maps a glob to (kind, arguments...).

    Without a ``method``, it is `Langevin` with the settings here. Otherwise it is Adam ("adam"), or the
    partitioned method of `holonomic.methods` of that name with ``settings`` besides ``lr``. Another arm
    may train the ``first_epochs``. ``gaussian`` is the spread of the initial weights, if not torch's."""

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
    method: str = field(default="", metadata=QUIET)
    settings: Mapping[str, Any] = field(default_factory=dict, metadata=QUIET)
    gaussian: float = field(default=0.0, metadata=QUIET)
    first: "Arm | None" = field(default=None, metadata=QUIET)
    first_epochs: int = field(default=0, metadata=QUIET)

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return slug(self.name)

    def at(self, epoch: int) -> "Arm":
        """The arm that trains after so many epochs."""
        return self.first if self.first is not None and epoch < self.first_epochs else self

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


#: Fields of an experiment that decide no number.
_SHOWN = frozenset(
    "title setting figures claims paper notes metrics panels in_steps axes chapter".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Experiment:
    """Everything that defines a run. ``runs`` replicas share one draw of the data, and ``draws`` more
    have a draw of their own each; all arms see the same draws, initializations and data orders.

    ``starts`` is the number of different initializations, if it is not one per replica. Weights are
    counted after the epochs of ``snapshots``, and at the end. ``panels`` (title, arms) divide the
    pictures of curves, whose axis counts steps if ``in_steps``; ``axes`` are the two settings, across
    and up, over which the arms form a map."""

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
    starts: int = field(default=0, metadata=QUIET)
    snapshots: tuple[int, ...] = field(default=(), metadata=QUIET)
    panels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    in_steps: bool = False
    axes: tuple[str, str] | None = None
    chapter: int = 4

    def config(self) -> dict[str, Any]:
        """What decides the numbers: two runs with equal config give equal results (on another machine,
        or without compiled kernels, up to rounding and what training makes of it)."""
        return {k: v for k, v in described(self).items() if k not in _SHOWN}


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


#: Chapters of the thesis, and what they are about.
CHAPTERS = {3: "partitioned methods", 4: "constraints (also of the ICML paper)"}
#: Figures and tables that are measured in the run of another.
ALIASES = {"fig2": "fig1", "table1": "fig1", "fig4.11": "table4.5", "fig3.5": "fig3.4"}


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
