"""The lab: the papers' experiments, run for real. It imports the library, never the reverse."""
