"""The compiled kernels: libraries that were built when the package was installed, one per instruction set.

They are never needed. Where they are not there, `reason` says why, and everything goes on in torch. The
best set that the machine has is taken; ``HOLONOMIC_ISA`` asks for a lower one, ``HOLONOMIC_NATIVE=0`` for
none. Nothing is compiled or written here.
"""

import ctypes
import functools
import hashlib
import os
from pathlib import Path

import torch

#: Instruction sets, best first, and what torch calls a machine that has them.
SETS = {"avx512": ("AVX512",), "avx2": ("AVX512", "AVX2"), "baseline": None}


class Unavailable(Exception):
    """Why there are no compiled kernels here."""


def library() -> ctypes.CDLL:
    """The kernels; raises `Unavailable` with the reason if there are none."""
    found = _library()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


def reason() -> str | None:
    """None if the kernels are there, else why not."""
    found = _library()
    return found if isinstance(found, str) else None


def instruction_set() -> str | None:
    """Which of the libraries is in use."""
    chosen = _chosen()
    return chosen if reason() is None and chosen in SETS else None


def built() -> list[str]:
    """The instruction sets there are libraries for."""
    return [name for name in SETS if _path(name) is not None]


def suited() -> list[str]:
    """The instruction sets that this machine has."""
    here = torch.backends.cpu.get_cpu_capability()
    return [name for name, machines in SETS.items() if machines is None or here in machines]


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernels, or why there are none: looked for once."""
    if os.environ.get("HOLONOMIC_NATIVE") == "0":
        return "HOLONOMIC_NATIVE=0 is set"
    chosen = _chosen()
    if chosen not in SETS:
        return chosen
    try:
        found = _declared(ctypes.CDLL(str(_path(chosen))))
    except (OSError, AttributeError) as error:  # a library it needs is missing, or it is an old one
        return f"the kernels for {chosen} cannot be loaded: {error}"
    source = Path(__file__).with_name("kernels.cpp")  # where the package is installed for editing
    if source.exists() and found.holonomic_source().decode() != _digest(source):
        return "the kernels were built from another kernels.cpp; install the package again (make setup)"
    return found


def _digest(source: Path) -> str:
    """As in ``setup.py``."""
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


def _chosen() -> str:
    """The name of an instruction set, or why there is none."""
    here, there = suited(), built()
    asked = os.environ.get("HOLONOMIC_ISA")
    if asked is not None:
        if asked not in SETS:
            return f"HOLONOMIC_ISA is {asked!r}; it must be one of {', '.join(SETS)}"
        if asked not in here:
            return f"HOLONOMIC_ISA={asked} is set, and this machine has {', '.join(here)} only"
        here = [asked]
    for name in here:
        if name in there:
            return name
    if there:
        return f"the kernels were built for {', '.join(there)}, and {' or '.join(here)} is needed"
    return (
        "the package was installed without them (no C++ compiler was found then, or it failed; "
        "`pip install -v` shows what it said)"
    )


def _path(name: str) -> Path | None:
    return next(iter(sorted(Path(__file__).parent.glob(f"_kernels_{name}.*"))), None)


LETTERS = 16  # that a word may have


class Word(ctypes.Structure):
    """As in ``kernels.cpp``: letters with their numbers, and what all tensors of a group share."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("letters", ctypes.c_char * LETTERS),
        ("x", ctypes.c_float * LETTERS),
        ("y", ctypes.c_float * LETTERS),
        ("noisy", ctypes.c_uint8 * LETTERS),
        ("radius", ctypes.c_float),
        ("sign", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("within", ctypes.c_float),
    )


class Leap(ctypes.Structure):
    """As in ``kernels.cpp``: a step of orthogonal matrices."""

    _fields_ = (
        *(
            (name, ctypes.c_float)
            for name in ("h", "a", "b", "c", "enough", "rounding", "per", "large")
        ),
        ("iterations", ctypes.c_int32),
    )


def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Say what the functions take, so that a wrong call raises instead of crashing."""
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    u64, u32, f32, f64 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float, ctypes.c_double
    for name, result, arguments in (
        ("source", ctypes.c_char_p, []),
        ("step", i64, [pointer, i64, pointer, u64, pointer, i32]),
        ("sphere_step", i64, [pointer, i64, pointer, u64, pointer, i32]),
        ("normal", None, [i64, i64, pointer, pointer, i64, u64, u32, i32]),
        ("words", None, [pointer, pointer, u32, u64, u32]),
        ("finite", i32, [i64, pointer, i32]),
        ("orthogonal_near", i32, [i64, i64, i64, pointer, pointer, f64, f64, i32]),
        ("orthogonal_kick", None, [i64, *[pointer] * 5, i32]),
        ("orthogonal_begin", None, [i64, i64, *[pointer] * 6, i32]),
        ("orthogonal_update", i64, [i64, i64, *[pointer] * 7, i32]),
        ("orthogonal_leap", None, [pointer, i64, i64, i64, *[pointer] * 4, i32]),
        ("orthogonal_move", None, [i64, f32, *[pointer] * 3, i32]),
    ):
        function = getattr(kernels, f"holonomic_{name}")
        function.argtypes, function.restype = arguments, result
    return kernels
