"""Log-probs as transformers computes them."""

import torch

from mindspeed_rl.types import RolloutBatch


def hf_log_probs(model: torch.nn.Module, batch: RolloutBatch, temperature: float) -> list[torch.Tensor]:
    """Of every token of the vocabulary at each place of each response: B x [response length, V]."""
    results = []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        results.append(logits.log_softmax(-1))
    return results


def of_responses(log_probs: list[torch.Tensor], batch: RolloutBatch) -> torch.Tensor:
    """[R], those of the responses' own tokens."""
    picked = [lp.gather(-1, r[:, None])[:, 0] for lp, r in zip(log_probs, batch.responses, strict=True)]
    return torch.cat(picked)
