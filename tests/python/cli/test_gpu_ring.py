"""`zcomm run --gpu-ring`: the variables that a rank finds, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_nvml import FakeGpu, FakeNvml, bus, eight_on_two_nodes, two_linked
from zcomm.cli.main import main
from zcomm.launch.errors import UserError
from zcomm.launch.gpu_ring import best_ring, gpu_ring
from zcomm.machine import gpus
from zcomm.machine.topology import ring_order

NOWHERE = Path("/nowhere")


def order_of(machine: gpus.Machine, ranks: int) -> list[int]:
    variables = gpu_ring({}, ranks, machine)
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and len(variables) == 2
    return [int(word) for word in variables["CUDA_VISIBLE_DEVICES"].split(",")]


def test_all_gpus_stand_in_the_ring_that_doctor_proposes() -> None:
    machine = gpus.read(eight_on_two_nodes(), NOWHERE)
    for ranks in (8, 16):
        assert order_of(machine, ranks) == list(ring_order(machine.ranks()))
    assert order_of(gpus.read(two_linked(), NOWHERE), 2) == [0, 1]


def test_fewer_ranks_get_the_best_of_the_gpus() -> None:
    """Eight GPUs, numbered across two nodes: ranks get four of one node; its pairs under a switch are neighbours."""
    machine = gpus.read(eight_on_two_nodes(), NOWHERE)
    four = order_of(machine, 4)
    assert sorted(four) == list(range(8)) and sorted(four[:4]) == [0, 2, 4, 6]
    kinds = [machine.link(a, b).kind for a, b in zip(four[:4], [*four[1:4], four[0]], strict=True)]
    assert "cross" not in kinds and kinds.count("switch") == 2
    assert order_of(machine, 1)[0] == 0 and machine.link(*order_of(machine, 2)[:2]).kind == "switch"


def test_a_link_of_their_own_decides() -> None:
    """1 and 3 of four have an NVLink: they are neighbours in every ring, and the two that two ranks get."""
    ends = {1: bus(3), 3: bus(1)}
    fake = FakeNvml([FakeGpu(bus_id=bus(i), nvlinks=(ends[i],) if i in ends else ()) for i in range(4)])
    machine = gpus.read(fake, NOWHERE)
    assert best_ring(machine, 2) == (1, 3)
    ring = best_ring(machine, 4)
    assert abs(ring.index(1) - ring.index(3)) in (1, 3)


def test_more_gpus_than_can_be_tried() -> None:
    machine = gpus.read(FakeNvml([FakeGpu(bus_id=bus(i)) for i in range(10)]), NOWHERE)
    assert order_of(machine, 10) == list(range(10)) and sorted(order_of(machine, 3)[:3]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (FakeNvml(init_error="Driver Not Loaded"), "no NVIDIA driver here"),
        (FakeNvml(), "but no GPU here"),
        (FakeNvml([FakeGpu(bus_id=bus(0)), FakeGpu(bus_id=bus(1), lost=True)]), "GPU 1 is lost"),
        (FakeNvml([FakeGpu(mig=(1, 1))]), "GPU 0 is cut into MIG devices; set CUDA_VISIBLE_DEVICES yourself"),
    ],
)
def test_what_has_no_ring(fake: FakeNvml, words: str) -> None:
    with pytest.raises(UserError, match=words):
        gpu_ring({}, 2, gpus.read(fake, NOWHERE))


def test_what_the_user_set_stays() -> None:
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES, which is '1' here"):
        gpu_ring({"CUDA_VISIBLE_DEVICES": "1"}, 2, gpus.read(two_linked(), NOWHERE))


def test_ranks_find_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    machine = gpus.read(eight_on_two_nodes(), NOWHERE)
    monkeypatch.setattr(gpus, "read", lambda: machine)
    script = tmp_path / "show.py"
    script.write_text("import os\nprint('has', os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CUDA_DEVICE_ORDER'])\n")
    assert main(["run", "-n", "2", "--gpu-ring", str(script)]) == 0
    told = capfd.readouterr()
    wanted = gpu_ring({}, 2, machine)["CUDA_VISIBLE_DEVICES"]
    assert told.out.count(f"has {wanted} PCI_BUS_ID") == 2 and f"CUDA_VISIBLE_DEVICES={wanted}" in told.err
    assert main(["run", "-n", "2", "--gpu-ring", "--env", "CUDA_VISIBLE_DEVICES=0", str(script)]) == 2
    assert "unset it, or leave the option" in capfd.readouterr().err
