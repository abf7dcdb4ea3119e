"""One torch thread: tiny models gain nothing from more, and lose much when other tests run beside them."""

import torch

torch.set_num_threads(1)
