"""Imports of the fork server of ``ranks``, once for all its processes.

Garbage collections in a rank skip the preloaded objects: with torch's objects a collection takes 0.2 s.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.tensor.parallel",
    "torch.profiler._cupti_monitor",
    "numpy",
    "pytest",
    "zcomm",
    "zcomm._core",
    "zcomm.zero",
    "zcomm.engine",
    "zcomm.backends.mpi.join",
    "zcomm.demo.model",
)

for name in MODULES:
    import_module(name)
# The fork server has found this file by PYTHONPATH, which its processes have as it was.
sys.path.remove(os.path.dirname(__file__))
own, others = os.environ["PYTHONPATH"].partition(os.pathsep)[::2]
os.environ.pop("PYTHONPATH")
if others:
    os.environ["PYTHONPATH"] = others
gc.collect()
gc.freeze()
