"""Does a lower temperature do what the training does? The chance of the right answer at any one.

  python tiny/temperature.py                               # of the embedded model
  python tiny/temperature.py runs/ppo-tiny-add-s0/model    # of a trained one

Nothing is sampled: a single forward pass over prompt, right answer and EOS gives the probability of
that answer at any temperature, to each of the held-out sums of the task `add`.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import token_logprobs  # noqa: E402
from tasks import add_prompts  # noqa: E402
from tiny.make import has_carry  # noqa: E402

TEMPERATURES = [0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5]


@torch.no_grad()
def chances(folder: Path, rows: list[dict], temperatures: list[float]) -> Tensor:
    """The probability of the right answer and EOS to each sum, at each temperature: (K, N)."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in rows]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    logits = model(**batch).logits[:, :-1].double()
    # Position t predicts token t + 1. The answer starts where the prompt ends: every token of this
    # model is a character.
    starts = torch.tensor([len(row["prompt"]) for row in rows]).unsqueeze(1)
    positions = torch.arange(1, batch.input_ids.shape[1])
    is_answer = (positions >= starts) & batch.attention_mask[:, 1:].bool()
    logprobs = [token_logprobs(logits / t, batch.input_ids[:, 1:]) for t in temperatures]
    return torch.stack([x.masked_fill(~is_answer, 0).sum(1).exp() for x in logprobs])


def main() -> None:
    rows = add_prompts()[1]
    carry = torch.tensor([has_carry(row["prompt"]) for row in rows])
    print("temperature | all | units carry | units don't")
    found = chances(Path(*sys.argv[1:2] or [HERE]), rows, TEMPERATURES)
    for temperature, chance in zip(TEMPERATURES, found, strict=True):
        parts = chance, chance[carry], chance[~carry]
        print(f"{temperature:4} | " + " | ".join(f"{part.mean():.1%}" for part in parts))


if __name__ == "__main__":
    main()
