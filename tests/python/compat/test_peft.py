"""PEFT's LoRA in stage 3: adapters next to sharded weights, and the files of ``save_pretrained``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zcomm

Run = Callable[..., list[Any]]


def train_adapters(folder: str, under_init: bool, shared: bool) -> None:
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # no image is read
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from transformers import LlamaConfig, LlamaForCausalLM

    importlib.import_module("zcomm.compat.deepspeed.runtime.zero.partition_parameters")
    comm = zcomm.init(timeout=60)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2)
    torch.manual_seed(1)
    with zcomm.zero.Init(enabled=under_init):
        base = LlamaForCausalLM(config)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    counts = model.get_nb_trainable_parameters()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.5, stage=3, share_parameters=shared)
    tokens = torch.arange(12).view(1, 12)
    for step in range(2):
        mine = tokens + step + comm.rank
        opt.backward(model(input_ids=mine, labels=mine).loss)
        opt.step()
        opt.zero_grad()
    assert model.get_nb_trainable_parameters() == counts
    adapters, whole = get_peft_model_state_dict(model), opt.full_state_dict()
    assert len(adapters) == 8
    for name, value in adapters.items():
        assert torch.equal(value, whole[name.replace(".weight", ".default.weight")]) and value.any(), name
    mine_alone = f"{folder}/rank-{comm.rank}"
    model.save_pretrained(mine_alone)
    saved = load_file(f"{mine_alone}/adapter_model.safetensors")
    assert set(saved) == set(adapters)
    assert all(torch.equal(value, adapters[name]) for name, value in saved.items())
    torch.manual_seed(1)
    loaded = PeftModel.from_pretrained(LlamaForCausalLM(config), mine_alone)
    model.eval()
    loaded.eval()
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, loaded(input_ids=tokens).logits)
    comm.barrier()
    opt.close()
    zcomm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("under_init", "shared"), [(True, False), (False, True)])
def test_adapters_hold_real_values(run_ranks: Run, tmp_path: Path, under_init: bool, shared: bool) -> None:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    run_ranks(train_adapters, 2, str(tmp_path), under_init, shared)
