"""DeepSpeed's modules and names as rows: where a name lives, which are constants, and which are refused and why.

``modules.py`` creates a module from each row without a file, and adds the names of rows to modules with a file.
A module is named as below ``deepspeed``; "" is the package itself.
Invariants: a name that a file defines wins over a row. A row of NAMES or CONSTANTS names no module that has a file,
except for packages (tests/python/compat/test_modules.py).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

_ADAM_WORDS = "ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER"
_CALLABLES = "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable"
_CKPT_NAMES = "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank"
_LAYOUTS = (
    "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig FixedSparsityConfig "
    "LocalSlidingWindowSparsityConfig SparsityConfig VariableSparsityConfig"
)
_LEAVES = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
)
_TOKENS = "GatherTokens ScatterTokens bert_sample_tokens gpt_sample_tokens"
_ZERO_2_NEEDS = (
    "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
    "estimate_zero2_model_states_mem_needs_all_live"
)
_PIPE = {
    "zcomm.engine.pipeline_module": "PipelineModule",
    "zcomm.parallel.pipeline_layers": "LayerSpec TiedLayerSpec",
}

# module: {home of names: the names, with spaces between}. A home with a dot in front is below zcomm.compat.deepspeed.
# "new=old" gives the home's name `old` another one here; "*": each public name of the home, and its __all__.
NAMES: dict[str, dict[str, str]] = {
    "": {
        "zcomm.engine": "DeepSpeedEngine=Engine",
        "zcomm.engine.hybrid": "DeepSpeedHybridEngine=HybridEngine",
        "zcomm.engine.pipeline_engine": "PipelineEngine",
        "zcomm.engine.pipeline_module": "PipelineModule",
        "zcomm.compat.deepspeed": "dist=comm __git_branch__=git_branch __git_hash__=git_hash",
        ".accelerator": "get_accelerator",
        ".alias": "install",
        ".inference_engine": "DeepSpeedInferenceConfig InferenceEngine default_inference_config init_inference",
        ".runtime.base_optimizer": f"DeepSpeedOptimizer {_CALLABLES}",
        ".runtime.config": "DeepSpeedConfig DeepSpeedConfigError ADAM_OPTIMIZER LAMB_OPTIMIZER MUON_OPTIMIZER",
        ".runtime.lr_schedules": "add_tuning_arguments",
        ".runtime.utils": "OnDevice is_compile_supported",
        ".git_version_info": "git_branch git_hash version",
        ".utils.logging": "log_dist logger",
        "zcomm.data": "DeepSpeedDataLoader=Loader",
    },
    "accelerator.abstract_accelerator": {".accelerator": "DeepSpeedAccelerator"},
    "accelerator.real_accelerator": {
        ".accelerator": "get_accelerator is_current_accelerator_supported set_accelerator"
    },
    "inference": {".inference_engine": "DeepSpeedInferenceConfig InferenceEngine"},
    "inference.config": {".inference_engine": "DeepSpeedInferenceConfig"},
    "inference.engine": {".inference_engine": "InferenceEngine"},
    "checkpoint": {
        ".runtime.utils": _CKPT_NAMES,
        ".checkpoint.constants": "MODEL_FILE_PREFIX ZERO_FILE_PREFIX OPTIM_FILE_SUFFIX MODEL_FILE_SUFFIX "
        "LAYER_FILE_PREFIX OPTIMIZER_STATE_DICT PARAM_SHAPES UNIVERSAL_CHECKPOINT_INFO "
        "UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE PARAM CAT_DIM FP32_WEIGHT_KEY",
    },
    "autotuning": {"zcomm.tuning": "Autotuner"},
    "autotuning.autotuner": {"zcomm.tuning": "Autotuner"},
    "autotuning.config": {"zcomm.config.training_keys": "DeepSpeedAutotuningConfig=Autotuning"},
    "checkpoint.utils": {
        ".runtime.utils": f"{_CKPT_NAMES} clone_tensors_for_torch_save",
        ".checkpoint.constants": "MODEL_FILE_PREFIX MODEL_FILE_SUFFIX OPTIM_FILE_SUFFIX ZERO_FILE_PREFIX",
    },
    "comm.comm": {".comm": "*"},
    "compression": {
        ".compression.compress": "get_module_name init_compression redundancy_clean student_initialization",
        ".compression.config": "get_compression_config",
        ".compression.helper": "convert_conv1d_to_linear",
        ".compression.scheduler": "compression_scheduler",
    },
    "constants": {"zcomm.compat.deepspeed": "TORCH_DISTRIBUTED_DEFAULT_PORT"},
    "elasticity": {
        "zcomm.config.elasticity": "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config"
    },
    "elasticity.config": {
        "zcomm.config.elasticity": "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize",
        "zcomm.config.training_keys": "ElasticityConfig=Elasticity",
    },
    "elasticity.elasticity": {
        "zcomm.config.elasticity": "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config"
    },
    "env_report": {".commands": "cli_main=report"},
    "nvme": {".commands": "ds_io_main=io sweep_main=nvme_tune"},
    "linear": {
        ".linear.config": "LoRAConfig QuantizationConfig",
        ".linear.context_manager": "Init init_lora",
        ".linear.optimized_linear": "OptimizedLinear LoRAOptimizedLinear QuantizedLinear",
    },
    "linear.quantization": {".linear.optimized_linear": "QuantizedLinear"},
    "git_version_info": {
        "zcomm.compat.deepspeed": "version=__version__",
        ".op_builder": "compatible_ops installed_ops torch_info",
    },
    "lr_schedules": {".runtime.lr_schedules": "*"},
    "module_inject.tp_shard": {".sequence.layer": "get_shard_size_list"},
    "monitor.comet": {".monitors": "CometMonitor"},
    "monitor.config": {".runtime.config": "DeepSpeedMonitorConfig get_monitor_config"},
    "monitor.csv_monitor": {".monitors": "csvMonitor"},
    "monitor.monitor": {".monitors": "*"},
    "monitor.tensorboard": {".monitors": "TensorBoardMonitor"},
    "monitor.wandb": {".monitors": "WandbMonitor"},
    "ops": {".op_builder": "__compatible_ops__=compatible_ops __installed_ops__=installed_ops"},
    "ops.adagrad": {".optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adagrad.cpu_adagrad": {".optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adam": {".optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {".optimizers": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {".optimizers": "FusedAdam"},
    "ops.aio": {".op_builder": "AsyncIOBuilder", ".aio": "aio_handle"},
    "ops.deepspeed4science": {"zcomm.attention.evoformer": "DS4Sci_EvoformerAttention"},
    "ops.deepspeed4science.evoformer_attn": {"zcomm.attention.evoformer": "DS4Sci_EvoformerAttention"},
    "ops.gds": {".op_builder": "GDSBuilder"},
    "ops.lamb": {".optimizers": "FusedLamb"},
    "ops.lamb.fused_lamb": {".optimizers": "FusedLamb"},
    "ops.lion": {".optimizers": "DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {".optimizers": "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {".optimizers": "FusedLion"},
    "ops.op_builder": {".op_builder": "* __op_builders__"},
    "ops.random_ltd": {"zcomm.engine.token_drop": _TOKENS},
    "ops.random_ltd.dropping_utils": {"zcomm.engine.token_drop": _TOKENS},
    "ops.sparse_attention": {
        "zcomm.attention.layouts": _LAYOUTS,
        "zcomm.attention.sparse_self_attention": "BertSparseSelfAttention SparseAttentionUtils SparseSelfAttention",
    },
    "ops.sparse_attention.bert_sparse_self_attention": {
        "zcomm.attention.sparse_self_attention": "BertSparseSelfAttention"
    },
    "ops.sparse_attention.sparse_attention_utils": {"zcomm.attention.sparse_self_attention": "SparseAttentionUtils"},
    "ops.sparse_attention.sparse_self_attention": {"zcomm.attention.sparse_self_attention": "SparseSelfAttention"},
    "ops.sparse_attention.sparsity_config": {"zcomm.attention.layouts": _LAYOUTS},
    "pipe": _PIPE,
    "profiling.flops_profiler": {".flops_profiler": "FlopsProfiler get_model_profile"},
    "profiling.flops_profiler.profiler": {".flops_profiler": "*"},
    "runtime.activation_checkpointing.checkpointing": {
        ".checkpointing": "CudaRNGStatesTracker checkpoint configure get_cuda_rng_tracker is_configured "
        "model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed non_reentrant_checkpoint "
        "partition_activations_in_checkpoint reset set_num_layers"
    },
    "runtime.bf16_optimizer": {".runtime.base_optimizer": "BF16_Optimizer"},
    "runtime.compiler": {".runtime.utils": "disable is_compile_supported is_compiling"},
    "runtime.dataloader": {"zcomm.data": "DeepSpeedDataLoader=Loader", ".runtime.utils": "RepeatingLoader"},
    "runtime.data_pipeline.curriculum_scheduler": {"zcomm.engine.curriculum": "CurriculumScheduler"},
    "runtime.engine": {
        "zcomm.engine": "DeepSpeedEngine=Engine",
        "zcomm.engine.eigenvalue": "_eigenvalue_summary_events=summary_events",
        ".runtime.base_optimizer": _CALLABLES,
        ".runtime.config": _ADAM_WORDS,
    },
    "runtime.eigenvalue": {"zcomm.engine.eigenvalue": "Eigenvalue"},
    "runtime.fp16.fused_optimizer": {".runtime.base_optimizer": "FP16_Optimizer"},
    "runtime.fp16.onebit": {".optimizers": "OnebitAdam OnebitLamb ZeroOneAdam"},
    "runtime.fp16.onebit.adam": {".optimizers": "OnebitAdam"},
    "runtime.fp16.onebit.lamb": {".optimizers": "OnebitLamb"},
    "runtime.fp16.onebit.zoadam": {".optimizers": "ZeroOneAdam"},
    "runtime.fp16.unfused_optimizer": {".runtime.base_optimizer": "FP16_UnfusedOptimizer"},
    "runtime.hybrid_engine": {"zcomm.engine.hybrid": "DeepSpeedHybridEngine=HybridEngine"},
    "runtime.pipe": {**_PIPE, "zcomm.engine.pipeline_topology": "ProcessTopology"},
    "runtime.pipe.engine": {
        "zcomm.engine.pipeline_engine": "PipelineEngine",
        "zcomm.engine.pipeline_module": "PipelineError PipelineModule",
    },
    "runtime.pipe.module": {**_PIPE, "zcomm.engine.pipeline_module": "PipelineError PipelineModule"},
    "runtime.pipe.schedule": {"zcomm.engine.pipeline_schedule": "*"},
    "runtime.pipe.topology": {"zcomm.engine.pipeline_topology": "* _prime_factors"},
    "runtime.precision_config": {
        ".runtime.config": "BFLOAT16 BFLOAT16_OLD FP16 DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config "
        "get_float16_config"
    },
    "runtime.progressive_layer_drop": {"zcomm.engine.curriculum": "ProgressiveLayerDrop"},
    "runtime.data_pipeline.data_routing.basic_layer": {"zcomm.engine.token_drop": "RandomLayerTokenDrop"},
    "runtime.data_pipeline.data_routing.helper": {
        "zcomm.engine.token_drop": "convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd"
    },
    "runtime.data_pipeline.data_routing.scheduler": {"zcomm.engine.token_drop": "RandomLTDScheduler"},
    "runtime.data_pipeline.data_sampling.data_analyzer": {
        "zcomm.engine.data_sampling.analyzer": "DataAnalyzer split_index"
    },
    "runtime.data_pipeline.data_sampling.data_sampler": {"zcomm.engine.data_sampling.sampler": "DeepSpeedDataSampler"},
    "runtime.data_pipeline.data_sampling.indexed_dataset": {
        "zcomm.engine.data_sampling.indexed_dataset": "MMapIndexedDataset MMapIndexedDatasetBuilder"
    },
    "runtime.data_pipeline.data_sampling.utils": {
        "zcomm.engine.data_sampling.indexed_dataset": "close_mmap_dataset_builder create_mmap_dataset_builder "
        "find_fit_int_dtype",
        "zcomm.engine.data_sampling.analyzer": "split_index",
    },
    "runtime.sparse_tensor": {"zcomm.sparse_gradients": "SparseTensor"},
    "runtime.zero": {
        ".runtime.base_optimizer": "DeepSpeedZeRoOffload unwrap_model_for_generation",
        ".runtime.zero.tiling": "TiledLinear TiledLinearReturnBias",
        ".runtime.zero.partition_parameters": "GatheredParameters Init MiCS_Init ZeroParamStatus ZeroParamType "
        "register_external_parameter unregister_external_parameter",
    },
    "runtime.zero.config": {
        ".runtime.config": "DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig "
        "ZERO_OPTIMIZATION ZeroStageEnum get_zero_config"
    },
    "runtime.zero.mics": {".runtime.zero.partition_parameters": "MiCS_Init"},
    "runtime.zero.offload_config": {
        ".runtime.config": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum "
        "OffloadStateTypeEnum"
    },
    "runtime.zero.parameter_offload": {".runtime.base_optimizer": "DeepSpeedZeRoOffload"},
    "runtime.zero.stage3": {
        "zcomm.zero": "GatheredParameters",
        ".runtime.base_optimizer": "DeepSpeedZeroOptimizer_Stage3 ZeROOptimizer unwrap_model_for_generation",
        ".runtime.zero.memory_estimates": _ZERO_2_NEEDS.replace("zero2", "zero3"),
    },
    "runtime.zero.stage_1_and_2": {
        ".runtime.base_optimizer": "DeepSpeedZeroOptimizer ZeROOptimizer",
        ".runtime.zero.memory_estimates": _ZERO_2_NEEDS,
    },
    "utils": {
        ".utils.logging": "log_dist log_dist_once logger set_log_level_from_string",
        ".runtime.utils": "OnDevice see_memory_usage RepeatingLoader get_numactl_cmd",
        ".utils.timer": "instrument_w_nvtx",
        ".utils.tensor_fragment": "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
        "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param "
        "safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
        "safe_set_local_optimizer_state safe_update_full_grad_vectorized",
        ".utils.z3_leaf_module": _LEAVES,
        ".utils.groups": "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
        "get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size",
        "torch.distributed": "is_initialized",
    },
    "utils.bwc": {
        ".utils.groups": "bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_rank "
        "bwc_tensor_model_parallel_world_size"
    },
    "utils.comms_logging": {"zcomm.profiling.comms": "CommsLogger"},
    "utils.init_on_device": {".runtime.utils": "OnDevice"},
    "utils.numa": {
        "zcomm.launch.cores": "parse_range parse_range_list",
        ".runtime.utils": "check_for_numactl_pkg get_numa_cores get_numactl_cmd",
    },
    "utils.nvtx": {".utils.timer": "instrument_w_nvtx"},
    "utils.torch": {".runtime.utils": "required_torch_version"},
    "zero": {
        ".runtime.zero": "*",
        "zcomm.zero": "LossScale MemoryLimit Offload Precision StatePiece StepUndoneError Units ZeroOptimizer "
        "full_grad full_optim_state full_param load_weights memory_formula set_full_grad set_full_optim_state "
        "set_full_param",
    },
}

# module: {name: value}
CONSTANTS: dict[str, dict[str, Any]] = {
    "checkpoint.constants": {  # of DeepSpeed's files, which zcomm reads (ZeroOptimizer.load); it writes its own
        "OPTIMIZER_STATE_DICT": "optimizer_state_dict",
        "FP32_GROUPS": "fp32_groups",
        "FP32_FLAT_GROUPS": "fp32_flat_groups",
        "BASE_OPTIMIZER_STATE": "base_optimizer_state",
        "PARAM_GROUPS": "param_groups",
        "PARTITION_COUNT": "partition_count",
        "ZERO_STAGE": "zero_stage",
        "CLIP_GRAD": "clip_grad",
        "LOSS_SCALER": "loss_scaler",
        "PARAM": "param",
        "PARAM_SHAPES": "param_shapes",
        "BUFFER_NAMES": "buffer_names",
        "FROZEN_PARAM_SHAPES": "frozen_param_shapes",
        "FROZEN_PARAM_FRAGMENTS": "frozen_param_fragments",
        "MODEL_FILE_PREFIX": "mp_rank_",
        "ZERO_FILE_PREFIX": "zero_pp_rank_",
        "OPTIM_FILE_SUFFIX": "_optim_states.pt",
        "MODEL_FILE_SUFFIX": "_model_states.pt",
        "LAYER_FILE_PREFIX": "layer_",
        "DS_VERSION": "ds_version",
        "CAT_DIM": "cat_dim",
        "FP32_WEIGHT_KEY": "fp32",
        "UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info",
        "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version",
        "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
    },
    "constants": {"default_pg_timeout": timedelta(minutes=10)},
    "git_version_info": {"git_hash": None, "git_branch": None},  # zcomm is not built from DeepSpeed's repository
    "launcher.constants": {
        "PDSH_LAUNCHER": "pdsh",
        "OPENMPI_LAUNCHER": "openmpi",
        "MPICH_LAUNCHER": "mpich",
        "IMPI_LAUNCHER": "impi",
        "MVAPICH_LAUNCHER": "mvapich",
        "SLURM_LAUNCHER": "slurm",
        "ELASTIC_TRAINING_ID_DEFAULT": "123456789",
    },
}

_TENSOR_PARALLEL = (
    'initialize() divides the model by "tensor_parallel": {"autotp_size": N}, or use zcomm.parallel.tensor'
)
_ELASTIC = "there is no elastic training; restart the job with another number of ranks, checkpoints fit any number"
_SNIP = "there is no snip_momentum; use the methods l1 or topk"
_KERNELS = "zcomm has no kernels of whole layers; use torch's own layer"
_SPARSE = "use zcomm.attention.block_sparse_attention, which is exact for any layout"
_RANDOM_LTD = "there is no kernel: tokens are gathered by torch's operations"
_QUANTISED = "deepspeed.linear.QuantizedLinear keeps weights in 8 or 4 bits; collectives take codec="
_CODES = "QuantizedLinear has a plain parameter of codes; its dequantized() decodes them"
_UNIVERSAL = (
    '`zcomm ckpt convert` reads and writes zero and universal checkpoints; "checkpoint.load_universal" loads the latter'
)

# module below deepspeed: ((names), reason); a module without a file is created from its row.
REFUSED: dict[str, tuple[str, str]] = {
    "module_inject": ("replace_transformer_layer revert_transformer_layer", _KERNELS),
    "runtime.tensor_parallel": ("TPConfig", _TENSOR_PARALLEL),
    "runtime.tensor_parallel.tp_manager": ("TpTrainingManager", _TENSOR_PARALLEL),
    "elasticity": ("DSElasticAgent", _ELASTIC),
    "compression.basic_layer": (
        "ColumnParallelLinear_Compress QuantAct RowParallelLinear_Compress",
        "zcomm.compression.prepare changes layers by parametrizations",
    ),
    "compression.helper": ("generate_pruners register_on_step_begin rewrite_optimizer_step", _SNIP),
    "linear.quantization": ("QuantizedParameter", _CODES),
    "ops.gds": ("gds_handle", "ops.aio.aio_handle reads and writes by way of host memory"),
    "ops.transformer": (
        "DeepSpeedInferenceConfig DeepSpeedTransformerConfig DeepSpeedTransformerInference DeepSpeedTransformerLayer",
        _KERNELS,
    ),
    "ops.transformer.inference": ("DeepSpeedMoEInference DeepSpeedTransformerInference", _KERNELS),
    "ops.deepspeed4science": ("EvoformerFusedAttention", "use DS4Sci_EvoformerAttention"),
    "ops.sparse_attention": ("LocalSparsityConfig MatMul Softmax", _SPARSE),
    "ops.fp_quantizer": ("FP_Quantize Quantizer", _QUANTISED),
    "ops.quantizer": ("ds_quantizer", _QUANTISED),
    "domino": ("", _TENSOR_PARALLEL),
    "runtime.domino": ("", _TENSOR_PARALLEL),
    "runtime.domino.transformer": ("DominoTransformer DominoTransformerLayer", _TENSOR_PARALLEL),
    "runtime.zero.mics": ("MiCS_Optimizer", "deepspeed.initialize() makes it, with mics_shard_size"),
    "runtime.zero.linear": (
        "LinearFunctionForZeroStage3 LinearModuleForZeroStage3 zero3_linear_wrap",
        "torch.nn.Linear keeps no gathered weight here",
    ),
    "runtime.data_pipeline.data_sampling.data_analyzer": (
        "DistributedDataAnalyzer",
        "use DataAnalyzer with num_workers= and worker_id=",
    ),
    "checkpoint": ("DeepSpeedCheckpoint ZeROCheckpoint", _UNIVERSAL),
    "checkpoint.deepspeed_checkpoint": ("DeepSpeedCheckpoint", _UNIVERSAL),
    "checkpoint.zero_checkpoint": ("ZeROCheckpoint", _UNIVERSAL),
    "checkpoint.universal_checkpoint": ("enable_universal_checkpoint load_hp_checkpoint_state", _UNIVERSAL),
}
# Names with a module of their own that other modules have, too: module: ((names), the module of their reasons).
REFUSED_AGAIN: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("DeepSpeedTransformerConfig DeepSpeedTransformerLayer", "ops.transformer"),
        ("replace_transformer_layer revert_transformer_layer", "module_inject"),
    ),
}

# class of ops.op_builder: (the operation's name, why zcomm.optim has no counterpart; "": it has one).
BUILDERS: dict[str, tuple[str, str]] = {
    "CPUAdamBuilder": ("cpu_adam", ""),
    "CPUAdagradBuilder": ("cpu_adagrad", ""),
    "CPULionBuilder": ("cpu_lion", ""),
    "FusedAdamBuilder": ("fused_adam", ""),
    "FusedLionBuilder": ("fused_lion", "there is no kernel of Lion for GPUs; zcomm.optim.CPULion runs on the CPU"),
    "FusedLambBuilder": ("fused_lamb", ""),
    "AsyncIOBuilder": ("async_io", ""),
    "GDSBuilder": ("gds", "AsyncIOBuilder's aio_handle reads and writes by way of host memory"),
    "PinMemoryBuilder": ("pin_memory", "use zcomm.pinned_empty"),
    "UtilsBuilder": ("utils", ""),
    "CCLCommBuilder": ("deepspeed_ccl_comm", "collectives are zcomm's own"),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", "collectives are zcomm's own"),
    "DeepCompileBuilder": ("dc", "there is no pass over compiled graphs"),
    "EvoformerAttnBuilder": ("evoformer_attn", ""),
    "SparseAttnBuilder": ("sparse_attn", _SPARSE),
    "RandomLTDBuilder": ("random_ltd", _RANDOM_LTD),
    "FPQuantizerBuilder": ("fp_quantizer", _QUANTISED),
    "QuantizerBuilder": ("quantizer", _QUANTISED),
    "TransformerBuilder": ("transformer", _KERNELS),
    "InferenceBuilder": ("transformer_inference", _KERNELS),
    "InferenceCoreBuilder": ("inference_core_ops", _KERNELS),
    "InferenceCutlassBuilder": ("cutlass_ops", _KERNELS),
    "RaggedOpsBuilder": ("ragged_device_ops", _KERNELS),
    "RaggedUtilsBuilder": ("ragged_ops", _KERNELS),
    "SpatialInferenceBuilder": ("spatial_inference", _KERNELS),
    "StochasticTransformerBuilder": ("stochastic_transformer", _KERNELS),
}
