"""The printed table: nccl-tests' columns, one line per size and variant."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zcomm
from harness.record import machine


def header_lines(arguments: argparse.Namespace, peers: Sequence[str]) -> Iterator[str]:
    """Yield the lines above the table. peers: those that are there."""
    about, ranks = machine(), zcomm.world_size()
    yield f"# {arguments.op}, {ranks} ranks, backend {arguments.backend}; {about['cpu']}, {about['cores']} cores"
    yield f"# torch {about['torch']}, zcomm {about['revision']}, load average {about['load_average']:.2f}"
    roof = "send and receive over raw sockets" if arguments.backend == "tcp" else "copy"
    yield f"# time: median of >= 7 interleaved rounds, slowest rank; roof: all ranks {roof} as many bytes at once"
    factors = "".join(f" {'x ' + name:>12}" for name in peers if name != "torch")
    model, units = (f" {text:>10}" if arguments.model else "" for text in ("model", "(us)"))
    yield (
        f"# {'size':>12} {'count':>11} {'type':>8} {'redop':>5}  {'variant':<13} {'time':>11} {'algbw':>7} "
        f"{'busbw':>7} {'#wrong':>6} {'roof':>6} | {'p50':>10} {'p95':>10} {'p99':>10} | "
        f"{'roof time':>10}{model} |{factors}"
    )
    yield (
        f"# {'(B)':>12} {'(elements)':>11} {'':>8} {'':>5}  {'':<13} {'(us)':>11} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6} "
        f"{'share':>6} | {'(us)':>10} {'(us)':>10} {'(us)':>10} | {'(us)':>10}{units} |"
    )


def row_lines(arguments: argparse.Namespace, row: Mapping[str, Any], peers: Sequence[str]) -> Iterator[str]:
    for name in (*arguments.variants, *peers):
        begin = f"  {row['nbytes']:>12} {row['count']:>11} {row['type']:>8} {row['redop']:>5}  {name:<13} "
        if name not in row["algbw_gbps"]:
            yield f"{begin}{'-':>11}"
            continue
        wrong, share = row["wrong"][name], row["share_of_roof"][name]
        tail = "".join(f" {row['percentiles_us'][name][p]:>10.2f}" for p in ("p50", "p95", "p99"))
        predicted = row.get("model_us", {}).get(name)
        model = f" {'-' if predicted is None else f'{predicted:.1f}':>10}" if arguments.model else ""
        yield (
            f"{begin}{row['time_us'][name]:>11.2f} {row['algbw_gbps'][name]:>7.2f} {row['busbw_gbps'][name]:>7.2f} "
            f"{'N/A' if wrong is None else wrong:>6} {share:>6.2f} |{tail} | {row['roof_us']:>10.1f}{model} |"
            f"{_factors(peers, row, name)}"
        )


def _factors(peers: Sequence[str], row: Mapping[str, Any], name: str) -> str:
    """Return the peers' time over this line's."""
    text = ""
    for peer in peers:
        if peer != "torch":
            factor = row["time_us"][peer] / row["time_us"][name] if peer in row["time_us"] and peer != name else None
            text += f" {'-' if factor is None else f'{factor:.1f}':>12}"
    return text
