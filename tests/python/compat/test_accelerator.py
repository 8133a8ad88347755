"""deepspeed.accelerator: DeepSpeed's whole interface, with the answers of torch and psutil."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from zcomm.compat.deepspeed import accelerator
from zcomm.compat.deepspeed.accelerator import real_accelerator
from zcomm.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from zcomm.compat.deepspeed.accelerator.cpu_accelerator import CpuAccelerator
from zcomm.compat.deepspeed.accelerator.cuda_accelerator import CudaAccelerator

INTERFACE = """
is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure device_name device
set_device current_device current_device_name device_count synchronize random set_rng_state get_rng_state manual_seed
manual_seed_all initial_seed default_generator Stream stream current_stream default_stream Event empty_cache
memory_allocated max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached
reset_max_memory_cached memory_stats reset_peak_memory_stats memory_reserved max_memory_reserved total_memory
available_memory is_bf16_supported is_fp16_supported supported_dtypes is_available range_push range_pop lazy_call
communication_backend_name is_triton_supported prefer_triton_grouped_mm create_graph capture_to_graph replay_graph
BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor pin_memory is_pinned unpin_memory
on_accelerator op_builder_dir create_op_builder get_op_builder build_extension export_envs visible_devices_envs
set_visible_devices_envs get_compile_backend set_compile_backend
""".split()


@pytest.mark.parametrize("kind", [CpuAccelerator, CudaAccelerator])
def test_the_interface_is_whole(kind: type) -> None:
    assert issubclass(kind, DeepSpeedAccelerator)
    assert [name for name in INTERFACE if not hasattr(kind, name)] == []


def test_memory_is_this_processes() -> None:
    cpu = CpuAccelerator()
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    assert before == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    held = torch.ones(2**25)  # 128 MiB, in use
    during = cpu.memory_reserved()
    assert during - before > 100 * 2**20
    del held
    assert cpu.max_memory_allocated() >= during > cpu.memory_stats()["allocated_bytes.all.current"]
    cpu.reset_max_memory_cached()
    assert cpu.max_memory_cached() < during
    assert cpu.total_memory() == psutil.virtual_memory().total > cpu.available_memory(0) > 0


def test_random_numbers_are_torchs() -> None:
    cpu = CpuAccelerator()
    cpu.manual_seed_all(7)
    assert cpu.initial_seed() == 7 and cpu.default_generator(0) is torch.default_generator
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    with cpu.random().fork_rng():
        torch.rand(1)


def test_what_the_cpu_has_not() -> None:
    cpu = CpuAccelerator()
    assert cpu.Stream is None and cpu.Event is None and cpu.current_stream() is None
    tensor = torch.arange(3)
    with cpu.stream(None):
        assert cpu.pin_memory(tensor) is tensor and not cpu.is_pinned(tensor)
    assert cpu.on_accelerator(tensor) and not cpu.on_accelerator(tensor.to("meta"))
    assert cpu.FloatTensor([1.0]).dtype == torch.float and cpu.LongTensor([1]).dtype == torch.long
    with cpu.capture_to_graph(cpu.create_graph()), pytest.raises(NotImplementedError, match="has no graphs"):
        cpu.replay_graph(None)


def test_the_compiler_of_the_program() -> None:
    cpu = CpuAccelerator()
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match=r"set_compile_backend\('fast'\): torch.compile has .*inductor"):
        cpu.set_compile_backend("fast")


def test_devices_of_a_rank() -> None:
    cuda, environment = CudaAccelerator(), {}
    cuda.set_visible_devices_envs(environment, [1, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert cuda.device_name(2) == "cuda:2" and cuda.device(2) == torch.device("cuda", 2)
    assert not cuda.on_accelerator(torch.zeros(1))


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_accelerator", None)
    own = CpuAccelerator()
    real_accelerator.set_accelerator(own)
    assert real_accelerator.get_accelerator() is own is accelerator.get_accelerator()
    assert real_accelerator.is_current_accelerator_supported()
    with pytest.raises(TypeError, match="takes a DeepSpeedAccelerator, got int"):
        real_accelerator.set_accelerator(3)


PROGRAM = """
import torch.distributed as dist
from zcomm.compat.deepspeed.accelerator import get_accelerator

name = get_accelerator().communication_backend_name()
dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
dist.destroy_process_group()
"""


def test_the_backends_name_is_known_to_torch(start_program: Callable[..., Any]) -> None:
    output, errors = start_program(PROGRAM).communicate()
    assert output.split() == ["zcomm"], errors
