"""The whole thing as a user runs it: Ray, TransferDock, Megatron-core and vLLM, on two CPU ranks."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

from cli.convert_checkpoint import mcore_to_hf
from cli.train_grpo import main
from mindspeed_rl.checkpoint.hf import HFWeights
from tests.support.fresh_engine import fresh_parameters
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, command, run, started, training

SAME_IN_FLOAT32 = 2e-5  # other kernels or another order of summation, after few steps of lr 1e-3


def test_a_run_reports_what_users_look_for(streaming: list[dict[str, Any]]) -> None:
    assert [step["step"] for step in streaming] == [1, 2, 3, 4]
    first, last = streaming[0], streaming[-1]
    # generated ids are the trained ids: both engines give them the same log-probs
    assert first["rollout/logprob_diff_max"] < 1e-5
    # actor and reference start equal, and part as the actor trains
    assert first["actor/kl"] < last["actor/kl"]
    timings = "all rollout old_log_p reference_model update resharding_to_infer resharding_to_train adv rule_reward"
    for name in timings.split():
        assert last[f"timing/{name}"] >= 0
    for name in ("e2e_tps", "update_tps", "vllm_tps", "grpo/score/mean", "custom_rewards/mean", "grad_norm"):
        assert name in last
    assert 1 <= last["update/imbalance"] < 2  # of two ranks
    tokens = last["prompt_length/total"] + last["response_length/total"]
    assert last["e2e_tps"] == pytest.approx(tokens / last["timing/all"] / 2)


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor_config.pipeline_model_parallel_size=2",),
        ("generate_config.infer_tensor_parallel_size=2",),
        (
            "actor_config.tensor_model_parallel_size=2",
            "actor_config.sequence_parallel=true",
            "generate_config.infer_tensor_parallel_size=2",
            "rl_config.use_dynamic_bsz=true",
            "rl_config.max_packing_token_size=24",
            "~actor_config.micro_batch_size",
            "~rl_config.actor_forward_micro_batch_size",
            "~rl_config.ref_forward_micro_batch_size",
        ),
    ],
    ids=["PP2-to-TP1", "DP2-to-TP2", "TP2-to-TP2-token-cap"],
)
def test_layouts_train_the_same(
    overrides: tuple[str, ...], inputs: Path, streaming: list[dict[str, Any]], tmp_path: Path
) -> None:
    for found, expected in zip(run(inputs, tmp_path, *overrides), streaming, strict=False):
        exact = {
            name: value
            for name, value in training(expected).items()
            if name.split("/")[0] not in ("actor", "rollout")
        }
        assert {name: found[name] for name in exact} == exact  # the same tokens were sampled
        for name in ("actor/loss", "actor/pg_loss", "actor/kl", "actor/entropy", "actor/grad_norm"):
            assert found[name] == pytest.approx(expected[name], abs=SAME_IN_FLOAT32, rel=SAME_IN_FLOAT32), name
        assert found["rollout/logprob_diff_max"] < 1e-5


def worker_processes(driver: int) -> list[psutil.Process]:
    """The integrated workers below a driver; Ray names an actor's process after its class."""
    return [p for p in psutil.Process(driver).children(recursive=True) if "IntegratedWorker" in " ".join(p.cmdline())]


def iteration(latest: Path) -> int:
    """Number of the checkpoint that `latest` names."""
    return int(re.findall(r"\d+", latest.read_text())[0])


def test_a_killed_worker_ends_the_run_and_costs_nothing(
    inputs: Path, streaming: list[dict[str, Any]], tmp_path: Path
) -> None:
    latest = tmp_path / "checkpoints" / "latest"
    arguments = command(
        inputs,
        tmp_path,
        "megatron_training.save_interval=1",
        "megatron_training.train_iters=1000",
        "actor_config.async_save=true",
    )
    with started(arguments, until=lambda: latest.exists() and iteration(latest) >= 2) as process:
        os.kill(worker_processes(process.pid)[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - killed < 60
    assert process.returncode == 3
    assert re.search(r"worker rank \d failed in stage '[a-z_ ]+' at step \d+: its process died", stderr), stderr[
        -2000:
    ]

    # resuming from whatever was saved last reproduces the run that nobody killed
    saved = iteration(latest)
    total = max(4, saved + 1)
    kept = ("actor_config.keep_last=1", "actor_config.save_hf=true")
    steps = run(
        inputs, tmp_path, f"megatron_training.train_iters={total}", "actor_config.resume=auto", *kept, name="on"
    )
    assert steps[0]["step"] == saved + 1
    for step in steps:
        if step["step"] <= 4:
            assert training(step) == training(streaming[step["step"] - 1])
    assert steps[-1]["step"] == total
    (checkpoint,) = (tmp_path / "checkpoints").glob("iter_*")
    assert checkpoint.name == latest.read_text().strip()
    mcore_to_hf(checkpoint, tmp_path / "converted")
    converted, loaded = HFWeights(tmp_path / "converted"), AutoModelForCausalLM.from_pretrained(checkpoint / "hf")
    assert set(converted.names) <= set(loaded.state_dict())
    assert all(torch.equal(converted.tensor(name), loaded.state_dict()[name]) for name in converted.names)
    in_vllm = run_ranks(1, fresh_parameters, str(checkpoint / "hf"), 1)[0]
    for name in converted.names:
        if "norm" in name or "embed" in name:  # the others are joined, and packed for kernels
            expected = converted.tensor(name)
            assert torch.equal(in_vllm[name][: len(expected)], expected), name  # vocabularies are padded there


def shared_by(process: psutil.Process) -> set[Path]:
    """Files in shared memory that a process has in use; other tests, which run at the same time, have others."""
    try:
        maps = process.memory_maps()
    except psutil.NoSuchProcess:
        return set()
    return {Path(each.path) for each in maps if each.path.startswith("/dev/shm/")}


def test_interrupting_a_run_leaves_nothing_behind(inputs: Path, tmp_path: Path) -> None:
    one_rank = "rl_config.actor_resource.num_npus=1"
    arguments = command(inputs, tmp_path, "megatron_training.train_iters=1000", "run_name=run", one_rank)
    with started(arguments, until=(tmp_path / "run" / "metrics.jsonl").exists) as process:
        started_by_it = psutil.Process(process.pid)
        children = started_by_it.children(recursive=True)
        shared_memory = {path for each in (started_by_it, *children) for path in shared_by(each)}
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr[-2000:]
    assert stderr.rstrip().endswith("interrupted")
    assert "Traceback" not in stderr
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert shared_memory
    assert [path for path in shared_memory if path.exists()] == []


FAULTY = (
    "megatron_training.global_batch_size=16",
    "megatron_training.no_shuffle=true",
    "rl_config.mini_batch_size=16",
    "rl_config.init_kl_coef=0",
    "rl_config.entropy_coeff=0",
    "rl_config.verifier_timeout=2",
    "rl_config.custom_reward_function.name=faulty",
    "rl_config.actor_resource.num_npus=1",
    "actor_config.no_save_optim=true",
)


@pytest.fixture(scope="module")
def complete(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of one iteration, whose verifiers fail in all ways."""
    folder = tmp_path_factory.mktemp("complete")
    return folder, run(inputs, folder, *FAULTY, "megatron_training.train_iters=1")


def test_failing_verifiers_are_counted_and_do_not_train(complete: tuple[Path, list[dict[str, Any]]]) -> None:
    (step,) = complete[1]
    assert {name: step[f"reward_status/{name}"] for name in ("nan", "crashed", "timeout", "error", "ok")} == {
        "nan": 4,
        "crashed": 4,
        "timeout": 4,
        "error": 4,
        "ok": 48,
    }
    assert step["reward_failed_samples"] == 16
    assert step["reward/mean"] == 0.5  # failures are left out, not counted as 0
    # all other rewards are equal: nothing to learn, and the update says so exactly
    assert step["reward/zero_variance_groups"] == 1
    assert step["actor/pg_loss"] == 0
    assert step["grad_norm"] == 0


def test_a_complete_run_has_nothing_left_to_do(
    inputs: Path, tmp_path: Path, complete: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = ("megatron_training.train_iters=1", "actor_config.resume=auto")
    again = command(inputs, complete[0], *FAULTY, *resumed)[2:]
    assert main([*again, "actor_config.no_load_optim=true"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    # what was not saved, and a position in other data, are missed before anything starts
    more = [*again, "megatron_training.train_iters=2"]
    assert main(more) == 1
    assert "set no_load_optim: true" in capsys.readouterr().err
    (tmp_path / "data.jsonl").write_text((inputs / "data.jsonl").read_text() * 2)
    other = [*more, "actor_config.no_load_optim=true", f"megatron_training.data_path={tmp_path}/data.jsonl"]
    assert main(other) == 1
    assert "data position cannot be resumed: size was 16" in capsys.readouterr().err


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A Ray cluster that runs already."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 6})
    yield started
    started.shutdown()


def test_free_order_several_epochs_own_algorithms_and_decoding_engine_on_a_running_cluster(
    inputs: Path, tmp_path: Path, cluster: Cluster
) -> None:
    documented = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", documented, flags=re.DOTALL)
    (tmp_path / "my_algorithms.py").write_text(example)
    steps = run(
        inputs,
        tmp_path,
        f"ray_address={cluster.address}",
        "rl_config.guarantee_order=false",
        "rl_config.epochs=2",
        "rl_config.kl_ctrl_type=adaptive",
        f"rl_config.custom_algorithm_file={tmp_path}/my_algorithms.py",
        "rl_config.adv_estimator=sign",
        "rl_config.loss_type=reinforce",
        "generate_config.sampling_config.detokenize=true",
        "generate_config.sampling_config.logprobs=false",
        "generate_config.per_request_seed=false",
        "generate_config.offload_train_param=true",
        "generate_config.offload_train_grad=true",
        "generate_config.offload_train_optimizer=true",
    )
    assert len(steps) == 2
    assert steps[1]["actor/kl_coef"] != steps[0]["actor/kl_coef"]
    assert "actor/pg_clipfrac" not in steps[0]  # the example's loss does not clip
    assert not any(name.startswith("rollout/logprob") for name in steps[0])
    assert steps[0]["reward_status/ok"] == 32
    # a cluster that was joined outlives the run
    assert all(node.remaining_processes_alive() for node in cluster.list_all_nodes())
