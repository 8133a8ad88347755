"""Episodes, each drawn from its own seed: the training jobs, their tiers, and the events during them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

KINDS = {  # how often each
    "train": 9,
    "collectives": 4,
    "groups": 3,
    "interrupt": 3,
    "kill": 2,
    "terminate": 2,
    "two-jobs": 1,
    "unequal-rate": 1,  # the learning rate of one rank is another: an error that names it
}
STAGES = ("0", "1", "2", "3", "3-units", "3-one-unit-each")
TIERS = (None, "cpu", "nvme")
ENDINGS = ("interrupt", "kill", "terminate")  # kinds in which a signal ends the first attempt


@dataclass(frozen=True)
class Event:
    """An event before or in a step of training."""

    what: str
    number: float = 0.0


@dataclass(frozen=True)
class Training:
    """A training run: where it is kept, how it steps, and its events by step."""

    seed: int
    stage: str
    tier: str | None
    precision: str
    optimizer: str
    width: int
    blocks: int
    accum: int
    clip_norm: float | None
    bucket_mb: float
    prefetch: int
    overlap: bool
    fraction: float
    events: tuple[tuple[Event, ...], ...]  # of each step

    @property
    def steps(self) -> int:
        return len(self.events)

    def describe(self) -> str:
        happening = ",".join(f"{step}:{e.what}" for step, events in enumerate(self.events) for e in events)
        where = f"stage {self.stage} {self.tier or 'memory'} {self.precision} {self.optimizer}"
        return f"{where} {self.blocks}x{self.width} accum {self.accum} [{happening}]"


@dataclass(frozen=True)
class Episode:
    """One entry of the soak; `victim` receives the signal, `delay_s` after it has begun step `at`."""

    seed: int
    kind: str
    world_size: int
    jobs: tuple[Training, ...] = ()
    victim: int = 0
    at: int = 0
    delay_s: float = 0.0

    def describe(self) -> str:
        jobs = "; ".join(job.describe() for job in self.jobs)
        struck = f", rank {self.victim} struck in step {self.at}" if self.kind in ENDINGS else ""
        return f"{self.kind} at {self.world_size} ranks{struck}{': ' if jobs else ''}{jobs}"


# Possible events of a step, and their weights.
EVENTS: dict[str, int] = {
    "save": 4,  # opt.save, waited for
    "save-behind": 4,  # opt.save(wait=False)
    "load": 3,  # the last of these, with its weights and optimizer state
    "state-dict": 2,  # opt.state_dict and load_state_dict
    "set-weight": 2,  # zcomm.zero.set_full_param of a scaled weight
    "edit": 3,  # every rank scales its weights, in place
    "gathered-edit": 2,  # GatheredParameters(modifier_rank=1)
    "set-gradient": 1,  # zcomm.zero.set_full_grad of a scaled gradient
    "fail-forward": 2,  # an exception in a block's forward, on all ranks
    "fail-backward": 2,  # the same in backward
    "no-sync": 2,  # a second batch, its gradient kept local first
    "rate": 2,  # another learning rate
    "evaluate": 2,
    "forget": 2,  # a backward pass with gradients that are thrown away
    "dropped-work": 3,  # an asynchronous all_reduce; its Work is dropped at once
    "weights": 2,  # all ranks read all weights
}


def draw(seed: int, only: frozenset[str] = frozenset()) -> Episode:
    """Draw the episode of a seed. only: kinds to draw from, all if empty."""
    pick = random.Random(seed)
    kinds = [kind for kind in KINDS if not only or kind in only]
    kind = pick.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    world_size = pick.choice((2, 3))
    jobs: tuple[Training, ...] = ()
    if kind not in ("collectives", "groups"):
        jobs = tuple(_training(pick, kind in ENDINGS) for _ in range(2 if kind == "two-jobs" else 1))
    at = pick.randrange(2, jobs[0].steps) if kind in ENDINGS else 0
    return Episode(seed, kind, world_size, jobs, pick.randrange(world_size), at, pick.choice((0.0, pick.random() / 40)))


def _training(pick: random.Random, ends: bool) -> Training:
    stage, tier = pick.choice(STAGES), pick.choice(TIERS)
    precision = pick.choice(("fp32", "fp32", "fp32", "bf16"))
    events = []
    saved = False
    for step in range(pick.randrange(5, 9) if ends else pick.randrange(3, 8)):
        chosen: list[Event] = []
        if ends and step in (1, 3):  # from which the next attempt resumes
            chosen.append(Event(pick.choice(("save", "save-behind"))))
        for what in pick.choices(list(EVENTS), list(EVENTS.values()), k=pick.choice((0, 1, 1, 2, 3))):
            impossible = what == "load" and not saved
            if impossible or any(event.what == what for event in chosen):
                continue
            chosen.append(Event(what, round(pick.uniform(0.5, 0.95), 3)))
        saved |= any(event.what.startswith("save") for event in chosen)
        saves = [event for event in chosen if event.what.startswith("save")][
            :1
        ]  # first: a resumed step begins after it
        events.append((*saves, *(event for event in chosen if not event.what.startswith("save"))))
    return Training(
        seed=pick.randrange(1 << 30),
        stage=stage,
        tier=tier,
        precision=precision,
        optimizer=pick.choice(("sgd", "momentum", "adamw", "adagrad")[: 4 if precision == "fp32" else 2]),
        width=pick.choice((8, 24, 48, 130)),
        blocks=pick.randrange(2, 6),
        accum=pick.choice((1, 1, 2, 3)),
        clip_norm=pick.choice((None, None, 0.5)),
        bucket_mb=pick.choice((0.001, 0.01, 25.0)),
        prefetch=pick.choice((0, 1, 3)),
        overlap=pick.random() < 0.7,
        fraction=pick.choice((1.0, 1.0, 0.5)) if tier else 1.0,
        events=tuple(events),
    )


def arguments(job: Training, folder: str) -> dict[str, Any]:
    """Return the arguments of ZeroOptimizer."""
    import zcomm

    stage = int(job.stage[0])
    offload: Any = job.tier
    if job.tier is not None and job.fraction != 1.0:
        offload = zcomm.Offload(job.tier, job.tier if stage == 3 else None, job.fraction)
    how: dict[str, Any] = {
        "stage": stage,
        "offload": offload,
        "nvme_path": folder,
        "precision": job.precision,
        "grad_accum": job.accum,
        "clip_norm": job.clip_norm,
        "bucket_mb": job.bucket_mb,
        "prefetch": job.prefetch,
        "overlap": job.overlap,
    }
    if job.stage == "3-units":
        how["share_parameters"] = False
    if job.stage == "3-one-unit-each":
        how |= {"share_parameters": False, "units": ["stem", "blocks", "head"]}
    return how
