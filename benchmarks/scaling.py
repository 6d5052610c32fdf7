"""From 8 to 4,096 devices, as the planner sees it: what grows with the cluster, and what the controller has left.

Qwen2.5-32B on H200s, training TP 8, rollout TP 4, 2 prompts a device with 8 responses of 2,048 tokens in the mean (at
most 8,192): the work grows with the devices. Nothing runs but the model of `mindspeed_rl/planner`, whose rates were
measured on one H200 and on two CPU cores (the dock). `python benchmarks/scaling.py`
"""

from __future__ import annotations

from records import Record, publish

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout, scored_stages
from mindspeed_rl.planner.cluster import load_cluster
from mindspeed_rl.planner.lengths import lognormal_lengths
from mindspeed_rl.planner.step import StepTime, Work, controller_seconds, dock_requests, dock_stages, step_time

CONFIG, CLUSTER, DEVICES = "grpo_trainer_qwen25_32b_h200", "h200", [8 * 2**power for power in range(10)]
PROMPTS, LONGEST, MEAN = 2, 8192, 2048  # of a device; tokens of responses
VERIFIER_SECONDS = 0.01  # of a process, for a response: math-verify on an answer that parses


def overrides(devices: int) -> list[str]:
    """The run on so many devices."""
    prompts = PROMPTS * devices
    return [
        f"rl_config.actor_resource.num_npus={devices}",
        f"megatron_training.global_batch_size={prompts}",
        f"rl_config.mini_batch_size={prompts}",
        f"megatron_training.seq_length={1024 + LONGEST}",
        f"generate_config.max_model_len={1024 + LONGEST}",
        f"generate_config.sampling_config.max_tokens={LONGEST}",
        f"rl_config.verifier_parallel={8 * max(1, devices // 8)}",
        "device_memory_gib=null",
    ]


def measure(devices: int) -> tuple[StepTime, float]:
    """Seconds of the stages, and the controller's."""
    cfg, _ = load_config(CONFIG, overrides(devices))
    model, layout, cluster = resolve_model(cfg), derive_layout(cfg), load_cluster(CLUSTER)
    work = Work(512, lognormal_lengths(MEAN, LONGEST, 0.8, 512), VERIFIER_SECONDS)
    times = step_time(cfg, model, layout, cluster, work)
    assert scored_stages(cfg), "the reference is scored"
    return times, controller_seconds(layout, dock_stages(cfg), dock_requests(cfg, layout))


def main() -> None:
    """Simulate, print and write the records."""
    records, smallest = [], measure(DEVICES[0])[0].total
    for devices in DEVICES:
        times, controller = measure(devices)
        note = f"qwen25_32b, {PROMPTS * devices} prompts x 8, simulated"
        stages = {"step": times.total, "rollout": times.rollout, "update": times.update, "scoring": times.scoring}
        stages |= {"resharding": times.resharding, "dock": times.dock, "calls": times.calls, "controller": controller}
        records += [Record(f"scaling.{stage}_s_{devices}", value, "s", note=note) for stage, value in stages.items()]
        records.append(Record(f"scaling.efficiency_{devices}", smallest / times.total, "", 1.0, note=note))
    publish("scaling-simulated", records, "simulated H200s")


if __name__ == "__main__":
    main()
