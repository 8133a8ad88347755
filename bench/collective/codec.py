"""Collectives with a codec next to the same call without one, between two hosts that a cable of known rate joins.

  bench/coll.py codec --gbit 1 --size 64M --rounds 11
  bench/coll.py codec --gbit 10 --op reduce_scatter --codec int8,int4
  bench/coll.py codec --gbit 0                        (two ranks of this host, shared memory, no cable)

exact: the call without a codec, in the same rounds. kernels: encode and decode of as many elements, and nothing else,
on all ranks at once. across: raw sockets send the encoded bytes, both ways at once. bound: kernels + across.
ratio: zcomm's time / bound. gain: exact / zcomm's time. #wrong: elements, over all ranks, that are further from the
exact result than the codec allows. Needs root for the cable.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from collective.link import HOSTS, RawSockets
from harness import launch
from harness.link import link, why_not
from harness.program import add_run_arguments, listed, make_parser, parse_size
from harness.record import JsonLines, command_line, machine

OPS = ("reduce_scatter", "all_gather", "all_reduce")
CODECS = ("int8", "int4", "fp8", "sign")
SPREAD = {"int8": 1 / 254, "int4": 1 / 14, "fp8": 1 / 28}  # largest distance, by the largest element of a block


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/coll.py codec", __doc__)
    add = parser.add_argument
    add("--gbit", type=float, default=1.0, help="rate of the cable, Gbit/s each way (1); 0: one host, shared memory")
    add("--size", type=parse_size, default="64M", help="of the larger buffer of a rank, in fp32 (64M)")
    add("--rounds", type=int, default=11, help="at least 7 (11)")
    add("--op", default="reduce_scatter,all_gather", help=f"by commas: {', '.join(OPS)}")
    add("--codec", default="int8,int4", help=f"by commas: {', '.join(CODECS)}")
    add_run_arguments(parser, 900.0)
    arguments = parser.parse_args(words)
    arguments.ops = listed(parser, "--op", arguments.op, OPS)
    arguments.codecs = listed(parser, "--codec", arguments.codec, CODECS)
    if arguments.gbit < 0:
        parser.error(f"--gbit {arguments.gbit}: at least 0")
    return arguments


def start(arguments: argparse.Namespace) -> int:
    if arguments.gbit == 0:
        return launch.start_ranks(HOSTS, arguments.timeout)
    missing = why_not()
    if missing:
        print(f"# codec: skipped, {missing}")
        return 0
    with link(arguments.gbit) as made:
        return launch.start_ranks(HOSTS, arguments.timeout, link=made)


class Case:
    """One operation on fp32 buffers of a rank: ``n`` elements in each of two parts."""

    def __init__(self, op: str, nbytes: int, comm: Any) -> None:
        import torch

        self.op, self.comm, self.n = op, comm, nbytes // 4 // HOSTS // 256 * 256
        self.whole = torch.randn(HOSTS * self.n, generator=torch.Generator().manual_seed(comm.rank))
        self.part = self.whole[: self.n].clone()
        self.result, self.shard = torch.empty_like(self.whole), torch.empty_like(self.part)

    def call(self, codec: str | None) -> Callable[[], object]:
        if self.op == "reduce_scatter":
            return lambda: self.comm.reduce_scatter(self.whole, out=self.shard, codec=codec)
        if self.op == "all_gather":
            return lambda: self.comm.all_gather(self.part, out=self.result, codec=codec)

        def all_reduce() -> None:
            self.result.copy_(self.whole)
            self.comm.all_reduce(self.result, codec=codec)

        return all_reduce

    def wrong(self, codec: str) -> int:
        """Count the elements of a call's result that are further from the exact one than the codec allows."""
        self.call(None)()
        output = self.shard if self.op == "reduce_scatter" else self.result
        exact = output.clone()
        self.call(codec)()
        if codec == "sign":
            return int((~output.isfinite()).sum())
        largest = float(self.whole.abs().max().clamp(min=6.0)) * HOSTS  # normal numbers of all ranks lie below 6
        encodings = {"reduce_scatter": HOSTS, "all_gather": 1, "all_reduce": HOSTS + HOSTS}[self.op]
        return int(((output - exact).abs() > encodings * largest * SPREAD[codec] * (1 + 2**-6)).sum())

    def encoded_nbytes(self, codec: str) -> int:
        """Return the bytes that a rank sends."""
        import zcomm

        return zcomm.Codec(codec).encoded_nbytes(self.n) * (2 if self.op == "all_reduce" else 1)  # type: ignore[arg-type]

    def kernels(self, codec: str) -> Callable[[], object]:
        """Return the encoding and decoding of a call, without the call."""
        import torch

        from zcomm import _core
        from zcomm.comm.codec import _core_codec, codec_of

        core = _core_codec(codec_of(codec))
        nbytes = core.encoded_nbytes(self.n)
        rooms = [torch.empty(nbytes + 64, dtype=torch.uint8) for _ in range(HOSTS)]
        at = [room.data_ptr() + -room.data_ptr() % 64 for room in rooms]
        kind = _core.DType.float32
        whole, result, shard = self.whole.data_ptr(), self.result.data_ptr(), self.shard.data_ptr()
        step = 4 * self.n

        def encode(parts: int, keep: Any = rooms) -> None:
            for index in range(parts):
                _core.encode(core, at[index], whole + index * step, kind, self.n)

        def run() -> None:
            if self.op != "all_gather":
                encode(HOSTS)
                _core.decode(core, shard, at, self.n)
            if self.op != "reduce_scatter":
                encode(1)
                for index in range(HOSTS):
                    _core.decode(core, result + index * step, [at[index]], self.n)

        return run


def run_rank(arguments: argparse.Namespace) -> int:
    import os

    import torch

    import zcomm
    from collective.measure import gather
    from harness.timing import interleaved

    torch.set_num_threads(1)
    comm = zcomm.init()
    lines = JsonLines(arguments.json if comm.rank == 0 else None, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), "backend": comm.backend, **machine()})
    raw = RawSockets(comm.rank, 1, int(os.environ.get("ZCOMM_TCP_SOCKETS", "4")), gather) if arguments.gbit else None
    failed = 0
    for op in arguments.ops:
        case = Case(op, arguments.size, comm)
        calls: dict[str, Callable[[], object]] = {"exact": case.call(None)}
        for codec in arguments.codecs:
            calls[codec], calls[f"{codec} kernels"] = case.call(codec), case.kernels(codec)
            if raw is not None:
                calls[f"{codec} across"] = partial(raw.exchange, case.encoded_nbytes(codec))
        wrong = {c: int(sum(each[0] for each in gather([float(case.wrong(c))]))) for c in arguments.codecs}
        timings = interleaved(calls, arguments.rounds, 1, 1, zcomm.barrier, gather)
        for codec in arguments.codecs:
            row = row_of(arguments, case, codec, {name: timing.median for name, timing in timings.items()})
            row["wrong"] = wrong[codec]
            failed += row["wrong"]
            lines.write(row)
            if comm.rank == 0:
                print(line_of(row), flush=True)
    if raw is not None:
        raw.close()
    comm.barrier()
    zcomm.shutdown()
    return 1 if failed else 0


def row_of(arguments: argparse.Namespace, case: Case, codec: str, seconds: dict[str, float]) -> dict[str, Any]:
    time, kernels, across = seconds[codec], seconds[f"{codec} kernels"], seconds.get(f"{codec} across", 0.0)
    return {
        "kind": "row",
        "case": "codec",
        "op": case.op,
        "codec": codec,
        "backend": case.comm.backend,
        "nbytes": 4 * HOSTS * case.n,
        "gbit": arguments.gbit,
        "time_us": 1e6 * time,
        "exact_us": 1e6 * seconds["exact"],
        "kernels_us": 1e6 * kernels,
        "across_us": 1e6 * across,
        "bound_us": 1e6 * (kernels + across),
        "sent_nbytes": case.encoded_nbytes(codec),
        "ratio": time / (kernels + across),
        "gain": seconds["exact"] / time,
    }


def line_of(row: dict[str, Any]) -> str:
    cable = f"{row['gbit']:g} Gbit/s" if row["gbit"] else "one host"
    return (
        f"{row['op']} {row['codec']}, {row['nbytes']} bytes, {cable}: {row['time_us'] / 1e3:.2f} ms, exact "
        f"{row['exact_us'] / 1e3:.2f} ms, gain {row['gain']:.2f}; kernels {row['kernels_us'] / 1e3:.2f} ms, across "
        f"{row['across_us'] / 1e3:.2f} ms, ratio {row['ratio']:.3f}; #wrong {row['wrong']}"
    )


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    return start(arguments)
