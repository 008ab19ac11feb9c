"""Fashion-MNIST: the paper's protocol, and what it left for later."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holonomic.lab.experiment import ALIASES, Claim, recipe
from holonomic.lab.real import Method, RealExperiment, Search, Source
from holonomic.units import from_paper

ALIASES["fig4.10"] = "fig7"

Constraints = Mapping[str, tuple[Any, ...]]

_PAPER_UNITS: dict[str, Any] = from_paper(h=0.3, gamma=1.0)


def _on(kind: str, first: float, last: float, *options: Any) -> Constraints:
    """A constraint of both layers, with their radii."""
    return {"1.weight": (kind, first, *options), "3.weight": (kind, last, *options)}


def _sgd(h: float, momentum: float, weight_decay: float = 0.0) -> Method:
    decay = f", WD {weight_decay:g}" if weight_decay else ""
    name = f"SGD-m h={h:g} mom={momentum:g}{decay}"
    return Method(name, lr=h, momentum=momentum, weight_decay=weight_decay)


C_COLA = Method("c-CoLA-ud", **_PAPER_UNITS, constraints=_on("circle", 0.05, 0.1))
SGD = _sgd(0.1, 0.8)
SGD_WD = _sgd(0.1, 0.8, 1e-4)

_SETTING = (
    "Fashion-MNIST, the 10,000 images of the test files for training and the 60,000 of the training "
    "files for testing, pixels normalized; ReLU network with one hidden layer of 1000 nodes, cross "
    "entropy, batches of 128; c-CoLA-ud with h = 0.3, gamma = 1, r0 = 0.05, r1 = 0.1, temperature 0"
)


_BETTER = {"test_accuracy": "is more accurate", "test_loss": "has a lower test loss"}


def _beats(better: Method, worse: Method, metric: str, text: str) -> Claim:
    return Claim(text, metric, better.name, worse.name)


@recipe
def fig7() -> RealExperiment:
    """Figures 7 and 4.10: circle constraints against SGD with momentum and weight decay."""
    others = tuple(_sgd(0.1, 0.8, wd) for wd in (5e-5, 1e-5))
    return RealExperiment(
        id="fig7",
        title="magnitude constraints on Fashion-MNIST (Figures 7 and 4.10)",
        setting=_SETTING,
        data=Source("fashion-mnist", batch=128, swapped=True),
        model=("mlp", 784, 1000, 10),
        arms=(C_COLA, SGD, SGD_WD, *others),
        epochs=400,
        runs=5,
        draws=0,
        metrics=("test_accuracy", "test_loss", "output_weight", "ece"),
        shown=("train_loss", "test_loss", "test_accuracy", "output_weight"),
        claims=(
            _beats(C_COLA, SGD, "test_accuracy", "c-CoLA-ud is more accurate than SGD-m"),
            _beats(C_COLA, SGD, "test_loss", "c-CoLA-ud has a lower test loss than SGD-m"),
            *(
                _beats(C_COLA, arm, metric, f"c-CoLA-ud {words} than {arm.name}")
                for arm in (SGD_WD, *others)
                for metric, words in _BETTER.items()
            ),
            _beats(C_COLA, SGD, "output_weight", "the output weights of c-CoLA-ud stay smaller"),
        ),
        paper={
            C_COLA.name: {"test_accuracy": 87.63, "test_loss": 0.386},
            SGD.name: {"test_accuracy": 87.39, "test_loss": 0.824},
            SGD_WD.name: {"test_accuracy": 87.47, "test_loss": 0.531},
            others[0].name: {"test_accuracy": 87.29},
            others[1].name: {"test_accuracy": 87.45},
        },
        notes="The paper says that 10K images are for training and the remaining 60K for testing, "
        "not which; further draws of the data shuffle all 70,000. It does not speak of "
        "normalization.",
    )


#: Table 4.3: accuracy and loss without weight decay, then with 1e-4, by step size and momentum.
_TABLE = {
    (0.2, 0.8): (87.18, 1.06, 84.05, 0.696),
    (0.2, 0.7): (87.38, 0.890, 87.0, 0.547),
    (0.1, 0.9): (86.97, 1.133, 85.35, 0.634),
    (0.1, 0.8): (87.39, 0.824, 87.47, 0.531),
    (0.1, 0.7): (87.39, 0.750, 87.25, 0.517),
    (0.05, 0.95): (86.67, 1.226, 85.63, 0.623),
    (0.05, 0.9): (87.33, 0.837, 86.24, 0.569),
    (0.05, 0.8): (87.27, 0.719, 87.33, 0.511),
}


@recipe
def table4_3() -> RealExperiment:
    """Table 4.3: SGD with momentum over its settings, against the circle constraint."""
    paper = {C_COLA.name: {"test_accuracy": 87.63, "test_loss": 0.386}}
    arms = [C_COLA]
    for (h, momentum), numbers in _TABLE.items():
        for weight_decay, (accuracy, loss) in zip(
            (0.0, 1e-4), (numbers[:2], numbers[2:]), strict=True
        ):
            arms.append(_sgd(h, momentum, weight_decay))
            paper[arms[-1].name] = {"test_accuracy": accuracy, "test_loss": loss}
    return replace(
        fig7(),
        id="table4.3",
        title="SGD-m over its settings on Fashion-MNIST (Table 4.3)",
        arms=tuple(arms),
        claims=(),
        paper=paper,
        runs=1,
        records=10,
        notes="One run a setting; fig7 tells how much runs differ.",
    )


#: Rows of these norms hold what circles of r0 = 0.05 and r1 = 0.1 do: r sqrt(n / 2) for n weights.
_RADII = (1.0, 2.2)
_TEMPERATURE = 1e-7


@recipe
def sphere() -> RealExperiment:
    """Spheres instead of circles, which the paper left for future work."""
    bounded = Method("s-CoLA-ud", **_PAPER_UNITS, constraints=_on("sphere", *_RADII))
    fixed = replace(bounded, name="s-CoLA-ud, no slack", constraints=_on("sphere", *_RADII, False))
    warm = [
        replace(arm, name=f"{arm.name}, tau={_TEMPERATURE:g}", temperature=_TEMPERATURE)
        for arm in (bounded, fixed)
    ]
    return replace(
        fig7(),
        id="sphere",
        title="sphere constraints on Fashion-MNIST, with and without slack and temperature",
        setting=f"{_SETTING}; s-CoLA-ud with the same h and gamma, r0 = {_RADII[0]:g}, "
        f"r1 = {_RADII[1]:g}; no slack is explicit weight normalization",
        arms=(bounded, fixed, *warm, C_COLA, SGD, SGD_WD),
        runs=2,
        records=10,
        claims=(
            _beats(bounded, SGD, "test_accuracy", "s-CoLA-ud is more accurate than SGD-m"),
            _beats(bounded, SGD, "test_loss", "s-CoLA-ud has a lower test loss than SGD-m"),
            _beats(bounded, C_COLA, "test_accuracy", "s-CoLA-ud is more accurate than c-CoLA-ud"),
            _beats(bounded, C_COLA, "test_loss", "s-CoLA-ud has a lower test loss than c-CoLA-ud"),
            _beats(bounded, fixed, "test_accuracy", "slack makes s-CoLA-ud more accurate"),
            _beats(warm[0], bounded, "test_accuracy", "temperature makes s-CoLA-ud more accurate"),
        ),
        paper={},
        notes="Not in the paper.",
    )


@recipe
def beyond() -> RealExperiment:
    """Every method at its best of four settings, measured beyond accuracy."""
    sgd = Method(
        "SGD-m",
        lr=0.1,
        momentum=0.8,
        candidates=tuple(
            {"lr": h, "momentum": m} for h, m in ((0.05, 0.9), (0.1, 0.8), (0.1, 0.9), (0.2, 0.8))
        ),
    )
    decayed = replace(
        sgd,
        name="SGD-m + WD",
        candidates=tuple(
            {"momentum": m, "weight_decay": wd}
            for m, wd in ((0.8, 1e-4), (0.8, 5e-4), (0.8, 1e-3), (0.9, 5e-4))
        ),
    )
    adamw = Method(
        "AdamW",
        lr=1e-3,
        optimizer="adamw",
        candidates=tuple(
            {"lr": lr, "weight_decay": wd} for lr in (3e-4, 1e-3) for wd in (1e-2, 1e-1)
        ),
    )
    circles = tuple(
        {"constraints": _on("circle", *r)}
        for r in ((0.05, 0.1), (0.03, 0.1), (0.1, 0.1), (0.05, 0.2))
    )
    spheres = tuple(
        {"constraints": _on("sphere", *r)} for r in ((1.0, 2.2), (0.6, 2.2), (2.0, 2.2), (1.0, 4.4))
    )
    both = {"1.weight": ("orthogonal",), "3.weight": ("orthogonal",)}
    first = {"1.weight": ("orthogonal",)}
    orthogonal = tuple(
        {"constraints": where, "lr": lr} for where in (first, both) for lr in (0.09, 0.03)
    )
    arms = (
        sgd,
        decayed,
        adamw,
        Method("c-CoLA-ud", **_PAPER_UNITS, candidates=circles),
        Method("s-CoLA-ud", **_PAPER_UNITS, candidates=spheres),
        Method("o-CoLA-ud", **_PAPER_UNITS, candidates=orthogonal),
    )
    metrics = ("test_accuracy", "test_loss", "ece", "lipschitz", "safe_radius")
    return replace(
        fig7(),
        id="beyond",
        title="accuracy, calibration and Lipschitz bounds on Fashion-MNIST, every method at its best",
        setting="Fashion-MNIST as in fig7; every method takes the best of four settings, found in "
        "20 epochs on 8,000 of the training images by the accuracy on the other 2,000; then it is "
        "trained on all 10,000",
        arms=arms,
        epochs=50,
        runs=3,
        records=10,
        search=Search(epochs=20, runs=1, validation=2000),
        metrics=metrics,
        shown=("train_loss", "test_loss", "test_accuracy"),
        claims=tuple(
            _beats(arm, other, metric, f"{arm.name} {words} than {other.name}")
            for arm in arms[3:]
            for other in arms[:3]
            for metric, words in (
                ("test_accuracy", "is more accurate"),
                ("ece", "is better calibrated"),
                ("lipschitz", "has a lower Lipschitz bound"),
            )
        ),
        paper={},
        notes="Not in the paper. The Lipschitz bound is the product of the layers' spectral norms, in "
        "units of normalized pixels; an image is sure to keep its class within its safe radius, "
        "margin / (sqrt(2) bound). The test images take no part in the search.",
    )
