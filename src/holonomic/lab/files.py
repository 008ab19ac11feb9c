"""Files that are written whole or not at all."""

import io
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch


@contextmanager
def writing(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A file beside the place (its path and handle) that is renamed to it at the end, or removed if
    anything fails: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as f:
            yield part, f
            f.flush()
            os.fsync(f.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes whole or not at all."""
    with writing(path) as (_, f):
        f.write(data)


def write_text(path: Path, text: str) -> None:
    """Write text whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all; NaN becomes null."""
    write_text(path, json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if abs(value) != float("inf") and value == value else None
    return value


def save_checkpoint(path: Path, value: dict[str, Any]) -> None:
    """Save with `torch.save`; the checkpoint before it is kept as ``<name>.previous``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if path.exists():
        os.replace(path, previous(path))
    write_bytes(path, buffer.getvalue())


def previous(path: Path) -> Path:
    """Where the last but one checkpoint is."""
    return path.with_name(path.name + ".previous")


def load_checkpoint(path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest checkpoint that can be read, and a warning for each that cannot (set aside)."""
    warnings: list[str] = []
    for candidate in (path, previous(path)):
        if not candidate.exists():
            continue
        try:
            return torch.load(candidate, weights_only=True), warnings
        except Exception as error:  # whatever a damaged file makes torch raise
            aside = candidate.with_name(candidate.name + ".corrupt")
            os.replace(candidate, aside)
            reason = str(error).splitlines()[0][:120]
            warnings.append(
                f"{candidate} cannot be read ({type(error).__name__}: {reason}); it is kept as "
                f"{aside.name}, and the run goes on from the last good one."
            )
    return None, warnings
