"""Client state: loaded values equal the saved ones, or save() raises with the value's path before it writes."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
from argparse import Namespace
from collections import Counter, OrderedDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zcomm
from zcomm.cli.main import main
from zcomm.zero.checkpoint import read_manifest
from zcomm.zero.checkpoint.json_values import from_json, to_json

Run = Callable[..., list[Any]]


def tiny() -> Any:
    return zcomm.ZeroOptimizer(nn.Linear(5, 3), "sgd", stage=1, lr=0.1)


def state() -> dict[str, Any]:
    strided = torch.arange(12.0).view(3, 4).t()
    return {
        "n": 3,
        4: "four",
        ("a", 1): None,
        "t": (1, [2.5, None]),
        "inf": float("inf"),
        "counts": Counter({2: 1}),
        "ordered": OrderedDict([("b", 1), ("a", (2,)), (3, None)]),
        "defaults": defaultdict(list, {"a": [1], 2: []}),
        "no defaults": defaultdict(None, {"a": 1}),
        "size": torch.Size([2, 3]),
        np.int64(3): {np.float32(0.5): "numpy's", (1, np.int8(2)): True},
        True: "yes",
        "leaf": torch.ones(2, requires_grad=True),
        "scalar tensor": torch.tensor(2.5, dtype=torch.float64),
        "bf16": torch.arange(5, dtype=torch.bfloat16),
        "strided": strided,
        "complex": torch.tensor([1 + 2j]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "tags": Namespace(__tuple__=[1]),
        "args": Namespace(lr=[0.1, np.float32(0.2)], seed=np.int64(7), names=("a",), inside=Namespace(x=torch.ones(1))),
        "arrays": {
            kind: np.arange(6).reshape(2, 3).astype(kind)
            for kind in ("f8", "f4", "f2", ">f4", "i8", "u2", "?", "c8", "c16", "longdouble", "U3", "S2", "M8[s]")
        },
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "0d": np.array(3),
        "none": np.empty((0, 2)),
        "scalars": [np.float64(0.1), np.complex128(1j), np.bool_(True), np.str_("x"), np.datetime64(5, "s")],
        "__tensor__": "is a key",
        "looks like a tag": {"__array__": [1, 2, 3]},
    }


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        kind = (one.dtype, one.shape, one.requires_grad)
        return kind == (other.dtype, other.shape, other.requires_grad) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other))
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype and one == other)
    if isinstance(one, Namespace):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        factories = [getattr(each, "default_factory", None) for each in (one, other)]
        keys = zip(one, other, strict=True)
        alike = factories[0] is factories[1] and len(one) == len(other) and all(same(*pair) for pair in keys)
        return alike and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("wait", [True, False])
def test_all_kinds_come_back_as_what_they_were(tmp_path: Path, wait: bool) -> None:
    opt, given = tiny(), state()
    task = opt.save(tmp_path / "c", client_state=given, wait=wait)
    if not wait:  # the program continues
        given["strided"].zero_()
        given["arrays"]["f8"][:] = 9
        given["args"].lr.clear()
    task.wait()
    found = opt.load(tmp_path / "c")
    for key, value in state().items():
        assert same(found[key], value), key
    found["bf16"].zero_()  # it is writable, and not shared
    assert main(["ckpt", "verify", str(tmp_path / "c")]) == 0
    zcomm.zero.load_weights(opt, tmp_path / "c")  # reads only files with weights
    opt.close()
    zcomm.shutdown()


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def circular() -> list[Any]:
    mine: list[Any] = []
    mine.append(mine)
    return mine


class Sub(torch.Tensor):
    pass


Point = namedtuple("Point", "epoch batch")


class Phase(enum.IntEnum):
    WARM = 1


class Word(str):
    pass


class Table(dict[str, Any]):
    pass


@dataclasses.dataclass
class Place:
    epoch: int


REFUSED: dict[str, tuple[Any, str]] = {
    "module": ({"model": nn.Linear(1, 1)}, r'client_state\["model"\] is Linear'),
    "inside": ({"args": Namespace(lr=[1, 2, 3, object()])}, r'client_state\["args"\]\.lr\[3\] is object'),
    "set": ([{1, 2}], r"client_state\[0\] is set"),
    "complex number": ({"z": 1j}, r'client_state\["z"\] is complex'),
    "bytearray": ((bytearray(),), r"client_state\[0\] is bytearray"),
    "objects": ({"a": np.array([object()])}, r'client_state\["a"\] is ndarray of dtype object'),
    "records": ({"a": np.zeros(2, dtype=[("x", "f4")])}, r'client_state\["a"\] is ndarray of dtype'),
    "masked": ({"a": np.ma.masked_array([1], [True])}, r'client_state\["a"\] is MaskedArray, a subclass of ndarray'),
    "complex128": ({"a": torch.ones(1, dtype=torch.complex128)}, r'client_state\["a"\] is Tensor \(torch.complex128'),
    "sparse": ({"a": torch.ones(2).to_sparse()}, r'client_state\["a"\] is Tensor \(torch.float32, torch.sparse'),
    "meta": ({"a": torch.ones(2, device="meta")}, r'client_state\["a"\] is Tensor .*meta'),
    "subclass": ({"a": torch.ones(2).as_subclass(Sub)}, r'client_state\["a"\] is Sub, a subclass of Tensor'),
    "namedtuple": (
        {"at": Point(3, 7)},
        r'client_state\["at"\] is Point, a subclass of tuple, .*; write tuple\(\.\.\.\)',
    ),
    "enum": ({"a": [Phase.WARM]}, r'client_state\["a"\]\[0\] is Phase, a subclass of int, .*; write its value'),
    "str": ({"a": Word("x")}, r'client_state\["a"\] is Word, a subclass of str, .*; write str\(\.\.\.\) of it'),
    "dict": ({"a": Table()}, r'client_state\["a"\] is Table, a subclass of dict, .*; write dict\(\.\.\.\) of it'),
    "mapping": ({"a": types.MappingProxyType({})}, r'client_state\["a"\] is mappingproxy, .*; write dict'),
    "list": ({"a": [UserList([1])]}, r'client_state\["a"\]\[0\] is UserList'),
    "dataclass": ({"a": Place(1)}, r'client_state\["a"\] is Place, .*; write dataclasses.asdict'),
    "path": ({"a": Path("x")}, r'client_state\["a"\] is PosixPath, .*; write str\('),
    "dtype": ({"a": torch.bfloat16}, r'client_state\["a"\] is dtype, .*; write str\('),
    "factory": (
        {"a": defaultdict(lambda: 1)},
        r'client_state\["a"\] is defaultdict with the default_factory <function',
    ),
    "deque": ({"a": deque([1])}, r'client_state\["a"\] is deque'),
    "key of a subclass": ({"a": {Phase.WARM: 1}}, r'a key of client_state\["a"\] is Phase, a subclass of int'),
    "tensor as a key": ({"a": {torch.ones(1): 1}}, r'a key of client_state\["a"\] is Tensor'),
    "nan in a key": ({(1, float("nan")): 1}, r"a key of client_state\[1\] is nan"),
    "key": ({(1, object()): 1}, r"a key of client_state\[1\] is object"),
    "namespace": ({4: types.SimpleNamespace(x=1)}, r"client_state\[4\] is SimpleNamespace"),
    "number": ({"n": 10**5000}, r'client_state\["n"\] is an integer of 16610 bits'),
    "deep": (nested(100_000), "client_state contains itself, or is nested too deeply"),
    "circle": (circular(), "client_state contains itself, or is nested too deeply"),
}


@pytest.mark.parametrize("wait", [True, False])
def test_the_rest_is_refused_before_anything_is_written(tmp_path: Path, wait: bool) -> None:
    opt = tiny()
    for given, said in REFUSED.values():
        with pytest.raises(ValueError, match=said):
            opt.save(tmp_path / "c", client_state=given, wait=wait)
        assert list(tmp_path.iterdir()) == []
    opt.save(tmp_path / "c", client_state=nested(100))
    assert opt.load(tmp_path / "c") == nested(100)
    opt.close()
    zcomm.shutdown()


def test_an_engine_names_the_way_as_the_program_writes_it(tmp_path: Path) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    one = zcomm.initialize(model=nn.Linear(4, 2), config=config)[0]
    with pytest.raises(ValueError, match=r'^client_state\["args"\]\.lr\[3\] is object'):
        one.save_checkpoint(tmp_path, client_state={"args": Namespace(lr=[1, 2, 3, object()])})
    assert list(tmp_path.iterdir()) == []
    one.save_checkpoint(tmp_path, client_state={"ema": torch.ones(3), "seed": np.int64(3)})
    _, found = one.load_checkpoint(tmp_path)
    assert same(found, {"ema": torch.ones(3), "seed": np.int64(3)})
    assert list(read_manifest(tmp_path / "global_step0").values) == ['client_state["ema"]']
    one.destroy()
    zcomm.shutdown()


@pytest.mark.parametrize(
    "value",
    [
        {"__tensor__": "none"},
        {"__tensor__": ["a"]},
        {"__array__": ["a", "O", [1]]},
        {"__array__": ["a", "f4", [7]]},
        {"__array__": 5},
        {"__scalar__": ["f8", "AAAA"]},
        {"__scalar__": ["f8", "%"]},
        {"__tuple__": 5},
        {"__items__": [[1]]},
        {"__items__": [[{"a": 1}, 2]]},
        {"__counts__": 3},
        {"__ordered__": [1]},
        {"__defaults__": ["open", []]},
        {"__defaults__": []},
        {"__size__": ["a"]},
        {"__leaf__": 3},
        {"__namespace__": [1]},
        {"__parameter__": "a"},
        json.loads("[" * 900 + "]" * 900),
    ],
)
def test_what_no_save_wrote_is_refused(value: Any) -> None:
    depth = 200 if isinstance(value, list) else 0
    for _ in range(depth):
        value = {"__tuple__": [value]}
    with pytest.raises(ValueError, match="not one that a checkpoint keeps"):
        from_json([value], {"a": torch.ones(2)})


def test_options_keep_numbers_alone() -> None:
    assert to_json({"lr": torch.tensor(0.5), "n": np.float32(2)}, "options") == {"lr": 0.5, "n": 2.0}
    for wrong in (torch.ones(2), np.complex64(1j), np.ones(3)):
        with pytest.raises(ValueError, match=r'options\["lr"\] is'):
            to_json({"lr": wrong}, "options")


def test_ways_that_look_alike_keep_their_tensors() -> None:
    values = [
        Namespace(**{"a.b": torch.ones(2), "a": Namespace(b=torch.zeros(2))}),
        Namespace(**{"a[0]": np.ones(1), "a": [torch.zeros(1)]}),
    ]
    tensors: dict[str, torch.Tensor] = {}
    found = [from_json(json.loads(json.dumps(to_json(value, "s", tensors))), tensors) for value in values]
    assert vars(found[0])["a.b"].tolist() == [1, 1] and found[0].a.b.tolist() == [0, 0]
    assert vars(found[1])["a[0]"].tolist() == [1] and found[1].a[0].tolist() == [0]
    with pytest.raises(ValueError, match="a key of s is nan"):
        to_json({float("nan"): torch.ones(1)}, "s", tensors)


def test_what_occurs_twice_comes_back_as_one() -> None:
    tensor, array = torch.ones(2), np.ones(2)
    tensors: dict[str, torch.Tensor] = {}
    kept = to_json({"a": tensor, "b": [tensor, array], "c": (array, torch.ones(2))}, "s", tensors)
    found = from_json(json.loads(json.dumps(kept)), tensors)
    assert found["a"] is found["b"][0] and found["b"][1] is found["c"][0] and len(tensors) == 3
    assert found["c"][1] is not found["a"]
