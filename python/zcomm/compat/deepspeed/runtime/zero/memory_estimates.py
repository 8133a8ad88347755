"""Memory that a model's training needs, under DeepSpeed's names and by the formula of ``zcomm plan``.

Mixed precision and Adam, as in DeepSpeed. A unit that is whole in stage 3, and the one that is gathered ahead, count
as the largest layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from zcomm.zero import Offload, memory_formula
from zcomm.zero.memory.usage import Memory

_GIB = 2**30
_UNITS = 2  # in use, and gathered ahead


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of a host and of a device in stage 2. additional_buffer_factor: of the host's bytes."""
    memory = _formula(total_params, num_gpus_per_node * num_nodes, 2, Offload("cpu") if cpu_offload else None)
    start = 4 * total_params * num_gpus_per_node  # each rank makes the model in fp32
    host = max(start, sum(memory["cpu"].values()) * num_gpus_per_node)
    return int(host * additional_buffer_factor), sum(memory["device"].values())


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes of a host and of a device in stage 3, and the bytes of concurrently gathered layers.

    zero_init: the model is built under ``zero.Init``. additional_buffer_factor: of the host's bytes.
    """
    offload = Offload("cpu", "cpu" if cpu_offload_params else None) if cpu_offload else None
    memory = _formula(total_params, num_gpus_per_node * num_nodes, 3, offload)
    whole = 2 * _UNITS * largest_layer_params
    start = 4 * (largest_layer_params if zero_init else total_params) * num_gpus_per_node
    host = max(start, sum(memory["cpu"].values()) * num_gpus_per_node)
    return int(host * additional_buffer_factor), sum(memory["device"].values()) + whole, whole


def _formula(numel: int, world_size: int, stage: int, offload: Offload | None) -> Memory:
    return memory_formula(numel, world_size, stage, "bf16", offload, share_parameters=False)


def _counts(model: nn.Module) -> tuple[int, int]:
    """Count the elements of all parameters, and of the module with the most direct ones."""
    layers = (sum(param.numel() for param in module.parameters(recurse=False)) for module in model.modules())
    return sum(param.numel() for param in model.parameters()), max(layers, default=0)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the needs of ``model`` in stage 2, with offloading and without."""
    total, _ = _counts(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the needs of a model of so many parameters in stage 2, with offloading and without."""
    _print_head(num_gpus_per_node, num_nodes, f"{total_params // 10**6}M total params")
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _print_row(host, device, f"offload_optimizer={'cpu ' if offload else 'none'}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the needs of ``model`` in stage 3, with each offloading and without."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *_counts(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the needs of a model of so many parameters in stage 3, with each offloading and without."""
    sizes = f"{total_params // 10**6}M total params, {largest_layer_params // 10**6}M largest layer params"
    _print_head(num_gpus_per_node, num_nodes, sizes)
    for params, optimizer, zero_init in _choices():
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            optimizer,
            params,
            zero_init,
            additional_buffer_factor,
        )
        words = [
            f"offload_{name}={'cpu ' if on else 'none'}" for name, on in (("param", params), ("optimizer", optimizer))
        ]
        _print_row(host, device, ", ".join([*words, f"zero_init={int(zero_init)}"]))


def _choices() -> Iterator[tuple[bool, bool, bool]]:
    """Yield offloading of parameters and of the optimizer, and zero.Init, from least memory of the device to most."""
    for params, optimizer in ((True, True), (False, True), (False, False)):
        for zero_init in (True, False):
            yield params, optimizer, zero_init


def _print_head(num_gpus_per_node: int, num_nodes: int, sizes: str) -> None:
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {num_nodes} nodes, {num_gpus_per_node} GPUs per node.\nSW: Model with {sizes}.")
    print("  per CPU  |  per GPU |   Options")


def _print_row(host: int, device: int, options: str) -> None:
    print(f" {host / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | {options}")
