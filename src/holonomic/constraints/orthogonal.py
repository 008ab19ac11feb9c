"""Q^T Q = I for the tall orientation of a weight matrix (4.49, 4.50): the Stiefel manifold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from holonomic.native.orthogonal import NO_KICK, Kick, Large, Limits, leap_, small
from holonomic.phase import Phase, wide

#: Where the iteration failed, and where its multiplier is large.
Outcome = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Orthogonal(Constraint):
    """Keep a weight matrix orthogonal: columns if it is tall, rows if it is wide.

    A convolutional weight counts as a matrix C_out x (C_in kh kw). Matrices of one shape move together,
    and no result depends on what else is among them.

    With P(Q) V = V - Q sym(Q^T V) the tangent projection, A is RATTLE (4.57): Q' = Q - lr V - Q M
    with the symmetric M that makes Q'^T Q' = I, found by the quasi-Newton iteration (4.55), which in
    terms of M needs s x s products only:

        M <- M + F/2,   F = G - T - T^T,   T = (C - M/2)^T M,   G = B^T B - I,   C = Q^T B,   B = Q - lr V.

    A normal part of V, as kicks, noise and the last A leave it, ends up in M: so A needs no projection,
    and a whole step three products of the size of Q^T Q beside the iteration. EM is the same projection
    after the free step (Algorithm 4.1). The iteration stops on its own residual F, or on a bound of the
    next one, after ``max_iterations`` at the latest; a matrix whose step was too large for it takes the
    polar factor of B instead, the nearest orthogonal matrix, and is counted in `report()`.

    ``init="nearest"`` places weights by their polar factor, ``"orthogonal"`` draws new ones by
    `torch.nn.init.orthogonal_`, ``"error"`` raises if the weights are not orthogonal.
    """

    max_iterations: int = 50
    init: str = "nearest"
    batch_dims: int = 0

    batched: ClassVar[bool] = True
    drift_settles: ClassVar[bool] = True
    lazy: ClassVar[bool] = True
    inits: ClassVar[tuple[str, ...]] = ("nearest", "orthogonal", "error")

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_iterations < 1:
            raise SettingError(
                f"Orthogonal: max_iterations is {self.max_iterations}; it must be at least 1."
            )

    @property
    def native_drift(self) -> bool:
        return type(self) is Orthogonal

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
            *batch, rows, columns = self._matrix(t).shape
            s = min(rows, columns)
            count += torch.Size(batch).numel() * s * (s + 1) // 2
        return count

    # ------------------------------------------------------------------ matrices
    def _matrix(self, t: Tensor) -> Tensor:
        """The weight as (batches of) matrices: a view where the memory allows one."""
        return t.flatten(self.batch_dims + 1)

    def _stacks(self, tensors: Sequence[Tensor]) -> Iterator[list[int]]:
        """Indices of the tensors (with any numbers) that share a matrix shape, a device and a dtype."""
        shapes: dict[object, list[int]] = {}
        for i, t in enumerate(tensors):
            if not t.numel():
                continue
            shape = t.shape if t.dim() == self.batch_dims + 2 else self._matrix(t).shape
            shapes.setdefault((shape, t.device, t.dtype), []).append(i)
        yield from shapes.values()

    def _stack(self, tensors: Sequence[Tensor], index: list[int]) -> Tensor:
        """Matrices of one shape as a batch; a single one as it is."""
        if len(index) == 1:
            return self._matrix(tensors[index[0]])
        return torch.stack([self._matrix(tensors[i]) for i in index])

    def _unstack(self, tensors: Sequence[Tensor], index: list[int], stacked: Tensor) -> None:
        parts = [stacked] if len(index) == 1 else stacked.unbind()
        targets = [tensors[i] for i in index]
        if parts[0].data_ptr() == targets[0].data_ptr():
            return  # worked on in place
        torch._foreach_copy_(targets, [m.view_as(t) for m, t in zip(parts, targets, strict=True)])

    def _misfit(self, t: Tensor) -> float:
        return largest([_gram_error(self._matrix(wide(t)))])

    # ------------------------------------------------------------------ placing
    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        for t in q:
            if self.init == "orthogonal" and generator is not None:
                fresh = torch.empty_like(self._matrix(wide(t)))
                for matrix in fresh.view(-1, *fresh.shape[-2:]):
                    torch.nn.init.orthogonal_(matrix, generator=generator)
                t.copy_(fresh.view_as(t))
            elif self.init != "error" and self._misfit(t) > tolerance(t.dtype):
                t.copy_(_polar(self._matrix(t.double())).view_as(t))

    # ------------------------------------------------------------------ moving
    def settle_(self, x: Phase) -> None:
        for index in self._stacks(x.q):
            Q, V = self._stack(x.q, index), self._stack(x.v, index)
            self._unstack(x.v, index, _tangent_(Q, V))

    def drift_(self, x: Phase, h: float) -> None:
        if x.native:
            self.native_drift_(x, h)
            return
        for index in self._stacks(x.q):
            Q, W = self._stack(x.q, index), self._stack(x.v, index)
            C = _inner(Q, W)
            M = torch.add(C, C.mT).mul_(-h / 2)  # -h S, where Q S is the normal part of W
            C.mul_(-h).diagonal(dim1=-2, dim2=-1).add_(1)
            B = torch.sub(Q, W, alpha=h)
            outcome = self._solve(_gram_error(B), C, M)
            normal = _times(Q, M)
            if outcome is None:
                # V = W + Q M / h, not (Q - new) / h: M is symmetric, so what it carries of rounding
                # errors divided by h is normal and the projection takes it off.
                torch.sub(B, normal, out=Q)
                W.add_(normal, alpha=1 / h)
            else:
                new, moved = self._with_care(x, Q, W, normal, outcome, h)
                Q.copy_(new)
                W.copy_(moved)
            if not x.lazy:
                _tangent_(Q, W)
            self._unstack(x.q, index, Q)
            self._unstack(x.v, index, W)

    def native_drift_(self, x: Phase, h: float, kick: Kick = NO_KICK) -> None:
        """The same with compiled kernels: small matrices of one shape all in one call, large ones one by
        one with kernels between their products."""
        for index in self._stacks(x.q):
            q, v, g = ([ts[i] for i in index] if ts else [] for ts in (x.q, x.v, kick.g))
            shape = self._matrix(q[0]).shape
            limits = Limits(_enough(q[0].dtype), torch.finfo(q[0].dtype).eps, self.max_iterations)
            if small(shape):
                rest = leap_(q, v, kick._replace(g=g), shape, h, limits, not x.lazy)
                if not rest:
                    continue
                q, v, g = ([t.view(-1, *shape[-2:]) for t in ts] for ts in (q, v, g))
                q, v, g = ([m for t in ts for m in t.unbind()] for ts in (q, v, g))
                q, v, g = ([ts[k] for k in rest] if ts else [] for ts in (q, v, g))
                shape = shape[-2:]
            for k in range(len(q)):
                one = kick._replace(g=g[k : k + 1])
                self._native_drift_(x, Large(q[k], v[k], one, shape, h), h, limits)

    def _native_drift_(self, x: Phase, matrix: Large, h: float, limits: Limits) -> None:
        outcome = matrix.solve(limits)
        normal = matrix.normal()
        Q, W = matrix.Q, matrix.W
        care = outcome and self._with_care(x, Q, W, normal, outcome, h)
        matrix.move_(normal)
        if outcome and care:  # the others of a batch have the bits they have alone
            unusual = outcome[0] | outcome[1]
            for moved, with_care in zip((Q, W), care, strict=True):
                moved.copy_(torch.where(unusual, with_care, moved))
        if not x.lazy:
            _tangent_(Q, W)

    def _with_care(
        self, x: Phase, Q: Tensor, W: Tensor, normal: Tensor, outcome: Outcome, h: float
    ) -> tuple[Tensor, Tensor]:
        """New positions and momenta where something is unusual about some matrices."""
        failed, large = outcome
        tangent = _tangent_(Q, W.clone())
        rescued = self._fallback(Q - h * tangent, Q, failed)
        new = _polished(torch.sub(Q, W, alpha=h).sub_(normal), large)
        x.fallbacks += int(failed.sum())
        return (
            torch.where(failed, rescued, new),
            torch.where(failed, tangent, W.add(normal, alpha=1 / h)),
        )

    def origin(self, x: Phase) -> list[Tensor]:
        return list(torch._foreach_clone(x.q))

    def retract_(self, x: Phase, origin: list[Tensor]) -> None:
        for index in self._stacks(x.q):
            B, Q = self._stack(x.q, index), self._stack(origin, index)
            G = _gram_error(B)
            M = torch.zeros_like(G)
            outcome = self._solve(G, _inner(Q, B), M)
            new = B - _times(Q, M)
            if outcome is not None:
                failed, large = outcome
                rescued = self._fallback(B, Q, failed)
                new = torch.where(failed, rescued, _polished(new, large))
                x.fallbacks += int(failed.sum())
            self._unstack(x.q, index, new)

    def _solve(self, G: Tensor, C: Tensor, M: Tensor) -> Outcome | None:
        """Improve the guess M, in place, to the symmetric matrix that puts B - Q M on the manifold, from
        G = B^T B - I and C = Q^T B (which is overwritten). Says where the iteration failed and where M
        is large, or None if neither is the case anywhere."""
        enough, eps = _enough(G.dtype), torch.finfo(G.dtype).eps
        failed = torch.ones_like(G[..., :1, :1], dtype=torch.bool)
        going = failed.clone()
        D = C.sub_(M, alpha=0.5)
        T, F = torch.empty_like(G), torch.empty_like(G)
        for _ in range(self.max_iterations):
            torch.matmul(D.mT, M, out=T)
            torch.sub(G, T, out=F).sub_(T.mT)
            weight = going.to(F.dtype)  # a matrix that has converged, or is lost, no longer changes
            M.addcmul_(F, weight, value=0.5)
            D.addcmul_(F, weight, value=-0.25)
            size = _amax(F.abs_())
            failed &= ~(going & (size <= enough))
            going &= failed & (size < 1e3)
            if not bool(going.any()):
                break
            failed &= ~(going & (_next_residual(D, M, F) <= eps))
            going &= failed
            if not bool(going.any()):
                break
        large = ~failed & ~(torch.linalg.matrix_norm(M, keepdim=True) < 1)
        return (failed, large) if bool((failed | large).any()) else None

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
        return largest([_gram_error(self._matrix(q)) for q in x.q])

    def cotangency(self, x: Phase) -> float:
        pairs = zip(x.q, x.v, strict=True)
        products = [_inner(self._matrix(q), self._matrix(v)) for q, v in pairs]
        return largest([p + p.mT for p in products])


def _enough(dtype: torch.dtype) -> float:
    """The residual at which the iteration ends, after one update more: that is far below rounding."""
    return 16 * torch.finfo(dtype).eps


def _next_residual(D: Tensor, M: Tensor, F: Tensor) -> Tensor:
    """What no entry of the residual will exceed, after an update by F. It is ((K + M)^T F + F (K + M)) / 2
    + F^2 / 4 for the M before, where K = I - C: products of columns, so at most those of their norms. The
    signs of F do not matter."""
    E = torch.sub(0.5 * M, D)  # K + M - I, for the M after
    E.diagonal(dim1=-2, dim2=-1).add_(1)
    x, y = (_amax(X.square().sum(-2, keepdim=True)).sqrt() for X in (E, F))
    return x * y + 0.75 * y * y


def _amax(X: Tensor) -> Tensor:
    """The largest entry of every matrix."""
    return X.amax((-2, -1), keepdim=True)


# A wide matrix is the transpose of the Q above. It stays as it is in memory, and products are written
# the other way round: adding two matrices that lie differently costs nearly half as much as a product.
def _inner(X: Tensor, Y: Tensor) -> Tensor:
    """X^T Y of the tall orientation, a small square matrix."""
    return X.mT @ Y if X.shape[-2] >= X.shape[-1] else X @ Y.mT


def _times(X: Tensor, M: Tensor) -> Tensor:
    """X M of the tall orientation, for a symmetric M."""
    return X @ M if X.shape[-2] >= X.shape[-1] else M @ X


def _gram_error(Q: Tensor) -> Tensor:
    """Q^T Q - I."""
    G = _inner(Q, Q)
    G.diagonal(dim1=-2, dim2=-1).sub_(1)
    return G


def _polished(Q: Tensor, where: Tensor) -> Tensor:
    """One step of Newton's, Q - Q (Q^T Q - I) / 2, for some matrices. What Q was off by before the step
    comes out of it as M (Q^T Q - I) M: where M is larger than 1, that would grow from step to step."""
    return torch.where(where, Q - _times(Q, _gram_error(Q)).mul_(0.5), Q)


def _tangent_(Q: Tensor, V: Tensor) -> Tensor:
    """P(Q) V = V - Q sym(Q^T V) (4.15), in place."""
    S = _inner(Q, V)
    return V.sub_(_times(Q, torch.add(S, S.mT).mul_(0.5)))


def _polar(B: Tensor) -> Tensor:
    """The orthogonal matrix nearest to B."""
    U, _, Vh = torch.linalg.svd(B, full_matrices=False)
    return U @ Vh
