"""Run by DeepSpeed's own Python: prints the configuration keys that it reads, with their defaults, as JSON.

Sections that are pydantic models list their fields; the other keys are the lookups of its configuration.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

FOREIGN = ("zenflow", "leaf_module")  # sections that zcomm accepts as a whole


class Recorder(dict[str, Any]):
    """A section that records the requested keys, as do its subsections."""

    def __init__(self, path: str, seen: dict[str, Any], **data: Any) -> None:
        super().__init__(data)
        self.path, self.seen = path, seen

    def _saw(self, key: Any, default: Any = None) -> None:
        if isinstance(key, str):
            self.seen.setdefault(self.path + key, default)

    def __contains__(self, key: object) -> bool:
        self._saw(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._saw(key, default)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._saw(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self


def fields(model: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    import pydantic

    for name, field in model.model_fields.items():
        parts = typing.get_args(field.annotation) or (field.annotation,)
        nested = [part for part in parts if isinstance(part, type) and issubclass(part, pydantic.BaseModel)]
        if nested and name not in FOREIGN:
            yield from fields(nested[0], f"{prefix}{name}.")
        else:
            default = field.default
            yield (
                prefix + (field.alias or name),
                int(default) if isinstance(default, int) and type(default) is not bool else default,
            )


def main() -> None:
    import dataclasses

    from deepspeed.compile.config import CompileConfig
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.monitor import config as monitors
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    seen: dict[str, Any] = {}
    sections = {
        name: Recorder(f"{name}.", seen) for name in ("checkpoint", "data_types", "activation_checkpointing", "aio")
    }
    sections["optimizer"] = Recorder("optimizer.", seen, type="Adam")
    DeepSpeedConfig(Recorder("", seen, train_batch_size=1, **sections))
    models = {"zero_optimization": DeepSpeedZeroConfig, "compile": CompileConfig}
    models |= {"bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    models |= {"tensorboard": monitors.TensorBoardConfig, "wandb": monitors.WandbConfig}
    models |= {"csv_monitor": monitors.CSVConfig, "comet": monitors.CometConfig}
    for name, model in models.items():
        seen.update(fields(model, f"{name}."))
    aliases = ("tp_size", "mpu", "tp_grain_size", "tp_group")  # of the group, which zcomm takes as initialize(mesh=)
    for key, value in fields(TPTrainingConfig, "tensor_parallel."):
        if not key.endswith(aliases):
            seen[key.replace("kernel_inject", "replace_with_kernel_inject")] = value
    for field in dataclasses.fields(AutoEPConfig):
        if not field.name.startswith("_"):
            seen[f"expert_parallel.{field.name}"] = field.default
    plain = {key: value for key, value in seen.items() if isinstance(value, (bool, int, float, str, type(None)))}
    print("KEYS " + json.dumps({key: plain.get(key) for key in sorted(seen)}))


if __name__ == "__main__":
    main()
