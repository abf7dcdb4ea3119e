"""One torch thread: tiny models gain nothing from more. Waiting threads sleep, as they do in the service: spinning ones
cost other processes of the machine, and themselves, a multiple of their work."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from hypothesis import Phase, settings

# How long an example takes says more of the machine's other work than of the code.
settings.register_profile("project", deadline=None)
if "MUTANTS" in os.environ:  # a mutant is noticed or not: nobody reads the smallest example
    settings.register_profile("project", deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile("project")
torch.set_num_threads(1)
