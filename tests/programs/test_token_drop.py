"""Random layer-token drop around layers of transformers: against the layer on each sample's kept tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zcomm.engine.token_drop import RandomLayerTokenDrop, RandomLTDScheduler

pytestmark = pytest.mark.needs("transformers")
SCHEDULE = {
    "total_layer_num": 1,
    "random_ltd_layer_num": 1,
    "global_batch_size": 3,
    "model_mask_name": "attention_mask",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 5,
        "max_value": 12,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 9, "seq_per_step": 1},
    },
}
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def dropping(layer: torch.nn.Module) -> tuple[RandomLayerTokenDrop, torch.Tensor]:
    """Return the layer with random tokens, and those of 3 samples of 12."""
    scheduler = RandomLTDScheduler(SCHEDULE)
    drop = RandomLayerTokenDrop(layer).train()
    drop.init_config(SCHEDULE, scheduler, 0)
    return drop, scheduler.draw(0, 3, 12, 5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_with_padding(attention: str) -> None:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(1)
    model = LlamaModel(
        LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention)
    )
    layer = model.layers[0]
    drop, kept = dropping(layer)
    x, padding = torch.randn(3, 12, 32), torch.tensor([0, 3, 0])  # tokens in front that are none
    mask = torch.ones(12, 12, dtype=torch.bool).tril().repeat(3, 1, 1, 1)
    for sample, count in enumerate(padding.tolist()):
        mask[sample, :, :, :count] = False
        mask[sample, :, :count, 0] = True  # as transformers lets such tokens see one
    mask = mask if attention == "sdpa" else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    places = torch.arange(12)[None]
    found = drop(x, attention_mask=mask, position_ids=places, position_embeddings=model.rotary_emb(x, places))
    expected = x.clone()
    for sample in range(3):
        rows = kept[sample]
        alone = layer(
            x[sample, rows][None],
            attention_mask=mask[sample, :, rows][:, :, rows][None],
            position_ids=rows[None],
            position_embeddings=model.rotary_emb(x, rows[None]),
        )
        expected[sample, rows] = alone[0] if alone.dim() == 3 else alone
    torch.testing.assert_close(found, expected)


def test_an_encoder_and_attributes_of_the_layer() -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(1)
    config = BertConfig(**SIZES, num_attention_heads=4, attn_implementation="eager", hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob = 0.0
    layer = BertModel(config).encoder.layer[0]
    drop, kept = dropping(layer)
    x, mask = torch.randn(3, 12, 32), torch.zeros(3, 1, 1, 12)
    mask[1, ..., 9:] = torch.finfo(torch.float32).min
    whole = drop(x, mask)  # by position, as BertEncoder calls it
    found = whole[0] if isinstance(whole, tuple) else whole
    expected = x.clone()
    for sample in range(3):
        alone = layer(x[sample, kept[sample]][None], mask[sample : sample + 1, ..., kept[sample]])
        expected[sample, kept[sample]] = alone[0].view(5, 32)
    torch.testing.assert_close(found, expected)
    assert drop.attention is layer.attention  # programs read attributes of a layer
