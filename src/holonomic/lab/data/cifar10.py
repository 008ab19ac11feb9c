"""CIFAR-10: colour images of 32 x 32, in the binary distribution (which needs no pickle)."""

from pathlib import Path

import torch
from torch import Tensor

from holonomic.lab.data.fetch import DataError, Progress, Remote, find
from holonomic.lab.data.images import Images

_ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_SUMS = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
FILES = [Remote("cifar-10", name, sha, _ARCHIVE) for name, sha in _SUMS.items()]
_ROW = 1 + 3 * 32 * 32  # a class, then the red, green and blue planes


def cifar10(progress: Progress | None = None) -> Images:
    """CIFAR-10, 50,000 + 10,000 images in ten classes."""
    *train, test = map(read_batch, find(FILES, progress=progress, archive=_ARCHIVE))
    rows = torch.cat(train)
    return Images(*_split(rows), *_split(test))


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, 1:].reshape(-1, 3, 32, 32).float() / 255, rows[:, 0].long()


def read_batch(path: Path) -> Tensor:
    """A file of the binary form as rows of bytes: the class, then 3 x 32 x 32 pixels."""
    data = bytearray(path.read_bytes())
    if not data or len(data) % _ROW:
        raise DataError(f"{path} holds {len(data)} bytes, which are no whole images of {_ROW}.")
    return torch.frombuffer(data, dtype=torch.uint8).reshape(-1, _ROW)
