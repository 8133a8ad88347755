"""Goals of the collectives, judged from the records of a run of bench/collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Record = Mapping[str, Any]
MIB = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """One number beside its goal; `good` None: it was not measured, and `measured` has the reason."""

    what: str
    goal: str
    measured: str
    good: bool | None


def judge(records: Sequence[Record]) -> list[Verdict]:
    """Return all verdicts, in the order of the issue's table.

    A later record replaces an earlier one of the same step.
    """
    verdicts: list[Verdict] = []
    for judge_one in (_all_reduce, _bfloat16, _scattered, _latency, _oversubscribed, _tcp, _guard, _ddp):
        verdicts.extend(judge_one(records))
    return verdicts


def rows(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Return rows of bench/allreduce_bw with these values."""
    return [r for r in records if r["kind"] == "row" and all(r.get(k) == v for k, v in wanted.items())]


def _large(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Return rows of 2 ranks, 64 to 256 MiB: where memory sets the pace."""
    found = rows(records, part="bandwidth", world_size=2, **wanted)
    return [row for row in found if 64 * MIB <= row["nbytes"] <= 256 * MIB]


def _verdict(what: str, goal: str, values: Iterable[float], good: Callable[[float], bool], unit: str = "") -> Verdict:
    """Return a verdict that is good if every value is."""
    listed = list(values)
    text = ", ".join(f"{value:.2f}{unit}" for value in listed)
    return Verdict(what, goal, text or "not measured", all(map(good, listed)) if listed else None)


def _shares(found: Sequence[Record], variant: str) -> Iterator[float]:
    return (row["share_of_roof"][variant] for row in found if variant in row["share_of_roof"])


def _share_verdict(what: str, goal: str, found: Sequence[Record], variant: str, least: float) -> Verdict:
    """Judge by the concurrent memcpy, the goal's roof.

    The rows' own, stricter roof (the faster of memcpy and a non-temporal copy) stands beside it.
    """
    of_memcpy = [row["time_us"]["memcpy"] / row["time_us"][variant] for row in found if variant in row["share_of_roof"]]
    verdict = _verdict(f"{what} {variant}, share of the concurrent memcpy", goal, of_memcpy, lambda v: v >= least)
    strict = ", ".join(f"{share:.2f}" for share in _shares(found, variant))
    return replace(verdict, measured=f"{verdict.measured} (of the fastest copy: {strict})") if strict else verdict


def _factors(found: Sequence[Record], peer: str, variant: str) -> Iterator[float]:
    return (row["factor_over_peer"][peer][variant] for row in found if peer in row["factor_over_peer"])


def _all_reduce(records: Sequence[Record]) -> Iterator[Verdict]:
    found = _large(records, op="all_reduce", type="float")
    what = "all_reduce fp32, 64-256 MiB, 2 ranks"
    yield _share_verdict(f"{what}:", ">= 0.90", found, "symmetric", 0.90)
    yield _share_verdict(f"{what}:", ">= 0.80", found, "private", 0.80)
    for peer, least in (("gloo", 10.0), ("openmpi", 1.5)):
        for variant in ("symmetric", "private"):
            values = _factors(found, peer, variant)
            yield _verdict(f"{what}: {variant} over {peer}", f">= {least:g}x", values, lambda v, x=least: v >= x, "x")


def _bfloat16(records: Sequence[Record]) -> Iterator[Verdict]:
    found = _large(records, op="all_reduce", type="bfloat16")
    yield _verdict("all_reduce bf16: share of its roof", ">= 0.85", _shares(found, "symmetric"), lambda v: v >= 0.85)
    ulps = [row["worst_ulp"]["symmetric"] for row in found if "worst_ulp" in row]
    # The sum is rounded once to fp32 and once to bf16: a tie in between may cost 2^-17 of an ulp.
    yield _verdict("all_reduce bf16: worst error, ulp of the exact sum", "<= 0.5", ulps, lambda v: v <= 0.5 + 2**-16)


def _scattered(records: Sequence[Record]) -> Iterator[Verdict]:
    for op in ("reduce_scatter", "all_gather"):
        found = _large(records, op=op, type="float")
        yield _verdict(f"{op}: share of its roof", ">= 0.85", _shares(found, "symmetric"), lambda v: v >= 0.85)
        yield _verdict(f"{op}: over gloo", ">= 8x", _factors(found, "gloo", "symmetric"), lambda v: v >= 8, "x")


def _latency(records: Sequence[Record]) -> Iterator[Verdict]:
    ours = [
        r for r in _core_latency(records, "latency") if r["variant"] in ("symmetric", "private") and r["nbytes"] <= 4096
    ]
    what = "latency 8 B - 4 KiB"
    beside = [r["p50_ns"] / r["mpi_p50_ns"] for r in ours if r["mpi_p50_ns"] > 0]
    yield _verdict(f"{what}: C++ p50 / Open MPI's", "<= 1", beside, lambda v: v <= 1)
    lines = [r["p50_ns"] / r["line_round_trip_ns"] for r in ours if r["line_round_trip_ns"] > 0]
    yield _verdict(f"{what}: C++ p50 / cache-line round trip", "<= 3", lines, lambda v: v <= 3)
    core_us = {(r["nbytes"], r["variant"]): 1e-3 * r["p50_ns"] for r in ours}
    python = rows(records, part="latency", op="all_reduce", type="float")
    over = [
        row["percentiles_us"][variant]["p50"] - core_us[row["nbytes"], variant]
        for row in python
        for variant in ("symmetric", "private")
        if (row["nbytes"], variant) in core_us
    ]
    yield _verdict(f"{what}: Python call over the C++ p50", "<= 3 us", over, lambda v: v <= 3, " us")
    torch = [
        row["percentiles_us"]["gloo"]["p50"] / row["percentiles_us"]["torch"]["p50"]
        for row in python
        if {"gloo", "torch"} <= row["percentiles_us"].keys()
    ]
    yield _verdict(f"{what}: torch.distributed call over gloo's", ">= 5x", torch, lambda v: v >= 5, "x")


def _oversubscribed(records: Sequence[Record]) -> Iterator[Verdict]:
    for world in (4, 8):
        found = rows(records, part="oversubscribed", op="all_reduce", world_size=world)
        large = [row for row in found if row["nbytes"] >= 64 * MIB]
        small = [row for row in found if row["nbytes"] <= 1024]
        what = f"{world} ranks on {_cores(records)} cores"
        for variant in ("symmetric", "private"):
            yield _share_verdict(f"{what}: 64 MiB", ">= 0.70", large, variant, 0.70)
        for peer, least in (("openmpi", 1.0), ("gloo", 20.0)):
            factor = _factors(small, peer, "private")
            yield _verdict(
                f"{what}: 1 KiB over {peer}, Python", f">= {least:g}x", factor, lambda v, x=least: v >= x, "x"
            )
        core = [
            r for r in records if r["kind"] == "latency" and r["part"] == "oversubscribed" and r["op"] == "all_reduce"
        ]
        core = [r for r in core if r["world_size"] == world and r["variant"] == "private"]
        factor = [r["mpi_p50_ns"] / r["p50_ns"] for r in core if r.get("mpi_p50_ns")]
        yield _verdict(f"{what}: 1 KiB over openmpi, C++ and C", ">= 1x", factor, lambda v: v >= 1, "x")
        hops = [r["p50_ns"] / (r["futex_hop_ns"] * world) for r in core]
        yield _verdict(f"{what}: 1 KiB C++ p50 / (futex switch x ranks)", "<= 2", hops, lambda v: v <= 2)


def _core_latency(records: Sequence[Record], part: str) -> list[Record]:
    """Return the records of zcomm_bench's all_reduce."""
    return [r for r in records if r["kind"] == "latency" and r["part"] == part and r["op"] == "all_reduce"]


def _cores(records: Sequence[Record]) -> Any:
    return next((r["cores"] for r in records if r["kind"] == "machine"), "?")


def _tcp(records: Sequence[Record]) -> Iterator[Verdict]:
    found = [row for row in rows(records, part="tcp", op="all_reduce", backend="tcp") if row["nbytes"] >= 64 * MIB]
    what = "TCP ring over loopback, 64 MiB"
    sockets = [row for row in found if row.get("roof") == "sockets"]
    yield _verdict(f"{what}: share of raw sockets", ">= 0.90", _shares(sockets, "private"), lambda v: v >= 0.90)
    yield _verdict(f"{what}: over gloo", ">= 2.5x", _factors(found, "gloo", "private"), lambda v: v >= 2.5, "x")


def _guard(records: Sequence[Record]) -> Iterator[Verdict]:
    for how in ("pieces", "whole"):
        found = [r["ns"] for r in records if r["kind"] == "guard" and r["how"] == how]
        yield _verdict(f"the guard's cost per call, {how}", "< 50 ns", found, lambda v: v < 50, " ns")


def _ddp(records: Sequence[Record]) -> Iterator[Verdict]:
    found = [r["overhead_ratio"] for r in records if r["kind"] == "ddp" and "overhead_ratio" in r]
    what = "DDP, 33M-parameter GPT: overhead over zcomm / over gloo"
    yield _verdict(what, "<= 0.25", found, lambda v: v <= 0.25)
