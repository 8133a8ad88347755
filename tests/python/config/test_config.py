"""The configuration: each error message, the batch arithmetic, and the documentation's table."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from places import DOCS
from zcomm.config import BatchSizes, Config, load, resolve_batch
from zcomm.config.docs import PAGES, markdown_table, rows, write_tables
from zcomm.config.keys import Status

NVME = {"device": "nvme", "nvme_path": "/mnt/swap"}


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
    ({"bf16": {"xyz": 1}}, 'unknown key "bf16.xyz"; known here: enabled, check_grad_overflow'),
    ({"bf16": True}, '"bf16" must be an object {...}, got true'),
    ({"zero_optimization": [2]}, '"zero_optimization" must be an object {...}, got [2]'),
    ({"train_batch_size": "8"}, '"train_batch_size" must be a whole number, got "8"'),
    ({"train_batch_size": 8.5}, '"train_batch_size" must be a whole number, got 8.5'),
    ({"train_batch_size": True}, '"train_batch_size" must be a whole number, got true'),
    ({"train_batch_size": float("nan")}, '"train_batch_size" must be a whole number, got NaN'),
    ({"train_batch_size": 0}, '"train_batch_size" must be >= 1, got 0'),
    ({"zero_optimization": {"stage": "auto"}}, '"zero_optimization.stage": "auto" has no meaning here; give a value'),
    ({"optimizer": {"type": "auto"}}, '"optimizer.type": "auto" has no meaning here'),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
        '"scheduler.type": "WarmupDecayLR" needs "scheduler.params.total_num_steps"',
    ),
    ({"train_micro_batch_size_per_gpu": -1}, '"train_micro_batch_size_per_gpu" must be >= 1, got -1'),
    ({"gradient_accumulation_steps": 0}, '"gradient_accumulation_steps" must be >= 1, got 0'),
    ({"gradient_clipping": -1}, '"gradient_clipping" must be >= 0, got -1'),
    ({"gradient_clipping": float("inf")}, '"gradient_clipping" must be >= 0, got Infinity'),
    ({"steps_per_print": 0}, '"steps_per_print" must be >= 1, got 0'),
    ({"wall_clock_breakdown": 2}, '"wall_clock_breakdown" must be true or false, got 2'),
    ({"bf16": {"enabled": "true"}}, '"bf16.enabled" must be true or false, got "true"'),
    ({"optimizer": {"params": {}}}, '"optimizer.type" is missing; give one of: Adam, AdamW, Lion, SGD, Adagrad'),
    (
        {"optimizer": {"type": "Shampoo"}},
        '"optimizer.type" must be one of Adam, AdamW, Lion, SGD, Adagrad, Lamb, OneBitAdam, ZeroOneAdam, '
        'OneBitLamb, Muon, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop, got "Shampoo"',
    ),
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
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}},
        '"scheduler.params.warmup_num_steps" must be >= 0, got -1',
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
        {"zero_optimization": {"stage": 3, "offload_optimizer": NVME, "offload_param": {**NVME, "nvme_path": "/b"}}},
        '"/mnt/swap" and "zero_optimization.offload_param.nvme_path": "/b" differ',
    ),
    (
        {"zero_optimization": {"zeropp_loco_param": {}}},
        '"zero_optimization.zeropp_loco_param" is of quantised gradients: it needs "zero_optimization.zero_quantized_',
    ),
    (
        {"zero_optimization": {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 1}}},
        '"zero_optimization.zeropp_loco_param.err_beta" must be >= 0 and < 1, got 1',
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
        ('{"train_batch_size": 8, [}', "ds.json: not valid JSON at line 1 column"),
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


@pytest.mark.parametrize("page", PAGES)
def test_documented_tables_are_the_schema(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for status in PAGES[page]:
        assert markdown_table(status) in text, "run: python -m zcomm.config --write docs"


def test_every_key_is_in_one_table() -> None:
    assert sorted(status.name for statuses in PAGES.values() for status in statuses) == sorted(s.name for s in Status)
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    assert [path for path in rows() if text.count(f"\n| `{path}` |") != 1] == []


def test_documented_example_is_a_valid_config() -> None:
    text = (DOCS / "config.md").read_text(encoding="utf-8").split("```json\n")[1].split("```")[0]
    assert resolve_batch(load(text), 2) == BatchSizes(32, 4, 4)


def test_write_tables_replaces_only_the_tables(tmp_path: Path) -> None:
    fresh = {
        name: "before\n" + "".join(f"{markdown_table(status)}\nafter\n" for status in statuses)
        for name, statuses in PAGES.items()
    }
    for name, text in fresh.items():
        (tmp_path / name).write_text(text.replace("`zero_optimization.", "`stale."))
    write_tables(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in PAGES} == fresh
    (tmp_path / "config.md").write_text("no markers")
    with pytest.raises(ValueError, match="must be there"):
        write_tables(tmp_path)


def test_a_key_without_effect_has_a_reason() -> None:
    assert all(key.reason for key in rows().values() if key.status is not Status.HONOURED)


def test_reading_a_config_needs_neither_torch_nor_the_core() -> None:
    code = "import sys, zcomm.config; assert not {'torch', 'zcomm._core'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_section_that_is_switched_off_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load(
            {
                "data_efficiency": {
                    "seed": 1234,
                    "data_sampling": {"enabled": False, "num_epochs": 1000, "curriculum_learning": {"enabled": False}},
                    "data_routing": {
                        "enabled": False,
                        "random_ltd": {"enabled": False},
                    },
                },
                "amp": {"enabled": "auto", "opt_level": "auto"},
                "autotuning": {"fast": True},
                "elasticity": None,
            }
        )
        config = dataclasses.replace(config, wandb=load({"wandb": {"group": "y"}}).wandb)
    assert not config.wandb.enabled and dataclasses.replace(config, wandb=Config().wandb) == load({})
    with pytest.raises(ValueError, match='"wandb" must be an object'):
        load({"wandb": True})
