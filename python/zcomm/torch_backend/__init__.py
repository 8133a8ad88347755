"""The c10d backend "zcomm": ``import zcomm.torch_backend``, then ``torch.distributed.init_process_group("zcomm")``.

It serves the tensors of every torch.distributed call: DDP, FSDP2, DTensor, functional and object collectives,
sub-groups, messages. docs/torch_backend.md lists supported calls and differences from Gloo.
"""

from __future__ import annotations

from zcomm.torch_backend.group import ProcessGroup
from zcomm.torch_backend.options import Options
from zcomm.torch_backend.register import register

__all__ = ["Options", "ProcessGroup"]

register()
