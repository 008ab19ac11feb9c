"""Settings of every test."""

from typing import Any

import pytest
import torch

import holonomic as hm

# Tests run side by side, one process a core; threads of one would only wait for those of another.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fused",
        action="store_true",
        help="take every step by the compiled kernels, where it can be",
    )


#: Tests of bits, which kernels round differently.
BITWISE = ("test_equals_sgd_bitwise", "test_foreach_and_tensor_by_tensor_agree_bitwise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fused"):
        skip = pytest.mark.skip(reason="compiled kernels round differently")
        for item in items:
            if item.name.startswith(BITWISE):
                item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fused"):
        ordinary = hm.Langevin.__init__

        def fused(self: hm.Langevin, *args: Any, **settings: Any) -> None:
            ordinary(self, *args, **{"fused": not settings.get("foreach"), **settings})

        hm.Langevin.__init__ = fused  # type: ignore[method-assign]
