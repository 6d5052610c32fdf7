"""What a device and its links can do: files in `configs/cluster/`, or one of the user's own."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.compose import shipped_configs, type_violations
from mindspeed_rl.config.section import Count, NonNegative, Positive, Section, Share

GIGA, TERA = 1e9, 1e12


class Cluster(Section):
    """Devices of one type, in equal nodes. Rates are peaks; the shares say what of them is reached."""

    device: Literal["npu", "cuda", "cpu"] = Field(description="the configuration's `device`")
    memory_gib: Positive = Field(description="memory of a device")
    tflops: Positive = Field(description="dense matrix products in bfloat16 (cpu: float32), TFLOP/s of a device")
    memory_gb_s: Positive = Field(description="device memory, GB/s")
    devices_per_node: Count = Field(description="devices of a node")
    node_gb_s: Positive = Field(description="from a device to others of its node, GB/s, one direction")
    network_gb_s: Positive = Field(description="from a device to other nodes, GB/s, one direction")
    host_gb_s: Positive = Field(description="between a device and its host's memory, GB/s, one direction")
    latency_us: NonNegative = Field(10.0, description="of one collective, microseconds")
    training_share: Share = Field(description="of `tflops`, in forward and backward passes")
    scoring_share: Share = Field(description="of `tflops`, in passes without gradients")
    decode_share: Share = Field(description="of what memory and products allow, in a decode step")
    decode_step_ms: NonNegative = Field(1.0, description="what a decode step takes besides, milliseconds")
    link_share: Share = Field(0.7, description="of links' and memory's rates, in transfers")
    switch_s: NonNegative = Field(
        0.2, description="seconds for vLLM to sleep and wake up, and for calls between both"
    )

    @property
    def training_flops(self) -> float:
        """FLOP/s of a device in training."""
        return self.tflops * TERA * self.training_share

    @property
    def scoring_flops(self) -> float:
        """FLOP/s of a device in passes without gradients."""
        return self.tflops * TERA * self.scoring_share

    def link(self, ranks: int) -> float:
        """Bytes/s that each of so many neighbouring ranks gets to the others."""
        rate = self.node_gb_s if ranks <= self.devices_per_node else self.network_gb_s
        return rate * GIGA * self.link_share

    @property
    def memory(self) -> float:
        """Bytes/s of device memory, reached."""
        return self.memory_gb_s * GIGA * self.link_share

    @property
    def host(self) -> float:
        """Bytes/s between device and host, reached."""
        return self.host_gb_s * GIGA * self.link_share


def load_cluster(name: str) -> Cluster:
    """A file of `configs/cluster/`, without its suffix, or the path of a YAML file.

    Raises:
        ConfigError: there is none, or it does not say what it must.
    """
    folder = shipped_configs() / "cluster"
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.yaml"))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}, or a YAML file"
        raise ConfigError([Violation("--cluster", name, "no such type of cluster", hint)])
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError([Violation("--cluster", name, f"is not valid YAML: {error}")]) from error
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(list(type_violations(raw, error, Cluster).values())) from error
