"""Place: the device of a rank's model, the CPU or a GPU, checked before use. Ranks take the GPUs in turns."""

from __future__ import annotations

import torch

from zcomm import _core
from zcomm.launch.errors import UserError


class Place:
    """The CPU. gpu: name of the GPU, None here."""

    gpu: str | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Wait for the model's work on the device."""

    def peak_nbytes(self) -> int | None:
        """Return the most bytes that torch ever held on the GPU; None on the CPU."""
        return None


CPU = Place(torch.device("cpu"))


class Gpu(Place):
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.gpu = torch.cuda.get_device_name(device)
        torch.cuda.set_device(device)

    def wait(self) -> None:
        """Wait for the kernels queued on torch's current stream. Copies on other streams go on."""
        torch.cuda.current_stream(self.device).synchronize()

    def peak_nbytes(self) -> int | None:
        """Return the most bytes that torch ever held on the GPU."""
        return int(torch.cuda.max_memory_allocated(self.device))


def open_place(wanted: str, local_rank: int) -> Place:
    """Return the place of ``--device``: "cpu", "cuda" or "cuda:1". Raises: UserError with the remedy."""
    if wanted == "cpu":
        return CPU
    if torch.version.cuda is None:
        raise _missing(wanted, f"torch {torch.__version__} is built without CUDA; install a torch with CUDA")
    if _core.cuda_info().startswith("built without"):
        raise _missing(wanted, "zcomm is built without CUDA; install it with ZCOMM_CUDA=ON")
    if not torch.cuda.is_available() or not _core.cuda_available():
        raise _missing(wanted, "no CUDA device is found; `zcomm doctor` shows driver and GPUs")
    count, index = torch.cuda.device_count(), torch.device(wanted).index
    if index is not None and index >= count:
        raise _missing(wanted, f"the GPUs of this process are cuda:0 to cuda:{count - 1}; take one of them")
    return Gpu(torch.device("cuda", local_rank % count if index is None else index))


def _missing(wanted: str, reason: str) -> UserError:
    return UserError(f"--device {wanted}: {reason}, or leave --device out to train on the CPU")
