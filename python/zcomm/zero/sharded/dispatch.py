"""Operations, classified by the data that they need of a stand-in: metadata, single elements, or whole values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_tensor: Any = torch.Tensor

_READ = (
    "shape ndim dtype device layout requires_grad grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_sparse_csr "
    "is_quantized is_nested is_mkldnn is_mps is_xla is_xpu is_ipu is_vulkan is_ort is_maia is_mtia names _version "
    "output_nr retains_grad itemsize nbytes _backward_hooks _post_accumulate_grad_hooks _grad _grad_fn volatile"
).split()
_NAMES_DEVICE = "device is_cuda is_cpu is_meta is_mps is_xla is_xpu is_ipu is_vulkan is_ort is_maia is_mtia".split()
_WRITTEN = "requires_grad grad _backward_hooks _post_accumulate_grad_hooks _grad names".split()
_CALLED = (
    "size numel nelement dim ndimension storage_offset element_size is_floating_point is_complex is_signed "
    "get_device register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad is_shared is_pinned "
    "is_inference __len__ __hash__ has_names is_same_size is_conj is_neg is_distributed _is_view __dir__"
).split()
_FUNCTIONS = (
    "is_floating_point is_complex numel is_conj is_neg is_inference is_same_size is_signed result_type "
    "_has_compatible_shallow_copy_type is_nonzero_grad"
).split()


def _metadata() -> Iterator[Any]:
    for names, access in ((_READ, "__get__"), (_WRITTEN, "__set__")):
        for name in names:
            if hasattr(_tensor, name):
                yield getattr(getattr(_tensor, name), access)
    for owner, names in ((_tensor, _CALLED), (torch, _FUNCTIONS)):
        yield from (getattr(owner, name) for name in names if hasattr(owner, name))


METADATA = frozenset(_metadata())
# The operations of METADATA that return the device.
DEVICE = frozenset(
    (
        _tensor.get_device,
        *(getattr(_tensor, name).__get__ for name in _READ if name in _NAMES_DEVICE and hasattr(_tensor, name)),
    )
)
# Operations on memory, which a stand-in does not have.
MEMORY = frozenset((_tensor.data_ptr, _tensor.untyped_storage, _tensor.storage, _tensor._typed_storage))

DISTRIBUTED = "torch.distributed.distributed_c10d"  # the module of functions that read and write by address
AUTOGRAD = frozenset((torch.autograd.grad, torch.autograd.backward, _tensor.backward))

# Each element of the result depends only on the same element of the operands, so a kernel may run on any part.
ELEMENTWISE = frozenset(
    "add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ neg_ negative_ abs_ absolute_ sign_ clamp_ clip_ "
    "clamp_min_ clamp_max_ zero_ fill_ copy_ lerp_ addcmul_ addcdiv_ nan_to_num_ masked_fill_ relu_ square_ sqrt_ "
    "reciprocal_ floor_ ceil_ round_ trunc_ maximum_ minimum_ "
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__".split()
)
OVERWRITES = frozenset("normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_".split())
# Operations that change the tensor's form in place, not its values.
GEOMETRY = frozenset(
    "resize_ resize_as_ share_memory_ as_strided_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ apply_ map_ "
    "map2_ sparse_resize_ rename_ detach_".split()
)
LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full "
    "new_tensor new_empty_strided new".split()
)
STRIDES = frozenset(("stride", "is_contiguous"))  # answered as of a contiguous tensor
RESHAPED_AS = frozenset("view_as expand_as reshape_as type_as to".split())
_TO = frozenset(
    "to cpu cuda float double half bfloat16 type type_as contiguous requires_grad_ resolve_conj resolve_neg".split()
)
_AUGMENTED = frozenset(
    f"__i{name}__" for name in "add sub mul matmul truediv div floordiv mod pow lshift rshift and xor or".split()
)
_NOT_WRITING = frozenset("requires_grad_ retain_grad_ share_memory_".split())


def writes(name: str) -> bool:
    """Return True if a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name in _AUGMENTED
    return name.endswith("_") and name not in _NOT_WRITING


def unchanged_by(func: Any, name: str, data: torch.Tensor, args: Any, kwargs: Any) -> bool:
    """Return True if ``func`` returns its first argument itself: a conversion to the tensor's own dtype and device."""
    if name not in _TO or kwargs.get("copy") or (name == "type" and len(args) + len(kwargs) == 1):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        others = [leaf for leaf in (*args[1:], *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        one = torch.empty(1, dtype=data.dtype, device=data.device)
        if name == "to":  # a model.to(memory_format=...) leaves a weight that has no memory as it is
            kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        if others:
            return (others[0].dtype, others[0].device) == (one.dtype, one.device)
        return func(one, *args[1:], **kwargs) is one
