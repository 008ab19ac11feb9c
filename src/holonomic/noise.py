"""The optimizer's own source of normal numbers: apart from torch's global one, and saved with it."""

import torch
from torch import Tensor

_KEY = "rng_state."


class Noise:
    """Standard normal tensors from one generator per device.

    Without a seed, one is drawn from torch's global generator when the first number is needed, so
    that ``torch.manual_seed`` makes a run reproducible and two optimizers differ.
    """

    def __init__(self, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}
        if generator is not None:
            self._generators[str(generator.device)] = generator

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of a device; made on first use."""
        key = str(device)
        if key not in self._generators:
            if self._seed is None:
                self._seed = int(torch.randint(2**62, ()).item())
            self._generators[key] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[key]

    def like(self, tensor: Tensor) -> Tensor:
        """Independent standard normal numbers in the shape of a tensor."""
        return torch.empty_like(tensor).normal_(generator=self.on(tensor.device))

    def state(self) -> dict[str, Tensor]:
        """The state of every generator, by a key that names its device."""
        return {_KEY + device: g.get_state() for device, g in self._generators.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue every stream where ``state`` left it."""
        for key, value in state.items():
            self.on(torch.device(key.removeprefix(_KEY))).set_state(value.cpu())

    @staticmethod
    def owns(key: str) -> bool:
        """Whether an entry of a saved group is a generator's state."""
        return key.startswith(_KEY)
