"""Rules on tools: what their one example in `test_rules.py` does not show; and what is as long as a response."""

import pytest
from tools_examples import TOOLS
from violations import violations_of

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import missing_files
from mindspeed_rl.config.rules import check


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("tools_config.search_url=http://localhost", "tools_config.search_url"),
        ("tools_config.python_memory_mib=128", "tools_config.python_memory_mib"),
        ("tools_config.tools=[search]", "tools_config.search_url"),
        ("tools_config.tools=[python,python]", "tools_config.tools.1"),
        ("rl_config.adv_estimator=remax", "rl_config.adv_estimator"),
        ("megatron_training.val_data_path=data.jsonl", "megatron_training.val_data_path"),
        ("generate_config.sampling_config.ignore_eos=true", "generate_config.sampling_config.ignore_eos"),
        ("generate_config.sampling_config.detokenize=true", "generate_config.sampling_config.detokenize"),
        ("megatron_training.stage=sft", "tools_config.tools"),
    ],
)
def test_what_does_not_go_with_tools_is_named(override: str, path: str) -> None:
    assert path in [violation.path for violation in violations_of(*TOOLS, override)]


def test_a_file_that_is_not_there_is_named() -> None:
    config = load_config("grpo_trainer_tiny_cpu_tools", ["tools_config.tool_file=nowhere.py"])[0]
    assert "tools_config.tool_file" in [violation.path for violation in missing_files(config)]


def test_a_response_is_as_long_as_all_its_turns() -> None:
    settings = ["rl_config.max_prompt_length=16", "tools_config.max_total_response_length=48"]
    config = load_config("grpo_trainer_tiny_cpu_tools", settings)[0]
    assert not check(config)
    assert config.longest_response == 48
    assert config.longest_sequence == 64
    (first, *_) = violations_of("tools_config.max_total_response_length=49", name="grpo_trainer_tiny_cpu_tools")
    assert "tools_config.max_total_response_length = 49" in first.message
