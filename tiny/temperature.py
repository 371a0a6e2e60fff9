"""Does a lower temperature do what the training does? The chance of the right answer at every one.

  python tiny/temperature.py                               # of the embedded model
  python tiny/temperature.py runs/ppo-tiny-add-s0/model    # and of a trained one, beside it

Nothing is sampled: a single forward pass over prompt, right answer and EOS gives the probability of
that answer at any temperature. Writes temperature.json and temperature.png here, over the held-out
sums of the task `add`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tasks import add_prompts  # noqa: E402
from tiny.make import has_carry  # noqa: E402

TEMPERATURES = [0.02, *(t / 20 for t in range(1, 31))]


@torch.no_grad()
def chances(folder: Path, rows: list[dict], temperatures: list[float]) -> Tensor:
    """The probability of the right answer and EOS to each sum, at each temperature: (K, N)."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in rows]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    logits = model(**batch).logits[:, :-1].double()
    targets = batch["input_ids"][:, 1:].unsqueeze(2)
    # Position t predicts token t + 1. The answer starts where the prompt ends: every token of this
    # model is a character.
    starts = torch.tensor([len(row["prompt"]) for row in rows]).unsqueeze(1)
    is_answer = (torch.arange(1, targets.shape[1] + 1) >= starts) & batch["attention_mask"][:, 1:]
    found = []
    for temperature in temperatures:
        logprobs = (logits / temperature).log_softmax(-1).gather(2, targets).squeeze(2)
        found.append((logprobs * is_answer).sum(1).exp())
    return torch.stack(found)


def measure(folder: Path) -> dict[str, list[float]]:
    """The mean chance at each of TEMPERATURES: of all held-out sums, and of those whose units carry
    and of those whose units don't.
    """
    rows = add_prompts()[1]
    carry = torch.tensor([has_carry(row["prompt"]) for row in rows])
    found = chances(folder, rows, TEMPERATURES)
    parts = {"all": found, "units carry": found[:, carry], "units don't": found[:, ~carry]}
    return {name: [round(x, 5) for x in part.mean(1).tolist()] for name, part in parts.items()}


def draw(curves: dict[str, dict[str, list[float]]]) -> None:
    """Chance against temperature: a colour per part of the sums, dashed for the trained model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.4), layout="constrained")
    axes = figure.add_subplot(xlim=(0, 1.5), ylim=(0, 1.02))
    for (model, parts), style in zip(curves.items(), ("-", "--")):
        for (part, values), color in zip(parts.items(), ("black", "#c51b7d", "#7b5cc4")):
            axes.plot(TEMPERATURES, values, style, color=color, label=f"{part}, {model}")
    axes.set(xlabel="temperature", ylabel="chance of the right answer")
    axes.set_title("No temperature makes the model carry; training does", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, ncols=len(curves), loc="outside lower center")
    figure.savefig(HERE / "temperature.png", dpi=100)


def main() -> None:
    folders = dict(zip(("before", "after"), [HERE, *map(Path, sys.argv[1:2])]))
    results = HERE / "temperature.json"
    curves = json.loads(results.read_text()) if results.exists() else {}
    curves |= {"temperatures": TEMPERATURES}
    curves |= {name: measure(folder) for name, folder in folders.items()}
    results.write_text(json.dumps(curves, indent=1) + "\n")
    del curves["temperatures"]
    draw(curves)
    for name, parts in curves.items():
        best = max(range(len(TEMPERATURES)), key=lambda i: parts["all"][i])
        for label, i in (
            ("temperature 1", TEMPERATURES.index(1.0)),
            ("greedy (temperature 0.02)", 0),
            (f"the best temperature, {TEMPERATURES[best]}", best),
        ):
            cells = ", ".join(f"{part} {values[i]:.3f}" for part, values in parts.items())
            print(f"{name}, {label}: {cells}")


if __name__ == "__main__":
    main()
