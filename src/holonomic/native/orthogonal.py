"""Steps of orthogonal matrices by compiled kernels, in the notation of `Orthogonal`: momenta are kicked to
W, then Q <- Q - h W - Q M."""

import ctypes
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holonomic.native import addresses, library, table
from holonomic.native.build import Leap

_DONE, _LARGE = 1, 2  # states of a matrix, as in kernels.cpp


class Kick(NamedTuple):
    """A kick v <- a v + b g + c q, for the tensors of a group; without g there is none."""

    a: float
    b: float
    c: float
    g: Sequence[Tensor]


NO_KICK = Kick(1.0, 0.0, 0.0, ())


class Limits(NamedTuple):
    """The iteration ends at a residual that is ``enough``, after one update more; when the next residual is
    sure to be within ``rounding``; and at the latest after some ``iterations``."""

    enough: float
    rounding: float
    iterations: int


#: A small matrix and what it needs fit the second cache.
_SMALL = 1 << 15
_LINE = 16  # numbers in a line of the cache, and of the longest vectors


def small(shape: torch.Size) -> bool:
    """Whether matrices are for `leap_`, which fills up their shorter side to whole vectors: not if they are
    large then, nor if most of it is filling and there is a batch in one tensor: `Large` is faster."""
    *batch, rows, columns = shape
    filled = max(rows, columns) * -(-min(rows, columns) // _LINE) * _LINE
    return filled <= _SMALL and (not batch or filled <= 2 * rows * columns)


def leap_(
    q: Sequence[Tensor],
    v: Sequence[Tensor],
    kick: Kick,
    shape: torch.Size,
    h: float,
    limits: Limits,
    settle: bool,
) -> list[int]:
    """Move small matrices, a tensor each, or several in the leading dimensions of ``shape``; ``settle``
    projects the momenta afterwards. Returns the numbers of those that need more care and were not moved."""
    *batch, rows, columns = shape
    each = torch.Size(batch).numel()
    count, step = len(q) * each, 4 * rows * columns

    def matrices(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_int64]:
        starts = addresses(tensors)
        if each != 1:
            starts = [start + step * k for start in starts for k in range(each)]
        return table(starts)

    state = (ctypes.c_uint8 * count)()
    a, b, c, g = kick
    word = Leap(h, a, b, c, limits.enough, limits.rounding, limits.iterations, settle)
    library().holonomic_orthogonal_leap(
        *(ctypes.addressof(word), count, rows, columns, matrices(q), matrices(v)),
        *(matrices(g) if g else None, state, torch.get_num_threads()),
    )
    done = bytes(state)
    return [] if done == bytes([_DONE]) * count else [k for k in range(count) if done[k] != _DONE]


class Large:
    """One large matrix (or a batch in one tensor): products by torch, the rest by kernels. Q and W are the
    weights and momenta themselves; the momenta are kicked at once.

    The memory it needs is kept by the thread for the next one (up to 32 MB): fresh memory would have to be
    mapped page by page, which costs as much as a pass of the kernels.
    """

    def __init__(self, q: Tensor, v: Tensor, kick: Kick, shape: torch.Size, h: float) -> None:
        self.Q, self.W, self._h = q.view(shape), v.view(shape), h
        self._tall = shape[-2] >= shape[-1]
        small = (*shape[:-2], min(shape[-2:]), min(shape[-2:]))
        self._B, self._G, self._C, self.M, self._D = _room(shape, *[small] * 4)
        a, b, c, g = kick
        word = Leap(h, a, b, c)
        library().holonomic_orthogonal_kick(
            *(q.numel(), ctypes.addressof(word), *addresses((q, v))),
            *(g[0].data_ptr() if g else None, self._B.data_ptr(), torch.get_num_threads()),
        )

    def solve(self, limits: Limits) -> tuple[Tensor, Tensor] | None:
        """Find ``M``. Says where that failed and where M is larger than 1, or None if neither is the case
        anywhere."""
        C, G, M, D = self._C, self._G, self.M, self._D
        s = C.shape[-1]
        count = C.numel() // s**2
        threads = torch.get_num_threads()
        self._inner(self.Q, self.W, C)
        self._inner(self._B, self._B, G)
        G.diagonal(dim1=-2, dim2=-1).sub_(1)
        norms, state = C.new_empty(C.shape[:-2]), C.new_zeros(C.shape[:-2], dtype=torch.uint8)
        begun = addresses((C, M, D, norms))
        library().holonomic_orthogonal_begin(count, s, self._h, *begun, threads)
        T = C  # which has served
        numbers = addresses((G, T, M, D, norms, state))
        update = library().holonomic_orthogonal_update
        for _ in range(limits.iterations):
            torch.matmul(D.mT, M, out=T)
            if not update(count, s, limits.enough, limits.rounding, *numbers, threads):
                break
        if bool((state == _DONE).all()):
            return None
        large = (state == _LARGE)[..., None, None]
        return ~(large | (state == _DONE)[..., None, None]), large

    def normal(self) -> Tensor:
        """Q M, in the memory of B."""
        factors = (self.Q, self.M) if self._tall else (self.M, self.Q)
        return torch.matmul(*factors, out=self._B)

    def move_(self, normal: Tensor) -> None:
        """Q <- Q - h W - Q M and W <- W + Q M / h, from the normal part Q M."""
        library().holonomic_orthogonal_move(
            *(normal.numel(), self._h, *addresses((self.Q, self.W, normal))),
            torch.get_num_threads(),
        )

    def _inner(self, X: Tensor, Y: Tensor, out: Tensor) -> None:
        """X^T Y of the tall orientation."""
        torch.matmul(*((X.mT, Y) if self._tall else (X, Y.mT)), out=out)


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
