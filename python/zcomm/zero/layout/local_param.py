"""LocalParam: this rank's part of a parameter that torch has divided as a DTensor, in place of the parameter.

[Note: local parts] In tensor parallelism a parameter is a DTensor. The program sees the whole shape, and each rank
along the axis "tensor" has a part, or a copy. ZeroOptimizer lays out and updates that part. So its own lists have a
LocalParam, with the form, data and gradient of the part. All else (hooks, flags, version counter) is the parameter's.
Tables by id() and the program's param groups have the parameter itself.
Gradients: autograd may leave one that is to be added up over the ranks (Partial). Reading ``grad`` adds it up, in the
order of backward, which is the same on these ranks.
Thread rule: as the parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from zcomm.zero.layout.cut import Cut, expert_part

_OWN = ("_given", "_place", "_content", "data", "grad")


def dtensor_type() -> Any:
    """Return torch's DTensor if it has been imported, else a type that no tensor has."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", _NoDTensor)


class _NoDTensor:
    """Null object: the type of DTensors in a process that has none."""


def is_dtensor(param: object) -> bool:
    return isinstance(param, dtensor_type())


def is_divided(param: torch.Tensor) -> bool:
    """Return True if ranks have different parts of ``param``, a DTensor."""
    return not all(placement.is_replicate() for placement in cast(Any, param).placements)


def is_local(param: object) -> bool:
    return isinstance(param, LocalParam)


def local_shape(param: torch.Tensor) -> torch.Size:
    """Return the shape of this rank's part."""
    return cast(Any, param)._local_tensor.shape if is_dtensor(param) else param.shape


def as_local(param: torch.Tensor) -> nn.Parameter:
    """Return the LocalParam of a DTensor, and any other tensor as it is."""
    return cast(nn.Parameter, LocalParam(param) if is_dtensor(param) else param)


def as_given(param: object) -> torch.Tensor:
    """Return the DTensor of a LocalParam, and any other tensor as it is."""
    return cast(torch.Tensor, param._given if isinstance(param, LocalParam) else param)


def counted_memory(params: Iterable[object]) -> list[torch.Tensor]:
    """List all tensors with version counters that autograd compares: a DTensor and its part."""
    params = list(params)
    return [*map(as_given, params), *(param.data for param in params if isinstance(param, LocalParam))]


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor of parts, which the ranks with the others gather; others as they are. Detached."""
    part, tensor = expert_part(tensor), tensor.detach()
    if part is not None:
        return part.joined(tensor)
    return cast(torch.Tensor, cast(Any, tensor).full_tensor()) if is_dtensor(tensor) else tensor


def cut_of(param: object) -> Cut:
    """Return the elements of the whole tensor that are here, of a tensor or a LocalParam."""
    given: Any = as_given(param)
    if (part := expert_part(given)) is not None:
        return part.cut(given.shape)
    if not is_dtensor(given) or not is_divided(given):
        return Cut(given.shape)
    (place,) = given.placements
    at, blocks = given.device_mesh, getattr(place, "split_factor", 1)
    return Cut(given.shape, place.dim % given.dim(), at.get_local_rank(), at.size(), blocks)


class LocalParam:
    """The part of the DTensor ``given`` on this rank ([Note: local parts]).

    Raises: RuntimeError if the program has distributed the parameter in another way since, or assigned its ``data``.
    """

    _given: Any
    _place: tuple[Any, Any]  # device mesh and placements
    _content: tuple[int, int]  # torch's tensor and storage, which ``p.data = other`` replaces, without effect

    def __init__(self, given: torch.Tensor) -> None:
        self._given = given
        self._place = _place_of(given)
        self._content = _content_of(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._given, name, value)

    # --- the part ---------------------------------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        if self._place != (now := _place_of(self._given)):
            raise RuntimeError(
                f"a parameter of shape {tuple(self._given.shape)} is distributed as {now[1]} now, but was "
                f"{self._place[1]} when ZeroOptimizer was built: close() it and build it again"
            )
        if (content := _content_of(self._given)) != self._content:
            before, self._content = self._content, content
            if before[0] == content[0]:  # not torch.utils.swap_tensors
                raise RuntimeError(
                    f"p.data of a parameter of shape {tuple(self._given.shape)} was assigned, which changes "
                    "no DTensor in torch. Use p.copy_(dtensor), or zcomm.zero.set_full_param(p, whole)"
                )
        return _arrived(self._given._local_tensor)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.dtype != self._given.dtype:
            spec = _spec_in(self._given._spec, value.dtype)
            self._given.data = dtensor_type()(value, spec, requires_grad=False)  # changes the dtype, not the part
            self._given._spec = spec
            self._content = _content_of(self._given)
        # With an offset in its storage torch cannot copy views of the DTensor (copy.deepcopy of a state_dict).
        self._given._local_tensor = torch.from_dlpack(value) if value.storage_offset() else value

    @property
    def grad(self) -> torch.Tensor | None:
        found = self._given.grad
        if found is None or not is_dtensor(found):  # a tensor of the program, which UserGrads checks
            return cast("torch.Tensor | None", found)
        if found.placements != self._place[1]:
            with torch.no_grad():
                found = found.redistribute(*self._place)
            found._local_tensor = _arrived(found._local_tensor)
            self._given.grad = found
        return cast(torch.Tensor, found._local_tensor)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._given.grad = None if value is None else dtensor_type()(value, self._given._spec, requires_grad=False)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def numel(self) -> int:
        return self.data.numel()

    def dim(self) -> int:
        return self.data.dim()

    def stride(self) -> tuple[int, ...]:
        return self.data.stride()

    def data_ptr(self) -> int:
        return self.data.data_ptr()

    def is_neg(self) -> bool:
        return self.data.is_neg()

    def detach(self) -> torch.Tensor:
        return self.data.detach()

    def view_as(self, _: object) -> torch.Tensor:
        """Return a view of the parameter itself, with the node of its gradient."""
        return cast(torch.Tensor, self._given.view_as(self._given))


def fits(param: object, other: object) -> bool:
    """Return True if ``other`` is a DTensor in the same parts as the LocalParam ``param``."""
    return isinstance(param, LocalParam) and is_dtensor(other) and _place_of(other) == param._place


def _place_of(given: Any) -> tuple[Any, Any]:
    return given._spec.mesh, given._spec.placements


def _content_of(given: Any) -> tuple[int, int]:
    return given._cdata, given.untyped_storage()._cdata


def _arrived(part: torch.Tensor) -> torch.Tensor:
    """Wait for a part that a collective of torch still writes."""
    pending = getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)
    return cast(Any, part).wait() if pending is not None and isinstance(part, pending) else part


def _spec_in(spec: Any, dtype: torch.dtype) -> Any:
    """Return the placements of ``spec`` for elements of ``dtype``."""
    meta = spec.tensor_meta
    return type(spec)(spec.mesh, spec.placements, tensor_meta=type(meta)(meta.shape, meta.stride, dtype))
