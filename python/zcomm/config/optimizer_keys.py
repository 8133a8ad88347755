"""Sections ``optimizer`` and ``scheduler`` of the configuration: see schema.py."""
# ruff: noqa: RUF009  (key() and section() are field specifiers, as dataclasses.field is)

from __future__ import annotations

from dataclasses import dataclass

from zcomm.config.keys import AT_LEAST_0, AT_LEAST_1, BETAS, REQUIRED, key, section


@dataclass(frozen=True)
class OptimizerParams:
    """Section ``optimizer.params``."""

    lr: float | None = key(
        None,
        "learning rate",
        AT_LEAST_0,
        shown="`0.001`; Adagrad `0.01`",
        auto="args.learning_rate or args.lr, or the default",
    )
    betas: tuple[float, float] | None = key(
        None,
        "decay of the two moments (Adam, AdamW, Lion, Lamb, 1-bit optimizers; Muon's AdamW)",
        BETAS,
        shown="`[0.9, 0.999]`; Muon `[0.9, 0.95]`",
        auto="args.adam_beta1 and adam_beta2, or the default",
    )
    eps: float | None = key(
        None,
        "added to the root (Adam, AdamW, Adagrad, Lamb, 1-bit optimizers; Muon's AdamW)",
        AT_LEAST_0,
        shown="`1e-08`; Adagrad, Muon `1e-10`",
        auto="args.adam_epsilon, or the default",
    )
    weight_decay: float | None = key(
        None,
        "decoupled (AdamW, Lion, Muon, OneBitAdam, ZeroOneAdam) or L2 (Adam, SGD, Adagrad) decay; of the direction of "
        "Lamb and OneBitLamb",
        AT_LEAST_0,
        shown="`0.0`; with torch_adam the default of torch's class (AdamW 0.01)",
        auto="args.weight_decay, or the default",
    )
    adam_w_mode: bool = key(
        True, "with type Adam: true = AdamW's decoupled decay (DeepSpeed's default), false = L2; type AdamW is AdamW"
    )
    torch_adam: bool = key(
        False, "true = the defaults of torch's own class; the update is the same fused kernel, of the same formula"
    )
    fp32_optimizer_states: bool = key(True, "false: Adam's moments in bf16")
    momentum: float | None = key(None, "of SGD, RMSprop and Muon", AT_LEAST_0, shown="`0.0`; Muon `0.95`")
    dampening: float = key(0.0, "of SGD's momentum", AT_LEAST_0)
    nesterov: bool = key(False, "SGD looks ahead")
    lr_decay: float = key(0.0, "of Adagrad", AT_LEAST_0)
    initial_accumulator_value: float = key(0.0, "of Adagrad's sum of squares", AT_LEAST_0)
    alpha: float | None = key(
        None, "decay of RMSprop's mean of squares; power of ASGD's rate", AT_LEAST_0, shown="`0.99`; ASGD `0.75`"
    )
    centered: bool = key(False, "RMSprop divides by the variance")
    rho: float | None = key(None, "decay of Adadelta's means", AT_LEAST_0, shown="`0.9`")
    momentum_decay: float | None = key(None, "of NAdam", AT_LEAST_0, shown="`0.004`")
    decoupled_weight_decay: bool = key(False, "NAdam and RAdam decay weights as AdamW does")
    lambd: float | None = key(None, "decay of ASGD", AT_LEAST_0, shown="`0.0001`")
    t0: float | None = key(None, "step at which ASGD begins its average", AT_LEAST_0, shown="`1e6`")
    etas: tuple[float, float] | None = key(None, "factors of Rprop's step sizes", shown="`[0.5, 1.2]`")
    step_sizes: tuple[float, float] | None = key(None, "least and largest of Rprop's", shown="`[1e-6, 50]`")
    eps_inside_sqrt: bool = key(False, "Lamb adds eps below the root")
    max_coeff: float = key(10.0, "largest ratio of Lamb and OneBitLamb", AT_LEAST_0)
    min_coeff: float = key(0.01, "smallest ratio of Lamb and OneBitLamb", AT_LEAST_0)
    freeze_step: int = key(100_000, "last step of OneBitAdam and OneBitLamb with averaged gradients", AT_LEAST_1)
    coeff_beta: float = key(0.9, "OneBitLamb: decay of the warm-up's mean ratio", AT_LEAST_0)
    factor_max: float = key(4.0, "OneBitLamb: largest factor of that ratio", AT_LEAST_0)
    factor_min: float = key(0.5, "OneBitLamb: smallest factor", AT_LEAST_0)
    factor_threshold: float = key(0.1, "OneBitLamb: largest change of the factor in a step", AT_LEAST_0)
    var_freeze_step: int = key(100_000, "last step of ZeroOneAdam with equal weights on all ranks", AT_LEAST_1)
    var_update_scaler: int = key(16, "ZeroOneAdam: averaged steps until their interval doubles", AT_LEAST_1)
    local_step_scaler: int = key(32_678, "ZeroOneAdam: local steps until the interval of exchanges doubles", AT_LEAST_1)
    local_step_clipper: int = key(16, "ZeroOneAdam: largest interval of exchanges, in steps", AT_LEAST_1)
    muon_lr: float | None = key(None, "learning rate of Muon's matrices", AT_LEAST_0, shown="`lr`; without it `0.02`")
    adam_lr: float | None = key(
        None, "learning rate of Muon's other parameters, of AdamW", AT_LEAST_0, shown="`lr`; without it `0.0003`"
    )
    ns_method: str = key("gram", "Muon iterates on Gram matrices, in fp32, or in bf16", choices=("gram", "standard"))
    maximize: bool = key(False, "go up instead of down (classes of torch.optim)")


_COMMON = ("lr", "weight_decay")
WITHOUT_EFFECT = ("set_grad_none", "foreach", "fused", "capturable")
ADAM_SWITCHES = ("adam_w_mode", "torch_adam", "bias_correction", "amsgrad", "fp32_optimizer_states", *WITHOUT_EFFECT)
_ADAM = (*_COMMON, "betas", "eps", *ADAM_SWITCHES)
_ONE_BIT = (*_COMMON, "betas", "eps", "bias_correction", "cuda_aware", "comm_backend_name")
_TORCH = ("maximize", "foreach", "capturable")
OPTIMIZER_PARAMS = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Lion": (*_COMMON, "betas"),
    "SGD": (*_COMMON, "momentum", "dampening", "nesterov"),
    "Adagrad": (*_COMMON, "eps", "lr_decay", "initial_accumulator_value"),
    "Lamb": (*_COMMON, "betas", "eps", "bias_correction", "eps_inside_sqrt", "max_coeff", "min_coeff"),
    "OneBitAdam": (*_ONE_BIT, "freeze_step"),
    "ZeroOneAdam": (
        *_ONE_BIT,
        "var_freeze_step",
        "var_update_scaler",
        "local_step_scaler",
        "local_step_clipper",
    ),
    "OneBitLamb": (
        *_ONE_BIT,
        "freeze_step",
        "max_coeff",
        "min_coeff",
        "coeff_beta",
        "factor_max",
        "factor_min",
        "factor_threshold",
    ),
    "Muon": (*_COMMON, "momentum", "betas", "eps", "muon_lr", "adam_lr", "ns_method"),
    # Classes of torch.optim that are elementwise: with torch's defaults, and run as they are on shards.
    "RMSprop": (*_COMMON, "alpha", "eps", "momentum", "centered", *_TORCH),
    "Adadelta": (*_COMMON, "rho", "eps", *_TORCH),
    "Adamax": (*_COMMON, "betas", "eps", *_TORCH),
    "NAdam": (*_COMMON, "betas", "eps", "momentum_decay", "decoupled_weight_decay", *_TORCH),
    "RAdam": (*_COMMON, "betas", "eps", "decoupled_weight_decay", *_TORCH),
    "ASGD": (*_COMMON, "lambd", "alpha", "t0", *_TORCH),
    "Rprop": ("lr", "etas", "step_sizes", *_TORCH),
}


@dataclass(frozen=True)
class Optimizer:
    """Section ``optimizer``."""

    type: str = key(REQUIRED, "which optimizer (letter case does not matter)", choices=tuple(OPTIMIZER_PARAMS))
    params: OptimizerParams = section(OptimizerParams)


@dataclass(frozen=True)
class SchedulerParams:
    """Section ``scheduler.params``; which of them a schedule has is in SCHEDULER_PARAMS."""

    warmup_min_lr: float = key(0.0, "learning rate at the start", AT_LEAST_0, auto="the default")
    warmup_max_lr: float | None = key(
        None,
        "learning rate after the warm-up",
        AT_LEAST_0,
        shown="each parameter group's own lr; WarmupDecayLR `0.001`",
        auto="the optimizer's learning rate",
    )
    warmup_num_steps: int = key(
        1000,
        "optimizer steps of warm-up (0 and 1 count as 2)",
        AT_LEAST_0,
        auto="args.warmup_steps, or args.warmup_ratio of all steps, at least 1; or the default",
    )
    warmup_type: str = key("log", "shape of the warm-up", choices=("log", "linear"))
    total_num_steps: int | None = key(
        None,
        "steps until the rate has decayed",
        AT_LEAST_1,
        shown="(WarmupDecayLR and WarmupCosineLR need it)",
        auto="args.max_steps, or the steps of args.num_train_epochs through training_data; one of them must be there",
    )
    warmup_min_ratio: float = key(0.0, "of the group's lr, at the start", AT_LEAST_0)
    cos_min_ratio: float = key(0.0001, "of the group's lr, at the end", AT_LEAST_0)
    lr_range_test_min_lr: float = key(1e-3, "learning rate at the start", AT_LEAST_0)
    lr_range_test_step_size: int = key(2000, "steps in which the rate grows by step_rate", AT_LEAST_1)
    lr_range_test_step_rate: float = key(1.0, "growth, as a part of the first rate", AT_LEAST_0)
    lr_range_test_staircase: bool = key(False, "grow in stairs")
    cycle_min_lr: float | None = key(
        None, "learning rate at the ends of the cycle", AT_LEAST_0, shown="(OneCycle needs it)"
    )
    cycle_max_lr: float | None = key(None, "learning rate at its top", AT_LEAST_0, shown="(OneCycle needs it)")
    decay_lr_rate: float = key(0.0, "after the cycle: lr = min / (1 + this x intervals)", AT_LEAST_0)
    cycle_first_step_size: int = key(2000, "steps up", AT_LEAST_1)
    cycle_second_step_size: int | None = key(None, "steps down", AT_LEAST_0, shown="cycle_first_step_size")
    cycle_first_stair_count: int = key(0, "climb in so many stairs; 0 = a line", AT_LEAST_0)
    cycle_second_stair_count: int | None = key(
        None, "descend in so many stairs", AT_LEAST_0, shown="cycle_first_stair_count"
    )
    decay_step_size: int = key(0, "steps of a decay interval; 0 = no decay", AT_LEAST_0)
    cycle_momentum: bool = key(True, "the first beta goes the other way; the second becomes 0.99")
    cycle_min_mom: float = key(0.8, "first beta at the top", AT_LEAST_0)
    cycle_max_mom: float = key(0.9, "first beta at the ends", AT_LEAST_0)
    decay_mom_rate: float = key(0.0, "after the cycle: beta = max x (1 + this x intervals)", AT_LEAST_0)
    last_batch_iteration: int = key(-1, "iterations before the first step; load_checkpoint sets it, too")


def _starting(*prefixes: str) -> tuple[str, ...]:
    return tuple(name for name in SchedulerParams.__dataclass_fields__ if name.startswith(prefixes))


_PLACE = "last_batch_iteration"
_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", _PLACE)
_COSINE = ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type", _PLACE)
SCHEDULER_PARAMS = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP),
    "WarmupCosineLR": _COSINE,
    "LRRangeTest": (*_starting("lr_range_test_"), _PLACE),
    "OneCycle": (*_starting("cycle_", "decay_"), _PLACE),
}
NEEDED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")


@dataclass(frozen=True)
class Scheduler:
    """Section ``scheduler``."""

    type: str = key(REQUIRED, "which schedule", choices=tuple(SCHEDULER_PARAMS))
    params: SchedulerParams = section(SchedulerParams)
