"""Q^T Q = c^2 I for the tall orientation of a weight matrix (4.49, 4.50): the Stiefel manifold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from holonomic.constraints.base import Constraint, free_step_
from holonomic.constraints.checks import (
    check_iterations,
    check_options,
    check_radius,
    largest,
    require_dims,
    require_finite,
    require_on_manifold,
    tolerance,
)
from holonomic.errors import ConstraintError, SettingError
from holonomic.phase import Phase, wide

#: A multiplier M whose squared norm is larger gets a Newton step after it: see `_polished`.
LARGE = 0.5

#: Where the iteration failed, and where its multiplier is large.
Outcome = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Orthogonal(Constraint):
    """Keep a weight matrix orthogonal: columns if it is tall, rows if it is wide, all of length ``scale``.

    A convolutional weight counts as a matrix C_out x (C_in kh kw). Matrices of one shape move together,
    and no result depends on what else is among them.

    With P(Q) V = V - Q sym(Q^T V) the tangent projection (for scale 1), A is RATTLE (4.57):
    Q' = Q - lr V - Q M with the symmetric M that makes Q'^T Q' = I, found by the quasi-Newton iteration
    (4.55), which in terms of M needs s x s products only:

        M <- M + F/2,   F = G - T - T^T,   T = (C - M/2)^T M,   G = B^T B - I,   C = Q^T B,   B = Q - lr V.

    A normal part of V, as kicks, noise and the last A leave it, ends up in M: so A needs no projection,
    and a whole step three products of the size of Q^T Q beside the iteration. What Q is off by at the
    start, E = Q^T Q - I, comes out of it as M E M, so errors shrink. EM is the same projection after the
    free step (Algorithm 4.1). The iteration stops on its own residual F, or on a bound of the next one,
    after ``max_iterations`` at the latest; a matrix whose step was too large for it takes the polar
    factor of B instead, the nearest orthogonal matrix, and is counted in `report()`.

    ``init="nearest"`` places weights by their polar factor, ``"orthogonal"`` draws new ones by
    `torch.nn.init.orthogonal_`, ``"error"`` raises if the weights are not orthogonal.
    """

    scale: float = 1.0
    max_iterations: int = 50
    init: str = "nearest"
    batch_dims: int = 0

    inits: ClassVar[tuple[str, ...]] = ("nearest", "orthogonal", "error")

    def __post_init__(self) -> None:
        check_options(self)
        check_iterations(self, self.max_iterations)
        check_radius(self, self.scale, "scale")
        if isinstance(self.scale, Tensor):
            raise SettingError("Orthogonal: scale is a tensor; give one number.")

    def check(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        for t, name in zip(q, names, strict=True):
            remedy = "constrain matrices only (biases and norms are left out by groups)"
            require_dims(self, t, name, 2, remedy)
            require_finite(self, t, name)
            if not t.numel() or self.init == "orthogonal":
                continue
            misfit = self._misfit(t)
            if self.init == "error":
                require_on_manifold(self, name, misfit, t.dtype)
            elif misfit > tolerance(t.dtype) and _dependent(self.matrix(t.double())):
                kind = "rows" if min(self.matrix(t).shape[-2:]) == t.shape[-2] else "columns"
                raise ConstraintError(
                    f"Orthogonal on {name!r}: the matrix has linearly dependent {kind} (as a zero "
                    f"matrix has), so there is no one nearest orthogonal matrix; initialize the weights "
                    f"first, or use init='orthogonal' to have new ones drawn."
                )

    def codimension(self, q: Sequence[Tensor]) -> int:
        count = 0
        for t in q:
            *batch, rows, columns = self.matrix(t).shape
            s = min(rows, columns)
            count += torch.Size(batch).numel() * s * (s + 1) // 2
        return count

    # ------------------------------------------------------------------ matrices
    def matrix(self, t: Tensor) -> Tensor:
        """The weight as (batches of) matrices: a view where the memory allows one."""
        return t.flatten(self.batch_dims + 1)

    def stacks(self, tensors: Sequence[Tensor]) -> Iterator[list[int]]:
        """Indices of the tensors (with any numbers) that share a matrix shape, a device and a dtype."""
        shapes: dict[object, list[int]] = {}
        for i, t in enumerate(tensors):
            if not t.numel():
                continue
            shape = t.shape if t.dim() == self.batch_dims + 2 else self.matrix(t).shape
            shapes.setdefault((shape, t.device, t.dtype), []).append(i)
        yield from shapes.values()

    def _stack(self, tensors: Sequence[Tensor], index: list[int]) -> Tensor:
        """Matrices of one shape as a batch; a single one as it is."""
        if len(index) == 1:
            return self.matrix(tensors[index[0]])
        return torch.stack([self.matrix(tensors[i]) for i in index])

    def _unstack(self, tensors: Sequence[Tensor], index: list[int], stacked: Tensor) -> None:
        parts = [stacked] if len(index) == 1 else stacked.unbind()
        targets = [tensors[i] for i in index]
        if parts[0].data_ptr() == targets[0].data_ptr():
            return  # worked on in place
        torch._foreach_copy_(targets, [m.view_as(t) for m, t in zip(parts, targets, strict=True)])

    def _inner(self, X: Tensor, Y: Tensor) -> Tensor:
        """X^T Y / c^2 of the tall orientation, a small square matrix."""
        product = X.mT @ Y if X.shape[-2] >= X.shape[-1] else X @ Y.mT
        return product if self.scale == 1 else product.mul_(self.scale**-2)

    def _gram_error(self, Q: Tensor) -> Tensor:
        """Q^T Q / c^2 - I, symmetric to the last bit (a product need not be): what is not would not be
        normal to the manifold, and M / h carries it into the momenta."""
        G = self._inner(Q, Q)
        G = torch.add(G, G.mT).mul_(0.5)
        G.diagonal(dim1=-2, dim2=-1).sub_(1)
        return G

    def _misfit(self, t: Tensor) -> float:
        return largest([self._gram_error(self.matrix(wide(t)))])

    def _polar(self, B: Tensor) -> Tensor:
        """The nearest point of the manifold to B."""
        U, _, Vh = torch.linalg.svd(B.double(), full_matrices=False)
        return self.scale * (U @ Vh)

    # ------------------------------------------------------------------ placing
    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        for t in q:
            if not t.numel():
                continue
            if self.init == "orthogonal" and generator is not None:
                fresh = torch.empty_like(self.matrix(wide(t)))
                for matrix in fresh.view(-1, *fresh.shape[-2:]):
                    torch.nn.init.orthogonal_(matrix, gain=self.scale, generator=generator)
                t.copy_(fresh.view_as(t))
            elif self.init != "error" and self._misfit(t) > tolerance(t.dtype):
                t.copy_(self._polar(self.matrix(t)).view_as(t))

    def follow_(self, x: Phase, within: float) -> None:
        """By |Q z| = c |z| for a random z: one pass over Q. It sees changes down to about ``within``;
        the step itself makes smaller ones smaller."""
        for index in self.stacks(x.q):
            Q = self._stack(x.q, index)
            tall = Q.shape[-2] >= Q.shape[-1]
            z = _signs(min(Q.shape[-2:]), Q.dtype, Q.device)
            y = Q @ z if tall else z @ Q
            size = y.square().sum(-1) / (len(z) * self.scale**2)
            off = ~((size - 1).abs() <= within)
            if bool(off.any()):
                for i in index:
                    require_finite(self, x.q[i], x.names[i] if x.names else "a weight")
                Q[off] = self._polar(Q[off]).to(Q.dtype)
                self._unstack(x.q, index, Q)
                x.tally.changed += 1

    # ------------------------------------------------------------------ moving
    def drift_(self, x: Phase, h: float) -> None:
        for index in self.stacks(x.q):
            Q, W = self._stack(x.q, index), self._stack(x.v, index)
            B = torch.sub(Q, W, alpha=h)
            C = self._inner(Q, B)
            M = torch.add(C, C.mT).mul_(0.5)  # with the normal part of W
            M.diagonal(dim1=-2, dim2=-1).sub_(1)
            outcome = self._solve(self._gram_error(B), C, M)
            normal = _times(Q, M)
            # V = W + Q M / h, not (Q - new) / h: M is symmetric, so what it carries of rounding errors
            # divided by h is normal, and a projection takes it off.
            if outcome is None:
                torch.sub(B, normal, out=Q)
                W.add_(normal, alpha=1 / h)
            else:
                failed, large = outcome
                tangent = self._project_(Q, W.clone())
                rescued = self._fallback(x, Q - h * tangent, Q, failed)
                new = self._polished(B.sub_(normal), large)
                W.copy_(torch.where(failed, tangent, W.add(normal, alpha=1 / h)))
                Q.copy_(torch.where(failed, rescued, new))
            self._unstack(x.q, index, Q)
            self._unstack(x.v, index, W)

    def displace_(
        self,
        x: Phase,
        f: Sequence[Tensor],
        h: float,
        sigma: float,
        R: Sequence[Tensor],
        S: Sequence[Tensor],
    ) -> None:
        origin = torch._foreach_clone(x.q)
        free_step_(x, f, h, sigma, R, S)
        for index in self.stacks(x.q):
            B, Q = self._stack(x.q, index), self._stack(origin, index)
            G = self._gram_error(B)
            M = torch.zeros_like(G)
            outcome = self._solve(G, self._inner(Q, B), M)
            new = B - _times(Q, M)
            if outcome is not None:
                failed, large = outcome
                rescued = self._fallback(x, B, Q, failed)
                new = torch.where(failed, rescued, self._polished(new, large))
            self._unstack(x.q, index, new)

    def _solve(self, G: Tensor, C: Tensor, M: Tensor) -> Outcome | None:
        """Improve the guess M, in place, to the symmetric matrix that puts B - Q M on the manifold, from
        G = B^T B - I and C = Q^T B (which is overwritten). Says where the iteration failed and where M
        is large, or None if neither is the case anywhere."""
        enough, eps = iteration_ends(G.dtype)
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
        large = ~failed & ~(M.square().sum((-2, -1), keepdim=True) < LARGE)
        return (failed, large) if bool((failed | large).any()) else None

    def _fallback(self, x: Phase, B: Tensor, Q: Tensor, failed: Tensor) -> Tensor:
        """The polar factor of B where the iteration failed; a B that overflowed stays at Q."""
        x.tally.fallbacks += int(failed.sum())
        result = Q.clone()
        usable = failed & torch.isfinite(B).all(-1, keepdim=True).all(-2, keepdim=True)
        mask = usable[..., 0, 0]
        if bool(mask.any()):
            result[mask] = self._polar(B[mask]).to(Q.dtype)
        return result

    def _polished(self, Q: Tensor, where: Tensor) -> Tensor:
        """One step of Newton's, Q - Q (Q^T Q - I) / 2, for some matrices. What Q was off by before the
        drift comes out of it as M (Q^T Q - I) M: where M is not small, that would shrink too slowly."""
        if not bool(where.any()):
            return Q
        return torch.where(where, Q - _times(Q, self._gram_error(Q)).mul_(0.5), Q)

    # ------------------------------------------------------------------ projecting, measuring
    def project_(self, x: Phase) -> None:
        for index in self.stacks(x.q):
            Q, V = self._stack(x.q, index), self._stack(x.v, index)
            self._unstack(x.v, index, self._project_(Q, V))

    def _project_(self, Q: Tensor, V: Tensor) -> Tensor:
        """P(Q) V = V - Q sym(Q^T V) (4.15), in place."""
        S = self._inner(Q, V)
        return V.sub_(_times(Q, torch.add(S, S.mT).mul_(0.5)))

    def residual(self, x: Phase) -> float:
        return self.scale**2 * largest([self._gram_error(self.matrix(q)) for q in x.q])

    def cotangency(self, x: Phase) -> float:
        pairs = zip(x.q, x.v, strict=True)
        products = [self._inner(self.matrix(q), self.matrix(v)) for q, v in pairs]
        return self.scale**2 * largest([p + p.mT for p in products])


def iteration_ends(dtype: torch.dtype) -> tuple[float, float]:
    """The residual at which the iteration ends after one update more, which is then far below rounding;
    and the bound of the next residual at which it ends at once."""
    eps = torch.finfo(dtype).eps
    return 16 * eps, eps


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
def _times(X: Tensor, M: Tensor) -> Tensor:
    """X M of the tall orientation, for a symmetric M."""
    return X @ M if X.shape[-2] >= X.shape[-1] else M @ X


def _dependent(B: Tensor) -> bool:
    """Whether some matrix has linearly dependent columns (rows, if it is wide), to rounding."""
    G = B.mT @ B if B.shape[-2] >= B.shape[-1] else B @ B.mT
    L, info = torch.linalg.cholesky_ex(G)
    pivots = L.diagonal(dim1=-2, dim2=-1)
    least = torch.finfo(B.dtype).eps ** 0.5 * G.diagonal(dim1=-2, dim2=-1).amax(-1).sqrt()
    return bool((info != 0).any()) or not bool((pivots.amin(-1) > least).all())


@lru_cache(maxsize=64)
def _signs(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random vector of signs, always the same one."""
    drawn = torch.randint(2, (n,), generator=torch.Generator().manual_seed(n))
    with torch.inference_mode(False):
        return (2 * drawn - 1).to(device, dtype)
