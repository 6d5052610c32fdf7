"""Convert weights between a Hugging Face folder and a checkpoint of this trainer, without loss, on the CPU.

    python cli/convert_checkpoint.py --direction hf2mcore --load <hf folder> --save <new checkpoints folder>
    python cli/convert_checkpoint.py --direction mcore2hf --load <checkpoint> --save <new hf folder>

Checkpoints do not depend on the layout of the run that writes or reads them. One made here holds weights only.
`mcore2hf` needs nothing beside the checkpoint, which carries the Hugging Face configuration and tokenizer files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspeed_rl.checkpoint.files import new_folder
from mindspeed_rl.checkpoint.hf import HFWeights, write_hf
from mindspeed_rl.checkpoint.state import WEIGHTS, CheckpointStore, is_checkpoint, open_checkpoint
from mindspeed_rl.checkpoint.tensors import pieces_of
from mindspeed_rl.common.command_line import run_command
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.resharding.layout import WeightLayout
from mindspeed_rl.resharding.names import check_hf_names, parameter_table


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert_checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--direction", required=True, choices=["hf2mcore", "mcore2hf"])
    parser.add_argument("--load", required=True, type=Path, help="folder to read")
    parser.add_argument("--save", required=True, type=Path, help="folder to write; it must not hold anything yet")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = build_parser().parse_args(argv)
    return run_command(lambda: _convert(args))


def _convert(args: argparse.Namespace) -> int:
    convert = hf_to_mcore if args.direction == "hf2mcore" else mcore_to_hf
    convert(args.load, args.save)
    print(f"wrote {args.save}")
    return 0


def hf_to_mcore(load: Path, save: Path) -> None:
    """Write a weights-only checkpoint (iteration 0); one tensor is in memory at a time.

    Raises:
        CheckpointError: a folder or tensor is missing or damaged, the model is not supported, or `save` is in use.
    """
    reader = HFWeights(load)
    try:
        model = ModelConfig.from_hf(reader.config())
    except ValueError as error:
        raise CheckpointError(f"{load / 'config.json'}: {error}") from error
    check_hf_names(model, reader.names)
    shapes = {n: s for p in parameter_table(model) for n, s in zip(p.hf_names, p.hf_shapes, strict=True)}
    pieces = chain.from_iterable(pieces_of(WEIGHTS + name, reader.tensor(name, shapes[name])) for name in shapes)
    with new_folder(save) as root:
        store = CheckpointStore(root, load, model, WeightLayout.even(model))
        store.begin(0)
        store.write_rank(0, 0, pieces, {})
        store.commit(0, {"weights_only": True})


def mcore_to_hf(load: Path, save: Path) -> None:
    """Write a Hugging Face folder from a checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing or damaged or carries no Hugging Face files, or `save` is in use.
    """
    if not is_checkpoint(load):
        raise CheckpointError(f"{load} is neither a checkpoint nor a folder of checkpoints of this trainer")
    reader = open_checkpoint(load)
    if reader.hf_folder is None:
        raise CheckpointError(f"{reader.path} does not carry the model's Hugging Face files")
    reader.check_tensors()
    write_hf(save, reader.weights(), reader.hf_folder)


if __name__ == "__main__":
    sys.exit(main())
