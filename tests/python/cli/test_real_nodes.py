"""`zcomm run` on four nodes by ssh, pdsh, Open MPI, MPICH and Slurm themselves (each skipped if not installed).

A node is a network namespace with its own host name that runs sshd or slurmd. The first is also the front.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from networks import Networks, networks
from test_launch import alive, pids_from, wait_until
from tiers import long
from zcomm.demo.options import SIZES, DemoConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout_s(300)]

NODES = 4
SSH_PORT, MASTER_PORT = "2222", "29611"  # each namespace has all ports free
NEEDED = {
    "ssh": {"/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"},
    "pdsh": {"pdsh": "pdsh"},
    "openmpi": {"mpirun.openmpi": "openmpi-bin"},
    "mpich": {"mpirun.mpich": "mpich"},
    "slurm": {"srun": "slurm-client", "slurmctld": "slurmctld", "slurmd": "slurmd", "munged": "munge"},
}
LAUNCHERS = tuple(NEEDED)
DAEMONS = ("orted", "hydra_pmi_proxy")  # of a job by mpirun


def need(launcher: str) -> None:
    """Skip the test if a program of the launcher is missing."""
    for program, package in NEEDED[launcher].items():
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"{program} is not installed (Debian: {package})")


@dataclass
class Cluster:
    """Four nodes with sshd. folder: the cluster's files; node n has its temporary files in folder/tmp<n>."""

    made: Networks
    folder: Path

    @property
    def addresses(self) -> list[str]:
        return [self.made.fast(node) for node in range(NODES)]

    def inside(self, node: int, *argv: str) -> list[str]:
        """Return the command that runs ``argv`` on a node, under its host name."""
        name = f'hostname node{node + 1} && exec "$@"'
        network = f"--net=/run/netns/{self.made.names[node]}"  # `ip netns exec` would hide the cgroups from slurmd
        return ["nsenter", network, "unshare", "--uts", "sh", "-c", name, "sh", *argv]

    def command(self, launcher: str, *options: str, hosts: str | None = None) -> list[str]:
        """Return `zcomm run` on these nodes, as it is run on the first one."""
        names = [f"node{node + 1}" for node in range(NODES)] if launcher == "slurm" else self.addresses
        text = "".join(f"{name} slots=1\n" for name in names) if hosts is None else hosts
        (self.folder / "hosts").write_text(text)
        meeting = ["--master_addr", self.addresses[0], "--master_port", MASTER_PORT]
        run = [sys.executable, "-m", "zcomm.cli", "run", "-H", str(self.folder / "hosts"), "--launcher", launcher]
        if launcher == "openmpi":
            options = ("--launcher_args", "--allow-run-as-root --mca oob_tcp_if_include fast0", *options)
        return self.inside(0, *run, *meeting, *options)

    def environment(self) -> dict[str, str]:
        """Return the environment of the front, in which `ssh` is this cluster's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI_", "SLURM_"))}
        own = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin", "HOME": str(self.folder)}
        slurm = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        return {**kept, **own, **slurm, "TMPDIR": str(self.folder / "tmp0"), "OMP_NUM_THREADS": "1"}

    def start(self, command: list[str], cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**self.environment(), **(env or {})},
        )

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Return exit code and output, once no process of the job is left on any node."""
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        wait_until(lambda: self.left() == [], f"the end of {self.left()}")
        return process.returncode, out, err

    def left(self) -> list[str]:
        """Return a job's remains: processes of nodes, sockets that listen, files except pages of ranks."""
        files = [file for node in range(NODES) for file in (self.folder / f"tmp{node}").glob("zcomm*")]
        pages = f"zcomm-{os.getuid()}"
        found = [
            str(file) for file in files if file.name != pages or [each.name for each in file.iterdir()] != ["pages"]
        ]
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and str(self.folder).encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"zcomm.launch.node" in command or Path(os.fsdecode(command[0])).name in DAEMONS:
                        found.append(f"process {entry.name}")
        for name in self.made.names:
            words = ["ip", "netns", "exec", name, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
            table = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            listens = [line.split()[1] for line in table.splitlines() if line.split()[3] == "0A"]
            found += [f"socket {address}" for address in listens if address.endswith(f":{int(MASTER_PORT):04X}")]
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need("ssh")
    folder = tmp_path_factory.mktemp("cluster")
    with networks(NODES) as made, contextlib.ExitStack() as stack:
        yield set_up(Cluster(made, folder), stack)


def set_up(cluster: Cluster, stack: contextlib.ExitStack) -> Cluster:
    folder = cluster.folder
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "bin").mkdir()
    (folder / "ssh_config").write_text(
        f"Host *\nPort {SSH_PORT}\nIdentityFile {folder}/user\nIdentitiesOnly yes\nStrictHostKeyChecking no\n"
        "UserKnownHostsFile /dev/null\nGlobalKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd drops its privileges in this directory
    for node, address in enumerate(cluster.addresses):
        (folder / f"tmp{node}").mkdir()
        config = folder / f"sshd{node}"
        config.write_text(
            f"ListenAddress {address}\nPort {SSH_PORT}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
            "PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            f"SetEnv TMPDIR={folder}/tmp{node} OMP_NUM_THREADS=1\nMaxStartups 100\n"
        )
        log = stack.enter_context((folder / f"sshd{node}.log").open("wb"))
        command = cluster.inside(node, "/usr/sbin/sshd", "-D", "-e", "-f", str(config))
        stack.callback(end, subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
    for address in cluster.addresses:
        probe = cluster.inside(0, str(folder / "bin" / "ssh"), "-o", "BatchMode=yes", address, "true")
        wait_until(lambda probe=probe: subprocess.run(probe, capture_output=True).returncode == 0, f"sshd on {address}")
    return cluster


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def slurm(cluster: Cluster) -> Iterator[None]:
    need("slurm")
    with daemons(cluster):
        yield


@contextlib.contextmanager
def daemons(cluster: Cluster) -> Iterator[None]:
    """Start Slurm's daemons on the nodes: a controller on the first one, and munge for all."""
    folder = cluster.folder
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    munged, ctld, slurmd = (str(shutil.which(name, path=path)) for name in ("munged", "slurmctld", "slurmd"))
    private = folder / "munge"
    private.mkdir(mode=0o700)
    (private / "key").write_bytes(os.urandom(128))
    (private / "key").chmod(0o600)
    (folder / "slurm.conf").write_text(
        f"ClusterName=zcomm\nSlurmctldHost=node1({cluster.addresses[0]})\nSlurmUser=root\nAuthType=auth/munge\n"
        f"AuthInfo=socket={private}/socket\nCryptoType=crypto/munge\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\nSlurmctldPidFile={folder}/ctld.pid\n"
        f"SlurmdPidFile={folder}/slurmd-%n.pid\nSlurmctldLogFile={folder}/ctld.log\nSlurmdLogFile={folder}/slurmd-%n.log\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\nSwitchType=switch/none\n"
        "SelectType=select/cons_res\nSelectTypeParameters=CR_CPU\nJobAcctGatherType=jobacct_gather/none\n"
        + "".join(f"NodeName=node{n + 1} NodeAddr={a} CPUs=1 State=UNKNOWN\n" for n, a in enumerate(cluster.addresses))
        + "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES\n"
    )
    (folder / "state").mkdir()
    with contextlib.ExitStack() as stack:

        def daemon(node: int, name: str, *argv: str) -> None:
            log = stack.enter_context((folder / f"{name}.out").open("wb"))
            environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
            command = cluster.inside(node, *argv)
            stack.callback(end, subprocess.Popen(command, stdout=log, stderr=log, env=environment))

        where = [f"--{name}={private}/{file}" for name, file in (("key-file", "key"), ("pid-file", "pid"))]
        where += [f"--log-file={private}/log", f"--seed-file={private}/seed", f"--socket={private}/socket"]
        daemon(0, "munged", munged, "--foreground", "--force", *where)
        wait_until((private / "socket").exists, "munge's socket")
        daemon(0, "slurmctld", ctld, "-D")
        for node in range(NODES):
            daemon(node, f"slurmd{node}", slurmd, "-D", "-c")
        idle = cluster.inside(0, "sinfo", "-h", "-t", "idle", "-o", "%D")

        def are_up() -> bool:
            told = subprocess.run(idle, capture_output=True, text=True, env=cluster.environment())
            return told.stdout.strip() == str(NODES)

        try:
            wait_until(are_up, "Slurm's nodes", 60.0)
        except AssertionError:
            logs = "".join(file.read_text()[-1500:] for file in [*folder.glob("*.log"), *folder.glob("slurm*.out")])
            pytest.skip(f"Slurm's daemons do not start here: {logs[-3000:]}")
        yield


@pytest.fixture(scope="module")  # module scope: Slurm's daemons start before a test looks for remains
def launcher(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    name: str = request.param
    need(name)
    if name == "slurm":
        request.getfixturevalue("slurm")
    return name


by_each = pytest.mark.parametrize("launcher", LAUNCHERS, indirect=True)
SOME = [each if each == "ssh" else long(each) for each in LAUNCHERS]  # test_nodes.py shows each launcher, faked

# --- the same numbers ------------------------------------------------------------------------------------------------

DEMO = """
import hashlib, os, sys
if "--here" in sys.argv: os.environ["ZCOMM_HOST_ID"] = "node" + os.environ["RANK"]  # TCP between ranks of one host
import zcomm
from zcomm.demo import train
from zcomm.demo.options import DemoConfig
def run(self, run=train.Training.run):
    run(self)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in self.form.module.parameters())
    print("digest", hashlib.sha256(weights).hexdigest(), zcomm.init().backend, os.uname().nodename, flush=True)
train.Training.run = run
train.run(DemoConfig.from_json(sys.argv[1]))
"""


def demo(folder: Path) -> list[str]:
    """Return the script and arguments of a short demo."""
    fields = {
        **SIZES["tiny"],
        "steps": 12,
        "size": "tiny",
        "name": "x",
        "run_dir": str(folder / "run"),
        "world_size": 4,
    }
    more = {"stage": 2, "offload": "none", "nvme_path": None, "precision": "fp32", "accum": 1, "clip": 1.0}
    config = DemoConfig(**{**fields, **more}, bucket_mb=1.0, overlap=True, seed=1, quiet=True)  # type: ignore[arg-type]
    (folder / "run").mkdir(exist_ok=True)
    (folder / "demo.py").write_text(DEMO)
    return [str(folder / "demo.py"), config.to_json()]


def digests(out: str) -> dict[int, list[str]]:
    """Return each rank's printed digest of the weights, backend and host."""
    lines = [line.split() for line in out.splitlines() if " digest " in line]
    return {int(words[0].strip("[]")): words[2:] for words in lines}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights of four ranks on one host over TCP."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "zcomm.cli", "run", "-n", "4", *demo(folder), "--here"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder)
    found = digests(done.stdout)
    assert sorted(found) == [0, 1, 2, 3], done.stderr
    assert {words[1] for words in found.values()} == {"tcp"} and len({words[0] for words in found.values()}) == 1
    return found[0][0]


@pytest.mark.parametrize("launcher", SOME, indirect=True)
def test_the_demo_trains_the_same_weights(cluster: Cluster, launcher: str, alone: str, tmp_path: Path) -> None:
    code, out, err = cluster.finish(cluster.start([*cluster.command(launcher), *demo(tmp_path)], tmp_path))
    assert code == 0, err
    found = digests(out)
    assert {rank: words[1:] for rank, words in found.items()} == {n: ["tcp", f"node{n + 1}"] for n in range(NODES)}
    assert {words[0] for words in found.values()} == {alone}


# --- failures, and no process is left --------------------------------------------------------------------------------

WAITS = """
import os, signal, sys, time
here = os.environ["FOLDER"]
open(f"{here}/pid-{os.getpid()}", "w").close()
open(f"{here}/rank{os.environ['RANK']}-{os.getpid()}", "w").close()
while len([f for f in os.listdir(here) if f.startswith("pid-")]) < 4: time.sleep(0.02)
"""
KILLED = WAITS + 'if os.environ["RANK"] == "2": os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(300)\n'


def begin(cluster: Cluster, launcher: str, script: str, folder: Path, **how: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script)
    command = cluster.command(launcher, "--env", f"FOLDER={folder}", **how)
    return cluster.start([*command, "script.py"], folder)


@by_each
def test_a_killed_rank_is_named_with_its_node(cluster: Cluster, launcher: str, tmp_path: Path) -> None:
    code, _, err = cluster.finish(begin(cluster, launcher, KILLED, tmp_path))
    name = "node3" if launcher == "slurm" else cluster.addresses[2]
    assert code == 137, err
    verdict = [line for line in err.splitlines() if line.startswith("zcomm run: ")]
    assert verdict[0].startswith(f"zcomm run: node {name}, rank 2 (pid ") and "killed by SIGKILL" in verdict[0], err
    assert [pid for pid in pids_from(tmp_path, 4) if alive(pid)] == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("launcher", SOME, indirect=True)
def test_a_front_that_ends_leaves_nothing(cluster: Cluster, launcher: str, tmp_path: Path, signum: int) -> None:
    process = begin(cluster, launcher, WAITS + "time.sleep(300)\n", tmp_path)
    pids = pids_from(tmp_path, 4)
    process.send_signal(signum)  # `nsenter` and `unshare` have replaced themselves by the front
    code, _, err = cluster.finish(process)
    if signum == signal.SIGINT:
        assert code == 130 and "zcomm run: stopped by SIGINT; all ranks have ended" in err
    wait_until(lambda: not any(map(alive, pids)), "the end of all ranks")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"], indirect=True)
def test_a_killed_sshd_is_named_with_its_node(cluster: Cluster, launcher: str, tmp_path: Path) -> None:
    process = begin(cluster, launcher, WAITS + "time.sleep(300)\n", tmp_path)
    pids = pids_from(tmp_path, 4)
    rank = int(next(tmp_path.glob("rank2-*")).name.rpartition("-")[2])
    front = parent(parent(rank))
    sshd = parent(front)
    while "sshd" not in Path(f"/proc/{sshd}/comm").read_text():
        sshd = parent(sshd)
    os.kill(sshd, signal.SIGKILL)
    code, _, err = cluster.finish(process)
    what = "ssh ended with status 255" if launcher == "ssh" else "pdsh@node1: "
    assert code == 255 and f"zcomm run: node {cluster.addresses[2]}: {what}" in err, err
    wait_until(lambda: not any(map(alive, pids)), "the end of all ranks")


def test_an_unreachable_host_is_named(cluster: Cluster, tmp_path: Path) -> None:
    for missing, why in (("10.231.78.99", "No route to host"), ("no-such-host.invalid", "Could not resolve hostname")):
        hosts = "".join(f"{host} slots=1\n" for host in [*cluster.addresses[:2], missing])
        code, _, err = cluster.finish(begin(cluster, "ssh", WAITS, tmp_path, hosts=hosts))
        assert code == 255
        line = next(line for line in err.splitlines() if line.startswith("zcomm run: "))
        assert line.startswith(f"zcomm run: node {missing}: ssh ended with status 255: ssh: ") and why in line, err


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich"], indirect=True)
def test_an_unreachable_host_ends_the_other_launchers(cluster: Cluster, launcher: str, tmp_path: Path) -> None:
    missing = "10.231.78.99"
    hosts = "".join(f"{host} slots=1\n" for host in [*cluster.addresses[:2], missing])
    code, _, err = cluster.finish(begin(cluster, launcher, WAITS, tmp_path, hosts=hosts))
    assert code != 0 and missing in err, err
    assert f"zcomm run: node {missing}: ssh: connect to host {missing} port {SSH_PORT}: No route to host" in err, err


def test_a_cable_that_is_cut_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    process = begin(cluster, "ssh", WAITS + "time.sleep(300)\n", tmp_path)
    pids = pids_from(tmp_path, 4)
    down = ["ip", "-n", cluster.made.names[3], "link", "set", "fast0"]
    subprocess.run([*down, "down"], check=True)
    try:
        _, err = process.communicate(timeout=100)
    finally:
        subprocess.run([*down, "up"], check=True)
    assert process.returncode == 255
    assert f"zcomm run: node {cluster.addresses[3]}: ssh ended with status 255" in err, err
    cluster.finish(process)
    wait_until(lambda: not any(map(alive, pids)), "the end of all ranks", 60.0)


# --- views of a job --------------------------------------------------------------------------------------------------

SEEN = """
import os, time, torch, zcomm
comm = zcomm.init()
model = torch.nn.Linear(8, 8)
opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1)
stop = torch.zeros(1)
while not stop.item():
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    zcomm.log(loss=loss)
    time.sleep(0.02)
    stop.fill_(os.path.exists("stop"))
    comm.all_reduce(stop)  # no rank goes on without the others
opt.close()
zcomm.shutdown()
"""


@pytest.mark.long  # test_nodes.py has the same pages, of faked hosts
def test_a_job_on_several_hosts_is_seen_by_top_and_in_its_report(cluster: Cluster, tmp_path: Path) -> None:
    name = f"{tmp_path.name}.py"  # a unique job name, because pages of ended jobs remain
    (tmp_path / name).write_text(SEEN)
    hosts = f"{cluster.addresses[0]} slots=1\n{cluster.addresses[1]} slots=2\n"
    command = cluster.command("ssh", "--report", str(tmp_path / "report"), hosts=hosts)
    process = cluster.start([*command, name], tmp_path)
    top = [sys.executable, "-m", "zcomm.cli", "top", "--host"]

    def look(node: int, *words: str) -> tuple[int, str, str]:
        argv = cluster.inside(2, *top, cluster.addresses[node], *words)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=cluster.environment())
        return done.returncode, done.stdout, done.stderr

    def frames(node: int) -> list[dict[str, Any]]:
        _, out, err = look(node, name, "--json")
        assert out, err
        return list(json.loads(out)["jobs"])

    def all_train() -> bool:
        assert process.poll() is None, process.communicate()
        return sum(rank["step"] >= 3 for node in (0, 1) for each in frames(node) for rank in each["ranks"]) == 3

    try:
        wait_until(all_train, "three ranks", 60.0)
        both = [frames(node) for node in (0, 1)]
        for jobs, host, ranks in zip(both, ("node1", "node2"), ([0], [1, 2]), strict=True):
            (job,) = jobs
            assert (job["name"], job["host"], job["world_size"], job["running"]) == (name, host, 3, True)
            assert [rank["rank"] for rank in job["ranks"]] == ranks
            assert {rank["state"] for rank in job["ranks"]} == {"running"}
        assert both[0][0]["job"] == both[1][0]["job"]
        _, out, err = look(1, "--once")
        assert "on node2" in out and [line.split()[:2] for line in out.splitlines() if " running " in line] == [
            ["1", "running"],
            ["2", "running"],
        ], out + err
        code, _, err = look(3, name)  # by its name, because other jobs may run
        assert code == 1 and f"{name}: no such job of this user has a page on" in err
        nowhere = cluster.inside(2, *top, "10.231.78.99")
        done = subprocess.run(nowhere, capture_output=True, text=True, timeout=60, env=cluster.environment())
        assert done.returncode == 2 and "No route to host (ssh ended with 255)" in done.stderr
    finally:
        (tmp_path / "stop").touch()
        code, _, err = cluster.finish(process)
    assert code == 0, err
    page = (tmp_path / "report" / "report.html").read_text()
    assert "3 ranks, tcp" in page and "All ranks ended well." in page and "There are no records" not in page
    assert re.findall(r"<td>(node\d)</td>", page)[:3] == ["node1", "node2", "node2"], "the table of ranks"


# --- hostile text ----------------------------------------------------------------------------------------------------

HOSTILE = "a b'c\"d;touch $PROOF/1;$(touch $PROOF/2)`touch $PROOF/3`\ntouch $PROOF/4\n|touch $PROOF/5&%h%%\\ -oX"
SHOW = """
import json, os, sys
print(json.dumps([os.environ["RANK"], sys.argv[1:], os.environ["NCCL_VALUE"], os.getcwd(), os.environ["FROM_FILE"]]))
"""


@pytest.mark.parametrize("launcher", SOME, indirect=True)
def test_hostile_text_reaches_the_ranks_as_it_is(cluster: Cluster, launcher: str, tmp_path: Path) -> None:
    proof, folder = tmp_path / "proof", tmp_path / HOSTILE.replace("/", "_")
    proof.mkdir()
    folder.mkdir()
    (folder / "script.py").write_text(SHOW)
    (folder / "activate").write_text(f"export PROOF={proof}\n")
    (folder / ".deepspeed_env").write_text("FROM_FILE=$(touch $PROOF/6);`touch $PROOF/7`'x y\n")
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    command = cluster.command(launcher, "--venv_script", str(folder / "activate"))
    env = {"PROOF": str(proof), "NCCL_VALUE": HOSTILE, "PYTHONPATH": paths}
    arguments = [HOSTILE, "", "--", "-x"]
    code, out, err = cluster.finish(cluster.start([*command, "script.py", *arguments], folder, env))
    assert code == 0, err
    shown = sorted(json.loads(line.partition(" ")[2]) for line in out.splitlines())
    file = "$(touch $PROOF/6);`touch $PROOF/7`'x y"
    assert shown == [[str(rank), arguments, HOSTILE, str(folder), file] for rank in range(NODES)]
    time.sleep(0.2)
    assert list(proof.iterdir()) == []


# --- elastic ---------------------------------------------------------------------------------------------------------


@pytest.mark.long  # torchrun starts ranks of one host in other tests
def test_torchrun_starts_the_ranks_of_an_elastic_job(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, torch, zcomm\ncomm = zcomm.init()\nx = torch.ones(8)\ncomm.all_reduce(x)\n"
        "print('sum', x.sum().item(), os.environ['TORCHELASTIC_MAX_RESTARTS'], os.uname().nodename)\n"
    )
    hosts = "".join(f"{host} slots=1\n" for host in cluster.addresses[:2])
    options = ["--elastic_training", "--min_elastic_nodes", "2"]
    command = cluster.command("ssh", *options, hosts=hosts)
    code, out, err = cluster.finish(cluster.start([*command, "script.py"], tmp_path))
    assert code == 0, err
    assert sorted(line.partition("sum ")[2] for line in out.splitlines()) == ["16.0 100 node1", "16.0 100 node2"]
