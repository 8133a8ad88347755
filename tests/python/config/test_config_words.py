"""Configurations as users write them: old words, dotted keys, fractions, 0 and 1, hjson, base64."""

from __future__ import annotations

import base64
import enum
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from zcomm.config import Config, load, load_with_notes, raw
from zcomm.config.words import OTHER_WORDS

CPU = {"device": "cpu"}


class Tier(str, enum.Enum):
    """A word as a member of an enum, like DeepSpeed's OffloadDeviceEnum."""

    host = "cpu"


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


SAME = [  # an older spelling, today's spelling
    ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    ({"bfloat16": {"enabled": True}, "bf16": None}, {"bf16": {"enabled": True}}),
    ({"bf16": {"enabled": 1}}, {"bf16": {"enabled": True}}),
    ({"wall_clock_breakdown": 1, "dataloader_drop_last": 0}, {"wall_clock_breakdown": True}),
    (zero(stage=1, cpu_offload=True), zero(stage=1, offload_optimizer=CPU)),
    (zero(stage=1, cpu_offload=1), zero(stage=1, offload_optimizer=CPU)),
    (zero(stage=1, cpu_offload=True, offload_optimizer=CPU), zero(stage=1, offload_optimizer=CPU)),
    (zero(stage=1, offload_optimizer={"device": Tier.host}), zero(stage=1, offload_optimizer=CPU)),
    (zero(stage=1, cpu_offload=False, offload_optimizer=None), zero(stage=1)),
    (zero(stage=3, cpu_offload_param=True), zero(stage=3, offload_param=CPU)),
    (zero(stage=3, prefetch_bucket_size=7), zero(stage=3, stage3_prefetch_bucket_size=7)),
    (zero(stage=3, stage3_prefetch_bucket_size=0.9 * 33 * 33), zero(stage=3, stage3_prefetch_bucket_size=980)),
    (zero(stage=3, reduce_bucket_size=1e3 + 0.5), zero(stage=3, reduce_bucket_size=1000)),
    ({"zero_optimization": True}, zero(stage=1)),
    ({"zero_optimization": False}, zero(stage=0)),
    ({"zero_optimization.stage": 2, "bf16.enabled": True}, {"bf16": {"enabled": True}, **zero(stage=2)}),
    ({"zero_optimization.offload_optimizer.device": "cpu", **zero(stage=2)}, zero(stage=2, offload_optimizer=CPU)),
    ({"zero_optimization.stage": 2, **zero(stage=2)}, zero(stage=2)),
    ({"zero_optimization.reduce_bucket_size": 64, **zero(reduce_bucket_size="auto")}, zero(reduce_bucket_size=64)),
    ({"zero_optimization.reduce_bucket_size": "auto", **zero(reduce_bucket_size=64)}, zero(reduce_bucket_size=64)),
    (
        {"zero_optimization.prefetch_bucket_size": 980.1, **zero(stage=3)},
        zero(stage3_prefetch_bucket_size=980, stage=3),
    ),
]


@pytest.mark.parametrize(("written", "today"), SAME, ids=[json.dumps(written) for written, _ in SAME])
def test_it_means_the_same_without_a_note(written: dict[str, Any], today: dict[str, Any]) -> None:
    before = json.dumps(written)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(written) == load(today)
    assert json.dumps(written) == before, "the program's dict has changed"


CONTRADICTIONS = [
    (
        {"bfloat16": {"enabled": True}, "bf16": {"enabled": False}},
        '"bfloat16": {"enabled": true} and "bf16": {"enabled": false} are two names of one key, and differ',
    ),
    (zero(cpu_offload=True, offload_optimizer={"device": "nvme"}), '"offload_optimizer": {"device": "nvme"}'),
    (zero(cpu_offload=False, offload_optimizer=CPU), 'remove "zero_optimization.cpu_offload"'),
    (zero(cpu_offload="yes"), '"zero_optimization.cpu_offload" must be true or false, got "yes"'),
    (zero(max_live_parameters=1, stage3_max_live_parameters=2), "two names of one key, and differ"),
    ({"zero_optimization.stage": 3, **zero(stage=2)}, '"zero_optimization.stage": 3 at the top level contradicts 2'),
    ({"zero_optimization.stge": 3}, 'unknown key "zero_optimization.stge"; did you mean "zero_optimization.stage"?'),
    ({"train_batch_size.x": 3, "train_batch_size": 2}, 'needs "train_batch_size" to be an object {...}, got 2'),
    ({"gradient_accumulation_steps": 1.5}, "must be a whole number, got 1.5"),
    (zero(reduce_bucket_size=0.5), '"zero_optimization.reduce_bucket_size" must be > 0, got 0'),
    (zero(reduce_bucket_size=float("inf")), "must be a whole number, got Infinity"),
    ({"bf16": {"enabled": 0.5}}, '"bf16.enabled" must be true or false, got 0.5'),
    (
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "optimizer": {"type": "SGD"}},
        'needs "optimizer.type" Adam or AdamW, got "SGD"',
    ),
    ({"bf16": {"bf16_optimizer_states": True}}, 'needs "bf16.enabled": true'),
]


@pytest.mark.parametrize(("data", "message"), CONTRADICTIONS, ids=[str(i) for i in range(len(CONTRADICTIONS))])
def test_contradictions_name_both(data: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        load(data)
    text = str(caught.value).replace('"zero_optimization.offload_optimizer"', '"offload_optimizer"')
    assert text.startswith("config: ") and message in text


def test_a_dotted_size_beside_another_one_gives_way_with_one_note() -> None:
    config, notes = load_with_notes({"zero_optimization.reduce_bucket_size": 16, **zero(reduce_bucket_size=64)})
    assert config.zero_optimization.reduce_bucket_size == 64
    assert [note.text for note in notes] == [
        'config: "zero_optimization.reduce_bucket_size": 16 at the top level has no effect: the section has 64'
    ]


def test_what_trl_passes() -> None:
    """Sizes at the top level, computed from the hidden size, next to the sizes from Accelerate."""
    h = 33
    data = {
        "train_micro_batch_size_per_gpu": 1,
        **zero(
            stage=3,
            reduce_bucket_size=h * h,
            stage3_prefetch_bucket_size=int(0.9 * h * h),
            stage3_param_persistence_threshold=10 * h,
        ),
        "zero_optimization.reduce_bucket_size": h * h,
        "zero_optimization.stage3_param_persistence_threshold": 10 * h,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * h * h,
    }
    config, notes = load_with_notes(data)
    assert config.zero_optimization.stage3_prefetch_bucket_size == int(0.9 * h * h)
    assert len(notes) == 1 and "stage3_param_persistence_threshold" in notes[0].text  # it has no effect in any case


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_param_offload_below_stage_3_is_one_note(stage: int) -> None:
    tier = {"device": "nvme", "pin_memory": False, "buffer_count": 9}  # and no path
    config, notes = load_with_notes(zero(stage=stage, offload_param=tier))
    assert config.zero_optimization.offload_param == Config().zero_optimization.offload_param
    assert [note.text for note in notes] == [
        'config: "zero_optimization.offload_param.device": "nvme" has no effect: only stage 3 shards parameters, and '
        f'"zero_optimization.stage" is {stage}'
    ]
    assert load_with_notes(zero(stage=stage, offload_param={"device": "none"}))[1] == []


TEXT = '{\n  // samples of all ranks\n  train_batch_size: 8,\n  "bf16": {"enabled": true}, # a comment\n}\n'


def test_hjson_as_file_and_text(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    (tmp_path / "ds.json").write_text(TEXT)
    wanted = load({"train_batch_size": 8, "bf16": {"enabled": True}})
    assert load(tmp_path / "ds.json") == load(TEXT) == load("# first\n" + TEXT) == wanted
    with pytest.raises(ValueError, match='key "a" is given twice'):
        load("{a: 1,\n a: 2}")
    with pytest.raises(ValueError, match="nor is it valid hjson"):
        load('{"a": [1, }')
    with pytest.raises(ValueError, match='unknown key "train_bach_size"'):
        load("{train_bach_size: 8}")


def test_hjson_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    (tmp_path / "ds.json").write_text(TEXT)
    with pytest.raises(ValueError, match=r"ds\.json: not valid JSON at line 2 .* pip install hjson"):
        load(tmp_path / "ds.json")
    assert load('{"train_batch_size": 8}').train_batch_size == 8


@pytest.mark.parametrize("encode", [base64.urlsafe_b64encode, base64.b64encode, base64.encodebytes])
def test_base64_of_json(encode: Any) -> None:
    text = json.dumps({"train_batch_size": 8, "csv_monitor": {"job_name": "ÿ~?>þ" * 9}}, ensure_ascii=False)
    encoded = encode(text.encode()).decode()
    assert load(encoded) == load(encoded.rstrip("=\n")) == load(text)


def test_what_is_no_base64_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no/such", "ds_config", "eyJh"):
        with pytest.raises(FileNotFoundError, match=name):
            load(name)
    encoded = base64.b64encode(b'{"train_batch_size": 8}').decode()
    monkeypatch.chdir(tmp_path)
    Path(encoded).write_text('{"train_batch_size": 4}')
    assert load(encoded).train_batch_size == 4


def test_other_words_are_in_no_other_table() -> None:
    from zcomm.config.docs import rows
    from zcomm.config.foreign import FOREIGN
    from zcomm.config.parse import fields_of, leaf_paths

    assert not OTHER_WORDS.keys() & (FOREIGN.keys() | fields_of(Config).keys())
    assert OTHER_WORDS.keys() <= rows().keys() and OTHER_WORDS.keys() <= set(leaf_paths())


def test_raw_is_the_mapping_as_written(tmp_path: Path) -> None:
    data = {"bfloat16": {"enabled": True}, "zero_optimization.stage": 2}
    (tmp_path / "ds.json").write_text(json.dumps(data))
    assert raw(data) is data
    assert raw(tmp_path / "ds.json") == raw(json.dumps(data)) == data
    assert raw(load(data))["zero_optimization"]["stage"] == 2
