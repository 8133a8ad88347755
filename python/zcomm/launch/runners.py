"""Programs that start the nodes of a job: ssh for one node each, or pdsh, mpirun or srun for all of them.

Each is called with a list of arguments. ssh and pdsh pass one string, of one shlex.join, to the shell of the node.
Arguments and variables of the user are in the message, and not in that string.
Invariant: nothing of a hostfile, a variable or an argument is read by a shell, or as an option, of any program.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import shutil
import signal
import socket
import sys
from dataclasses import dataclass, field

from zcomm.launch.environment import PAYLOAD
from zcomm.launch.errors import UserError
from zcomm.launch.payload import Payload

_SSH_OPTIONS = (
    "BatchMode=yes",  # no question for a password: there is no terminal
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ControlMaster=no",  # a shared connection would outlive its client
    "ControlPath=none",
    "RemoteCommand=none",
)
SOURCE = 'source "$1" && shift && exec "$@"'
_MOST_MESSAGE = {"ssh": 1_000_000, "pdsh": 100_000}  # bytes: of a pipe; of an argument
_MOST_VARIABLE = 120_000  # bytes: Linux allows 128 KiB


@dataclass(frozen=True)
class Options:
    """Options of the program that starts the nodes: the user's arguments, port of sshd, script to source on a node."""

    launcher_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    venv_script: str | None = None


@dataclass(frozen=True)
class Client:
    """Program to start. hosts: nodes that it starts. message: first line of its standard input; None: it has none.

    polite: signal after which it ends the nodes and gives them time to clean up. ends_all: it does so itself when a
    node has failed; a signal would then make it abandon them. environment: variables that override this process's.
    """

    name: str
    argv: list[str]
    hosts: list[str]
    message: bytes | None = None
    polite: int = signal.SIGTERM
    ends_all: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def check_payload(payload: Payload) -> None:
    """Refuse a job that its launcher cannot start.

    Raises: UserError for a program that is not installed, an unsuitable host name, or a message too long for it.
    """
    launcher, hosts = payload.launcher, list(payload.nodes)
    if launcher != "ssh" or not all(map(is_here, hosts)):
        program_of(launcher)
    for host in hosts:
        if ":" in host and launcher != "ssh":
            raise UserError(f"--launcher {launcher}: takes no IPv6 address such as {host}; --launcher ssh does")
    length, longest = len(payload.encode()), _MOST_MESSAGE.get(launcher, _MOST_VARIABLE)
    if length > longest:
        raise UserError(
            f"--launcher {launcher}: arguments and exported variables are {length} bytes, at most {longest} fit; "
            f"--launcher ssh takes {_MOST_MESSAGE['ssh']}"
        )


def clients(payload: Payload, options: Options) -> list[Client]:
    """Return the programs that start the nodes."""
    message = payload.encode()
    if payload.launcher == "ssh":
        return _ssh(payload, message, options)
    return [shared(payload, message, options, program_of(payload.launcher))]


def shared(payload: Payload, message: str, options: Options, program: str) -> Client:
    """Return the one program that starts all nodes: a process on each. program: path of pdsh, mpirun or srun."""
    hosts, command = list(payload.nodes), node_command("@", options)
    if payload.launcher == "pdsh":
        return _pdsh(hosts, message, options, program)
    if payload.launcher == "openmpi":  # its ranks do not follow the order of a hostfile, if this host is in it
        argv = [program, "--bind-to", "none", *options.launcher_args]
        for host in hosts:
            argv += [*([":"] if host is not hosts[0] else []), "-x", PAYLOAD, "-n", "1", "--host", host, *command, host]
    else:
        argv = [program, *_arguments(payload.launcher, hosts), *options.launcher_args, *command]
    name = "srun" if payload.launcher == "slurm" else "mpirun"
    polite = (
        signal.SIGUSR1 if payload.launcher == "slurm" else signal.SIGTERM
    )  # at SIGTERM srun kills; it passes USR1 on
    ends_all = payload.launcher in ("openmpi", "slurm")
    # In a Slurm job Intel MPI places processes as Slurm would, and not by -ppn, unless this variable is 0.
    own = {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0"} if payload.launcher == "impi" else {}
    return Client(name, argv, hosts, polite=polite, ends_all=ends_all, environment={PAYLOAD: message, **own})


def _arguments(launcher: str, hosts: list[str]) -> list[str]:
    """Return the arguments of mpirun or srun that start one process on each host, free to use all its cores."""
    count = str(len(hosts))
    if launcher == "slurm":
        where = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"]
        return [*where, "--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=1", "--input=none"]
    unbound = ["-genv", "I_MPI_PIN", "0"] if launcher == "impi" else []
    return ["-hosts", ",".join(hosts), "-n", count, "-ppn", "1", *unbound]


def program_of(launcher: str) -> str:
    """Return the path of the launcher's program. Raises: UserError naming the Debian package it is in."""
    programs, package = _PROGRAMS[launcher]
    for program in programs:
        if path := shutil.which(program):
            return path
    raise UserError(f"--launcher {launcher}: {programs[-1]} is not installed (Debian: {package})")


_PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "ssh": (("ssh",), "openssh-client"),
    "pdsh": (("pdsh",), "pdsh"),
    "openmpi": (("mpirun.openmpi", "mpirun"), "openmpi-bin"),
    "mpich": (("mpirun.mpich", "mpiexec.hydra", "mpirun"), "mpich"),
    "impi": (("mpiexec.hydra", "mpirun"), "none; it is Intel's"),
    "mvapich": (("mpirun",), "none; see mvapich.cse.ohio-state.edu"),
    "slurm": (("srun",), "slurm-client"),
}
LAUNCHERS = tuple(_PROGRAMS)


def is_here(host: str) -> bool:
    """Return True if a name is this host's own: its node needs no ssh."""
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().partition(".")[0])


def has_address(host: str) -> bool:
    """Return True if ``host``, by name or address, is this host."""
    if is_here(host):
        return True
    import psutil  # later, as this takes a while

    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(address in own or ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def node_command(message: str, options: Options) -> list[str]:
    """Return the command of a node. PYTHONPATH is the way to zcomm itself, so it cannot be in the message."""
    command = [sys.executable, "-m", "zcomm.launch.node", message]
    if paths := os.environ.get("PYTHONPATH"):
        command = ["env", f"PYTHONPATH={paths}", *command]
    if options.venv_script:
        command = ["bash", "-c", SOURCE, "bash", os.path.abspath(options.venv_script), *command]
    return command


def _ssh_options(options: Options) -> list[str]:
    words = [word for option in _SSH_OPTIONS for word in ("-o", option)]
    return [*words, *(["-p", str(options.ssh_port)] if options.ssh_port is not None else [])]


def _ssh(payload: Payload, message: str, options: Options) -> list[Client]:
    made = []
    for host in payload.nodes:
        command = [*node_command("-", options), host]
        if is_here(host):
            made.append(Client("its process", command, [host], message.encode()))
            continue
        ssh = [program_of("ssh"), "-T", "-x", "-a", *_ssh_options(options), *options.launcher_args, "--", host]
        made.append(Client("ssh", [*ssh, shlex.join(command)], [host], message.encode()))
    return made


def _pdsh(hosts: list[str], message: str, options: Options, program: str) -> Client:
    command = shlex.join(node_command(message, options)).replace("%", "%%") + " %h"  # %h: pdsh puts the host there
    appended = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    variables = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": f"{appended} {' '.join(_ssh_options(options))}"}
    argv = [program, "-S", "-b", "-N", "-f", str(len(hosts)), *options.launcher_args, "-w", ",".join(hosts), command]
    return Client("pdsh", argv, hosts, environment=variables)
