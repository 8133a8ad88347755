"""``deepspeed.profiling.flops_profiler.profiler``: zcomm.profiling.flops under DeepSpeed's names.

torch's FlopCounterMode counts matrix products, convolutions and attention. A multiplication with its addition is one
MAC, and two operations; elementwise operations count as none. Source: DeepSpeed's argument lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from zcomm.profiling.flops import FlopsReport, whole_numel

_UNITS = {12: "T", 9: "G", 6: "M", 3: "K", 0: "", -3: "m", -6: "u"}


class FlopsProfiler:
    """Counter of the operations of ``model`` between ``start_profile`` and ``stop_profile``.

    ds_engine: without effect. recompute_fwd_factor: not available, recomputed operations are counted as they run.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        if recompute_fwd_factor:
            raise NotImplementedError(f"FlopsProfiler(recompute_fwd_factor={recompute_fwd_factor}) is not available")
        self.model, self.ds_engine, self.started = model, ds_engine, False
        self._report = FlopsReport(model)
        self._open = ExitStack()

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start a new count. ignore_list: not available."""
        if ignore_list:
            raise NotImplementedError("start_profile(ignore_list=) is not available: all modules are counted")
        self.reset_profile()
        first = next(self.model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        self._open.enter_context(self._report.forward(device))
        self.started = True

    def stop_profile(self) -> None:
        """Stop the count."""
        self._open.close()

    def reset_profile(self) -> None:
        """Clear the count."""
        self._open.close()
        self._report = FlopsReport(self.model)

    def end_profile(self) -> None:
        """Stop and clear the count."""
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the operations counted until the last ``stop_profile``."""
        return flops_to_string(self._report.flops) if as_string else self._report.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return half of the operations."""
        macs = self._report.flops // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds between start and stop."""
        seconds = self._report.seconds.get("forward", 0.0)
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the elements of all parameters."""
        count = sum(whole_numel(param) for param in self.model.parameters())
        return params_to_string(count) if as_string else count

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the report, or write it into a file. Raises: RuntimeError before ``start_profile``; OSError."""
        if not self.started:
            raise RuntimeError("print_model_profile(): call start_profile(), the model and stop_profile() first")
        report = self._report.shown(module_depth, top_modules, detailed)
        report.write(report.text(profile_step, 1, 0), output_file)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Run ``model`` in evaluation mode and return its operations, its MACs and its parameters.

    input_shape: of the one argument, which is filled by chance; else args and kwargs. warm_up: runs before.
    as_string: with units. mode: "forward" or "generate". ignore_modules: not available. The model's mode is restored.
    Raises: ValueError, NotImplementedError.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f'get_model_profile(mode={mode!r}): expected "forward" or "generate"')
    if input_shape is not None:
        first = next(model.parameters(), torch.empty(0))
        args = [torch.rand(input_shape, dtype=first.dtype, device=first.device)]
    if not args and not kwargs:
        raise ValueError("get_model_profile() needs input_shape=, args= or kwargs=")
    profiler, trained = FlopsProfiler(model), model.training
    call: Any = model.generate if mode == "generate" else model
    model.eval()
    try:
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        try:
            call(*args, **(kwargs or {}))
        finally:
            profiler.stop_profile()
    finally:
        model.train(trained)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = [read(as_string) for read in (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)]
    profiler.end_profile()
    return found[0], found[1], found[2]


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number with the largest unit that leaves it at least 1, or with ``units`` (K, M, G, T)."""
    by_name = {name: power for power, name in _UNITS.items()}
    if units is None:
        power = next((power for power in _UNITS if abs(num) >= 10**power), -6 if num else 0)
    elif units in by_name:
        power = by_name[units]
    else:
        raise ValueError(f"number_to_string(units={units!r}): expected one of {', '.join(by_name)}")
    return f"{round(num / 10.0**power, precision):g} {_UNITS[power]}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Return a count of MACs with its unit."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Return a count of operations with its unit."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a count of parameters with its unit."""
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Return seconds with their unit."""
    return f"{number_to_string(duration, units, precision)}s"
