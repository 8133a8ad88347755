"""Foreign manifests: no name leads out of the folder, fields are checked; a failed load changes nothing."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import zlib
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zcomm
from tiers import slow
from zcomm.cli.main import main
from zcomm.zero.checkpoint import read_manifest
from zcomm.zero.files import durable
from zcomm.zero.files.folder import Folder

Run = Callable[..., list[Any]]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def made() -> tuple[nn.Module, Any]:
    model = net()
    return model, zcomm.ZeroOptimizer(model, "adamw", stage=2, precision="bf16", lr=0.1)


def write(folder: str) -> None:
    model, opt = made()
    for number in range(2):
        opt.backward(model(torch.full((4, 6), float(number + 1), dtype=torch.bfloat16)).square().mean())
        opt.step()
        opt.zero_grad()
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3)
    opt.save(f"{folder}/c", scheduler=schedule, client_state={"t": torch.ones(2), "k": (1, 2)})
    opt.close()


def values_of(folder: Path) -> dict[str, Any]:
    body = (folder / "manifest.json").read_text().partition("\n")[2]
    return dict(json.loads(body))


def forge(folder: Path, values: Any) -> None:
    """Write a manifest with ``values``, and a correct checksum."""
    body = values if isinstance(values, str) else json.dumps(values)
    head = {"format": "zcomm checkpoint 2", "crc32": zlib.crc32(body.encode())}
    (folder / "manifest.json").write_text(json.dumps(head) + "\n" + body + "\n")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write(str(tmp_path))
    zcomm.shutdown()
    return tmp_path / "c"


class Watched:
    """A model with its optimizer and schedule, none of which may change."""

    def __init__(self) -> None:
        self.model, self.opt = made()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 3)
        for _ in range(7):
            self.schedule.step()

    def now(self) -> Any:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.opt.param_groups]
        state = self.opt.state_dict()["state"]
        arrays = [value.tolist() for number in state for value in state[number].values()]
        weights = [value.tolist() for value in self.opt.full_state_dict().values()]
        generators = torch.get_rng_state().tolist(), random.getstate()
        return copy.deepcopy((groups, arrays, weights, generators, self.schedule.state_dict(), self.opt.step_count))

    def refused(self, folder: Path) -> str:
        before = self.now()
        try:
            self.opt.load(folder, scheduler=self.schedule)
        except (OSError, ValueError) as error:
            assert self.now() == before, "nothing has changed"
            return f"{type(error).__name__}: {error}"
        return ""


def by_command(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the output of `ls`, `verify` and `export`; all of them must fail."""
    said = []
    for action in (["ls"], ["verify"], ["export"]):
        code = main(["ckpt", *action, str(folder), *([str(out)] if action == ["export"] else [])])
        captured = capsys.readouterr()
        said.append(captured.out + captured.err)
        assert code == (1 if action == ["verify"] else 2), said[-1]
        assert "Traceback" not in said[-1]
    assert not out.exists()
    return said


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["relative", "absolute", "up and down", "dots", "empty", "number"])
def test_no_name_leads_out_of_the_folder(
    saved: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret.bin"
    data = os.urandom(1000)
    secret.write_bytes(data)
    name: Any = {
        "relative": "../secret.bin",
        "absolute": str(secret),
        "up and down": "../c/../secret.bin",
        "dots": "..",
        "empty": "",
        "number": 7,
    }[kind]
    values = values_of(saved)
    entry = values["weights"]["0.weight"]
    values["weights"]["0.weight"] = [name, entry[1], entry[2], 8, entry[4], zlib.crc32(data[8 : 8 + entry[4]])]
    watched = Watched()
    forge(saved, values)
    manifest = saved / "manifest.json"
    assert watched.refused(saved).startswith(f"ValueError: {manifest}: weights['0.weight']: file is {name!r}; expected")
    by_command(saved, tmp_path / "out", capsys)
    if isinstance(name, str):
        values["files"][name] = 1000
        forge(saved, values)
        assert f"a name in files is {name!r}; expected the plain name" in watched.refused(saved)
        for said in by_command(saved, tmp_path / "out", capsys):
            assert f"{manifest}: a name in files is {name!r}" in said
    values = values_of(saved) | {"rank_files": [name]}
    values["weights"]["0.weight"] = entry
    values["files"].pop(name, None)
    forge(saved, values)
    assert f"rank_files[0] is {name!r}" in watched.refused(saved)
    watched.opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_files_of_the_folder_are_opened(
    saved: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link is not followed, and a pipe is not opened, because opening waits for a writer forever."""
    values = values_of(saved)
    watched = Watched()
    for name in values["files"]:
        path = saved / name
        content = path.read_bytes()
        path.rename(tmp_path / "elsewhere")
        if kind == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
        assert name in watched.refused(saved)
        assert main(["ckpt", "verify", str(saved)]) == 1
        assert name in capsys.readouterr().out
        if kind == "folder":
            path.rmdir()
        else:
            path.unlink()
        path.write_bytes(content)
    assert main(["ckpt", "verify", str(saved)]) == 0
    watched.opt.load(saved)
    watched.opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("name", ["../other", "/etc", "..", ".", "a/b", "", "\0", "x" * 300])
def test_latest_names_a_folder_beside_it(
    saved: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    one = zcomm.initialize(model=nn.Linear(4, 2), config=config)[0]
    runs = tmp_path / "runs"
    one.save_checkpoint(runs)
    (runs / "latest").write_text(name)
    with pytest.raises(ValueError, match=r"latest: its content is .*expected the plain name"):
        one.load_checkpoint(runs)
    for command in (
        ["ckpt", "export", str(runs), str(tmp_path / "o")],
        ["ckpt", "convert", str(runs), str(saved) + "2"],
    ):
        assert main(command) == 2
        assert "latest: its content is" in capsys.readouterr().err
    one.destroy()
    zcomm.shutdown()


# --- fields ---------------------------------------------------------------------------------------------------------

ENTRY = "weights['0.weight']"
FIELDS: list[tuple[list[Any], Any, str]] = [
    (["world_size"], 0, "world_size is 0; expected a whole number of at least 1"),
    (["world_size"], True, "world_size is True"),
    (["world_size"], 2, "rank_files is"),
    (["stage"], 4, "stage is 4; expected a whole number of at least 0 and at most 3"),
    (["precision"], None, "precision is None; expected a string"),
    (["optimizer_name"], ["adamw"], "optimizer_name is ['adamw']; expected a string"),
    (["parameters"], "0.weight", "parameters is '0.weight'; expected a list"),
    (["parameters", 0], 5, "parameters[0] is 5; expected a string"),
    (["groups"], {}, "groups is {}; expected a list"),
    (["groups", 0], [], "groups[0] is []; expected an object"),
    (["groups", 0, "params"], None, "groups[0].params is None; expected a list"),
    (["groups", 0, "options"], None, "groups[0].options is None; expected an object"),
    (["groups", 0, "options", "lr"], "high", "groups: "),
    (["groups", 0, "options", "betas"], {"__tuple__": 5}, "groups: a saved value is not one that a checkpoint keeps"),
    (["progress"], 5, "progress is 5; expected a list"),
    (["progress"], [{"a": "b"}], "progress[0]['a'] is 'b'; expected a number"),
    (["progress"], [{"a": 1}], "adamw keeps only arrays and options"),
    (["groups", 0, "options", "params"], [1, 2], "groups: options have 'params'"),
    (["groups", 0, "options", "step"], -1, "groups: step=-1; expected a whole number"),
    (["groups", 0, "options", "lr"], math.inf, "groups: lr=inf; expected a finite number"),
    (["counters", "cohorts"], "x", "counters.cohorts is 'x'; expected a list"),
    (["counters", "cohorts"], [1], "counters.cohorts[0] is 1; expected an object"),
    (["counters", "cohorts"], [{"a": 1}], "counters.cohorts[0].group is None"),
    (["counters"], [], "counters is []; expected an object"),
    (["counters", "step_count"], -1, "counters.step_count is -1"),
    (["counters", "skipped_steps"], 1.5, "counters.skipped_steps is 1.5"),
    (["counters", "loss_scale"], {"scale": 0}, "counters.loss_scale.scale is 0; expected a number more than 0"),
    (["counters", "loss_scale"], {"scale": 4.0}, "counters.loss_scale.hysteresis_left is None"),
    (["weights"], [], "weights is []; expected an object"),
    (["optimizer"], 5, "optimizer is 5; expected an object"),
    (["values"], "t", "values is 't'; expected an object"),
    (["weights", "0.weight"], ["f", "F32"], f"{ENTRY} is ['f', 'F32']; expected [file, dtype, shape"),
    (["weights", "0.weight", 1], "F33", f"{ENTRY}: dtype is 'F33'; expected a dtype"),
    (["weights", "0.weight", 1], "F32", f"{ENTRY}: bytes is 60; expected 120, those of F32 [5, 6]"),
    (["weights", "0.weight", 2], [5, -6], f"{ENTRY}: shape[1] is -6"),
    (["weights", "0.weight", 2], [1 << 40, 1 << 40, 0], f"{ENTRY}: shape is [1099511627776"),
    (["weights", "0.weight", 3], 0, f"{ENTRY}: first byte is 0; expected a whole number of at least 8"),
    (["weights", "0.weight", 3], 1 << 40, f"{ENTRY}: first byte is 1099511627776; expected a tensor within"),
    (["weights", "0.weight", 4], "60", f"{ENTRY}: bytes is '60'"),
    (["weights", "0.weight", 5], 1 << 32, f"{ENTRY}: crc32 is 4294967296"),
    (["aliases"], {"a": "none"}, "aliases['a'] is 'none'; expected the name of a weight"),
    (["files"], [], "files is []; expected an object"),
    (["files", "model-00001-of-00001.safetensors"], -5, "files['model-00001-of-00001.safetensors'] is -5"),
    (["rank_files"], ["none"], "rank_files[0] is 'none'; expected one of files"),
    (["checksums"], {"none": 5}, "a name in checksums is 'none'; expected one of files"),
    (["client_state"], {"__tensor__": "none"}, "client_state: a saved value is not one"),
    (["scheduler"], {"__array__": 3}, "scheduler: a saved value is not one"),
    (["new"], 5, "the field 'new' is not known; was it written by a newer zcomm?"),
]


def test_state_of_another_form_is_refused(saved: Path) -> None:
    """Otherwise an entry of fewer elements would be read on into its neighbours."""
    watched, values = Watched(), values_of(saved)
    file, dtype, shape, begin = values["optimizer"]["exp_avg/0.weight"][:4]
    data = (saved / file).read_bytes()
    for kind, sizes in ((dtype, [1]), ("I32", shape), (dtype, [6, 5]), (dtype, [30])):
        count = 4 * math.prod(sizes)
        entry = [file, kind, sizes, begin, count, zlib.crc32(data[begin : begin + count])]
        forge(saved, changed(values, ["optimizer", "exp_avg/0.weight"], entry) | {"checksums": {}})
        found = watched.refused(saved)
        assert f"exp_avg/0.weight is {kind} {sizes}, not F32 {shape}" in found, found
    forge(saved, values)
    watched.opt.load(saved, scheduler=watched.schedule)
    watched.opt.close()
    zcomm.shutdown()


def changed(values: dict[str, Any], way: list[Any], value: Any) -> dict[str, Any]:
    values = copy.deepcopy(values)
    inside: Any = values
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = value
    return values


def test_each_field_is_checked_before_anything_changes(saved: Path) -> None:
    watched, values = Watched(), values_of(saved)
    manifest = saved / "manifest.json"
    for way, value, said in FIELDS:
        forge(saved, changed(values, way, value))
        found = watched.refused(saved)
        assert found.startswith(f"ValueError: {manifest}: ") and said in found, (way, value, found)
    for name in ("world_size", "stage", "precision", "optimizer_name", "parameters", "groups", "counters"):
        forge(saved, {key: value for key, value in values.items() if key != name})
        assert watched.refused(saved) == f"ValueError: {manifest}: the field {name!r} is missing"
    for text, said in (("[]", "the manifest is []"), ("{", "it is not JSON"), ("[" * 200_000, "it is not JSON")):
        forge(saved, text)
        assert watched.refused(saved).startswith(f"ValueError: {manifest}: {said}")
    forge(saved, values)
    watched.opt.load(saved, scheduler=watched.schedule)
    watched.opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_fuzzed_manifests(saved: Path, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any manifest either loads, or raises an error that names a file and changes nothing."""
    dice, watched, values = random.Random(seed), Watched(), values_of(saved)
    odd = [None, True, -1, 0, 1, 2**70, 1.5, float("nan"), "", "x", "../x", [], [[]], {}, {"__tuple__": 1}, {"a": None}]
    refused = 0
    for number in range(150):
        forged: Any = copy.deepcopy(values)
        for _ in range(dice.randint(1, 2)):
            inside = forged
            while True:
                keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
                keys = [key for key in keys if key != "scheduler"] or keys  # only its class could check it
                key = dice.choice(keys)
                if not isinstance(inside[key], (dict, list)) or not inside[key] or dice.random() < 0.3:
                    break
                inside = inside[key]
            action = dice.randrange(3)
            if action == 0:
                inside[key] = dice.choice(odd)
            elif action == 1:
                del inside[key]
            else:
                inside[key] = inside[dice.choice(keys)]
            if not forged:
                break
        forge(saved, forged)
        said = watched.refused(saved)
        refused += bool(said)
        assert not said or str(saved) in said or "the checkpoint" in said, f"seed {seed}, number {number}: {said}"
        for action in ("ls", "verify"):
            assert main(["ckpt", action, str(saved)]) in (0, 1, 2)
        assert "Traceback" not in capsys.readouterr().err
        if not said and number % 10:  # start again from the initial state
            watched.opt.close()
            watched = Watched()
    assert refused > 75
    watched.opt.close()
    zcomm.shutdown()


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_byte_is_compared(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped byte is found in tensors, in the headers before them, and in the generators' states."""
    watched = Watched()
    for name in sorted(path.name for path in saved.iterdir()):
        path = saved / name
        content = path.read_bytes()
        places = {0, 7, 8, 40, len(content) // 2, len(content) - 2}
        for place in places | set(range(0, len(content), max(1, len(content) // 40))):
            if name == "manifest.json" and place >= len(content) - 1:
                continue  # end of the last line
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert name in watched.refused(saved), f"byte {place} of {name}"
            assert main(["ckpt", "verify", str(saved)]) == 1, f"byte {place} of {name}"
            assert name in capsys.readouterr().out
        path.write_bytes(content)
    watched.opt.load(saved)
    watched.opt.close()
    zcomm.shutdown()


def test_generators_of_old_checkpoints_are_tried_first(saved: Path) -> None:
    """Generators of old checkpoints have no checksum."""
    values = values_of(saved)
    name = values["rank_files"][0]
    (saved / name).write_text("garbage")
    watched = Watched()
    forge(saved, values | {"checksums": {}, "files": values["files"] | {name: 7}})
    head = '{"format": "zcomm checkpoint 1"'
    text = (saved / "manifest.json").read_text()
    (saved / "manifest.json").write_text(head + text[len(head) :])
    assert watched.refused(saved).startswith(f"ValueError: {saved / name}: 'JSON' is not a state of random number")
    watched.opt.load(saved, random=False)
    watched.opt.close()
    zcomm.shutdown()


def load_each(folder: str, damages: list[str]) -> list[str]:
    comm, base, said = zcomm.init(), Path(folder), []
    watched = Watched()
    for damage in damages:
        comm.barrier()
        if comm.rank == 0:
            inflict(base / "c", damage)
        comm.barrier()
        original = Folder.open

        def fails(self: Folder, name: str, original: Callable[[Folder, str], FileIO] = original) -> FileIO:
            if name.startswith("optimizer-00001"):
                raise PermissionError(13, "Permission denied", str(self.path / name))
            return original(self, name)

        with pytest.MonkeyPatch.context() as patch:
            if damage == "rank 1 cannot read" and comm.rank == 1:
                patch.setattr(Folder, "open", fails)
            if damage == "another folder" and comm.rank == 1:  # at the same path, as on another host
                patch.setattr(durable, "find", lambda final: base / "other")
            said.append(watched.refused(base / "c"))
        comm.barrier()
        if comm.rank == 0:
            mend(base / "c")
        comm.barrier()
    watched.opt.load(base / "c")
    watched.opt.close()
    zcomm.shutdown()
    return said


kept: dict[Path, bytes] = {}


def inflict(folder: Path, damage: str) -> None:
    kept.clear()
    kept.update({path: path.read_bytes() for path in folder.iterdir()})
    share = folder / "optimizer-00002-of-00003.safetensors"
    if damage == "missing":
        share.unlink()
    elif damage == "short":
        share.write_bytes(kept[share][:-5])
    elif damage == "flipped":
        share.write_bytes(kept[share][:-5] + bytes([kept[share][-5] ^ 8]) + kept[share][-4:])
    elif damage == "of another run":
        model = folder / "model-00002-of-00003.safetensors"
        share.write_bytes(kept[model] + bytes(max(0, len(kept[share]) - len(kept[model]))))
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "malformed":
        forge(folder, {"world_size": 3})


def mend(folder: Path) -> None:
    for path, content in kept.items():
        path.write_bytes(content)


DAMAGES = [
    "missing",
    "short",
    "flipped",
    "of another run",
    "no manifest",
    "malformed",
    "rank 1 cannot read",
    "another folder",
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_broken_share_of_another_world_size(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(write, 3, str(tmp_path))
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "c").iterdir():
        (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    forge(tmp_path / "other", values_of(tmp_path / "c"))
    damages = DAMAGES if world_size > 1 else DAMAGES[:6]
    share = "optimizer-00002-of-00003.safetensors"
    for rank, said in enumerate(run_ranks(load_each, world_size, str(tmp_path), damages)):
        found = dict(zip(damages, said, strict=True))
        for damage in damages[:4]:
            assert found[damage].startswith("OSError") and share in found[damage], found[damage]
        assert found["no manifest"].startswith("FileNotFoundError")
        assert found["malformed"].startswith(f"ValueError: {tmp_path / 'c' / 'manifest.json'}: ")
        if world_size > 1:
            there = found["rank 1 cannot read"]
            assert there.startswith("OSError") and "optimizer-00001-of-00003.safetensors: Permission denied" in there
            assert rank == 1 or "failed on rank 1" in there
            assert "ranks 1 see another checkpoint than rank 0: the folder is not one" in found["another folder"]


def test_the_exported_weights_are_the_checkpoints(saved: Path, tmp_path: Path) -> None:
    """An intact checkpoint is still exported."""
    assert main(["ckpt", "export", str(saved), str(tmp_path / "w.safetensors")]) == 0
    assert load_file(tmp_path / "w.safetensors").keys() == read_manifest(saved).weights.keys()
