"""Settings of every test."""

import torch

# Tests run side by side, one process per core; threads of one would only wait for those of another.
torch.set_num_threads(1)
