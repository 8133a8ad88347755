"""``deepspeed.checkpoint``: names of files, and tensors to save."""

from __future__ import annotations

from zcomm.compat.deepspeed.lazy import names_of

__getattr__ = names_of(
    __name__,
    {
        ".checkpoint.utils": "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank",
        ".checkpoint.constants": "MODEL_FILE_PREFIX ZERO_FILE_PREFIX OPTIM_FILE_SUFFIX MODEL_FILE_SUFFIX "
        "LAYER_FILE_PREFIX OPTIMIZER_STATE_DICT PARAM_SHAPES",
    },
)
