"""Compression of a ZeroOptimizer: the collectives that it encodes, and refusals, the same on all ranks.

Pure: decisions by options and the shape of the mesh.
"""

from __future__ import annotations

import logging
import math

from zcomm.comm.codec import BLOCK, Codec, Compression
from zcomm.zero.groups.mesh_comms import MeshComms

EXACT = Compression()


def as_compression(given: object) -> Compression:
    """Return the compression of an optimizer; None: EXACT. Raises: TypeError."""
    if given is None:
        return EXACT
    if not isinstance(given, Compression):
        raise TypeError(f"compression={given!r}: pass a zcomm.Compression")
    return given


def align_of(compression: Compression, align: int) -> int:
    """Return the elements between the beginnings of parameters and shards; a rule needs ``align``. No block
    of a codec crosses them, so bits do not depend on the size of buckets."""
    return align if compression == EXACT else math.lcm(align, BLOCK)


def weights_codec(compression: Compression, comms: MeshComms, shared: bool) -> Codec | None:
    """Return the codec of weights that a shard group gathers, or with [Note: hpZ] those that cross groups; None: they
    are exact. shared: they are in memory of all ranks, so that none travels in the group. Rank 0 logs that."""
    if compression.weights is None or (comms.shard.world_size == 1 and not comms.hpz):
        return None
    if shared and not comms.hpz:
        if comms.world.rank == 0:
            logging.getLogger("zcomm").warning(
                "%s: the ranks of this host share the memory of weights, so none travels, and all are exact",
                compression,
            )
        return None
    return Codec(compression.weights)


def encodes_shard(compression: Compression, comms: MeshComms) -> bool:
    """Return True if sums in the shard group are encoded."""
    inner = comms.across is not None and compression.hops == "across"
    return compression.gradients is not None and comms.shard.world_size > 1 and not inner


def encodes_across(compression: Compression, comms: MeshComms) -> bool:
    """Return True if sums across groups are encoded."""
    return compression.gradients is not None and comms.across is not None


def check_compression(compression: Compression, stage: int, comms: MeshComms, on_device: bool, rule: str) -> None:
    """Raise for a compression that the optimizer does not have: ValueError, NotImplementedError.

    rule: name of a rule that exchanges arrays of its own instead of gradients; "": none.
    """
    if compression == EXACT:
        return
    if on_device:
        raise NotImplementedError(
            f"compression={compression}: the model is on a device, and codecs run on the host: leave compression= out"
        )
    if compression.weights is not None and stage != 3:
        raise ValueError(
            f"compression={compression}: weights= is of gathers in stage 3, and stage={stage} keeps whole weights: "
            "leave it out"
        )
    if compression.differences and comms.hpz:
        raise NotImplementedError(
            f"compression={compression}: differences of weights with hpz=True are not available: leave differences= out"
        )
    inner_only = comms.across is not None and not comms.hpz  # with hpz ranks share their memory, so none travels
    if compression.weights is not None and inner_only and compression.hops == "across":
        raise ValueError(
            f"compression={compression}: with mesh={comms.mesh.describe()} weights are gathered in a shard group only: "
            "give hops='all', or leave weights= out"
        )
    if rule:
        raise ValueError(f"compression={compression}: {rule} sends moments as signs, and no gradients: leave it out")
    if compression.hops == "all" and comms.shard.backend == "hierarchical":
        raise NotImplementedError(
            f"compression={compression}: on backend 'hierarchical' the ranks of a host add in shared memory, exactly: "
            "give hops='across'"
        )
    for comm in (comms.shard, comms.across):
        if comm is not None and comm.world_size > 1:
            comm._coded_parts(f"compression={compression}")
