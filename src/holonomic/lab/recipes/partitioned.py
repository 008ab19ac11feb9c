"""Chapter 3 of the thesis: temperatures, loss landscapes and weights of partitioned methods."""

from dataclasses import replace
from typing import Any

from holonomic.lab.experiment import Arm, Claim, Experiment, recipe
from holonomic.lab.problem import Data, Stored
from holonomic.lab.recipes.chapter3 import (
    Widths,
    accuracies,
    adam,
    adlala,
    beats,
    chapter3,
    lol,
    sgd,
    sgld,
    shallow,
    spiral,
    trigonometric,
)
from holonomic.units import from_paper


# ---------------------------------------------------------------------- temperature
@recipe
def fig3_1() -> Experiment:
    """Figure 3.1: Langevin dynamics over the temperature."""
    units: dict[str, Any] = from_paper(h=0.4, gamma=10)
    taus = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
    arms = tuple(
        Arm(f"tau={t:g}", widths=shallow(500), scheme="BAOAB", temperature=t, **units) for t in taus
    )
    names = [arm.name for arm in arms]
    return chapter3(
        "fig3.1",
        "Langevin dynamics over the temperature (Figure 3.1)",
        "trigonometric data (3.33) with a = 3, b = 2, c = 0.02; ReLU network with one hidden layer of "
        "500 nodes; BAOAB with h = 0.4, gamma = 10",
        trigonometric(3, 2, batch=20),
        arms,
        50_000,
        figures=("boundaries", "curves"),
        claims=tuple(map(beats, names[1:], names)),
        notes="The thesis shows that accuracy rises with the temperature; its accuracies stand in a "
        "picture, not in print. It ends at 1e-5; the two higher temperatures are an addition.",
    )


@recipe
def fig3_17() -> Experiment:
    """Figure 3.17: LOL over the temperature."""
    arms = tuple(
        lol(shallow(200), h=0.8, gamma=1, tau=t, name=f"tau={t:g}")
        for t in (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
    )
    return chapter3(
        "fig3.17",
        "LOL over the temperature (Figure 3.17)",
        "4-turn spiral; ReLU network with one hidden layer of 200 nodes; LOL with h = 0.8, gamma = 1",
        spiral(4),
        arms,
        50_000,
        figures=("boundaries", "curves"),
        claims=(
            beats("tau=1e-05", "tau=1e-06"),
            beats("tau=1e-05", "tau=0"),
            beats("tau=1e-05", "tau=0.0001"),
            beats("tau=1e-05", "tau=0.001"),
        ),
        notes="The thesis: accuracy rises with the temperature up to 1e-5, then falls, and 1e-3 is "
        "unusable. The numbers of points are not said there; they are those of Figure 3.16.",
    )


# ---------------------------------------------------------------------- loss landscapes
def _landscape(
    id: str, title: str, setting: str, data: Data, arms: tuple[Arm, ...], steps: int, **more: Any
) -> Experiment:
    usual: dict[str, Any] = {
        "runs": 20,
        "draws": 0,
        "starts": 10,
        "figures": ("lines", "planes", "curves"),
        "metrics": ("test_accuracy", "test_loss", "barrier"),
        "claims": (beats("AdLaLa", "Adam"),),
    }
    return chapter3(id, title, setting, data, arms, steps, **{**usual, **more})


_BARRIER = (
    "The barrier is the highest test loss on the straight line from the initial to the final weights, "
    "above that at the start; 0 if the start is highest. Of 20 runs, two each begin at the same "
    "weights."
)


def _two_small(widths: Widths) -> tuple[Arm, ...]:
    return (
        adam(widths, 0.005),
        adlala(widths, h=0.25, gamma=0.5, tau=1e-4, sigma=0.01, epsilon=0.1),
    )


@recipe
def fig3_3() -> Experiment:
    """Figures 3.3, left, and 3.5, left: the loss between start and end on MNIST."""
    widths = (784, 100, 10)
    arms = (
        adam(widths, 0.005),
        adlala(widths, h=0.25, gamma=0.5, tau=1e-4, sigma=0.01, epsilon=0.1),
    )
    return _landscape(
        "fig3.3",
        "the loss between start and end on MNIST (Figures 3.3 and 3.5, left)",
        "MNIST; ReLU network with one hidden layer of 100 nodes; Adam with h = 0.005, AdLaLa as in "
        "Figure 3.6",
        Stored("mnist", train=10_000, test=2_000, batch=100),
        arms,
        2_000,
        runs=10,
        starts=5,
        claims=(),
        notes="The thesis sees no barrier on MNIST; network, batches and settings are not said there. "
        + _BARRIER.replace("20 runs", "10 runs"),
    )


@recipe
def fig3_3_spiral() -> Experiment:
    """Figure 3.3, right: the loss between start and end on the spiral with one turn."""
    return _landscape(
        "fig3.3.spiral",
        "the loss between start and end on the one-turn spiral (Figure 3.3, right)",
        "1-turn spiral; ReLU network with one hidden layer of 20 nodes; methods as in Figure 3.6",
        spiral(1, points=500, batch=25),
        _two_small(shallow(20)),
        20_000,
        claims=(),
        notes="The thesis sees no barrier with one turn. " + _BARRIER,
    )


@recipe
def fig3_4() -> Experiment:
    """Figures 3.4 and 3.5, right: the loss between start and end on the spiral with two turns."""
    return _landscape(
        "fig3.4",
        "the loss between start and end on the two-turn spiral (Figures 3.4 and 3.5, right)",
        "2-turn spiral; ReLU network with one hidden layer of 20 nodes; methods as in Figure 3.6",
        spiral(2, points=500, batch=25),
        _two_small(shallow(20)),
        20_000,
        claims=(
            beats("AdLaLa", "Adam"),
            beats("AdLaLa", "Adam", "barrier", "AdLaLa's barrier is higher than Adam's"),
        ),
        paper=accuracies({"AdLaLa": 98.5, "Adam": 92.5}),
        notes="The thesis sees a barrier, and a higher one for AdLaLa; the accuracies are the mean of "
        "the two runs it shows. " + _BARRIER,
    )


# ---------------------------------------------------------------------- distributions of weights
def _four(widths: Widths, gamma: float) -> tuple[Arm, ...]:
    return (
        sgd(widths, 0.2),
        adam(widths, 0.005),
        sgld(widths, 0.1, 0.01),
        adlala(widths, h=0.25, gamma=gamma, tau=1e-4, sigma=0.01, epsilon=0.1),
    )


def _against_the_rest(arms: tuple[Arm, ...]) -> tuple[Claim, ...]:
    return tuple(beats("AdLaLa", arm.name) for arm in arms if arm.name != "AdLaLa")


_WEIGHTS = (
    "SGD h = 0.2, Adam h = 0.005, SGLD h = 0.1, sigma = 0.01, AdLaLa h = 0.25, sigma_A = 0.01, "
)


@recipe
def fig3_6() -> Experiment:
    """Figure 3.6: weights over training, two turns."""
    data = spiral(2)
    arms = _four(shallow(100), gamma=0.5)
    return chapter3(
        "fig3.6",
        "how weights spread, two-turn spiral (Figure 3.6)",
        "2-turn spiral; ReLU network with one hidden layer of 100 nodes; "
        + _WEIGHTS
        + "tau = 1e-4, epsilon = 0.1, gamma = 0.5",
        data,
        arms,
        10_000,
        snapshots=tuple(map(data.epochs, (50, 1_000))),
        figures=("weights", "curves"),
        claims=_against_the_rest(arms),
        paper=accuracies({"SGD": 96, "Adam": 99, "SGLD": 74, "AdLaLa": 99}),
        notes="Numbers of nodes and points are not said in the thesis, which shows one run.",
    )


@recipe
def fig3_7() -> Experiment:
    """Figure 3.7: weights over training, four turns."""
    arms = _four(shallow(100), gamma=0.1)
    return replace(
        fig3_6(),
        id="fig3.7",
        title="how weights spread, four-turn spiral (Figure 3.7)",
        setting=fig3_6().setting.replace("2-turn", "4-turn").replace("gamma = 0.5", "gamma = 0.1"),
        data=spiral(4),
        arms=arms,
        paper=accuracies({"SGD": 58, "Adam": 67, "SGLD": 54, "AdLaLa": 80}),
    )


@recipe
def fig3_8() -> Experiment:
    """Figure 3.8: weights at the end of 100 runs."""
    widths = shallow(20)
    usual: dict[str, Any] = {"h": 0.25, "tau": 1e-4, "sigma": 0.01, "epsilon": 0.1}
    arms = (
        sgd(widths, 0.1),
        adam(widths, 0.005),
        sgld(widths, 0.1, 0.1),
        adlala(widths, gamma=0.5, **usual),
        adlala(widths, gamma=10, name="AdLaLa, gamma=10", **usual),
    )
    return chapter3(
        "fig3.8",
        "weights and accuracies of 100 runs (Figure 3.8)",
        "2-turn spiral; ReLU network with one hidden layer of 20 nodes; SGD h = 0.1, Adam h = 0.005, "
        "SGLD h = 0.1, sigma = 0.1, AdLaLa h = 0.25, tau = 1e-4, sigma_A = 0.01, epsilon = 0.1, gamma "
        "= 0.5 or 10",
        spiral(2, points=500, batch=25),
        arms,
        10_000,
        runs=100,
        draws=20,
        snapshots=(1,),
        figures=("weights", "finals", "curves"),
        claims=_against_the_rest(arms),
        paper=accuracies(
            {"SGD": 79, "Adam": 83.7, "SGLD": 78, "AdLaLa": 93.4, "AdLaLa, gamma=10": 85.5}
        ),
    )
