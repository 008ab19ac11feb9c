"""The matrix von Mises-Fisher law on the Stiefel manifold V(n, s), and its exact mean.

The density is exp(kappa tr(X_top)) with respect to the uniform measure, X_top the first s rows of X; for
s = 1 this is von Mises-Fisher on the sphere. Its constant is a hypergeometric function of a matrix,

    c(kappa) = 0F1(n/2; kappa^2/4 I_s) = sum over partitions k of (kappa^2/4)^|k| C_k(I_s) / ((n/2)_k |k|!),

with zonal polynomials C_k, known in closed form at the identity, and E tr(X_top) / s = c'/(s c).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class StiefelLaw:
    """V(n, s) with concentration kappa."""

    n: int
    s: int
    kappa: float

    @property
    def name(self) -> str:
        where = f"sphere in {self.n} dimensions" if self.s == 1 else f"V({self.n}, {self.s})"
        return f"von Mises-Fisher, {where}, κ = {self.kappa:g}"

    def mean(self) -> float:
        """E tr(X_top) / s; on the sphere the mean resultant length A_n(kappa)."""
        total = slope = 0.0
        for size in range(400):
            terms = [self._log_term(k) for k in partitions(size, self.s)]
            weight = sum(math.exp(t) for t in terms)
            total += weight
            slope += 2 * size / self.kappa * weight
            if size > 4 and weight < 1e-17 * total:
                return slope / (self.s * total)
        raise ArithmeticError(f"the series for {self} does not end within 400 orders")

    def _log_term(self, k: tuple[int, ...]) -> float:
        """log of (kappa^2/4)^|k| C_k(I) / ((n/2)_k |k|!) for a partition k."""
        size, p = sum(k), len(k)
        log = size * math.log(self.kappa**2 / 4) + 2 * size * math.log(2)
        log += _log_rising(self.s / 2, k) - _log_rising(self.n / 2, k)
        for i in range(p):
            log -= math.lgamma(2 * k[i] + p - i)  # (2 k_i + p - i)! with i counted from 1
            for j in range(i + 1, p):
                log += math.log(2 * k[i] - 2 * k[j] - i + j)
        return log


def partitions(size: int, parts: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """The partitions of ``size`` into at most ``parts`` parts, none of them 0."""
    if size == 0:
        yield ()
    elif parts:
        for first in range(min(size, largest or size), 0, -1):
            for rest in partitions(size - first, parts - 1, first):
                yield (first, *rest)


def _log_rising(a: float, k: tuple[int, ...]) -> float:
    """log of the generalized Pochhammer symbol (a)_k = prod_i (a - (i - 1)/2)_(k_i)."""
    return sum(math.lgamma(a - i / 2 + part) - math.lgamma(a - i / 2) for i, part in enumerate(k))
