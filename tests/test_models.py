"""Models: shapes, parameter counts, and no look at words to come."""

import pytest
import torch

import holonomic as hm
from holonomic.lab import models


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Counted by hand from the layers' shapes; those of ResNet-18 and -34 are the well-known ones of the
# 32 x 32 form.
@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (models.resnet8, 78_042),
        (models.resnet18, 11_173_962),
        (models.resnet34, 21_282_122),
        (models.vgg11, 9_231_114),
        (lambda: models.vgg11(batch_norm=False), 9_225_610),
    ],
)
def test_image_models(make, parameters):
    model = make().eval()
    assert count(model) == parameters
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_transformer_counts_and_sees_no_word_to_come():
    words, width, hidden = 50, 200, 200
    model = models.TransformerLM(words).eval()
    attention = 4 * (width * width + width)
    layer = attention + 2 * width * hidden + hidden + width + 2 * 2 * width
    assert count(model) == words * width + 2 * layer + width * words + words
    x = torch.randint(words, (3, 12))
    out = model(x)
    assert out.shape == (3, 12, words)
    changed = x.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % words
    torch.testing.assert_close(model(changed)[:, :7], out[:, :7], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(changed)[:, 7:], out[:, 7:])


def test_constraints_by_module_type_fit_the_transformer():
    model = models.TransformerLM(30)
    groups = hm.groups(
        model,
        {
            "encoder.*linear*.weight": hm.Circle(0.5),
            "*self_attn*": hm.Circle(1.0),
            torch.nn.LayerNorm: hm.Circle(1.0),
            "output.weight": hm.Circle(0.1),
        },
    )
    constrained = {n for g in groups if g.get("constraint") for n, _ in g["params"]}
    assert "encoder.layers.1.norm2.weight" in constrained
    assert "encoder.layers.0.self_attn.in_proj_weight" in constrained
    assert not {n for n in constrained if n.endswith("bias")}


def test_orthogonal_resnet_trains():
    torch.manual_seed(0)
    model = models.resnet8()
    rules = {"*conv*.weight": hm.Orthogonal(), "0.weight": hm.Orthogonal()}
    opt = hm.Langevin(hm.groups(model, rules), lr=0.05, momentum=0.9)
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    losses = []
    for _ in range(8):
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(g.residual < 2e-6 for g in opt.report().groups)  # 600-row Gram matrices in float32
