"""Shared by all tests: one thread, since threads that share cores with other work spin and crawl."""

import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# For environment ids of the form small_envs:Id-v0, also in processes that tests start.
sys.path.append(str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Puts what takes longest first, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: "compil" not in item.name)
