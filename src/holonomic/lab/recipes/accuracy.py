"""Chapter 3 of the thesis: how accurate partitioned methods are, on spirals, curves and tables."""

from dataclasses import replace
from typing import Any

from holonomic.lab.experiment import Arm, Experiment, recipe
from holonomic.lab.problem import Data, Stored
from holonomic.lab.recipes.chapter3 import (
    accuracies,
    adam,
    adlala,
    beats,
    chapter3,
    lol,
    sgd,
    sgd_m,
    sgld,
    shallow,
    spiral,
    trigonometric,
)


# ---------------------------------------------------------------------- accuracy
@recipe
def fig3_9() -> Experiment:
    """Figure 3.9: Adam and AdLaLa on the four-turn spiral with p = 1."""
    widths = shallow(500)
    arms = (
        adam(widths, 0.005, gaussian=0.5),
        adlala(
            widths,
            h=0.1,
            gamma=0.03,
            tau=1e-4,
            tau2=1e-5,
            sigma=0.01,
            epsilon=0.1,
            gaussian=0.01,
        ),
    )
    return chapter3(
        "fig3.9",
        "classifiers of Adam and AdLaLa (Figure 3.9)",
        "4-turn spiral with p = 1 in (3.32); ReLU network with one hidden layer of 500 nodes; Adam h = "
        "0.005 from weights N(0, 0.5^2), AdLaLa h = 0.1, tau1 = 1e-4, tau2 = 1e-5, gamma2 = 0.03, "
        "sigma_A = 0.01, epsilon = 0.1 from N(0, 0.01^2)",
        spiral(4, power=1.0),
        arms,
        60_000,
        figures=("boundaries", "curves", "slopes"),
        metrics=("test_accuracy", "test_loss", "slope"),
        claims=(
            beats("AdLaLa", "Adam"),
            beats("AdLaLa", "Adam", "test_loss", "AdLaLa has a lower test loss than Adam"),
            beats("AdLaLa", "Adam", "slope", "AdLaLa changes class less sharply than Adam"),
        ),
        notes="Biases begin as torch makes them. Classifiers are those of the last step; the thesis "
        "averages them over the last ten.",
    )


@recipe
def fig3_10() -> Experiment:
    """Figure 3.10: one setting of AdLaLa against many of SGD, SGLD and Adam."""
    widths = shallow(100)
    steps = (0.1, 0.2, 0.4)
    panels = []
    for sigma in (0.0, 0.005, 0.01, 0.05, 0.1):
        name = f"SGLD sigma={sigma:g}" if sigma else "SGD"
        panels.append((name, tuple(sgld(widths, h, sigma, f"{name}, h={h:g}") for h in steps)))
    adams = tuple(adam(widths, h, f"Adam, h={h:g}") for h in (0.001, 0.005, 0.01, 0.05))
    panels.append(("Adam", adams))
    ours = adlala(widths, h=0.25, gamma=0.1, tau=1e-4, sigma=0.01, epsilon=0.05)
    others = tuple(arm for _, group in panels for arm in group)
    return chapter3(
        "fig3.10",
        "AdLaLa against grids of SGD, SGLD and Adam (Figure 3.10)",
        "4-turn spiral; ReLU network with one hidden layer of 100 nodes; AdLaLa h = 0.25, tau = 1e-4, "
        "gamma = 0.1, sigma_A = 0.01, epsilon = 0.05",
        spiral(4),
        (ours, *others),
        20_000,
        figures=("curves", "finals"),
        panels=tuple((name, (ours.name, *(arm.name for arm in group))) for name, group in panels),
        claims=tuple(beats("AdLaLa", arm.name) for arm in others),
        notes="The thesis says that AdLaLa is ahead of every setting; step sizes of the others and the "
        "number of steps stand in its pictures only.",
    )


def _trig(
    id: str, a: int, steps: int, arms: tuple[Arm, ...], setting: str, **more: Any
) -> Experiment:
    return chapter3(
        id,
        f"trigonometric data with a = {a} (Figure {id.removeprefix('fig')})",
        f"trigonometric data (3.33) with a = {a}, b = 1, c = 0.02; ReLU network with one hidden layer "
        f"of 100 nodes; {setting}",
        trigonometric(a, 1, batch=50),
        arms,
        steps,
        records=100,
        figures=("boundaries", "curves"),
        metrics=("test_accuracy", "test_loss", "steps_to_90"),
        **more,
    )


@recipe
def fig3_11() -> Experiment:
    """Figure 3.11: trigonometric data with a = 6."""
    widths = shallow(100)
    faster = "reaches 90 % in fewer steps than Adam"
    return _trig(
        "fig3.11",
        6,
        20_000,
        (
            sgd(widths, 0.1),
            adam(widths, 0.01),
            lol(widths, h=0.1, gamma=0.01, tau=1e-3),
            adlala(widths, h=0.2, gamma=10, tau=1e-4, sigma=1e-3, epsilon=0.1),
        ),
        "SGD h = 0.1, Adam h = 0.01, LOL h = 0.1, gamma1 = 0.01, tau1 = 1e-3, AdLaLa h = 0.2, tau = "
        "1e-4, gamma = 10, sigma_A = 1e-3, epsilon = 0.1",
        claims=(
            beats("AdLaLa", "Adam", "steps_to_90", f"AdLaLa {faster}"),
            beats("LOL", "Adam", "steps_to_90", f"LOL {faster}"),
            beats("AdLaLa", "Adam", "test_loss", "AdLaLa has a lower test loss than Adam"),
        ),
        notes="The thesis: Adam needs almost three times the steps of AdLaLa to 90 %. A run that never "
        "reaches 90 % counts with all its steps. SGD is an addition.",
    )


@recipe
def fig3_12() -> Experiment:
    """Figure 3.12: trigonometric data with a = 10."""
    widths = shallow(100)
    return _trig(
        "fig3.12",
        10,
        100_000,
        (
            adam(widths, 0.005),
            sgld(widths, 0.1, 0.01),
            lol(widths, h=0.1, gamma=0.01, tau=1e-3),
            adlala(widths, h=0.1, gamma=5, tau=1e-4, sigma=1e-3, epsilon=0.1),
        ),
        "Adam h = 0.005, SGLD h = 0.1, sigma = 0.01, LOL h = 0.1, gamma1 = 0.01, tau1 = 1e-3, AdLaLa h "
        "= 0.1, tau = 1e-4, gamma = 5, sigma_A = 1e-3, epsilon = 0.1",
        claims=(
            beats("AdLaLa", "Adam"),
            beats("LOL", "Adam"),
            beats("AdLaLa", "SGLD"),
            beats("LOL", "SGLD"),
        ),
        paper=accuracies({"Adam": 73}),
        notes="The thesis sees Adam halt after 40,000 steps. It does not say Adam's "
        "step here; 0.005 is what it uses elsewhere.",
    )


@recipe
def fig3_13() -> Experiment:
    """Figure 3.13: overfitting."""
    widths = shallow(500)
    less = "overfits less than SGD (rise of the test loss above its minimum)"
    return chapter3(
        "fig3.13",
        "overfitting on few noisy points (Figure 3.13)",
        "2-turn spiral with c = 0.1; ReLU network with one hidden layer of 500 nodes; SGD h = 0.1, Adam "
        "h = 0.005, LOL h = 0.1, gamma1 = 1, tau1 = 1e-6, AdLaLa h = 0.1, tau1 = 1e-4, tau2 = 1e-8, "
        "gamma = 1000, sigma_A = 0.01, epsilon = 0.1",
        spiral(2, noise=0.1, train=200, test=4000, batch=10),
        (
            sgd(widths, 0.1),
            adam(widths, 0.005),
            lol(widths, h=0.1, gamma=1, tau=1e-6),
            adlala(widths, h=0.1, gamma=1000, tau=1e-4, tau2=1e-8, sigma=0.01, epsilon=0.1),
        ),
        50_000,
        figures=("boundaries", "curves"),
        metrics=("test_accuracy", "test_loss", "loss_rise"),
        claims=(
            beats("LOL", "SGD", "loss_rise", f"LOL {less}"),
            beats("AdLaLa", "SGD", "loss_rise", f"AdLaLa {less}"),
            beats("LOL", "SGD", "test_loss", "LOL has a lower test loss than SGD"),
            beats("AdLaLa", "SGD", "test_loss", "AdLaLa has a lower test loss than SGD"),
        ),
        notes="Size of batches and number of steps are not said in the thesis.",
    )


@recipe
def fig3_14() -> Experiment:
    """Figure 3.14: how much accuracies vary over 100 runs."""
    widths = shallow(20)
    small: dict[str, Any] = {"gaussian": 0.01}
    usual: dict[str, Any] = {"h": 0.25, "gamma": 0.5, "tau": 1e-4, "sigma": 0.01, "epsilon": 0.1}
    arms = (
        sgd(widths, 0.25, **small),
        adam(widths, 0.005, **small),
        adam(widths, 0.005, "Adam, torch's init"),
        lol(widths, h=0.25, gamma=0.01, tau=1e-3, **small),
        adlala(widths, **usual, **small),
        adlala(widths, **usual, name="AdLaLa, torch's init"),
    )
    theirs, ours = arms[:3], ("LOL", "AdLaLa")
    return chapter3(
        "fig3.14",
        "the spread of accuracies over 100 runs (Figure 3.14)",
        "2-turn spiral; ReLU network with one hidden layer of 20 nodes, weights from N(0, 0.01^2) or as "
        "torch makes them; SGD h = 0.25, Adam h = 0.005, LOL h = 0.25, gamma1 = 0.01, tau1 = 1e-3, "
        "AdLaLa h = 0.25, tau = 1e-4, gamma = 0.5, sigma_A = 0.01, epsilon = 0.1",
        spiral(2, points=500, batch=10),
        arms,
        20_000,
        runs=100,
        draws=20,
        figures=("finals", "curves"),
        metrics=("test_accuracy", "deviation"),
        claims=tuple(
            beats(better, arm.name, "deviation", f"{better} varies less than {arm.name}")
            for better in ours
            for arm in theirs
        )
        + tuple(beats(better, arm.name) for better in ours for arm in theirs),
        notes="Deviation is the distance of a run's accuracy from the median of all. Biases begin as "
        "torch makes them; the number of steps is not said in the thesis.",
    )


@recipe
def fig3_15() -> Experiment:
    """Figure 3.15: DHSGD first, then SGD."""
    widths, data = shallow(100), spiral(4)
    panels = []
    for h in (0.05, 0.1, 0.15, 0.2):
        alone = sgd(widths, h, f"SGD h={h:g}")
        panels.append((f"SGD h = {h:g}", [alone]))
        for h1 in (0.1, 0.2, 0.4):
            start = Arm(f"DHSGD h={h1:g}", lr=h1 * h1, widths=widths, method="dhsgd")
            panels[-1][1].append(
                replace(
                    alone,
                    name=f"{start.name}, then {alone.name}",
                    first=start,
                    first_epochs=data.epochs(2_500),
                )
            )
    return chapter3(
        "fig3.15",
        "DHSGD for 2,500 steps, then SGD (Figure 3.15)",
        "4-turn spiral; ReLU network with one hidden layer of 100 nodes",
        data,
        tuple(arm for _, group in panels for arm in group),
        50_000,
        draws=0,
        figures=("curves", "finals"),
        panels=tuple((title, tuple(arm.name for arm in group)) for title, group in panels),
        claims=tuple(beats(arm.name, group[0].name) for _, group in panels for arm in group[1:]),
        paper=accuracies({"SGD h=0.2": 70}),
        notes="70 % is the thesis's number for SGD with a tuned step. The steps of DHSGD stand in its "
        "picture only; the number of nodes is not said.",
    )


@recipe
def fig3_16() -> Experiment:
    """Figure 3.16: AdLaLa over temperature and noise."""
    grid = tuple(
        adlala(
            shallow(100),
            h=0.1,
            gamma=0.03,
            tau=tau,
            tau2=1e-8,
            sigma=sigma,
            epsilon=0.1,
            name=f"tau1={tau:g}, sigma_A={sigma:g}",
        )
        for tau in (1e-6, 1e-4, 1e-2)
        for sigma in (0.0, 1e-4, 1e-3, 1e-2, 4e-2)
    )
    return chapter3(
        "fig3.16",
        "AdLaLa over temperature and noise (Figure 3.16)",
        "4-turn spiral; ReLU network with one hidden layer of 100 nodes; AdLaLa with h = 0.1, gamma2 = "
        "0.03, tau2 = 1e-8, epsilon = 0.1",
        spiral(4),
        grid,
        50_000,
        draws=0,
        figures=("map",),
        axes=("noise", "temperature"),
        claims=tuple(
            beats(f"tau1={tau:g}, sigma_A=0.04", f"tau1={tau:g}, sigma_A={sigma:g}")
            for tau in (1e-6, 1e-4)
            for sigma in (0.0, 1e-4)
        ),
        notes="The thesis: near 100 % with sigma_A = 0.04, chance with sigma_A below 1e-3, and little "
        "influence of tau1 while it is small.",
    )


# ---------------------------------------------------------------------- tables
def _table(
    id: str, name: str, data: Data, arms: tuple[Arm, ...], steps: int, setting: str, notes: str
) -> Experiment:
    others = [arm.name for arm in arms if arm.method != "adlala"]
    lower = "AdLaLa has a lower test loss than"
    return chapter3(
        id,
        f"the {name} data (Figure {id.removeprefix('fig')})",
        setting,
        data,
        arms,
        steps,
        figures=("curves", "finals"),
        claims=(
            *(beats("AdLaLa", other) for other in others),
            *(beats("AdLaLa", other, "test_loss", f"{lower} {other}") for other in others),
        ),
        notes=notes,
    )


@recipe
def fig3_18() -> Experiment:
    """Figure 3.18: the chess endgame."""
    widths = (48, 500, 200, 18)
    return _table(
        "fig3.18",
        "chess endgame",
        Stored("chess", train=22_528, test=5_528, batch=1024),
        (
            sgd_m(widths, 0.05, 0.95),
            adam(widths, 0.005),
            adlala(widths, h=0.2, gamma=0.1, tau=1e-5, tau2=1e-6, sigma=1e-3, epsilon=0.01),
        ),
        880,
        "king and rook against king, 18 classes, files and ranks one-hot; ReLU network with hidden "
        "layers of 500 and 200 nodes, cross entropy; SGD-m lr = 0.05, momentum 0.95, Adam h = 0.005, "
        "AdLaLa h = 0.2, gamma = 0.1, epsilon = 0.01, sigma_A = 1e-3, tau1 = 1e-5, tau2 = 1e-6",
        notes="How the positions are divided and coded, and the number of steps, are not said in the "
        "thesis.",
    )


@recipe
def fig3_19() -> Experiment:
    """Figure 3.19: poker hands."""
    widths = (85, 200, 10)
    usual: dict[str, Any] = {"gamma": 5, "tau": 1e-4, "tau2": 1e-6, "sigma": 1e-3, "epsilon": 0.01}
    return _table(
        "fig3.19",
        "poker hand",
        Stored("poker", train=20_000, test=5_010, batch=500),
        (
            sgd_m(widths, 0.005, 0.9),
            sgd_m(widths, 0.1, 0.9, "SGD-m, lr=0.1"),
            adam(widths, 0.005),
            adlala(widths, h=0.05, **usual),
            adlala(widths, h=0.2, name="AdLaLa, h=0.2", **usual),
        ),
        8_000,
        "poker hands (the training file), 10 classes, suits and ranks one-hot; ReLU network with one "
        "hidden layer of 200 nodes, cross entropy; SGD-m lr = 0.005, momentum 0.9, Adam h = 0.005, "
        "AdLaLa h = 0.05, gamma = 5, sigma_A = 1e-3, epsilon = 0.01, tau1 = 1e-4, tau2 = 1e-6",
        notes="How the hands are divided and coded, and the number of steps, are not said in the "
        "thesis. With its setting SGD-m stays at 50 %, the share of the largest class, for the first "
        "1,000 steps, so SGD-m and AdLaLa with larger steps are added.",
    )
