"""CIFAR-10: residual networks with orthogonal convolutions."""

import math
from dataclasses import replace

from holonomic.lab.experiment import Claim, recipe
from holonomic.lab.real import Method, RealExperiment, Source

_ORTHOGONAL = {"type:Conv2d": ("orthogonal",)}
_LR = 0.1
SGD_M = Method("SGD-m", lr=_LR, momentum=0.9)
SGD_M_WD = replace(SGD_M, name="SGD-m + WD", weight_decay=5e-4)
#: The paper's friction 0.5 at the step h = sqrt(lr); like SGD's, the momentum stays when lr decays.
O_COLA_UD = Method(
    "o-CoLA-ud", lr=_LR, momentum=math.exp(-0.5 * math.sqrt(_LR)), constraints=_ORTHOGONAL
)
SGD = Method("SGD", lr=_LR, scheme="EM")
O_COLA_OD = Method("o-CoLA-od", lr=_LR, scheme="EM", constraints=_ORTHOGONAL)


def _claim(better: Method, worse: Method, metric: str) -> Claim:
    words = "is more accurate" if metric == "test_accuracy" else "has a lower test loss"
    return Claim(f"{better.name} {words} than {worse.name}", metric, better.name, worse.name)


_SETTING = (
    "CIFAR-10, random crops (padding 4) and flips, normalized; {model} with batch norm, batches of "
    "128; lr 0.1 for all, a tenth of it {decay}; momentum 0.9, weight decay 5e-4 where said; "
    "o-CoLA-ud with gamma = 0.5; all convolutions orthogonal, as matrices of the outputs by all else; "
    "temperature 0"
)


@recipe
def fig6() -> RealExperiment:
    """Figure 6: ResNet-34 on CIFAR-10. For a GPU: `holonomic run fig6 --device cuda`."""
    return RealExperiment(
        id="fig6",
        title="orthogonal convolutions in ResNet-34 on CIFAR-10 (Figure 6)",
        setting=_SETTING.format(model="ResNet-34", decay="after 50 and 100 epochs"),
        data=Source("cifar-10", batch=128, augment=True),
        model=("resnet34",),
        arms=(SGD_M, SGD_M_WD, O_COLA_UD),
        epochs=150,
        runs=5,
        draws=0,
        milestones=(1 / 3, 2 / 3),
        amp=True,
        channels_last=True,
        compile=True,
        claims=(
            _claim(O_COLA_UD, SGD_M, "test_accuracy"),
            _claim(O_COLA_UD, SGD_M, "test_loss"),
            _claim(O_COLA_UD, SGD_M_WD, "test_accuracy"),
        ),
        notes="The paper prints curves, and does not say how strong the weight decay is.",
    )


@recipe
def fig4_9() -> RealExperiment:
    """Figure 4.9: the overdamped method, without decay of the learning rate."""
    return replace(
        fig6(),
        id="fig4.9",
        title="orthogonal convolutions, overdamped, in ResNet-34 on CIFAR-10 (Figure 4.9)",
        setting=_SETTING.format(model="ResNet-34", decay="never"),
        arms=(SGD, O_COLA_OD),
        milestones=(),
        claims=(
            _claim(O_COLA_OD, SGD, "test_loss"),
            _claim(O_COLA_OD, SGD, "test_accuracy"),
        ),
    )


@recipe
def fig6_small() -> RealExperiment:
    """Figures 6 and 4.9 in small: ResNet-8 and a part of the images, for a CPU."""
    whole = fig6()
    return replace(
        whole,
        id="fig6-small",
        title="orthogonal convolutions in ResNet-8 on a part of CIFAR-10 (Figures 6 and 4.9, reduced)",
        setting=_SETTING.format(model="ResNet-8", decay="after 3 and 6 epochs")
        + "; 10,000 training images",
        data=replace(whole.data, train=10_000),
        model=("resnet8",),
        arms=(SGD_M, SGD_M_WD, O_COLA_UD, SGD, O_COLA_OD),
        epochs=9,
        runs=3,
        records=3,
        claims=(
            *whole.claims,
            _claim(O_COLA_OD, SGD, "test_loss"),
            _claim(O_COLA_OD, SGD, "test_accuracy"),
        ),
        notes="ResNet-8 and a fifth of the training images, so that it fits a CPU: what holds here need "
        "not hold for ResNet-34.",
    )
