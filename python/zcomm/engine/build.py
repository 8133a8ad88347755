"""initialize: DeepSpeed's entry point, and how its arguments become a ZeroOptimizer, a Loader and an Engine.

If two sources can set a value (optimizer, schedule, batch), one function in this module decides between them.
Functions import the core, so that the engine can be imported without a built core.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm import schedulers
from zcomm.config import BatchSizes, Config, ConfigWarning, load_with_notes, resolve_batch, warn_of
from zcomm.config.optimizer_keys import ADAM_SWITCHES, OPTIMIZER_PARAMS, SCHEDULER_PARAMS, OptimizerParams
from zcomm.config.source import Source
from zcomm.data import Loader
from zcomm.engine.auto import auto_values, epochs_of, with_steps
from zcomm.engine.autocast import autocast_dtype
from zcomm.engine.compressed import schedule_of
from zcomm.engine.data_ranks import DataRanks, data_ranks, size_of
from zcomm.engine.data_sampling.loader import curriculum_loader
from zcomm.engine.eigenvalue import make_eigenvalue
from zcomm.engine.engine import Engine
from zcomm.engine.experts import with_experts
from zcomm.engine.hybrid import HybridEngine, check_hybrid
from zcomm.engine.pipeline_module import PipelineModule
from zcomm.engine.raw_config import raw_config
from zcomm.engine.tensors import with_parts
from zcomm.engine.token_drop import make_scheduler
from zcomm.engine.tuning_probe import is_probe, write_info
from zcomm.engine.words import speaks_of_the_engine

if TYPE_CHECKING:
    from zcomm.comm.codec import Compression
    from zcomm.comm.communicator import Communicator
    from zcomm.zero import ZeroOptimizer
    from zcomm.zero.options import Tier

ParamGroups = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
OptimizerArgument = str | type[torch.optim.Optimizer] | torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerArgument | None = None,
    model_parameters: ParamGroups | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Source | Config | None = None,
    mesh_param: Any = None,
    config_params: Source | Config | None = None,
    *,
    device: torch.device | str | None = None,
    mesh: Any = None,
) -> tuple[Engine, ZeroOptimizer | None, Loader | None, Any]:
    """Join the job and wrap ``model`` for sharded training; the names and their order are DeepSpeed's.

    args: a namespace. Its ``deepspeed_config`` may name the configuration instead of ``config``; its attributes (as in
    Hugging Face's TrainingArguments) are the values of "auto"; see docs/config.md.
    optimizer: None (the configuration's, if any), a torch.optim instance or class, a callable of the parameters, or a
    name.
    model_parameters: the parameters, or groups of them, to train; None: all of the model that need gradients.
    training_data: a data set, from which a Loader yields micro batches on the CPU.
    lr_scheduler: None (the configuration's), a schedule, or a callable of the optimizer.
    config, config_params: a dict, a path of a JSON or hjson file, such text, base64 of it, or a Config.
    distributed_port: the rendezvous port if MASTER_ADDR is set and MASTER_PORT is not.
    dist_init_required: False means that ``zcomm.init()`` or ``torch.distributed.init_process_group()`` must have run.
    device: on which the model trains, as ZeroOptimizer's; None: the device of its parameters.
    mesh: a ProcessMesh, or torch's DeviceMesh, of all ranks. mesh_param: a pair (data_parallel_size,
    sequence_parallel_size). mpu: Megatron's or DeepSpeed's object with groups of ranks. At most one of the three, the
    same on all ranks. Ranks along "sequence" read parts of the same samples; see docs/clusters.md.
    Returns: (engine, optimizer, loader or None, scheduler or None). The optimizer is None if none is given, or if the
    model is frozen: nothing is trained. Stage 3 then still shards and offloads the weights; ``backward()`` and
    ``step()`` raise.
    Raises: ValueError (arguments, configuration), NotImplementedError (axes of other forms, refused keys).
    """
    if model is None:
        raise ValueError("initialize() needs model=")
    if isinstance(model, Engine):
        raise ValueError("initialize() was given an Engine as model; give it the plain module")
    # Before joining: a typing error should not wait for other ranks.
    parameters = None if model_parameters is None else _materialized(model_parameters)
    source = _config_source(args, config, config_params)
    values, epochs = auto_values(args, model, optimizer, source), epochs_of(args)
    if epochs is not None and hasattr(training_data, "__len__"):  # checked now, counted when the ranks are known
        values |= {"scheduler.params.total_num_steps": 1}
    settings, notes = load_with_notes(source, values)
    check_hybrid(model, settings)
    from zcomm.comm import job
    from zcomm.zero.materialize.init import end_init

    end_init()
    check_join(distributed_port, dist_init_required)
    comm = job.init()
    if comm.rank == 0:
        warn_of(notes)
    kind: type[Engine] = HybridEngine if settings.hybrid_engine.enabled else Engine
    if isinstance(model, PipelineModule):
        from zcomm.engine.pipeline_engine import PipelineEngine, check_pipeline

        for name in ("curriculum_learning", "progressive_layer_drop", "data_efficiency", "eigenvalue"):
            if getattr(settings, name).enabled:
                raise NotImplementedError(
                    f'"{name}" belongs to an engine with one forward and backward; a PipelineModule has them in parts'
                )
        if settings.hybrid_engine.enabled:
            raise NotImplementedError('"hybrid_engine": the stages of a PipelineModule do not generate')
        trains = optimizer is not None or settings.optimizer is not None
        kind, mesh = PipelineEngine, check_pipeline(model, settings, mesh, mesh_param, trains)
        mpu = None  # of the module's own topology
    compression = schedule_of(model, settings, warn=comm.rank == 0)
    ranks = data_ranks(comm, settings, mesh, mesh_param, mpu)
    ranks = with_parts(model, settings, comm, ranks, optimizer, parameters)
    ranks = with_experts(model, settings, comm, ranks)
    batch = resolve_batch(settings, ranks.size, name=ranks.name)
    if is_probe(settings):
        write_info(settings, model, comm, device)
    if settings.eigenvalue.enabled:
        make_eigenvalue(settings, ranks).get_layers(model)
    if settings.data_efficiency.data_routing.random_ltd.enabled:  # its errors come before memory is allocated
        make_scheduler(settings.data_efficiency.data_routing.random_ltd, batch.train, 0, 0)
    base, arguments = _base_optimizer(optimizer, model, parameters, settings, comm.rank == 0)
    loader: Loader | None = None
    if training_data is not None and settings.data_efficiency.data_sampling.curriculum_learning.enabled:
        loader = curriculum_loader(training_data, settings, batch, ranks, comm, collate_fn)
    elif training_data is not None:
        loader = Loader(
            training_data,
            batch.micro,
            rank=ranks.rank,
            world_size=ranks.size,
            drop_last=settings.dataloader_drop_last,
            collate_fn=collate_fn,
        )
    if loader is not None and epochs is not None and hasattr(training_data, "__len__"):
        values = with_steps(values, args, epochs, len(loader), batch.accumulation)
        settings, _ = load_with_notes(source, values)
    if lr_scheduler is not None and settings.scheduler is not None and comm.rank == 0:
        warnings.warn(
            'the section "scheduler" of the configuration is not used: initialize(lr_scheduler=) was given',
            ConfigWarning,
            stacklevel=2,
        )
    from zcomm.zero.registry import parts_of

    if base is None and lr_scheduler is not None:
        raise ValueError(f"lr_scheduler= needs an optimizer, but {_UNTRAINED}")
    zero = _zero_optimizer(model, base, arguments, settings, batch, comm, ranks, device)
    _set_gradient_options(zero, settings, comm, ranks)
    try:
        scheduler = None if base is None else _scheduler(lr_scheduler, zero, settings)
    except BaseException:
        zero.close()  # its hooks and swap files would outlive the error
        raise
    engine = kind(
        model,
        zero,
        comm=comm,
        config=settings,
        batch=batch,
        ranks=ranks,
        device=parts_of(zero).device,
        lr_scheduler=scheduler,
        training_dataloader=loader,
        raw=raw_config(source, settings),
        trained=base is not None,
        compression=compression,
    )
    if optimizer is not None:
        engine.client_optimizer = zero.optimizer
    if settings.comms_logger.enabled:
        engine._reports.log_collectives(zero, settings.comms_logger)
    return engine, engine.optimizer, loader, scheduler


def _config_source(args: Any, config: Any, config_params: Any) -> Source | Config:
    named: dict[str, Source | Config | None] = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) != 1:
        found = "none of them" if not given else " and ".join(given)
        raise ValueError(f"initialize() needs the configuration once, by {', '.join(named)}; it was given {found}")
    return next(iter(given.values()))


def check_join(distributed_port: int | None, dist_init_required: bool | None) -> None:
    """Set DeepSpeed's port if MASTER_PORT is missing. Raises: ValueError if ranks should have joined and have not."""
    from zcomm.comm import job

    if dist_init_required is False and not (job.is_initialized() or torch.distributed.is_initialized()):
        raise ValueError(
            "dist_init_required=False, but zcomm.init() has not been called, nor has "
            "torch.distributed.init_process_group()"
        )
    if distributed_port is not None and "MASTER_ADDR" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))


def _base_optimizer(
    optimizer: OptimizerArgument | None, model: nn.Module, parameters: list[Any] | None, settings: Config, warn: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer to shard (a name, class or instance), and the arguments of a name or class."""
    section = settings.optimizer
    if optimizer is None:
        if section is None:
            return None, {}
        if not any(param.requires_grad for param in _listed(model.parameters() if parameters is None else parameters)):
            if warn:
                text = f'the section "optimizer" of the configuration is not used: {_UNTRAINED}'
                warnings.warn(text, ConfigWarning, stacklevel=4)
            return None, {}
        if section.type == "Muon":
            return _muon(model, parameters, section.params), {}
        name, arguments = _configured_optimizer(settings)
        if parameters is None or _are_all_trainable(model, parameters):
            return name, arguments
        return _torch_class(name, "state_dtype" in arguments)(parameters, **arguments), {}
    if settings.bf16.bf16_optimizer_states:
        raise NotImplementedError(
            '"bf16.bf16_optimizer_states": true is for the optimizer of the configuration, and initialize(optimizer=) '
            "was given; give it as zcomm.optim.CPUAdam(..., state_dtype=torch.bfloat16)"
        )
    if section is not None and warn:
        warnings.warn(
            'the section "optimizer" of the configuration is not used: initialize(optimizer=) was given',
            ConfigWarning,
            stacklevel=4,
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        from zcomm.zero import ZeroOptimizer

        if isinstance(optimizer, ZeroOptimizer):
            raise ValueError("initialize(optimizer=) takes the plain optimizer; it makes the ZeroOptimizer itself")
        return optimizer, {}
    if isinstance(optimizer, str):
        if parameters is None:
            return optimizer, {}
        return _torch_class(optimizer)(parameters), {}
    if isinstance(optimizer, type) and parameters is None:
        return optimizer, {}
    if not callable(optimizer):
        raise ValueError(f"optimizer= must be a name, a class, an instance or a callable, got {optimizer!r}")
    make: Callable[[Any], object] = optimizer
    made = make([p for p in model.parameters() if p.requires_grad] if parameters is None else parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer= was called and returned {type(made).__name__}, not a torch.optim.Optimizer")
    return made, {}


_UNTRAINED = (
    'nothing is trained: there is neither initialize(optimizer=) nor a section "optimizer", or no parameter requires a '
    "gradient"
)


def _materialized(given: ParamGroups) -> list[Any]:
    """Return the parameters or param groups as lists, because an iterator can be read only once.

    Raises: ValueError for an element that is neither.
    """
    found: list[Any] = []
    for number, each in enumerate(given):
        if isinstance(each, Mapping) and "params" in each:
            params = each["params"]
            found.append({**each, "params": [params] if isinstance(params, torch.Tensor) else list(params)})
        elif isinstance(each, torch.Tensor):
            found.append(each)
        else:
            raise ValueError(
                f"model_parameters: element {number} is a {type(each).__name__}; give parameters (not "
                'named_parameters()), or a list of param groups, dicts with "params"'
            )
    if len({isinstance(each, torch.Tensor) for each in found}) > 1:
        raise ValueError("model_parameters holds both param groups and parameters; give one or the other")
    return found


def _listed(given: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors of parameters or param groups."""
    for each in given:
        yield from [each] if isinstance(each, torch.Tensor) else each["params"]


def _are_all_trainable(model: nn.Module, parameters: list[Any]) -> bool:
    """Return True if ``parameters`` are all that need gradients, as without ``model_parameters``: one group will do."""
    wanted = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    given = {id(item) for item in parameters if not isinstance(item, torch.Tensor) or item.requires_grad}
    return given == wanted


def _torch_class(name: str, has_small_state: bool = False) -> Callable[..., torch.optim.Optimizer]:
    """Return the class behind an optimizer's name, for groups of parameters. Raises: ValueError."""
    from zcomm.optim import CPUAdam, CPULion, Lamb, Muon, OnebitAdam, OnebitLamb, ZeroOneAdam
    from zcomm.zero.rules.torch_rule import ELEMENTWISE

    if has_small_state:  # torch's own has fp32 moments
        return partial(CPUAdam, adamw=name == "adamw")
    known: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "lion": CPULion,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "lamb": Lamb,
        "muon": Muon,
        "onebit_adam": OnebitAdam,
        "zero_one_adam": ZeroOneAdam,
        "onebit_lamb": OnebitLamb,
    }
    known |= ELEMENTWISE
    if name not in known:
        raise ValueError(
            f"optimizer={name!r} with model_parameters= must be one of {', '.join(known)}; "
            "or give a torch.optim instance over these parameters"
        )
    return known[name]


_ONE_BIT = {"OneBitAdam": "onebit_adam", "ZeroOneAdam": "zero_one_adam", "OneBitLamb": "onebit_lamb"}


def _configured_optimizer(settings: Config) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments that the section ``optimizer`` asks for.

    In DeepSpeed Adam means AdamW unless ``adam_w_mode`` is false.
    """
    assert settings.optimizer is not None
    kind, params = settings.optimizer.type, settings.optimizer.params
    names = [name for name in OPTIMIZER_PARAMS[kind] if hasattr(params, name) and name not in ADAM_SWITCHES]
    arguments = {name: getattr(params, name) for name in names if getattr(params, name) is not None}
    if kind == "Lion":  # DeepSpeed's defaults, which are not the paper's
        arguments = {"lr": 1e-3, "betas": (0.9, 0.999), **arguments}
    if kind in _ONE_BIT:
        return _ONE_BIT[kind], arguments
    if kind not in ("Adam", "AdamW"):
        return kind.lower(), arguments
    decoupled = kind == "AdamW" or params.adam_w_mode
    arguments.setdefault("weight_decay", 0.01 if params.torch_adam and decoupled else 0.0)
    if settings.bf16.bf16_optimizer_states or not params.fp32_optimizer_states:
        arguments["state_dtype"] = torch.bfloat16
    return ("adamw" if decoupled else "adam"), arguments


def _muon(model: nn.Module, parameters: list[Any] | None, params: OptimizerParams) -> torch.optim.Optimizer:
    """Return DeepSpeed's Muon: AdamW updates the parameters with a false attribute ``use_muon``.

    Without the attribute Muon updates parameters of two or more dimensions without "embed" or "lm_head" in the name.
    A param group with options becomes two if it has parameters of both kinds. Its options come before the section's.
    Raises: ValueError for a parameter of Muon that is not a matrix.
    """
    from zcomm.optim import Muon

    names = {id(param): name for name, param in model.named_parameters()}
    given = list(model.parameters()) if parameters is None else parameters
    groups: list[dict[str, Any]] = []
    for own in _with_options(given):
        kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for param in own["params"]:
            if param.requires_grad:
                kinds[_takes_muon(param, names.get(id(param), ""), own)].append(param)
        for muon, listed in kinds.items():
            if listed:
                groups.append({**_muon_options(muon, params), **own, "params": listed, "use_muon": muon})
    return Muon(groups)


def _with_options(given: list[Any]) -> list[dict[str, Any]]:
    """Return parameters, or param groups, as groups; parameters without options form one group."""
    plain = [isinstance(each, torch.Tensor) or each.keys() == {"params"} for each in given]
    joined = _listed(each for each, is_plain in zip(given, plain, strict=True) if is_plain)
    return [*(each for each, is_plain in zip(given, plain, strict=True) if not is_plain), {"params": list(joined)}]


def _takes_muon(param: torch.Tensor, name: str, group: Mapping[str, Any]) -> bool:
    named = any(word in name.lower() for word in ("embed", "lm_head"))
    muon = bool(getattr(param, "use_muon", group.get("use_muon", param.dim() >= 2 and not named)))
    if muon and param.dim() != 2:
        raise ValueError(
            f'"optimizer.type": "Muon": parameter {name} of shape {tuple(param.shape)}: Muon updates only '
            "matrices, of 2 dimensions; set its attribute use_muon = False, so that AdamW updates it"
        )
    return muon


def _muon_options(muon: bool, params: OptimizerParams) -> dict[str, Any]:
    """Return the options that the section gives to matrices, or to the parameters of AdamW."""
    rates = (params.muon_lr, params.lr, 0.02) if muon else (params.adam_lr, params.lr, 3e-4)
    options: dict[str, Any] = {
        "name": "muon-params" if muon else "adam-params",
        "lr": next(rate for rate in rates if rate is not None),
        "weight_decay": 0.0 if params.weight_decay is None else params.weight_decay,
    }
    if muon:
        return options | {
            "momentum": 0.95 if params.momentum is None else params.momentum,
            "ns_method": params.ns_method,
        }
    return options | {"betas": params.betas or (0.9, 0.95), "eps": 1e-10 if params.eps is None else params.eps}


def _loss_scale(settings: Config) -> Any:
    """Return a fixed scale, or DeepSpeed's dynamic one."""
    from zcomm.zero import LossScale

    fp16 = settings.fp16
    if fp16.loss_scale:
        return fp16.loss_scale
    return LossScale(
        fp16.initial_scale_power,
        fp16.loss_scale_window,
        fp16.hysteresis,
        fp16.min_loss_scale,
        fp16.consecutive_hysteresis,
        raise_at_minimum=True,
    )


def _compression(settings: Config, ranks: DataRanks) -> Compression | None:
    """Return the codecs that DeepSpeed's keys of ZeRO++ ask for; None: no key does."""
    from zcomm.comm.codec import Compression

    zero, mesh = settings.zero_optimization, ranks.zero_mesh
    if not (zero.zero_quantized_weights or zero.zero_quantized_gradients):
        return None
    loco = zero.zeropp_loco_param
    copies = mesh is not None and size_of(mesh, "replicate") > 1
    inner = zero.zero_quantized_weights and copies and not ranks.hpz  # with hpZ weights are in memory that ranks share
    return Compression(
        weights="int8" if zero.zero_quantized_weights else None,
        gradients="int4" if zero.zero_quantized_gradients else None,
        keep=0.0 if loco is None else loco.err_beta,
        reset_steps=None if loco is None else loco.reset_T,
        hops="all" if inner else "across",  # weights are gathered in a shard group only
    )


@speaks_of_the_engine
def _zero_optimizer(
    model: nn.Module,
    base: Any,
    arguments: dict[str, Any],
    settings: Config,
    batch: BatchSizes,
    comm: Communicator,
    ranks: DataRanks,
    device: torch.device | str | None,
) -> ZeroOptimizer:
    from zcomm.zero import Offload, Units, ZeroOptimizer

    zero = settings.zero_optimization
    state, params = zero.offload_optimizer, zero.offload_param
    if state.device != "none" or params.device != "none":
        tiers: dict[str, Tier | None] = {"none": None, "cpu": "cpu", "nvme": "nvme"}
        arguments["offload"] = Offload(tiers[state.device], tiers[params.device], state.ratio)
        paths = [tier.nvme_path for tier in (state, params) if tier.device == "nvme"]
        arguments["nvme_path"] = paths[0] if paths else None
    itemsize = 2 if settings.bf16.enabled or settings.fp16.enabled else 4
    if zero.reduce_bucket_size is not None:
        arguments["bucket_mb"] = zero.reduce_bucket_size * itemsize / 2**20
    ahead = zero.stage3_prefetch_bucket_size
    leaves = [module for module in model.modules() if vars(module).get("_z3_leaf")]  # set_z3_leaf_modules()
    arguments["units"] = Units(prefetch_bytes=None if ahead is None else ahead * itemsize, leaf=leaves)
    if settings.sparse_gradients:
        from zcomm.sparse_gradients import SparseGradients

        arguments["sparse_gradients"] = SparseGradients(model)
    if settings.bf16.enabled:
        arguments["skip_nonfinite"] = settings.bf16.check_grad_overflow
    if settings.fp16.enabled:
        arguments["loss_scale"] = _loss_scale(settings)
    return ZeroOptimizer(
        model,
        base,
        stage=zero.stage,
        precision="bf16" if settings.bf16.enabled else "fp16" if settings.fp16.enabled else "fp32",
        clip_norm=settings.gradient_clipping or None,
        grad_accum=batch.accumulation,
        overlap=zero.overlap_comm is not False,
        communication_dtype=settings.communication_data_type,
        buffer_dtype=settings.data_types.buffer_dtype,
        comm=comm,
        mesh=ranks.zero_mesh,
        hpz=ranks.hpz,
        compression=_compression(settings, ranks),
        device=device,
        **arguments,
    )


def _set_gradient_options(zero: ZeroOptimizer, settings: Config, comm: Communicator, ranks: DataRanks) -> None:
    """Set options without an argument of ZeroOptimizer: the sum of gradients, and the loss scale of autocast in fp16.

    Raises: ValueError, on every rank, if the ranks' settings differ.
    """
    from zcomm.zero.agree import all_values
    from zcomm.zero.loss_scale import LossScaler
    from zcomm.zero.registry import train_of

    cast = autocast_dtype(settings)
    asked = {
        "gradient_allreduce_op": settings.gradient_allreduce_op,
        "torch_autocast.dtype": str(cast),
        "compression_training": repr(settings.compression_training.enabled()),
    }
    every = all_values(comm, list(asked.values()), "gradient_allreduce_op, torch_autocast, compression_training")
    for name, values in zip(asked, zip(*every, strict=True), strict=True):
        if len(set(values)) > 1:
            zero.close()
            raise ValueError(f'the ranks\' "{name}" differ: {", ".join(dict.fromkeys(values))}')
    train = train_of(zero)
    # With a mesh the optimizer divides by the data ranks, else by all ranks.
    divided_by = comm.world_size if ranks.zero_mesh is None else ranks.size
    wanted = ranks.size * (ranks.sequence if ranks.averages_sequences else 1)
    train.summed_ranks = divided_by / (1 if settings.gradient_allreduce_op == "sum" else wanted)
    if cast == torch.float16 and not train.scaler.scales:  # small gradients of fp16 operations would become zero
        train.scaler = LossScaler(_loss_scale(settings))
        train.skip_nonfinite = True
        train.pass_scale = train.loss_scale


def _scheduler(given: Any, zero: ZeroOptimizer, settings: Config) -> Any:
    """Return the schedule over ``zero``: the given one, or the configuration's, or None."""
    from zcomm.zero.registry import train_of

    if given is None:
        if settings.scheduler is None:
            return None
        kind, params = settings.scheduler.type, settings.scheduler.params
        values = {name: getattr(params, name) for name in SCHEDULER_PARAMS[kind]}
        given_values = {name: value for name, value in values.items() if value is not None}
        if params.last_batch_iteration == -1:
            del given_values["last_batch_iteration"]
        return getattr(schedulers, kind)(zero, **given_values)
    if isinstance(given, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "lr_scheduler= is ReduceLROnPlateau, which needs a metric; step it yourself, outside the engine"
        )
    if hasattr(given, "step"):
        owner = getattr(given, "optimizer", None)
        if owner is not None and owner is not zero and not train_of(zero).tied.tie(zero.param_groups, owner):
            raise ValueError("lr_scheduler= belongs to another optimizer than optimizer=; pass a callable instead")
        return given
    if not callable(given):
        raise ValueError(f"lr_scheduler= must be a schedule or a callable of the optimizer, got {given!r}")
    return given(zero)
