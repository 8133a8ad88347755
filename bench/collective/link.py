"""Collectives between two hosts that a cable of known rate joins: two network namespaces, shaped by tbf. Needs root.

  bench/coll.py link --gbit 1 --size 64M --rounds 11
  bench/coll.py link --gbit 10 --delay-us 50 --op all_reduce,reduce_scatter --order any,rank
  bench/coll.py link --gbit 10 --per-host 2          (hierarchical: 2 hosts of 2 ranks)

across: raw sockets send, in the same rounds, the bytes that no algorithm can avoid to send over the cable, both ways at
once: N/g for an all_reduce, N/2g for the others (N: size; g: ranks of a host, all of which send). inside (with g > 1):
the same operation's part within a host, among only its ranks, on symmetric memory. bound: the longer of the two.
ratio: zcomm's time / bound. #wrong: elements, over all ranks, that are not the exact result.
--delay-us needs the kernel's sch_netem. Without it the rows show the reason, and the cable has only its own delay.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Any

from harness import launch
from harness.link import address_of, link, why_not
from harness.program import add_run_arguments, listed, make_parser, parse_size
from harness.record import JsonLines, command_line, machine

OPS = ("all_reduce", "reduce_scatter", "all_gather")
ORDERS = ("any", "rank")
HOSTS = 2
_NOTE = "ZCOMM_BENCH_DELAY_NOTE"
_PIECE = 1 << 20


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/coll.py link", __doc__)
    add = parser.add_argument
    add("--gbit", type=float, default=1.0, help="rate of the cable, Gbit/s each way (1)")
    add("--delay-us", type=float, default=0.0, help="delay of the cable each way (0)")
    add("--size", type=parse_size, default="64M", help="of the larger buffer of a rank (64M)")
    add("--rounds", type=int, default=11, help="at least 7 (11)")
    add("--per-host", type=int, default=1, help="ranks of each of the two hosts (1)")
    add("--op", default="all_reduce", help=f"by commas: {', '.join(OPS)}")
    add("--order", default="any,rank", help="order of sums, by commas: any, rank")
    add_run_arguments(parser, 900.0)
    arguments = parser.parse_args(words)
    arguments.ops = listed(parser, "--op", arguments.op, OPS)
    arguments.orders = listed(parser, "--order", arguments.order, ORDERS)
    for flag, value in (("--gbit", arguments.gbit), ("--per-host", arguments.per_host)):
        if value <= 0:
            parser.error(f"{flag} {value}: above 0")
    if arguments.delay_us < 0:
        parser.error(f"--delay-us {arguments.delay_us}: at least 0")
    return arguments


def start(arguments: argparse.Namespace) -> int:
    missing = why_not()
    if missing:
        print(f"# link: skipped, {missing}")
        return 0
    with link(arguments.gbit, arguments.per_host, arguments.delay_us) as made:
        if made.delay_note:
            print(f"# delay: {made.delay_note}", flush=True)
        os.environ[_NOTE] = made.delay_note
        return launch.start_ranks(HOSTS * arguments.per_host, arguments.timeout, link=made)


class RawSockets:
    """Connections to the rank with the same place on the other host, driven by one thread without zcomm."""

    def __init__(
        self, rank: int, per_host: int, count: int, gather: Callable[[list[float]], list[list[float]]]
    ) -> None:
        host = rank // per_host
        peer = (rank + per_host) % (HOSTS * per_host)
        with socket.create_server((address_of(host), 0)) as listener:
            ports = [int(of_rank[0]) for of_rank in gather([float(listener.getsockname()[1])])]
            if host == 0:
                self._sockets = [listener.accept()[0] for _ in range(count)]
            else:
                self._sockets = [socket.create_connection((address_of(0), ports[peer])) for _ in range(count)]
        self._selector = selectors.DefaultSelector()
        for each in self._sockets:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._out, self._in = memoryview(bytearray(_PIECE)), memoryview(bytearray(_PIECE))

    def exchange(self, nbytes: int) -> None:
        """Send ``nbytes`` to the peer and receive as many, dealt to the sockets."""
        shares = [nbytes // len(self._sockets)] * len(self._sockets)
        shares[0] += nbytes - sum(shares)
        left = {each: [share, share] for each, share in zip(self._sockets, shares, strict=True)}  # to send, to receive
        for each in self._sockets:
            self._selector.register(each, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while self._selector.get_map():
            for key, events in self._selector.select():
                each, both = key.fileobj, left[key.fileobj]  # type: ignore[index]
                assert isinstance(each, socket.socket)
                if events & selectors.EVENT_WRITE and both[0]:
                    both[0] -= each.send(self._out[: both[0]])
                if events & selectors.EVENT_READ and both[1]:
                    got = each.recv_into(self._in[: both[1]])
                    if not got:
                        raise OSError("the raw sockets' peer has ended")
                    both[1] -= got
                wanted = (selectors.EVENT_WRITE if both[0] else 0) | (selectors.EVENT_READ if both[1] else 0)
                if not wanted:
                    self._selector.unregister(each)
                elif wanted != key.events:
                    self._selector.modify(each, wanted)

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self._selector.close()


def across_nbytes(op: str, nbytes: int, per_host: int) -> int:
    """Return the bytes that each rank has to send over the cable; both hosts have as many ranks."""
    return nbytes // per_host // (1 if op == "all_reduce" else HOSTS)


def inside_call(op: str, count: int, comm: Any) -> Callable[[], object]:
    """Return the part of an operation within a host, on its ranks' communicator and symmetric memory."""
    whole, part = comm.empty(count), comm.empty(count // comm.world_size)

    def call() -> None:
        if op != "all_gather":
            comm.reduce_scatter(whole, out=part)
        if op != "reduce_scatter":
            comm.all_gather(part, out=whole)

    return call


def run_rank(arguments: argparse.Namespace) -> int:
    import torch

    import zcomm
    from collective.measure import gather

    torch.set_num_threads(1)
    comm = zcomm.init()
    rank, note = comm.rank, os.environ.get(_NOTE, "")
    lines = JsonLines(arguments.json if rank == 0 else None, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), "backend": comm.backend, **machine()})
    raw = RawSockets(rank, arguments.per_host, int(os.environ.get("ZCOMM_TCP_SOCKETS", "4")), gather)
    inside = comm.split(rank // arguments.per_host) if arguments.per_host > 1 else None
    wrong = 0
    for op in arguments.ops:
        for row in measure(arguments, op, comm, inside, raw):
            row["delay_us"] = 0.0 if note else arguments.delay_us
            row["delay_note"] = note
            wrong += row["wrong"]
            lines.write(row)
            if rank == 0:
                print(line_of(row), flush=True)
    raw.close()
    comm.barrier()
    zcomm.shutdown()
    return 1 if wrong else 0


def measure(arguments: argparse.Namespace, op: str, comm: Any, inside: Any, raw: RawSockets) -> list[dict[str, Any]]:
    """Return a row for each order of sums; all calls are timed in turn with their bounds."""
    import zcomm
    from collective import check
    from collective.measure import gather
    from collective.operations import OPERATIONS
    from harness.timing import interleaved

    operation, world = OPERATIONS[op], comm.world_size
    unit = 64 * world
    count = max(1, arguments.size // 4 // unit) * unit
    buffers = operation.buffers(count, world, zcomm.empty)
    inp, out = buffers
    calls: dict[str, Callable[[], object]] = {}
    for order in arguments.orders if operation.reduces else ("any",):
        if op == "all_reduce":
            calls[order] = lambda order=order: zcomm.all_reduce(out, order=order)
        elif op == "reduce_scatter":
            calls[order] = lambda order=order: zcomm.reduce_scatter(inp, out=out, order=order)
        else:
            calls[order] = operation.zcomm(zcomm, "sum", *buffers)
    wrong = {}
    for name, call in calls.items():
        mine = check.wrong(operation, "sum", inp, out, call, comm.rank, world)
        wrong[name] = int(sum(of_rank[0] for of_rank in gather([mine])))
    for tensor in buffers:
        tensor.zero_()
    bounds: dict[str, Callable[[], object]] = {
        "across": lambda: raw.exchange(across_nbytes(op, 4 * count, arguments.per_host))
    }
    if inside is not None:
        bounds["inside"] = inside_call(op, count, inside)
    timings = interleaved({**calls, **bounds}, arguments.rounds, 1, 1, zcomm.barrier, gather)
    seconds = {name: timing.median for name, timing in timings.items()}
    bound = max(seconds[name] for name in bounds)
    return [
        {
            "kind": "row",
            "case": "link",
            "op": op,
            "order": name,
            "backend": comm.backend,
            "nbytes": 4 * count,
            "per_host": arguments.per_host,
            "gbit": arguments.gbit,
            "time_us": 1e6 * seconds[name],
            "sent_gbit": 8e-9 * arguments.per_host * across_nbytes(op, 4 * count, arguments.per_host) / seconds[name],
            "across_us": 1e6 * seconds["across"],
            "inside_us": 1e6 * seconds.get("inside", 0.0),
            "bound_us": 1e6 * bound,
            "ratio": seconds[name] / bound,
            "wrong": wrong[name],
        }
        for name in calls
    ]


def line_of(row: dict[str, Any]) -> str:
    delay = f"delay {row['delay_us']:g} us" + (f" ({row['delay_note']})" if row["delay_note"] else "")
    bounds = f"across {row['across_us'] / 1e3:.2f} ms" + (
        f", inside {row['inside_us'] / 1e3:.2f} ms" if row["inside_us"] else ""
    )
    return (
        f"{row['op']} in order {row['order']}, {row['nbytes']} bytes, 2 hosts of {row['per_host']}, {row['gbit']:g} "
        f"Gbit/s, {delay}: {row['time_us'] / 1e3:.2f} ms, {row['sent_gbit']:.3f} Gbit/s over the cable; {bounds}; "
        f"bound {row['bound_us'] / 1e3:.2f} ms; ratio {row['ratio']:.3f}; #wrong {row['wrong']}"
    )


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    return start(arguments)
