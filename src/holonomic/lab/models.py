"""Plain networks."""

import difflib
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from holonomic.errors import SettingError


def mlp(*widths: int) -> nn.Sequential:
    """A ReLU network: ``mlp(2, 500, 1)`` has layers "0" (2 to 500) and "2" (500 to 1)."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def image_mlp(*widths: int) -> nn.Sequential:
    """A ReLU network on images: ``image_mlp(784, 1000, 10)`` has layers "1" and "3"."""
    return nn.Sequential(nn.Flatten(), *mlp(*widths))


class Block(nn.Module):
    """relu(x + conv(relu(conv(x)))), each convolution with batch norm; a 1 x 1 convolution on the
    shortcut where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(out + self.shortcut(x))


def resnet(blocks: tuple[int, ...], width: int = 64, classes: int = 10) -> nn.Sequential:
    """A residual network in its form for images of 32 x 32: a first convolution of 3 x 3, stages of
    ``blocks`` blocks with doubled width and halved size, and the mean over the image."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels = width
    for stage, count in enumerate(blocks):
        for k in range(count):
            wider = width * 2**stage
            layers.append(Block(channels, wider, stride=2 if stage and not k else 1))
            channels = wider
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def resnet8(classes: int = 10) -> nn.Sequential:
    """Three blocks of 16, 32 and 64 channels."""
    return resnet((1, 1, 1), 16, classes)


def resnet18(classes: int = 10) -> nn.Sequential:
    """ResNet-18 for 32 x 32."""
    return resnet((2, 2, 2, 2), 64, classes)


def resnet34(classes: int = 10) -> nn.Sequential:
    """ResNet-34 for 32 x 32."""
    return resnet((3, 4, 6, 3), 64, classes)


def vgg11(classes: int = 10, batch_norm: bool = True) -> nn.Sequential:
    """VGG-11 for 32 x 32: eight convolutions, five times halved, one linear layer."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(nn.Conv2d(channels, width, 3, padding=1))
        layers += [nn.BatchNorm2d(width)] if batch_norm else []
        layers.append(nn.ReLU())
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


class TransformerLM(nn.Module):
    """A small language model: embedding, sinusoidal positions, encoder layers that see no word to
    come (attention, feed-forward, layer norms), and a linear layer to the words. Input (batch,
    length), output (batch, length, words)."""

    positions: Tensor

    def __init__(
        self,
        words: int,
        width: int = 200,
        heads: int = 2,
        hidden: int = 200,
        layers: int = 2,
        dropout: float = 0.2,
        longest: int = 512,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, words)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("positions", _sinusoids(longest, width), persistent=False)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        scaled = self.embedding(words) * math.sqrt(self.embedding.embedding_dim)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        x = self.dropout(scaled + self.positions[:length])
        return self.output(self.encoder(x, mask, is_causal=True))


def _sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines of wavelengths from 2 pi to 20,000 pi."""
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = torch.arange(length).unsqueeze(1) * rate
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)[:, :width]


#: Models by name.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": image_mlp,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "vgg11": vgg11,
    "transformer": TransformerLM,
}


def model(name: str, *arguments: Any) -> nn.Module:
    """A new model; an unknown name suggests the nearest."""
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.3) or list(MODELS)
        raise SettingError(f"there is no model {name!r}; did you mean {', '.join(near)}?")
    return MODELS[name](*arguments)
