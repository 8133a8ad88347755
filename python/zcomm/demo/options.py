"""A demo run: one frozen dataclass, its named sizes, and its checks. Travels to the ranks as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcomm.launch.errors import UserError
from zcomm.memory.sizes import as_nbytes

_GPT = {"model": "gpt", "world_size": 2, "precision": "fp32", "windows": 256, "sample_nbytes": 200}
# Of Llama's shape: deeper, not wider, so that their layers need equal memory. A byte of a sample reads all weights. No
# evaluations, because they would hide reads and writes of adjacent steps, which would seem faster than they are.
_LLAMA = {"model": "llama", "heads": 32, "width": 2048, "context": 256, "batch": 1, "lr": 1e-4}
_LLAMA |= {"world_size": 1, "precision": "bf16", "windows": 8, "evaluations": 0, "sample_nbytes": 8}
_FORMS = {**_GPT, "model": "llama", "heads": 4, "width": 64, "context": 64}  # a model that all axes can divide
SIZES: dict[str, dict[str, Any]] = {  # lr suits the width
    "tiny": {**_GPT, "layers": 2, "heads": 2, "width": 64, "context": 64, "batch": 8, "steps": 400, "lr": 4e-3},
    "small": {**_GPT, "layers": 6, "heads": 3, "width": 192, "context": 128, "batch": 4, "steps": 800, "lr": 2e-3},
    "medium": {**_GPT, "layers": 8, "heads": 8, "width": 512, "context": 256, "batch": 4, "steps": 1000, "lr": 1e-3},
    "llama": {**_FORMS, "layers": 4, "batch": 8, "steps": 200, "lr": 4e-3},
    "300m": {**_LLAMA, "layers": 7, "steps": 30},
    "1b": {**_LLAMA, "layers": 24, "steps": 10},
    "3b": {**_LLAMA, "layers": 68, "steps": 4},
}
OFFLOADS = ("nvme", "cpu", "none")
PRECISIONS = ("fp32", "bf16")
AXES = {"gpt": ("data", "pipe"), "llama": ("data", "pipe", "tensor", "sequence")}  # of a mesh, by model
_BUBBLE = 4  # micro-batches for each stage of a pipeline, if the batch has so many: then a bubble of a fifth
UPDATES = ("step", "forward", "backward", "auto")


@dataclass(frozen=True)
class DemoConfig:
    """One run. batch: sequences per rank and micro-step; context: bytes per sequence; clip 0: no clipping.

    model: "gpt" or "llama". evaluations: number during the steps. windows: of the last evaluation. memory: maximum of a
    rank, as text. update: as of ``zcomm.zero.Offload``. device: "cpu", "cuda" (ranks take the GPUs in turns), "cuda:1".
    mesh: ranks by axis; None: "data" only, with any stage. microbatches: of a pipeline's pass; None: chosen.
    """

    name: str
    run_dir: str
    world_size: int
    stage: int
    offload: str
    nvme_path: list[str] | None
    precision: str
    size: str
    model: str
    layers: int
    heads: int
    width: int
    context: int
    batch: int
    steps: int
    lr: float
    accum: int
    clip: float
    bucket_mb: float
    overlap: bool
    seed: int
    quiet: bool
    windows: int
    sample_nbytes: int
    data: str | None = None
    memory: str | None = None
    update: str = "auto"
    evaluations: int = 5
    device: str = "cpu"
    mesh: dict[str, int] | None = None
    microbatches: int | None = None

    @property
    def data_size(self) -> int:
        """The number of ranks that read different samples."""
        return self.world_size if self.mesh is None else self.mesh.get("data", 1)

    @property
    def divides_layers(self) -> bool:
        """Return True if ranks have different parts of the model besides ZeRO's."""
        return self.mesh is not None and self.mesh.get("pipe", 1) * self.mesh.get("tensor", 1) > 1

    @property
    def pipes(self) -> bool:
        """Return True if the model is in stages."""
        return self.mesh is not None and self.mesh.get("pipe", 1) > 1

    @property
    def passes_at_once(self) -> int:
        """Micro-batches of a pipeline's pass."""
        stages = (self.mesh or {}).get("pipe", 1)
        return min(self.batch, self.microbatches or _BUBBLE * stages)

    @property
    def tokens_per_step(self) -> int:
        """Bytes that all ranks together learn from in one step."""
        return self.data_size * self.accum * self.batch * self.context

    @property
    def directory(self) -> Path:
        """Directory of the run's results."""
        return Path(self.run_dir)

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> DemoConfig:
        """Return the options that to_json wrote."""
        return DemoConfig(**json.loads(text))

    def check(self) -> None:
        """Check all options. Raises: UserError naming the option, its value and the remedy."""
        for option in ("layers", "heads", "width", "context", "batch", "steps", "accum"):
            value = getattr(self, option)
            if value < 1:
                raise UserError(f"--{option} {value}: must be at least 1")
        pairs = 2 * self.heads
        for wrong, message in (
            *self._mesh_checks(),
            (self.width % pairs, f"--width {self.width} must be a multiple of 2 * --heads, {pairs}"),
            (self.context < 8, f"--context {self.context}: must be at least 8 bytes"),
            (not 0 < self.lr < 1, f"--lr {self.lr}: must be more than 0 and less than 1"),
            (self.clip < 0, f"--clip {self.clip}: must be more than 0, or 0 for no clipping"),
            (not self.bucket_mb > 0, f"--bucket-mb {self.bucket_mb}: must be more than 0 MiB"),
            (self.stage not in range(4), f"--stage {self.stage}: must be 0, 1, 2 or 3"),
            (
                not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device, re.ASCII),
                f"--device {self.device}: must be cpu, cuda, or one GPU such as cuda:0",
            ),
            (
                self.update not in ("auto", "step") and (self.stage, self.offload) != (3, "nvme"),
                f"--update {self.update} needs --stage 3 --offload nvme",
            ),
            (
                self.update == "backward" and (self.clip > 0 or self.accum > 1),
                "--update backward cannot clip or accumulate: add --clip 0 without --accum, or leave --update out",
            ),
            (self.seed < 0, f"--seed {self.seed}: must not be negative"),
            (
                not self.name or "/" in self.name or self.name.startswith("."),
                f"--name {self.name!r}: must be a plain folder name",
            ),
        ):
            if wrong:
                raise UserError(message)
        self._check_memory()

    def _mesh_checks(self) -> Iterator[tuple[bool, str]]:
        """Yield conditions that are wrong, and their messages."""
        if self.microbatches is not None:
            yield not self.pipes, f"--microbatches {self.microbatches} needs --mesh with pipe=2 or more"
            yield (
                not 1 <= self.microbatches <= self.batch,
                f"--microbatches {self.microbatches}: must be from 1 to --batch, {self.batch}",
            )
        if self.mesh is None:
            return
        words = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        known, of = AXES[self.model], f"--mesh {words}: the model of --size {self.size}"
        for axis in (axis for axis in self.mesh if axis not in known):
            others = [size for size, shape in SIZES.items() if axis in AXES[shape["model"]]]
            remedy = f"; use --size {' or '.join(others)}" if others else ""
            yield True, f"{of} has the axes {', '.join(known)}, not {axis}{remedy}"
        from zcomm.planning.forms import Shape, refusal  # imports torch

        stage = self.stage if self.divides_layers else 0
        shape = Shape(self.layers, self.width, self.heads, self.context, keys=self.heads // 8 or self.heads)
        reason = refusal(self.mesh, shape, stage)
        yield bool(reason), f"--mesh {words}: {reason}"
        yield self.device != "cpu", f"--mesh {words}: with --device {self.device} is not available"
        yield self.memory is not None, f"--mesh {words}: with --memory {self.memory} is not available"

    def _check_memory(self) -> None:
        if self.memory is not None:
            try:
                as_nbytes(self.memory)
            except ValueError as error:
                raise UserError(f"--memory: {error}") from None
