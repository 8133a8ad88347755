"""Names of DeepSpeed that can be imported and raise NotImplementedError, with the reason, when they are used.

REFUSED is the one table of them: of names inside of modules that are here, and of whole modules that are made from it.
Invariant: a name that a file of this package defines is not looked up here.
Thread rule: as the import system.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

_OWN = "zcomm.compat.deepspeed"

_PIPE = "there is no pipeline parallelism"
_MOE = "zcomm has no mixture of experts; train without it (no --moe)"
_INFERENCE = "there is no inference engine; an engine without an optimizer holds and shards weights"
_TENSOR_PARALLEL = "there is no tensor parallelism; ranks form one data-parallel group"
_SEQUENCE = "there is no sequence parallelism; ranks form one data-parallel group"
_ELASTIC = "there is no elastic training; restart the job with another number of ranks, checkpoints fit any number"
_TUNING = "there is no autotuning; `zcomm plan` lists the configurations that fit in memory"
_COMPRESSION = "there is no compression of models"
_KERNELS = "zcomm has no kernels of whole layers; use torch's own layer"
_NVME = "use zcomm.SwapFile, which reads and writes a drive asynchronously"
_SPARSE = "use torch.nn.attention.flex_attention with a block mask"
_ONEBIT = "there is no compressed communication of gradients"
_QUANTISED = "there is no quantised communication or storage of weights"
_UNIVERSAL = "zcomm's checkpoints load in any number of ranks as they are"

# module below deepspeed: ((names), reason); a module without a file of its own is made from its row.
REFUSED: dict[str, tuple[str, str]] = {
    "": (
        "DeepSpeedHybridEngine DeepSpeedInferenceConfig InferenceEngine default_inference_config init_inference",
        _INFERENCE,
    ),
    "pipe": ("LayerSpec PipelineModule TiedLayerSpec", _PIPE),
    "runtime.pipe": ("LayerSpec PipelineModule TiedLayerSpec", _PIPE),
    "runtime.pipe.engine": ("PipelineEngine", _PIPE),
    "runtime.pipe.module": ("LayerSpec PipelineModule PipelineError TiedLayerSpec", _PIPE),
    "runtime.pipe.schedule": ("InferenceSchedule PipeSchedule TrainSchedule", _PIPE),
    "runtime.pipe.topology": ("PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology", _PIPE),
    "moe.layer": ("MoE", _MOE),
    "moe.experts": ("Experts", _MOE),
    "moe.sharded_moe": ("MOELayer TopKGate top1gating top2gating topkgating", _MOE),
    "moe.utils": ("configure_moe_param_groups", _MOE),
    "inference": ("DeepSpeedInferenceConfig InferenceEngine", _INFERENCE),
    "inference.config": ("DeepSpeedInferenceConfig", _INFERENCE),
    "inference.engine": ("InferenceEngine", _INFERENCE),
    "runtime.hybrid_engine": ("DeepSpeedHybridEngine", _INFERENCE),
    "module_inject": ("replace_transformer_layer revert_transformer_layer set_autotp_mode", _KERNELS),
    "runtime.tensor_parallel": ("TPConfig", _TENSOR_PARALLEL),
    "runtime.tensor_parallel.tp_manager": ("TpTrainingManager", _TENSOR_PARALLEL),
    "sequence": ("layer", _SEQUENCE),
    "sequence.layer": ("DistributedAttention single_all_to_all", _SEQUENCE),
    "sequence.cross_entropy": ("vocab_sequence_parallel_cross_entropy", _SEQUENCE),
    "runtime.sequence_parallel": ("", _SEQUENCE),
    "runtime.sequence_parallel.parallel_state_sp": ("initialize_sequence_parallel", _SEQUENCE),
    "runtime.sequence_parallel.ulysses_sp": (
        "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
        _SEQUENCE,
    ),
    "elasticity": (
        "DSElasticAgent compute_elastic_config elasticity_enabled ensure_immutable_elastic_config",
        _ELASTIC,
    ),
    "autotuning": ("Autotuner", _TUNING),
    "compression": (
        "get_compression_config get_module_name init_compression redundancy_clean student_initialization",
        _COMPRESSION,
    ),
    "compression.compress": (
        "get_module_name init_compression redundancy_clean student_initialization",
        _COMPRESSION,
    ),
    "linear": ("LoRAConfig OptimizedLinear QuantizationConfig QuantizedParameter", "use PEFT for low-rank adapters"),
    "nvme": ("ds_io_main", _NVME),
    "io": ("FastFileWriter MockFileWriter PyFileWriter", _NVME),
    "ops.aio": ("aio_handle", _NVME),
    "ops.gds": ("gds_handle", _NVME),
    "ops.transformer": (
        "DeepSpeedInferenceConfig DeepSpeedTransformerConfig DeepSpeedTransformerInference DeepSpeedTransformerLayer",
        _KERNELS,
    ),
    "ops.transformer.inference": ("DeepSpeedMoEInference DeepSpeedTransformerInference", _KERNELS),
    "ops.sparse_attention": (
        "BSLongformerSparsityConfig BertSparseSelfAttention BigBirdSparsityConfig DenseSparsityConfig "
        "FixedSparsityConfig LocalSlidingWindowSparsityConfig LocalSparsityConfig MatMul Softmax SparseAttentionUtils "
        "SparseSelfAttention SparsityConfig VariableSparsityConfig",
        _SPARSE,
    ),
    "ops.deepspeed4science": ("DS4Sci_EvoformerAttention", "use torch's scaled_dot_product_attention with a bias"),
    "ops.fp_quantizer": ("FP_Quantize Quantizer", _QUANTISED),
    "ops.quantizer": ("ds_quantizer", _QUANTISED),
    "ops.random_ltd": ("", "there is no random layer-token drop"),
    "domino": ("", _TENSOR_PARALLEL),
    "runtime.domino": ("", _TENSOR_PARALLEL),
    "runtime.domino.transformer": ("DominoTransformer DominoTransformerLayer", _TENSOR_PARALLEL),
    "runtime.fp16.onebit": ("OnebitAdam OnebitLamb ZeroOneAdam", _ONEBIT),
    "runtime.fp16.onebit.adam": ("OnebitAdam", _ONEBIT),
    "runtime.fp16.onebit.lamb": ("OnebitLamb", _ONEBIT),
    "runtime.fp16.onebit.zoadam": ("ZeroOneAdam", _ONEBIT),
    "runtime.zero.mics": (
        "MiCS_Init MiCS_Optimizer",
        "there are no hierarchical shards; stage 3 shards over all ranks",
    ),
    "runtime.zero.tiling": (
        "TiledLinear TiledLinearReturnBias",
        "split the layer into several torch.nn.Linear, each of which is gathered by itself",
    ),
    "runtime.zero.linear": (
        "LinearFunctionForZeroStage3 LinearModuleForZeroStage3 zero3_linear_wrap",
        "torch.nn.Linear keeps no gathered weight here",
    ),
    "runtime.progressive_layer_drop": ("ProgressiveLayerDrop", "there is no progressive layer drop"),
    "runtime.eigenvalue": ("Eigenvalue", "there are no eigenvalues of blocks"),
    "runtime.data_pipeline.data_sampling.data_sampler": ("DeepSpeedDataSampler", "there is no curriculum of data"),
    "runtime.data_pipeline.curriculum_scheduler": ("CurriculumScheduler", "there is no curriculum of data"),
    "checkpoint.deepspeed_checkpoint": ("DeepSpeedCheckpoint", _UNIVERSAL),
    "checkpoint.ds_to_universal": ("main", _UNIVERSAL),
    "checkpoint.universal_checkpoint": ("enable_universal_checkpoint load_hp_checkpoint_state", _UNIVERSAL),
}
# Names with a module of their own that other modules have, too: module: ((names), the module of their reasons).
_AGAIN: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("PipelineModule", "pipe"),
        ("PipelineEngine", "runtime.pipe.engine"),
        ("DeepSpeedTransformerConfig DeepSpeedTransformerLayer", "ops.transformer"),
        ("replace_transformer_layer revert_transformer_layer", "module_inject"),
        ("set_autotp_mode tp_model_init", "runtime.tensor_parallel"),
    ),
    "zero": (("MiCS_Init", "runtime.zero.mics"), ("TiledLinear TiledLinearReturnBias", "runtime.zero.tiling")),
    "runtime.zero": (("MiCS_Init", "runtime.zero.mics"), ("TiledLinear TiledLinearReturnBias", "runtime.zero.tiling")),
}


def reason_of(module: str, name: str) -> str | None:
    """Return why ``name`` of ``module`` (below deepspeed) is refused; None: it is not."""
    names, reason = REFUSED.get(module, ("", ""))
    if name in names.split():
        return reason
    for more, home in _AGAIN.get(module, ()):
        if name in more.split():
            return REFUSED[home][1]
    return None


def name_of(package: str, name: str) -> Any:
    """Return a class that stands for ``name`` of ``package`` and refuses to be used; None where nothing is refused."""
    module = package.removeprefix(_OWN).removeprefix(".")
    reason = reason_of(module, name)
    return None if reason is None else refusal(f"deepspeed.{module}: {name}" if module else f"deepspeed.{name}", reason)


_made: dict[str, type] = {}


class _Refusing(type):
    """A class that raises when it is called or when it is asked for an attribute. isinstance() answers False."""

    zcomm_reason: str

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _raise(cls)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        _raise(cls)


def _raise(cls: Any) -> NoReturn:
    raise NotImplementedError(f"{cls.zcomm_name} is not available: {cls.zcomm_reason}")


def refusal(full_name: str, reason: str) -> type:
    """Return the class that raises NotImplementedError with ``full_name`` and ``reason`` when it is used.

    Programs may derive from it, and ask isinstance(): nothing is an instance.
    """
    if full_name not in _made:
        short = full_name.rpartition(" ")[2].rpartition(".")[2]
        _made[full_name] = _Refusing(
            short, (), {"zcomm_name": full_name, "zcomm_reason": reason, "__doc__": f"Refused: {reason}."}
        )
    return _made[full_name]


def function(full_name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError with ``full_name`` and ``reason``."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{full_name}() is not available: {reason}")

    refuse.__name__ = refuse.__qualname__ = full_name.rpartition(".")[2]
    vars(refuse)["zcomm_reason"] = reason
    return refuse


def modules() -> set[str]:
    """Return the modules of REFUSED, and the packages around them."""
    found: set[str] = set()
    for module in REFUSED:
        parts = module.split(".")
        found.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return found - {""}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of modules that REFUSED alone has. Files are found before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_OWN + ".") or fullname.removeprefix(_OWN + ".") not in modules():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from zcomm.compat.deepspeed.lazy import names_of

        module.__doc__ = "Names that are refused when used; see refused.py."
        vars(module)["__getattr__"] = names_of(module.__name__)


def install() -> None:
    """Let the import system find the modules of REFUSED, after all files. Idempotent."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
