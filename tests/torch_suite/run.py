"""torch's own tests of torch.distributed, run against "zcomm" and "gloo" side by side.

    python tests/torch_suite/run.py [-k PATTERN] [--backends zcomm,gloo] [--world-size 3] [--timeout 60] [--out FILE.md]

Prints a table of outcomes and every difference; --out also writes it as Markdown. Tests run one after the other.
Explanations of known differences stand in explained.json (regular expression -> sentence).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
Results = dict[str, dict[str, str]]


def host(backend: str, world_size: int, tests: list[str], timeout: int, log: Path):  # type: ignore[no-untyped-def]
    """Run `tests` (none: list all) in one process; yield its lines. Ends early if the process dies."""
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder, open(log, "ab") as errors:
        env = dict(
            os.environ,
            BACKEND=backend,
            WORLD_SIZE=str(world_size),
            TEMP_DIR=folder,
            TMPDIR=folder,
            INIT_METHOD=f"file://{folder}/init",
            MASTER_ADDR="127.0.0.1",
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(timeout),
            TORCH_SUITE_TESTS=",".join(tests),
            OMP_NUM_THREADS="1",
        )
        env.pop("MASTER_PORT", None)
        process = subprocess.Popen(
            ["nice", sys.executable, str(HERE / "host.py"), str(write)],
            env=env,
            pass_fds=[write],
            stdout=errors,
            stderr=errors,
        )
        os.close(write)
        try:
            with os.fdopen(read) as lines:
                for line in lines:
                    yield json.loads(line)
        finally:
            process.kill()
            process.wait()


def run_all(backend: str, world_size: int, tests: list[str], timeout: int, log: Path) -> Results:
    results: Results = {}
    left = list(tests)
    while left:
        for one in host(backend, world_size, left, timeout, log):
            results[one["test"]] = one
            left.remove(one["test"])
            print(f"{backend:6} {one['outcome']:8} {one['seconds']:6.1f} s  {one['test']}", flush=True)
        if left:  # the process died under its first test
            results[left[0]] = {"test": left[0], "outcome": "failed", "why": "the test's process died", "seconds": "0"}
            print(f"{backend:6} died              {left[0]}", flush=True)
            left.pop(0)
    return results


def last_line(why: str) -> str:
    """Return the line with the cause of the failure, without addresses and paths."""
    error = r"\s*[\w.]*(Error|Exception|Lost|Mismatch|Timeout)\b"
    lines = [line.strip() for line in why.splitlines() if re.match(error, line)]
    lines = [line for line in lines if not re.match(r"RuntimeError: Process \d+ exited", line)]
    text = lines[0] if lines else (why.strip().splitlines() or [""])[-1]
    return re.sub(r"/\S*/", "", text)[:200]


def explanation(test: str, why: str, explained: dict[str, str]) -> str:
    known = next((sentence for pattern, sentence in explained.items() if re.match(pattern, test)), None)
    return known or f"`{last_line(why)}`".replace("|", "/")


def report(results: dict[str, Results], tests: list[str], args: argparse.Namespace) -> str:
    import torch

    explained = json.loads((HERE / "explained.json").read_text())
    lines = [
        "# torch's own tests of torch.distributed",
        "",
        f"`torch.testing._internal.distributed.distributed_test`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {args.world_size} ranks on {os.cpu_count()} CPUs, CPU tensors. "
        "Written by `tests/torch_suite/run.py`.",
        "",
        "| backend | passed | failed | skipped | passed of those not skipped |",
        "|---|---|---|---|---|",
    ]
    for backend, outcomes in results.items():
        count = collections.Counter(one["outcome"] for one in outcomes.values())
        ran = count["passed"] + count["failed"]
        share = f"{100 * count['passed'] / ran:.1f} %" if ran else "-"
        lines.append(f"| {backend} | {count['passed']} | {count['failed']} | {count['skipped']} | {share} |")
    lines += [
        "",
        "Skipped tests need a GPU, more ranks, or another backend. In the guards of the tests "
        '"zcomm" counts as "gloo", and as "mpi" for CPU all_to_all, which torch asks of no other backend. '
        "Checks of profiler events inside the tests are made only for backends on torch's own list, so not for zcomm, "
        "which has no such events.",
    ]
    names = list(results)
    if len(names) == 2:
        differ = [t for t in tests if results[names[0]][t]["outcome"] != results[names[1]][t]["outcome"]]
        lines += [
            "",
            f"## Differences ({len(differ)})",
            "",
            f"| test | {names[0]} | {names[1]} | why |",
            "|---|---|---|---|",
        ]
        for test in differ:
            one, other = results[names[0]][test], results[names[1]][test]
            why = explanation(test, str(one["why"] or other["why"]), explained)
            lines.append(f"| {test} | {one['outcome']} | {other['outcome']} | {why} |")
    both = [t for t in tests if all(outcomes[t]["outcome"] == "failed" for outcomes in results.values())]
    if both and len(names) == 2:
        lines += ["", f"## Failed by both ({len(both)})", "", "| test | why |", "|---|---|"]
        for test in both:
            why = explanation(test, str(results[names[0]][test]["why"]), explained)
            lines.append(f"| {test} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only tests with a name that matches this regular expression")
    parser.add_argument("--backends", default="zcomm,gloo")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=60, help="seconds per test")
    parser.add_argument("--out", type=Path, help="write the report here")
    parser.add_argument("--json", type=Path, help="write all outcomes here")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "torch_suite.log")
    args = parser.parse_args()
    backends = args.backends.split(",")
    (tests,) = host(backends[0], args.world_size, [], args.timeout, args.log)
    tests = [test for test in tests if re.search(args.k, test)]
    results = {b: run_all(b, args.world_size, tests, args.timeout, args.log) for b in backends}
    text = report(results, tests, args)
    print(text)
    if args.out:
        args.out.write_text(text)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
