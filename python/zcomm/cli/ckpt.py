"""`zcomm ckpt ls | verify | export | convert`: checkpoints without their model and without ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcomm.cli.parser import Parser
from zcomm.cli.sizes import nbytes, shown
from zcomm.launch.errors import UserError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from zcomm.zero.checkpoint import Manifest

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_parser(commands: _SubParsersAction[Parser]) -> None:
    """Declare the command's options."""
    parser = commands.add_parser("ckpt", help="list, verify, export and convert checkpoints", allow_abbrev=False)
    actions = parser.add_subparsers(
        title="actions", dest="action", metavar="ACTION", required=True, parser_class=Parser
    )

    ls = actions.add_parser("ls", help="what a checkpoint, or a folder of them, holds", allow_abbrev=False)
    ls.add_argument("folder", type=Path)
    ls.add_argument("--tensors", action="store_true", help="also each tensor, with dtype, shape and file")
    ls.set_defaults(command=_wrapped(_ls))

    verify = actions.add_parser("verify", help="compare all checksums; exit code 1 if one is wrong", allow_abbrev=False)
    verify.add_argument("folder", type=Path)
    verify.set_defaults(command=_wrapped(_verify))

    export = actions.add_parser("export", help="write the weights as safetensors", allow_abbrev=False)
    export.add_argument("folder", type=Path)
    export.add_argument("out", type=Path, help="NAME.safetensors, or a new folder as Hugging Face's tools read it")
    export.add_argument("--dtype", choices=tuple(_DTYPES), help="of floating weights (default: as trained)")
    export.add_argument("--shard-size", type=nbytes, metavar="SIZE", help="most bytes per file, for example 5GB")
    export.add_argument("--untie", action="store_true", help="write tied weights under each of their names")
    export.set_defaults(command=_wrapped(_export))

    convert = actions.add_parser("convert", help="make a checkpoint of DeepSpeed's ZeRO one", allow_abbrev=False)
    convert.add_argument("folder", type=Path, help="DeepSpeed's folder of one tag, or the one above with 'latest'")
    convert.add_argument("out", type=Path, help="a new folder")
    convert.set_defaults(command=_wrapped(_convert))


def _wrapped(action: Any) -> Any:
    """Errors of files and arguments are errors of use, but for what `verify` finds."""

    def command(args: argparse.Namespace) -> int:
        try:
            code: int = action(args)
        except (OSError, ValueError, NotImplementedError) as error:
            raise UserError(str(error)) from error
        return code

    return command


def _found(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoint, or those in the folder, oldest first."""
    from zcomm.zero.checkpoint import durable, read_manifest

    place = durable.find(folder.absolute())
    if (place / "manifest.json").exists() or not place.is_dir():
        yield folder, read_manifest(place)
        return
    inside = [path for path in place.iterdir() if (path / "manifest.json").is_file() and path.name[0] != "."]
    if not inside:
        read_manifest(place)  # says that there is none
    for path in sorted(inside, key=lambda path: path.stat().st_mtime):
        yield path, read_manifest(path)


def _ls(args: argparse.Namespace) -> int:
    for path, manifest in _found(args.folder):
        weights = sum(entry.nbytes for entry in manifest.weights.values())
        state = sum(entry.nbytes for entry in manifest.optimizer.values())
        trained = [manifest.weights[name] for name in manifest.parameters if name in manifest.weights]
        print(path)
        print(
            f"  step {manifest.counters.get('step_count')}, world {manifest.world_size}, stage {manifest.stage}, "
            f"{manifest.precision}, {manifest.optimizer_name}"
        )
        print(
            f"  {sum(_numel(entry.shape) for entry in trained)} trained parameters in {len(trained)} tensors, "
            f"{len(manifest.weights) - len(trained)} other tensors, {len(manifest.aliases)} tied names"
        )
        print(f"  weights {shown(weights)}, optimizer {shown(state)}, {len(manifest.files)} files")
        extra = [name for name in ("scheduler", "client_state") if getattr(manifest, name) is not None]
        if extra:
            print(f"  with {', '.join(extra)}")
        if args.tensors:
            for name, entry in sorted({**manifest.weights, **manifest.optimizer}.items()):
                print(f"  {name}  {entry.dtype} {list(entry.shape)}  {entry.file}")
            for name, first in sorted(manifest.aliases.items()):
                print(f"  {name}  is {first}")
    return 0


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _verify(args: argparse.Namespace) -> int:
    from zcomm.zero.checkpoint import durable
    from zcomm.zero.checkpoint.tensor_file import check

    bad = 0
    try:
        for path, manifest in _found(args.folder):
            place = durable.find(path.absolute())
            wrong = manifest.missing_files(place)
            entries = {**manifest.weights, **manifest.optimizer}
            complaints = [check(place, name, entry) for name, entry in entries.items()]
            wrong += [complaint for complaint in complaints if complaint is not None]
            for line in wrong:
                print(f"wrong: {line}")
            print(f"{path}: {f'{len(wrong)} wrong' if wrong else f'{len(entries)} tensors are what was written'}")
            bad += len(wrong)
    except FileNotFoundError:
        raise
    except OSError as error:  # a damaged manifest
        print(f"wrong: {error}")
        bad += 1
    return 1 if bad else 0


def _latest(folder: Path) -> Path:
    """The checkpoint, or in an engine's folder the one that its file ``latest`` names."""
    pointer = folder / "latest"
    return folder / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else folder


def _export(args: argparse.Namespace) -> int:
    import torch

    from zcomm.zero.checkpoint.export import export

    dtype = getattr(torch, _DTYPES[args.dtype]) if args.dtype else None
    for path in export(_latest(args.folder.absolute()), args.out.absolute(), dtype, args.shard_size, args.untie):
        print(f"{path}  {shown(path.stat().st_size)}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from zcomm.zero.checkpoint.from_deepspeed import convert

    for line in convert(args.folder.absolute(), args.out.absolute()):
        print(line)
    return 0
