"""Compiled kernels for what torch does in many passes over memory (see `build` and ``kernels.cpp``)."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from holonomic.native.build import Unavailable, library, reason

__all__ = ["Letter", "Unavailable", "fits", "library", "normal_", "reason", "step_"]

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


def step_(
    q: Tensor,
    v: Tensor | None,
    xi: Tensor | None,
    g: Tensor,
    word: Sequence[Letter],
    noise: Sequence[tuple[list[Tensor], list[Tensor]]],
    radius: float,
    sign: float,
    decay: float,
) -> None:
    """Apply the letters to one tensor; ``xi`` is None for flat space. ``noise`` has an entry a letter."""
    kernel, count = library().holonomic_step, len(word)
    numbers = ctypes.c_float * count
    pointers = ctypes.c_void_p * count
    letters = "".join(letter.name[0] for letter in word).encode()
    x, y = numbers(*(s.x for s in word)), numbers(*(s.y for s in word))
    R = [pair[0][0].contiguous() if pair[0] else None for pair in noise]
    S = [pair[1][0].contiguous() if pair[1] else None for pair in noise]

    def run(start: int, stop: int) -> None:
        at = 4 * start
        kernel(
            stop - start,
            *(None if t is None else t.data_ptr() + at for t in (q, v, xi, g)),
            *(count, letters, x, y),
            pointers(*(None if t is None else t.data_ptr() + at for t in R)),
            pointers(*(None if t is None else t.data_ptr() + at for t in S)),
            *(xi is not None, radius, sign, decay),
        )

    _in_threads(run, q.numel(), q.numel(), 16)


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
