"""Settings for all tests."""

import torch

# The tensors are small and other work may be going on: threads that wait for each other would cost more than they give.
torch.set_num_threads(1)
