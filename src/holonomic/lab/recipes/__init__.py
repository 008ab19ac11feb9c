"""The experiments. To add one, write a function with @recipe in a file that is imported here."""

from holonomic.lab.recipes import accuracy, fashion, partitioned, spirals, text, vision

__all__ = ["accuracy", "fashion", "partitioned", "spirals", "text", "vision"]
