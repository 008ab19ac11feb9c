"""What the optimizer remembers of weights that a step writes and does not read."""

from typing import Any, NamedTuple

from torch import Tensor

#: One step of so many begins with `Constraint.renew_`.
RENEWED = 32


class Mark(NamedTuple):
    """How a step left a tensor: numbers that every change raises, if autograd can see it, and its memory,
    which no other tensor can get while it is held."""

    versions: tuple[int, int]
    memory: Tensor

    @staticmethod
    def of(p: Tensor) -> "Mark":
        local = getattr(p, "_local_tensor", p)  # of a distributed tensor
        return Mark((p._version, local._version), local.detach())

    def fits(self, p: Tensor) -> bool:
        """Whether the tensor is as it was left."""
        now = Mark.of(p)
        return now.versions == self.versions and _layout(now.memory) == _layout(self.memory)


def renews(steps: int) -> bool:
    """One step in `RENEWED`, as if by chance: a tensor that moves every n-th step has its turn, too,
    whatever n is."""
    for _ in range(2):
        steps = ((steps ^ steps >> 16) * 0x45D9F3B) & 0xFFFFFFFF
    return (steps ^ steps >> 16) % RENEWED == 0


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype
