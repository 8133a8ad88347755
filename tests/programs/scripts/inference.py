"""transformers' generate() on streamed models: the tokens of the resident one, on each rank."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch

import zcomm
from tiny import config, folder_of_model, report
from zcomm.inference import stream, streamed
from zcomm.zero.memory import limit

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "sampled": {"do_sample": True, "top_k": 8},
}


def generated(model: Any, rank: int, **more: Any) -> torch.Tensor:
    """Return tokens of padded prompts; ranks have other prompts, and as many new tokens."""
    torch.manual_seed(7)
    prompts = torch.randint(4, 64, (2 + rank, 5), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(prompts)
    mask[0, :2] = 0
    more = {"do_sample": False, **more}
    result: torch.Tensor = model.generate(
        prompts, attention_mask=mask, max_new_tokens=6, eos_token_id=None, pad_token_id=0, **more
    )
    return result


def wrong(net: Any, want: Any, rank: int) -> list[str]:
    """List the ways in which the tokens differ."""
    return [
        name
        for name, more in WAYS.items()
        if not torch.equal(generated(net, rank, **more), generated(want, rank, **more))
    ]


def rows_of_embeddings(folder: Path) -> list[str]:
    """List the ways in which tokens differ if ``memory=`` reads embeddings and head by rows, for each place of kv."""
    from transformers import LlamaForCausalLM

    limit._resident_nbytes, limit._FIRST_PASS_NBYTES = int, 0  # only the optimizer's own bytes
    torch.manual_seed(5)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 20000}
    wide, found = config(**sizes, num_attention_heads=8, tie_word_embeddings=True), []
    want = LlamaForCausalLM(wide).bfloat16().eval()
    for kv in ("device", "cpu"):
        net: Any = copy.deepcopy(want)
        net = stream(net, folder=folder, kv=kv, memory="90MiB")
        if not streamed(net)._store.memory.rows.weights:  # type: ignore[attr-defined]
            found.append(f"kv={kv}: no weight by rows")
        found += [f"rows, kv={kv} {name}" for name in wrong(net, want, 0)]
        streamed(net).close()
    return found


def experts(kind: str, folder: Path, rank: int) -> list[str]:
    """List the ways in which tokens of a mixture of experts differ; on one rank also a read of other experts."""
    from transformers import AutoModelForCausalLM

    more = {"num_hidden_layers": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "dtype": "bfloat16"}
    model = folder_of_model(folder / f"{kind}-{rank}", kind, num_experts=8, num_local_experts=8, **more)
    want = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    net: Any = stream(model, "nvme", folder=folder)
    want.set_experts_implementation(net.get_experts_implementation())
    found = [f"{kind} {name}" for name in wrong(net, want, rank)]
    counters = streamed(net)
    before = counters.stats()
    generated(net, rank)
    after = {name: value - before[name] for name, value in counters.stats().items()}
    if zcomm.world_size() == 1:
        routed, reads = after["routed_nbytes"], after["passes"] * counters.pass_nbytes
        every = sum(p.nbytes for p in want.parameters() if p.dim() == 3) * after["passes"]
        if not (0 < routed < every and after["read_nbytes"] == reads + routed):
            found.append(f"{kind}: read {after['read_nbytes']} of {reads} + {routed}, all experts {every}")
    counters.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    comm = zcomm.init()
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    found, model = [], str(folder / "model")
    want = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    for weights, quantize in (("nvme", None), ("cpu", None), ("nvme", "int8"), ("nvme", "int4")):
        net: Any = stream(model, weights, quantize, folder=folder)
        if quantize is not None:  # tests/python/inference compares decoded weights with their definition
            want.load_state_dict(net.state_dict())
        found += [f"{weights} {quantize} {name}" for name in wrong(net, want, comm.rank)]
        streamed(net).close()
    torch.manual_seed(3)
    deep = config()
    deep.num_hidden_layers, deep.tie_word_embeddings = 12, True
    want = LlamaForCausalLM(deep).bfloat16().eval()
    net = stream(LlamaForCausalLM(deep).bfloat16(), folder=folder)
    net.load_state_dict(want.state_dict())
    found += [f"tied {name}" for name in wrong(net, want, comm.rank)]
    found += rows_of_embeddings(folder) if comm.world_size == 1 else []  # ranks divide the memory
    for kind in ("mixtral", "qwen3_moe"):
        found += experts(kind, folder, comm.rank)
    report(rank=comm.rank, wrong=found)


if __name__ == "__main__":
    main()
