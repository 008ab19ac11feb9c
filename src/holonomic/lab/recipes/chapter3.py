"""What the experiments of chapter 3 share: data, methods in the thesis's units, claims.

Settings are the thesis's, in its units: h, gamma, tau, epsilon, sigma_A. SGLD's noise of strength sigma
(3.11) is a temperature of sigma^2 / 2. Adaptive friction begins at 0.1, as in the authors' published code.
"""

from dataclasses import replace
from typing import Any

from holonomic.lab.experiment import Arm, Claim, Experiment
from holonomic.lab.problem import Data, Spiral, Trigonometric
from holonomic.units import from_paper

Widths = tuple[int, ...]


# ---------------------------------------------------------------------- data, (3.32) and (3.33)
def spiral(turns: int, points: int = 1000, batch: int = 20, **changes: Any) -> Spiral:
    usual = Spiral(turns=turns, scale=2.0, noise=0.02, train=points, test=points, batch=batch)
    return replace(usual, **changes)


def trigonometric(a: float, b: float, batch: int) -> Trigonometric:
    return Trigonometric(a=a, b=b, noise=0.02, train=1000, test=1000, batch=batch)


def shallow(nodes: int) -> Widths:
    return (2, nodes, 1)


# ---------------------------------------------------------------------- methods, in the thesis's units
def sgd(widths: Widths, h: float, name: str = "SGD", **more: Any) -> Arm:
    return Arm(name, lr=h, widths=widths, **more)


def sgd_m(widths: Widths, lr: float, momentum: float, name: str = "SGD-m") -> Arm:
    return Arm(name, lr=lr, widths=widths, momentum=momentum, scheme="OBA")


def sgld(widths: Widths, h: float, sigma: float, name: str = "SGLD") -> Arm:
    return Arm(name, lr=h, widths=widths, temperature=sigma**2 / 2)


def adam(widths: Widths, h: float, name: str = "Adam", **more: Any) -> Arm:
    return Arm(name, lr=h, widths=widths, method="adam", **more)


def lol(widths: Widths, h: float, gamma: float, tau: float, name: str = "LOL", **more: Any) -> Arm:
    units = from_paper(h, gamma)
    settings = {"momentum": units["momentum"], "temperature": tau}
    return Arm(name, lr=units["lr"], widths=widths, method="lol", settings=settings, **more)


def adlala(
    widths: Widths,
    *,
    h: float,
    gamma: float,
    tau: float,
    sigma: float,
    epsilon: float,
    tau2: float | None = None,
    name: str = "AdLaLa",
    **more: Any,
) -> Arm:
    units = from_paper(h, gamma)
    settings = {
        "momentum": units["momentum"],
        "temperature": tau,
        "output_temperature": tau if tau2 is None else tau2,
        "coupling": epsilon,
        "noise": sigma,
        "friction": 0.1,
    }
    return Arm(name, lr=units["lr"], widths=widths, method="adlala", settings=settings, **more)


def beats(better: str, worse: str, metric: str = "test_accuracy", text: str = "") -> Claim:
    return Claim(text or f"{better} is more accurate than {worse}", metric, better, worse)


def chapter3(
    id: str, title: str, setting: str, data: Data, arms: tuple[Arm, ...], steps: int, **more: Any
) -> Experiment:
    """An experiment of the chapter, its length in steps: 10 runs on one draw, and 10 draws."""
    usual = {"runs": 10, "draws": 0 if data.shared else 10, "in_steps": True, "chapter": 3}
    sizes = (
        f"{data.train:,} training and {data.test:,} test points, batches of {data.batch}, "
        f"{steps:,} steps"
    )
    return Experiment(
        id=id,
        title=title,
        setting=f"{setting}; {sizes}",
        data=data,
        arms=arms,
        epochs=data.epochs(steps),
        **{**usual, **more},
    )


def accuracies(percent: dict[str, float]) -> dict[str, dict[str, float]]:
    return {name: {"test_accuracy": value} for name, value in percent.items()}
