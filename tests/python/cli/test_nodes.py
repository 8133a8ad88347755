"""`zcomm run` on several nodes, with programs in place of ssh, pdsh, mpirun and srun that start the nodes on this host.

Commands of the nodes, environment of ranks, which failure is named, and that no process outlives a job.
test_real_nodes.py has the programs themselves. Ranks import neither torch nor zcomm.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from test_launch import alive, pids_from, wait_until
from tiers import long, one_in, slow
from zcomm.launch.records import Records, record_lines

Run = Callable[..., "subprocess.Popen[str]"]
LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
# test_real_nodes.py runs most of the others. Those that differ only in the command line are long tests.
OTHERS = {"ssh": str, "slurm": slow, "pdsh": slow, "openmpi": long}
SOME = [OTHERS.get(each, long)(each) for each in LAUNCHERS]
COMMAND = [sys.executable, "-m", "zcomm.cli"]

# Stand-in for a launcher: records its arguments, and starts one process for each host, as the real one does. Each
# node has its number in that launcher's form. Exits with the first status that is not 0.
LAUNCHER = """
import json, os, shlex, subprocess, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([name, arguments]) + "\\n")
def after(option):
    return arguments[arguments.index(option) + 1]
def of_shell(command, host):  # as sshd: the shell of the user gets one string
    return ["/bin/sh", "-c", command]
nodes = []
if name == "ssh":
    split = arguments.index("--")
    host, *command = arguments[split + 1:]
    if host in os.environ.get("UNREACHABLE", "").split(","):
        print(f"ssh: connect to host {host} port 22: No route to host", file=sys.stderr)
        sys.exit(255)
    os.environ["NODE_NAME"] = host
    os.execv("/bin/sh", ["/bin/sh", "-c", " ".join(command)])
if name == "pdsh":
    assert os.environ["PDSH_RCMD_TYPE"] == "ssh"
    command = arguments[-1]
    for host in after("-w").split(","):
        text = command.replace("%%", "\\0").replace("%h", host).replace("\\0", "%")
        nodes.append((["/bin/sh", "-c", text], {"NODE_NAME": host}))
else:
    assert os.environ["ZCOMM_NODE_PAYLOAD"]
    if name == "mpiexec.hydra":  # without it a Slurm job's own placement counts, and not -ppn
        assert os.environ["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] == "0"
    start = min(arguments.index(word) for word in ("env", "bash", sys.executable) if word in arguments)
    if name == "mpirun.openmpi":
        assert arguments.count("-x") == arguments.count("--host"), "a variable goes to one part of the command alone"
        hosts = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--host"]
        arguments = arguments[:arguments.index(":")]
    elif name == "srun":
        hosts = [a for a in arguments if a.startswith("--nodelist=")][0].removeprefix("--nodelist=").split(",")
    else:
        hosts = after("-hosts").split(",")
    variables = {"srun": ["SLURM_NODEID", "SLURM_PROCID"], "mpirun.openmpi": ["OMPI_COMM_WORLD_RANK"]}
    for number, host in enumerate(hosts):
        names = variables.get(name, ["PMI_RANK", "MV2_COMM_WORLD_RANK"])
        argv = arguments[start:]
        if name == "mpirun.openmpi":
            argv[-1] = host
        nodes.append((argv, {"NODE_NAME": host, **dict.fromkeys(names, str(number))}))
children = [subprocess.Popen(argv, env={**os.environ, **env}, stdin=subprocess.DEVNULL) for argv, env in nodes]
codes = []
while len(codes) < len(children):
    pid, status = os.wait()
    codes.append(os.waitstatus_to_exitcode(status))
    if codes[-1] and name in ("mpirun.openmpi", "srun"):  # these end the other nodes
        for child in children:
            if child.pid != pid:
                child.terminate()
sys.exit(next((code for code in codes if code), 0))
"""
PROGRAMS = ("ssh", "pdsh", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra", "mpirun", "srun")

SHOW = """
import json, os, sys
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_NAME MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES".split()
shown = {name: os.environ.get(name) for name in [*names, "ZCOMM_INIT_METHOD", "VALUE", "NCCL_VALUE", "SOURCED"]}
foreign = [name for name in os.environ if name.startswith(("OMPI_", "PMI_", "MV2_", "ZCOMM_NODE"))]
print(json.dumps({**shown, "argv": sys.argv[1:], "cwd": os.getcwd(), "foreign": foreign}), flush=True)
"""
HOSTS = "alpha slots=1\nbeta slots=2\ngamma slots=1\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start `zcomm run` with stand-ins of all launchers on PATH; its temporary files are in tmp_path/tmp."""
    for folder in ("bin", "tmp", "work"):
        (tmp_path / folder).mkdir()
    for name in PROGRAMS:
        file = tmp_path / "bin" / name
        file.write_text(f"#!{sys.executable}\n{LAUNCHER}")
        file.chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def start(
        script: str,
        *options: str,
        args: tuple[str, ...] = (),
        hosts: str = HOSTS,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        folder = cwd or tmp_path / "work"
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text(script)
        (tmp_path / "hosts").write_text(hosts)
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI_", "SLURM_"))}
        own = {"PATH": path, "TMPDIR": str(tmp_path / "tmp"), "RECORD": str(tmp_path / "record"), "HOME": str(tmp_path)}
        process = subprocess.Popen(
            [*COMMAND, "run", "-H", str(tmp_path / "hosts"), *options, "script.py", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**kept, **own, **(env or {})},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    wait_until(lambda: not list((tmp_path / "tmp").iterdir()), "the removal of the private directories")


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def shown(out: str) -> dict[int, dict[str, Any]]:
    """Return each rank's output of SHOW."""
    ranks = {}
    for line in out.splitlines():
        tag, _, content = line.partition(" ")
        ranks[int(tag.strip("[]"))] = json.loads(content)
    return ranks


def recorded(tmp_path: Path) -> list[tuple[str, list[str]]]:
    return [tuple(json.loads(line)) for line in (tmp_path / "record").read_text().splitlines()]


@pytest.mark.parametrize("launcher", one_in(3, 0, LAUNCHERS))
def test_ranks_of_three_nodes(run: Run, launcher: str) -> None:
    code, out, err = finish(run(SHOW, "--launcher", launcher, "--master_port", "29777", "-i", "alpha@beta:1,0@gamma"))
    assert code == 0, err
    ranks = shown(out)
    assert sorted(ranks) == [0, 1, 2, 3]
    for rank, (name, local_rank, size, devices) in enumerate(
        [("alpha", 0, 1, "0"), ("beta", 0, 2, "0,1"), ("beta", 1, 2, "0,1"), ("gamma", 0, 1, "0")]
    ):
        here = ranks[rank]
        assert (here["RANK"], here["WORLD_SIZE"], here["NODE_NAME"]) == (str(rank), "4", name)
        assert (here["LOCAL_RANK"], here["LOCAL_WORLD_SIZE"]) == (str(local_rank), str(size))
        assert here["CUDA_VISIBLE_DEVICES"] == devices
        assert (here["MASTER_ADDR"], here["MASTER_PORT"]) == ("alpha", "29777")
        assert here["ZCOMM_INIT_METHOD"] == "tcp://alpha:29777"
        assert here["foreign"] == []
    assert "zcomm-node" not in err


# --- hostile text ----------------------------------------------------------------------------------------------------

HOSTILE = "a b'c\"d;touch $PROOF/1;$(touch $PROOF/2)`touch $PROOF/3`\ntouch $PROOF/4\n|touch $PROOF/5&%h%%\\ -oX"


@pytest.mark.parametrize("launcher", one_in(3, 0, LAUNCHERS))
def test_hostile_text_starts_nothing_else(run: Run, tmp_path: Path, launcher: str) -> None:
    """Arguments, variables, paths: each reaches the ranks unchanged or is not sent, and no shell reads it."""
    proof = tmp_path / "proof"
    proof.mkdir()
    folder = tmp_path / HOSTILE.replace("/", "_")
    folder.mkdir()
    venv = folder / "activate"
    venv.write_text("export SOURCED=yes\n")
    (folder / ".deepspeed_env").write_text("VALUE=$(touch $PROOF/6);\"`touch $PROOF/7`'x y\n")
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    options = ["--launcher", launcher, "--venv_script", str(venv), "--tee", str(folder / "logs")]
    env = {"PROOF": str(proof), "NCCL_VALUE": HOSTILE, "PYTHONPATH": paths}
    code, out, err = finish(run(SHOW, *options, args=(HOSTILE, "", "--", "-x"), env=env, cwd=folder))
    assert code == 0, err
    for rank in shown(out).values():
        assert rank["argv"] == [HOSTILE, "", "--", "-x"]
        assert rank["NCCL_VALUE"] == HOSTILE
        assert rank["VALUE"] == "$(touch $PROOF/6);\"`touch $PROOF/7`'x y"
        assert rank["SOURCED"] == "yes"
        assert rank["cwd"] == str(folder)
    assert (folder / "logs" / "rank3.out").exists()
    assert list(proof.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    ["-oProxyCommand=touch${IFS}x slots=1", "$(touch) slots=1", "a;touch slots=1", "a'b slots=1", "exec:a slots=1"],
)
def test_a_hostile_host_starts_nothing_at_all(run: Run, tmp_path: Path, line: str) -> None:
    code, out, err = finish(run(SHOW, hosts=f"alpha slots=1\n{line}\n"))
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert f"{tmp_path / 'hosts'}, line 2" in err and repr(line)[1:-1] in err.replace('"', "'").replace("\\'", "'")
    assert not (tmp_path / "record").exists()


def test_arguments_of_the_programs(run: Run, tmp_path: Path) -> None:
    """Compare the arguments of each program, except the node's command."""
    hosts = "alpha,beta,gamma"
    expected = {
        "pdsh": ["-S", "-b", "-N", "-f", "3", "--mine", "a b", "-w", hosts],
        "mpirun.mpich": ["-hosts", hosts, "-n", "3", "-ppn", "1", "--mine", "a b"],
        "mpiexec.hydra": ["-hosts", hosts, "-n", "3", "-ppn", "1", "-genv", "I_MPI_PIN", "0", "--mine", "a b"],
        "mpirun": ["-hosts", hosts, "-n", "3", "-ppn", "1", "--mine", "a b"],
        "srun": "--nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=alpha,beta,gamma --export=ALL --cpu-bind=none "
        "--kill-on-bad-exit=1 --input=none --mine".split(),
    }
    for launcher, program in zip(LAUNCHERS, ["ssh", "pdsh", "mpirun.openmpi", *list(expected)[1:]], strict=True):
        (tmp_path / "record").unlink(missing_ok=True)
        code, _, err = finish(
            run(SHOW, "--launcher", launcher, "--launcher_args", "--mine 'a b'", "--ssh_port", "2222")
        )
        assert code == 0, err
        calls = recorded(tmp_path)
        assert {name for name, _ in calls} == {program}
        if launcher == "ssh":
            assert sorted(arguments[arguments.index("--") + 1] for _, arguments in calls) == hosts.split(",")
            for _, arguments in calls:
                assert "BatchMode=yes" in arguments and arguments[arguments.index("-p") + 1] == "2222"
                assert arguments[arguments.index("--") - 2 : arguments.index("--")] == ["--mine", "a b"]
                assert len(arguments) == arguments.index("--") + 3, "one string for the shell of the node"
        elif launcher == "openmpi":
            argv = calls[0][1]
            assert argv[:4] == ["--bind-to", "none", "--mine", "a b"]
            parts = shlex.join(argv[4:]).split(" : ")
            for part, host in zip(parts, hosts.split(","), strict=True):
                assert part.startswith(f"-x ZCOMM_NODE_PAYLOAD -n 1 --host {host} ") and part.endswith(f" {host}")
        else:
            assert calls[0][1][: len(expected[program])] == expected[program]
            assert "a b" in calls[0][1]


def test_missing_programs_are_named_with_their_package(run: Run, tmp_path: Path) -> None:
    for name in PROGRAMS:
        (tmp_path / "bin" / name).unlink()
    only = {"PATH": str(tmp_path / "bin")}
    packages = {"ssh": "openssh-client", "pdsh": "pdsh", "openmpi": "openmpi-bin", "mpich": "mpich"}
    for launcher, package in (packages | {"slurm": "slurm-client"}).items():
        code, out, err = finish(run(SHOW, "--launcher", launcher, env=only))
        assert (code, out) == (2, ""), err
        assert f"--launcher {launcher}: " in err and f"is not installed (Debian: {package})" in err
        assert len(err.splitlines()) == 1


# --- failures --------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, time
open(os.environ["FOLDER"] + f"/pid-{os.getpid()}", "w").close()
while len([f for f in os.listdir(os.environ["FOLDER"]) if f.startswith("pid-")]) < 4: time.sleep(0.02)
if os.environ["RANK"] == "2": os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""


@pytest.mark.parametrize("launcher", SOME)
def test_a_killed_rank_ends_all_nodes_and_is_named(run: Run, tmp_path: Path, launcher: str) -> None:
    process = run(KILLED, "--launcher", launcher, "--env", f"FOLDER={tmp_path}")
    pids = pids_from(tmp_path, 4)
    code, _, err = finish(process)
    assert code == 137
    verdict = [line for line in err.splitlines() if line.startswith("zcomm run: ")]
    assert verdict[0].startswith("zcomm run: node beta, rank 2 (pid ") and "was killed by SIGKILL" in verdict[0], err
    assert all("was then ended by the launcher" in line for line in verdict[1:]), err
    assert [pid for pid in pids if alive(pid)] == []


def test_an_exception_is_named_with_its_node(run: Run) -> None:
    script = "import os, time\nif os.environ['RANK'] == '3': raise ValueError('bad value')\ntime.sleep(300)"
    code, _, err = finish(run(script))
    assert code == 1
    assert "zcomm run: node gamma, rank 3 (pid " in err and "exited with status 1: ValueError: bad value\n" in err


def test_an_unreachable_host_is_named(run: Run) -> None:
    code, _, err = finish(run("import time; time.sleep(300)", env={"UNREACHABLE": "beta"}))
    assert code == 255
    words = "zcomm run: node beta: ssh ended with status 255: ssh: connect to host beta port 22: No route to host"
    assert words in err.splitlines(), err


def test_a_node_without_the_folder_or_the_program(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    ssh = tmp_path / "bin" / "ssh"
    moved = f'if os.path.isdir("{folder}"): os.rename("{folder}", "{folder}-now")\n    os.environ["NODE_NAME"]'
    ssh.write_text(ssh.read_text().replace('os.environ["NODE_NAME"]', moved))
    code, _, err = finish(run(SHOW, hosts="alpha slots=1\n", cwd=folder))
    assert code == 2
    assert f"zcomm run: node alpha: the folder {folder} of the front is not there (No such file or directory)" in err
    code, _, err = finish(run(SHOW, "--no-python", hosts="alpha slots=1\n"))
    assert code == 126 and "zcomm run: node alpha: " in err and "script.py" in err, err


def test_a_node_that_reports_nothing_has_failed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\necho only this\n")
    code, out, err = finish(run(SHOW, hosts="alpha slots=1\n"))
    assert code == 1 and out == "only this\n"
    assert err == "zcomm run: node alpha: ssh ended with status 0, but without a report\n"
    for name in ("srun", "pdsh"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 0\n")
        code, _, err = finish(run(SHOW, "--launcher", "slurm" if name == "srun" else name))
        assert code == 1
        assert err == f"zcomm run: {name}: {name} ended with status 0, but without a report of alpha, beta, gamma\n"


def test_a_launcher_that_hides_a_failure_is_not_believed(run: Run, tmp_path: Path) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.write_text(srun.read_text().replace("sys.exit(next(", "sys.exit(0 and next("))
    code, _, err = finish(run("import sys; sys.exit(7)", "--launcher", "slurm"))
    assert code == 7 and "exited with status 7" in err
    srun.write_text(
        srun.read_text().replace("children = [", "os.dup2(os.open('/dev/null', os.O_WRONLY), 2)\nchildren = [")
    )
    code, _, err = finish(run("import sys; sys.exit(7)", "--launcher", "slurm"))
    assert code == 1 and "srun ended with status 0, but without a report of alpha, beta, gamma" in err


# --- a report --------------------------------------------------------------------------------------------------------

RECORDS = """
import json, os, random, sys
rank, folder = int(os.environ["RANK"]), os.environ["ZCOMM_REPORT"]
head = {"kind": "head", "rank": rank, "world_size": 4, "pid": 1, "host": os.environ["NODE_NAME"], "name": "x.py",
        "job": "a", "backend": "tcp", "command": "x"}
noise = {"kind": "noise", "text": random.Random(rank).randbytes(9000 * rank).hex()}
end = {"kind": "end", "state": "ended", "message": "", "losses": []}
with open(f"{folder}/rank{rank}.records.jsonl", "w") as file:
    file.write("".join(json.dumps(each) + "\\n" for each in (head, noise, end)))
print(folder)
sys.exit(7 if rank == 3 and "fails" in sys.argv else 0)
"""


@pytest.mark.parametrize("launcher", SOME)
@pytest.mark.parametrize("args", [slow(()), ("fails",)], ids=["well", "failed"])
def test_the_report_has_the_records_of_all_nodes(
    run: Run, tmp_path: Path, launcher: str, args: tuple[str, ...]
) -> None:
    process = run(RECORDS, "--launcher", launcher, "--report", str(tmp_path / "report"), args=args)
    code, out, err = finish(process)
    assert code == (7 if args else 0), err
    assert "zcomm-node" not in err and f"zcomm run: {tmp_path / 'report' / 'report.html'}\n" in err
    folders = {line.partition(" ")[2] for line in out.splitlines()}
    assert len(folders) == 3 and str(tmp_path / "report") not in folders, "each node has a folder of its own"
    page = (tmp_path / "report" / "report.html").read_text()
    for rank, host in enumerate(("alpha", "beta", "beta", "gamma")):
        lines = (tmp_path / "report" / f"rank{rank}.records.jsonl").read_text().splitlines()
        head, noise, end = map(json.loads, lines)
        assert (head["rank"], head["host"], end["kind"]) == (rank, host, "end")
        assert noise["text"] == random.Random(rank).randbytes(9000 * rank).hex()
        assert f"<td>{host}</td>" in page
    assert "There are no records" not in page


def test_a_report_without_the_records_of_a_node_names_its_ranks(run: Run, tmp_path: Path) -> None:
    script = RECORDS.replace("with open", "if rank == 2: os.kill(os.getppid(), 9)\nwith open")  # beta's supervisor
    code, _, err = finish(run(script, "--report", str(tmp_path / "report")))
    assert code != 0 and "zcomm run: node beta: " in err
    page = (tmp_path / "report" / "report.html").read_text()
    assert "There are no records of rank 1, 2" in page and "<td>alpha</td>" in page
    for directory in (tmp_path / "tmp").iterdir():  # no process was left to remove it
        shutil.rmtree(directory)


def test_a_report_that_cannot_be_written_is_named_and_the_job_goes_on(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    script = RECORDS + f"import shutil; shutil.rmtree({str(folder)!r}, ignore_errors=True)\n"
    code, _, err = finish(run(script.replace("sys.exit", "code = "), "--report", str(folder)))
    assert code == 0
    assert err.count("zcomm run: --report: ") == 1 and f"zcomm run: no report in {folder}: No such file" in err


def test_of_a_rank_that_two_nodes_have_started_the_later_records_count(tmp_path: Path) -> None:
    """An elastic job may start a rank again on another node; both nodes send their records at once."""
    pieces = []
    for node, at in (("old", 100), ("new", 200)):
        (tmp_path / node).mkdir()
        file = tmp_path / node / "rank0.records.jsonl"
        file.write_bytes(random.Random(at).randbytes(9000))
        os.utime(file, (at, at))
        lines = list(record_lines(b"marker ", tmp_path / node))
        assert len(lines) > 2 and all(len(line) <= 4000 for line in lines)
        pieces.append([json.loads(line.removeprefix(b"marker ")) for line in lines])
    for number, order in enumerate((pieces, pieces[::-1])):
        folder = tmp_path / f"front{number}"
        folder.mkdir()
        records = Records(folder)
        for both in zip(*order, strict=True):
            for piece in both:
                records.add({**piece, "records": f"../{piece['records']}"})
        assert [file.name for file in folder.iterdir()] == ["rank0.records.jsonl"]
        assert (folder / "rank0.records.jsonl").read_bytes() == (tmp_path / "new" / "rank0.records.jsonl").read_bytes()
        with pytest.raises(ValueError):
            records.add({**pieces[1][0], "left": 0, "piece": "eA=="})


# --- no process is left ----------------------------------------------------------------------------------------------

WAITS = KILLED.replace('if os.environ["RANK"] == "2": os.kill(os.getpid(), signal.SIGKILL)\n', "")


@pytest.mark.parametrize("launcher", SOME)
@pytest.mark.parametrize("signum", [slow(signal.SIGINT), signal.SIGTERM, slow(signal.SIGKILL)])
def test_a_signal_for_the_front_ends_all_nodes(run: Run, tmp_path: Path, launcher: str, signum: int) -> None:
    process = run(WAITS, "--launcher", launcher, "--env", f"FOLDER={tmp_path}")
    pids = pids_from(tmp_path, 4)
    process.send_signal(signum)
    code, _, err = finish(process)
    if signum == signal.SIGKILL:
        assert code == -9
    else:
        assert code == 128 + signum
        assert f"zcomm run: stopped by {signal.Signals(signum).name}; all ranks have ended\n" in err
    wait_until(lambda: not any(map(alive, pids)), "the end of all ranks")


@pytest.mark.parametrize("victim", ["ssh", "node"])
def test_a_killed_connection_or_node_is_named(run: Run, tmp_path: Path, victim: str) -> None:
    script = WAITS.replace("time.sleep(300)", "print(os.environ['NODE_NAME'], os.getppid()); time.sleep(300)")
    process = run(script, "--env", f"FOLDER={tmp_path}", "--env", "PYTHONUNBUFFERED=1")
    pids = pids_from(tmp_path, 4)
    assert process.stdout is not None
    supervisor = next(int(line.split()[-1]) for line in process.stdout if " gamma " in line)
    front = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(front if victim == "ssh" else supervisor, signal.SIGKILL)  # the stand-in process is the node's front
    code, _, err = finish(process)
    assert code == 137
    assert "zcomm run: node gamma: ssh " in err, err
    wait_until(lambda: not any(map(alive, pids)), "the end of all ranks")
    if victim == "node":
        for directory in (tmp_path / "tmp").iterdir():  # no process was left to remove it
            directory.rmdir()


def test_first_interrupt_leaves_ranks_their_time_and_the_second_kills(run: Run, tmp_path: Path) -> None:
    script = WAITS.replace(
        "time.sleep(300)",
        """
def leave(what): open(os.environ['FOLDER'] + '/' + what + os.environ['RANK'], 'w').close()
signal.signal(signal.SIGINT, lambda *_: leave('interrupted'))
leave('ready')
while True: time.sleep(0.05)
""",
    )
    process = run(script, "--env", f"FOLDER={tmp_path}")
    pids = pids_from(tmp_path, 4)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 4, "four handlers")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: len(list(tmp_path.glob("interrupted*"))) == 4, "four interrupts")
    assert all(map(alive, pids))
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    wait_until(lambda: not any(map(alive, pids)), "the end of all ranks")


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--include", "delta"], "'delta': no such host; there are alpha, beta, gamma"),
        (["--exclude", "alpha:3"], "host alpha has no slot 3; it has 0"),
        (["--include", "alpha", "--exclude", "beta"], "--include and --exclude exclude each other"),
        (["--num_nodes", "1", "-i", "alpha"], "--num_nodes and --num_gpus exclude --include and --exclude"),
        (["--num-nodes", "4"], "--num_nodes 4: there are 3 hosts"),
        (["--exclude", "alpha@beta@gamma"], "no host is left"),
        (["-n", "2"], "-n excludes --hostfile"),
        (["--master_port", "0"], "--master_port 0: expected a port, 1 to 65535"),
        (["--master_addr", "$(id)"], "'$(id)' is not a host name"),
        (["--no_ssh"], "--no_ssh: --node_rank -1 is not one of the 3 nodes"),
        (["--no_ssh", "--node_rank", "3"], "--no_ssh: --node_rank 3 is not one of the 3 nodes"),
        (["--bind_core_list", "0"], "--bind_core_list needs --bind_cores_to_rank"),
        (["--launcher", "rsh"], "invalid choice: 'rsh'"),
        (["--launcher", "slurm", "-H", ""], "--launcher slurm needs a hostfile: -H FILE"),
        (["--launcher_args", "'"], "No closing quotation"),
        (["--elastic_training", "--min_elastic_nodes", "4"], "elastic nodes: min 4 and max 3"),
        (["--max_elastic_nodes", "2"], "need --elastic_training"),
        (["--only-rank", "4"], "--only-rank 4: ranks are 0 to 3"),
        (["--hostfile", "/no/such/file"], "--hostfile /no/such/file: no such file"),
    ],
)
def test_wrong_use_is_one_line_and_starts_nothing(run: Run, tmp_path: Path, options: list[str], words: str) -> None:
    code, out, err = finish(run(SHOW, *options))
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and words in err, err
    assert not (tmp_path / "record").exists()


def test_one_node_by_hand(run: Run) -> None:
    code, out, err = finish(run(SHOW, "--no_ssh", "--node_rank", "1"))
    assert code == 0, err
    ranks = shown(out)
    assert sorted(ranks) == [1, 2] and ranks[2]["WORLD_SIZE"] == "4" and ranks[2]["LOCAL_RANK"] == "1"
    assert ranks[1]["ZCOMM_INIT_METHOD"] == "tcp://alpha:29500"


def test_this_host_needs_no_ssh_and_is_not_named_localhost_to_others(run: Run, tmp_path: Path) -> None:
    code, out, err = finish(run(SHOW, hosts="localhost slots=1\n127.0.0.9 slots=1\n"))
    assert code == 0, err
    assert {rank["MASTER_ADDR"] for rank in shown(out).values()} == {"127.0.0.1"}, "the way to the other node"
    assert [arguments[-2] for _, arguments in recorded(tmp_path)] == ["127.0.0.9"]
    (tmp_path / "record").unlink()
    code, out, err = finish(run(SHOW, "-i", "localhost:1,3", hosts="localhost slots=4\n127.0.0.9 slots=1\n"))
    assert code == 0 and not (tmp_path / "record").exists(), err
    assert shown(out)[0]["CUDA_VISIBLE_DEVICES"] == "1,3" and shown(out)[0]["ZCOMM_INIT_METHOD"].startswith("file://")
    code, out, err = finish(run(SHOW, "--force_multi", hosts="127.0.0.9 slots=1\n"))
    assert code == 0 and len(recorded(tmp_path)) == 1, err


def test_logs_of_ranks_in_place_of_output(run: Run, tmp_path: Path) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    code, out, err = finish(run(script, "--enable_each_rank_log", "logs", hosts="localhost slots=1\n"))
    assert code == 3 and out == "" and "[0] err" not in err
    assert "exited with status 3; its last lines on stderr:\n    err\n" in err
    assert (tmp_path / "work/logs/rank0.out").read_text() == "out\n"
    assert (tmp_path / "work/logs/rank0.err").read_text() == "err\n"


def test_cores_and_pid(run: Run, tmp_path: Path) -> None:
    script = "import glob, os; print([sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], " \
             "[open(f).read() for f in glob.glob(os.environ['TMPDIR'] + '/*.deepspeed')]])"  # fmt: skip
    core = min(os.sched_getaffinity(0))
    options = ["--bind_cores_to_rank", "--bind_core_list", str(core), "--save_pid"]
    process = run(script, *options, hosts="localhost slots=1\n")
    code, out, err = finish(process)
    assert code == 0, err
    assert ast.literal_eval(out.removeprefix("[0] ")) == [[core], "1", [str(process.pid)]]
    code, _, err = finish(run(script, "--bind_cores_to_rank", "--bind_core_list", "4095", hosts="beta slots=1\n"))
    assert code == 126 and "node beta: --bind_core_list 4095: core 4095 cannot be used" in err


def test_a_message_that_is_too_long_is_an_error(run: Run) -> None:
    long = {"NCCL_LONG": "x" * 100_000}
    code, _, err = finish(run(SHOW, "--launcher", "slurm", env=long))
    assert code == 2 and "--launcher slurm: arguments and exported variables are " in err
    code, out, err = finish(run(SHOW, env=long))
    assert code == 0 and len(shown(out)) == 4, err


# --- the command `deepspeed` -----------------------------------------------------------------------------------------


def test_deepspeeds_command(run: Run, tmp_path: Path) -> None:
    (tmp_path / "work" / "script.py").write_text(
        SHOW + "import importlib.util\nprint(json.dumps(importlib.util.find_spec('deepspeed').origin))\n"
    )
    (tmp_path / "hosts").write_text("beta slots=2\n")
    only = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "RECORD": str(tmp_path / "record"), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "zcomm.compat.deepspeed.launcher.runner", "-H", str(tmp_path / "hosts")]
    for options, program in (([], "pdsh"), (["--launcher", "SLURM", "--no_local_rank"], "srun")):
        (tmp_path / "record").unlink(missing_ok=True)
        done = subprocess.run(
            [*command, "--force_multi", *options, "script.py", "--lr", "a b"],
            capture_output=True, text=True, timeout=60, cwd=tmp_path / "work", env={**os.environ, **only},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("[1] ")]
        first = [] if options else ["--local_rank=1"]
        assert json.loads(lines[0])["argv"] == [*first, "--lr", "a b"]
        assert "zcomm/compat/site/deepspeed" in lines[1]
        assert recorded(tmp_path)[0][0] == program
    (tmp_path / "bin" / "pdsh").unlink()
    (tmp_path / "bin" / "env").symlink_to("/usr/bin/env")
    (tmp_path / "record").unlink()
    done = subprocess.run(
        [*command, "script.py"], capture_output=True, text=True, timeout=60, cwd=tmp_path / "work",
        env={**os.environ, **only, "PATH": str(tmp_path / "bin")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path)[0][0] == "ssh", "plain ssh where pdsh is missing"
    assert stat.S_ISREG((tmp_path / "hosts").stat().st_mode)


def test_elastic_training_is_torchruns(run: Run, tmp_path: Path) -> None:
    """A stand-in module for torch.distributed.run prints each node's arguments."""
    torchrun = tmp_path / "work" / "torch" / "distributed"
    torchrun.mkdir(parents=True)
    for file in (torchrun / "__init__.py", torchrun.parent / "__init__.py"):
        file.write_text("")
    (torchrun / "run.py").write_text("import os, sys; print([sys.argv[1:], 'ZCOMM_INIT_METHOD' in os.environ])")
    options = [
        "--elastic_training",
        "--min_elastic_nodes",
        "2",
        "--max_elastic_nodes",
        "3",
        "--env",
        "ELASTIC_RUN_ID=7",
    ]
    code, out, err = finish(
        run(
            "",
            *options,
            args=("--lr", "1"),
            env={"PYTHONPATH": f"{tmp_path / 'work'}:{os.environ.get('PYTHONPATH', '')}"},
        )
    )
    assert code == 0, err
    found = {line.split("]")[0][1:]: ast.literal_eval(line.partition(" ")[2]) for line in out.splitlines()}
    assert sorted(found) == ["0", "1", "3"], "one process per node, with its first rank's number"
    for rank, count, host in (("0", 1, "alpha"), ("1", 2, "beta"), ("3", 1, "gamma")):
        arguments, has_init_method = found[rank]
        assert arguments[:9] == [
            "--nnodes=2:3", f"--nproc-per-node={count}", "--rdzv-backend=c10d", "--rdzv-endpoint=alpha:29500",
            f"--rdzv-conf=is_host={int(rank == '0')}", f"--local-addr={host}",
            "--rdzv-id=7", "--max-restarts=100", "--no-python",
        ]  # fmt: skip
        assert arguments[9:] == [sys.executable, "script.py", "--lr", "1"] and not has_init_method
