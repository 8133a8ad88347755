"""``deepspeed.utils``: its modules, and the names that DeepSpeed gathers here."""

from __future__ import annotations

from zcomm.compat.deepspeed.lazy import names_of

NAMES = {
    ".utils.logging": "log_dist log_dist_once logger set_log_level_from_string",
    ".utils.init_on_device": "OnDevice",
    ".utils.nvtx": "instrument_w_nvtx",
    ".utils.tensor_fragment": "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
    "safe_set_local_optimizer_state safe_update_full_grad_vectorized",
    ".utils.leaf_modules": "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
    ".utils.groups": "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
    "get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size",
    ".utils.numa": "get_numactl_cmd",
    ".runtime.dataloader": "RepeatingLoader",
    ".runtime.utils": "see_memory_usage",
    "torch.distributed": "is_initialized",
}
__all__ = sorted(" ".join(NAMES.values()).split())

__getattr__ = names_of(__name__, NAMES)
