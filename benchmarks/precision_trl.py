"""What TRL 1.16 sees of its first steps in bfloat16: for docs/precision.md.

  python benchmarks/precision_trl.py FOLDER     # two minutes of one CPU core; needs trl==1.16.0

FOLDER holds SmolLM2-135M-Instruct on bfloat16's grid. GRPOTrainer gets its name, as on TRL's pages:
the weights train in float32, and with bf16=True, TRL's default, autocast rounds them in each
forward pass. The modes are those of precision.py; "spread" calls plainrlhf's spread_weights before
the training. The learning rate is constant.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing.models import spread_weights
from tasks import numeric_match

RESULTS = Path(__file__).with_suffix(".json")
STEPS = 3


def train(model: str, mode: str, folder: str) -> dict:
    """TRL's own metrics of each step."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(30), numbers.randrange(30)) for _ in range(100)]
    rows = [{"prompt": f"3+4=7\n{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=mode != "float32", seed=0, report_to="none",
        learning_rate=5e-6,
        gradient_checkpointing=False, lr_scheduler_type="constant", beta=0.04, max_steps=STEPS,
        per_device_train_batch_size=32, num_generations=8, max_completion_length=4,
        temperature=1.0, logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=numeric_match, args=config, train_dataset=Dataset.from_list(rows)
    )
    weights = {str(p.dtype) for p in trainer.model.parameters()}
    if mode == "spread":
        spread_weights(trainer.model.base_model)
    set_seed(0)
    trainer.train()
    steps = [line for line in trainer.state.log_history if "kl" in line]
    return {"weights": sorted(weights), "kl": [round(line["kl"], 5) for line in steps],
            "reward": [round(line["reward"], 4) for line in steps]}  # fmt: skip


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for mode in ("bfloat16", "float32", "spread"):
        if mode not in results and len(sys.argv) > 1:
            with tempfile.TemporaryDirectory() as folder:
                results[mode] = train(sys.argv[1], mode, folder)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(mode, results.get(mode))


if __name__ == "__main__":
    main()
