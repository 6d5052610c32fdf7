"""PPO in the whole trainer: a critic that warms up, leaves the device and comes back, and goes on."""

from pathlib import Path

from tests.support.runs import run, training

PPO = (
    "megatron_training.stage=ray_ppo",
    "megatron_training.train_iters=3",
    "megatron_training.save_interval=1",
    "rl_config.adv_estimator=gae",
    "rl_config.use_kl_in_reward=true",
    "rl_config.kl_penalty=k1",
    "rl_config.critic_warmup=1",
    "rl_config.overlong_buffer_enable=true",
    "rl_config.overlong_buffer=2",
    "critic_config.lr=2e-3",
    *(
        f"generate_config.offload_{part}=true"
        for part in ("train_param", "train_grad", "train_optimizer", "reference")
    ),
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
    again = run(inputs, tmp_path, *PPO, f"actor_config.load={tmp_path}/checkpoints/iter_0000002", name="again")
    assert [training(step) for step in again] == [training(steps[2])]
