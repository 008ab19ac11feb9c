"""The experiments. To add one, write a function with @recipe in a file that is imported here."""

from holonomic.lab.recipes import partitioned, spirals

__all__ = ["partitioned", "spirals"]
