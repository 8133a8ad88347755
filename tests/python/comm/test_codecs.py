"""codec= of collectives from Python: arguments, errors, lists, async calls. Bits: tests/cpp/coll/test_encoded.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zcomm
from zcomm.comm.codec import Codec, Compression


def _random(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def _reduce_scatter_feeds_errors_back() -> None:
    """Sum 8 steps: with error feedback the sum of results follows the sum of inputs within one step's residue."""
    comm = zcomm.init()
    count = 1000 * comm.world_size
    for codec in ("int8", "int4", "fp8", Codec("int4", rotate=32), Codec("int8", stochastic=True)):
        grad = _random(count, comm.rank)
        error = comm.codec_errors(grad)
        assert isinstance(error, torch.Tensor) and error.numel() == count
        shard = torch.zeros(1000)
        for _ in range(8):
            comm.reduce_scatter(grad, "avg", out=shard, accumulate=True, codec=codec, error=error)
        total = sum(_random(count, r) for r in range(comm.world_size))
        assert isinstance(total, torch.Tensor)
        wanted = 8 * total.chunk(comm.world_size)[comm.rank] / comm.world_size
        assert (shard - wanted).abs().max() < 1.5  # a step's residue; without feedback it grows with the steps
        assert error.abs().max() > 0


def _errors_in_fewer_bytes() -> None:
    """Compare two steps with errors in bf16 and int8 with encodings of each part by hand, on one rank."""
    comm = zcomm.init()
    alone = comm.split(comm.rank)
    assert alone is not None
    count, ranks = 700, range(comm.world_size)
    for dtype in (torch.bfloat16, torch.int8):
        for call in ("reduce_scatter", "all_reduce"):
            size = count * comm.world_size if call == "reduce_scatter" else 1300
            steps, mine = [[_random(size, 10 * step + r) for r in ranks] for step in range(2)], comm.rank
            error = comm.codec_errors(steps[0][0], call, dtype)
            own: dict[Any, Any] = {}

            def through(key: Any, value: torch.Tensor, dtype: Any = dtype, own: Any = own) -> torch.Tensor:
                kept = own.setdefault(key, alone.codec_errors(value, "all_gather", dtype))
                found = alone.all_gather(value.contiguous(), codec="int4", error=kept)
                assert isinstance(found, torch.Tensor)
                return found

            for of_ranks in steps:
                given = of_ranks[mine].clone()
                if call == "reduce_scatter":
                    found = comm.reduce_scatter(given, codec="int4", error=error)
                    parts = [through(r, of_ranks[r].chunk(comm.world_size)[mine]) for r in ranks]
                    wanted = sum(parts[1:], parts[0])
                else:
                    comm.all_reduce(given, codec="int4", error=error)
                    found, whole = given, []
                    for q, (begin, n) in enumerate(
                        zcomm._core.all_reduce_part(size, r, comm.world_size) for r in ranks
                    ):
                        parts = [through((r, q), of_ranks[r][begin : begin + n]) for r in ranks]
                        whole.append(through(("server", q), sum(parts[1:], parts[0])))
                    wanted = torch.cat(whole)
                assert torch.equal(found, wanted), (dtype, call)
    alone.close()


def _sign_all_reduce_of_lists() -> None:
    comm = zcomm.init()
    tensors = [_random(300, comm.rank), _random(5, 9 + comm.rank)]
    error = comm.codec_errors(tensors, "all_reduce")
    assert isinstance(error, tuple)
    before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    work = comm.all_reduce(tensors, "avg", codec="sign", error=error, async_op=True)
    assert work is not None
    work.wait()
    assert [t._version for t in tensors] == [v + 1 for v in versions]
    worker, server = error
    for given, result, lost in zip(before, tensors, worker, strict=True):
        scale = given.square().mean().sqrt() if comm.world_size == 1 else None
        assert result.abs().unique().numel() <= comm.world_size  # a scale for each part
        assert scale is None or (result.abs()[0] - scale).abs() < 0.01 * scale
        assert (lost.abs() > 0).any()
    gathered = comm.all_gather(tensors[0])
    assert isinstance(gathered, torch.Tensor)
    assert all(torch.equal(part, tensors[0]) for part in gathered.chunk(comm.world_size))
    step = (-(-300 // comm.world_size) + 255) // 256 * 256
    first = max(0, min(300 - comm.rank * step, step))
    assert [each.numel() for each in server] == [first, 5 if comm.rank == 0 else 0]


def _masked_elements_are_zero() -> None:
    comm = zcomm.init()
    tensor = torch.ones(100)
    mask = torch.tensor([0b10101010] * 13, dtype=torch.uint8)
    comm.all_reduce(tensor, codec="sign", mask=mask)
    assert torch.equal(tensor[::2], torch.zeros(50))
    assert torch.equal(tensor[1::2], tensor[1].expand(50)) and tensor[1] > 0


def _gather_differences() -> None:
    comm = zcomm.init()
    weights = _random(700, comm.rank).bfloat16()
    whole = torch.zeros(700 * comm.world_size, dtype=torch.bfloat16)
    for _ in range(4):
        comm.all_gather(weights, out=whole, codec="int8", differences=True)
    mine = whole.chunk(comm.world_size)[comm.rank]
    assert (mine - weights).abs().max() <= 2**-7
    alone, work = comm.all_gather(weights, codec="int8", async_op=True)
    assert isinstance(alone, torch.Tensor) and not isinstance(work, torch.Tensor)
    work.wait()
    assert (alone.chunk(comm.world_size)[comm.rank] - weights).abs().max() < 0.05


def _refusals() -> None:
    comm = zcomm.init()
    grad, error = torch.ones(64 * comm.world_size), torch.zeros(64)
    wide = torch.zeros(256, dtype=torch.int8)
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "did you mean 'int8'", lambda: comm.all_reduce(grad, codec="int88")),
        (TypeError, "pass a zcomm.Codec or one of its names", lambda: comm.all_reduce(grad, codec=8)),  # type: ignore[arg-type]
        (ValueError, "only sum and avg are defined", lambda: comm.all_reduce(grad, "max", codec="int8")),
        (ValueError, "elements are int64", lambda: comm.all_reduce(grad.long(), codec="int8")),
        (ValueError, "belong to a codec", lambda: comm.reduce_scatter(grad, error=error)),
        (ValueError, "belong to a codec", lambda: comm.all_gather(error, differences=True)),
        (TypeError, r"a pair \(worker, server\)", lambda: comm.all_reduce(grad, codec="int8", error=error)),  # type: ignore[arg-type]
        (ValueError, "error buffers are torch.int64", lambda: comm.all_gather(error, codec="int8", error=error.long())),
        (ValueError, "differences=True needs out", lambda: comm.all_gather(error, codec="int8", differences=True)),
        (
            ValueError,
            "error 0 has 64 bytes, expected 128",
            lambda: comm.all_gather(error, codec="int8", error=error.char()),
        ),
        (ValueError, "is not aligned to 64", lambda: comm.all_gather(error, codec="int8", error=wide[1:129])),
        (ValueError, "error 0 has 63 elements", lambda: comm.all_gather(error, codec="int8", error=error[:63].clone())),
        (ValueError, "overlap", lambda: comm.all_gather(error, codec="int8", error=error)),
        (ValueError, "masks are torch.float32", lambda: comm.all_reduce(grad, codec="sign", mask=error)),
        (ValueError, "expected one for eight", lambda: comm.all_reduce(grad, codec="sign", mask=error[:1].byte())),
    ]
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()
    comm.barrier()  # nothing of it has reached the others


def _all() -> list[str]:
    for check in (
        _reduce_scatter_feeds_errors_back,
        _errors_in_fewer_bytes,
        _sign_all_reduce_of_lists,
        _masked_elements_are_zero,
        _gather_differences,
        _refusals,
    ):
        check()
    return []


def _disagree() -> str:
    comm = zcomm.init()
    try:
        comm.all_reduce(torch.ones(10), codec="int8" if comm.rank == 0 else "int4", name="g")
    except zcomm.CollectiveMismatch as error:
        return str(error)
    return ""


def test_a_world_of_one_encodes_too(world_of_one: None) -> None:
    _all()
    tensor = torch.tensor([127.0, 0.3])
    zcomm.all_reduce(tensor, codec="int8")
    assert tensor.tolist() == [127.0, 0.0]


def test_codecs(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(_all, 3) == [[]] * 3


def test_ranks_that_disagree_get_one_error(run_ranks: Callable[..., list[Any]]) -> None:
    messages = run_ranks(_disagree, 2)
    assert messages[0] == messages[1]
    assert "rank 0: all_reduce float32 sum codec=int8 count=10 'g' at test_codecs.py" in messages[0]
    assert "rank 1: all_reduce float32 sum codec=int4 count=10 'g'" in messages[0]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"weights": "fp8"}, "weights='fp8'; expected one of None, 'int8', 'int4'"),
        ({"weights": "int4"}, "weights='int4' is too coarse for weights; give differences=True"),
        ({"gradients": "int8", "differences": True}, "give weights="),
        ({"weights": "int8", "differences": 1}, "differences=1"),
        ({"gradients": "int4", "rotate": 16}, "rotate=16; expected 0 or 32"),
        ({"weights": "int8", "rotate": 32}, "give gradients="),
        ({"gradients": "int3"}, "did you mean"),
        ({"gradients": "int8", "keep": 1.0}, r"keep=1.0 is not in \[0, 1\)"),
        ({"keep": 0.5}, "give gradients="),
        ({"gradients": "int8", "reset_steps": 0}, "reset_steps=0"),
        ({"gradients": "int4", "error_dtype": "int4"}, "error_dtype='int4'; expected one of 'fp32', 'bf16', 'int8'"),
        ({"weights": "int8", "error_dtype": "bf16"}, "give gradients="),
        ({"hops": "inside"}, "hops='inside'"),
        ({"error_tier": "nvme"}, "error_tier='nvme'"),
    ],
)
def test_compression_checks_its_options(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Compression(**given)


def test_codecs_are_values() -> None:
    assert Codec("int8") == Codec() and hash(Codec("sign")) == hash(Codec("sign"))
    assert str(Codec("int4", rotate=32, stochastic=True)) == "int4:rotate=32:stochastic"
    assert Codec("int8").encoded_nbytes(1024) == 64 + 1024
    with pytest.raises(ValueError, match="blocks of 256"):
        Codec("int8", block=128)
    with pytest.raises(ValueError, match="rotate"):
        Codec("sign", rotate=32)
