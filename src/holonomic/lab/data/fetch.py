"""Finding files: in $HOLONOMIC_DATA, the user's cache, known system folders, or the network.

Every file is checked by its sha256 before it is used, wherever it comes from."""

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from holonomic.errors import HolonomicError
from holonomic.lab.files import writing

Progress = Callable[[str, int, int], None]


class DataError(HolonomicError):
    """A data file is missing, altered or cannot be fetched."""


@dataclass(frozen=True)
class Remote:
    """A file of a data set: where it lies below a data folder, what it holds, where it comes from."""

    folder: str
    name: str
    sha256: str
    url: str

    @property
    def relative(self) -> str:
        return f"{self.folder}/{self.name}"


def cache_folder() -> Path:
    """Where downloads go: $XDG_CACHE_HOME/holonomic, usually ~/.cache/holonomic."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "holonomic"


def find(
    files: list[Remote],
    system: tuple[str, ...] = (),
    progress: Progress | None = None,
    archive: str | None = None,
) -> list[Path]:
    """The paths of the files of a data set, fetched into the cache if they are nowhere else: one by
    one, or all out of the tar file at the address ``archive``.

    Raises `DataError` if a file is found with another sum (it is not used), or cannot be had."""
    given = os.environ.get("HOLONOMIC_DATA")
    folders = ([Path(given)] if given else []) + [cache_folder()]
    paths = []
    for remote in files:
        places = [folder / remote.relative for folder in folders]
        places += [Path(folder) / remote.name for folder in system]
        known = next((p for p in places if p.is_file()), None)
        if known is not None:
            require_sum(known, remote)
        elif archive is None:
            known = _download(remote, files, progress)
        else:
            _download_archive(archive, files, progress)
            known = cache_folder() / remote.relative
        paths.append(known)
    return paths


def require_sum(path: Path, remote: Remote) -> None:
    """Raise `DataError` with both sums unless a file holds what it should."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != remote.sha256:
        raise DataError(
            f"{path} has the sha256 {digest.hexdigest()} and should have {remote.sha256}: it is "
            f"damaged, incomplete or another file, and is not used. Remove it to have it fetched "
            f"again, or put the right one from {remote.url} in its place."
        )


def unpack(archive: Path, files: list[Remote], folder: Path) -> None:
    """Take the files of a data set out of a tar file, each checked before it is in place.

    Members are looked up by their last name, and only what is wanted is read, to places of our own
    choosing: no path, link or device in the archive can reach anything else."""
    wanted = {remote.name: remote for remote in files}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                remote = wanted.get(Path(member.name).name)
                source = tar.extractfile(member) if remote and member.isfile() else None
                if remote is None or source is None:
                    continue
                with writing(folder / remote.relative) as (part, out):
                    shutil.copyfileobj(source, out)
                    out.flush()
                    require_sum(part, remote)
                del wanted[remote.name]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}); nothing of it is used.") from None
    if wanted:
        raise DataError(f"{archive} does not hold {', '.join(sorted(wanted))}.")


def _download(remote: Remote, files: list[Remote], progress: Progress | None) -> Path:
    """Fetch beside the place, check, then rename: a reader never sees half a file."""
    target = cache_folder() / remote.relative
    with writing(target) as (part, out):
        _copy(remote.url, remote.name, out, files, progress)
        out.flush()
        require_sum(part, remote)
    return target


def _download_archive(url: str, files: list[Remote], progress: Progress | None) -> None:
    with tempfile.TemporaryDirectory(prefix="holonomic-") as folder:
        part = Path(folder) / url.rpartition("/")[2]
        with part.open("wb") as out:
            _copy(url, part.name, out, files, progress)
        unpack(part, files, cache_folder())


def _copy(
    url: str, name: str, out: BinaryIO, files: list[Remote], progress: Progress | None
) -> None:
    try:
        with urllib.request.urlopen(url, timeout=30) as source:
            total, done = int(source.headers.get("Content-Length") or 0), 0
            while block := source.read(1 << 18):
                out.write(block)
                done += len(block)
                if progress is not None:
                    progress(name, done, total)
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        wanted = "\n".join(f"  {cache_folder() / f.relative}   from {f.url}" for f in files)
        raise DataError(
            f"{name} cannot be fetched ({error}). Without a network, put these files in "
            f"place, or point HOLONOMIC_DATA to a folder that has them under "
            f"{files[0].folder}/:\n{wanted}"
        ) from None
