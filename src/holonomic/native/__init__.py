"""Compiled kernels for what torch does in many passes over memory (see `build` and ``kernels.cpp``)."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from holonomic.native.build import Unavailable, library, reason

__all__ = ["Letter", "Step", "Unavailable", "fits", "library", "normal_", "reason"]

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


@dataclass(frozen=True)
class Step:
    """The letters of a word with their numbers, for one group. ``sphere`` moves rows on spheres,
    otherwise single weights on circles (if they have slack) or in flat space."""

    word: Sequence[Letter]
    radius: float
    sign: float
    decay: float
    sphere: bool

    def __call__(
        self,
        q: Tensor,
        v: Tensor | None,
        xi: Tensor | None,
        eta: Tensor | None,
        g: Tensor,
        noise: Sequence[tuple[list[Tensor], list[Tensor]]],
    ) -> None:
        """Apply the letters to one tensor; ``noise`` (of weights, of slack) has an entry a letter. On
        spheres q is (rows, length)."""
        count = len(self.word)
        numbers, pointers = ctypes.c_float * count, ctypes.c_void_p * count
        letters = "".join(letter.name[0] for letter in self.word).encode()
        x, y = (numbers(*values) for values in zip(*(s[1:] for s in self.word), strict=True))
        R = [pair[0][0].contiguous() if pair[0] else None for pair in noise]
        S = [pair[1][0].contiguous() if pair[1] else None for pair in noise]
        length = q.shape[1] if self.sphere else 1

        def run(start: int, stop: int) -> None:
            def at(t: Tensor | None, step: int = 1) -> int | None:
                return None if t is None else t.data_ptr() + 4 * start * step

            noises = (pointers(*(at(t, length) for t in R)), pointers(*(at(t) for t in S)))
            if self.sphere:
                room = torch.empty(length)
                library().holonomic_sphere_step(
                    *(stop - start, length, at(q, length), at(v, length), at(xi), at(eta)),
                    *(at(g, length), count, letters, x, y, *noises),
                    *(self.radius, self.sign, self.decay, room.data_ptr()),
                )
            else:
                library().holonomic_step(
                    *(stop - start, at(q), at(v), at(xi), at(g), count, letters, x, y, *noises),
                    *(xi is not None, self.radius, self.sign, self.decay),
                )

        _in_threads(run, len(q) if self.sphere else q.numel(), q.numel(), 1 if self.sphere else 16)


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
    parts = max(1, min(torch.get_num_threads(), numbers // _PER_THREAD, n // unit))
    first, *others = pairwise([*(n * k // parts // unit * unit for k in range(parts)), n])
    rest = [_pool().submit(run, *part) for part in others]
    run(*first)
    for future in rest:
        future.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="holonomic")
