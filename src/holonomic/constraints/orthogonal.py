"""Q^T Q = I for the tall orientation of a weight matrix (4.49, 4.50): the Stiefel manifold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from holonomic.constraints.base import (
    Constraint,
    check_options,
    largest,
    require_dims,
    require_finite,
    require_on_manifold,
    tolerance,
)
from holonomic.errors import SettingError
from holonomic.phase import Phase, wide


@dataclass(frozen=True, eq=False)
class Orthogonal(Constraint):
    """Keep a weight matrix orthogonal: columns if it is tall, rows if it is wide.

    A convolutional weight counts as a matrix C_out x (C_in kh kw). All matrices of one shape move in
    one batch of matrix products, and no result depends on what else is in the batch.

    With P(Q) V = V - Q sym(Q^T V) the tangent projection, A is RATTLE (4.57): Q' = Q - lr V - Q M
    with the symmetric M that makes Q'^T Q' = I, found by the quasi-Newton iteration (4.55), which in
    terms of M needs s x s products only:

        M <- M + F/2,   F = G - T - T^T,   T = (C - M/2)^T M,   G = B^T B - I,   C = Q^T B,   B = Q - lr V.

    A normal part of V, as kicks and noise leave it, ends up in M: so A needs no projection before it,
    and a whole step five products of the size of Q^T Q beside the iteration. EM is the same projection
    after the free step (Algorithm 4.1). The iteration stops on its own residual F, after
    ``max_iterations`` at the latest; a matrix whose step was too large for it takes the polar factor
    of B instead, the nearest orthogonal matrix, and is counted in `report()`.

    ``init="nearest"`` places weights by their polar factor, ``"orthogonal"`` draws new ones by
    `torch.nn.init.orthogonal_`, ``"error"`` raises if the weights are not orthogonal.
    """

    max_iterations: int = 50
    init: str = "nearest"
    batch_dims: int = 0

    batched: ClassVar[bool] = True
    drift_settles: ClassVar[bool] = True
    inits: ClassVar[tuple[str, ...]] = ("nearest", "orthogonal", "error")

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_iterations < 1:
            raise SettingError(
                f"Orthogonal: max_iterations is {self.max_iterations}; it must be at least 1."
            )

    def check(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        for t, name in zip(q, names, strict=True):
            require_dims(
                self,
                t,
                name,
                2,
                "constrain matrices only (biases and norms are left out by groups)",
            )
            require_finite(self, t, name)
            if self.init == "error":
                require_on_manifold(self, name, self._misfit(t), t.dtype)

    def constraints(self, q: Sequence[Tensor]) -> int:
        count = 0
        for t in q:
            *batch, _, s = self._tall(t).shape
            count += torch.Size(batch).numel() * s * (s + 1) // 2
        return count

    # ------------------------------------------------------------------ matrices
    def _tall(self, t: Tensor) -> Tensor:
        """The weight as (batches of) tall matrices: a view where the memory allows one."""
        matrix = t.flatten(self.batch_dims + 1)
        return matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix

    def _put(self, t: Tensor, tall: Tensor) -> None:
        """Write a tall matrix back into the weight it came from."""
        rows, *inputs = t.shape[self.batch_dims :]
        t.copy_((tall.mT if rows < prod(inputs) else tall).reshape(t.shape))

    def _stacks(self, tensors: Sequence[Tensor]) -> Iterator[list[int]]:
        """Indices of the tensors that share a matrix shape, a device and a dtype."""
        shapes: dict[object, list[int]] = {}
        for i, t in enumerate(tensors):
            shapes.setdefault((self._tall(t).shape, t.device, t.dtype), []).append(i)
        yield from shapes.values()

    def _stack(self, tensors: Sequence[Tensor], index: list[int]) -> Tensor:
        if len(index) == 1:
            return self._tall(tensors[index[0]]).unsqueeze(0)
        return torch.stack([self._tall(tensors[i]) for i in index])

    def _unstack(self, tensors: Sequence[Tensor], index: list[int], stacked: Tensor) -> None:
        for k, i in enumerate(index):
            self._put(tensors[i], stacked[k])

    def _misfit(self, t: Tensor) -> float:
        Q = self._tall(wide(t))
        return largest([_gram_error(Q)])

    # ------------------------------------------------------------------ placing
    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        for t in q:
            if self.init == "orthogonal" and generator is not None:
                tall = self._tall(torch.empty_like(wide(t)))
                fresh = torch.empty_like(tall).reshape(-1, *tall.shape[-2:])
                for matrix in fresh:
                    torch.nn.init.orthogonal_(matrix, generator=generator)
                self._put(t, fresh.reshape(tall.shape))
            elif self.init != "error" and self._misfit(t) > tolerance(t.dtype):
                self._put(t, _polar(self._tall(t.double())))

    # ------------------------------------------------------------------ moving
    def settle_(self, x: Phase) -> None:
        for index in self._stacks(x.q):
            Q, V = self._stack(x.q, index), self._stack(x.v, index)
            self._unstack(x.v, index, _tangent(Q, V))

    def drift_(self, x: Phase, h: float) -> None:
        for index in self._stacks(x.q):
            Q, W = self._stack(x.q, index), self._stack(x.v, index)
            K = Q.mT @ W
            S = (K + K.mT) / 2  # the normal part of W is Q S, and P(Q) W = W - Q S
            B = Q - h * W
            C = torch.mul(K, -h)
            C.diagonal(dim1=-2, dim2=-1).add_(1)
            M, failed = self._multiplier(_gram_error(B), C, -h * S)
            normal = Q @ M
            # V = W + Q M / h, not (Q - new) / h: M is symmetric, so what it carries of rounding errors
            # divided by h is normal and the projection takes it off.
            new, V = B - normal, W + normal / h
            if bool(failed.any()):
                tangent = W - Q @ S
                new = torch.where(failed, self._fallback(Q - h * tangent, Q, failed), new)
                V = torch.where(failed, tangent, V)
                x.fallbacks += int(failed.sum())
            self._unstack(x.q, index, new)
            self._unstack(x.v, index, _tangent(new, V))

    def origin(self, x: Phase) -> list[Tensor]:
        return list(torch._foreach_clone(x.q))

    def retract_(self, x: Phase, origin: list[Tensor]) -> None:
        for index in self._stacks(x.q):
            B, Q = self._stack(x.q, index), self._stack(origin, index)
            G = _gram_error(B)
            M, failed = self._multiplier(G, Q.mT @ B, torch.zeros_like(G))
            new = B - Q @ M
            if bool(failed.any()):
                new = torch.where(failed, self._fallback(B, Q, failed), new)
                x.fallbacks += int(failed.sum())
            self._unstack(x.q, index, new)

    def _multiplier(self, G: Tensor, C: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
        """The symmetric M that puts B - Q M on the manifold, from G = B^T B - I, C = Q^T B and a first
        guess; and where the iteration failed to find it."""
        enough = 16 * torch.finfo(G.dtype).eps  # and one update more, which is far below rounding
        failed = torch.ones_like(G[..., :1, :1], dtype=torch.bool)
        for _ in range(self.max_iterations):
            T = torch.sub(C, M, alpha=0.5).mT @ M
            F = torch.sub(G, T).sub_(T.mT)
            size = F.abs().amax((-2, -1), keepdim=True)
            M.addcmul_(F, failed / 2)  # a matrix that has converged no longer changes
            failed &= ~(size <= enough)
            if not bool((failed & (size < 1e3)).any()):
                break
        return M, failed

    @staticmethod
    def _fallback(B: Tensor, Q: Tensor, failed: Tensor) -> Tensor:
        """The polar factor of B where the iteration failed; a B that overflowed stays at Q."""
        result = Q.clone()
        usable = failed & torch.isfinite(B).all(-1, keepdim=True).all(-2, keepdim=True)
        mask = usable[..., 0, 0]
        if bool(mask.any()):
            result[mask] = _polar(B[mask].double()).to(Q.dtype)
        return result

    # ------------------------------------------------------------------ measuring
    def residual(self, x: Phase) -> float:
        return largest([_gram_error(self._tall(q)) for q in x.q])

    def cotangency(self, x: Phase) -> float:
        products = [self._tall(q).mT @ self._tall(v) for q, v in zip(x.q, x.v, strict=True)]
        return largest([p + p.mT for p in products])


def _gram_error(Q: Tensor) -> Tensor:
    """Q^T Q - I."""
    G = Q.mT @ Q
    G.diagonal(dim1=-2, dim2=-1).sub_(1)
    return G


def _tangent(Q: Tensor, V: Tensor) -> Tensor:
    """P(Q) V = V - Q sym(Q^T V) (4.15)."""
    S = Q.mT @ V
    return V - Q @ ((S + S.mT) / 2)


def _polar(B: Tensor) -> Tensor:
    """The orthogonal matrix nearest to B."""
    U, _, Vh = torch.linalg.svd(B, full_matrices=False)
    return U @ Vh
