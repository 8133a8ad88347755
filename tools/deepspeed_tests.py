"""Run DeepSpeed's own unit tests against zcomm on the CPU, and compare with what is expected (deepspeed_tests.json).

``python tools/deepspeed_tests.py PATH_TO_DEEPSPEED [--only WORD ...] [--report FILE]``; needs pytest 7.2 to 8.3.
The tests are copied into a temporary folder, so that the checkout's own package is not imported. This file is a plugin
of that pytest, too. Ranks start from a server that has torch loaded, and a rank's error ends the others at once.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
import xml.etree.ElementTree
from collections.abc import Iterable
from multiprocessing import connection
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).with_suffix(".json")
LIMIT_S = int(os.environ.get("DS_UNITTEST_TIMEOUT", "60"))
LOADED = ["torch", "numpy", "pytest", "deepspeed_tests", "deepspeed.comm", "unit.common", "unit.simple_model"]
# Names that files of tests import and zcomm lacks: a test that uses one fails, the file's other tests run.
ABSENT = {
    "autotuning.scheduler": "ResourceManager",
    "autotuning.utils": "get_val_by_key set_val_by_key",
    "checkpoint": "NAME_TO_MODEL",
    "checkpoint.constants": "ORIGINAL_VOCAB_SIZE PARAMETER_WITH_ROW_PARALLELISM_PATTERNS "
    "TP_REPLICATED_PARAMETER_PATTERNS VOCABULARY_PARAMETER_PATTERNS",
    "module_inject.auto_tp": "",
    "module_inject.auto_tp_model_utils": "",
    "module_inject.autotp_config": "",
    "module_inject.layers": "GateUpPack_LinearLayer LinearAllreduce LinearLayer SubParamLinearAllreduce "
    "SubParamLinearLayer collect_autotp_universal_checkpoint_info fused_LinearLayer",
    "module_inject.tp_shard": "get_shard_size set_num_kv_heads",
    "moe.sharded_moe": "_route_slots _sparse_decode _sparse_encode",
    "runtime.checkpoint_engine": "",
    "runtime.config": "get_gradient_clipping get_log_level",
    "runtime.constants": "",
    "runtime.config_utils": "DeepSpeedConfigModel",
    "runtime.hybrid_engine_graph": "DecodeGraphCache decode_steps_from_generate_kwargs validate_cuda_graph_support",
    "runtime.swap_tensor": "",
    "runtime.tensor_parallel": "",
    "runtime.torch_autocast": "",
    "runtime.utils": "partition_balanced PartitionedTensor",
    "runtime.zero.leaf_module_config": "",
    "runtime.zero.offload_states": "",
    "runtime.zero.parameter_offload": "ZeROOrderedDict ensure_zero_ordered_dict",
    "sequence.auto_sp": "",
    "sequence.autosp_detector": "",
    "sequence.autosp_fusion": "",
    "sequence.autosp_vit": "",
    "sequence.fpdt_layer": "",
    "runtime.zero.partition_parameters": "CUDAQuantizer InsertPostInitMethodToModuleSubClasses "
    "MultipleAllGatherHandles get_allgather_dtype partitioned_param_data_shape zero3_linear_wrap",
    "utils.groups": "_get_expert_parallel_ranks",
    "utils.zero_to_fp32": "get_optim_files",
}


# --- the plugin -------------------------------------------------------------------------------------------------------


class _Absent(types.ModuleType):
    """A module of absent names."""

    __path__: list[str] = []  # noqa: RUF012  (a package)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 2**20 if name == "MIN_SWAPPABLE_BYTES" else _absent(name)


def _absent(name: str) -> type:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"zcomm has no {name}")

    return type(name, (), {"__init__": refuse})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of ``modules`` of ABSENT, and of their submodules, that zcomm lacks."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.modules = tuple(modules)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        name = fullname.removeprefix("deepspeed.")
        if not any(name == module or name.startswith(module + ".") for module in self.modules):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, because names are created on access."""


def _stand_in() -> None:
    import deepspeed  # noqa: F401
    from deepspeed.accelerator.cpu_accelerator import CpuAccelerator
    from torch.nn.parallel import DistributedDataParallel as Ddp

    from zcomm.engine import Engine
    from zcomm.zero import Init, ZeroOptimizer, full_param

    of_ddp = Ddp.__init__
    places: dict[Any, dict[str, Any]] = {
        # tests mean a GPU by these
        CpuAccelerator: {"current_device": lambda self: "cpu"},
        Ddp: {"__init__": lambda self, module, device_ids=None, output_device=None: of_ddp(self, module)},
        # these tests skip cases that zcomm runs, patch private methods, and compare whole masters
        Engine: {
            "_get_optimizer_ckpt_name": _absent("_get_optimizer_ckpt_name"),
            "_backward_epilogue": lambda self: None,  # a private call after loss.backward(), which needs none here
        },
        ZeroOptimizer: dict.fromkeys(
            ("fp32_groups_flat", "fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"),
            property(lambda self: [full_param(param) for group in self.param_groups for param in group["params"]]),
        ),
    }
    if importlib.util.find_spec("transformers"):  # a model of the hub, of which tests need the class only
        from transformers import AutoModel, BertConfig, BertModel

        small = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        places[AutoModel] = {"from_pretrained": classmethod(lambda cls, name: BertModel(small))}
    for owner, values in places.items():
        for name, value in values.items():
            setattr(owner, name, value)
    Init.__init__.__kwdefaults__["min_count"] = 1  # type: ignore[index]  # their parameters are small
    sys.meta_path.append(_Finder(ABSENT))
    sys.meta_path.insert(0, _Finder(module for module, names in ABSENT.items() if not names))  # with submodules
    for module, names in ABSENT.items():
        place = importlib.import_module(f"deepspeed.{module}")
        for name in names.split():
            if not hasattr(place, name):
                setattr(place, name, _absent(name))


if "DEEPSPEED_TESTS_EACH" in os.environ:  # in a process of the tests
    _stand_in()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the requested number of parameter sets of each test, evenly spread."""
    most, tests = int(os.environ["DEEPSPEED_TESTS_EACH"]), collections.defaultdict[str, list[Any]](list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    if most:
        items[:] = [item for each in tests.values() for item in each[:: -(-len(each) // most)]]


def pytest_configure(config: Any) -> None:
    """Replace DeepSpeed's start of ranks."""
    multiprocessing.set_forkserver_preload(LOADED)
    import unit.common

    unit.common.DistributedExec._launch_daemonic_procs = _launch
    unit.common.DistributedExec._launch_non_daemonic_procs = _launch


def _rank(test: Any, rank: int, size: int, port: str, init_method: str, answers: Any) -> None:
    skipped = queue.SimpleQueue[str]()
    try:
        told = test._dist_run(rank, size, port, init_method, *([skipped] if test.non_daemonic_procs else []))
        answers.send(("skip", skipped.get() if not skipped.empty() else told if isinstance(told, str) else ""))
    except BaseException:
        answers.send(("error", f"rank {rank}: {traceback.format_exc()}"))


def _launch(test: Any, size: int, init_method: str) -> None:
    import pytest
    from unit.common import get_master_port

    context, port = multiprocessing.get_context("forkserver"), get_master_port()
    ranks, waiting, skips = [], [], set()
    for rank in range(size):
        reader, writer = context.Pipe(duplex=False)
        args = (test, rank, size, port, init_method, writer)
        ranks.append(context.Process(target=_rank, args=args, daemon=not test.non_daemonic_procs))
        ranks[-1].start()
        writer.close()
        waiting.append(reader)
    try:
        while waiting:
            ready = connection.wait(waiting, LIMIT_S)
            if not ready:
                pytest.fail(f"no answer of {len(waiting)} ranks in {LIMIT_S} s", pytrace=False)
            for reader in ready:
                waiting.remove(reader)
                try:
                    kind, text = reader.recv()
                except EOFError:
                    kind, text = "error", "a rank ended without an answer"
                if kind == "error":
                    pytest.fail(text, pytrace=False)
                skips.add(text)
    finally:
        for process in ranks:
            process.terminate()
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
    if any(skips):
        pytest.skip(", ".join(filter(None, skips)))


# --- the program ------------------------------------------------------------------------------------------------------


def run(tests: Path, file: str, report: Path, each: int) -> dict[str, tuple[str, str]]:
    """Return for each test of ``file`` its outcome ("passed", "failed" or "skipped") and the message."""
    root = Path(__file__).resolve().parents[1]
    paths = [root / "python" / "zcomm" / "compat" / "site", root / "python", tests, Path(__file__).parent]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "DEEPSPEED_TESTS_EACH": str(each),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",  # as many devices as the tests may take
        "OMP_NUM_THREADS": "1",
    }
    command = tests / "bin" / "deepspeed"  # of the distribution zcomm-deepspeed
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m zcomm.compat.deepspeed.launcher.runner "$@"\n')
    command.chmod(0o755)
    env["PATH"] = f"{command.parent}{os.pathsep}{env['PATH']}"
    asked = ["-p", "deepspeed_tests", "-p", "no:cacheprovider", "-q", "--color=no", f"--junitxml={report}"]
    pytest = [sys.executable, "-m", "pytest", *asked, "-m", "not nightly", f"unit/{file}"]
    ended = subprocess.run(pytest, cwd=tests, env=env, capture_output=True, text=True)
    if not report.exists():
        return {"(all)": ("failed", (ended.stdout + ended.stderr)[-2000:])}
    found = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        outcome, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                message = f"{child.get('message', '')}\n{child.text or ''}"
        owner = case.get("classname", "").rpartition(".")[2]
        found[f"{owner}::{case.get('name')}" if owner[:1].isupper() else case.get("name", "")] = (outcome, message)
    return found


def compare(file: str, found: dict[str, tuple[str, str]], listed: dict[str, str]) -> list[str]:
    """Return the differences from ``listed`` (pattern of names: reason): unlisted failures and listed passes."""
    wrong = []
    for name, (outcome, message) in found.items():
        reason = next((text for pattern, text in listed.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if outcome == "failed" and reason is None:
            lines = [line for line in message.splitlines() if line.strip()]
            wrong.append(f"{file}::{name} fails and is not listed: {lines[-1] if lines else ''}")
        if outcome == "passed" and reason is not None:
            wrong.append(f"{file}::{name} passes and is listed: {reason}")
    return wrong


def main() -> int:
    """Run the files of deepspeed_tests.json, print a line for each. Returns: 1 if one is not as expected, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deepspeed", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument("--only", nargs="*", default=[""], help="words, one of which a file's name must hold")
    parser.add_argument("--each", type=int, default=0, help="run at most so many parameter sets of a test; 0: all")
    parser.add_argument("--report", type=Path, help="write outcomes and messages there, as JSON")
    given = parser.parse_args()
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    outcomes, wrong = {}, []
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        shutil.copytree(given.deepspeed / "tests", tests)
        for file, listed in expected["files"].items():
            if not any(word in file for word in given.only):
                continue
            found = run(tests, file, Path(folder) / "report.xml", given.each)
            (Path(folder) / "report.xml").unlink(missing_ok=True)
            counts = collections.Counter(outcome for outcome, _ in found.values())
            print(file, dict(counts), flush=True)
            wrong += compare(file, found, listed)
            outcomes[file] = found
            if given.report:
                given.report.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
