"""Holonomic: neural networks trained as constrained stochastic dynamics."""

from holonomic import diagnostics, methods, schedules
from holonomic.constraints import Circle, Constraint, LevelSet, Orthogonal, Sphere
from holonomic.errors import (
    CheckpointError,
    ConstraintError,
    HolonomicError,
    NonFiniteError,
    SettingError,
)
from holonomic.groups import groups, place
from holonomic.langevin import Langevin
from holonomic.replicas import Replicas, RunningMean
from holonomic.units import from_paper, to_paper

__version__ = "0.2.0"

__all__ = [
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
    "place",
    "schedules",
    "to_paper",
]
