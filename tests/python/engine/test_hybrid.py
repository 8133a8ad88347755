"""The section "hybrid_engine": generate() of engine and module with whole weights, between steps of training."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zcomm
from zcomm.config import ConfigWarning
from zcomm.engine.hybrid import HybridEngine
from zcomm.zero.tensors import whole_model

Run = Callable[..., list[Any]]
SIZES = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


class Net(nn.Module):
    """A model that generates, with transformers' argument ``synced_gpus``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.seen: list[Any] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x @ self.embedding.weight.t()

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, count: int, synced_gpus: bool | None = None) -> torch.Tensor:
        """Append tokens."""
        self.seen.append((synced_gpus, self.training, type(self.blocks[0].weight).__name__))
        for _ in range(count):
            input_ids = torch.cat([input_ids, self(input_ids)[:, -1:].argmax(-1)], 1)
        return input_ids


def engine_of(zero: dict[str, Any], **section: Any) -> Any:
    hybrid = {"hybrid_engine": {"enabled": True, **section}}
    return zcomm.initialize(model=Net(), config=SIZES | SGD | hybrid | {"zero_optimization": zero})[0]


def generate_and_train(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder}}
    for zero, pinned in (({"stage": 0}, True), ({"stage": 2}, True), (nvme, True), (nvme, False)):
        want, torch_sgd = Net(), None
        engine = engine_of(zero, pin_parameters=pinned, max_out_tokens=9, release_inference_cache=True)
        assert isinstance(engine, HybridEngine) and engine.module.generate.__doc__ == "Append tokens."
        torch_sgd = torch.optim.SGD(want.parameters(), lr=0.1)
        prompt = torch.arange(4).view(1, 4) + comm.rank
        for step in range(2):
            engine.eval()
            count = 3 if not pinned else 2 + 3 * comm.rank
            for call in (engine.generate, engine.module.generate):
                assert torch.equal(call(prompt, count, synced_gpus=True), want.generate(prompt, count)), (zero, step)
            assert engine.module.seen[-1][:2] == (not pinned, False)
            engine.train()
            x = [torch.arange(8).view(2, 4) + rank for rank in range(comm.world_size)]
            loss = engine(x[comm.rank]).square().mean()
            engine.backward(loss)
            engine.step()
            torch.stack([want(each).square().mean() for each in x]).mean().backward()
            torch_sgd.step()
            torch_sgd.zero_grad()
        with pytest.raises(RuntimeError, match=r'prompts of 10 tokens; "hybrid_engine.max_out_tokens": 9'):
            engine.generate(torch.zeros(1, 10, dtype=torch.long), 1)
        if zero is nvme and pinned:
            words = r'With "hybrid_engine.pin_parameters": false generate\(\) gathers'
            no_room = mock.patch.object(whole_model, "free_nbytes", lambda device: 8)
            with pytest.raises(MemoryError, match=words), no_room:
                engine.generate(prompt, 1)
        engine.destroy()
        assert "generate" not in vars(engine.module)


def test_generates_as_the_resident_model_between_steps(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(generate_and_train, 2, str(tmp_path))


def test_copies_and_pickles_have_the_method_of_their_class() -> None:
    engine = engine_of({"stage": 2})
    module, prompt = engine.module, torch.zeros(1, 2, dtype=torch.long)
    assert list(inspect.signature(module.generate).parameters) == ["input_ids", "count", "synced_gpus"]
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        made.blocks[0].weight.data.zero_()
        assert made.generate.__self__ is made
        assert made.generate(prompt, 2).shape == (1, 4) and made.seen[-1][0] is None
    assert float(module.blocks[0].weight.detach().abs().sum()) > 0
    del engine  # the module then has its own again
    assert module.generate(prompt, 3).shape == (1, 5)
    zcomm.shutdown()


def test_wrong_models_and_keys_are_errors() -> None:
    hybrid = {"hybrid_engine": {"enabled": True}}
    with pytest.raises(ValueError, match=r"Linear has no method generate\(\)"):
        zcomm.initialize(model=nn.Linear(2, 2), config=SIZES | SGD | hybrid)
    with pytest.warns(ConfigWarning, match="tp_gather_partition_size"):
        engine_of({"stage": 1}, tp_gather_partition_size=4).destroy()
    zcomm.shutdown()
