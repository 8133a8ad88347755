"""Verdicts on the collectives, from the records of a run of `bench/coll.py suite`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.goal import Verdict, judge

Record = Mapping[str, Any]
MIB = 1 << 20


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Return all verdicts, in the order of the table. A later record replaces an earlier one of the same step."""
    found: list[Verdict] = []
    for judge_one in (_all_reduce, _bfloat16, _scattered, _latency, _oversubscribed, _tcp, _guard, _ddp):
        found.extend(judge_one(records))
    return found


def rows(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Return rows of bench/allreduce_bw with these values."""
    return [r for r in records if r["kind"] == "row" and all(r.get(k) == v for k, v in wanted.items())]


def _large(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Return rows of 2 ranks, 64 to 256 MiB, which memory bandwidth bounds."""
    found = rows(records, part="bandwidth", world_size=2, **wanted)
    return [row for row in found if 64 * MIB <= row["nbytes"] <= 256 * MIB]


def _shares(found: Sequence[Record], variant: str) -> Iterator[float]:
    return (row["share_of_roof"][variant] for row in found if variant in row["share_of_roof"])


def _share_verdict(what: str, name: str, found: Sequence[Record], variant: str) -> Verdict:
    """Judge by the concurrent memcpy, the goal's roof.

    The figure also names the share of the rows' stricter roof (the faster of memcpy and a non-temporal copy).
    """
    of_memcpy = [row["time_us"]["memcpy"] / row["time_us"][variant] for row in found if variant in row["share_of_roof"]]
    verdict = judge(f"{what} {variant}, share of the concurrent memcpy", name, of_memcpy)
    strict = ", ".join(f"{share:.2f}" for share in _shares(found, variant))
    return replace(verdict, measured=f"{verdict.measured} (of the fastest copy: {strict})") if strict else verdict


def _factors(found: Sequence[Record], peer: str, variant: str) -> Iterator[float]:
    return (row["factor_over_peer"][peer][variant] for row in found if peer in row["factor_over_peer"])


def _all_reduce(records: Sequence[Record]) -> Iterator[Verdict]:
    found = _large(records, op="all_reduce", type="float")
    what = "all_reduce fp32, 64-256 MiB, 2 ranks"
    for variant in ("symmetric", "private"):
        yield _share_verdict(f"{what}:", f"coll.all_reduce.{variant}", found, variant)
    for peer in ("gloo", "openmpi"):
        for variant in ("symmetric", "private"):
            values = _factors(found, peer, variant)
            yield judge(f"{what}: {variant} over {peer}", f"coll.all_reduce.over.{peer}", values)


def _bfloat16(records: Sequence[Record]) -> Iterator[Verdict]:
    found = _large(records, op="all_reduce", type="bfloat16")
    yield judge("all_reduce bf16: share of its roof", "coll.all_reduce.bf16", _shares(found, "symmetric"))
    ulps = [row["worst_ulp"]["symmetric"] for row in found if "worst_ulp" in row]
    yield judge("all_reduce bf16: worst error, ulp of the exact sum", "coll.all_reduce.bf16.ulp", ulps)


def _scattered(records: Sequence[Record]) -> Iterator[Verdict]:
    for op in ("reduce_scatter", "all_gather"):
        found = _large(records, op=op, type="float")
        yield judge(f"{op}: share of its roof", "coll.scattered", _shares(found, "symmetric"))
        yield judge(f"{op}: over gloo", "coll.scattered.over.gloo", _factors(found, "gloo", "symmetric"))


def _latency(records: Sequence[Record]) -> Iterator[Verdict]:
    core = _core_latency(records, "latency")
    ours = [r for r in core if r["variant"] in ("symmetric", "private") and r["nbytes"] <= 4096]
    what = "latency 8 B - 4 KiB"
    beside = [r["p50_ns"] / r["mpi_p50_ns"] for r in ours if r["mpi_p50_ns"] > 0]
    yield judge(f"{what}: C++ p50 / Open MPI's", "coll.latency.of.openmpi", beside)
    lines = [r["p50_ns"] / r["line_round_trip_ns"] for r in ours if r["line_round_trip_ns"] > 0]
    yield judge(f"{what}: C++ p50 / cache-line round trip", "coll.latency.of.line", lines)
    core_us = {(r["nbytes"], r["variant"]): 1e-3 * r["p50_ns"] for r in ours}
    python = rows(records, part="latency", op="all_reduce", type="float")
    over = [
        row["percentiles_us"][variant]["p50"] - core_us[row["nbytes"], variant]
        for row in python
        for variant in ("symmetric", "private")
        if (row["nbytes"], variant) in core_us
    ]
    yield judge(f"{what}: Python call over the C++ p50", "coll.latency.python", over)
    torch = [
        row["percentiles_us"]["gloo"]["p50"] / row["percentiles_us"]["torch"]["p50"]
        for row in python
        if {"gloo", "torch"} <= row["percentiles_us"].keys()
    ]
    yield judge(f"{what}: torch.distributed call over gloo's", "coll.latency.torch.over.gloo", torch)


def _oversubscribed(records: Sequence[Record]) -> Iterator[Verdict]:
    for world in (4, 8):
        found = rows(records, part="oversubscribed", op="all_reduce", world_size=world)
        large = [row for row in found if row["nbytes"] >= 64 * MIB]
        small = [row for row in found if row["nbytes"] <= 1024]
        what = f"{world} ranks on {_cores(records)} cores"
        for variant in ("symmetric", "private"):
            yield _share_verdict(f"{what}: 64 MiB", "coll.oversubscribed", large, variant)
        for peer in ("openmpi", "gloo"):
            factors = _factors(small, peer, "private")
            yield judge(f"{what}: 1 KiB over {peer}, Python", f"coll.oversubscribed.over.{peer}", factors)
        core = [
            r
            for r in _core_latency(records, "oversubscribed")
            if r["world_size"] == world and r["variant"] == "private"
        ]
        factor = [r["mpi_p50_ns"] / r["p50_ns"] for r in core if r.get("mpi_p50_ns")]
        yield judge(f"{what}: 1 KiB over openmpi, C++ and C", "coll.oversubscribed.over.openmpi", factor)
        hops = [r["p50_ns"] / (r["futex_hop_ns"] * world) for r in core]
        yield judge(f"{what}: 1 KiB C++ p50 / (futex switch x ranks)", "coll.oversubscribed.of.futex", hops)


def _core_latency(records: Sequence[Record], part: str) -> list[Record]:
    """Return the records of zcomm_bench's all_reduce."""
    return [r for r in records if r["kind"] == "latency" and r["part"] == part and r["op"] == "all_reduce"]


def _cores(records: Sequence[Record]) -> Any:
    return next((r["cores"] for r in records if r["kind"] == "machine"), "?")


def _tcp(records: Sequence[Record]) -> Iterator[Verdict]:
    found = [row for row in rows(records, part="tcp", op="all_reduce", backend="tcp") if row["nbytes"] >= 64 * MIB]
    what = "TCP ring over loopback, 64 MiB"
    sockets = [row for row in found if row.get("roof") == "sockets"]
    yield judge(f"{what}: share of raw sockets", "coll.tcp", _shares(sockets, "private"))
    yield judge(f"{what}: over gloo", "coll.tcp.over.gloo", _factors(found, "gloo", "private"))


def _guard(records: Sequence[Record]) -> Iterator[Verdict]:
    for how in ("pieces", "whole"):
        found = [r["ns"] for r in records if r["kind"] == "guard" and r["how"] == how]
        yield judge(f"the guard's cost per call, {how}", "coll.guard", found)


def _ddp(records: Sequence[Record]) -> Iterator[Verdict]:
    found = [r["overhead_ratio"] for r in records if r.get("part") == "ddp" and "overhead_ratio" in r]
    yield judge("DDP, 33M-parameter GPT: overhead over zcomm / over gloo", "zero.ddp", found)
