"""Compiled kernels for what torch does in many passes over memory (see `build` and ``kernels.cpp``)."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from holonomic.native.build import LETTERS, Stored, Stream, Unavailable, Word, library, reason

__all__ = [
    "LETTERS",
    "Letter",
    "SphereStep",
    "Step",
    "Unavailable",
    "addresses",
    "finite",
    "fits",
    "library",
    "normal_",
    "reason",
    "table",
]

_PLAIN = (Tensor, Parameter)

Noises = tuple[list[Tensor], list[Tensor]]


class Letter(NamedTuple):
    """A letter of a word with its numbers: ``x`` scales the motion, ``y`` the noise."""

    name: str
    x: float
    y: float = 0.0


def fits(tensors: Sequence[Tensor]) -> bool:
    """Whether there are kernels for these tensors: plain ones (a wrapper may have no memory of its own),
    float32, on the CPU, contiguous."""
    if reason() is not None:
        return False
    for t in tensors:
        if not (t.dtype is torch.float32 and t.is_cpu and t.is_contiguous()):
            return False
        if type(t) not in _PLAIN or t.is_neg():
            return False
    return True


class Step:
    """A word of letters on the tensors of one group: in flat space, or on circles of a radius (if the
    weights have slack)."""

    def __init__(self, word: Sequence[Letter], radius: float, sign: float, decay: float) -> None:
        names = "".join(letter.name[0] for letter in word).encode()
        x, y = (tuple(s[i] for s in word) for i in (1, 2))
        self._word = Word(len(word), names, x, y, radius, sign, decay)

    def __call__(
        self,
        q: Tensor,
        v: Tensor | None,
        xi: Tensor | None,
        g: Tensor,
        noises: Sequence[Noises] = (),
    ) -> None:
        """Move one tensor, with the noise (of weights, of slack) of every letter."""
        stride = _stride(noises)
        rows = 1 if stride is None else len(q)
        stored, _kept = _stored(noises, stride)
        self._run(rows, q.numel() // rows, q, v, xi, g, stored, None)

    def all(
        self, q: Sequence[Tensor], v: Sequence[Tensor], xi: Sequence[Tensor], g: Sequence[Tensor]
    ) -> None:
        """Move many tensors, without noise; ``v`` and ``xi`` may be empty."""
        columns = [addresses(ts) or [0] * len(q) for ts in (q, v, xi, g)]
        jobs = table([t.numel() for t in q], *columns)
        word = ctypes.addressof(self._word)
        library().holonomic_steps(word, len(q), jobs, torch.get_num_threads())

    def with_stream(
        self,
        q: Tensor,
        v: Tensor | None,
        xi: Tensor | None,
        g: Tensor,
        keys: Tensor,
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Move one tensor whose first dimension is replicas, with the noise of their streams: for every
        letter the places of the numbers for weights and slack (-1: none)."""
        stream = Stream(keys.data_ptr(), *zip(*places, strict=True))
        self._run(len(q), q.numel() // len(q), q, v, xi, g, None, stream)

    def _run(
        self,
        rows: int,
        n: int,
        q: Tensor,
        v: Tensor | None,
        xi: Tensor | None,
        g: Tensor,
        stored: Stored | None,
        stream: Stream | None,
    ) -> None:
        library().holonomic_step(
            *(ctypes.addressof(self._word), rows, n),
            *(q.data_ptr(), _address(v), _address(xi), g.data_ptr()),
            None if stored is None else ctypes.addressof(stored),
            None if stream is None else ctypes.addressof(stream),
            torch.get_num_threads(),
        )


class SphereStep(Step):
    """A word of letters on rows that lie on spheres."""

    def rows(
        self,
        q: Tensor,
        v: Tensor | None,
        xi: Tensor | None,
        eta: Tensor | None,
        g: Tensor,
        noises: Sequence[Noises] = (),
    ) -> None:
        """Move one tensor (rows, length); slack, its momentum and its noise have an entry a row."""
        stored, _kept = _stored(noises)
        library().holonomic_sphere_step(
            *(ctypes.addressof(self._word), *q.shape),
            *(q.data_ptr(), _address(v), _address(xi), _address(eta), g.data_ptr()),
            None if stored is None else ctypes.addressof(stored),
            torch.get_num_threads(),
        )


def finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers of tensors that `fits` are finite."""
    spans = table([t.numel() for t in tensors], addresses(tensors))
    return bool(library().holonomic_finite(len(tensors), spans, torch.get_num_threads()))


def normal_(out: Tensor, first: int, keys: Tensor) -> None:
    """Fill row i of a contiguous float32 tensor with the standard normal numbers first, first + 1, ...
    of the stream keys[i] (int64); ``first`` is even."""
    rows, count = len(out), out.numel()
    places = out.data_ptr(), first, keys.data_ptr()
    library().holonomic_normal(rows, count // rows, *places, torch.get_num_threads())


def _stride(noises: Sequence[Noises]) -> int | None:
    """How far rows lie apart that are parts of the rows of a block, as replicas have them: they can be read
    where they are. None if they are not of that kind."""
    drawn = [t for pair in noises for ts in pair for t in ts]
    if not drawn or not drawn[0].numel() or all(t.is_contiguous() for t in drawn):
        return None
    strides = {t.stride(0) if t[0].is_contiguous() else None for t in drawn}
    return strides.pop() if len(strides) == 1 else None


def _stored(
    noises: Sequence[Noises], stride: int | None = None
) -> tuple[Stored | None, list[Tensor]]:
    """The addresses of noise whose rows lie ``stride`` apart (None: it is made contiguous), and what must
    be kept alive while they are in use."""
    if not any(R or S for R, S in noises):
        return None, []
    kept: list[Tensor] = []
    stored = Stored(stride=stride or 0)
    for k, pair in enumerate(noises):
        for column, tensors in zip((stored.R, stored.S), pair, strict=True):
            if tensors:
                kept.append(tensors[0].contiguous() if stride is None else tensors[0])
                column[k] = kept[-1].data_ptr()
    return stored, kept


def table(*columns: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Columns of sizes and addresses as an array of rows."""
    numbers = (ctypes.c_int64 * (len(columns) * len(columns[0])))()
    for k, column in enumerate(columns):
        numbers[k :: len(columns)] = list(column)
    return numbers


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where the numbers of tensors are."""
    return [t.data_ptr() for t in tensors]


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
