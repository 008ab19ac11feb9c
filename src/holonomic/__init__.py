"""Holonomic: neural networks trained as constrained stochastic dynamics."""

from holonomic import diagnostics, methods, schedules
from holonomic.constraints import AngularCircle, Circle, Constraint, LevelSet, Orthogonal, Sphere
from holonomic.errors import (
    CheckpointError,
    ConstraintError,
    HolonomicError,
    NonFiniteError,
    SettingError,
)
from holonomic.groups import groups
from holonomic.langevin import Langevin
from holonomic.replicas import Replicas, RunningMean
from holonomic.units import from_paper, to_paper

__version__ = "0.1.0"

__all__ = [
    "AngularCircle",
    "CheckpointError",
    "Circle",
    "Constraint",
    "ConstraintError",
    "HolonomicError",
    "Langevin",
    "LevelSet",
    "NonFiniteError",
    "Orthogonal",
    "Replicas",
    "RunningMean",
    "SettingError",
    "Sphere",
    "diagnostics",
    "from_paper",
    "groups",
    "methods",
    "schedules",
    "to_paper",
]
