"""``deepspeed.utils.init_on_device``: a model with tensors on a device and in a precision."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch


class OnDevice:
    """``with OnDevice(dtype, device="meta"): model = Model()`` makes tensors there, floating ones in ``dtype``.

    A device that the program names itself wins. It is torch's own ``torch.device`` context and default dtype.
    Raises: TypeError for a dtype that is not a floating one. Not for several threads at once.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._inside: ExitStack | None = None

    def __enter__(self) -> None:
        if self.enabled:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._inside = ExitStack()
            self._inside.callback(torch.set_default_dtype, before)
            self._inside.enter_context(torch.device(self.device))

    def __exit__(self, *error: Any) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.close()
