"""transformers' from_pretrained by pieces: masters of a ZeroOptimizer equal the weights of a plain from_pretrained.

way: "init" calls it in zcomm.zero.Init, "plain" without, "deepspeed" with an HfDeepSpeedConfig of stage 3. case: CASES.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch

from tiny import config, report, zero


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _save(model: Any, folder: Path, **more: Any) -> Path:
    if _is_first():
        model.save_pretrained(folder, **more)
    return folder


def _llama(**changes: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    wide = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, **changes}  # weights of 64 KiB and more
    model = config()
    for name, value in wide.items():
        setattr(model, name, value)
    return LlamaForCausalLM(model)


def same(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM, _save(_llama(), folder), {}


def bf16(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM, _save(_llama().bfloat16(), folder), {"dtype": "auto"}


def to_bf16(folder: Path) -> Any:
    return *same(folder)[:2], {"dtype": torch.bfloat16}


def to_fp32(folder: Path) -> Any:
    return *bf16(folder)[:2], {"dtype": torch.float32}


def parts(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM, _save(_llama(), folder, max_shard_size="500KB"), {}


def tied(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM, _save(_llama(tie_word_embeddings=True), folder), {}


def base(folder: Path) -> Any:
    """Load a file of the base model, without its prefix, into the model with a head, which the file lacks."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM, _save(_llama(tie_word_embeddings=True).model, folder), {}


def head(folder: Path) -> Any:
    """Load a file that lacks the head and has an unexpected one."""
    from transformers import LlamaForSequenceClassification

    return LlamaForSequenceClassification, _save(_llama(), folder), {"num_labels": 3}


def renamed(folder: Path) -> Any:
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM

    file = _save(_llama(), folder) / "model.safetensors"
    if _is_first():
        renamed = {name.replace("mlp.", "ffn."): value.clone() for name, value in load_file(file).items()}
        save_file(renamed, file, {"format": "pt"})
    return LlamaForCausalLM, folder, {"key_mapping": {r"\.ffn\.": ".mlp."}}


def experts(folder: Path) -> Any:
    """Merge the weights of experts, which are separate in the file."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM, _save(MixtralForCausalLM(MixtralConfig(**sizes, **heads)), folder), {}


def _mapped(param: torch.Tensor) -> bool:
    from zcomm.zero.materialize.mapped_file import file_range

    return file_range(param) is not None


CASES = {each.__name__: each for each in (same, bf16, to_bf16, to_fp32, parts, tied, base, head, renamed, experts)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("way")
    parser.add_argument("cases", nargs="+")
    given = parser.parse_args()

    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    import zcomm

    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    wrong, real = [], {}
    for case in given.cases:
        place = given.folder / case
        kind, place, options = CASES[case](place)
        deepspeed.comm.barrier()
        torch.manual_seed(7)
        wanted = {
            name: param.detach().clone() for name, param in kind.from_pretrained(place, **options).named_parameters()
        }
        torch.manual_seed(7 if rank == 0 else 100 + rank)
        keep = HfDeepSpeedConfig(zero(3, "nvme", given.folder)) if given.way == "deepspeed" else None
        with zcomm.zero.Init(enabled=given.way == "init"):
            model = kind.from_pretrained(place, **options)
        del keep
        gc.collect()
        real[case] = sum(
            p.nbytes for p in model.parameters() if not p.is_meta and p.nbytes >= 1 << 16 and not _mapped(p)
        )
        opt = zcomm.ZeroOptimizer(
            model,
            "sgd",
            lr=0.1,
            stage=3,
            offload="nvme",
            nvme_path=given.folder,
            precision="bf16" if options.get("dtype") in ("auto", torch.bfloat16) else "fp32",
            share_parameters=False,
        )
        for name, param in model.named_parameters():
            if name not in wanted:
                wrong.append(f"{case}: {name} is there")
            elif not torch.equal(zcomm.zero.full_param(param), wanted[name].float()):
                wrong.append(f"{case}: {name} differs")
        wrong += [f"{case}: {name} is missing" for name in wanted.keys() - dict(model.named_parameters()).keys()]
        opt.close()
    report(rank=rank, wrong=wrong, count=len(given.cases), real=real)


if __name__ == "__main__":
    main()
