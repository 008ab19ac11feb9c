"""The manifolds weights can live on, one file each."""

from holonomic.constraints.base import Constraint, Free
from holonomic.constraints.circle import Circle
from holonomic.constraints.level_set import LevelSet
from holonomic.constraints.orthogonal import Orthogonal
from holonomic.constraints.sphere import Sphere

__all__ = ["Circle", "Constraint", "Free", "LevelSet", "Orthogonal", "Sphere"]
