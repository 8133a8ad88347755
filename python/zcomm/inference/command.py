"""The work of `zcomm generate`: batches of prompts through a streamed model, with a line of progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from zcomm.inference.folder import library_for
from zcomm.inference.streaming import stream, streamed
from zcomm.zero import MemoryLimit
from zcomm.zero.memory.limit import peak_nbytes
from zcomm.zero.options import Tier

_LINE_S = {True: 0.2, False: 10.0}  # between lines of progress; True: on a terminal
_OTHER_NBYTES = 64 << 20  # of activations: small tensors, buffers of kernels


def activations_nbytes(config: Any, batch: int, length: int, itemsize: int) -> int:
    """Estimate the bytes of cache and activations of a causal language model.

    length: tokens of a sequence at the end. A layer's cache is copied when it grows, and the first forward has the
    hidden states of whole prompts, several of them at a time.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer = 2 * heads * width * itemsize
    hidden = 6 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    scores = config.num_attention_heads * length * 4  # of kernels that keep them
    each = layer * (config.num_hidden_layers + 2) + hidden * itemsize + scores
    return int(batch * (length * each + 4 * 4 * config.vocab_size) + _OTHER_NBYTES)


class Progress:
    """A criterion of ``generate`` that never stops it, and writes a line about the last batch. count: of its tokens."""

    def __init__(self, model: Any, count: int) -> None:
        self._stream, self._count = streamed(model), count
        self._terminal = sys.stderr.isatty()
        self.tokens, self._begin, self._shown = 0, time.monotonic(), time.monotonic()

    def __call__(self, tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Count the new tokens of a batch, and show a line from time to time."""
        self.tokens += len(tokens)
        if time.monotonic() - self._shown >= _LINE_S[self._terminal]:
            self._shown = time.monotonic()
            self._write(f"{self.tokens} of {self._count} tokens, {self.rates()}")
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    def rates(self) -> str:
        """Return tokens per second, and the drive's traffic, in words."""
        elapsed, stats = max(time.monotonic() - self._begin, 1e-9), self._stream.stats()
        read = f", {stats['read_nbytes'] / elapsed / 1e9:.2f} GB/s read" if stats["read_nbytes"] else ""
        return f"{self.tokens / elapsed:.2f} tokens/s{read}, {100 * stats['waited_s'] / elapsed:.0f} % waited"

    def _write(self, text: str) -> None:
        start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
        print(f"{start}zcomm generate: {text}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Write the last line."""
        self._write(f"{self.tokens} tokens, {self.rates()}, {peak_nbytes() / 2**30:.2f} GiB at most in the process\n")


def generate(
    folder: Path,
    prompts: Sequence[str],
    count: int,
    batch: int,
    weights: Tier,
    quantize: Literal["int8", "int4"] | None,
    memory: int | None,
    directory: Path | None,
    device: str | None,
) -> Iterator[str]:
    """Yield each prompt with at most ``count`` new tokens, chosen greedily; ``batch`` prompts at a time.

    memory: bytes that the process may hold; None: no limit. Raises: as ``stream``; ValueError for a folder without a
    tokenizer.
    """
    library = library_for(folder)
    tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    limit = None
    if memory is not None:
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
        longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
        itemsize = 4 if str(config.dtype).endswith("32") else 2
        limit = MemoryLimit(memory, activations_nbytes(config, min(batch, len(prompts)), longest + count, itemsize))
    model: Any = stream(folder, weights, quantize, memory=limit, folder=directory, device=device)
    progress = Progress(model, count * len(prompts))
    try:
        for first in range(0, len(prompts), batch):
            given = tokenizer(list(prompts[first : first + batch]), return_tensors="pt", padding=True)
            given.pop("token_type_ids", None)
            given = given.to(device or "cpu")
            tokens = model.generate(**given, max_new_tokens=count, do_sample=False, stopping_criteria=[progress])
            yield from tokenizer.batch_decode(tokens, skip_special_tokens=True)
        progress.close()
    finally:
        streamed(model).close()
