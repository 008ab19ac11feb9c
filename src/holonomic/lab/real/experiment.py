"""What an experiment on real data is: a complete, frozen description."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from holonomic.constraints import Constraint
from holonomic.errors import SettingError
from holonomic.groups import Rule
from holonomic.lab.experiment import CONSTRAINTS, Experiment, slug

OPTIMIZERS = ("langevin", "adamw")


@dataclass(frozen=True)
class Source:
    """A data set and how it is used.

    Images: draw 0 takes the first ``train`` and ``test`` images (0: all) in the order of the files,
    ``swapped`` takes the test files for training and the other way round, and every further draw
    shuffles all images before it takes its own. The last ``validation`` training images can be held
    out: they are then what is measured instead of the test images, which are not touched.

    Text: pieces of ``length`` words of the first ``train`` (0: all), in batches of ``batch`` pieces;
    validation and test are whole, and there is one draw only.
    """

    name: str
    batch: int
    train: int = 0
    test: int = 0
    swapped: bool = False
    validation: int = 0
    normalize: bool = True
    augment: bool = False
    length: int = 35


@dataclass(frozen=True)
class Method:
    """One arm. ``constraints`` maps a name, a glob or ``type:LayerNorm`` to (kind, arguments...).

    ``candidates`` are settings to choose from in the experiment's search."""

    name: str
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    temperature: float = 0.0
    scheme: str = "OBA"
    optimizer: str = "langevin"
    constraints: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    candidates: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise SettingError(
                f"{self.name}: optimizer is {self.optimizer!r}; it must be one of {OPTIMIZERS}."
            )
        if self.optimizer == "adamw" and (self.constraints or self.temperature):
            raise SettingError(f"{self.name}: AdamW has no constraints and no temperature.")

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return slug(self.name)

    def rules(self) -> dict[Rule, Constraint]:
        """The constraints as rules for `holonomic.groups`."""
        return {
            _rule(key): CONSTRAINTS[kind](*args) for key, (kind, *args) in self.constraints.items()
        }


def _rule(key: str) -> Rule:
    kind, _, name = key.rpartition("type:")
    return key if key == name and not kind else getattr(nn, name)


@dataclass(frozen=True)
class Search:
    """How every arm finds the best of its candidates: ``runs`` runs of ``epochs`` epochs, measured
    on ``validation`` training images that are held out, by ``metric`` at the end."""

    epochs: int
    runs: int
    validation: int
    metric: str = "test_accuracy"


@dataclass(frozen=True)
class RealExperiment(Experiment):
    """An experiment on real data. ``model`` is a name of `holonomic.lab.models.MODELS` and its
    arguments. The learning rate is multiplied by ``decay`` after each of the fractions ``milestones``
    of the epochs. ``micro`` examples are computed at a time (0: the batch); their gradients add up.

    ``amp`` (bfloat16) and ``compile`` are taken up on a GPU only, ``channels_last`` everywhere.
    ``shown`` are the curves to be drawn."""

    # What reads the other experiments' data and arms is never given this one.
    data: Source  # type: ignore[assignment]
    arms: tuple[Method, ...]  # type: ignore[assignment]
    model: tuple[Any, ...] = ()
    milestones: tuple[float, ...] = ()
    decay: float = 0.1
    micro: int = 0
    amp: bool = False
    channels_last: bool = False
    compile: bool = False
    search: Search | None = None
    figures: tuple[str, ...] = ("training",)
    shown: tuple[str, ...] = ("train_loss", "test_loss", "test_accuracy")

    def config(self) -> dict[str, Any]:
        """What decides the numbers."""
        return {k: v for k, v in super().config().items() if k != "shown"}

    def factor(self, epoch: int) -> float:
        """What the learning rates are multiplied by in an epoch (0 is the first)."""
        return self.decay ** sum(epoch >= round(m * self.epochs) for m in self.milestones)

    def searching(self) -> "RealExperiment":
        """The experiment that decides between candidates: an arm each, on held-out images."""
        if self.search is None:
            raise SettingError(f"{self.id} has no search.")
        arms = tuple(
            replace(arm, name=f"{arm.name} #{k}", candidates=(), **chosen)
            for arm in self.arms
            for k, chosen in enumerate(arm.candidates)
        )
        return replace(
            self,
            id=f"{self.id} (search)",
            data=replace(self.data, validation=self.search.validation),
            arms=arms,
            epochs=self.search.epochs,
            runs=self.search.runs,
            draws=0,
            claims=(),
            paper={},
            search=None,
        )
