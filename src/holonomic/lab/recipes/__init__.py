"""The experiments. To add one, write a function with @recipe in a file that is imported here."""

from holonomic.lab.recipes import fashion, spirals, text, vision

__all__ = ["fashion", "spirals", "text", "vision"]
