"""The work of `zcomm generate`: batches of prompts through a streamed model, with a line of progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from zcomm.inference.batch import plan
from zcomm.inference.folder import library_for
from zcomm.inference.streaming import stream, streamed
from zcomm.zero import MemoryLimit
from zcomm.zero.memory.limit import peak_nbytes
from zcomm.zero.options import Tier

_LINE_S = {True: 0.2, False: 10.0}  # between lines of progress; True: on a terminal


class Progress:
    """A criterion of ``generate`` that never stops it, and writes a line about the last batch. count: of its tokens.

    batch: sequences at a time.
    """

    def __init__(self, model: Any, count: int, batch: int) -> None:
        self._stream, self._count, self._batch = streamed(model), count, batch
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
        """Return tokens per second, their bound by reading, and the drive's traffic, in words."""
        elapsed, stats = max(time.monotonic() - self._begin, 1e-9), self._stream.stats()
        read = f", {stats['read_nbytes'] / elapsed / 1e9:.2f} GB/s read" if stats["read_nbytes"] else ""
        if stats["read_nbytes"] and stats["read_s"]:
            rate, each = stats["read_nbytes"] / stats["read_s"], stats["read_nbytes"] / max(1, stats["passes"])
            read += (
                f" of {rate / 1e9:.2f}, which allows {self._batch * rate / each:.2f} tokens/s at {self._batch} prompts"
            )
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
    batch: int | None,
    weights: Tier,
    quantize: Literal["int8", "int4"] | None,
    memory: int | None,
    directory: Path | None,
    device: str | None,
) -> Iterator[str]:
    """Yield each prompt with at most ``count`` new tokens, chosen greedily; ``batch`` prompts at a time.

    batch: None: as many as fit ``memory``. memory: bytes that the process may hold; None: no limit. Raises: as
    ``stream``; ValueError for a folder without a tokenizer.
    """
    library = library_for(folder)
    tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    limit, most = None, len(prompts) if batch is None else min(batch, len(prompts))
    if memory is not None:
        length = count + max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
        found = plan(folder, length, memory=memory, most=most, weights=weights, quantize=quantize, device=device)
        if batch is None and found.batch < most:
            words = f"zcomm generate: {max(1, found.batch)} prompts at a time fit into the memory (--batch)"
            print(words, file=sys.stderr, flush=True)
            most = max(1, found.batch)
        limit = MemoryLimit(memory, found.activations_of(most))
    model: Any = stream(folder, weights, quantize, memory=limit, folder=directory, device=device)
    progress = Progress(model, count * len(prompts), most)
    try:
        for first in range(0, len(prompts), most):
            given = tokenizer(list(prompts[first : first + most]), return_tensors="pt", padding=True)
            given.pop("token_type_ids", None)
            given = given.to(device or "cpu")
            tokens = model.generate(**given, max_new_tokens=count, do_sample=False, stopping_criteria=[progress])
            yield from tokenizer.batch_decode(tokens, skip_special_tokens=True)
        progress.close()
    finally:
        streamed(model).close()
