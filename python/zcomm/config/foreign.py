"""The table of DeepSpeed's keys that have no effect in zcomm, and of its refused keys.

A row is ``name | values | default | asks for | reason``. ``[section]`` heads the rows of a section. An empty reason
repeats the previous row's. Values: bool, int, float, str or any, with a check or choices, or section. A section has no
effect, silently, if its switches are off. The switch is ``enabled`` unless the row names switches, with the value of an
absent one after "="; ``section always`` has none. A default is JSON. After "=" stand the words for documentation. A
name with "~" before it is quiet: Hugging Face's libraries write the key, or its examples have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from zcomm.config.keys import CHECKS, Key, Status

_NO_EFFECT = r"""
seq_parallel_communication_data_type | str | "fp32" | of sequence parallelism | zcomm has no such feature
disable_python_gc | bool | false | no garbage collection | call gc.disable() in the program
log_level | str | null = its own | of DeepSpeed's logger | set it by logging.getLogger("zcomm").setLevel()
vocabulary_size | int | null = not set | for a warning about its alignment | zcomm has no such feature
disable_allgather | bool | false | gather by broadcasts | parameters are gathered as the host allows
dump_state | bool | false | print the engine's state | call opt.memory() and opt.stats()
memory_breakdown | bool | false | print memory use | call opt.memory(), or zcomm plan before
~zero_force_ds_cpu_optimizer | bool | true | insist on DeepSpeed's CPU Adam | the CPU optimizers are always zcomm's own
~zero_allow_untested_optimizer | bool | false | allow other optimizers |
    elementwise optimizers are always accepted, others are always an error
timers | section always | null = off | of throughput | the lines of steps_per_print have samples per second
prescale_gradients | bool | false | divide gradients before the sum |
    gradients are summed in fp32 and divided once, which gives the same mean
gradient_predivide_factor | float > 0 | 1.0 | divide by this before the sum, and multiply after it |
allgather_size | int >= 1 | 500000000 | elements per all_gather, with "zero_optimization": true |
    parameters are gathered by the same buckets and units that reduce them
[pipeline]
stages | any | "auto" | number of stages | PipelineModule has them
partition | any | "best" | how layers are cut | PipelineModule(partition_method=) says it
seed_layers | bool | false | seeds of layers | PipelineModule(seed_layers=) says it
use_reentrant | bool | true | form of activation checkpoints | they are never reentrant, which gives the same numbers
pipe_partitioned | bool | true | divide activations among model-parallel ranks | activations are sent whole
grad_partitioned | bool | true | divide gradients among model-parallel ranks | gradients are sent whole
[hybrid_engine]
tp_gather_partition_size | int >= 1 | 8 | layers that inference_tp_size divides at a time | weights are whole
[fp16]
fp16_master_weights_and_grads | bool | false | fp16 master weights and gradients |
    the master and the accumulated gradients are always exact fp32, which takes more memory
[bf16]
immediate_grad_update | bool | false | add up gradients as they come | always so, in every precision
bf16_master_weights_and_grads | bool | false | bf16 master weights and gradients |
    the master and the accumulated gradients are always exact fp32, which takes more memory
[torch_autocast]
lower_precision_safe_modules | any | null = its own | modules with gradients and weights that travel in dtype |
    all modules are treated alike: communication_data_type, or fp32
[flops_profiler]
recompute_fwd_factor | float >= 0 | 0.0 | count recomputed operations by this factor | they are counted as they run
[optimizer]
legacy_fusion | bool | false | the fused wrapper of fp16 | the update is always one fused kernel
[optimizer.params]
set_grad_none | bool | true | how gradients are cleared | param.grad is a stand-in of gradients that the optimizer keeps
foreach | bool | null = torch's choice | how torch computes | the update is always one fused kernel
fused | bool | null = torch's choice | how torch computes |
capturable | bool | false | how torch computes |
cuda_aware | bool | false | how MPI sends the signs of 1-bit optimizers | signs travel by the job's own backend
comm_backend_name | str | "nccl" | how the signs of 1-bit optimizers travel |
[zero_optimization.offload_optimizer]
~pin_memory | bool | true | page-locked staging | copies to a CUDA device always use page-locked memory
~buffer_count | int >= 1 | 4 | swap buffers | the swap file sizes its own buffers and I/O depth
~pipeline_read | bool | false | read ahead | reads always run ahead of the update
~pipeline_write | bool | false | write behind | writes always run behind the update
~fast_init | bool | false | quick first write | the swap file is preallocated once
super_offload | bool | false | update during backward | the update begins when the norm is known
cpuadam_cores_perc | float between 0 and 1 | 0.8 | share of the cores for super_offload | the core's threads share all
[zero_optimization.offload_param]
~pin_memory | bool | true | page-locked staging | copies to a CUDA device always use page-locked memory
~buffer_count | int >= 1 | 5 | swap buffers | the swap file sizes its own buffers and I/O depth
~buffer_size | int > 0 | 100000000 | elements per swap buffer |
~max_in_cpu | int >= 0 | 1000000000 | elements kept in host memory | stage 3 gathers and frees whole units (modules)
[zero_optimization]
allgather_partitions | bool | true | gather parameters by all_gather instead of broadcasts |
    parameters are gathered by all_gather, or shared in memory by a host's CPU ranks
~allgather_bucket_size | int > 0 | 500000000 | elements per all_gather |
    parameters are gathered by the same buckets and units that reduce them
reduce_scatter | bool | true | average gradients by reduce_scatter instead of all_reduce |
    sharded gradients are always reduce-scattered; the bits are the same
contiguous_gradients | bool | true | copy gradients into one buffer | gradients always go to contiguous bucket slots
~stage3_param_persistence_threshold | int >= 0 | 100000 | parameters below this size stay whole |
    stage 3 gathers and frees whole units (modules)
~stage3_max_live_parameters | int >= 0 | 1000000000 | most elements gathered at once |
~stage3_max_reuse_distance | int >= 0 | 1000000000 | keep parameters that are used again so soon |
~sub_group_size | int > 0 | 1000000000 | elements per optimizer pass | the fused optimizer works tile by tile
elastic_checkpoint | bool | false | checkpoints for other world sizes | every checkpoint loads at any world size
load_from_fp32_weights | bool | true | load the exact master | always, if the checkpoint has it
ignore_unused_parameters | bool | true | parameters without gradients are no error |
    they are never an error; they count as zero
~stage3_gather_16bit_weights_on_model_save | bool | false | save whole weights in stage 3 |
    save_16bit_model and checkpoints always hold whole weights
mics_hierarchical_params_gather | bool | false | gather in two steps |
    a shard group of several hosts gathers between them first, and then in each host, by itself
leaf_module | section always | null = its own | modules that are gathered whole |
    deepspeed.utils.set_z3_leaf_modules() before initialize() makes a unit of such a module
~cpu_offload_use_pin_memory | bool | null = not set | an old name of pin_memory |
    copies to a CUDA device always use page-locked memory
use_multi_rank_bucket_allreduce | bool | true | one all_reduce for the gradients of several ranks |
    a bucket is one reduce_scatter
compute_grad_norm | bool | true | find the norm without clipping, too |
    the norm is always computed; it also finds gradients that are not finite
stage3_model_persistence_threshold | int >= 0 | 9223372036854775807 | most elements that stay whole |
    stage 3 gathers and frees whole units (modules)
stage3_module_granularity_threshold | int >= 0 | 0 | elements below which modules are gathered whole |
stage3_use_all_reduce_for_fetch_params | bool | false | gather by all_reduce |
    parameters are gathered by all_gather, or shared in memory by a host's CPU ranks
stage3_allgather_sequential | bool | false | gather one parameter at a time |
~stage3_gather_fp16_weights_on_model_save | bool | false | the old name of stage3_gather_16bit_weights_on_model_save |
    save_16bit_model and checkpoints always hold whole weights
legacy_stage1 | bool | false | an older stage 1 | there is one stage 1, with the same numbers
parameter_alignment | bool | false | align parameters | each begins at a multiple of 64 elements
memory_efficient_linear | bool | true | a Linear of its own | modules are left as they are
pipeline_loading_checkpoint | bool | false | load while reading | each rank reads its own shards, tensor by tensor
override_module_apply | bool | true | gather in module.apply | use zero.GatheredParameters around it
log_trace_cache_warnings | bool | false | log when the order of modules changes | the next step learns the new order
enable_sanity_checks | bool | false | compare the ranks | ranks always compare their operations
save_muon_momentum_buffer_in_memory | bool | false | of Muon |
    the momentum is where the optimizer state is
~round_robin_gradients | bool | false | spread gradient copies | each rank copies only its own shard
[aio]
~block_size | int >= 1 | 1048576 | bytes per request | the swap file sizes its own buffers and I/O depth
~queue_depth | int >= 1 | 8 | requests in flight |
~thread_count | int >= 1 | 1 | I/O threads |
intra_op_parallelism | int >= 1 | 1 | I/O threads |
~single_submit | bool | false | submit one by one |
~overlap_events | bool | true | overlap submit and wait |
use_gds | bool | false | GPU direct storage | the drive is read into host memory
[checkpoint]
use_node_local_storage | bool | false | a part of the checkpoint on each host |
    a checkpoint is one folder, which all hosts must see; saving raises OSError if they do not
parallel_write | section pipeline_stage=false | null = off | pipeline stages write concurrently |
    one format, written tensor by tensor; save_checkpoint(wait=False) writes while training goes on
checkpoint_serialization | bool | true | pickle's new format |
writer | section always | null = its own | how files are written |
[data_types]
keep_in_fp32_modules | any | "auto" | names of modules with buffers that stay fp32 |
    buffers stay as the model has them, or have buffer_dtype
[compile]
free_activation | bool | false | of deepcompile | compile the model's blocks yourself (block.compile())
free_activation_threshold | int | 10485760 | of deepcompile |
offload_activation_pin_memory | bool | true | of deepcompile |
double_buffer | bool | true | of deepcompile |
symmetric_memory | bool | false | of deepcompile |
debug_log | bool | false | of deepcompile |
sync_before_reduce | bool | false | of deepcompile |
sync_after_reduce | bool | false | of deepcompile |
sync_before_allgather | bool | false | of deepcompile |
sync_after_allgather | bool | false | of deepcompile |
keep_int_input_tensors | bool | true | of deepcompile |
keep_all_input_tensors | bool | false | of deepcompile |
passes | any | null = all | of deepcompile |
[expert_parallel]
use_grouped_mm | bool | true | grouped matrix products | transformers has the products: give experts_implementation=
disable_triton_grouped_mm | bool | false | of grouped matrix products |
combine_impl | str | "auto" | how results are added | results are added in fp32
validate_folding_routing | bool | false | compare routes of tensor-parallel ranks | there are no such ranks
row_weighting_impl | str auto/eager/fused | "auto" | how results are weighed | results are weighed in fp32
gate_up_impl | str separate/fused | "separate" | two products as one | the model's own weights decide
comm_backend | str comm/deepep | "comm" | library that moves rows | zcomm's own all_to_all moves them
comm_num_sm | int >= 1 | 12 | of deepep |
comm_qp_margin | int >= 0 | 4 | of deepep |
comm_max_tokens_per_rank | int >= 0 | 0 | of deepep |
async_split_plan | bool | false | exchange counts of rows ahead | counts are exchanged with the rows
[activation_checkpointing]
partition_activations | bool | false | split saved activations among model-parallel ranks | there is one such rank
contiguous_memory_optimization | bool | false | copy them into one buffer | offloaded tensors have buffers of their own
number_checkpoints | int >= 1 | null = not set | how many blocks are recomputed | buffers come as they are needed
synchronize_checkpoint_boundary | bool | false | synchronize the device at blocks | nothing needs it
profile | bool | false | time the blocks | zcomm.profile shows where time goes
[autotuning]
tuner_type | str | "gridsearch" | gridsearch, random or model_based |
    micro batches double while that helps, in the order of the stages
tuner_early_stopping | int >= 0 | 5 | end after so many trials without a gain |
    a stage ends with the first size that does not help
min_train_batch_size | int >= 1 | 1 | least samples of a step | the least micro batch decides
model_info | any | null = not set | parameters and sizes of the model | the first probe counts them
model_info_path | str | null = not set | file for them | the first probe writes model_info.json into its folder
[data_efficiency.data_sampling]
num_workers | int >= 0 | 0 | processes that read samples |
    the training process reads, so that a checkpoint has the position
pin_memory | bool | false | page-locked batches | batches stay on the CPU
[compression_training.weight_quantization.shared_parameters]
quantizer_kernel | bool | false | DeepSpeed's kernel | torch computes
[compression_training.sparse_pruning.shared_parameters]
schedule_offset_end | int >= 0 | 1000 | of snip_momentum | a mask remains once it has begun
schedule_offset_stride | int >= 1 | 1 | of snip_momentum | snip_momentum is refused
block_pattern | str | "4x1" | of snip_momentum |
excluded_modules | any | [] | of snip_momentum |
dense_ratio | float > 0 | 0.1 | of snip_momentum | each group has its own
[tensor_parallel]
vocab_parallel_lm_head | bool | null = by DeepSpeed | divide the head by words | the model's plan decides it
vocab_parallel_ce_backend | str torch/liger | "torch" | kernel of that head's loss | the program computes the loss
tp_overlap_comm | bool | false | overlap sums of activations | torch moves the activations
dtype | any | null = not set | dtype of the model | the sections bf16 and fp16 set the dtype
keep_module_on_host | bool | false | divide on the host | the model is divided where it is
"""

_REFUSED = """
use_data_before_expert_parallelism | bool | false | order of ranks among experts |
    ranks that divide experts are adjacent; give initialize(mesh=) a mesh with the axis "expert" before "expert_data"
weight_quantization | section enabled=true | null = off | quantise weights for inference |
    use zcomm.inference.stream(model, quantize="int8")
datastates_ckpt | section always | null = off | save by DataStates |
    save_checkpoint(wait=False) writes while training goes on
nebula | section | null = off | save by Nebula |
amp | section | null = off | mixed precision of apex | zcomm has no apex; use "bf16": {"enabled": true}
sparse_attention | section always | null = off | attend in blocks | zcomm has no such feature (DeepSpeed has removed it)
quantize_training | section | null = off | quantise while training |
    DeepSpeed has removed it: use "compression_training.weight_quantization"
graph_harvesting | bool | false | CUDA graphs of the update | zcomm has no such feature (DeepSpeed has removed it)
[hybrid_engine]
inference_tp_size | int >= 1 | 1 | divide the weights of generate() among ranks | each rank has them whole: leave it out
enable_cuda_graph | bool | false | CUDA graphs of a token | zcomm records none
[tensor_parallel]
partition_config | section always | null = not set | layers by patterns | use zcomm.parallel.tensor(model, mesh, plan)
preset_model | str | null = not set | layers by name of the model |
    the model's own plan is used, or zcomm.parallel.tensor(model, mesh, plan)
injection_policy_tuple | any | null = not set | layers by name | use zcomm.parallel.tensor(model, mesh, plan)
tp | section always | null = not set | a group of ranks | use initialize(mesh=)
tensor_parallel | section always | null = not set | a group of ranks | use initialize(mesh=)
replace_with_kernel_inject | bool | false | kernels of whole layers | zcomm has no such kernels
[data_efficiency.data_sampling]
dynamic_batching | section | null = off | batches of equally many tokens | a step has train_batch_size samples
[optimizer.params]
bias_correction | bool | true | of the moments |
    Adam's kernels always correct them: leave it out. Lamb and the 1-bit types take it
amsgrad | bool | false | Adam keeps the largest second moment |
    Adam's kernels have no third array: leave it out, or choose "Adamax", which bounds the step by a maximum
[zero_optimization]
zero_quantized_nontrainable_weights | bool | false | keep frozen weights in 8 bits |
    shards keep their dtype; "zero_optimization.zero_quantized_weights": true gathers frozen weights, too, in 8 bits
zenflow | section always | null = off | late updates of small gradients | every step updates everything
[expert_parallel]
expert_tensor_parallel_size | int >= 1 | 1 | divide each expert, too | an expert is whole on its rank
num_expert_groups | int | null = the model's | limit routes to groups | the model's own router decides
num_limited_groups | int | null = the model's | limit routes to groups |
route_norm | bool | null = the model's | divide weights by their sum |
route_scale | float | 1.0 | scale weights |
routed_scaling_factor | any | "auto" | scale weights |
score_func | str | "auto" | softmax or sigmoid |
score_apply | str | "auto" | weigh tokens or results |
top_k | any | "auto" | experts of a token |
load_balance_coeff | float | null = off | balance by biases |
moe_layer_pattern | str | null = by preset | other blocks |
    only blocks of the presets are divided; use zcomm.parallel.MoE
router_pattern | str | null = by preset | other blocks |
expert_pattern | str | null = by preset | other blocks |
expert_w1 | str | null = by preset | other blocks |
expert_w2 | str | null = by preset | other blocks |
expert_w3 | str | null = by preset | other blocks |
num_experts_attr | str | null = by preset | other blocks |
top_k_attr | str | null = by preset | other blocks |
has_shared_experts | bool | null = by preset | other blocks |
shared_experts_pattern | str | null = by preset | other blocks |
shared_experts_gate_pattern | str | null = by preset | other blocks |
expert_activation | str | null = by preset | other blocks |
[data_types]
param_dtype | str | null = that of training | dtype of parameters, if another than that of fp16 or bf16 |
    parameters have the precision of training; leave it out
[compile]
deepcompile | bool | false | rewrite the compiled graph | compile the model's blocks yourself (block.compile())
autoep_non_moe | bool | false | compile around experts | compile other blocks yourself (block.compile())
offload_activation | bool | false | of deepcompile: saved activations wait on the host |
    use "activation_checkpointing.cpu_checkpointing": true
offload_opt_states | bool | false | of deepcompile | use "zero_optimization.offload_optimizer"
offload_parameters | bool | false | of deepcompile | use "zero_optimization.offload_param"
"""

_KINDS = {"bool": bool, "int": int, "float": float, "str": str, "any": Any, "section": dict[str, Any]}


def _rows(table: str, status: Status) -> Iterator[tuple[str, Key]]:
    """Yield dotted key and description of each row."""
    section, reason = "", ""
    for line in table.replace("|\n    ", "| ").strip().splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
            continue
        name, values, default, meaning, *own = (cell.strip() for cell in line.split("|"))
        reason = own[0] if own and own[0] else reason
        quiet, name = name.startswith("~"), name.lstrip("~")
        kind, _, words = values.partition(" ")
        value, _, shown = default.partition(" = ")
        check = CHECKS.get(words)
        switches = () if kind != "section" or words == "always" else (words or "enabled").split()
        choices = tuple(words.split("/")) if kind == "str" and words else ()
        found = json.loads(value)
        yield (
            section + name,
            Key(
                meaning,
                status,
                reason,
                check,
                choices,
                shown,
                "",
                tuple(map(_switch, switches)),
                _KINDS[kind],
                found,
                optional=found is None,
                quiet=quiet,
            ),
        )


def _switch(words: str) -> tuple[str, Any]:
    path, _, absent = words.partition("=")
    return path, json.loads(absent or "false")


FOREIGN: dict[str, Key] = {**dict(_rows(_NO_EFFECT, Status.NO_EFFECT)), **dict(_rows(_REFUSED, Status.REFUSED))}
SECTIONS = {path.rpartition(".")[0] for path in FOREIGN} - {""}


def names_in(prefix: str) -> list[str]:
    """Return the names of the table's keys and sections that stand right under ``prefix`` ("" or "a.b.")."""
    under = [path.removeprefix(prefix) for path in (*FOREIGN, *sorted(SECTIONS)) if path.startswith(prefix)]
    return [name for name in under if name and "." not in name]
