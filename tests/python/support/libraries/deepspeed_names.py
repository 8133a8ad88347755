"""A script without zcomm's names that imports and uses DeepSpeed's names outside the engine; for test_compat."""

from __future__ import annotations

import argparse
import json

import deepspeed
import deepspeed.ops.adam
import torch
from deepspeed import comm as dist
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.utils import (
    log_dist,
    logger,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from deepspeed.zero import GatheredParameters, Init

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "zero_optimization": {"stage": 3}}
MAKERS = {
    "cpu adam": lambda p: DeepSpeedCPUAdam(p, lr=0.1, weight_decay=0.5, adamw_mode=False),
    "adamw": lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam(p, lr=0.1, weight_decay=0.5),
    "fused adam": lambda p: FusedAdam(p, lr=0.1, adam_w_mode=False, weight_decay=0.5),
    "lion": lambda p: DeepSpeedCPULion(p, lr=0.1),
    "fused lion": lambda p: FusedLion(p, lr=0.1),
    "adagrad": lambda p: DeepSpeedCPUAdagrad(p, lr=0.1),
}


def train(make) -> dict:
    torch.manual_seed(1)
    with Init(config_dict_or_path=CONFIG):
        net = torch.nn.Linear(4, 2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=make(net.parameters()), config=CONFIG)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        grad = safe_get_full_grad(net.weight)
        safe_set_full_grad(net.weight, 2 * grad)
        doubled = torch.equal(safe_get_full_grad(net.weight), 2 * grad)
        engine.step()
    weight = safe_get_full_fp32_param(net.weight)
    with GatheredParameters(net.weight):
        same = torch.equal(net.weight, weight)
    safe_set_full_fp32_param(net.weight, torch.ones(2, 4))
    key = "sum" if make is MAKERS["adagrad"] else "exp_avg"
    state = safe_get_full_optimizer_state(net.weight, key)
    safe_set_full_optimizer_state(net.weight, torch.zeros(2, 4), key)
    cleared = not safe_get_full_optimizer_state(net.weight, key).any() and bool(state.any())
    set_to_one = torch.equal(safe_get_full_fp32_param(net.weight), torch.ones(2, 4))
    engine.destroy()
    return {"weight": weight.tolist(), "true": [doubled, same, cleared, set_to_one]}


def main() -> None:
    deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
    deepspeed.init_distributed()
    log_dist("all is imported", ranks=[0])
    result = {name: train(make) for name, make in MAKERS.items()}
    result["loggers"] = logger.name
    if dist.get_rank() == 0:
        print(f"RESULT0 {json.dumps(result)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
