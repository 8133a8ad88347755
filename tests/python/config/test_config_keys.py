"""Every key of the configuration: honoured, without effect, or refused; DeepSpeed's keys and defaults."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import warnings
from typing import Any

import pytest

from places import LIBRARIES
from zcomm.config import Config, ConfigWarning, load
from zcomm.config.data_keys import CurriculumMetric
from zcomm.config.docs import rows
from zcomm.config.foreign import FOREIGN, SECTIONS
from zcomm.config.keys import Status
from zcomm.config.optimizer_keys import NEEDED, OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from zcomm.config.parse import leaf_paths
from zcomm.config.words import OTHER_WORDS

DEEPSPEED = os.environ.get("ZCOMM_TEST_DEEPSPEED")
NVME = {"device": "nvme", "nvme_path": "/mnt/swap"}


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for "a.b", with other keys that the section requires."""
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
    if name == "enabled" and sections[:1] == ["data_efficiency"]:  # in sections that are on
        for depth in range(1, len(sections)):
            nest = tree
            for section in sections[:depth]:
                nest = nest[section]
            nest["enabled"] = True
    if name == "bf16_optimizer_states":
        place["enabled"] = True
    if "zeropp_loco_param" in sections:
        tree["zero_optimization"]["zero_quantized_gradients"] = True
    if "offload_param" in sections:
        tree["zero_optimization"]["stage"] = 3
    if sections[:1] == ["compression_training"]:
        complete_compression(tree["compression_training"])
    if name == "device" and value == "nvme":
        place["nvme_path"] = "/mnt/swap"
    return tree


COMPRESSION_PARAMS: dict[str, dict[str, Any]] = {
    "weight_quantization": {"start_bits": 8, "target_bits": 4},
    "activation_quantization": {"bits": 8},
    **{f"{name}_pruning": {"dense_ratio": 0.5} for name in ("sparse", "row", "head", "channel")},
}


def complete_compression(section: dict[str, Any]) -> None:
    """Add the keys that an enabled method needs."""
    for method, params in COMPRESSION_PARAMS.items():
        shared = section.get(method, {}).get("shared_parameters", {})
        if shared.get("enabled"):
            section[method]["different_groups"] = {"one": {"params": params}}
            shared |= {"num_heads": 2} if method == "head_pruning" else {}
    if section.get("layer_reduction", {}).get("enabled"):
        section["layer_reduction"] |= {"module_name_prefix": "layers", "teacher_layer": [1]}


def get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def of_compression() -> list[tuple[str, Any, Any]]:
    """Return a case for each honoured key of "compression_training"."""
    cases: list[tuple[str, Any, Any]] = [
        (f"weight_quantization.shared_parameters.{name}", value, value)
        for name, value in {
            "quantize_groups": 4,
            "quantize_verbose": True,
            "quantize_weight_in_forward": True,
            "rounding": "stochastic",
            "fp16_mixed_quantize.enabled": True,
            "fp16_mixed_quantize.quantize_change_ratio": 0.5,
        }.items()
    ]
    cases += [
        ("activation_quantization.shared_parameters.range_calibration", "static", "static"),
        ("head_pruning.shared_parameters.num_heads", 12, 12),
        ("weight_quantization.different_groups.*.params.quantization_period", 0, 0),
        ("layer_reduction.enabled", True, True),
        ("layer_reduction.keep_number_layer", 2, 2),
        ("layer_reduction.module_name_prefix", "layers", "layers"),
        ("layer_reduction.teacher_layer", [0, 2], (0, 2)),
        ("layer_reduction.other_module_name", ["head"], ("head",)),
    ]
    for method, params in COMPRESSION_PARAMS.items():
        cases += [
            (f"{method}.shared_parameters.{name}", 1, wanted) for name, wanted in (("enabled", True), (OFFSET, 1))
        ]
        kind = ("quantization_type", "asymmetric") if "quantization" in method else ("method", "topk")
        cases.append((f"{method}.shared_parameters.{kind[0]}", kind[1], kind[1]))
        cases += [(f"{method}.different_groups.*.params.{name}", value, value) for name, value in params.items()]
        cases.append((f"{method}.different_groups.*.modules", ["a"], ("a",)))
        cases.append((f"{method}.different_groups.*.related_modules", [["a", "b"]], [["a", "b"]]))
    return [(f"compression_training.{path}", value, wanted) for path, value, wanted in cases]


OFFSET = "schedule_offset"


HONOURED = [
    *of_compression(),
    *(
        (f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.{name}", value, wanted)
        for name, value, wanted in [
            ("index_to_sample_path", "a", "a"),
            ("index_to_metric_path", "a", "a"),
            ("difficulty_type", "percentile", "percentile"),
            ("clustering_type", "single_cluster", "single_cluster"),
            ("min_difficulty", 1, 1),
            ("max_difficulty", 2, 2),
            ("schedule_type", "fixed_root", "fixed_root"),
            ("schedule_config.difficulty", [1, 2], (1, 2)),
            ("schedule_config.max_step", [1], (1,)),
            *(
                (f"schedule_config.{each}", 2, 2)
                for each in ("total_curriculum_step", "difficulty_step", "root_degree")
            ),
        ]
    ),
    ("train_batch_size", 64, 64),
    ("train_micro_batch_size_per_gpu", 4, 4),
    ("gradient_accumulation_steps", 2.0, 2),
    ("gradient_clipping", 0, 0.0),
    ("steps_per_print", 10, 10),
    ("steps_per_print", float("inf"), None),
    ("wall_clock_breakdown", True, True),
    ("dataloader_drop_last", True, True),
    ("fp16.enabled", True, True),
    ("fp16.auto_cast", True, True),
    ("fp16.loss_scale", 128, 128.0),
    ("fp16.loss_scale_window", 500, 500),
    ("fp16.initial_scale_power", 32, 32),
    ("fp16.hysteresis", 4, 4),
    ("fp16.min_loss_scale", 2, 2.0),
    ("fp16.consecutive_hysteresis", True, True),
    ("bf16.enabled", True, True),
    ("bf16.check_grad_overflow", False, False),
    ("bf16.bf16_optimizer_states", True, True),
    ("gradient_allreduce_op", "SUM", "sum"),
    ("managed_gradient_accumulation", False, False),
    ("sparse_gradients", True, True),
    ("torch_autocast.enabled", 1, True),
    ("torch_autocast.dtype", "float16", "float16"),
    *((f"{name}.enabled", True, True) for name in ("tensorboard", "wandb", "csv_monitor", "comet")),
    *((f"{name}.enabled", True, True) for name in ("comms_logger", "flops_profiler")),
    *((f"{name}.output_path", "logs", "logs") for name in ("tensorboard", "csv_monitor")),
    *((f"{name}.job_name", "job", "job") for name in ("tensorboard", "csv_monitor")),
    *((f"wandb.{name}", "x", "x") for name in ("group", "team", "project")),
    *((f"comet.{name}", "x", "x") for name in ("project", "workspace", "api_key", "experiment_name", "experiment_key")),
    ("comet.samples_log_interval", 42, 42),
    ("comet.online", False, False),
    ("comet.mode", "create", "create"),
    ("comms_logger.prof_all", False, False),
    ("tensor_parallel.autotp_size", 2, 2),
    ("pipeline.activation_checkpoint_interval", 2, 2),
    ("comms_logger.prof_ops", ["all_gather"], ("all_gather",)),
    ("comms_logger.verbose", True, True),
    ("comms_logger.debug", True, True),
    ("flops_profiler.profile_step", 5, 5),
    ("flops_profiler.module_depth", 2, 2),
    ("flops_profiler.top_modules", 3, 3),
    ("flops_profiler.detailed", False, False),
    ("flops_profiler.output_file", "flops.txt", "flops.txt"),
    ("elasticity.enabled", True, True),
    ("elasticity.micro_batch_sizes", [2, 4.0], (2, 4)),
    *(
        (f"elasticity.{name}", 7, 7)
        for name in ("max_train_batch_size min_gpus max_gpus num_gpus_per_node model_parallel_size min_time").split()
    ),
    ("elasticity.version", 0.1, 0.1),
    ("elasticity.prefer_larger_batch", False, False),
    ("elasticity.ignore_non_elastic_batch_info", True, True),
    ("data_efficiency.enabled", True, True),
    ("data_efficiency.seed", 7, 7),
    ("data_efficiency.data_sampling.enabled", True, True),
    ("data_efficiency.data_sampling.num_epochs", 7, 7),
    ("data_efficiency.data_sampling.curriculum_learning.enabled", True, True),
    ("data_efficiency.data_sampling.curriculum_learning.data_cluster_path", "a", "a"),
    ("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics", {"a": {}}, {"a": CurriculumMetric()}),
    ("data_efficiency.data_routing.enabled", True, True),
    *(
        (f"data_efficiency.data_routing.random_ltd.{name}", value, wanted)
        for name, value, wanted in (
            ("enabled", True, True),
            ("total_layer_num", 7, 7),
            ("random_ltd_layer_num", 7, 7),
            ("random_ltd_layer_id", [0, 1], (0, 1)),
            ("model_mask_name", "mask", "mask"),
            ("model_type", "encoder", "encoder"),
            ("hidden_state_order", "seq_batch_dim", "seq_batch_dim"),
            ("layer_token_lr_schedule", {"enabled": False}, {"enabled": False}),
            ("random_ltd_schedule.min_value", 7, 7),
            ("random_ltd_schedule.max_value", 7, 7),
            ("random_ltd_schedule.schedule_type", "Fixed_linear", "fixed_linear"),
            ("random_ltd_schedule.schedule_config.require_steps", 7, 7),
            ("random_ltd_schedule.schedule_config.seq_per_step", 7, 7),
        )
    ),
    *((f"eigenvalue.{name}", True, True) for name in ("enabled", "verbose")),
    *((f"eigenvalue.{name}", 7, 7) for name in ("max_iter", "gas_boundary_resolution", "layer_num")),
    *((f"eigenvalue.{name}", 0.5, 0.5) for name in ("tol", "stability")),
    ("eigenvalue.layer_name", "layers", "layers"),
    ("autotuning.enabled", True, True),
    ("autotuning.fast", False, False),
    ("autotuning.overwrite", False, False),
    ("autotuning.metric", "FLOPS", "flops"),
    ("autotuning.start_profile_step", 2, 2),
    *(
        (f"autotuning.{name}", 7, 7)
        for name in (
            "end_profile_step",
            "min_train_micro_batch_size_per_gpu",
            "max_train_micro_batch_size_per_gpu",
            "num_tuning_micro_batch_sizes",
            "tuner_num_trials",
            "max_train_batch_size",
            "mp_size",
        )
    ),
    *((f"autotuning.{name}", "a", "a") for name in ("results_dir", "exps_dir", "metric_path")),
    ("autotuning.arg_mappings", {"a": "--a"}, {"a": "--a"}),
    ("curriculum_learning.enabled", True, True),
    ("curriculum_learning.curriculum_type", "words", "words"),
    *((f"curriculum_learning.{name}", 7, 7) for name in ("min_difficulty", "max_difficulty")),
    ("curriculum_learning.schedule_type", "custom", "custom"),
    *((f"curriculum_learning.schedule_config.{name}", [1, 2], (1, 2)) for name in ("difficulty", "max_step")),
    *(
        (f"curriculum_learning.schedule_config.{name}", 7, 7)
        for name in ("total_curriculum_step", "difficulty_step", "root_degree")
    ),
    ("progressive_layer_drop.enabled", True, True),
    ("progressive_layer_drop.theta", 0.5, 0.5),
    ("progressive_layer_drop.gamma", 0.01, 0.01),
    ("hybrid_engine.enabled", True, True),
    ("hybrid_engine.max_out_tokens", 64, 64),
    ("hybrid_engine.pin_parameters", False, False),
    ("hybrid_engine.release_inference_cache", True, True),
    ("communication_data_type", "bf16", "bf16"),
    ("data_types.grad_accum_dtype", "fp32", "fp32"),
    ("data_types.buffer_dtype", "bf16", "bf16"),
    ("activation_checkpointing.cpu_checkpointing", True, True),
    ("optimizer.type", "adam", "Adam"),
    ("optimizer.type", "AdamW", "AdamW"),
    ("optimizer.type", "lion", "Lion"),
    ("optimizer.type", "SGD", "SGD"),
    ("optimizer.type", "Adagrad", "Adagrad"),
    ("optimizer.params.fp32_optimizer_states", False, False),
    ("optimizer.params.momentum", 0.9, 0.9),
    ("optimizer.params.dampening", 0.5, 0.5),
    ("optimizer.params.nesterov", True, True),
    ("optimizer.params.lr_decay", 0.1, 0.1),
    ("optimizer.params.initial_accumulator_value", 0.1, 0.1),
    ("optimizer.type", "rmsprop", "RMSprop"),
    ("optimizer.params.alpha", 0.9, 0.9),
    ("optimizer.params.centered", True, True),
    ("optimizer.params.rho", 0.8, 0.8),
    ("optimizer.params.momentum_decay", 0.01, 0.01),
    ("optimizer.params.decoupled_weight_decay", True, True),
    ("optimizer.params.lambd", 0.01, 0.01),
    ("optimizer.params.t0", 10, 10.0),
    ("optimizer.params.etas", [0.4, 1.3], (0.4, 1.3)),
    ("optimizer.params.step_sizes", [1e-5, 1], (1e-5, 1.0)),
    ("optimizer.type", "lamb", "Lamb"),
    ("optimizer.params.eps_inside_sqrt", True, True),
    ("optimizer.params.max_coeff", 5, 5.0),
    ("optimizer.params.min_coeff", 0.1, 0.1),
    ("optimizer.type", "onebitadam", "OneBitAdam"),
    ("optimizer.params.freeze_step", 10, 10),
    ("optimizer.params.coeff_beta", 0.8, 0.8),
    ("optimizer.params.factor_max", 3, 3.0),
    ("optimizer.params.factor_min", 0.4, 0.4),
    ("optimizer.params.factor_threshold", 0.2, 0.2),
    ("optimizer.params.var_freeze_step", 20, 20),
    ("optimizer.params.var_update_scaler", 4, 4),
    ("optimizer.params.local_step_scaler", 8, 8),
    ("optimizer.params.local_step_clipper", 2, 2),
    ("optimizer.type", "muon", "Muon"),
    ("optimizer.params.muon_lr", 0.02, 0.02),
    ("optimizer.params.adam_lr", 1e-3, 1e-3),
    ("optimizer.params.ns_method", "standard", "standard"),
    ("optimizer.params.maximize", True, True),
    ("optimizer.params.lr", 3e-4, 3e-4),
    ("optimizer.params.betas", [0.8, 0.95], (0.8, 0.95)),
    ("optimizer.params.eps", 1e-6, 1e-6),
    ("optimizer.params.weight_decay", 1, 1.0),
    ("optimizer.params.adam_w_mode", False, False),
    ("optimizer.params.torch_adam", True, True),
    ("scheduler.type", "WarmupLR", "WarmupLR"),
    ("scheduler.params.last_batch_iteration", 5, 5),
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
    ("checkpoint.tag_validation", "Fail", "Fail"),
    ("checkpoint.load_universal", True, True),
    ("data_parallel_size", 2, 2),
    ("zero_optimization.mics_shard_size", 4, 4),
    ("expert_parallel.enabled", True, True),
    ("expert_parallel.autoep_size", 4, 4),
    ("expert_parallel.preset_model", "mixtral", "mixtral"),
    ("zero_optimization.zero_hpz_partition_size", 4, 4),
    ("zero_optimization.zero_quantized_weights", True, True),
    ("zero_optimization.zero_quantized_gradients", True, True),
    ("zero_optimization.zeropp_loco_param.err_beta", 0.5, 0.5),
    ("zero_optimization.zeropp_loco_param.reset_T", 8, 8),
    ("sequence_parallel_size", 4, 4),
    ("zero_optimization.offload_param.device", "nvme", "nvme"),
    ("zero_optimization.offload_param.nvme_path", "/mnt/x", "/mnt/x"),
]

NO_EFFECT = [
    ("compression_training.weight_quantization.shared_parameters.quantizer_kernel", True),
    ("compression_training.sparse_pruning.shared_parameters.schedule_offset_end", 2000),
    ("compression_training.sparse_pruning.shared_parameters.schedule_offset_stride", 2),
    ("compression_training.sparse_pruning.shared_parameters.block_pattern", "1x1"),
    ("compression_training.sparse_pruning.shared_parameters.excluded_modules", ["head"]),
    ("compression_training.sparse_pruning.shared_parameters.dense_ratio", 0.5),
    ("prescale_gradients", True),
    ("hybrid_engine.tp_gather_partition_size", 4),
    ("gradient_predivide_factor", 2),
    ("allgather_size", 100),
    ("fp16.fp16_master_weights_and_grads", True),
    ("bf16.bf16_master_weights_and_grads", True),
    ("torch_autocast.lower_precision_safe_modules", ["torch.nn.Linear"]),
    ("flops_profiler.recompute_fwd_factor", 1.0),
    ("checkpoint.use_node_local_storage", True),
    ("bf16.immediate_grad_update", True),
    ("seq_parallel_communication_data_type", "bf16"),
    ("disable_python_gc", True),
    ("autotuning.tuner_type", "random"),
    ("autotuning.tuner_early_stopping", 2),
    ("autotuning.min_train_batch_size", 2),
    ("autotuning.model_info", {"num_params": 2}),
    ("autotuning.model_info_path", "a"),
    ("data_efficiency.data_sampling.num_workers", 2),
    ("data_efficiency.data_sampling.pin_memory", True),
    ("log_level", "info"),
    ("vocabulary_size", 50304),
    ("expert_parallel.use_grouped_mm", False),
    ("expert_parallel.disable_triton_grouped_mm", True),
    ("expert_parallel.combine_impl", "weighted_sum"),
    ("expert_parallel.validate_folding_routing", True),
    ("expert_parallel.row_weighting_impl", "eager"),
    ("expert_parallel.gate_up_impl", "fused"),
    ("expert_parallel.comm_backend", "deepep"),
    ("expert_parallel.comm_num_sm", 8),
    ("expert_parallel.comm_qp_margin", 2),
    ("expert_parallel.comm_max_tokens_per_rank", 100),
    ("expert_parallel.async_split_plan", True),
    ("tensor_parallel.vocab_parallel_lm_head", True),
    ("tensor_parallel.vocab_parallel_ce_backend", "liger"),
    ("timers", {"throughput": {"enabled": False}}),
    ("tensor_parallel.dtype", "bf16"),
    ("tensor_parallel.tp_overlap_comm", True),
    ("tensor_parallel.keep_module_on_host", True),
    ("pipeline.stages", 2),
    ("pipeline.partition", "uniform"),
    ("pipeline.seed_layers", True),
    ("pipeline.use_reentrant", False),
    ("pipeline.pipe_partitioned", False),
    ("pipeline.grad_partitioned", False),
    ("checkpoint.parallel_write", {"pipeline_stage": True}),
    ("checkpoint.checkpoint_serialization", False),
    ("checkpoint.writer", {"type": "fast"}),
    ("data_types.keep_in_fp32_modules", ["rotary"]),
    ("optimizer.legacy_fusion", True),
    ("optimizer.params.set_grad_none", False),
    ("optimizer.params.foreach", True),
    ("optimizer.params.fused", False),
    ("optimizer.params.capturable", True),
    ("optimizer.params.cuda_aware", True),
    ("optimizer.params.comm_backend_name", "mpi"),
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
    ("tensor_parallel.tp", {"tp_size": 2}, r"use initialize\(mesh=\)"),
    ("tensor_parallel.tensor_parallel", {"tp_size": 2}, r"use initialize\(mesh=\)"),
    ("tensor_parallel.partition_config", {"use_default_specs": True}, "use zcomm.parallel.tensor"),
    ("tensor_parallel.preset_model", "llama", "the model's own plan is used"),
    ("tensor_parallel.injection_policy_tuple", ["q_proj"], "use zcomm.parallel.tensor"),
    ("tensor_parallel.replace_with_kernel_inject", True, "zcomm has no such kernels"),
    ("data_efficiency.data_sampling.dynamic_batching", {"enabled": True}, "a step has train_batch_size samples"),
    ("hybrid_engine.inference_tp_size", 2, "each rank has them whole"),
    ("hybrid_engine.enable_cuda_graph", True, "zcomm records none"),
    ("use_data_before_expert_parallelism", True, "ranks that divide experts are adjacent"),
    ("expert_parallel.expert_tensor_parallel_size", 2, "an expert is whole on its rank"),
    *(
        (f"expert_parallel.{name}", value, "the model's own router decides")
        for name, value in {
            "num_expert_groups": 2,
            "num_limited_groups": 1,
            "route_norm": True,
            "route_scale": 2.0,
            "routed_scaling_factor": 2.0,
            "score_func": "softmax",
            "score_apply": "pre",
            "top_k": 3,
            "load_balance_coeff": 0.1,
        }.items()
    ),
    *(
        (f"expert_parallel.{name}", "other", "only blocks of the presets are divided")
        for name in (
            "moe_layer_pattern",
            "router_pattern",
            "expert_pattern",
            "expert_w1",
            "expert_w2",
            "expert_w3",
            "num_experts_attr",
            "top_k_attr",
            "shared_experts_pattern",
            "shared_experts_gate_pattern",
        )
    ),
    ("expert_parallel.expert_activation", "gelu", "only blocks of the presets are divided"),
    ("expert_parallel.has_shared_experts", True, "only blocks of the presets are divided"),
    ("weight_quantization", {"quantized_initialization": {}}, "use zcomm.inference.stream"),
    ("datastates_ckpt", {}, r"save_checkpoint\(wait=False\)"),
    ("nebula", {"enabled": True}, r"save_checkpoint\(wait=False\)"),
    ("amp", {"enabled": True}, 'no apex; use "bf16"'),
    ("sparse_attention", {"mode": "fixed"}, "DeepSpeed has removed it"),
    ("quantize_training", {"enabled": True}, "DeepSpeed has removed it"),
    ("graph_harvesting", True, "DeepSpeed has removed it"),
    ("data_types.param_dtype", "fp32", "leave it out"),
    ("compile.deepcompile", True, "compile the model's blocks yourself"),
    ("compile.autoep_non_moe", True, "compile other blocks yourself"),
    ("compile.offload_activation", True, "cpu_checkpointing"),
    ("compile.offload_opt_states", True, "offload_optimizer"),
    ("compile.offload_parameters", True, "offload_param"),
    ("optimizer.params.bias_correction", False, "Lamb and the 1-bit types take it"),
    ("optimizer.params.amsgrad", True, "no third array"),
    ("zero_optimization.zero_quantized_nontrainable_weights", True, 'zero_quantized_weights": true gathers frozen'),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, "every step updates everything"),
]


@pytest.mark.parametrize(("path", "value", "wanted"), HONOURED)
def test_honoured_key_is_read_without_a_warning(path: str, value: Any, wanted: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load(nested(path, value))
    assert get(config, path) == wanted
    assert type(get(config, path)) is type(wanted)


@pytest.mark.parametrize(("path", "value"), NO_EFFECT)
def test_key_without_effect_is_told_once_with_its_reason(
    path: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("DEBUG", "zcomm"):
        warnings.simplefilter("always")
        load(nested(path, value))
    logged = [record.getMessage() for record in caplog.records]
    quiet = FOREIGN[path].quiet
    assert [w.category for w in caught] == ([] if quiet else [ConfigWarning]) and len(logged) == quiet
    (text,) = logged or [str(caught[0].message)]
    assert f'"{path}' in text and "has no effect: " in text


OFFLOAD = {"device": "cpu", "pin_memory": True}
HUGGING_FACE: dict[str, dict[str, Any]] = {  # as its libraries pass it, with "auto" replaced
    "examples for stage 2": {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 0},
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": OFFLOAD,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        },
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "examples for stage 3": {
        "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**OFFLOAD, "device": "nvme", "nvme_path": "/mnt", "buffer_count": 4},
            "offload_param": {**OFFLOAD, "device": "nvme", "nvme_path": "/mnt", "buffer_count": 5, "buffer_size": 1e8},
            "sub_group_size": 1e9,
            "reduce_bucket_size": 64 * 64,
            "stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
            "stage3_param_persistence_threshold": 10 * 64,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "overlap_events": True},
        "train_batch_size": 8,
    },
    "Accelerate's plugin": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "fp16": {"enabled": True, "auto_cast": True},
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_configuration_of_hugging_face_gives_no_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level("DEBUG", "zcomm"):
        warnings.simplefilter("error")
        load(HUGGING_FACE[name])
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_refused_value(path: str, value: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        load(nested(path, value))


def test_these_tables_hold_every_key_of_the_schema() -> None:
    by_status = {Status.HONOURED: HONOURED, Status.NO_EFFECT: NO_EFFECT, Status.REFUSED: REFUSED}
    for status, cases in by_status.items():
        known = {path for path, key in rows().items() if key.status is status and path not in OTHER_WORDS}
        assert known <= {case[0] for case in cases}, status


def of_deepspeed() -> dict[str, Any]:
    """Return every key that DeepSpeed 0.19.8 reads, with its default (as ``deepspeed_keys.py`` found them)."""
    found: dict[str, Any] = json.loads((LIBRARIES / "deepspeed_keys.json").read_text())
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
        if path in SECTIONS or path in OTHER_WORDS:
            continue
        ours: Any = FOREIGN[path].default if path in FOREIGN else Config()
        for name in path.split(".") if path not in FOREIGN else ():
            ours = None if ours is None else getattr(ours, name)
        if dataclasses.is_dataclass(ours) or path in OWN_DEFAULTS:
            continue
        same = ours.lower() == value.lower() if isinstance(ours, str) else ours == value
        assert same or (not ours and not value), f"{path}: {ours!r}, DeepSpeed {value!r}"


@pytest.mark.skipif(DEEPSPEED is None, reason="ZCOMM_TEST_DEEPSPEED=PYTHON names a Python that has DeepSpeed")
def test_the_list_is_deepspeeds() -> None:
    script = LIBRARIES / "deepspeed_keys.py"
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
