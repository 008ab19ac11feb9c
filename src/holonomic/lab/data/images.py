"""MNIST and Fashion-MNIST: grey images of 28 x 28."""

import gzip
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from holonomic.lab.data.fetch import DataError, Progress, Remote, find

_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_FASHION = (
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
_MNIST = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)


@dataclass(frozen=True)
class Images:
    """Images in [0, 1], (N, channels, height, width), and their classes."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def fashion_mnist(progress: Progress | None = None) -> Images:
    """Fashion-MNIST, 60,000 + 10,000 images of clothes; also from Debian's dataset-fashion-mnist."""
    base = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    return _idx("fashion-mnist", base, _FASHION, ("/usr/share/datasets/fashion-mnist",), progress)


def mnist(progress: Progress | None = None) -> Images:
    """MNIST, 60,000 + 10,000 images of digits."""
    return _idx("mnist", "https://ossci-datasets.s3.amazonaws.com/mnist", _MNIST, (), progress)


def _idx(
    folder: str,
    base: str,
    sums: tuple[str, ...],
    system: tuple[str, ...],
    progress: Progress | None,
) -> Images:
    pairs = zip(_NAMES, sums, strict=True)
    files = [Remote(folder, name, sha, f"{base}/{name}") for name, sha in pairs]
    train_x, train_y, test_x, test_y = map(read_idx, find(files, system, progress))
    return Images(
        train_x.unsqueeze(1).float() / 255,
        train_y.long(),
        test_x.unsqueeze(1).float() / 255,
        test_y.long(),
    )


def read_idx(path: Path) -> Tensor:
    """A gzipped file of unsigned bytes in the IDX form: two zeros, a type, the dimensions, the data."""
    data = gzip.decompress(path.read_bytes())
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an IDX file of bytes; remove it to have it fetched again.")
    rank = data[3]
    shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
    values = bytearray(data[4 + 4 * rank :])
    if len(values) != prod(shape):
        raise DataError(f"{path} holds {len(values)} bytes and its header says {shape}.")
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)
