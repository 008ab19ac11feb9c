"""Compiled kernels for what torch does in many passes over memory (see `build` and ``kernels.cpp``)."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from holonomic.native.build import LETTERS, Stored, Stream, Unavailable, Word, library, reason

__all__ = [
    "LETTERS",
    "Letter",
    "SphereStep",
    "Step",
    "Unavailable",
    "fits",
    "library",
    "normal_",
    "reason",
]

#: Weights below which a second thread costs more than it brings.
_PER_THREAD = 1 << 16


class Letter(NamedTuple):
    """A letter of a word with its numbers: ``x`` scales the motion, ``y`` the noise."""

    name: str
    x: float
    y: float = 0.0


def fits(tensors: Sequence[Tensor]) -> bool:
    """Whether there are kernels for these tensors: float32, on the CPU, contiguous."""
    return reason() is None and all(
        t.dtype is torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors
    )


Noises = tuple[list[Tensor], list[Tensor]]


class Step:
    """A word of letters on the tensors of one group: in flat space, or on circles of a radius (if the
    weights have slack)."""

    def __init__(self, word: Sequence[Letter], radius: float, sign: float, decay: float) -> None:
        names = "".join(letter.name[0] for letter in word).encode()
        x, y = ((*(s[i] for s in word), *[0.0] * (LETTERS - len(word))) for i in (1, 2))
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
        n = q.numel()
        stored, _keep = _stored(noises)
        if _parts(n) == 1:
            return self._run(1, n, 0, q, v, xi, g, stored, None)

        def run(start: int, stop: int) -> None:
            here = _moved(stored, 4 * start, 4 * start)
            self._run(1, stop - start, start, q, v, xi, g, here, None)

        _in_threads(run, n, n, 16)

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
        rows, n = len(q), q.numel() // len(q)
        R, S = zip(*places, strict=True)

        def run(start: int, stop: int) -> None:
            stream = Stream(keys.data_ptr() + 8 * start, R, S)
            self._run(stop - start, n, start * n, q, v, xi, g, None, stream)

        _in_threads(run, rows, q.numel(), 1)

    def _run(
        self,
        rows: int,
        n: int,
        start: int,
        q: Tensor,
        v: Tensor | None,
        xi: Tensor | None,
        g: Tensor,
        stored: Stored | None,
        stream: Stream | None,
    ) -> None:
        library().holonomic_step(
            *(ctypes.addressof(self._word), rows, n),
            *(None if t is None else t.data_ptr() + 4 * start for t in (q, v, xi, g)),
            None if stored is None else ctypes.addressof(stored),
            None if stream is None else ctypes.addressof(stream),
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
        n = q.shape[1]
        stored, _keep = _stored(noises)

        def run(start: int, stop: int) -> None:
            room, here = torch.empty(n), _moved(stored, 4 * start * n, 4 * start)
            library().holonomic_sphere_step(
                *(ctypes.addressof(self._word), stop - start, n),
                *(None if t is None else t.data_ptr() + 4 * start * n for t in (q, v)),
                *(None if t is None else t.data_ptr() + 4 * start for t in (xi, eta)),
                *(g.data_ptr() + 4 * start * n, None if here is None else ctypes.addressof(here)),
                room.data_ptr(),
            )

        _in_threads(run, len(q), q.numel(), 1)


def _stored(noises: Sequence[Noises]) -> tuple[Stored | None, list[Tensor]]:
    """The addresses of noise, and what must be kept alive while they are in use."""
    if not any(R or S for R, S in noises):
        return None, []
    kept: list[Tensor] = []
    columns: list[list[int | None]] = []
    for which in (0, 1):
        column: list[int | None] = [None] * LETTERS
        for k, pair in enumerate(noises):
            if pair[which]:
                kept.append(pair[which][0].contiguous())
                column[k] = kept[-1].data_ptr()
        columns.append(column)
    return Stored(*(tuple(c) for c in columns)), kept


def _moved(stored: Stored | None, by_R: int, by_S: int) -> Stored | None:
    """The addresses some bytes further."""
    if stored is None:
        return None
    R, S = (
        tuple(None if p is None else p + by for p in column)
        for column, by in ((stored.R, by_R), (stored.S, by_S))
    )
    return Stored(R, S)


def normal_(out: Tensor, first: int, keys: Tensor) -> None:
    """Fill row i of a contiguous float32 tensor with the standard normal numbers first, first + 1, ...
    of the stream keys[i] (int64); ``first`` is even."""
    kernel, size = library().holonomic_normal, out[0].numel()

    def run(start: int, stop: int) -> None:
        at = out.data_ptr() + 4 * size * start
        kernel(stop - start, size, at, first, keys.data_ptr() + 8 * start)

    _in_threads(run, len(out), out.numel(), 1)


def _in_threads(run: Callable[[int, int], None], n: int, numbers: int, unit: int) -> None:
    """Call ``run(start, stop)`` on as many parts of range(n) as torch uses threads, if it is worth it."""
    parts = min(_parts(numbers), max(1, n // unit))
    if parts == 1:
        return run(0, n)
    first, *others = pairwise([*(n * k // parts // unit * unit for k in range(parts)), n])
    rest = [_pool().submit(run, *part) for part in others]
    run(*first)
    for future in rest:
        future.result()


def _parts(numbers: int) -> int:
    """Threads that so many numbers are worth."""
    if numbers < 2 * _PER_THREAD:
        return 1
    return max(1, min(torch.get_num_threads(), numbers // _PER_THREAD))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="holonomic")
