"""The optimizer's own normal numbers, each a pure function of (seed, step, parameter, letter, element).

So a run does not depend on how it is executed: tensor by tensor or all at once, by the eager engine or
by compiled kernels, alone or stacked with other runs. A checkpoint holds the seed alone.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomic import native, philox
from holonomic.errors import CheckpointError, SettingError

#: The slots of a step: letter k of a word has 2 k for its weights and 2 k + 1 for its slack. The noise
#: that LM starts with has these.
FIRST = 62


class Stream(NamedTuple):
    """Where the noise of a tensor comes from: a key per replica (or one), and the row of the parameter
    that the tensor begins with (it may be a piece)."""

    keys: Tensor
    row: int = 0

    def cut(self, start: int, stop: int) -> "Stream":
        """The stream of rows start ... stop - 1."""
        if len(self.keys) > 1:
            return Stream(self.keys[start:stop], self.row)
        return Stream(self.keys, self.row + start)

    def first(self, tensor: Tensor) -> int:
        """The number of the tensor's first element in its stream."""
        return self.row * (tensor[0].numel() if self.row else 0)


class Noise:
    """Standard normal tensors.

    Without a seed, one is drawn from the generator that is given, or from torch's global one, when the
    first number is needed, so that ``torch.manual_seed`` makes a run reproducible and two optimizers
    differ.
    """

    def __init__(self, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        right = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**63
        if seed is not None and not right:
            raise SettingError(f"seed is {seed!r}; it must be an integer from 0 to 2**63 - 1.")
        self._seed, self._generator = seed, generator

    @property
    def seed(self) -> int:
        """The seed; drawn now if there is none yet."""
        if self._seed is None:
            g = self._generator
            device = None if g is None else g.device
            self._seed = int(torch.randint(2**62, (), generator=g, device=device).item())
        return self._seed

    @property
    def seeded(self) -> bool:
        """Whether a seed was given, or drawn already."""
        return self._seed is not None

    def stream(self, key: str) -> Stream:
        """The stream of a parameter."""
        return Stream(_keys((self.seed,), key))

    def like(self, tensor: Tensor, stream: Stream, step: int, slot: int) -> Tensor:
        """Independent standard normal numbers in the shape of a tensor."""
        rows = len(stream.keys)
        shape = rows, tensor.numel() // rows
        first = stream.first(tensor)
        if tensor.device.type == "cpu" and native.reason() is None:
            drawn = torch.empty(shape, dtype=torch.float32, device="cpu")
            native.normal_(drawn, stream.keys, first, step, slot)
        else:
            drawn = philox.normal(stream.keys.to(tensor.device), shape[1], first, step, slot)
        return drawn.reshape(tensor.shape).to(tensor.dtype)

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator for new weights, from the seed."""
        return torch.Generator(device).manual_seed(self.seed)

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Raise if there can be no noise for these tensors."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: the seed, as a tensor; -1 while none has been drawn."""
        return {"seeds": torch.tensor([-1 if self._seed is None else self._seed])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the seed of `state`."""
        if "seeds" in state:
            seeds = [int(s) for s in state["seeds"] if s >= 0]
        elif "seed" in state:  # of version 0.1, whose numbers came from torch's generators
            seeds = [] if state["seed"] is None else [int(state["seed"])]
            if seeds:
                warnings.warn(
                    "the checkpoint is of version 0.1, which drew its noise otherwise: the run goes on "
                    "with the same seed and other numbers.",
                    stacklevel=3,
                )
        else:
            raise CheckpointError(
                "the checkpoint has the noise of replicas of version 0.1, which cannot be continued; "
                "start a new optimizer from the weights alone."
            )
        self._restore(seeds)

    def _restore(self, seeds: list[int]) -> None:
        if len(seeds) > 1:
            raise CheckpointError(
                f"the checkpoint has the noise of {len(seeds)} replicas; build the optimizer with "
                f"generator=replicas.noise()."
            )
        if seeds:
            self._seed = seeds[0]


class ReplicaNoise(Noise):
    """Noise for stacked tensors (n, ...): replica i has the numbers of an optimizer with seed i alone."""

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self._seeds, self._device = tuple(seeds), torch.device(device)

    @property
    def seeded(self) -> bool:
        return True

    @property
    def seed(self) -> int:
        raise SettingError(
            "the noise of replicas has no single seed; initialize weights before stacking them."
        )

    def stream(self, key: str) -> Stream:
        return Stream(_keys(self._seeds, key))

    def check(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            if t.shape[:1] != (len(self._seeds),) or t.device != self._device:
                raise SettingError(
                    f"noise for {len(self._seeds)} replicas on {self._device} was asked for a tensor "
                    f"of shape {tuple(t.shape)} on {t.device}; every tensor of the optimizer must be "
                    f"stacked over the replicas."
                )

    def state(self) -> dict[str, Any]:
        return {"seeds": torch.tensor(self._seeds, dtype=torch.int64)}

    def _restore(self, seeds: list[int]) -> None:
        if len(seeds) != len(self._seeds):
            raise CheckpointError(
                f"the checkpoint has noise for {len(seeds)} replicas, and there are "
                f"{len(self._seeds)}; build as many."
            )
        self._seeds = tuple(seeds)


@lru_cache(maxsize=4096)
def _keys(seeds: tuple[int, ...], key: str) -> Tensor:
    """A key (two words of 32 bits, as int64) for every seed, from its hash with a parameter's name."""
    digests = [blake2b(f"{seed}/{key}".encode(), digest_size=8).digest() for seed in seeds]
    words = [[int.from_bytes(d[:4], "little"), int.from_bytes(d[4:], "little")] for d in digests]
    with torch.inference_mode(False):
        return torch.tensor(words, dtype=torch.int64)
