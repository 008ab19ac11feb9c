"""Chapter 4 of the thesis, and the ICML paper: the spiral experiments."""

from dataclasses import replace
from typing import Any

from holonomic.lab.experiment import Arm, Claim, Experiment, recipe
from holonomic.lab.problem import Spiral

TWO_TURNS = Spiral(turns=2, scale=1.0, noise=0.05, train=100, test=2000, batch=2)  # (4.59)
FOUR_TURNS = Spiral(turns=4, scale=2.0, noise=0.02, train=500, test=1000, batch=25)  # (4.58)

CIRCLES = {"0.weight": ("circle", 1.0), "2.weight": ("circle", 5.0)}
_SHALLOW: dict[str, Any] = {"lr": 0.05, "widths": (2, 500, 1)}

SGD = Arm("SGD", **_SHALLOW)
SGD_WD = Arm("SGD + WD", **_SHALLOW, weight_decay=1e-4)
C_SGD = Arm("C-SGD", **_SHALLOW, constraints=CIRCLES)
SGLD = Arm("SGLD", **_SHALLOW, temperature=5e-5)
C_SGLD = Arm("C-SGLD", **_SHALLOW, temperature=5e-5, constraints=CIRCLES)
FIVE = (SGD, SGD_WD, C_SGD, SGLD, C_SGLD)

_NETWORK = (
    "2-turn spiral (4.59), 100 training and 2000 test points, batches of 2; ReLU network with one "
    "hidden layer of 500 nodes, binary cross entropy"
)


def _beats(better: str, worse: str, metric: str, text: str) -> Claim:
    return Claim(text, metric, better, worse)


@recipe
def fig1() -> Experiment:
    """Figures 1 and 2: five methods on the two-turn spiral."""
    return Experiment(
        id="fig1",
        title="noise and magnitude constraints on the two-turn spiral (Figures 1 and 2)",
        setting=f"{_NETWORK}; h = 0.05 for all, weight decay 1e-4, circles r0 = 1, r1 = 5, temperature "
        "5e-5",
        data=TWO_TURNS,
        arms=FIVE,
        epochs=10_000,
        runs=30,
        draws=30,
        figures=("boundaries", "curves", "curvature", "slopes"),
        metrics=("test_accuracy", "test_loss", "curvature_mean", "curvature_median"),
        claims=(
            _beats("C-SGLD", "SGD", "test_accuracy", "C-SGLD is more accurate than SGD"),
            _beats("C-SGLD", "SGD", "test_loss", "C-SGLD has a lower test loss than SGD"),
            _beats("C-SGD", "SGD", "test_loss", "C-SGD has a lower test loss than SGD"),
            _beats("C-SGLD", "SGLD", "test_accuracy", "C-SGLD is more accurate than SGLD"),
            _beats("C-SGLD", "SGD + WD", "test_accuracy", "C-SGLD is more accurate than SGD + WD"),
            _beats(
                "C-SGD", "SGD", "curvature_mean", "C-SGD has a boundary of lower curvature than SGD"
            ),
            _beats(
                "C-SGLD",
                "SGD",
                "curvature_mean",
                "C-SGLD has a boundary of lower curvature than SGD",
            ),
            _beats(
                "C-SGLD", "C-SGD", "curvature_mean", "noise lowers the curvature (C-SGLD, C-SGD)"
            ),
            _beats("C-SGD", "SGD", "slope", "C-SGD changes class less sharply than SGD"),
        ),
        paper={
            "SGD": {"test_accuracy": 81.0, "curvature_mean": 519.0},
            "SGD + WD": {"curvature_mean": 51.1},
            "C-SGD": {"curvature_mean": 9.38},
            "SGLD": {"curvature_mean": 8.73},
            "C-SGLD": {"test_accuracy": 91.7, "curvature_mean": 6.08},
        },
    )


@recipe
def fig3() -> Experiment:
    """Figure 3, left: how the size of the constraint on the input layer sets the sharpness."""
    arms = tuple(
        replace(
            C_SGLD,
            name=f"r0={r0:g}",
            constraints={"0.weight": ("circle", r0), "2.weight": ("circle", 5.0)},
        )
        for r0 in (0.5, 1.0, 2.0, 5.0)
    )
    return replace(
        fig1(),
        id="fig3",
        title="the constraint's size controls the sharpness of the classifier (Figure 3)",
        setting=f"{_NETWORK}; C-SGLD with h = 0.05, temperature 5e-5, circles r0 as named and r1 = 5",
        arms=arms,
        runs=20,
        draws=20,
        figures=("boundaries", "curves", "slopes"),
        metrics=("test_accuracy", "test_loss", "slope"),
        claims=(
            _beats("r0=0.5", "r0=1", "slope", "r0 = 0.5 is less sharp than r0 = 1"),
            _beats("r0=1", "r0=2", "slope", "r0 = 1 is less sharp than r0 = 2"),
            _beats("r0=2", "r0=5", "slope", "r0 = 2 is less sharp than r0 = 5"),
        ),
        paper={},
    )


@recipe
def table4_5() -> Experiment:
    """Table 4.5 and Figure 4.11: C-SGLD over the temperature."""
    curvatures = {0: 9.38, 1e-6: 9.01, 5e-6: 7.75, 1e-5: 7.06, 5e-5: 6.08, 1e-4: 7.62, 5e-4: 15.9}
    arms = tuple(replace(C_SGLD, name=f"tau={t:g}", temperature=float(t)) for t in curvatures)
    return replace(
        fig1(),
        id="table4.5",
        title="C-SGLD over the temperature (Table 4.5, Figure 4.11)",
        setting=f"{_NETWORK}; C-SGLD with h = 0.05, circles r0 = 1, r1 = 5",
        arms=arms,
        runs=20,
        draws=20,
        figures=("curves", "curvature"),
        metrics=("test_accuracy", "test_loss", "curvature_mean", "curvature_median"),
        claims=(
            _beats("tau=5e-05", "tau=0", "test_accuracy", "5e-5 is more accurate than no noise"),
            _beats("tau=5e-05", "tau=0.0005", "test_accuracy", "5e-5 is more accurate than 5e-4"),
            _beats(
                "tau=5e-05", "tau=0", "curvature_mean", "5e-5 has lower curvature than no noise"
            ),
            _beats(
                "tau=5e-05", "tau=0.0005", "curvature_mean", "5e-5 has lower curvature than 5e-4"
            ),
        ),
        paper={f"tau={t:g}": {"curvature_mean": c} for t, c in curvatures.items()},
    )


def _deep(p: int, name: str, **settings: Any) -> Arm:
    """An arm with p hidden layers of 100 nodes, on the four-turn spiral."""
    return Arm(f"{name}, p={p}", lr=settings.pop("lr", 0.1), widths=(2, *[100] * p, 1), **settings)


def _hidden(p: int) -> tuple[str, ...]:
    """Names of the hidden-to-hidden weights."""
    return tuple(f"{2 * k}.weight" for k in range(1, p))


def _o_cola(p: int, temperature: float = 0.0, name: str = "o-CoLA-od") -> Arm:
    constraints = dict.fromkeys(_hidden(p), ("orthogonal",))
    return _deep(
        p, name, constraints=constraints, orthogonal_init=_hidden(p), temperature=temperature
    )


_DEEP_SETTING = (
    "4-turn spiral (4.58), 500 training and 1000 test points, batches of 25; ReLU networks with p "
    "hidden layers of 100 nodes, binary cross entropy; h = 0.1; constraint, penalty or orthogonal "
    "initialization on the hidden-to-hidden layers"
)
DEPTHS = (2, 3, 4, 5)


def _by_depth(arms: tuple[Arm, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A panel a depth."""
    ends = {f"p = {p}": f", p={p}" for p in DEPTHS}
    names = [arm.name for arm in arms]
    return tuple((title, tuple(n for n in names if n.endswith(end))) for title, end in ends.items())


@recipe
def fig4() -> Experiment:
    """Figure 4: orthogonality in deep networks on the four-turn spiral."""
    arms = tuple(
        arm
        for p in DEPTHS
        for arm in (
            _deep(p, "SGD"),
            _deep(p, "SGD, orthogonal init", orthogonal_init=_hidden(p)),
            _deep(p, "SGD, penalty 0.05", penalty=0.05, penalized=_hidden(p)),
            _o_cola(p),
        )
    )
    claims = tuple(
        _beats(
            f"o-CoLA-od, p={p}",
            f"{other}, p={p}",
            "test_accuracy",
            f"p={p}: o-CoLA-od beats {other}",
        )
        for p in DEPTHS
        for other in ("SGD", "SGD, orthogonal init", "SGD, penalty 0.05")
    )
    return Experiment(
        id="fig4",
        title="orthogonality constraints in deep networks on the four-turn spiral (Figure 4)",
        setting=_DEEP_SETTING,
        data=FOUR_TURNS,
        arms=arms,
        epochs=1_500,
        runs=10,
        draws=10,
        figures=("curves",),
        panels=_by_depth(arms),
        claims=claims,
        notes="The paper claims that o-CoLA-od is best for p > 3; it prints curves, not numbers.",
    )


@recipe
def fig5() -> Experiment:
    """Figure 5: the penalty over step size and strength, against the constraint."""
    p = 5
    penalties = tuple(
        _deep(p, f"penalty {s:g}, h={h:g}", lr=h, penalty=s, penalized=_hidden(p))
        for h in (0.1, 0.05, 0.02)
        for s in (0.005, 0.05, 0.2)
    )
    return replace(
        fig4(),
        id="fig5",
        title="the soft constraint over step size and strength (Figure 5)",
        arms=(_o_cola(p), *penalties),
        panels=tuple(
            (f"h = {h:g}", (_o_cola(p).name, *(a.name for a in penalties if a.lr == h)))
            for h in (0.1, 0.05, 0.02)
        ),
        claims=tuple(
            _beats(f"o-CoLA-od, p={p}", arm.name, "test_accuracy", f"o-CoLA-od beats {arm.name}")
            for arm in penalties
        ),
    )


@recipe
def fig4_8() -> Experiment:
    """Figure 4.8: a little temperature with the orthogonality constraint."""
    warm = "o-CoLA-od tau=1e-6"
    arms = tuple(arm for p in DEPTHS for arm in (_o_cola(p), _o_cola(p, 1e-6, warm)))
    return replace(
        fig4(),
        id="fig4.8",
        title="temperature with the orthogonality constraint (Figure 4.8)",
        arms=arms,
        panels=_by_depth(arms),
        claims=tuple(
            _beats(
                f"{warm}, p={p}",
                f"o-CoLA-od, p={p}",
                "test_accuracy",
                f"p={p}: tau = 1e-6 is more accurate",
            )
            for p in DEPTHS
        ),
    )
