"""Steps of orthogonal matrices by compiled kernels, in the notation of `Orthogonal`: momenta are kicked to
W, then Q <- Q - h W - Q M."""

import ctypes
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holonomic.native import (
    Wrong,
    addresses,
    blocks,
    library,
    require_apart,
    require_letters,
    streams,
    table,
)
from holonomic.native.loader import Leap, Word

_DONE = 1  # the state of a matrix, as in kernels.cpp


class Kick(NamedTuple):
    """A kick v <- a v + b g + c q."""

    a: float = 1.0
    b: float = 0.0
    c: float = 0.0


class Limits(NamedTuple):
    """The iteration ends at a residual that is ``enough``, after one update more; when the next residual is
    sure to be within ``rounding``; and at the latest after some ``iterations``. A multiplier M with a
    squared norm of ``large`` is left to others."""

    enough: float
    rounding: float
    large: float
    iterations: int


#: A small matrix and what it needs fit the second cache.
_SMALL = 1 << 15
_LINE = 16  # numbers in a line of the cache, and of the longest vectors


def small(shape: torch.Size) -> bool:
    """Whether matrices are for `Stack.leap_`, which fills up their shorter side to whole vectors: not if
    they are large then, nor if most of it is filling and there is a batch in one tensor, for which
    `Stack.drift_` is faster."""
    *batch, rows, columns = shape
    filled = max(rows, columns) * -(-min(rows, columns) // _LINE) * _LINE
    return filled <= _SMALL and (not batch or filled <= 2 * rows * columns)


class Stack:
    """Matrices of one shape with their momenta and forces: one in every tensor, or several in the leading
    dimensions of ``shape``. The tensors are checked, once, and keep their memory while this lives."""

    def __init__(
        self, shape: torch.Size, q: Sequence[Tensor], v: Sequence[Tensor], g: Sequence[Tensor]
    ) -> None:
        if not len(q) == len(v) == len(g):
            raise Wrong(f"there are {len(q)} weights, {len(v)} momenta and {len(g)} forces")
        self.shape, self.q, self.v, self.g = shape, q, v, g
        self._rows, self._columns = shape[-2:]
        self._each = shape[:-2].numel()
        size = shape.numel()
        self._starts = [addresses(tensors, size) for tensors in (q, v, g)]
        q_, v_, g_ = ([(start, start + 4 * size) for start in starts] for starts in self._starts)
        require_apart(q_ + v_, g_)
        self._matrices = [self._table(starts) for starts in self._starts]

    def _table(self, starts: list[int]) -> "ctypes.Array[ctypes.c_int64]":
        """Where every matrix begins."""
        if self._each != 1:
            size = 4 * self._rows * self._columns
            starts = [start + size * k for start in starts for k in range(self._each)]
        return table(starts)

    def near(self, signs: Tensor, scale: float, within: float) -> bool:
        """Whether |Q z| = c |z| for all matrices and a vector z of signs, to a relative ``within`` of the
        squares: if not, somebody has changed the weights."""
        s = min(self._rows, self._columns)
        where = self._matrices[0], *addresses([signs], s)
        return bool(
            library().holonomic_orthogonal_near(
                *(len(self.q) * self._each, self._rows, self._columns, *where),
                *(s * scale**2, within, torch.get_num_threads()),
            )
        )

    def stir_(self, letters: Word, keys: Sequence[Tensor], step: int) -> None:
        """Letters B and O, with noise for every tensor from streams with these keys."""
        require_letters(letters, b"BO")
        if len(keys) != len(self.q):
            raise Wrong(f"there are keys for {len(keys)} of {len(self.q)} weights")
        size, parts = self.shape.numel(), 0
        numbers: list[int] = []
        for q, v, g, key in zip(*self._starts, keys, strict=True):
            rows = streams(key, size)
            numbers += rows, rows, size // rows, q, v, 0, 0, g, key.data_ptr()
            parts += blocks(rows, size)
        state = (ctypes.c_uint8 * parts)()
        where, threads = ctypes.addressof(letters), torch.get_num_threads()
        library().holonomic_step(where, len(self.q), table(numbers), step, state, threads)

    def leap_(self, h: float, kick: Kick, limits: Limits, scale: float) -> list[int]:
        """Kick and move small matrices. Returns the numbers of those that need more care and were not
        moved."""
        count = len(self.q) * self._each
        state = (ctypes.c_uint8 * count)()
        word = _leap(h, kick, limits, scale)
        q, v, g = self._matrices
        library().holonomic_orthogonal_leap(
            *(ctypes.addressof(word), count, self._rows, self._columns, q, v),
            *(g if kick != Kick() else None, state, torch.get_num_threads()),
        )
        done = bytes(state)
        return (
            [] if done == bytes([_DONE]) * count else [k for k in range(count) if done[k] != _DONE]
        )

    def drift_(self, i: int, h: float, kick: Kick, limits: Limits, scale: float) -> bool:
        """Kick and move the large matrix (or the batch) of tensor i: products by torch, the rest by
        kernels. If it says no, the momenta have been kicked and nothing has been moved: the step needs more
        care.

        The memory it needs is kept by the thread for the next one (up to 32 MB): fresh memory would have to
        be mapped page by page, which costs as much as a pass of the kernels."""
        shape, Q = self.shape, self.q[i].view(self.shape)
        q, v, g = (starts[i] for starts in self._starts)
        tall, s = self._rows >= self._columns, min(self._rows, self._columns)
        B, G, C, M, D = _room(shape, *[(*shape[:-2], s, s)] * 4)
        kernels, threads, word = library(), torch.get_num_threads(), _leap(h, kick, limits, scale)
        leap, force = ctypes.addressof(word), g if kick != Kick() else None
        kernels.holonomic_orthogonal_kick(Q.numel(), leap, q, v, force, B.data_ptr(), threads)
        torch.matmul(*((Q.mT, B) if tall else (Q, B.mT)), out=C)
        torch.matmul(*((B.mT, B) if tall else (B, B.mT)), out=G)
        count = C.numel() // s**2
        norms, state = C.new_empty(C.shape[:-2]), C.new_zeros(C.shape[:-2], dtype=torch.uint8)
        where = [t.data_ptr() for t in (C, G, M, D, norms)]
        kernels.holonomic_orthogonal_begin(count, s, leap, *where, threads)
        T = C  # which has served
        where = [t.data_ptr() for t in (G, T, M, D, norms, state)]
        for _ in range(limits.iterations):
            torch.matmul(D.mT, M, out=T)
            if not kernels.holonomic_orthogonal_update(count, s, leap, *where, threads):
                break
        if not bool((state == _DONE).all()):
            return False
        normal = torch.matmul(*((Q, M) if tall else (M, Q)), out=B)
        kernels.holonomic_orthogonal_move(Q.numel(), h, q, v, normal.data_ptr(), threads)
        return True


def _leap(h: float, kick: Kick, limits: Limits, scale: float) -> Leap:
    ends = limits.enough, limits.rounding, scale**-2, limits.large, limits.iterations
    return Leap(h, *kick, *ends)


_thread = threading.local()
_KEPT = 1 << 23  # numbers that a thread keeps at most


def _room(*shapes: Sequence[int]) -> list[Tensor]:
    """Tensors in memory of the thread's, if they are not too large for that."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _LINE) * _LINE)
    room: Tensor | None = getattr(_thread, "room", None)
    if room is None or room.numel() < starts[-1]:
        with torch.inference_mode(False):
            room = torch.empty(starts[-1], dtype=torch.float32, device="cpu")
        if room.numel() <= _KEPT:
            _thread.room = room
    places = zip(starts[:-1], sizes, shapes, strict=True)
    return [room[start : start + size].view(torch.Size(shape)) for start, size, shape in places]
