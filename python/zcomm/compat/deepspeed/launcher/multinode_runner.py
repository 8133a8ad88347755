"""``deepspeed.launcher.multinode_runner``: the commands by which other launchers start zcomm's nodes.

``get_cmd`` returns a list of arguments, and adds the command's variables to ``environment``. ``zcomm.launch.nodes``
runs such commands itself, with the supervision that a caller of these would have to add.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from zcomm.compat.deepspeed.modules import names_of
from zcomm.launch.job import Job
from zcomm.launch.options import DEFAULT_PORT
from zcomm.launch.payload import Payload
from zcomm.launch.runners import Client, Options, shared
from zcomm.launch.start import program

__getattr__ = names_of(__name__)


class MultiNodeRunner(ABC):
    """Command of one launcher. args: of ``runner.parse_args``. world_info_base64: not used, as nodes get a message."""

    _name = ""

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}
        self._variables: dict[str, str] = {}

    @abstractmethod
    def backend_exists(self) -> Any:
        """Return whether the launcher is installed."""

    @abstractmethod
    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Any]) -> Any:
        """Return the command that starts all nodes."""

    def add_export(self, key: str, var: str) -> None:
        """Set a variable in all ranks. ``exports`` quotes its value if a shell would need quotes."""
        key, var = key.strip(), var.strip()
        self._variables[key] = var
        self.exports[key] = f'"{var}"' if re.search(r"[^\w@%+=:,./-]", var) else var

    def parse_user_args(self) -> list[str]:
        """Return the script's arguments."""
        return list(self.args.user_args)

    @property
    def name(self) -> str:
        """Name of the launcher."""
        return self._name or type(self).__name__

    def validate_args(self) -> None:
        """Check the arguments. Here it returns: each launcher takes all of them."""
        return

    def _client(self, nodes: Mapping[str, int | Sequence[int]], launcher: str, command: str) -> Client:
        """Return the program of a launcher with its arguments."""
        pool = {host: list(range(slots)) if isinstance(slots, int) else list(slots) for host, slots in nodes.items()}
        argv, local_rank_at = program(self.user_script, self.args.module, self.args.no_python, check=False)
        job = Job(
            argv=argv + self.user_arguments,
            world_size=sum(map(len, pool.values())),
            environment=dict(self._variables),
            announce="deepspeed",
            local_rank_at=None if self.args.no_local_rank else local_rank_at,
            deepspeed=True,
        )
        payload = Payload(
            nonce=secrets.token_hex(16),
            launcher=launcher,
            cwd=os.getcwd(),
            nodes=pool,
            address=self.args.master_addr or next(iter(pool)),
            port=self.args.master_port or DEFAULT_PORT,
            job=job,
        )
        arguments = tuple(shlex.split(self.args.launcher_args))
        options = Options(arguments, self.args.ssh_port, self.args.venv_script)
        return shared(payload, payload.encode(), options, command)


class PDSHRunner(MultiNodeRunner):
    """Command of pdsh."""

    _name = "pdsh"

    def backend_exists(self) -> bool:
        """Return True if pdsh is installed."""
        return shutil.which("pdsh") is not None

    def get_cmd(
        self, environment: dict[str, str], active_resources: Mapping[str, Any]
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """Return the command, a command that ends it (the ranks end with pdsh), and the environment of both."""
        client = self._client(active_resources, "pdsh", "pdsh")
        environment.update(client.environment)
        return client.argv, ["true"], environment


class _Shared(MultiNodeRunner):
    """Command of a launcher that starts the nodes of a resource pool: hosts and their numbers of slots."""

    program = "mpirun"

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, Any]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def backend_exists(self) -> bool:
        """Return True if the launcher is installed."""
        return shutil.which(self.program) is not None

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Return the command, and add its variable to ``environment``."""
        client = self._client(active_resources, self.name, self.program)
        environment.update(client.environment)
        return client.argv


class OpenMPIRunner(_Shared):
    """Command of Open MPI's mpirun."""

    _name = "openmpi"

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Return the command. Open MPI's own traffic goes by eth0 if ``args.launcher_args`` names no interface."""
        argv = super().get_cmd(environment, active_resources)
        if "btl_tcp_if_include" in argv:
            return argv
        return [argv[0], "--mca", "btl_tcp_if_include", "eth0", *argv[1:]]


class MPICHRunner(_Shared):
    """Command of MPICH's mpirun."""

    _name = "mpich"


class IMPIRunner(_Shared):
    """Command of Intel MPI's mpirun."""

    _name = "impi"


class MVAPICHRunner(_Shared):
    """Command of MVAPICH's mpirun."""

    _name = "mvapich"


class SlurmRunner(_Shared):
    """Command of Slurm's srun."""

    _name = "slurm"
    program = "srun"
