"""What this installation has, and why not more: ``python -m holonomic.doctor`` or ``holonomic doctor``."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch

import holonomic
from holonomic.native.loader import built, instruction_set, reason, suited


def findings() -> dict[str, str]:
    """A line for each thing worth knowing."""
    why, chosen = reason(), instruction_set()
    return {
        "holonomic": holonomic.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__}, {_devices()}",
        "numpy": metadata.version("numpy"),
        "processor": _processor(),
        "instruction sets": f"{', '.join(suited())} (torch uses "
        f"{torch.backends.cpu.get_cpu_capability()})",
        "compiled kernels": f"in use, for {chosen}" if why is None else f"none: {why}",
        "kernels built for": ", ".join(built()) or "nothing",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} processors",
        "data directory": os.environ.get("HOLONOMIC_DATA", "not set (HOLONOMIC_DATA)"),
    }


def _devices() -> str:
    if torch.cuda.is_available():
        return f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices"
    return "CPU only"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = next(line for line in lines if line.startswith("model name"))
        return named.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    """Print what there is."""
    found = findings()
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
