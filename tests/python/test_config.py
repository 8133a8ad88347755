"""The configuration: each key, each error message, the batch arithmetic, and the documentation's table."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from zcomm.config import BatchSizes, Config, ConfigWarning, load, resolve_batch
from zcomm.config.docs import markdown_table, rows, write_table
from zcomm.config.keys import Status, key
from zcomm.config.optimizer_keys import NEEDED, OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from zcomm.config.parse import leaf_paths

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
DEEPSPEED = os.environ.get("ZCOMM_TEST_DEEPSPEED")
NVME = {"device": "nvme", "nvme_path": "/mnt/swap"}


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b", with what a section needs besides."""
    tree: dict[str, Any] = {}
    place = tree
    *sections, name = path.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = value
    if sections[:1] == ["optimizer"]:
        kinds = [kind for kind, names in OPTIMIZER_PARAMS.items() if name in names]
        tree["optimizer"].setdefault("type", "AdamW" if "AdamW" in [*kinds, name] else (kinds or ["AdamW"])[0])
    if sections[:1] == ["scheduler"]:
        kind = tree["scheduler"].setdefault(
            "type", next((kind for kind, names in SCHEDULER_PARAMS.items() if name in names), "WarmupLR")
        )
        known = {each.lower(): names for each, names in SCHEDULER_PARAMS.items()}[kind.lower()]
        params = tree["scheduler"].setdefault("params", {})
        params.update({needed: 1 for needed in NEEDED if needed in known and needed not in params})
    if "offload_param" in sections:
        tree["zero_optimization"]["stage"] = 3
    if name == "device" and value == "nvme":
        place["nvme_path"] = "/mnt/swap"
    return tree


def get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


HONOURED = [
    ("train_batch_size", 64, 64),
    ("train_micro_batch_size_per_gpu", 4, 4),
    ("gradient_accumulation_steps", 2.0, 2),
    ("gradient_clipping", 0, 0.0),
    ("steps_per_print", 10, 10),
    ("steps_per_print", float("inf"), None),
    ("wall_clock_breakdown", True, True),
    ("dataloader_drop_last", True, True),
    ("fp16.enabled", True, True),
    ("fp16.loss_scale", 128, 128.0),
    ("fp16.loss_scale_window", 500, 500),
    ("fp16.initial_scale_power", 32, 32),
    ("fp16.hysteresis", 4, 4),
    ("fp16.min_loss_scale", 2, 2.0),
    ("fp16.consecutive_hysteresis", True, True),
    ("bf16.enabled", True, True),
    ("bf16.check_grad_overflow", False, False),
    ("communication_data_type", "bf16", "bf16"),
    ("data_types.grad_accum_dtype", "fp32", "fp32"),
    ("data_types.buffer_dtype", "bf16", "bf16"),
    ("activation_checkpointing.cpu_checkpointing", True, True),
    ("optimizer.type", "adam", "Adam"),
    ("optimizer.type", "AdamW", "AdamW"),
    ("optimizer.type", "lion", "Lion"),
    ("optimizer.type", "SGD", "SGD"),
    ("optimizer.type", "Adagrad", "Adagrad"),
    ("optimizer.params.momentum", 0.9, 0.9),
    ("optimizer.params.dampening", 0.5, 0.5),
    ("optimizer.params.nesterov", True, True),
    ("optimizer.params.lr_decay", 0.1, 0.1),
    ("optimizer.params.initial_accumulator_value", 0.1, 0.1),
    ("optimizer.params.lr", 3e-4, 3e-4),
    ("optimizer.params.betas", [0.8, 0.95], (0.8, 0.95)),
    ("optimizer.params.eps", 1e-6, 1e-6),
    ("optimizer.params.weight_decay", 1, 1.0),
    ("optimizer.params.adam_w_mode", False, False),
    ("optimizer.params.torch_adam", True, True),
    ("scheduler.type", "WarmupLR", "WarmupLR"),
    ("scheduler.params.warmup_min_lr", 1e-5, 1e-5),
    ("scheduler.params.warmup_max_lr", 1e-3, 1e-3),
    ("scheduler.params.warmup_num_steps", 10, 10),
    ("scheduler.params.warmup_type", "linear", "linear"),
    ("scheduler.type", "onecycle", "OneCycle"),
    *(
        (f"scheduler.params.{name}", value, value)
        for name, value in {
            "total_num_steps": 50,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.1,
            "lr_range_test_min_lr": 0.1,
            "lr_range_test_step_size": 5,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.2,
            "decay_lr_rate": 0.5,
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 8,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 3,
            "decay_step_size": 3,
            "cycle_momentum": False,
            "cycle_min_mom": 0.7,
            "cycle_max_mom": 0.95,
            "decay_mom_rate": 0.1,
        }.items()
    ),
    ("zero_optimization.stage", 3, 3),
    ("zero_optimization.overlap_comm", False, False),
    ("zero_optimization.reduce_bucket_size", 5e7, 50_000_000),
    ("zero_optimization.stage3_prefetch_bucket_size", 1e6, 1_000_000),
    ("zero_optimization.offload_optimizer.device", "cpu", "cpu"),
    ("zero_optimization.offload_optimizer.device", "nvme", "nvme"),
    ("zero_optimization.offload_optimizer.nvme_path", "/mnt/x", "/mnt/x"),
    ("zero_optimization.offload_optimizer.nvme_path", ["/mnt/x", "/mnt/y"], ("/mnt/x", "/mnt/y")),
    ("zero_optimization.offload_optimizer.ratio", 0.5, 0.5),
    ("zero_optimization.offload_param.device", "nvme", "nvme"),
    ("zero_optimization.offload_param.nvme_path", "/mnt/x", "/mnt/x"),
]

NO_EFFECT = [
    ("bf16.immediate_grad_update", True),
    ("seq_parallel_communication_data_type", "bf16"),
    ("disable_python_gc", True),
    ("log_level", "info"),
    ("vocabulary_size", 50304),
    ("use_data_before_expert_parallelism", True),
    ("timers", {"throughput": {"enabled": False}}),
    ("pipeline", {"stages": 2}),
    ("checkpoint.tag_validation", "Fail"),
    ("checkpoint.parallel_write", {"pipeline_stage": True}),
    ("checkpoint.checkpoint_serialization", False),
    ("checkpoint.writer", {"type": "fast"}),
    ("data_types.keep_in_fp32_modules", ["rotary"]),
    ("optimizer.legacy_fusion", True),
    ("optimizer.params.set_grad_none", False),
    ("optimizer.params.foreach", True),
    ("optimizer.params.fused", False),
    ("optimizer.params.capturable", True),
    ("aio.use_gds", True),
    ("zero_optimization.offload_optimizer.super_offload", True),
    ("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.5),
    ("zero_optimization.mics_hierarchical_params_gather", True),
    ("zero_optimization.leaf_module", {"classes": ["Block"]}),
    ("zero_optimization.cpu_offload_use_pin_memory", True),
    ("zero_optimization.stage3_model_persistence_threshold", 0),
    ("zero_optimization.stage3_module_granularity_threshold", 5),
    *(
        (f"compile.{name}", value)
        for name, value in {
            "free_activation": True,
            "free_activation_threshold": 1,
            "offload_activation_pin_memory": False,
            "double_buffer": False,
            "symmetric_memory": True,
            "debug_log": True,
            "sync_before_reduce": True,
            "sync_after_reduce": True,
            "sync_before_allgather": True,
            "sync_after_allgather": True,
            "keep_int_input_tensors": False,
            "keep_all_input_tensors": True,
            "passes": ["prefetch"],
        }.items()
    ),
    *(
        (f"zero_optimization.{name}", False)
        for name in (
            "use_multi_rank_bucket_allreduce",
            "compute_grad_norm",
            "memory_efficient_linear",
            "override_module_apply",
        )
    ),
    *(
        (f"zero_optimization.{name}", True)
        for name in (
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "stage3_gather_fp16_weights_on_model_save",
            "legacy_stage1",
            "parameter_alignment",
            "pipeline_loading_checkpoint",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "save_muon_momentum_buffer_in_memory",
        )
    ),
    ("disable_allgather", True),
    ("dump_state", True),
    ("memory_breakdown", True),
    ("zero_force_ds_cpu_optimizer", False),
    ("zero_optimization.elastic_checkpoint", True),
    ("zero_optimization.load_from_fp32_weights", False),
    ("zero_optimization.ignore_unused_parameters", False),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", True),
    ("zero_allow_untested_optimizer", True),
    ("zero_optimization.allgather_partitions", False),
    ("zero_optimization.allgather_bucket_size", 5e7),
    ("zero_optimization.reduce_scatter", False),
    ("zero_optimization.contiguous_gradients", False),
    ("zero_optimization.round_robin_gradients", True),
    ("zero_optimization.sub_group_size", 1e8),
    ("zero_optimization.stage3_param_persistence_threshold", 0),
    ("zero_optimization.stage3_max_live_parameters", 1e6),
    ("zero_optimization.stage3_max_reuse_distance", 1e6),
    ("zero_optimization.offload_optimizer.pin_memory", False),
    ("zero_optimization.offload_optimizer.buffer_count", 8),
    ("zero_optimization.offload_optimizer.pipeline_read", True),
    ("zero_optimization.offload_optimizer.pipeline_write", True),
    ("zero_optimization.offload_optimizer.fast_init", True),
    ("zero_optimization.offload_param.pin_memory", False),
    ("zero_optimization.offload_param.buffer_count", 8),
    ("zero_optimization.offload_param.buffer_size", 1e6),
    ("zero_optimization.offload_param.max_in_cpu", 0),
    ("aio.block_size", 4096),
    ("aio.queue_depth", 32),
    ("aio.thread_count", 4),
    ("aio.intra_op_parallelism", 4),
    ("aio.single_submit", True),
    ("aio.overlap_events", False),
    ("activation_checkpointing.partition_activations", True),
    ("activation_checkpointing.contiguous_memory_optimization", True),
    ("activation_checkpointing.number_checkpoints", 4),
    ("activation_checkpointing.synchronize_checkpoint_boundary", True),
    ("activation_checkpointing.profile", True),
]

REFUSED = [
    ("tensorboard", {"enabled": True}, "rank 0 prints, and the program logs as it likes"),
    ("wandb", {"enabled": True}, "rank 0 prints, and the program logs as it likes"),
    ("csv_monitor", {"enabled": True}, "rank 0 prints, and the program logs as it likes"),
    ("comms_logger", {"enabled": True}, "zcomm.profile shows them"),
    ("flops_profiler", {"enabled": True}, "zcomm.profile shows where time goes"),
    ("autotuning", {"enabled": True}, "zcomm plan says what fits"),
    ("elasticity", {"enabled": True}, "a checkpoint loads at any world size"),
    ("compression_training", {"enabled": True}, "there is none"),
    ("data_efficiency", {"enabled": True}, "there is none"),
    ("curriculum_learning", {"enabled": True}, "there is none"),
    ("progressive_layer_drop", {"enabled": True}, "there is none"),
    ("eigenvalue", {"enabled": True}, "there is none"),
    ("hybrid_engine", {"enabled": True}, "there is none"),
    ("comet", {"enabled": True}, "rank 0 prints, and the program logs as it likes"),
    ("tensor_parallel", {"autotp_size": 2}, "one data-parallel group"),
    ("expert_parallel", {"enabled": True}, "there are no experts"),
    ("weight_quantization", {"quantized_initialization": {}}, "there is none"),
    ("datastates_ckpt", {}, r"save_checkpoint\(wait=False\)"),
    ("nebula", {"enabled": True}, r"save_checkpoint\(wait=False\)"),
    ("torch_autocast", {"enabled": True}, "or torch.autocast"),
    ("amp", {"enabled": True}, 'no apex; use "bf16"'),
    ("bfloat16", {"enabled": True}, 'use "bf16": {"enabled": true}'),
    ("sparse_attention", {"mode": "fixed"}, "DeepSpeed has removed it"),
    ("quantize_training", {"enabled": True}, "DeepSpeed has removed it"),
    ("graph_harvesting", True, "DeepSpeed has removed it"),
    ("gradient_allreduce_op", "sum", "multiply the loss by the number of ranks"),
    ("managed_gradient_accumulation", False, "set_gradient_accumulation_boundary"),
    ("bf16.bf16_optimizer_states", True, "state_dtype=torch.bfloat16"),
    ("checkpoint.load_universal", True, "zcomm ckpt convert"),
    ("checkpoint.use_node_local_storage", True, "one folder that all ranks see"),
    ("data_types.param_dtype", "fp32", "leave it out"),
    ("compile.deepcompile", True, "compile the model's blocks yourself"),
    ("compile.autoep_non_moe", True, "no experts"),
    ("compile.offload_activation", True, "cpu_checkpointing"),
    ("compile.offload_opt_states", True, "offload_optimizer"),
    ("compile.offload_parameters", True, "offload_param"),
    ("optimizer.params.bias_correction", False, "corrects them"),
    ("optimizer.params.amsgrad", True, "no kernel"),
    ("optimizer.params.fp32_optimizer_states", False, "state_dtype=torch.bfloat16"),
    ("scheduler.params.last_batch_iteration", 5, "load_checkpoint restores"),
    ("zero_optimization.zero_quantized_nontrainable_weights", True, "as they are"),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, "every step updates everything"),
    ("zero_optimization.mics_shard_size", 2, "sharded over all ranks"),
    ("prescale_gradients", True, r'"prescale_gradients": true is refused'),
    ("gradient_predivide_factor", 2, "summed in fp32 and divided once"),
    ("sparse_gradients", True, "reduced dense"),
    ("fp16.auto_cast", True, "cast them"),
    ("fp16.fp16_master_weights_and_grads", True, "always exact fp32"),
    ("bf16.bf16_master_weights_and_grads", True, "always exact fp32"),
    ("zero_optimization.cpu_offload", True, r'use "zero_optimization.offload_optimizer": {"device": "cpu"}'),
    ("zero_optimization.cpu_offload_param", True, r'use "zero_optimization.offload_param": {"device": "cpu"}'),
    ("zero_optimization.zero_hpz_partition_size", 2, "sharded over all ranks"),
    ("zero_optimization.zero_quantized_weights", True, "as they are"),
    ("zero_optimization.zero_quantized_gradients", True, "as they are"),
]


@pytest.mark.parametrize(("path", "value", "wanted"), HONOURED)
def test_honoured_key_is_read_without_a_warning(path: str, value: Any, wanted: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load(nested(path, value))
    assert get(config, path) == wanted
    assert type(get(config, path)) is type(wanted)


@pytest.mark.parametrize(("path", "value"), NO_EFFECT)
def test_key_without_effect_warns_once_with_its_reason(path: str, value: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert get(load(nested(path, value)), path) == value
    assert [w.category for w in caught] == [ConfigWarning]
    assert f'"{path}": ' in str(caught[0].message) and "has no effect: " in str(caught[0].message)


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_refused_value(path: str, value: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        load(nested(path, value))


def test_these_tables_hold_every_key_of_the_schema() -> None:
    by_status = {Status.HONOURED: HONOURED, Status.NO_EFFECT: NO_EFFECT, Status.REFUSED: REFUSED}
    for status, cases in by_status.items():
        known = {row.path for row in rows() if row.status == status.value}
        assert known <= {case[0] for case in cases}, status


def of_deepspeed() -> dict[str, Any]:
    """Every key that DeepSpeed 0.19.8 reads, with its default (as ``deepspeed_keys.py`` found them)."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "deepspeed_keys.json").read_text())
    return found


OWN_DEFAULTS = {  # as docs/config.md says
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
}


def test_every_key_of_deepspeed_is_known() -> None:
    missing = set(of_deepspeed()) - set(leaf_paths())
    assert not missing, f"not in the table: {missing}"


def test_defaults_are_deepspeeds() -> None:
    for path, value in of_deepspeed().items():
        ours: Any = Config()
        for name in path.split("."):
            ours = None if ours is None else getattr(ours, name)
        if dataclasses.is_dataclass(ours) or path in OWN_DEFAULTS:
            continue
        same = ours.lower() == value.lower() if isinstance(ours, str) else ours == value
        assert same or (not ours and not value), f"{path}: {ours!r}, DeepSpeed {value!r}"


@pytest.mark.skipif(DEEPSPEED is None, reason="ZCOMM_TEST_DEEPSPEED=PYTHON names a Python that has DeepSpeed")
def test_the_list_is_deepspeeds() -> None:
    script = Path(__file__).parent / "deepspeed_keys.py"
    done = subprocess.run([str(DEEPSPEED), script], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("KEYS ")]
    assert json.loads(line.removeprefix("KEYS ")) == of_deepspeed()


def test_defaults_are_silent_and_equal_an_empty_config() -> None:
    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return list(value) if isinstance(value, tuple) else value

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(plain(Config())) == load({}) == Config()
    assert Config().gradient_clipping == 1.0 and Config().zero_optimization.stage == 0


ERRORS = [
    (
        {"zero_optimization": {"stge": 2}},
        'unknown key "zero_optimization.stge"; did you mean "zero_optimization.stage"?',
    ),
    ({"train_batchsize": 2}, 'unknown key "train_batchsize"; did you mean "train_batch_size"?'),
    ({"stage": 2}, 'unknown key "stage"; did you mean "zero_optimization.stage"?'),
    ({"pin_memory": True}, 'did you mean "zero_optimization.offload_optimizer.pin_memory"?'),
    (
        {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
        'unknown key "zero_optimization.offload_optimizer.devise"; '
        'did you mean "zero_optimization.offload_optimizer.device"?',
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        'unknown key "optimizer.params.max_grad_norm"; use "gradient_clipping"',
    ),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, '"data_types.grad_accum_dtype" must be one of fp32, got "bf16"'),
    ({"communication_data_type": "bfp16"}, '"communication_data_type" must be one of fp32, bf16, fp16, got "bfp16"'),
    ({"bf16": {"xyz": 1}}, 'unknown key "bf16.xyz"; known here: enabled, immediate_grad_update'),
    ({"bf16": True}, '"bf16" must be an object {...}, got true'),
    ({"zero_optimization": [2]}, '"zero_optimization" must be an object {...}, got [2]'),
    ({"train_batch_size": "8"}, '"train_batch_size" must be a whole number, got "8"'),
    ({"train_batch_size": 8.5}, '"train_batch_size" must be a whole number, got 8.5'),
    ({"train_batch_size": True}, '"train_batch_size" must be a whole number, got true'),
    ({"train_batch_size": float("nan")}, '"train_batch_size" must be a whole number, got NaN'),
    ({"train_batch_size": 0}, '"train_batch_size" must be >= 1, got 0'),
    ({"zero_optimization": {"stage": "auto"}}, '"zero_optimization.stage": "auto" says nothing here; give a value'),
    ({"optimizer": {"type": "auto"}}, '"optimizer.type": "auto" says nothing here'),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
        '"scheduler.type": "WarmupDecayLR" needs "scheduler.params.total_num_steps"',
    ),
    ({"train_micro_batch_size_per_gpu": -1}, '"train_micro_batch_size_per_gpu" must be >= 1, got -1'),
    ({"gradient_accumulation_steps": 0}, '"gradient_accumulation_steps" must be >= 1, got 0'),
    ({"gradient_clipping": -1}, '"gradient_clipping" must be >= 0, got -1'),
    ({"gradient_clipping": float("inf")}, '"gradient_clipping" must be >= 0, got Infinity'),
    ({"steps_per_print": 0}, '"steps_per_print" must be >= 1, got 0'),
    ({"wall_clock_breakdown": 1}, '"wall_clock_breakdown" must be true or false, got 1'),
    ({"bf16": {"enabled": "true"}}, '"bf16.enabled" must be true or false, got "true"'),
    ({"optimizer": {"params": {}}}, '"optimizer.type" is missing; give one of: Adam, AdamW, Lion, SGD, Adagrad'),
    ({"optimizer": {"type": "Lamb"}}, '"optimizer.type" must be one of Adam, AdamW, Lion, SGD, Adagrad, got "Lamb"'),
    ({"optimizer": {"type": "Adam", "params": {"lr": "low"}}}, '"optimizer.params.lr" must be a number, got "low"'),
    (
        {"optimizer": {"type": "Lion", "params": {"eps": 1e-6}}},
        '"optimizer.params.eps": Lion has no such param; it has lr, weight_decay, betas',
    ),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, '"fp16.enabled" and "bf16.enabled" are both true'),
    ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, '"optimizer.params.lr" must be >= 0, got -1'),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
        '"optimizer.params.betas" must be a list of two numbers, got [0.9]',
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}},
        '"optimizer.params.betas" must be two numbers, each >= 0 and < 1, got [0.9, 1.0]',
    ),
    ({"scheduler": {"type": "OneCycle"}}, '"scheduler.type": "OneCycle" needs "scheduler.params.cycle_min_lr"'),
    ({"scheduler": {"type": "WarmupDecayLR"}}, '"scheduler.type": "WarmupDecayLR" needs "scheduler.params.total_num'),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"cycle_min_lr": 0.1}}},
        '"scheduler.params.cycle_min_lr": WarmupLR has no such param; it has warmup_min_lr',
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"nvme_path": ["/a", 3]}}},
        '"zero_optimization.offload_optimizer.nvme_path" must be a string or a list of strings',
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"nvme_path": []}}},
        '"zero_optimization.offload_optimizer.nvme_path" must be a path, not an empty string, got []',
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        '"scheduler.params.warmup_num_steps" must be >= 1, got 0',
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
        '"scheduler.params.warmup_type" must be one of log, linear, got "cubic"',
    ),
    ({"zero_optimization": {"stage": 4}}, '"zero_optimization.stage" must be one of 0, 1, 2, 3, got 4'),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, '"zero_optimization.reduce_bucket_size" must be > 0, got 0'),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
        '"zero_optimization.offload_optimizer.device" must be one of none, cpu, nvme, got "disk"',
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}},
        '"zero_optimization.offload_optimizer.ratio" must be between 0 and 1, got 1.5',
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
        '"zero_optimization.offload_optimizer.device": "nvme" needs "zero_optimization.offload_optimizer.nvme_path"',
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        '"zero_optimization.offload_param.device": "nvme" needs "zero_optimization.offload_param.nvme_path"',
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": ""}}},
        '"zero_optimization.offload_optimizer.nvme_path" must be a path, not an empty string, got ""',
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        '"zero_optimization.offload_param.device": "cpu" needs "zero_optimization.stage": 3',
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": NVME, "offload_param": {**NVME, "nvme_path": "/b"}}},
        '"/mnt/swap" and "zero_optimization.offload_param.nvme_path": "/b" differ',
    ),
]


@pytest.mark.parametrize(("data", "message"), ERRORS, ids=[str(i) for i in range(len(ERRORS))])
def test_errors_name_the_source_the_key_and_the_value(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(data)
    assert str(caught.value).startswith("config: ")
    assert message in str(caught.value)


def test_file_text_and_dict_give_the_same_config(tmp_path: Path) -> None:
    data = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "scheduler": None, "zero_optimization": None}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(data))
    wanted = load(data)
    assert load(path) == load(str(path)) == load("\n" + json.dumps(data)) == load(wanted) == wanted
    assert wanted.scheduler is None and wanted.zero_optimization == Config().zero_optimization


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": 8,}', "ds.json: not valid JSON at line 1 column"),
        ('{"bf16": {"enabled": true, "enabled": false}}', 'ds.json: key "enabled" is given twice'),
        ('{"gradient_clipping": NaN}', "ds.json: NaN is not a number that JSON has"),
        ("[1]", "ds.json: a configuration is a JSON object, not a list"),
        ('{"train_bach_size": 8}', 'ds.json: unknown key "train_bach_size"'),
    ],
)
def test_errors_of_a_file_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load(path)
    assert message in str(caught.value)


def test_a_missing_file_and_a_wrong_type() -> None:
    with pytest.raises(FileNotFoundError, match=r"no/such\.json"):
        load("no/such.json")
    with pytest.raises(ValueError, match="must be a dict, a path or JSON text, not int"):
        load(3)  # type: ignore[arg-type]


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load({}).zero_optimization.stage = 2  # type: ignore[misc]


B, M, G = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("data", "world_size", "wanted"),
    [
        ({B: 24, M: 2, G: 4}, 3, (24, 2, 4)),
        ({B: 24, M: 2}, 3, (24, 2, 4)),
        ({B: 24, G: 4}, 3, (24, 2, 4)),
        ({M: 2, G: 4}, 3, (24, 2, 4)),
        ({B: 24}, 3, (24, 8, 1)),
        ({M: 2}, 3, (6, 2, 1)),
        ({M: 1}, 1, (1, 1, 1)),
    ],
)
def test_batch_sizes(data: dict[str, int], world_size: int, wanted: tuple[int, int, int]) -> None:
    assert resolve_batch(load(data), world_size) == BatchSizes(*wanted)


@pytest.mark.parametrize(
    ("data", "world_size", "message"),
    [
        ({}, 2, 'give "train_batch_size" or "train_micro_batch_size_per_gpu"'),
        ({G: 4}, 2, 'give "train_batch_size" or "train_micro_batch_size_per_gpu"'),
        ({B: 8, M: 2, G: 4}, 2, '"train_batch_size": 8 is not .* = 2 x 4 x 2 = 16'),
        ({B: 10, M: 2}, 2, '"train_batch_size": 10 cannot be divided by "train_micro_.*" x world_size = 2 x 2 = 4'),
        ({B: 10, G: 3}, 2, '10 cannot be divided by "gradient_accumulation_steps" x world_size = 3 x 2 = 6'),
        ({B: 3}, 2, "3 cannot be divided by .* = 1 x 2 = 2"),
    ],
)
def test_contradicting_batch_sizes(data: dict[str, int], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_batch(load(data), world_size)


def test_documented_table_is_the_schema() -> None:
    assert markdown_table() in PAGE.read_text(encoding="utf-8"), "run: python -m zcomm.config --write docs/config.md"


def test_documented_example_is_a_valid_config() -> None:
    text = PAGE.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0]
    assert resolve_batch(load(text), 2) == BatchSizes(32, 4, 4)


def test_write_table_replaces_only_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n" + markdown_table().replace("honoured", "stale") + "\nafter\n")
    write_table(page)
    assert page.read_text() == "before\n" + markdown_table() + "\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="must be there"):
        write_table(page)


def test_a_key_without_effect_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        key(1, "something", status=Status.NO_EFFECT)


def test_reading_a_config_needs_neither_torch_nor_the_core() -> None:
    code = "import sys, zcomm.config; assert not {'torch', 'zcomm._core'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_section_that_is_switched_off_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load(
            {"tensorboard": {"enabled": False, "output_path": "x"}, "wandb": {"group": "y"}, "elasticity": None}
        )
    assert config == load({})
    with pytest.raises(ValueError, match='"wandb" must be an object'):
        load({"wandb": True})
