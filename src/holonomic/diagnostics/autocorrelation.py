"""How many independent samples a chain is worth."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holonomic.errors import SettingError

Array = NDArray[np.float64]


def autocorrelation(chains: ArrayLike) -> Array:
    """Autocorrelation rho(t) at lags 0, 1, ... of samples (steps,) or (chains, steps).

    Several chains share one mean and are averaged, so that chains which stay apart count as
    correlated. By FFT, with the 1/n normalization that keeps the spectrum positive."""
    x = _chains(chains)
    n = x.shape[1]
    x = x - x.mean()
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.abs(np.fft.rfft(x, size, axis=1)) ** 2
    covariance = np.fft.irfft(spectrum, size, axis=1)[:, :n].mean(0) / n
    return covariance / covariance[0] if covariance[0] > 0 else np.ones(n)


def integrated_autocorrelation_time(chains: ArrayLike) -> float:
    """tau = 1 + 2 sum_t rho(t), in steps: so many steps are worth one independent sample.

    The sum ends where Geyer's initial monotone sequence does: pairs rho(2k) + rho(2k + 1) of a
    reversible chain are positive and fall, so it stops at the first that is not positive and lets
    none rise. A constant chain has tau = its length."""
    x = _chains(chains)
    if np.ptp(x) == 0:
        return float(x.shape[1])
    rho = autocorrelation(x)
    even = len(rho) // 2 * 2
    pairs = rho[:even].reshape(-1, 2).sum(1)
    negative = np.flatnonzero(pairs <= 0)
    pairs = pairs[: negative[0]] if len(negative) else pairs
    pairs = np.minimum.accumulate(pairs)
    return max(float(2 * pairs.sum() - 1), 1.0 / x.shape[1])


def effective_sample_size(chains: ArrayLike) -> float:
    """The number of independent samples that know the mean as well: samples / tau."""
    x = _chains(chains)
    return x.size / integrated_autocorrelation_time(x)


def _chains(chains: ArrayLike) -> Array:
    x = np.atleast_2d(np.asarray(chains, dtype=np.float64))
    if x.ndim != 2 or x.shape[1] < 4:
        raise SettingError(
            f"samples have the shape {np.shape(chains)}; give (steps,) or (chains, steps) with at "
            f"least 4 steps."
        )
    if not np.isfinite(x).all():
        raise SettingError("samples hold NaN or Inf; leave out the part after a divergence.")
    return x
