"""PPO in the whole trainer: a critic that warms up, leaves the device and comes back, and goes on; a shared one."""

from pathlib import Path

from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import open_checkpoint
from tests.support.runs import run, training

PPO = (
    "megatron_training.stage=ray_ppo",
    "megatron_training.train_iters=3",
    "megatron_training.save_interval=1",
    "rl_config.adv_estimator=gae",
    "rl_config.use_kl_in_reward=true",
    "rl_config.kl_penalty=k1",
    "rl_config.kl_ctrl_type=adaptive",
    "rl_config.kl_horizon=1000",
    "rl_config.critic_warmup=1",
    "rl_config.overlong_buffer_enable=true",
    "rl_config.overlong_buffer=2",
    "critic_config.lr=2e-3",
    *(
        f"generate_config.offload_{part}=true"
        for part in ("train_param", "train_grad", "train_optimizer", "reference")
    ),
)


SHARED = (
    "rl_config.critic_shares_actor=true",
    "rl_config.critic_warmup=0",
    "megatron_training.train_iters=2",
    "actor_config.save_hf=true",
)


def test_a_critic_trains_beside_the_actor_and_goes_on(inputs: Path, tmp_path: Path) -> None:
    steps = run(inputs, tmp_path, *PPO)
    warm_up, *others = steps
    assert "actor/loss" not in warm_up  # the critic trains alone
    assert "actor/lr" not in warm_up
    assert [step["critic/lr"] for step in steps] == [2e-3] * 3
    assert [step["actor/lr"] for step in others] == [1e-3] * 2
    assert warm_up["critic/values"] != 0  # the second of two updates
    assert others[1]["actor/kl"] > 0
    # rewards reach the critic, less what KL and length cost
    assert all(step["reward/overlong_penalty"] > 0 for step in steps)
    assert all(step["critic/returns"] != 0 for step in steps)
    for step in others:
        assert step["actor/pg_loss"] - 0.01 * step["actor/entropy"] - step["actor/loss"] < 1e-6  # no KL in the loss
    coefficients = [step["actor/kl_coef"] for step in steps]
    assert coefficients[2] not in coefficients[:2]  # it adapts, and goes on from where it was:
    again = run(inputs, tmp_path, *PPO, f"actor_config.load={tmp_path}/checkpoints/iter_0000002", name="again")
    assert [training(step) for step in again] == [training(steps[2])]


def test_a_critic_on_the_actors_layers_trains_with_it(inputs: Path, tmp_path: Path) -> None:
    steps = run(inputs, tmp_path, *(key for key in PPO if not key.startswith("critic_config")), *SHARED)
    for step in steps:
        assert step["actor/lr"] == 1e-3
        assert not {"critic/lr", "critic/grad_norm", "timing/values"} & step.keys()  # one step, one pass
        assert step["timing/old_log_p"] > 0
        assert step["critic/vf_loss"] > 0
        assert step["critic/values"] != 0  # of the second update
    checkpoint = open_checkpoint(tmp_path / "checkpoints")
    assert checkpoint.tensors.names("value_head.model.") == ["value_head.model.score.weight"]
    assert "score.weight" not in {*checkpoint.weight_names, *HFWeights(checkpoint.path / "hf").names}
