"""Codecs of the core against torch's own arithmetic: float64, float8_e4m3fn, bfloat16."""

from __future__ import annotations

import pytest
import torch

from zcomm._core import Codec, CodecKind, DType, decode, encode

INT8, INT4 = Codec(CodecKind.block_int, 8), Codec(CodecKind.block_int, 4)
FP8, SIGN = Codec(CodecKind.fp8_e4m3), Codec(CodecKind.sign, 1)
TOPS = {INT8.id: 127.0, INT4.id: 7.0, FP8.id: 448.0}
DTYPES = {
    torch.float32: DType.float32,
    torch.bfloat16: DType.bfloat16,
    torch.float16: DType.float16,
    torch.int8: DType.int8,
}


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp(4 * torch.randn((count + 255) // 256, generator=generator)).repeat_interleave(256)[:count]
    return torch.randn(count, generator=generator) * scales


def aligned_bytes(nbytes: int) -> torch.Tensor:
    room = torch.zeros(nbytes + 64, dtype=torch.uint8)
    begin = -room.data_ptr() % 64
    return room[begin : begin + nbytes]


def encoded(codec: Codec, data: torch.Tensor, error: torch.Tensor | None = None, **options: int) -> torch.Tensor:
    out = aligned_bytes(codec.encoded_nbytes(data.numel()))
    address, dtype = (0, DType.float32) if error is None else (error.data_ptr(), DTYPES[error.dtype])
    encode(
        codec, out.data_ptr(), data.data_ptr(), DTYPES[data.dtype], data.numel(), address, error_dtype=dtype, **options
    )
    return out


def decoded(codec: Codec, parts: list[torch.Tensor], count: int, mask: int = 0) -> torch.Tensor:
    out = torch.empty(count)
    decode(codec, out.data_ptr(), [part.data_ptr() for part in parts], count, mask=mask)
    return out


def reference(codec: Codec, data: torch.Tensor) -> torch.Tensor:
    """Decode by definition, block by block."""
    blocks = []
    for block in data.float().split(256):
        exact = block.abs().max() / TOPS[codec.id]
        scale = exact.bfloat16()
        if scale.float() < exact:  # the next number of bfloat16
            scale = (scale.view(torch.int16) + 1).view(torch.bfloat16)
        quotient = block / scale.float()
        codes = quotient.to(torch.float8_e4m3fn) if codec.kind == CodecKind.fp8_e4m3 else quotient.double().round()
        blocks.append(codes.double() * scale.double())
    return torch.cat(blocks)


@pytest.mark.parametrize("codec", [INT8, INT4, FP8], ids=["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoded_values_and_residues_are_exact(codec: Codec, dtype: torch.dtype) -> None:
    data, error = numbers(5000).to(dtype), torch.zeros(5000)
    part = encoded(codec, data, error)
    values = decoded(codec, [part], 5000)
    assert torch.equal(values.double(), reference(codec, data))
    assert torch.equal(values.double() + error.double(), data.double())
    again = encoded(codec, data, error)  # with the error of the first
    assert torch.equal(decoded(codec, [again], 5000) + error, data.float() + (data.float() - values))


def test_a_sum_is_in_rank_order() -> None:
    parts = [encoded(INT8, numbers(3000, seed)) for seed in range(3)]
    one, two, three = (decoded(INT8, [part], 3000) for part in parts)
    assert torch.equal(decoded(INT8, parts, 3000), one + two + three)
    out = torch.full((3000,), 0.25)
    decode(INT8, out.data_ptr(), [part.data_ptr() for part in parts], 3000, accumulate=True, divide_by=3.0)
    assert torch.equal(out, 0.25 + (one + two + three) / 3)


def test_sign_keeps_norm_and_signs_of_the_elements_in_the_mask() -> None:
    data, kept = numbers(1000), torch.arange(1000) % 3 > 0
    data[5], kept[5] = 0.0, True
    weights = 1 << torch.arange(8, dtype=torch.uint8)
    mask = (kept.view(-1, 8) * weights).sum(1).to(torch.uint8)
    part = encoded(SIGN, data, mask=mask.data_ptr())
    scale = data[kept].double().pow(2).mean().sqrt().float().bfloat16().float()
    expected = torch.where(data < 0, -scale, scale) * kept
    assert torch.equal(decoded(SIGN, [part], 1000, mask.data_ptr()), expected)
    assert SIGN.encoded_nbytes(1 << 20) == (1 << 17) + 64


def test_options_change_the_codes_and_their_id() -> None:
    data = numbers(2000)
    codecs = [
        INT8,
        Codec(CodecKind.block_int, rotate=32),
        Codec(CodecKind.block_int, stochastic=True),
        Codec(CodecKind.block_int, 4, 32, True),
    ]
    parts = [bytes(encoded(codec, data, seed=3).tolist()) for codec in codecs]
    assert len(set(parts)) == len({codec.id for codec in codecs}) == len(codecs)
    assert parts[2] == bytes(encoded(codecs[2], data, seed=3).tolist())
    for codec in codecs:
        errors = decoded(codec, [encoded(codec, data)], 2000) - data
        assert errors.norm() < data.norm() * (0.02 if codec.bits == 8 else 0.3)
    with pytest.raises(ValueError, match="rotate 8; it must be 0 or 32"):
        Codec(CodecKind.block_int, rotate=8)
