"""The optimizer's own source of normal numbers: apart from torch's global one, and saved with it."""

import os
import warnings
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from holonomic import native
from holonomic.errors import CheckpointError, SettingError


class Noise:
    """Standard normal tensors from one generator per device.

    Without a seed, one is drawn from torch's global generator when the first number is needed, so
    that ``torch.manual_seed`` makes a run reproducible and two optimizers differ.
    """

    def __init__(self, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}
        if generator is not None:
            self._seed = generator.initial_seed()  # for a device that it cannot serve
            self._generators[str(generator.device)] = generator

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of a device; made on first use."""
        key = str(device)
        if key not in self._generators:
            if self._seed is None:
                _require_one_process()
                self._seed = int(torch.randint(2**62, ()).item())
            self._generators[key] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[key]

    def like(self, tensor: Tensor) -> Tensor:
        """Independent standard normal numbers in the shape of a tensor."""
        return torch.empty_like(tensor).normal_(generator=self.on(tensor.device))

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Raise if there can be no noise for these tensors."""

    def state(self, devices: Iterable[torch.device] = ()) -> dict[str, Any]:
        """The seed and, by device, the state of every generator.

        The entries of ``devices`` are always there, with a placeholder while no seed has been drawn:
        distributed checkpoints read only what the state they load into has a place for."""
        for device in devices if self._seed is not None else ():
            self.on(device)
        blank = {str(d): torch.Generator(d) for d in devices}
        every = {**blank, **self._generators}
        return {"seed": self._seed, **{key: g.get_state() for key, g in every.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue every stream where ``state`` left it."""
        if "seed" not in state:
            raise CheckpointError(
                "the checkpoint has the noise of replicas; build the optimizer with Replicas.noise()."
            )
        if state["seed"] is None:
            return  # saved before there was any noise to continue
        self._seed = int(state["seed"])
        for generator in self._generators.values():
            generator.manual_seed(self._seed)
        for key, value in state.items():
            if key != "seed":
                try:
                    generator = self.on(torch.device(key))
                except RuntimeError:
                    warnings.warn(
                        f"the checkpoint has noise of the device {key}, which is not here; another "
                        f"device starts a new stream from the same seed.",
                        stacklevel=3,
                    )
                    continue
                set_state(generator, value)


def set_state(generator: torch.Generator, state: Tensor) -> None:
    """Through a copy: torch (2.13) crashes if the state is a view into a larger tensor."""
    generator.set_state(state.cpu().clone())


def _require_one_process() -> None:
    """Ranks that train one model must draw the same noise, and their global generators may differ."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        count = distributed.get_world_size()
        if count > 1:
            raise SettingError(
                f"{count} processes train together and the optimizer has no seed, so each would draw "
                f"noise of its own and the weights would drift apart; pass the same seed= on every "
                f"rank."
            )


class _StackedNoise(Noise):
    """Noise for stacked tensors (n, ...): one independent stream a replica."""

    _device: torch.device
    _count: int

    def on(self, device: torch.device) -> torch.Generator:
        raise SettingError(
            "the noise of replicas has no single generator; initialize weights before stacking them."
        )

    def check(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            if t.shape[:1] != (self._count,) or t.device != self._device:
                raise SettingError(
                    f"noise for {self._count} replicas on {self._device} was asked for a tensor of "
                    f"shape {tuple(t.shape)} on {t.device}; every tensor of the optimizer must be "
                    f"stacked over the replicas."
                )

    def _checked(self, state: dict[str, Any], key: str) -> Tensor:
        """What a checkpoint has for every replica; raises if it is of another kind of noise."""
        if key not in state:
            raise CheckpointError(
                f"the checkpoint has no {key!r}: it is of another kind of noise; build the optimizer "
                f"as the one that was saved, with a seed or with Replicas.noise(native=...)."
            )
        saved: Tensor = state[key]
        if len(saved) != self._count:
            raise CheckpointError(
                f"the checkpoint has noise for {len(saved)} replicas, and there are {self._count}; "
                f"build as many."
            )
        return saved


class CounterNoise(_StackedNoise):
    """Noise for stacked tensors from the compiled kernels: about three times faster than torch's.

    The numbers are Box-Muller on Threefry-2x32, a generator without state: number k of a replica is a
    function of its key and k. So a replica's numbers do not depend on the others, and a checkpoint
    holds the place in the stream alone.
    """

    def __init__(self, seeds: list[int]) -> None:
        super().__init__()
        if (why := native.reason()) is not None:
            raise SettingError(f"native noise cannot be had: {why}; use native=False.")
        self._device, self._count = torch.device("cpu"), len(seeds)
        self._keys = torch.tensor(seeds, dtype=torch.int64)
        self._place = 0

    def like(self, tensor: Tensor) -> Tensor:
        drawn = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        native.normal_(drawn, self.reserve(tensor), self._keys)
        return drawn.to(tensor.dtype)

    @property
    def keys(self) -> Tensor:
        """The keys of the streams, one a replica."""
        return self._keys

    def reserve(self, tensor: Tensor) -> int:
        """The place in the streams of numbers for a tensor, to be drawn by whoever asks."""
        self.check([tensor])
        place = self._place
        self._place += (tensor[0].numel() + 1) // 2 * 2  # they come in pairs
        return place

    def state(self, devices: Iterable[torch.device] = ()) -> dict[str, Any]:
        return {"keys": self._keys.clone(), "place": torch.tensor(self._place)}

    def restore(self, state: dict[str, Any]) -> None:
        self._keys = self._checked(state, "keys").clone()
        self._place = int(state["place"])


class ReplicaNoise(_StackedNoise):
    """Noise for stacked tensors (n, ...): one independent stream a replica.

    A replica's numbers depend on its seed and on what it has drawn before, never on how many others
    there are. They are drawn in blocks, the next one while this one is in use, by one or two threads beside
    the one that asks: on two cores a second would take time from it.
    """

    #: Numbers a replica draws at once; a tensor larger than this makes blocks of its own size.
    BLOCK = 1 << 15

    def __init__(self, seeds: list[int], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self._device, self._count = torch.device(device), len(seeds)
        self._streams = [torch.Generator(self._device).manual_seed(s) for s in seeds]
        self._pool: ThreadPoolExecutor | None = None
        self._width = self._cursor = 0
        self._block = torch.empty(0)
        self._origin = [g.get_state() for g in self._streams]  # where the block in use began
        self._next: tuple[Tensor, list[Tensor], list[Future[None]]] | None = None

    def like(self, tensor: Tensor) -> Tensor:
        self.check([tensor])
        size = tensor[0].numel()
        if self._cursor + size > self._width:
            self._refill(size)
        drawn = self._block[:, self._cursor : self._cursor + size]
        self._cursor += size
        return drawn.view(tensor.shape).to(tensor.dtype)

    def _refill(self, size: int) -> None:
        width = max(self.BLOCK, size, self._width)
        if width != self._width:
            self._width = width
            self._rewind_prefetch()
        if self._next is None:
            self._prefetch()
        assert self._next is not None
        spare, origin, pending = self._next
        for future in pending:
            future.result()
        self._next = None  # before it is used: an interrupt must not make the same noise come twice
        self._block, self._origin, self._cursor = spare, origin, 0
        self._prefetch()

    def _prefetch(self) -> None:
        """Start drawing the next block."""
        if self._pool is None:
            affinity = getattr(os, "sched_getaffinity", None)
            cores = len(affinity(0)) if affinity else os.cpu_count() or 1
            workers = 1 if cores <= 2 else 2
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="noise")
        block = torch.empty(len(self._streams), self._width, device=self._device)
        origin = [g.get_state() for g in self._streams]
        halves = [range(k, len(self._streams), 2) for k in (0, 1)]
        pending = [self._pool.submit(self._fill, block, half) for half in halves]
        self._next = (block, origin, pending)

    def _fill(self, block: Tensor, replicas: range) -> None:
        for i in replicas:
            block[i].normal_(generator=self._streams[i])

    def _rewind_prefetch(self) -> None:
        """Give back a block that was drawn ahead and never used."""
        if self._next is not None:
            _, origin, pending = self._next
            for future in pending:
                future.result()
            for g, state in zip(self._streams, origin, strict=True):
                g.set_state(state)
            self._next = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: streams where they stand, no threads."""
        return {"device": self._device, "state": self.state()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__([0] * len(saved["state"]["streams"]), saved["device"])  # type: ignore[misc]
        self.restore(saved["state"])

    def state(self, devices: Iterable[torch.device] = ()) -> dict[str, Any]:
        place = torch.tensor([self._width, self._cursor])
        return {"streams": torch.stack(self._origin), "place": place}

    def restore(self, state: dict[str, Any]) -> None:
        streams = self._checked(state, "streams")
        self._rewind_prefetch()
        for g, saved in zip(self._streams, streams, strict=True):
            set_state(g, saved)
        self._origin = [g.get_state() for g in self._streams]
        width, cursor = map(int, state["place"].tolist())
        self._width, self._cursor = width, width
        if width:
            self._refill(width)
            self._cursor = cursor
