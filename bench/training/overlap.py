"""Share of communication that is hidden behind backward, where a core is there for it.

  bench/zero.py overlap                                    (33.5M parameters, buckets of 25, 4 and 1 MiB)
  bench/zero.py overlap --bucket-mb 4 --rounds 101 --json mine.jsonl
  bench/zero.py overlap --compute one --link 10 --context 256  (two hosts, 10 Gbit/s; needs root, ip and tc)

Two ranks on two cores, in one of two ways (--compute):

  one    rank 0 computes on one core; rank 1 stands for a peer with gradients that are always there. All that
         communicates (the progress threads of both ranks, and rank 1) runs on the other core.
  both   both ranks compute, taking turns on one core, so Tc is that of two steps. Both progress threads have the other
         core, which is never asked to compute. This is a whole training step with a core for the communication.

In turn, a step each:

  compute      forward and backward of rank 0, gradients copied into the bucket slots, nothing sent       Tc
  communicate  the same buckets through reduce_scatter, no rank computes                                  Tm
  both         forward and backward with the reduction behind it, until the last bucket is there          T
  after        the same with overlap=False
  limit        compute, while rank 1 moves the bytes of each bucket when it is complete, by itself and through the same
               levels of memory. It reads slots, which come round, and writes sums. The limit is what two programs that
               know nothing of each other get of this machine's memory. It is there only with one (with both rank 1 has
               no core left for it), and only in shared memory.

overlap = (Tc + Tm - T) / min(Tc, Tm): 1 is hidden to the end, 0 one after the other. The last bucket can only start
when backward has ended, so it bounds the overlap by its size: "tail" is its part of all bytes. Medians over rounds of
the figures of each round; the quartiles are in the JSON. "quiet": of the first quartiles of the times, as a core that
stalls for longer than all communication takes is in some rounds, whatever runs. Of what compute lost to "both", two
parts are measured on its own thread. "launch" was spent in launching, "wait" in waiting for slots and for the tail. The
rest is memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import launch
from harness.goal import judge
from harness.link import link, why_not
from harness.program import add_run_arguments, listed, make_parser
from harness.record import JsonLines, command_line, machine
from harness.timing import MIN_ROUNDS
from training import gpt

SLOTS = 3  # of a rank
VARIANTS = ("compute", "communicate", "both", "after", "limit")
TIMES = (*VARIANTS, "launch", "wait")
SHARES = {"overlap": "both", "overlap_after": "after", "overlap_limit": "limit"}
SHOWN = (*SHARES, "overlap_quiet", "overlap_limit_quiet")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/zero.py overlap", __doc__)
    add = parser.add_argument
    add("--bucket-mb", default="25,4,1", help="by commas (25,4,1)")
    add("--compute", default="one,both", help="ranks that compute: one, both, or one,both (both ways)")
    add("--rounds", type=int, default=41, help="timed rounds, at least 7 (41)")
    add("--warmup", type=int, default=3, help="rounds before (3)")
    add("--backend", default="auto", help="of zcomm.init (auto: shared memory, with --link TCP)")
    add("--link", type=float, default=0.0, help="Gbit/s of a cable between the ranks (0: they share memory)")
    gpt.add_arguments(parser, 64)
    add_run_arguments(parser, 600.0)
    arguments = parser.parse_args(words)
    arguments.rounds = max(MIN_ROUNDS, arguments.rounds)
    arguments.bucket_mb = [float(word) for word in arguments.bucket_mb.split(",")]
    arguments.compute = listed(parser, "--compute", arguments.compute, ("one", "both"))
    if arguments.link and not 0.01 <= arguments.link <= 100.0:
        parser.error(f"--link {arguments.link:g}: expected Gbit/s from 0.01 to 100, or 0")
    if arguments.link and why_not():
        parser.error(f"--link: {why_not()}")
    return arguments


CORES = sorted(os.sched_getaffinity(0))[:2]


def pin(computes: bool) -> None:
    """Pin the main thread of a rank that computes to the first core, all other threads to the second."""
    for thread in os.listdir("/proc/self/task"):
        main = int(thread) == os.getpid() and computes
        os.sched_setaffinity(int(thread), {CORES[0] if main else CORES[1]})


class Step:
    """One bucket size: the same model and buckets with the reduction on, off, and after backward."""

    def __init__(self, arguments: argparse.Namespace, bucket_mb: float, comm: Any, computes: bool) -> None:
        import torch

        import zcomm
        import zcomm_testing

        self.computes = computes  # this rank
        self.has_limit = comm.backend == "shm"
        self.optimizers = {}
        self.models = {}
        for name in ("both", "after"):
            model = gpt.make_model(arguments)
            self.optimizers[name] = zcomm.ZeroOptimizer(model, stage=2, bucket_mb=bucket_mb, overlap=name == "both")
            self.models[name] = model
        self.batch = gpt.make_batch(arguments, comm.rank)
        geometry = self.optimizers["both"]._live.geometry
        self.nbytes = 4 * geometry.count
        self.tail = geometry.buckets[0].count / geometry.count
        largest = max(bucket.count for bucket in geometry.buckets)
        self.slots = [torch.zeros(largest) for _ in range(2 * SLOTS)] if not computes else []
        self.sums = torch.zeros(geometry.count if not computes else 0)
        self.complete = comm.shared_empty(1, torch.int32).zero_().numpy() if self.has_limit else None
        self.stream = zcomm_testing.simulated_device().adopt_stream(0)  # the calling thread: the host's own kernels
        self.launch_s = 0.0
        for optimizer in self.optimizers.values():
            optimizer._live.reducer._launch_order._observes = False  # a rank that does not compute has no arrivals
            (transport,) = optimizer._live.reducer.accumulators.kinds  # the host's
            self._time_launches(transport)

    def reducer(self, name: str) -> Any:
        return self.optimizers[name]._live.reducer

    def _time_launches(self, transport: Any) -> None:
        reduce = transport.reduce

        def timed(*arguments: Any) -> None:
            begin = time.perf_counter()
            reduce(*arguments)
            self.launch_s += time.perf_counter() - begin

        transport.reduce = timed

    def own_s(self) -> tuple[float, float]:
        """Return the seconds that this rank's main thread has spent in launching and in waiting."""
        waited = (self.reducer(name).accumulators.waited_s for name in self.optimizers)
        return self.launch_s, sum(waited)

    def run(self, variant: str) -> None:
        if variant == "communicate" or (not self.computes and variant in ("both", "after")):
            self._communicate(self.reducer("after" if variant == "after" else "both"))
        elif self.computes:
            self._compute("after" if variant == "after" else "both", variant)
        elif variant == "limit":
            self._move()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def _communicate(self, reducer: Any) -> None:
        """Reduce all buckets, without regard to the slots' data."""
        for bucket in reducer._order:
            reducer._launch(bucket)
        reducer.accumulators.finish()
        reducer._begin_pass()

    def _compute(self, name: str, variant: str) -> None:
        reducer = self.reducer(name)

        def launch(bucket: Any) -> None:
            reducer._launched += 1
            (transport,) = reducer.accumulators.kinds
            if transport._own is not None:
                transport._own.take(bucket.index)
            if variant == "limit":
                self.complete[0] += 1

        if variant in ("compute", "limit"):
            reducer._launch = launch
        self.models[name](*self.batch).backward()
        reducer.accumulators.finish()
        if variant in ("compute", "limit"):
            del reducer._launch

    def _move(self) -> None:
        """Move the bytes of the reduction: read both ranks' slots, which come round, and write all sums."""
        from zcomm import _core

        fp32, average = _core.DType.float32, _core.ReduceOp.avg
        for turn, bucket in enumerate(self.reducer("both")._order):
            while self.complete[0] <= turn:
                pass
            slots = [self.slots[turn % SLOTS + SLOTS * i].data_ptr() for i in range(2)]
            out = self.sums[bucket.begin : bucket.begin + bucket.count].data_ptr()
            self.stream.reduce([out], slots, bucket.count, fp32, fp32, average, False)
        self.complete[0] = 0

    def close(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.close()


def measure(
    step: Step, arguments: argparse.Namespace, variants: tuple[str, ...], barrier: Callable[[], object]
) -> list[dict[str, float]]:
    """Measure the seconds of each variant by round, of this rank."""
    rounds = []
    for number in range(arguments.warmup + arguments.rounds):
        pin(step.computes)  # in the first rounds threads come, with the affinity of the main one
        taken = {}
        for variant in variants:
            barrier()
            own, begin = step.own_s(), time.perf_counter()
            step.run(variant)
            taken[variant] = time.perf_counter() - begin
            if variant == "both":
                taken["launch"], taken["wait"] = (
                    after - before for before, after in zip(own, step.own_s(), strict=True)
                )
        if number >= arguments.warmup:
            rounds.append(taken)
    return rounds


def hidden(compute: float, communicate: float, together: float) -> float:
    """Return the hidden share of the shorter one."""
    return (compute + communicate - together) / min(compute, communicate)


def figures(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return medians, and quartiles of the overlaps, of each round's own times."""
    found = {f"{name}_ms": 1e3 * statistics.median(r[name] for r in rounds) for name in rounds[0]}
    for name in rounds[0]:
        found[f"{name}_quiet_ms"] = 1e3 * statistics.quantiles((r[name] for r in rounds), n=4)[0]
    for share, name in SHARES.items():
        if name in rounds[0]:
            values = [hidden(r["compute"], r["communicate"], r[name]) for r in rounds]
            found[f"{share}_low"], found[share], found[f"{share}_high"] = statistics.quantiles(values, n=4)
            found[f"{share}_quiet"] = hidden(*(found[f"{each}_quiet_ms"] for each in ("compute", "communicate", name)))
    return found


def _shown(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def run_rank(arguments: argparse.Namespace) -> int:
    import torch

    import zcomm

    torch.set_num_threads(1)
    if len(CORES) < 2:
        sys.exit("overlap: one core is usable; this bench needs two")
    rank, _ = launch.place()
    comm = zcomm.init(backend=arguments.backend)
    lines = JsonLines(arguments.json if rank == 0 else None, arguments.append)
    if rank == 0:
        lines.write({"kind": "machine", "command": command_line(), **machine()})
        print(f"# computing on core {CORES[0]}, all else on core {CORES[1]}; ms, medians of {arguments.rounds}")
        print(
            f"# compute   MiB   tail {' '.join(f'{name:>{11 if name in TIMES else 14}}' for name in (*TIMES, *SHOWN))}"
        )
    for computing, bucket_mb in itertools.product(arguments.compute, arguments.bucket_mb):
        step = Step(arguments, bucket_mb, comm, computes=rank == 0 or computing == "both")
        variants = VARIANTS if computing == "one" and step.has_limit else VARIANTS[:-1]
        rounds = measure(step, arguments, variants, comm.barrier)
        every = torch.tensor([[r[name] for name in variants] for r in rounds], dtype=torch.float64)
        comm.all_reduce(every, "max")  # of rank 1, if it does not compute, only times above rank 0's
        slowest = [dict(zip(variants, row, strict=True)) for row in every.tolist()]
        for of_rank_0, of_all in zip(rounds, slowest, strict=True):
            counted = [name for name in variants if computing == "both" or name in ("communicate", "limit")]
            of_rank_0.update({name: of_all[name] for name in counted})
        found = figures(rounds)
        if rank == 0:
            times = " ".join(_shown(found.get(f"{name}_ms"), 11, 1) for name in TIMES)
            shares = " ".join(_shown(found.get(name), 14, 3) for name in SHOWN)
            print(f"  {computing:>7} {bucket_mb:>5g} {step.tail:>6.3f} {times} {shares}", flush=True)
            print(f"# {judge('hidden', 'zero.overlap', [found['overlap']])}", flush=True)
            about = {"bucket_mb": bucket_mb, "tail": step.tail, "nbytes": step.nbytes}
            about |= {"backend": comm.backend, "link_gbit": arguments.link}
            lines.write({"kind": "overlap", "computes": computing, **about, **found})
        step.close()
    zcomm.shutdown()
    return 0


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    if not arguments.link:
        return launch.start_ranks(2, arguments.timeout)
    with link(arguments.link) as cable:
        return launch.start_ranks(2, arguments.timeout, link=cable)
