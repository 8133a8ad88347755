"""One training within a limit: ranks as processes, the peak of each of its phases, and its bits.

The ranks are this file as a program, with a Training as JSON; `zcomm run` starts them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from limited import ranks

_UNTOUCHED_NBYTES = 128 << 20  # of stacks and arenas
_WORKING_NBYTES = 64 << 20  # inside operators, and inside a recomputed block


@dataclass(frozen=True)
class Training:
    """A run of the demo's decoder, all on the drive. folder: on the drive.

    limit: bytes or text for ``memory=``; None: no limit. told: pass the activations' bytes to the limit, so that the
    optimizer uses the rest. max_bytes: of units. clip: norm of gradients. checkpoint: save, load and export after the
    steps; only rank 0 exports. hashed: a digest of all weights and state after the steps. plain: the model in plain
    torch, see ``_train_plain``.
    """

    layers: int
    width: int
    context: int
    folder: str
    world_size: int = 1
    steps: int = 3
    limit: int | str | None = None
    told: bool = False
    max_bytes: int | None = None
    gradients: str | None = "nvme"
    rule: str = "adamw"
    precision: str = "bf16"
    clip: float | None = None
    accum: int = 1
    checkpoint: bool = False
    hashed: bool = False
    plain: bool = False


@dataclass
class Found:
    """Findings of ``rank``. peaks: VmHWM of each phase, in bytes. losses: as hexadecimal text. max_bytes: of units.

    wall_nbytes: RLIMIT_DATA from the first step on; 0: none.
    """

    rank: int = 0
    numel: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    digest: str = ""
    max_bytes: int | None = None
    wall_nbytes: int = 0
    memory: dict[str, dict[str, int]] = field(default_factory=dict)


def run(training: Training, timeout_s: float) -> list[Found]:
    """Run the ranks; return their findings, rank 0 first. No file remains on the drive. Raises: Failed."""
    with tempfile.TemporaryDirectory(prefix="zcomm-limit-", dir=training.folder) as folder:
        said = ranks.run(__file__, asdict(training) | {"folder": folder}, training.world_size, timeout_s)
    return [Found(**each) for each in said]


def layers_for(numel: float, width: int) -> int:
    """Return the number of layers of a model of about ``numel`` parameters."""
    one, two = _numel(1, width), _numel(2, width)
    return max(1, round((numel - one) / (two - one)) + 1)


def _numel(layers: int, width: int) -> int:
    import torch

    with torch.device("meta"):
        return sum(weight.numel() for weight in _make_model(layers, width).parameters())


def _make_model(layers: int, width: int) -> Any:
    from zcomm.demo.model import ByteLlama

    return ByteLlama(layers, max(1, width // 64), width)


# --- a rank ---------------------------------------------------------------------------------------------------------


class _Phases:
    """Peaks and seconds of parts of the run, by name. Each part resets the kernel's high-water mark."""

    def __init__(self, found: Found) -> None:
        self._found = found

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        begin = time.perf_counter()
        yield
        self._found.seconds[name] = time.perf_counter() - begin
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        self._found.peaks[name] = 1024 * int(text.split("VmHWM:")[1].split()[0])


def _train(training: Training) -> Found:
    import torch

    import zcomm
    from zcomm.zero import Init, MemoryLimit, Offload, Units
    from zcomm.zero.checkpoint.export import export

    torch.set_num_threads(1)
    torch.manual_seed(1)
    comm = zcomm.init()
    found = Found(comm.rank)
    phase = _Phases(found)
    limit = None
    if training.limit is not None:
        limit = MemoryLimit(training.limit, _activations_nbytes(training) if training.told else None)
    with phase("construction"):
        with Init():
            model = _make_model(training.layers, training.width)
        found.numel = sum(weight.numel() for weight in model.parameters())
        optimizer = zcomm.ZeroOptimizer(
            model,
            training.rule,
            lr=1e-4,
            stage=3,
            offload=Offload("nvme", "nvme", gradients=training.gradients, update="step"),
            nvme_path=training.folder,
            precision=training.precision,
            clip_norm=training.clip,
            grad_accum=training.accum,
            units=Units(max_bytes=training.max_bytes),
            memory=limit,
        )
    if limit is not None:  # the kernel's limit of private memory, which also counts untouched mappings
        found.wall_nbytes = limit.nbytes - optimizer.memory()["cpu"]["slots"] + _UNTOUCHED_NBYTES
        resource.setrlimit(resource.RLIMIT_DATA, (found.wall_nbytes, found.wall_nbytes))
    found.max_bytes, found.memory = optimizer.units.max_nbytes, dict(optimizer.memory())
    for step in range(training.steps):
        with phase(f"step {step + 1}"):
            for micro in range(training.accum):
                generator = torch.Generator().manual_seed(1000 * step + 10 * micro + comm.rank)
                tokens = torch.randint(256, (2, 1, training.context), generator=generator)
                loss = model(tokens[0], tokens[1])
                optimizer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.losses.append(loss.item().hex())
    if training.hashed:
        found.digest = _digest(optimizer)
    if training.checkpoint:
        saved = f"{training.folder}/saved"
        with phase("save"):
            optimizer.save(saved)
        with phase("load"):
            optimizer.load(saved)
        with phase("export"):
            if comm.rank == 0:
                export(Path(saved), Path(training.folder, "exported"))
    with phase("close"):
        optimizer.close()
    zcomm.shutdown()
    return found


def _activations_nbytes(training: Training) -> int:
    """Return the bytes that the program keeps between forward and backward, traced on the meta device."""
    import torch

    from zcomm.planning import saved_nbytes
    from zcomm.zero.options import as_precision

    with torch.device("meta"):
        tokens = torch.zeros(1, training.context, dtype=torch.int64)
        model = _make_model(training.layers, training.width).to(as_precision(training.precision).dtype)
        return saved_nbytes(model, tokens, tokens) + _WORKING_NBYTES


def _train_plain(training: Training) -> Found:
    """Run forward and backward in plain torch. All blocks share one block's weights, and gradients are dropped at once.
    So only memory that any program needs for a block grows with depth: its modules, its graph and saved tensors."""
    import torch

    from zcomm.zero.memory_limit import limit_allocator
    from zcomm.zero.options import as_precision

    torch.set_num_threads(1)
    torch.manual_seed(1)
    if training.limit is not None:
        limit_allocator()
    found = Found()
    phase = _Phases(found)
    dtype = as_precision(training.precision).dtype
    with phase("construction"):
        with torch.device("meta"):
            model = _make_model(training.layers, training.width)
        found.numel = sum(weight.numel() for weight in model.parameters())
        made: dict[str, torch.Tensor] = {}

        def drop(weight: torch.Tensor) -> None:
            weight.grad = None

        for path, module in model.named_modules():
            for name, weight in [*module.named_parameters(recurse=False)]:
                in_block = ".".join(part for part in (*path.split("."), name) if not part.isdecimal())
                if in_block not in made:
                    made[in_block] = torch.randn(weight.shape).mul_(0.02).to(dtype)
                setattr(module, name, torch.nn.Parameter(made[in_block]))
                getattr(module, name).register_post_accumulate_grad_hook(drop)
    for step in range(training.steps):
        with phase(f"step {step + 1}"):
            generator = torch.Generator().manual_seed(1000 * step)
            tokens = torch.randint(256, (2, 1, training.context), generator=generator)
            loss = model(tokens[0], tokens[1])
            loss.backward()
            found.losses.append(loss.item().hex())
    return found


def _digest(optimizer: Any) -> str:
    """Digest weights, master and state, independently of the pieces; "" on ranks other than 0. Collective."""
    import torch

    digests: dict[tuple[str, str], Any] = {}
    for piece in optimizer.iter_state():  # pieces of a parameter come in order, parameters by their tiers
        for key, values in piece.values.items():
            digest = digests.setdefault((piece.name, key), hashlib.sha256())
            digest.update(values.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    if not digests:
        return ""
    lines = (f"{name} {key} {digest.hexdigest()}" for (name, key), digest in sorted(digests.items()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    given = Training(**json.loads(sys.argv[1]))
    ranks.say(asdict((_train_plain if given.plain else _train)(given)))
