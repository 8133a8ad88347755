"""FusedOptimizer: torch.optim's interface over the core's fused steps; each optimizer adds its numbers and its kernel.

[Note: state buffer] A parameter's state lies in one buffer in the kernel's order (include/zcomm/optim_shard.hpp): the
arrays, then a bf16 parameter's ``remainder`` (int16). An fp16 parameter's ``master`` (fp32) and the ``scales`` of 8-bit
arrays lie before them.
``opt.state[param]`` holds views of it under torch's names. State that is not such views (loaded, copied, replaced by
the user) is adopted at the next step: copied into a new buffer.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype, is_lazy
from zcomm.hints import did_you_mean
from zcomm.optim.options import evaluated
from zcomm.optim.plan import Facts, Plan, Turns, gather

Hyper = TypeVar("Hyper")
MASTER_NBYTES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 4}  # by the dtypes that a parameter may have
STATE_BLOCK = 256  # elements of 8-bit state that share a scale: the core's


class _Held(NamedTuple):
    """A parameter's buffer, and the facts by which its state is recognized as views of it."""

    buffer: torch.Tensor
    names: tuple[str, ...]  # of the arrays
    kind: tuple[torch.dtype, torch.dtype, int]  # of parameter and state, and elements
    room: int  # elements that the buffer is laid out for
    keys: tuple[str, ...]
    views: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]  # of the views in the buffer: their own storage may be replaced

    def is_state_of(
        self, param: torch.Tensor, names: tuple[str, ...], dtype: torch.dtype, state: dict[str, Any]
    ) -> bool:
        return (
            self.names == names
            and self.kind == (param.dtype, dtype, param.numel())
            and all(map(operator.is_, map(state.get, self.keys), self.views))
            and _offsets(self.buffer, self.views) == self.offsets
        )

    def shard_of(self, param: torch.Tensor, grad: torch.Tensor, first_index: int) -> _core.OptimShard:
        param_dtype, state_dtype, count = self.kind
        return _core.OptimShard(
            weight=param.data_ptr(),
            weight_dtype=core_dtype(param_dtype),
            grad=0,  # given at each step
            grad_dtype=core_dtype(grad.dtype),
            state=self.buffer.data_ptr(),
            count=self.room,
            tile_count=self.room or 1,
            begin=0,
            end=count,
            state_dtype=core_dtype(state_dtype),
            first_index=first_index,
        )


def _offsets(buffer: torch.Tensor, views: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple(view.data_ptr() - buffer.data_ptr() for view in views)


def _counter(state: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return ``step`` as one fp32 number on the parameter's device, which the core increments; convert others."""
    step = state["step"]
    fine = isinstance(step, torch.Tensor) and step.dtype == torch.float32 and step.device == device
    if not fine or step.numel() != 1 or is_lazy(step):
        step = state["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)
    result: torch.Tensor = step
    return result


def _with_known_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Return an optimizer's ``init`` with a check that names the class and its arguments for an unknown argument.

    Raises: TypeError, in the call.
    """
    given = inspect.signature(init).parameters
    known = [name for name in given if name not in ("self", "params")]
    if any(each.kind == each.VAR_KEYWORD for each in given.values()):
        return init

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for key in options:
            if key not in known and key != "params":
                hint = did_you_mean(key, known, {"learning_rate": "lr"}) or ";"
                raise TypeError(f"{type(self).__name__} has no argument {key!r}{hint} It has {', '.join(known)}")
        init(self, *args, **options)

    return checked


class FusedOptimizer(torch.optim.Optimizer, Generic[Hyper]):
    """Base: one fused, multi-threaded pass per parameter over gradient, state and weight."""

    threads: int = 0
    """Threads of a step at most; 0: all of the core's pool."""
    grad_norm: float | None = None
    """Of the last step(norm=True): the norm of all gradients, unscaled but not clipped; NaN if one is not finite, None
    if the step was skipped (``found_inf`` on the host)."""
    _step_supports_amp_scaling = True  # torch.amp.GradScaler sets grad_scale and found_inf, and step() looks at them

    DEVICE: ClassVar[str] = "cpu"  # type of the device that parameters and state are on
    ARRAYS: ClassVar[tuple[str, ...]]  # torch's names of the state, in the kernel's order
    COUNTS: ClassVar[bool]  # state has ``step``
    PARAMS: ClassVar[type[Any]]  # the core's structure of a group's options
    NUMBERS: ClassVar[str]  # names, the same in group and structure
    AT_LEAST_0: ClassVar[str]
    BATCH: ClassVar[type[Any]]  # the core's

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _with_known_arguments(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._held: dict[torch.Tensor, _Held] = {}
        self._plan: Plan[Hyper] | None = None
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Check a group's options.

        Raises: ValueError naming a hyperparameter out of its range, NotImplementedError for a missing option.
        """
        for name in self.AT_LEAST_0.split():
            if not group[name] >= 0:
                raise ValueError(f"{name}={group[name]} must be at least 0")
        if "betas" in self.defaults and not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas={group['betas']} must lie in [0, 1)")
        refuse(group, "differentiable")

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        """Return a group as the kernel's arguments."""
        params: Any = self.PARAMS()
        for name in self.NUMBERS.split():
            setattr(params, name, float(group[name]))
        if "betas" in self.defaults:
            params.beta1, params.beta2 = (float(beta) for beta in group["betas"])
        params.maximize = bool(group["maximize"])
        result: Hyper = params
        return result

    def _batch(self) -> _core.Batch[Hyper]:
        """Create a batch of the core."""
        batch: _core.Batch[Hyper] = self.BATCH()
        return batch

    def _names(self, group: dict[str, Any], state: dict[str, Any]) -> tuple[str, ...]:
        return self.ARRAYS

    def _state_dtype(self, group: dict[str, Any]) -> torch.dtype:
        return torch.float32

    def _form(self, group: dict[str, Any]) -> Hashable:
        """Return the part of a group's options that its state's form depends on."""
        return self._state_dtype(group)

    def _room(self, count: int, dtype: torch.dtype) -> int:
        """Return the elements that the state of ``count`` is laid out for."""
        return count

    def _initial(self, group: dict[str, Any]) -> float:
        return 0.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's. Raises: ValueError, NotImplementedError; the optimizer is then as before."""
        self._adapt_group(param_group)
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (ValueError, NotImplementedError):
            del self.param_groups[-1]  # undo
            raise

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: float | torch.Tensor | None = None,
        found_inf: bool | torch.Tensor | None = None,
        clip: float = 1.0,
        norm: bool = False,
    ) -> float | None:
        """Update all parameters that have a gradient. closure: as in torch.optim.

        grad_scale: the gradients are divided by it, as in torch's fused optimizers; .grad itself is not changed.
        found_inf: not 0: nothing is updated, and no step is counted. Both default to the attributes that
        torch.amp.GradScaler sets. clip: the gradients are multiplied by it. norm: sets ``grad_norm``. All of this
        happens in one pass over the memory.

        Raises: ValueError for a parameter or gradient of another dtype, device or layout, NotImplementedError for a
        sparse gradient.
        """
        loss = evaluated(closure)
        found_inf = getattr(self, "found_inf", None) if found_inf is None else found_inf
        grad_scale = getattr(self, "grad_scale", None) if grad_scale is None else grad_scale
        self._step_scaled(grad_scale, found_inf, clip, norm)
        return loss

    def _step_scaled(
        self,
        grad_scale: float | torch.Tensor | None,
        found_inf: bool | torch.Tensor | None,
        clip: float,
        norm: bool,
    ) -> None:
        """Update the parameters as ``step`` does, its arguments with the defaults filled in."""
        if found_inf is not None and bool(found_inf):
            self.grad_norm = None if norm else self.grad_norm
            return
        divisor = 1.0 if grad_scale is None else float(grad_scale)
        squares = _core.ExactSum() if norm else None
        self._step_all(clip / divisor, squares)
        # A graph that has saved the old weights raises in its backward, as after a step of torch's classes.
        updated = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        torch.autograd.graph.increment_version(updated)
        if squares is not None:
            self.grad_norm = math.sqrt(squares.value()) / divisor

    def _step_all(self, factor: float, squares: _core.ExactSum | None) -> None:
        """Step all parameters; see [Note: plan] in plan.py. All checks run before anything is updated."""
        hypers = [self._hyper(group) for group in self.param_groups]
        for hyper in hypers:
            hyper.grad_scale = factor  # type: ignore[attr-defined]
        plan = self._plan
        if plan is not None:
            facts, grads = self._facts(plan.memory)
            if plan.facts.holds(facts):
                return plan.step(hypers, grads, self.threads, squares)
        self._plan = None
        plan, grads, fresh = self._prepared()
        plan.step(hypers, grads, self.threads, squares)
        self._plan = None if fresh else plan  # an array's first step differs from later ones
        return None

    def _facts(self, memory: list[torch.Tensor]) -> tuple[Facts, list[torch.Tensor]]:
        return gather(self.param_groups, self.state, [self._form(group) for group in self.param_groups], memory)

    def _prepared(self) -> tuple[Plan[Hyper], list[torch.Tensor], bool]:
        """Return a plan of all parameters with gradients, the gradients, and whether an array of state is fresh."""
        active = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        weights = [param.data_ptr() or -number for number, param in enumerate(active, 1)]  # empty ones are at 0
        batch = self._batch() if len(set(weights)) == len(weights) else Turns(self._batch, weights)
        any_fresh, begun = False, set[torch.Tensor]()
        memory: list[torch.Tensor] = []
        first_index = 0  # elements of all parameters, in their order, count through
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    self._check_grad(param, param.grad)
                    state = self.state[param]
                    names = self._names(group, state)
                    fresh = param in begun or any(state.get(name) is None for name in names)
                    if fresh:
                        begun.add(param)  # listed again, it no longer is an array's first step, as in torch
                    held = self._buffer(param, group, names)
                    any_fresh = any_fresh or fresh
                    memory += held.views
                    counter = 0
                    if self.COUNTS:
                        memory.append(_counter(state, param.device))
                        counter = memory[-1].data_ptr()
                    shard = held.shard_of(param, param.grad, first_index)
                    batch.add(shard, number, counter, buffer=bool(names), first=fresh)
                first_index += param.numel()
        facts, grads = self._facts(memory)
        return Plan(batch, memory, facts), grads, any_fresh

    def _check_grad(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided:
            raise NotImplementedError(
                f"{type(self).__name__}: the gradient of a parameter of shape {tuple(param.shape)} is "
                f"{str(grad.layout).removeprefix('torch.')}; sparse gradients are not supported, pass a dense one "
                "(nn.Embedding(sparse=False))"
            )
        if grad.numel() != param.numel() or grad.device != param.device:
            raise ValueError(
                f"{type(self).__name__}: the gradient of a parameter of shape {tuple(param.shape)} has shape "
                f"{tuple(grad.shape)} and is on {grad.device}; it must be of the parameter's shape, on {param.device}"
            )

    def _buffer(self, param: torch.Tensor, group: dict[str, Any], names: tuple[str, ...]) -> _Held:
        """Return the buffer of a parameter's state; without one allocate it or adopt state ([Note: state buffer])."""
        self._check_param(param)
        state, dtype = self.state[param], self._state_dtype(group)
        held = self._held.get(param)
        if held is not None and held.is_state_of(param, names, dtype, state):
            return held
        room = self._room(param.numel(), dtype)
        buffer, views = allocate(param, names, dtype, room, param.device)
        source = self._adopted(param, group, state)
        for name, view in views.items():
            value = source.get(name)
            if value is None and name == "master":
                view.copy_(param)
            elif value is None:
                view.fill_(self._initial(group) if name in names else 0)
            elif value.shape != view.shape:
                raise ValueError(
                    f"{type(self).__name__}: state {name} has shape {tuple(value.shape)}, its parameter has "
                    f"{tuple(param.shape)}"
                )
            else:
                view.copy_(value)
        state.update(views)
        if self.COUNTS:  # a tensor as in torch, always fp32
            state["step"] = torch.tensor(float(state.get("step", 0.0)), dtype=torch.float32, device=param.device)
        kind = (param.dtype, dtype, param.numel())
        tensors = tuple(views.values())
        held = self._held[param] = _Held(buffer, names, kind, room, tuple(views), tensors, _offsets(buffer, tensors))
        return held

    def _adopted(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """Return state that is not in a buffer yet, in the form of the group's state_dtype."""
        return state

    def _check_param(self, param: torch.Tensor) -> None:
        if param.is_neg():
            raise ValueError(
                f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} is a negated view, so that its "
                "memory lacks its values; write p.data = p.data.resolve_neg()"
            )
        if param.device.type != self.DEVICE or param.dtype not in MASTER_NBYTES or not param.is_contiguous():
            raise ValueError(
                f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} is {param.dtype} on {param.device}; "
                f"it must be a contiguous fp32, bf16 or fp16 {self.DEVICE.upper()} tensor"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dict. State of another dtype than the arrays' is copied, as torch.save refuses two dtypes in
        one storage."""
        result: dict[str, Any] = super().state_dict()
        result["state"] = {
            number: {name: _apart(name, value) for name, value in state.items()} if isinstance(state, dict) else state
            for number, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state of this optimizer, or of torch.optim's with the same formula. The caller's tensors are copied.

        With bf16 parameters load the model's weights, too: weight and ``remainder`` are one number.
        """
        for group in state_dict["param_groups"]:  # before anything changes
            adapted = dict(group)
            self._adapt_group(adapted)
            self._check_group({**self.defaults, **adapted})
        super().load_state_dict(state_dict)
        # torch casts all state to the parameter's dtype; state of a bf16 parameter is not bf16.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                wide = name in (*self.ARRAYS, "master") and value.is_floating_point()  # else as it was saved
                dtype = torch.int16 if name == "remainder" else torch.float32 if wide else value.dtype
                self.state[param][name] = value.to(param.device, dtype, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state for load_state_dict, pickle and copy.

        The groups may come from another torch or another optimizer class.
        """
        super().__setstate__(state)
        self._held, self._plan = {}, None
        for group in self.param_groups:
            self._adapt_group(group)
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _adapt_group(self, group: dict[str, Any]) -> None:
        """Turn a loaded group's older names into today's."""


def allocate(
    param: torch.Tensor, names: tuple[str, ...], dtype: torch.dtype, room: int, device: torch.device | str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Allocate a buffer for a parameter's state; return it and its views by name; see [Note: state buffer].

    room: elements that each array has space for, at least the parameter's.
    """
    count, nbytes = param.numel(), room * dtype.itemsize
    scales_nbytes = -(-room // STATE_BLOCK) * len(names) * 4 if dtype == torch.uint8 else 0
    used = scales_nbytes + nbytes * len(names) + room * MASTER_NBYTES[param.dtype]
    buffer = torch.empty((used + 3) // 4 * 4, dtype=torch.uint8, device=device)  # torch.load needs whole fp32 numbers
    arrays, views = buffer, {}
    if param.dtype == torch.float16:
        views["master"], arrays = arrays[: 4 * count].view(torch.float32).view(param.shape), arrays[4 * room :]
    if dtype == torch.uint8:
        scales, arrays = arrays[:scales_nbytes], arrays[scales_nbytes:]
        views["scales"] = scales.view(torch.float32).view(-1, len(names))
    for k, name in enumerate(names):
        view = arrays[k * nbytes : k * nbytes + count * dtype.itemsize]
        views[name] = view.view(dtype).view(param.shape)
    if param.dtype == torch.bfloat16:
        low = nbytes * len(names)
        views["remainder"] = arrays[low : low + 2 * count].view(torch.int16).view(param.shape)
    return buffer, views


def _apart(name: str, value: Any) -> Any:
    return value.clone() if name in ("remainder", "scales", "master") and isinstance(value, torch.Tensor) else value


def refuse(group: dict[str, Any], *names: str) -> None:
    """Refuse an enabled option of torch's that zcomm lacks. Raises: NotImplementedError."""
    for name in names:
        if group.get(name, False):
            raise NotImplementedError(f"{name}={group[name]} is not available in the fused optimizers")
