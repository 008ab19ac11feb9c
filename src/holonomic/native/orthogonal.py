"""A step of orthogonal matrices: what it does between its matrix products, by compiled kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from holonomic.native import addresses, library, table

_DONE, _LARGE = 1, 2  # states of a matrix, as in kernels.cpp


class Stack:
    """Matrices of one shape on their way along Q <- Q - h W - Q M (the notation of `Orthogonal`).

    ``q`` and ``v`` are tensors that `native.fits`; they change in `move_` only. ``Q``, ``W`` and ``B`` have
    the matrices in a batch, a single one as it is.
    """

    def __init__(
        self, q: Sequence[Tensor], v: Sequence[Tensor], shape: torch.Size, h: float
    ) -> None:
        self.h = h
        self._count, self._n = len(q), q[0].numel()
        self._q, self._v = (table(addresses(ts)) for ts in (q, v))
        if len(q) == 1:
            self.Q, self.W = q[0].view(shape), v[0].view(shape)
            self.B = torch.sub(self.Q, self.W, alpha=h)
        else:
            self.Q, self.W, self.B = (q[0].new_empty((len(q), *shape)) for _ in range(3))
            self._call("gather", self._q, self._v, *addresses((self.Q, self.W, self.B)))

    def solve(
        self, C: Tensor, G: Tensor, enough: float, iterations: int
    ) -> tuple[Tensor, Tensor] | None:
        """Find ``M`` for C = Q^T W and G = B^T B - I. Says where that failed and where M is larger than 1,
        or None if neither is the case anywhere."""
        s = C.shape[-1]
        count = C.numel() // s**2
        threads = torch.get_num_threads()
        self.M, D, T = (torch.empty_like(C) for _ in range(3))
        library().holonomic_orthogonal_begin(count, s, self.h, *addresses((C, self.M, D)), threads)
        state = C.new_zeros(C.shape[:-2], dtype=torch.uint8)
        numbers = addresses((G, T, self.M, D, state))
        for _ in range(iterations):
            torch.matmul(D.mT, self.M, out=T)
            if not library().holonomic_orthogonal_update(count, s, enough, *numbers, threads):
                break
        if bool((state == _DONE).all()):
            return None
        large = (state == _LARGE)[..., None, None]
        return ~(large | (state == _DONE)[..., None, None]), large

    def move_(self, normal: Tensor, within: bool) -> None:
        """q <- Q - h W - Q M and v <- W + Q M / h, from the normal part Q M; or ``within`` Q and W."""
        q, v = self._q, self._v
        if within and self._count > 1:
            q, v = (table(addresses(stack.unbind())) for stack in (self.Q, self.W))
        self._call("move", *addresses((self.Q, self.W, normal)), q, v)

    def _call(self, name: str, *tensors: object) -> None:
        kernel = getattr(library(), f"holonomic_orthogonal_{name}")
        kernel(self._count, self._n, self.h, *tensors, torch.get_num_threads())
