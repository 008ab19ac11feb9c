"""Tasks: what there is to learn from, how it is scored, and what is measured.

Everything is preloaded as whole tensors; a batch is an index into them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holonomic.errors import SettingError
from holonomic.lab.data import (
    Corpus,
    Dataset,
    Images,
    Progress,
    channel_statistics,
    dataset,
    windows,
)
from holonomic.lab.real.experiment import RealExperiment, Source
from holonomic.lab.real.measures import calibration_error, lipschitz_bound, margins
from holonomic.replicas import child_seed

#: Examples (or words) that are evaluated at a time: it decides the speed, not the numbers.
CHUNK = 2000

Curve = dict[str, float]
Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scores:
    """Sums over examples, so that averages do not depend on how they were divided."""

    loss: float
    correct: int
    count: int

    @property
    def mean_loss(self) -> float:
        return self.loss / self.count

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * self.correct / self.count


@torch.no_grad()
def score(model: nn.Module, pieces: list[Examples], chunk: int = CHUNK) -> Scores:
    """Cross entropy and hits, summed over every target. The model is left in training mode."""
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for x, y in pieces:
        size = max(1, chunk // (y.numel() // len(y)))
        for xb, yb in zip(x.split(size), y.split(size), strict=True):
            logits, target = model(xb).flatten(0, -2).float(), yb.flatten()
            loss += cross_entropy(logits, target, reduction="sum").item()
            correct += int((logits.argmax(1) == target).sum())
            count += len(target)
    model.train()
    return Scores(loss, correct, count)


@dataclass(frozen=True)
class ImageTask:
    """Classify images."""

    train: Examples
    test: Examples
    names: ClassVar[tuple[str, ...]] = ("test_loss", "test_accuracy")

    def curves(self, model: nn.Module) -> Curve:
        scores = score(model, [self.test])
        return {"test_loss": scores.mean_loss, "test_accuracy": scores.accuracy}

    @torch.no_grad()
    def finals(self, model: nn.Module, curves: Mapping[str, list[float]]) -> Curve:
        """The last numbers of the curves, calibration, and for plain networks a bound on the slope."""
        model.eval()
        x, y = self.test
        logits = torch.cat([model(part).float() for part in x.split(CHUNK)])
        model.train()
        finals = {name: values[-1] for name, values in curves.items()}
        finals["ece"] = 100 * calibration_error(logits, y)
        bound = lipschitz_bound(model)
        if bound is not None:
            finals["lipschitz"] = bound
            finals["safe_radius"] = margins(logits, y).median().item() / (math.sqrt(2) * bound)
        return finals


@dataclass(frozen=True)
class TextTask:
    """Predict the next word. Validation and test are cut in a fixed way, every word but the first is
    a target once, and losses are averages over words."""

    train: Examples
    valid: list[Examples]
    test: list[Examples]
    names: ClassVar[tuple[str, ...]] = ("valid_loss", "test_loss")

    def curves(self, model: nn.Module) -> Curve:
        valid, test = score(model, self.valid), score(model, self.test)
        return {"valid_loss": valid.mean_loss, "test_loss": test.mean_loss}

    def finals(self, model: nn.Module, curves: Mapping[str, list[float]]) -> Curve:
        """The lowest validation loss, and the test loss at that epoch: the test chooses nothing."""
        valid = curves["valid_loss"]
        best = min(range(len(valid)), key=valid.__getitem__)
        losses = {f"{part}_loss": curves[f"{part}_loss"][best] for part in ("valid", "test")}
        perplexities = {
            name.replace("loss", "perplexity"): math.exp(min(loss, 700))
            for name, loss in losses.items()
        }
        return {
            **losses,
            **perplexities,
            "best_epoch": curves["epoch"][best],
            **{k: curves[k][-1] for k in ("train_loss", "largest_weight", "output_weight")},
        }


Task = ImageTask | TextTask


def pieces(stream: Tensor, length: int) -> list[Examples]:
    """A stream for evaluation: whole pieces, and what is left at the end."""
    whole = windows(stream, length)
    rest = stream[whole[0].numel() :]
    return [whole] if len(rest) < 2 else [whole, (rest[None, :-1], rest[None, 1:])]


@lru_cache(maxsize=1)
def _loaded(name: str) -> Dataset:
    """A data set, kept for the jobs of this process."""
    return dataset(name)


def prefetch(e: RealExperiment, progress: Progress | None = None) -> None:
    """Fetch the data of an experiment if need be, and raise if it cannot serve."""
    _checked(e, dataset(e.data.name, progress))


def _checked(e: RealExperiment, found: Dataset) -> Images | Corpus:
    if not isinstance(found, Images | Corpus):
        raise SettingError(f"{e.id}: {e.data.name} is a table; images or text are needed.")
    if isinstance(found, Corpus) and e.draws:
        raise SettingError(
            f"{e.id}: draws is {e.draws}, and {e.data.name} has one draw only; it must be 0."
        )
    return found


def make_task(e: RealExperiment, draw: int) -> Task:
    """The task of an experiment on one draw of its data, on the experiment's device."""
    found = _checked(e, _loaded(e.data.name))
    if isinstance(found, Images):
        return _images(e, found, draw)
    device, length = torch.device(e.device), e.data.length
    words = e.data.train or len(found.train)
    if not length < words <= len(found.train):
        raise SettingError(
            f"{e.data.name}: train is {words} words; it must be more than length={length} and at most "
            f"{len(found.train)}."
        )
    train = windows(found.train[:words].to(device), length)
    valid, test = (pieces(part.to(device), length) for part in (found.valid, found.test))
    return TextTask(train, valid, test)


def _images(e: RealExperiment, found: Images, draw: int) -> ImageTask:
    (x, y), (x_test, y_test) = _drawn(
        e.data, found, child_seed(e.seed, 100 + draw) if draw else None
    )
    if e.data.normalize:
        mean, std = channel_statistics(x)
        x, x_test = (x - mean) / std, (x_test - mean) / std
    form = torch.channels_last if e.channels_last else torch.contiguous_format

    def placed(images: Tensor, classes: Tensor) -> Examples:
        return images.contiguous(memory_format=form).to(e.device), classes.to(e.device)

    return ImageTask(placed(x, y), placed(x_test, y_test))


def _drawn(source: Source, found: Images, seed: int | None) -> tuple[Examples, Examples]:
    """The images to learn from and those to be measured on, which have none in common."""
    first, second = (found.train_x, found.train_y), (found.test_x, found.test_y)
    if source.swapped:
        first, second = second, first
    if seed is not None:
        order = torch.randperm(
            len(first[0]) + len(second[0]), generator=torch.Generator().manual_seed(seed)
        )
        x, y = (torch.cat(both)[order] for both in zip(first, second, strict=True))
        cut = len(first[0])
        first, second = (x[:cut], y[:cut]), (x[cut:], y[cut:])
    train, test = source.train or len(first[0]), source.test or len(second[0])
    for what, wanted, there in (("train", train, first), ("test", test, second)):
        if wanted > len(there[0]):
            raise SettingError(
                f"{source.name}: {what} is {wanted}, and there are {len(there[0])} images."
            )
    if not 0 <= source.validation < train:
        raise SettingError(
            f"{source.name}: validation is {source.validation} of {train} training images; it must "
            f"leave some to learn from."
        )
    kept = train - source.validation
    if source.validation:
        second, test = (first[0][kept:train], first[1][kept:train]), source.validation
    return (first[0][:kept], first[1][:kept]), (second[0][:test], second[1][:test])
