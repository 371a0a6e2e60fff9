"""Evaluate a model on held-out prompts, as the scripts do while they train, without training.

python tools/evaluate.py --model runs/ppo-tiny-add-s0/model --task add --max_new_tokens 5
python tools/evaluate.py --model Qwen/Qwen2.5-0.5B-Instruct --eval_prompts openai/gsm8k:main:test \\
    --prompt_template "{question}" --system_prompt "" --reward gsm8k
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import tasks
from plumbing.config import TaskConfig, flag, parse_flags
from plumbing.data import load_task, sampling_options
from plumbing.errors import Fault, InputError
from plumbing.metrics import evaluate, headline
from plumbing.models import load_policy
from plumbing.run import run_main


@dataclass(kw_only=True)
class Config(TaskConfig):
    num_generations: int = flag(1)
    max_new_tokens: int = flag(tiny=5, other=256)
    num_eval_prompts: int = flag(10**9, "the first of the held-out prompts", group="the run")
    eval_generations: int = flag(1, "completions per prompt, K: pass@1 and pass@K", group="rollout")
    rollout_batch_size: int = flag(64)
    output: str | None = flag(None, "file of JSON lines for the completions", group="the run")


def main(args: list[str] | None = None) -> None:
    """Print rewards, accuracy with its standard error, and pass@K."""
    config = parse_flags(Config, __doc__, args)
    if config.num_generations != 1:
        remedy = "of an evaluation they are --eval_generations"
        raise InputError(f"--num_generations {config.num_generations}: {remedy}")
    if config.output and Path(config.output).exists():  # said now, not after the work is done
        raise InputError(f"--output {config.output}: is there already")
    model, tokenizer = load_policy(config)
    task = load_task(config, tasks, model, tokenizer, heldout_only=True)
    found = evaluate(config, model, task, sampling_options(config, model, tokenizer))
    metrics, count = found.metrics, min(config.num_eval_prompts, len(task.heldout))
    print(f"{count} prompts: {headline(0, found.headline, metrics, metrics)}")
    if (error := metrics["eval/accuracy_se"]) is not None and not math.isnan(error):
        print(f"the standard error of the sampled accuracy is {error:.4f}")
    if config.output:
        try:
            text = "".join(json.dumps(record) + "\n" for record in found.records)
            Path(config.output).write_text(text, encoding="utf-8")
        except OSError as e:
            raise Fault(f"--output {config.output}: can't be written ({e.strerror})") from e
    print("\n".join(found.lines[:: max(1, len(found.lines) // 4)][:4]))


if __name__ == "__main__":
    run_main(main)
