"""Hostfiles, filters, exported variables, cores, messages to nodes: their results and their errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zcomm.launch import hostfile
from zcomm.launch.cores import cores_of
from zcomm.launch.environment import devices_of, exported, of_launcher, rank_environment, read_environment_file
from zcomm.launch.failure_report import RankEnd
from zcomm.launch.job import Job
from zcomm.launch.payload import Payload, end_line, end_of

POOL = {"a": [0, 1, 2, 3], "b-1.example": [0, 1], "::1": [0, 1]}


def test_lines_of_a_hostfile() -> None:
    text = "# all\n\n  a slots=4\nb\tslots=2 max_slots=8\n10.0.0.3  slots=1  # the slow one\n::1 slots=2\n"
    assert hostfile.parse(text.splitlines()) == {"a": 4, "b": 2, "10.0.0.3": 1, "::1": 2}
    assert list(hostfile.parse(["z slots=1", "a slots=1"])) == ["z", "a"], "ranks follow the order of the lines"


@pytest.mark.parametrize(
    "line, words",
    [
        ("missingslots", "'missingslots' is not a line of a hostfile; expected HOST slots=N"),
        ("this is bad slots=1", "'this is bad slots=1' is not a line"),
        ("b slots=two", "'b slots=two' is not a line"),
        ("b slots=-1", "is not a line"),
        ("b slots=1 gpus=2", "is not a line"),
        ("b slots=0", "slots=0 is not a number of slots; expected 1 to 4096"),
        ("b slots=99999999999999999999", "expected 1 to 4096"),
        ("a slots=2", "'a slots=2': host a is in line 1 already"),
        ("-oProxyCommand=id slots=1", "'-oProxyCommand=id' is not a host name"),
        ("$(id) slots=1", "'$(id)' is not a host name"),
        ("b;id slots=1", "'b;id' is not a host name"),
        ("root@b slots=1", "'root@b' is not a host name"),
        ("b,c slots=1", "'b,c' is not a host name"),
        ("b[1-3] slots=1", "'b[1-3]' is not a host name"),
        ("b' slots=1", "is not a host name"),
        ("b\u00a0 slots=1", "is not a"),
        ("b\u0661 slots=1", "is not a host name"),
        ("b slots=\u0661", "is not a line"),
        ("exec:id slots=1", "neither a host name nor an IPv6 address"),
        ("b:2222 slots=1", "--ssh_port takes a port"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"a slots=1\n# more\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        hostfile.read(file)
    assert str(caught.value).startswith(f"{file}, line 3: ") and words in str(caught.value)


def test_a_file_without_hosts_and_one_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# a slots=1\n")
    with pytest.raises(ValueError, match="no host in it"):
        hostfile.read(file)
    file.write_bytes(b"\xff\xfe a slots=1")
    with pytest.raises(ValueError, match="not a text file"):
        hostfile.read(file)


@pytest.mark.parametrize(
    "include, exclude, expected",
    [
        ("", "", POOL),
        ("a", "", {"a": [0, 1, 2, 3]}),
        ("b-1.example@a:2,0", "", {"a": [0, 2], "b-1.example": [0, 1]}),
        ("a:1@a:0,1", "", {"a": [0, 1]}),
        ("::1:1", "", {"::1": [1]}),
        ("::1", "", {"::1": [0, 1]}),
        ("", "a@::1:0", {"b-1.example": [0, 1], "::1": [1]}),
        ("", "a:0,1,2,3@b-1.example", {"::1": [0, 1]}),
        ("", "a@b-1.example@::1", {}),
    ],
)
def test_filter(include: str, exclude: str, expected: dict[str, list[int]]) -> None:
    assert hostfile.choose(POOL, include, exclude) == expected
    assert list(hostfile.choose(POOL, include, exclude)) == [host for host in POOL if host in expected]


@pytest.mark.parametrize(
    "text, words",
    [
        ("c", "'c': no such host; there are a, b-1.example, ::1"),
        ("c:0", "'c:0': no such host"),
        ("a@", "'': no such host"),
        ("a:4", "'a:4': host a has no slot 4; it has 0, 1, 2, 3"),
        ("a:-1", "expected HOST:SLOT,SLOT"),
        ("a:", "expected HOST:SLOT,SLOT"),
        ("a:0:1", "'a:0:1': no such host"),
        ("a:0,,1", "expected HOST:SLOT,SLOT"),
        ("a:\u0661", "expected HOST:SLOT,SLOT"),
    ],
)
def test_an_unknown_host_or_slot_is_named(text: str, words: str) -> None:
    for filters in ({"include": text}, {"exclude": text}):
        with pytest.raises(ValueError) as caught:
            hostfile.choose(POOL, **filters)
        assert words in str(caught.value)


def test_limits() -> None:
    assert hostfile.limit(POOL, 2, 1) == {"a": [0], "b-1.example": [0]}
    assert hostfile.limit(POOL) == POOL
    with pytest.raises(ValueError, match=r"--num_nodes 4: there are 3 hosts, a, b-1.example, ::1"):
        hostfile.limit(POOL, 4)
    with pytest.raises(ValueError, match=r"--num_gpus 3: host b-1.example has 2 slots"):
        hostfile.limit(POOL, -1, 3)
    with pytest.raises(ValueError, match="--num_gpus 0: expected at least 1"):
        hostfile.limit(POOL, -1, 0)


def test_variables_that_go_to_other_nodes(tmp_path: Path) -> None:
    here = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "ZCOMM_THREADS": "2", "HOME": "/root", "UCX_TLS": "tcp"}
    own = {"ZCOMM_HOST_ID": "a", "ZCOMM_JOB_ID": "j", "ZCOMM_INIT_METHOD": "file:///x", "ZCOMM_NODE_PAYLOAD": "x"}
    assert exported(here | own) == {name: value for name, value in here.items() if name != "HOME"}
    file = tmp_path / ".deepspeed_env"
    file.write_text('# of NCCL\n\nNCCL_IB_HCA=mlx5\nexport A = b c=$(id);\'"\nQUOTED="x y"\nEMPTY=\n')
    assert read_environment_file(file) == {"NCCL_IB_HCA": "mlx5", "A": "b c=$(id);'\"", "QUOTED": "x y", "EMPTY": ""}
    for line in ("NOVALUE", "A B=1", "1A=2", "=x"):
        file.write_text(f"OK=1\n{line}\n")
        with pytest.raises(ValueError, match=f"{file}, line 2: '{line}' is not NAME=VALUE"):
            read_environment_file(file)


def test_variables_of_launchers_do_not_reach_the_ranks() -> None:
    foreign = "OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK MV2_COMM_WORLD_RANK PALS_RANKID SLURM_PROCID SLURM_NTASKS"
    assert all(map(of_launcher, foreign.split()))
    assert not any(map(of_launcher, ("RANK", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PATH")))


def test_gpus_of_a_slurm_step() -> None:
    assert devices_of([0, 2], {"CUDA_VISIBLE_DEVICES": "5,6,7"}) == ("0", "2"), "slots are the host's own numbers"
    slurm = {"SLURM_STEP_GPUS": "5,6,7", "CUDA_VISIBLE_DEVICES": "5,6,7"}
    assert devices_of([0, 2], slurm) == ("5", "7")
    with pytest.raises(ValueError, match=r"slot 3 is not there: Slurm gave this step CUDA_VISIBLE_DEVICES=5,6,7"):
        devices_of([0, 3], slurm)


def test_parts_of_the_cores() -> None:
    usable = sorted(os.sched_getaffinity(0))
    assert cores_of(None, 1, 0) == cores_of("", 1, 0) == usable
    assert cores_of(str(usable[0]), 1, 0) == usable[:1]
    with pytest.raises(ValueError, match="1 cores do not suffice for 2 ranks"):
        cores_of(str(usable[0]), 2, 0)
    with pytest.raises(ValueError, match="core 4095 cannot be used"):
        cores_of("4095", 1, 0)
    with pytest.raises(ValueError, match="'x' is not a core"):
        cores_of("x", 1, 0)


# --- the message to a node and its reports ---------------------------------------------------------------------------

HOSTILE = ["", " ", "a b", "'", '"', ";id", "$(id)", "`id`", "a\nb", "\\", "%h", "é", "--", "-x", "\t*", "a=b&c|d>e"]


def message(**changes: object) -> Payload:
    fields = {"nonce": "5ca1e", "launcher": "mpich", "cwd": "/a b/$(id)", "nodes": {"a": [0, 1], "b": [3]}}
    job = Job(HOSTILE, 1, dict.fromkeys(["A", "B"], "".join(HOSTILE)), tee=Path("logs"), elastic=None)
    return Payload(**{**fields, "address": "a", "port": 29500, "job": job, **changes})  # type: ignore[arg-type]


def test_a_message_has_no_character_of_a_shell_and_comes_back() -> None:
    text = message().encode()
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")
    assert Payload.decode(text) == message()
    for wrong in ("", "x", text[:-8], text + "é", "$(id)", "e30="):
        with pytest.raises(ValueError, match="the front's message cannot be read"):
            Payload.decode(wrong)


def test_a_node_finds_its_part() -> None:
    job = message().job_of(1, {})
    assert (job.world_size, list(job.ranks), job.devices) == (3, [2], ("3",))
    assert job.place is not None
    env = rank_environment({}, {}, 2, 3, 1, Path("/p"), job.place)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ZCOMM_INIT_METHOD ZCOMM_JOB_ID"
    assert [env[name] for name in names.split()] == [*"2 3 0 1 a 29500 tcp://a:29500".split(), "zcomm run 5ca1e"]


@pytest.mark.parametrize(
    "launcher, host, env, expected",
    [
        ("ssh", "b", {}, 1),
        ("pdsh", "a", {"SLURM_PROCID": "1"}, 0),
        ("openmpi", None, {"OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "0"}, 1),
        ("mpich", None, {"PMI_RANK": "1", "OMPI_COMM_WORLD_RANK": "0"}, 1),
        ("mpich", None, {"PALS_RANKID": "1"}, 1),
        ("impi", None, {"PMI_RANK": "1"}, 1),
        ("mvapich", None, {"MV2_COMM_WORLD_RANK": "1"}, 1),
        ("slurm", None, {"SLURM_NODEID": "0", "SLURMD_NODENAME": "b"}, 1),
        ("slurm", None, {"SLURM_NODEID": "1", "SLURMD_NODENAME": "b.cluster"}, 1),
    ],
)
def test_a_node_finds_its_number(launcher: str, host: str | None, env: dict[str, str], expected: int) -> None:
    assert message(launcher=launcher).node_of(host, env) == expected


def test_a_node_that_finds_no_number_says_so() -> None:
    with pytest.raises(ValueError, match="PMI_RANK=2 is not the number of one of 2 nodes"):
        message().node_of(None, {"PMI_RANK": "2"})
    with pytest.raises(ValueError, match="which node is this"):
        message(launcher="openmpi").node_of(None, {"PMI_RANK": "1"})
    with pytest.raises(ValueError, match="which node is this\\? c does not tell"):
        message(launcher="ssh").node_of("c", {})


def test_an_end_comes_back_and_fits_into_one_write() -> None:
    end = RankEnd(3, 71, -9, 5, oom_counter=Path("/proc/vmstat"), stderr_tail=["x" * 500] * 20, node="b")
    end.message, end.exception = "m" * 5000, "e" * 5000
    line = end_line(b"mark ", end)
    assert len(line) <= 4000 and line.count(b"\n") == 1 and line.startswith(b"mark ")
    back = end_of(json.loads(line[5:])["end"])
    assert (back.rank, back.pid, back.code, back.node, back.oom_counter) == (3, 71, -9, "b", Path("/proc/vmstat"))
    assert not back.consequence
    end.stderr_tail = ["zcomm.PeerLost: rank 1 died", *["x" * 500] * 15]
    assert end_of(json.loads(end_line(b"mark ", end)[5:])["end"]).consequence
