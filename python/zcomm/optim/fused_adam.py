"""FusedAdam: the fused Adam / AdamW on CUDA parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype
from zcomm.optim.adam import FusedAdamBase
from zcomm.optim.options import given
from zcomm.optim.plan import in_memory

ALIGN = 64  # elements: each array of a state begins at an address for 16-byte loads
NORM_BLOCK = 64  # elements of a block; the sum of their squares is one number: the core's


@dataclass
class _Call:
    """Arguments of a step except parameters and gradients; tensors are single fp32 numbers on the device."""

    clip: float = 1.0
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    lrs: list[torch.Tensor | None] = field(default_factory=list)  # of the groups


def _address(number: torch.Tensor | None) -> int:
    return 0 if number is None else number.data_ptr()


class _StreamBatch:
    """A Plan's batch on a stream: one call of the core for each group."""

    def __init__(self, stream: Callable[[], _core.Stream], device: torch.device, call: _Call) -> None:
        self._stream, self._device, self._call = stream, device, call
        self._parts: dict[int, tuple[_core.StreamAdamBatch, list[int]]] = {}
        self._count = 0
        self._factors: torch.Tensor | None = None  # computed on the device, an entry for each parameter

    def add(
        self, shard: _core.OptimShard, group: int, counter: int = 0, buffer: bool = False, first: bool = False
    ) -> None:
        batch, places = self._parts.setdefault(group, (_core.StreamAdamBatch(), []))
        batch.add(shard, counter)
        places.append(self._count)
        self._count += 1

    def step(
        self,
        groups: Sequence[_core.AdamParams],
        grads: Sequence[int],
        threads: int = 0,
        squares: _core.ExactSum | None = None,
    ) -> None:
        if self._factors is None:
            nbytes = _core.ADAM_FACTORS_NBYTES * self._count
            self._factors = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        stream, call, at = self._stream(), self._call, self._factors.data_ptr()
        for group, (batch, places) in self._parts.items():
            batch.step(
                stream,
                groups[group],
                [grads[place] for place in places],
                at,
                clip=call.clip,
                lr=_address(call.lrs[group]),
                grad_scale=_address(call.grad_scale),
                found_inf=_address(call.found_inf),
            )
            at += _core.ADAM_FACTORS_NBYTES * len(places)


class FusedAdam(FusedAdamBase):
    """Adam or AdamW on CUDA tensors: a few kernels for all parameters, with CPUAdam's bits.

    params: fp32, bf16 or fp16 CUDA parameters of one device (or groups); bf16 and fp16 as in CPUAdam. adamw,
    weight_decay (0 by default; torch.optim.AdamW's is 0.01), state_dtype: as in CPUAdam. capturable, fused, foreach:
    torch.optim.AdamW's, accepted without effect. Nothing waits for the device, and steps are counted on it (``step`` is
    a CUDA tensor). So a CUDA graph can capture ``step()`` once it has run twice. For a learning rate that changes
    between replays, pass ``lr`` as an fp32 CUDA tensor, as in torch.
    ``step`` takes CUDA tensors too, which are read when the step runs on the device.
    State and loading: as CPUAdam; torch.optim.AdamW loads it as with ``capturable=True``.
    Work goes to torch's current stream.

    Raises: CudaError without a CUDA device. ValueError naming a hyperparameter out of range, or a parameter of another
    dtype or device. NotImplementedError for amsgrad=True or a sparse gradient.
    Source: Kingma & Ba (arXiv:1412.6980), Loshchilov & Hutter (arXiv:1711.05101).
    """

    DEVICE: ClassVar[str] = "cuda"

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw: bool = True,
        maximize: bool = False,
        *,
        amsgrad: bool = False,
        state_dtype: torch.dtype | str = torch.float32,
        capturable: bool = True,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        options = given(locals(), "capturable", "fused", "foreach")
        self._reset()
        self._check_there()
        super().__init__(params, **options)

    def _reset(self) -> None:
        self._call = _Call()
        self._opened: _core.Device | None = None

    def _check_there(self) -> None:
        """Check that there is a device. Raises: CudaError."""
        if not _core.cuda_available():
            _core.cuda_device(0)  # raises; with a device it would initialize one that may not be this rank's

    def _stream(self, device: torch.device) -> _core.Stream:
        """Return the stream that a step goes to: torch's current one."""
        if self._opened is None:
            self._opened = _core.cuda_device(device.index or 0)
        return self._opened.adopt_stream(torch.cuda.current_stream(device).cuda_stream)

    def _home(self) -> torch.device:
        device: torch.device = next(param.device for group in self.param_groups for param in group["params"])
        return device

    def _adapt_group(self, group: dict[str, Any]) -> None:
        super()._adapt_group(group)
        group["capturable"] = True  # for torch: ``step`` is on the device

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        params = [param for each in (*self.param_groups, group) for param in each["params"]]
        devices = {param.device for param in params if isinstance(param, torch.Tensor)}  # numbers in a state_dict
        for device in devices:
            if device.type != self.DEVICE:
                raise ValueError(
                    f"{type(self).__name__}: a parameter is on {device}; it must be on a {self.DEVICE} device"
                )
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            raise ValueError(f"{type(self).__name__}: parameters are on {names}; make one optimizer for each device")

    def _room(self, count: int, dtype: torch.dtype) -> int:
        return count if dtype == torch.uint8 else -(-count // ALIGN) * ALIGN

    def _batch(self) -> _StreamBatch:
        home = self._home()
        return _StreamBatch(lambda: self._stream(home), home, self._call)

    def _hyper(self, group: dict[str, Any]) -> _core.AdamParams:
        if self._number(group["lr"]) is not None:
            group = {**group, "lr": 0.0}  # the device reads it
        return super()._hyper(group)

    def _number(self, value: object) -> torch.Tensor | None:
        """Return a single number on the device, as the kernels read it; None for another value."""
        if not isinstance(value, torch.Tensor) or value.device.type != self.DEVICE:
            return None
        if value.numel() != 1:
            raise ValueError(f"{type(self).__name__}: a tensor of shape {tuple(value.shape)} is not a single number")
        return value.to(self._home(), torch.float32)

    def _step_scaled(
        self,
        grad_scale: float | torch.Tensor | None,
        found_inf: bool | torch.Tensor | None,
        clip: float,
        norm: bool,
    ) -> None:
        """Update the parameters on the device, which reads CUDA tensors among the arguments; norm waits for it."""
        call = self._call
        call.found_inf, call.grad_scale, call.clip = self._number(found_inf), self._number(grad_scale), clip
        if found_inf is not None and call.found_inf is None and bool(found_inf):
            self.grad_norm = None if norm else self.grad_norm
            return
        if grad_scale is not None and call.grad_scale is None:
            call.clip = clip / float(grad_scale)
        call.lrs = [self._number(group["lr"]) for group in self.param_groups]
        if norm:
            self.grad_norm = self._norm() / (1.0 if grad_scale is None else float(grad_scale))
        self._step_all(1.0, None)

    def _norm(self) -> float:
        """Compute the norm of all gradients, still with their loss scale.

        The device sums the squares of each block, and the host adds the sums.
        """
        every = [param.grad for group in self.param_groups for param in group["params"]]
        grads = in_memory([grad for grad in every if grad is not None])
        blocks = [-(-grad.numel() // NORM_BLOCK) for grad in grads]
        sums = torch.empty(sum(blocks), dtype=torch.float64, device=self._home())
        stream, at = self._stream(self._home()), sums.data_ptr()
        for grad, count in zip(grads, blocks, strict=True):
            _core.stream_squares(stream, at, grad.data_ptr(), core_dtype(grad.dtype), grad.numel())
            at += 8 * count
        stream.synchronize()
        total, here = _core.ExactSum(), sums.cpu()
        _core.add_block_sums(total, here.data_ptr(), here.numel())
        return math.sqrt(total.value())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        super().__setstate__(state)
