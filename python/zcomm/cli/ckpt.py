"""`zcomm ckpt ls | verify | export | convert`: checkpoints without their model and without ranks."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from zcomm.cli.parser import Commands, Parser
from zcomm.cli.sizes import nbytes, shown
from zcomm.launch.errors import UserError

_OTHER_FILES = {".pt", ".pth", ".bin", ".ckpt", ".npz", ".gguf", ".onnx"}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_parser(commands: Commands) -> None:
    """Declare the command's options."""
    parser = commands.add_parser("ckpt", help="list, verify, export and convert checkpoints", allow_abbrev=False)
    parser.set_defaults(command=command)
    actions = parser.add_subparsers(
        title="actions", dest="action", metavar="ACTION", required=True, parser_class=Parser
    )

    ls = actions.add_parser("ls", help="list the contents of a checkpoint, or a folder of them", allow_abbrev=False)
    ls.add_argument("folder", type=Path, help="a checkpoint, or a folder of them")
    ls.add_argument("--tensors", action="store_true", help="also each tensor, with dtype, shape and file")

    verify = actions.add_parser("verify", help="compare all checksums; exit code 1 if one is wrong", allow_abbrev=False)
    verify.add_argument("folder", type=Path, help="a checkpoint, or a folder of them")

    export = actions.add_parser("export", help="write the weights as safetensors", allow_abbrev=False)
    export.add_argument("folder", type=Path, help="a checkpoint, or a folder of checkpoints: the newest is taken")
    export.add_argument("out", type=Path, help="NAME.safetensors, or a new folder as Hugging Face's tools read it")
    export.add_argument("--dtype", choices=tuple(_DTYPES), help="of floating weights (default: as trained)")
    export.add_argument("--shard-size", type=nbytes, metavar="SIZE", help="most bytes per file, for example 5GB")
    export.add_argument("--untie", action="store_true", help="write tied weights under each of their names")

    convert = actions.add_parser("convert", help="read or write checkpoints of DeepSpeed", allow_abbrev=False)
    convert.add_argument("folder", type=Path, help="a checkpoint (DeepSpeed's: of one tag), or the folder of 'latest'")
    convert.add_argument("out", type=Path, help="a new folder")
    convert.add_argument(
        "--to",
        choices=("zcomm", "universal"),
        default="zcomm",
        help="zcomm: of DeepSpeed's zero or universal checkpoint (default); universal: for DeepSpeed, of zcomm's or of "
        "a zero checkpoint",
    )
    convert.add_argument(
        "--torch-adam",
        action="store_true",
        help="with --to universal: DeepSpeed will train with a torch.optim class, which counts steps in tensors",
    )


def command(args: argparse.Namespace) -> int:
    """Run the action. Raises: UserError for errors of files and arguments, except damage that `verify` finds."""
    action = {"ls": _ls, "verify": _verify, "export": _export, "convert": _convert}[args.action]
    try:
        return action(args)
    except (OSError, ValueError, NotImplementedError) as error:
        raise UserError(str(error)) from error


def _found(folder: Path) -> list[Path]:
    """Return the checkpoint, or the folder's checkpoints, oldest first. Raises: FileNotFoundError if there is none."""
    from zcomm.zero.checkpoint import read_manifest
    from zcomm.zero.files import durable

    place = durable.find(folder.absolute())
    if (place / "manifest.json").exists() or not place.is_dir():
        return [folder]
    inside = [path for path in place.iterdir() if (path / "manifest.json").is_file() and path.name[0] != "."]
    if not inside:
        read_manifest(place)  # raises, and names the folder
    return sorted(inside, key=lambda path: path.stat().st_mtime)


def _shown(name: str) -> str:
    """Return a name out of a file, without characters that would move the terminal's cursor."""
    return name if name.isprintable() else repr(name)


def _ls(args: argparse.Namespace) -> int:
    from zcomm.zero.checkpoint import read_manifest
    from zcomm.zero.files import durable

    found, bad = _found(args.folder), 0
    for path in found:
        try:
            manifest = read_manifest(durable.find(path.absolute()))
        except (OSError, ValueError) as error:
            if len(found) == 1:
                raise
            print(f"{path}\n  wrong: {_shown(str(error))}")
            bad += 1
            continue
        weights = sum(entry.nbytes for entry in manifest.weights.values())
        state = sum(entry.nbytes for entry in manifest.optimizer.values())
        trained = [manifest.weights[name] for name in manifest.parameters if name in manifest.weights]
        print(path)
        print(
            f"  step {manifest.counters.get('step_count')}, world {manifest.world_size}, stage {manifest.stage}, "
            f"{manifest.precision}, {manifest.optimizer_name}"
        )
        print(
            f"  {sum(math.prod(entry.shape) for entry in trained)} trained parameters in {len(trained)} tensors, "
            f"{len(manifest.weights) - len(trained)} other tensors, {len(manifest.aliases)} tied names"
        )
        print(f"  weights {shown(weights)}, optimizer {shown(state)}, {len(manifest.files)} files")
        extra = [name for name in ("scheduler", "client_state") if getattr(manifest, name) is not None]
        if extra:
            print(f"  with {', '.join(extra)}")
        if args.tensors:
            for name, entry in sorted(manifest.entries()):
                print(f"  {_shown(name)}  {entry.dtype} {list(entry.shape)}  {entry.file}")
            for name, first in sorted(manifest.aliases.items()):
                print(f"  {_shown(name)}  is {_shown(first)}")
    return 1 if bad else 0


def _verify(args: argparse.Namespace) -> int:
    from zcomm.zero.checkpoint.manifest_reader import open_checkpoint
    from zcomm.zero.files import durable
    from zcomm.zero.files.tensor_file import check

    bad = 0
    for path in _found(args.folder):
        tensors = 0
        try:
            folder, manifest = open_checkpoint(durable.find(path.absolute()))
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # a damaged manifest
            wrong = [str(error)]
        else:
            with folder:
                tensors = len(manifest.entries())
                found = [check(folder, name, entry) for name, entry in manifest.entries()]
                found += [manifest.check_file(folder, name) for name in manifest.checksums]
                wrong = manifest.missing_files(folder) + [complaint for complaint in found if complaint is not None]
        for line in wrong:
            print(f"wrong: {_shown(line)}")
        print(f"{path}: {f'{len(wrong)} wrong' if wrong else f'{tensors} tensors are what was written'}")
        bad += len(wrong)
    return 1 if bad else 0


def _export(args: argparse.Namespace) -> int:
    import torch

    from zcomm.zero.checkpoint.export import export
    from zcomm.zero.files import durable

    folder = args.folder.absolute()
    if args.out.suffix in _OTHER_FILES:
        raise UserError(
            f"OUT is NAME.safetensors or a new folder, and {args.out.suffix} files are not written; export "
            "NAME.safetensors, then torch.save(safetensors.torch.load_file(NAME), OUT)"
        )
    dtype = getattr(torch, _DTYPES[args.dtype]) if args.dtype else None
    for path in export(durable.latest_in(folder) or folder, args.out.absolute(), dtype, args.shard_size, args.untie):
        print(f"{path}  {shown(path.stat().st_size)}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from zcomm.convert.from_deepspeed import convert
    from zcomm.convert.to_universal import to_universal

    folder, out = args.folder.absolute(), args.out.absolute()
    if args.torch_adam and args.to != "universal":
        raise UserError("--torch-adam belongs to --to universal")
    for line in to_universal(folder, out, args.torch_adam) if args.to == "universal" else convert(folder, out):
        print(line)
    return 0
