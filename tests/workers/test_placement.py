"""Which nodes a run's ranks go to, for clusters that can and cannot hold it."""

import pytest

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.workers.placement import Node, World, fit, worlds_of

ACTOR, ROLLOUT = "rl_config.actor_resource.num_npus", "rl_config.rollout_resource.num_npus"


def nodes(*devices: int) -> list[Node]:
    return [Node(f"{number:056x}", f"10.0.0.{number}", count) for number, count in enumerate(devices, 1)]


@pytest.mark.parametrize(
    ("worlds", "devices", "sizes"),
    [
        ([World(ACTOR, 16, 8)], (8, 8), [8]),
        ([World(ACTOR, 8, 4)], (0, 4, 5), [4]),  # a head without devices
        ([World(ACTOR, 4, 2), World(ROLLOUT, 4, 4)], (4, 4), [2, 4]),  # the large group first, else it finds no node
        ([World(ACTOR, 16, 16)], (8, 8), [1]),  # no node could hold the group: it must cross
        ([World(ACTOR, 3, 1)], (1, 1, 1), [1]),
    ],
)
def test_groups_stay_on_a_node_where_one_is_large_enough(
    worlds: list[World], devices: tuple[int, ...], sizes: list[int]
) -> None:
    assert fit(worlds, nodes(*devices), "NPU") == sizes


@pytest.mark.parametrize(
    ("worlds", "devices", "key", "message"),
    [
        # enough devices, but a group of four would have to cross nodes
        ([World(ACTOR, 8, 4)], (6, 2), ACTOR, "in groups of 4 on one node; 10.0.0.1 has 6, 10.0.0.2 has 2"),
        ([World(ACTOR, 16, 16)], (8, 7), ACTOR, "16 NPU devices, in groups of 1 on one node; 10.0.0.1 has 8"),
        ([World(ACTOR, 4, 4), World(ROLLOUT, 8, 2)], (8,), ROLLOUT, "the run takes 12 NPU devices"),
        ([World(ACTOR, 1, 1)], (), ACTOR, "no nodes"),
    ],
)
def test_what_cannot_be_placed_names_nodes_and_devices(
    worlds: list[World], devices: tuple[int, ...], key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(worlds, nodes(*devices), "NPU")
    (violation,) = caught.value.violations
    assert violation.path == key
    assert message in violation.message


def test_a_group_holds_both_tensor_parallel_sizes() -> None:
    for tp, infer_tp, group in ((4, 2, 4), (2, 4, 4), (4, 1, 4)):
        training = f"actor_config.tensor_model_parallel_size={tp}"
        sizes = (training, f"generate_config.infer_tensor_parallel_size={infer_tp}")
        cfg, _ = load_config("grpo_trainer_qwen25_7b", sizes)
        assert worlds_of(derive_layout(cfg)) == [World(ACTOR, 8, group)]
