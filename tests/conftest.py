"""One torch thread: tiny models gain nothing from more. Waiting threads sleep, as they do in the service: spinning ones
cost other processes of the machine, and themselves, a multiple of their work."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

torch.set_num_threads(1)
