"""Convert weights between a Hugging Face folder and a checkpoint of this trainer, without loss, on the CPU.

    python cli/convert_checkpoint.py --direction hf2mcore --load <hf folder> --save <new checkpoints folder> \\
        --tensor-parallel 2 --pipeline-parallel 2
    python cli/convert_checkpoint.py --direction mcore2hf --load <checkpoint, any layout> --save <new hf folder>

A checkpoint made here holds weights only. `mcore2hf` needs nothing beside the checkpoint, which carries the model's
shape, its layout and the Hugging Face configuration and tokenizer files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

if __name__ == "__main__":  # run as a file: Python then searches cli/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from mindspeed_rl.checkpoint.files import new_folder
from mindspeed_rl.checkpoint.hf import HFWeights, write_hf
from mindspeed_rl.checkpoint.state import CheckpointReader, CheckpointStore, is_checkpoint, open_checkpoint
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
    parser.add_argument("--tensor-parallel", type=_count, help="hf2mcore: ranks that share each layer (default 1)")
    parser.add_argument("--pipeline-parallel", type=_count, help="hf2mcore: pipeline stages (default 1)")
    parser.add_argument("--expert-parallel", type=_count, help="hf2mcore: ranks that share the experts (default 1)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.direction == "mcore2hf" and (args.tensor_parallel or args.pipeline_parallel or args.expert_parallel):
        parser.error("mcore2hf reads the layout from the checkpoint: leave out --tensor/pipeline/expert-parallel")
    return run_command(lambda: _convert(args))


def _convert(args: argparse.Namespace) -> int:
    if args.direction == "hf2mcore":
        sizes = (args.tensor_parallel, args.pipeline_parallel, args.expert_parallel)
        hf_to_mcore(args.load, args.save, *(size or 1 for size in sizes))
    else:
        mcore_to_hf(args.load, args.save)
    print(f"wrote {args.save}")
    return 0


def hf_to_mcore(
    load: Path, save: Path, tensor_parallel: int = 1, pipeline_parallel: int = 1, expert_parallel: int = 1
) -> None:
    """Write a weights-only checkpoint (iteration 0) for a layout; one rank's weights are in memory at a time.

    Ranks that share the experts are data-parallel ranks, of which the layout has as many.

    Raises:
        CheckpointError: a folder or tensor is missing or damaged, the model is not supported or does not fit the
            layout, or `save` is in use.
    """
    reader = HFWeights(load)
    config = reader.config()
    try:
        model = ModelConfig.from_hf(config)
    except ValueError as error:
        raise CheckpointError(f"{load / 'config.json'}: {error}") from error
    check_hf_names(model, reader.names)
    layout = WeightLayout.even(model, tensor_parallel, pipeline_parallel, expert_parallel, expert_parallel)
    with new_folder(save) as root:
        store = CheckpointStore(root, load, model, layout)
        store.begin(0)
        for rank in range(layout.world):
            tp_rank, pp_rank, replica = layout.coordinates(rank)
            weights = {
                name: parameter.load_shard(reader, tp_rank, tensor_parallel)
                for name, parameter in layout.held(model, pp_rank, layout.expert_rank(replica)).items()
            }
            store.write_rank(0, rank, {"model": weights})
        store.commit(0, {"weights_only": True})


def mcore_to_hf(load: Path, save: Path) -> None:
    """Write a Hugging Face folder from a checkpoint of any layout.

    Raises:
        CheckpointError: the checkpoint is missing or damaged or does not describe its model, or `save` is in use.
    """
    if not is_checkpoint(load):
        raise CheckpointError(f"{load} is neither a checkpoint nor a folder of checkpoints of this trainer")
    reader = open_checkpoint(load)
    if reader.model is None or reader.hf_folder is None:
        raise CheckpointError(f"{reader.path} does not carry the model's shape and Hugging Face files")
    write_hf(save, _hf_tensors(reader, reader.model), reader.hf_folder)


def _hf_tensors(reader: CheckpointReader, model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Whichever layers and experts each rank had: the ranks' own states say it."""
    world, tp, pp, ep = (reader.layout[key] for key in ("world", "tp", "pp", "ep"))
    missing = {parameter.name: parameter for parameter in parameter_table(model)}
    for pp_rank, ep_rank in product(range(pp), range(ep)):
        ranks = [pp_rank * (world // pp) + ep_rank * tp + tp_rank for tp_rank in range(tp)]
        states = [reader.load_rank(rank, mmap=True)["model"] for rank in ranks]
        for name in [name for name in missing if name in states[0]]:
            for rank, state in zip(ranks, states, strict=True):
                if name not in state:
                    raise CheckpointError(f"{reader.path}: rank {rank} lacks {name}")
            yield from missing.pop(name).shards_to_hf([state[name] for state in states])
    if missing:
        raise CheckpointError(f"{reader.path}: no rank has {', '.join(missing)}")


if __name__ == "__main__":
    sys.exit(main())
