"""Random layer-token drop: in training a layer sees a random part of the tokens, more of them from step to step.

The other tokens pass the layer unchanged. Kept tokens stay in order, so a causal mask remains causal.
Invariants: how many tokens a layer sees depends on the number of optimizer steps only. Which ones it sees depends on
the seed, the micro-step, the layer, and the place among ranks that read different samples. So ranks that divide a model
take the same tokens, recomputed blocks do, too, and a loaded checkpoint continues.
A layer that drops tokens has the names of its tensors in ``state_dict()`` as without.
Source: Yao et al., "Random-LTD: Random and Layerwise Token Dropping" (arXiv:2211.11586).
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zcomm.config.data_keys import RandomLtd

_PATH = "data_efficiency.data_routing.random_ltd"
_LAYER = "random_ltd_layer"
# Arguments of Hugging Face's layers with values for each token, and the dimension of the tokens.
_BY_TOKEN = {"position_ids": -1, "position_embeddings": -2, "cache_position": -1}


class RandomLTDScheduler:
    """Tokens of a layer by step, from ``min_value`` to ``max_value``, and a count of the tokens that layers have seen.

    config: a mapping with the keys of the section "random_ltd", and "global_batch_size" (samples of a step).
    seed, rank: of the choice of tokens; rank: among those that read different samples.
    """

    def __init__(self, config: Mapping[str, Any], seed: int = 1234, rank: int = 0) -> None:
        self.model_layer_num = config["total_layer_num"]
        self.random_ltd_layer_num = config["random_ltd_layer_num"]
        self.config_schedule = config["random_ltd_schedule"]
        self.global_batch_size = config["global_batch_size"]
        self._seed, self._rank, self._pass = seed, rank, 0
        self.state: dict[str, Any] = {}
        if (config.get("layer_token_lr_schedule") or {}).get("enabled"):
            raise NotImplementedError(
                f'"{_PATH}.layer_token_lr_schedule.enabled": true is refused: learning rates follow the section '
                '"scheduler"'
            )
        self.reset_to_init()

    def reset_to_init(self) -> None:
        """Return to the first step."""
        schedule = self.config_schedule
        for name in ("min_value", "max_value", "schedule_type"):
            self.state[name] = schedule[name]
        self.state["schedule_config"] = dict(schedule["schedule_config"])
        self.state |= {"current_value": schedule["min_value"], "consumed_layer_tokens": 0, "current_steps": -1}

    def get_value(self, global_steps: int) -> int:
        """Return the tokens of a step: linear, multiples of seq_per_step, never below ``min_value``."""
        low, high, schedule = self.state["min_value"], self.state["max_value"], self.state["schedule_config"]
        reached = math.floor(global_steps / schedule["require_steps"] * (high - low) + low)
        return int(max(low, min(reached - reached % schedule["seq_per_step"], high)))

    def update_seq(self, global_steps: int) -> None:
        """Begin step ``global_steps``, from 0; a second call for one step counts no tokens."""
        self.state["current_value"] = self.get_value(global_steps)
        self._pass = global_steps
        if global_steps != self.state["current_steps"]:
            others = self.model_layer_num - self.random_ltd_layer_num
            seen = self.state["current_value"] * self.random_ltd_layer_num + self.state["max_value"] * others
            self.state["consumed_layer_tokens"] += self.global_batch_size * seen
            self.state["current_steps"] = global_steps

    def begin(self, global_steps: int, micro_steps: int) -> None:
        """Begin a forward: set the tokens of the step, and the micro-step that chooses them."""
        self.update_seq(global_steps)
        self._pass = micro_steps

    def draw(self, layer: int, batch: int, length: int, kept: int) -> torch.Tensor:
        """Return the kept tokens of a layer, ascending: int64 [batch, kept], on the CPU."""
        words = repr((self._seed, self._pass, self._rank, layer)).encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        generator = torch.Generator().manual_seed(seed)
        return sample_tokens(kept, length, batch, generator)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Run the schedule for so many steps. Returns: tokens that all layers see in them."""
        for step in range(train_iters):
            self.update_seq(step)
        return int(self.state["consumed_layer_tokens"])

    def get_current_seq(self) -> int:
        """Return the tokens of the present step."""
        return int(self.state["current_value"])

    def set_current_seq(self, seq_length: int) -> None:
        """Set the tokens until the next step."""
        self.state["current_value"] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Return the number of layers that drop tokens."""
        return int(self.random_ltd_layer_num)

    def get_state(self) -> dict[str, Any]:
        """Return settings and counters."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a result of ``get_state``."""
        self.state = state

    def state_dict(self) -> dict[str, int]:
        """Return the values that a checkpoint keeps."""
        return {name: self.state[name] for name in LTD_STATE}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Take over a result of ``state_dict``. Values that the configuration sets remain."""
        for name in ("consumed_layer_tokens", "current_steps", "current_value"):
            self.state[name] = int(state_dict[name])


LTD_STATE = ("consumed_layer_tokens", "current_steps", "current_value", "min_value", "max_value")


class RandomLayerTokenDrop(nn.Module):
    """A layer that sees a random part of the tokens in training, once ``init_config`` has given it a schedule.

    The layer's first argument is [batch, tokens, width] or [tokens, batch, width]. It returns a tensor of that shape,
    or a tuple that begins with one. Attributes that this module lacks are the layer's.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.random_ltd_layer = layer
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        self.random_ltd_layer_id = -1
        self.mask_name: str | None = None
        self.batch_first = True
        self.register_load_state_dict_pre_hook(_into_layer)  # type: ignore[no-untyped-call]

    def init_config(self, config: Mapping[str, Any], scheduler: RandomLTDScheduler, random_ltd_layer_id: int) -> None:
        """Set the schedule. config: as of RandomLTDScheduler. random_ltd_layer_id: the layer's turn, from 0."""
        self.random_ltd_scheduler = scheduler
        self.random_ltd_layer_id = random_ltd_layer_id
        self.mask_name = config["model_mask_name"]
        self.batch_first = config["hidden_state_order"] == "batch_seq_dim"

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the tokens of this micro-step. args, kwargs: the layer's other arguments."""
        layer, scheduler = self.random_ltd_layer, self.random_ltd_scheduler
        order = (0, 1) if self.batch_first else (1, 0)
        if scheduler is None or not self.training or hidden_states.shape[order[1]] <= scheduler.get_current_seq():
            return layer(hidden_states, *args, **kwargs)
        batch, length = (hidden_states.shape[dim] for dim in order)
        kept = scheduler.draw(self.random_ltd_layer_id, batch, length, scheduler.get_current_seq())
        kept = kept.to(hidden_states.device)
        if args:
            names = list(inspect.signature(layer.forward).parameters)[1 : len(args) + 1]
            kwargs = dict(zip(names, args, strict=True)) | kwargs
        for name, dim in _BY_TOKEN.items():
            if kwargs.get(name) is not None:
                kwargs[name] = _cut(kwargs[name], dim, kept, length)
        if self.mask_name is not None:
            if self.mask_name not in kwargs:
                raise ValueError(
                    f'"{_PATH}.model_mask_name": {type(layer).__name__} was called without {self.mask_name}='
                )
            kwargs[self.mask_name] = cut_mask(kwargs[self.mask_name], kept, length)
        result = layer(gather_tokens(hidden_states, kept, self.batch_first), **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        if not isinstance(first, torch.Tensor):
            raise TypeError(
                f"{type(layer).__name__} returned {type(first).__name__}; random_ltd needs a tensor, or a tuple that "
                "begins with one"
            )
        whole = scatter_tokens(hidden_states, first, kept, self.batch_first)
        return (whole, *result[1:]) if isinstance(result, tuple) else whole

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = self.__dict__.get("_modules", {}).get(_LAYER)
            if layer is None:
                raise
            return getattr(layer, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's state dict, as if it were here itself."""
        return self.random_ltd_layer.state_dict(*args, **kwargs)


def _into_layer(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    meta: Any,
    strict: bool,
    missing: Any,
    extra: Any,
    errors: Any,
) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        if not name.startswith(f"{prefix}{_LAYER}."):
            state[f"{prefix}{_LAYER}.{name.removeprefix(prefix)}"] = state.pop(name)


def sample_tokens(kept: int, length: int, batch: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return ``kept`` of ``length`` tokens for each sample, all equally likely, ascending: int64 [batch, kept]."""
    return torch.rand(batch, length, generator=generator).argsort(dim=1)[:, :kept].sort(dim=1).values


def gather_tokens(hidden: torch.Tensor, kept: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Return the kept tokens. Differentiable. kept: [batch, tokens]."""
    index = (kept if batch_first else kept.t())[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1 if batch_first else 0, index)


def scatter_tokens(hidden: torch.Tensor, part: torch.Tensor, kept: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Return ``hidden`` with ``part`` in place of the kept tokens. Differentiable."""
    index = (kept if batch_first else kept.t())[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.scatter(1 if batch_first else 0, index, part.to(hidden.dtype))


def cut_mask(mask: Any, kept: torch.Tensor, length: int) -> Any:
    """Return an attention mask of the kept tokens. mask: None, [batch, tokens], [tokens, tokens],
    [..., tokens, tokens] or [..., 1, tokens]."""
    if mask is None:
        return None
    if mask.dim() == 2 and mask.shape[0] == length:
        if kept.shape[0] == length:
            raise ValueError(f"an attention mask {list(mask.shape)} of {length} samples: give it 4 dimensions")
        cut = _cut(_cut(mask[None], -1, kept, length), -2, kept, length)
        return cut[0] if bool((cut == cut[0]).all()) else cut[:, None]  # a causal mask is one for all samples
    if mask.dim() == 2:
        return _cut(mask, -1, kept, length)  # of padding
    return _cut(_cut(mask, -1, kept, length), -2, kept, length)


def _cut(value: Any, dim: int, kept: torch.Tensor, length: int) -> Any:
    """Return the kept tokens of dimension ``dim``. The first dimension is of samples, 1: of all alike."""
    if isinstance(value, tuple):
        return tuple(_cut(each, dim, kept, length) for each in value)
    if value.shape[dim] != length:  # broadcast
        return value
    while value.dim() + dim < 1:
        value = value[None]
    value = value.expand(kept.shape[0], *value.shape[1:])
    shape = [1] * value.dim()
    shape[0], shape[dim] = kept.shape
    wanted = list(value.shape)
    wanted[dim] = kept.shape[1]
    return value.gather(dim, kept.view(shape).expand(wanted))


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module] | tuple[type[nn.Module], ...]) -> Any:
    """Let the layers of class ``convert_type`` drop tokens, as the section "random_ltd" asks. Returns: ``model``.

    model: an engine, right after ``initialize``, on all ranks. Raises: ValueError without such layers, or if their
    numbers differ from the section's.
    """
    inside: nn.Module = getattr(model, "module", model)
    for parent in list(inside.modules()):
        if isinstance(parent, RandomLayerTokenDrop):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, convert_type) and not isinstance(child, RandomLayerTokenDrop):
                setattr(parent, name, RandomLayerTokenDrop(child).train(child.training))
    model.random_ltd_initialize()
    return model


def begin_dropping(module: nn.Module, config: RandomLtd, scheduler: RandomLTDScheduler) -> None:
    """Give the schedule to the layers that the section names. Raises: ValueError."""
    wanted, turn = set(config.random_ltd_layer_id or ()), 0
    found: list[int] = []
    values = vars(config)
    for name, layer in module.named_modules():
        if isinstance(layer, RandomLayerTokenDrop):
            digits = [int(part) for part in name.split(".") if part.isdigit()]
            found.append(digits[-1] if digits else len(found))
            if found[-1] in wanted:
                layer.init_config(values, scheduler, turn)
                turn += 1
    if turn != config.random_ltd_layer_num or len(wanted) != turn:
        raise ValueError(
            f'"{_PATH}": random_ltd_layer_num is {config.random_ltd_layer_num}, and random_ltd_layer_id has '
            f"{sorted(wanted)}, but the layers that were converted have the numbers {found}"
        )


def make_scheduler(config: RandomLtd, samples: int, seed: int, rank: int) -> RandomLTDScheduler:
    """Return the schedule of a section. samples: of a step. Raises: ValueError for a missing key."""
    schedule = config.random_ltd_schedule
    values: dict[str, Any] = vars(config) | {"global_batch_size": samples}
    values["random_ltd_schedule"] = vars(schedule) | {"schedule_config": vars(schedule.schedule_config)}
    for path, section in (
        ("", values),
        ("random_ltd_schedule.", values["random_ltd_schedule"]),
        ("random_ltd_schedule.schedule_config.", values["random_ltd_schedule"]["schedule_config"]),
    ):
        for name, value in section.items():
            if value is None and name not in ("model_mask_name", "layer_token_lr_schedule"):
                raise ValueError(f'"{_PATH}.{path}{name}" is missing')
    if schedule.min_value > schedule.max_value:  # type: ignore[operator]
        raise ValueError(f'"{_PATH}.random_ltd_schedule.min_value": {schedule.min_value} is above max_value')
    return RandomLTDScheduler(values, seed, rank)


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with names as without random_ltd."""
    return {name.replace(f".{_LAYER}", ""): value for name, value in state_dict.items()}


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """Return the state dict of ``model``, which has names as without random_ltd."""
    return remove_random_ltd_state_dict(getattr(model, "module", model).state_dict())


# --- DeepSpeed's operations -------------------------------------------------------------------------------------------


class GatherTokens:
    """DeepSpeed's name of ``gather_tokens``."""

    @staticmethod
    def apply(activations: torch.Tensor, sorted_indices: torch.Tensor, batch_first: bool) -> tuple[Any, torch.Tensor]:
        """Return ``activations``, and the tokens of ``sorted_indices`` [batch, tokens]."""
        return activations, gather_tokens(activations, sorted_indices.long(), batch_first)


class ScatterTokens:
    """DeepSpeed's name of ``scatter_tokens``."""

    @staticmethod
    def apply(
        all_activations: torch.Tensor, layer_activations: torch.Tensor, sorted_indices: torch.Tensor, batch_first: bool
    ) -> torch.Tensor:
        """Return ``all_activations`` with the layer's in place of the tokens of ``sorted_indices`` [batch, tokens]."""
        return scatter_tokens(all_activations, layer_activations, sorted_indices.long(), batch_first)


def gpt_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: torch.device | str = "cpu",
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens, int32 [layers, batch_size, reserved_length], at random, and a causal mask of them."""
    kept = sample_tokens(reserved_length, seq_length, layers * batch_size).view(layers, batch_size, reserved_length)
    mask = None if attn_mask is None else attn_mask[:, :, :reserved_length, :reserved_length]
    return kept.to(device, torch.int32), mask


def bert_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: torch.device | str = "cpu",
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[Any]]:
    """Return tokens as ``gpt_sample_tokens``, and for each layer the mask of its tokens."""
    kept, _ = gpt_sample_tokens(reserved_length, seq_length, batch_size, layers, device)
    return kept, [cut_mask(attn_mask, each.long(), seq_length) for each in kept]
