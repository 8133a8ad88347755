"""``deepspeed.launcher.runner``: the words that other launchers read from DeepSpeed's. (Accelerate's imports them.)"""

from __future__ import annotations

import os

from zcomm.compat.deepspeed.lazy import names_of

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")  # file of variables for other hosts
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]

__getattr__ = names_of(__name__)
