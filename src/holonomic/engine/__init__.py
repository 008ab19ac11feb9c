"""How a part of the parameters takes its step: letter by letter in torch (`eager`), by torch's fused step
where it is SGD (`sgd`), or by compiled kernels (`native`).

Geometry and physics are the same for both. This is the only place that chooses.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from holonomic.engine import eager, native, sgd
from holonomic.errors import SettingError

if TYPE_CHECKING:
    from holonomic.plan import Part

Engine = Callable[["Part"], None]


def choose(part: "Part") -> Engine:
    """The engine of a part that has been loaded; raises if one is asked for that cannot be had.

    Groups with a constraint or noise take the kernels where there are any, unless ``foreach`` or
    ``fused=False`` asks for the letters by torch; others are SGD to the last bit unless ``fused=True``."""
    fused, foreach = part.group["fused"], part.group["foreach"]
    if sgd.fits(part):
        return sgd.run
    wanted = (part.constrained or part.noisy) and foreach is None if fused is None else fused
    if not (wanted and part.physics.lr):  # at lr = 0 nothing moves
        return eager.run
    why = native.refusal(part)
    if why is None:
        return native.run
    if fused:
        raise SettingError(
            f"{part.where}: fused=True asks for the compiled kernels, which cannot take this step: "
            f"{why}. Leave fused out to use them where they can be."
        )
    return eager.run
