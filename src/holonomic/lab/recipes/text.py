"""Penn Treebank and WikiText-2: the small transformer."""

from dataclasses import replace
from typing import Any

from holonomic.lab.experiment import ALIASES, Claim, recipe
from holonomic.lab.real import Method, RealExperiment, Source
from holonomic.units import from_paper

ALIASES["table4.4"] = "table2"

#: Radii by kind of layer: r of the rest (the embedding), r_L linear, r_N norm, r_A attention.
_RADII = {
    "embedding.weight": ("circle", 0.5),
    "encoder.layers.*.linear?.weight": ("circle", 0.1),
    "output.weight": ("circle", 0.1),
    "type:LayerNorm": ("circle", 1.0),
    "type:MultiheadAttention": ("circle", 1.0),
}


def _c_cola(gamma: float) -> Method:
    units: dict[str, Any] = from_paper(h=0.4, gamma=gamma)
    return Method("c-CoLA-ud", **units, constraints=_RADII)


def _claims(metric: str, ours: Method, sgd: Method, decayed: Method) -> tuple[Claim, ...]:
    return (
        Claim("c-CoLA-ud has a lower validation loss than SGD-m", metric, ours.name, sgd.name),
        Claim(
            "SGD-m with WD has a lower validation loss than c-CoLA-ud",
            metric,
            decayed.name,
            ours.name,
        ),
    )


@recipe
def table2() -> RealExperiment:
    """Tables 2 and 4.4 on Penn Treebank."""
    ours = _c_cola(0.5)
    sgd = Method("SGD-m h=0.1 mom=0.8", lr=0.1, momentum=0.8)
    decayed = replace(sgd, name=f"{sgd.name}, WD 0.0001", weight_decay=1e-4)
    return RealExperiment(
        id="table2",
        title="magnitude constraints in a transformer on Penn Treebank (Tables 2 and 4.4)",
        setting="Penn Treebank, pieces of 35 words in batches of 1024; transformer with 2 encoder "
        "layers, 2 heads, width and feed-forward 200, dropout 0.2; c-CoLA-ud with h = 0.4, "
        "gamma = 0.5 and radii 0.5 (embedding), 0.1 (linear), 1 (norm), 1 (attention), temperature 0; "
        "SGD-m with the paper's best settings",
        data=Source("ptb", batch=1024),
        model=("transformer", 10_000),
        arms=(ours, sgd, decayed),
        epochs=200,
        runs=1,
        draws=0,
        micro=16,
        metrics=("valid_loss", "valid_perplexity", "test_loss", "test_perplexity"),
        shown=("train_loss", "valid_loss", "largest_weight"),
        claims=_claims("valid_loss", ours, sgd, decayed),
        paper={
            ours.name: {"valid_loss": 4.81},
            sgd.name: {"valid_loss": 4.83},
            decayed.name: {"valid_loss": 4.77},
        },
        notes="The validation loss is the lowest of all epochs, the test loss that of the same epoch; "
        "both are averages over all words. The paper trains for 200 epochs, and gives neither the "
        "length of the pieces nor the dropout.",
    )


@recipe
def table2_wikitext2() -> RealExperiment:
    """Tables 2 and 4.4 on WikiText-2."""
    ours = _c_cola(1.0)
    sgd = Method("SGD-m h=0.1 mom=0.7", lr=0.1, momentum=0.7)
    decayed = replace(sgd, name=f"{sgd.name}, WD 0.0001", weight_decay=1e-4)
    penn = table2()
    return replace(
        penn,
        id="table2-wikitext2",
        title="magnitude constraints in a transformer on WikiText-2 (Tables 2 and 4.4)",
        setting=penn.setting.replace("Penn Treebank", "WikiText-2")
        .replace("1024", "128")
        .replace("gamma = 0.5", "gamma = 1"),
        data=Source("wikitext-2", batch=128),
        model=("transformer", 33_278),
        arms=(ours, sgd, decayed),
        micro=4,
        claims=_claims("valid_loss", ours, sgd, decayed),
        paper={
            ours.name: {"valid_loss": 5.09},
            sgd.name: {"valid_loss": 5.13},
            decayed.name: {"valid_loss": 5.01},
        },
    )
