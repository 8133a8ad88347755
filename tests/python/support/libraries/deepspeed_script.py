"""A DeepSpeed training script like its CIFAR-10 example, for test_compat, without zcomm's names.

Random pictures, a small convolutional network; rank 0 prints each step's loss, and each rank its last one, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--dtype", choices=["fp16", "bf16", "fp32"], default="fp32")
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--moe-param-group", action="store_true")
    return deepspeed.add_config_arguments(parser).parse_args()


def configuration(args: argparse.Namespace) -> dict:
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 10},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 500000000,
            "reduce_bucket_size": 50000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


class Net(nn.Module):
    def __init__(self, moe: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.fc1 = nn.Linear(8 * 2 * 2, 24)
        self.experts = deepspeed.moe.layer.MoE(hidden_size=24, expert=nn.Linear(24, 24)) if moe else None
        self.fc2 = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(x if self.experts is None else x + self.experts(x)[0])


def pictures() -> TensorDataset:
    """Make 96 pictures of learnable classes: each class has its own mean picture."""
    generator = torch.Generator().manual_seed(11)
    labels = torch.arange(96) % 10
    means = torch.randn(10, 3, 14, 14, generator=generator)
    return TensorDataset(means[labels] + 0.3 * torch.randn(96, 3, 14, 14, generator=generator), labels)


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
    data = pictures()
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()

    torch.manual_seed(5)
    net = Net(args.moe)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    if args.moe_param_group:
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": list(parameters)})
    by_file = {} if args.deepspeed_config else {"config": configuration(args)}
    engine, _optimizer, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=data, **by_file
    )
    device = get_accelerator().device_name(engine.local_rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else None

    losses = []
    for _epoch in range(args.epochs):
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = engine(inputs if dtype is None else inputs.to(dtype))
            loss = F.cross_entropy(outputs, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    total = torch.tensor([losses[-1]])
    deepspeed.comm.all_reduce(total)
    result = {"losses": losses, "sum": total.item(), "world": deepspeed.comm.get_world_size()}
    print(f"RESULT{deepspeed.comm.get_rank()} {json.dumps(result)}", flush=True)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
