"""Tokens per second per device, and model FLOPs utilisation, with their formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_rl.config.model import ModelConfig

# a training pass is one forward and a backward of twice its cost; recomputation is not counted as useful work
TRAIN_TO_FORWARD = 3


def stage_seconds(seconds_by_rank: Sequence[float], log_max_throughput: bool) -> float:
    """The time of a stage that throughput is computed from: the slowest rank's, or else the mean over ranks.

    Raises:
        ValueError: no ranks.
    """
    if not seconds_by_rank:
        raise ValueError("seconds_by_rank is empty: a stage needs the time of at least one rank")
    return max(seconds_by_rank) if log_max_throughput else sum(seconds_by_rank) / len(seconds_by_rank)


def tokens_per_second_per_device(tokens: float, seconds: float, devices: int) -> float:
    """tokens / (seconds · devices).

    Raises:
        ValueError: seconds or devices not positive.
    """
    if not (seconds > 0 and devices > 0):
        raise ValueError(f"seconds = {seconds}, devices = {devices}: both must be > 0")
    return tokens / (seconds * devices)


def step_throughput(
    prompt_tokens: int,
    response_tokens: int,
    longest_response: int,
    devices: Mapping[str, int],
    seconds: Mapping[str, float],
    trained_tokens: int | None = None,
) -> dict[str, float]:
    """Throughput of one iteration; tokens are those of all its samples, a prompt once for each of its responses.

    - `throughput/total` (`e2e_tps`): (prompt + response tokens) / (timing/all · all devices)
    - `throughput/update` (`update_tps`): trained tokens / (timing/update · devices that train)
    - `throughput/generated` (`vllm_tps`): response tokens / (timing/rollout · devices that generate)
    - `throughput/longest_sample`: tokens of the longest response / timing/rollout

    Args:
        prompt_tokens: tokens of all samples' prompts.
        response_tokens: tokens of all responses.
        longest_response: tokens of the longest response.
        devices: devices that take part in each stage: "all", "update", "rollout".
        seconds: `timing/*` metrics of the step; a rate whose time is missing is left out.
        trained_tokens: prompt and response tokens of the samples that are trained on; None: all.

    Raises:
        ValueError: a time or the number of devices is not positive.
    """
    total = prompt_tokens + response_tokens
    trained = total if trained_tokens is None else trained_tokens
    rates = {
        "throughput/total": ("timing/all", total, devices["all"]),
        "throughput/update": ("timing/update", trained, devices["update"]),
        "throughput/generated": ("timing/rollout", response_tokens, devices["rollout"]),
        "throughput/longest_sample": ("timing/rollout", longest_response, 1),
    }
    return {
        name: tokens_per_second_per_device(tokens, seconds[stage], count)
        for name, (stage, tokens, count) in rates.items()
        if stage in seconds
    }


def train_flops(model: ModelConfig, sequence_lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward over packed sequences: Σ_s 6·N·s + 6·layers·heads·head_dim·s².

    `ModelConfig.forward_flops` says where the formula comes from.

    Args:
        model: shape of the model.
        sequence_lengths: tokens of each sequence, prompt and response.
    """
    return float(TRAIN_TO_FORWARD * sum(model.forward_flops(sequence_lengths)))


def model_flops_utilisation(flops: float, seconds: float, devices: int, peak_flops: float) -> float:
    """flops / (seconds · devices · peak_flops), between 0 and 1.

    Args:
        flops: useful FLOPs of all devices together, e.g. `train_flops` of the global batch.
        seconds: time they took.
        devices: number of devices.
        peak_flops: dense peak of one device at the precision used, FLOP/s.

    Raises:
        ValueError: seconds, devices or peak_flops not positive.
    """
    if not peak_flops > 0:
        raise ValueError(f"peak_flops = {peak_flops}: must be > 0")
    return tokens_per_second_per_device(flops, seconds, devices) / peak_flops
