"""What vLLM-Ascend's engine is told; that its versions read it, the contract tests show."""

import sys
from types import ModuleType

import pytest

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.generate import GenerateConfig
from mindspeed_rl.engine.vllm.npu import arguments


def install(monkeypatch: pytest.MonkeyPatch, *classes: str) -> None:
    """A package vllm_ascend whose configuration has these classes."""
    package, config = ModuleType("vllm_ascend"), ModuleType("vllm_ascend.ascend_config")
    for name in classes:
        setattr(config, name, type(name, (), {}))
    package.ascend_config = config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_ascend", package)
    monkeypatch.setitem(sys.modules, "vllm_ascend.ascend_config", config)


def test_nothing_is_told_by_default() -> None:
    assert arguments(GenerateConfig()) == {}


def test_features_are_sections_of_the_additional_config(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "TorchairGraphConfig", "AscendSchedulerConfig")
    graphs, both = {"torchair_graph_config": {"enabled": True}}, {"ascend_scheduler_config": {"enabled": True}}
    assert arguments(GenerateConfig(torchair_graph=True)) == {"additional_config": graphs}
    found = arguments(GenerateConfig(torchair_graph=True, ascend_scheduler=True))
    assert found == {"additional_config": graphs | both}


def test_a_version_without_them_is_not_asked_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "TorchairGraphConfig")
    with pytest.raises(ConfigError, match=r"generate_config.ascend_scheduler = True: .* 0\.11 does"):
        arguments(GenerateConfig(torchair_graph=True, ascend_scheduler=True))
