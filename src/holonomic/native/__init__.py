"""Compiled kernels for what torch does in many passes over memory (see `loader` and ``kernels.cpp``).

Every function here takes tensors, checks them, and only then takes their addresses: whatever reaches a
kernel is a contiguous float32 tensor of the expected shape on the CPU, and no tensor that is written lies
in the memory of another.
"""

import ctypes
from collections.abc import Iterable, Sequence
from operator import le
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from holonomic.errors import SettingError
from holonomic.native.loader import LETTERS, Unavailable, Word, library, reason
from holonomic.philox import NUMBERS

__all__ = [
    "LETTERS",
    "Job",
    "Letter",
    "Unavailable",
    "Wrong",
    "addresses",
    "apart",
    "blocks",
    "finite",
    "fits",
    "library",
    "normal_",
    "parts",
    "reason",
    "require",
    "require_apart",
    "require_letters",
    "spans",
    "step_",
    "streams",
    "suits",
    "table",
    "word",
    "words",
]

_PLAIN = (Tensor, Parameter)
_FLOAT = torch.float32


#: Where the numbers of a tensor begin and end.
Span = tuple[int, int]


class Wrong(SettingError):
    """Tensors that no kernel may be given."""


class Letter(NamedTuple):
    """A letter of a word with its numbers: ``x`` scales the motion, ``y`` the noise, if it has any."""

    name: str
    x: float
    y: float = 0.0
    noisy: bool = False


class Job(NamedTuple):
    """A tensor to move, as rows of equal length: each a replica in flat space and on circles, each a
    sphere on spheres. ``keys`` is the stream of every replica."""

    rows: int
    q: Tensor
    v: Tensor | None
    xi: Tensor | None
    eta: Tensor | None
    g: Tensor
    keys: Tensor | None


# ---------------------------------------------------------------------- what may reach a kernel
def fits(tensors: Iterable[Tensor]) -> bool:
    """Whether there are kernels for all of some tensors: each must be a plain one (a wrapper may have no
    memory of its own), float32, on the CPU, contiguous."""
    return all(map(_fits, tensors))


def _fits(t: Tensor) -> bool:
    return (
        type(t) in _PLAIN
        and t.dtype is _FLOAT
        and t.is_cpu
        and t.is_contiguous()
        and not t.is_neg()
    )


def suits(t: Tensor) -> str | None:
    """None if there are kernels for a tensor, else why not."""
    if _fits(t):
        return None
    if t.dtype is not _FLOAT:
        return f"it is {t.dtype}, and the kernels are for float32"
    if not t.is_cpu:
        return f"it is on {t.device}, and the kernels are for the CPU"
    if type(t) in _PLAIN and not t.is_contiguous():
        return "it is not contiguous"
    return f"it is a {type(t).__name__} and not a plain tensor"


def require(t: Tensor, shape: Sequence[int]) -> int:
    """The address of a tensor's numbers; raises unless it suits the kernels and has a shape."""
    (start,) = addresses([t])
    if t.shape != torch.Size(shape):
        raise _of_other_shape(t, shape)
    return start


def _of_other_shape(t: Tensor, shape: Sequence[int]) -> Wrong:
    return Wrong(
        f"a tensor has shape {tuple(t.shape)} where the kernels were to be given {tuple(shape)}"
    )


def addresses(tensors: Iterable[Tensor | None], count: int | None = None) -> list[int]:
    """Where the numbers of tensors begin (0 for None); raises unless all suit the kernels and have so many
    (if a count is given), in whatever shape. The memory must be there, too: storage can be made smaller
    under a tensor."""
    starts = []
    for t in tensors:
        if t is None:
            starts.append(0)
            continue
        if not (t.dtype is _FLOAT and t.is_cpu and t.is_contiguous()):
            raise Wrong(f"a tensor cannot be given to the kernels: {suits(t)}")
        size = t.numel()
        if count is not None and size != count:
            raise Wrong(f"a tensor has {size} numbers where the kernels were to be given {count}")
        try:
            start, room = t.data_ptr(), t.untyped_storage().nbytes()
        except RuntimeError as error:  # of a wrapper that looks like a plain tensor
            raise Wrong(f"a tensor cannot be given to the kernels: {error}") from None
        if size and (not start or room < 4 * (t.storage_offset() + size)):
            raise Wrong(
                f"a tensor of {size} numbers has no memory of its own, or less than they need"
            )
        starts.append(start)
    return starts


def spans(tensors: Iterable[Tensor]) -> list[Span]:
    """Where the numbers of tensors begin and end."""
    starts = [(t.data_ptr(), t) for t in tensors]
    return [(start, start + 4 * t.numel()) for start, t in starts]


def require_apart(written: Sequence[Span], read: Sequence[Span]) -> None:
    """Raise if memory that is written is that of another tensor, too."""
    if not apart(written, read):
        raise Wrong("two tensors share memory, and one of them is to be written")


def apart(written: Sequence[Span], read: Sequence[Span]) -> bool:
    """Whether no memory that is written is that of another tensor, too, even in part."""
    found = sorted([*written, *read])
    starts, ends = zip(*found, strict=True) if found else ((), ())
    if all(map(le, ends, starts[1:])):
        return True  # so it is, nearly always
    marked = [(*span, True) for span in written] + [(*span, False) for span in read]
    end, writes = 0, False  # of what has been seen: where it ends, and whether any of it is written
    for start, stop, written_here in sorted(marked):
        if start == stop:
            continue
        if start < end and (writes or written_here):
            return False
        writes = written_here if start >= end else writes or written_here
        end = max(end, stop)
    return True


# ---------------------------------------------------------------------- steps
def word(
    letters: Sequence[Letter], radius: float, sign: float, decay: float, within: float
) -> Word:
    """A word as the kernels want it."""
    if len(letters) > LETTERS:
        raise Wrong(f"a word has {len(letters)} letters, and the kernels take {LETTERS} at most")
    names = "".join(letter.name[0] for letter in letters).encode()
    x, y, noisy = (tuple(letter[i] for letter in letters) for i in (1, 2, 3))
    return Word(len(letters), names, x, y, noisy, radius, sign, decay, within)


def require_letters(letters: Word, known: bytes) -> None:
    """Raise if a word has others than these."""
    names = letters.letters
    if len(names) != letters.count or names.strip(known):
        raise Wrong(f"a word is {names!r} with {letters.count} letters, and {known!r} are known")


def step_(
    letters: Word,
    jobs: Sequence[Job],
    step: int,
    state: "ctypes.Array[ctypes.c_uint8]",
    spheres: bool,
) -> int:
    """Move the tensors of some jobs, but for parts (`parts`) whose weights are off their manifold; returns
    the number of these, whose entry of ``state`` stays 0."""
    require_letters(letters, b"ABOE")
    moving, noisy = bool(letters.letters.strip(b"E")), any(letters.noisy[: letters.count])
    numbers: list[int] = []
    written: list[Span] = []
    read: list[Span] = []
    for job in jobs:
        row = _, rows, n, q, v, xi, eta, g, _ = _checked(job, moving, noisy, spheres)
        numbers += row
        size, slack = 4 * rows * n, 4 * rows * (1 if spheres else n)
        written += (q, q + size), (v, v + size), (xi, xi + slack), (eta, eta + slack)
        read.append((g, g + size))
    require_apart([span for span in written if span[0]], read)
    if len(state) != parts(jobs, spheres):
        raise Wrong(f"{len(state)} parts were announced and there are {parts(jobs, spheres)}")
    function = library().holonomic_sphere_step if spheres else library().holonomic_step
    where, threads = ctypes.addressof(letters), torch.get_num_threads()
    return int(function(where, len(jobs), table(numbers), step, state, threads))


def _checked(job: Job, moving: bool, noisy: bool, spheres: bool) -> tuple[int, ...]:
    """A job as the kernels want it: everything that letters read is there, and as large as they think."""
    rows, q, v, xi, eta, g, keys = job
    shape, count = q.shape, q.numel()
    n = count // rows if rows > 0 else 0
    if rows < 0 or rows * n != count:
        raise Wrong(f"{count} weights cannot be {rows} rows of equal length")
    if moving and (v is None or (spheres and (xi is None) != (eta is None))):
        raise Wrong("a momentum is missing, which the letters A, B and O need")
    if eta is not None and (xi is None or not spheres):
        raise Wrong("there is a momentum for slack that is not there")
    if noisy and keys is None:
        raise Wrong("there are no keys for the noise")
    count_keys = 1 if keys is None else streams(keys, rows)
    if keys is not None:
        _require_numbers(0, count // count_keys)
        if not spheres and rows != count_keys:
            raise Wrong(f"there are {count_keys} keys for {rows} rows")
    full = (q, v, g, None if spheres else xi)
    for t in full:
        if t is not None and t.shape != shape:
            raise _of_other_shape(t, shape)
    q_, v_, g_, xi_ = addresses(full, count)
    slack = addresses((xi, eta), rows) if spheres else (xi_, 0)
    return count_keys, rows, n, q_, v_, *slack, g_, 0 if keys is None else keys.data_ptr()


_BLOCK = 512  # as in kernels.cpp


def parts(jobs: Sequence[Job], spheres: bool) -> int:
    """How many parts of tensors are moved or left alone as a whole: blocks of rows, or spheres."""
    if spheres:
        return sum(job.rows for job in jobs)
    return sum(blocks(job.rows, job.q.numel()) for job in jobs if job.rows)


def blocks(rows: int, count: int) -> int:
    """How many blocks there are in some rows, of so many numbers in all."""
    return rows * -(-(count // rows) // _BLOCK)


def streams(keys: Tensor, rows: int) -> int:
    """How many keys there are, each for as many rows of a tensor as the others."""
    if type(keys) is not Tensor or keys.dtype is not torch.int64 or not keys.is_cpu:
        raise Wrong("keys of noise must be int64 on the CPU")
    count = keys.shape[0] if keys.dim() == 2 and keys.shape[1] == 2 else 0
    held = keys.untyped_storage().nbytes() >= 8 * (keys.storage_offset() + 2 * count)
    if not count or rows % count or not held or not keys.is_contiguous():
        raise Wrong(f"there are keys of shape {tuple(keys.shape)} for {rows} rows")
    return count


def _require_numbers(first: int, count: int) -> None:
    if not 0 <= first <= first + count <= NUMBERS:
        raise Wrong(
            f"numbers {first} to {first + count} of a stream of noise were asked for, and it has {NUMBERS}"
        )


def finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers of tensors that suit the kernels are finite."""
    spans = table([t.numel() for t in tensors], addresses(tensors))
    return bool(library().holonomic_finite(len(tensors), spans, torch.get_num_threads()))


def normal_(out: Tensor, keys: Tensor, first: int, step: int, slot: int) -> None:
    """Fill the rows of a tensor with standard normal numbers: the elements first, first + 1, ... of the
    stream of every row's key."""
    if out.dim() != 2:
        raise Wrong(f"a tensor of rows was asked for, and it has {out.dim()} dimensions")
    rows, n = out.shape
    if streams(keys, rows) != rows:
        raise Wrong(f"there are {len(keys)} keys for {rows} rows")
    _require_numbers(first, n)
    where = require(out, (rows, n)), keys.data_ptr(), first, step, slot
    library().holonomic_normal(rows, n, *where, torch.get_num_threads())


def words(key: Sequence[int], block: int, step: int, slot: int) -> list[list[int]]:
    """The four words that Philox makes of each of 16 counters, the first of which is given."""
    out, keys = (ctypes.c_uint32 * 64)(), (ctypes.c_int64 * 2)(*key)
    library().holonomic_words(out, keys, block, step, slot)
    return [list(out[k::16]) for k in range(16)]


def table(*columns: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    """Columns of sizes and addresses as an array of rows."""
    numbers = (ctypes.c_int64 * (len(columns) * len(columns[0])))()
    for k, column in enumerate(columns):
        numbers[k :: len(columns)] = list(column)
    return numbers
