"""The exceptions of the library: few, and each message has the name, the value and the remedy."""


class HolonomicError(Exception):
    """Base of every error raised on purpose by this library."""


class SettingError(HolonomicError, ValueError):
    """A setting has an impossible value, or two settings cannot go together."""


class ConstraintError(HolonomicError, ValueError):
    """Weights cannot be put, or are not, on the manifold asked for."""


class NonFiniteError(HolonomicError, FloatingPointError):
    """A gradient holds NaN or Inf; nothing has been changed."""


class CheckpointError(HolonomicError, ValueError):
    """A checkpoint does not fit the optimizer it is loaded into; nothing has been changed."""
