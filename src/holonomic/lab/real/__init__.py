"""Experiments on real data, with ordinary modules: one run is one job of one process.

They are described by a `RealExperiment` and otherwise treated as the others: the same command line,
folders, statistics and pages."""

from holonomic.lab.real.experiment import Method, RealExperiment, Search, Source

__all__ = ["Method", "RealExperiment", "Search", "Source"]
