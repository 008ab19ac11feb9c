"""Finding files: in $HOLONOMIC_DATA, the user's cache, known system folders, or the network.

Every file is checked by its sha256 before it is used, wherever it comes from."""

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holonomic.errors import HolonomicError

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
    files: list[Remote], system: tuple[str, ...] = (), progress: Progress | None = None
) -> list[Path]:
    """The paths of the files of a data set, fetched into the cache if they are nowhere else.

    Raises `DataError` if a file is found with another sum (it is not used), or cannot be had."""
    given = os.environ.get("HOLONOMIC_DATA")
    folders = ([Path(given)] if given else []) + [cache_folder()]
    paths = []
    for remote in files:
        places = [folder / remote.relative for folder in folders]
        places += [Path(folder) / remote.name for folder in system]
        known = next((p for p in places if p.is_file()), None)
        if known is not None:
            _require_sum(known, remote)
        paths.append(known or _download(remote, files, progress))
    return paths


def _require_sum(path: Path, remote: Remote) -> None:
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


def _download(remote: Remote, files: list[Remote], progress: Progress | None) -> Path:
    """Fetch beside the place, check, then rename: a reader never sees half a file."""
    target = cache_folder() / remote.relative
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{remote.name}.")
    part = Path(name)
    try:
        with (
            os.fdopen(handle, "wb") as out,
            urllib.request.urlopen(remote.url, timeout=30) as source,
        ):
            total, done = int(source.headers.get("Content-Length") or 0), 0
            while block := source.read(1 << 18):
                out.write(block)
                done += len(block)
                if progress is not None:
                    progress(remote.name, done, total)
        _require_sum(part, remote)
        os.replace(part, target)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        wanted = "\n".join(f"  {cache_folder() / f.relative}   from {f.url}" for f in files)
        raise DataError(
            f"{remote.name} cannot be fetched ({error}). Without a network, put these files in "
            f"place, or point HOLONOMIC_DATA to a folder that has them under "
            f"{remote.folder}/:\n{wanted}"
        ) from None
    finally:
        part.unlink(missing_ok=True)
    return target
