"""Train a tiny reward model to tell right sums from wrong ones, on pairs of answers, for examples and tests.

python examples/make_reward_model.py --data examples/data/addition.jsonl --output examples/models/tiny_reward
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForSequenceClassification

if __name__ == "__main__":  # run as a file: Python then searches examples/ instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.make_tiny_model import EOS, TOKENS, make_tokenizer

LONGEST_ANSWER = 3  # characters
BATCH = 256  # pairs a step


def wrong_answer(right: str, draw: random.Random) -> str:
    """Another digit, the right answer with more after it, anything, or nothing: what a policy may come up with."""
    kind = draw.random()
    if kind < 0.45:
        wrong = draw.choice("0123456789")
    elif kind < 0.7:
        wrong = right + "".join(draw.choices(TOKENS[1:], k=draw.randint(1, LONGEST_ANSWER - 1)))
    else:
        wrong = "".join(draw.choices(TOKENS[1:], k=draw.randint(0, LONGEST_ANSWER)))
    return wrong if wrong != right else wrong_answer(right, draw)


def make_reward_model(data: Path, output: Path, steps: int = 400, seed: int = 0) -> float:
    """Train with the loss of Bradley and Terry and save a Hugging Face folder, complete or not at all.

    A pair is a right answer and a wrong one to a prompt; the loss is -log σ(score of the right - score of the wrong)
    (Ouyang et al. 2022, arXiv:2203.02155, section 3.5).

    Args:
        data: jsonl with the columns `prompt` and `answer`, in the characters of `TOKENS`.
        output: the folder; an existing one is replaced.
        steps: of the optimizer, with `BATCH` pairs each.
        seed: of weights and pairs.

    Returns:
        The share of fresh pairs whose right answer has the higher score.
    """
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    draw, tokenizer = random.Random(seed), make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
        num_labels=1,
    )
    torch.manual_seed(seed)
    model = Qwen2ForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)

    def margins() -> torch.Tensor:
        """Of a batch of pairs, the right answer's score less the wrong one's, [BATCH]."""
        pairs = [(row, wrong_answer(row["answer"], draw)) for row in draw.choices(rows, k=BATCH)]
        texts = [row["prompt"] + row["answer"] for row, _ in pairs] + [row["prompt"] + wrong for row, wrong in pairs]
        right, wrong = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0].chunk(2)
        return right - wrong

    for _ in range(steps):
        loss = -F.logsigmoid(margins()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        accuracy = float((margins() > 0).float().mean())
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.tmp{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(output, ignore_errors=True)
    os.replace(unfinished, output)
    return accuracy


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="jsonl with prompts and right answers")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    accuracy = make_reward_model(options.data, options.output, options.steps, options.seed)
    print(f"{options.output}: the right answer has the higher score in {accuracy:.1%} of fresh pairs")


if __name__ == "__main__":
    main()
