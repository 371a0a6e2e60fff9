"""The memory of a run: the peaks of real ones beside the estimates of tools/fit.py.

  python benchmarks/memory.py --model FOLDER    # SmolLM2-135M-Instruct
  python benchmarks/memory.py --draw            # the tables of the page alone

Each run makes two steps on prompts of about 64 tokens, in a process of its own on the CPU.
memory.json has the peaks and their estimates. Estimates for popular models on a GPU go into
docs/performance.md; benchmarks/count.py compares those with what fake tensors count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
RESULTS = Path(__file__).with_suffix(".json")
PAGE = REPOSITORY / "docs" / "performance.md"
BEGIN, END = "<!-- made by benchmarks/memory.py -->", "<!-- end of what memory.py makes -->"
sys.path.insert(0, str(REPOSITORY))

from transformers import AutoTokenizer, GPT2Config, LlamaConfig, Qwen2Config  # noqa: E402

from plumbing.memory import SMALLEST, estimate  # noqa: E402
from tools import fit  # noqa: E402

FULL, ADAPTER = "", "--lora_r 16"
SHAPES = (
    "--prompts_per_step 8 --num_generations 8 --max_new_tokens 32",
    "--prompts_per_step 8 --num_generations 4 --max_new_tokens 128",
    "--prompts_per_step 16 --num_generations 2 --max_new_tokens 64 --micro_batch_tokens 2048",
)
JOBS = [
    *[("grpo", f"{shape} {method}".strip()) for method in (FULL, ADAPTER) for shape in SHAPES],
    ("ppo", SHAPES[2]),
    ("rloo", f"{SHAPES[0]} --gradient_checkpointing"),
]

# Of the published config.json files: what the number of weights and the KV cache depend on.
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPE += ("num_key_value_heads",)
QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
LLAMA = {"head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True}
MODELS = {
    "gpt2": GPT2Config(),
    "Qwen2.5-0.5B": Qwen2Config(**dict(zip(SHAPE, (896, 4864, 24, 14, 2))), **QWEN),
    "Llama-3.2-1B": LlamaConfig(**dict(zip(SHAPE, (2048, 8192, 16, 32, 8))), **LLAMA),
    "Qwen2.5-1.5B": Qwen2Config(**dict(zip(SHAPE, (1536, 8960, 28, 12, 2))), **QWEN),
    "Qwen2.5-3B": Qwen2Config(**dict(zip(SHAPE, (2048, 11008, 36, 16, 2))), **QWEN),
    "Qwen2.5-7B": Qwen2Config(**dict(zip(SHAPE, (3584, 18944, 28, 28, 4))), vocab_size=152064),
    "Qwen2.5-14B": Qwen2Config(**dict(zip(SHAPE, (5120, 13824, 48, 40, 8))), vocab_size=152064),
}
CHECKPOINTED = "--gradient_checkpointing"
METHODS = {
    "GRPO": ("grpo", FULL),
    f"GRPO, `{CHECKPOINTED}`": ("grpo", CHECKPOINTED),
    f"PPO, `{CHECKPOINTED}`": ("ppo", CHECKPOINTED),
    f"GRPO, `{ADAPTER}`": ("grpo", ADAPTER),
    f"GRPO, `{ADAPTER} {CHECKPOINTED}`": ("grpo", f"{ADAPTER} {CHECKPOINTED}"),
    f"PPO, `{ADAPTER} {CHECKPOINTED}`": ("ppo", f"{ADAPTER} {CHECKPOINTED}"),
}
GPU_PROMPT, GPU_FLAGS = 200, "--max_new_tokens 256"


def measure(model: str, script: str, flags: str) -> dict[str, float]:
    """Peak memory of a run of two steps, and its estimate, in GB."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    scene = "The film begins in a house. " * 9
    prompts = [f"This is number {number}. {scene}" for number in range(100, 200)]
    longest = max(len(tokenizer(prompt).input_ids) for prompt in prompts)
    own = ["--model", model, *shlex.split(flags)]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        command = [sys.executable, str(REPOSITORY / f"{script}.py"), "--device", "cpu", *own]
        command += ["--prompts", str(data), "--reward", "brevity", "--num_steps", "2"]
        command += ["--num_eval_prompts", "8", "--output_dir", f"{folder}/run"]
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    measured = max(json.loads(line).get("memory/peak_gb", 0.0) for line in lines)
    config = fit.config_of(script, own, "cpu")
    estimated = estimate(fit.counts_of(config, longest), config, longest)["peak"] / 1e9
    return {"measured": round(measured, 3), "estimate": round(estimated, 3)}


def estimates() -> dict[str, dict[str, tuple[float, int | None]]]:
    """{method: {model: (GB that a GPU needs for the smallest limits, the smallest GPU)}}."""
    found: dict[str, dict[str, tuple[float, int | None]]] = {method: {} for method in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            model.save_pretrained(Path(folder) / name)
            known = {}  # the counts are the same with gradient checkpointing
            for method, (script, flags) in METHODS.items():
                own = ["--model", f"{folder}/{name}", *shlex.split(f"{flags} {GPU_FLAGS}")]
                config = fit.config_of(script, own, "cuda")
                if (script, config.lora_r) not in known:
                    known[script, config.lora_r] = fit.counts_of(config, GPU_PROMPT)
                config = dataclasses.replace(config, **SMALLEST)
                for gb in fit.DEVICES_GB:
                    counts = known[script, config.lora_r]
                    parts = estimate(counts, config, GPU_PROMPT, gb * 10**9)
                    if fit.fits(parts, gb):
                        break
                gpu = gb if fit.fits(parts, gb) else None
                found[method][name] = parts["needed"] / 1e9, gpu
                print(f"{name}, {method}: {found[method][name]}", flush=True)
    return found


def estimated_tables(found: dict[str, dict[str, tuple[float, int | None]]]) -> str:
    """A row per model: GB, and the smallest GPU; then a row per GPU: the largest model."""
    head = [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    lines = ["Memory that a GPU needs, in GB, and the smallest one:", "", *head]
    for name in MODELS:
        cells = [f"{gb:.1f} ({gpu or 'none'})" for gb, gpu in (x[name] for x in found.values())]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "The largest of these models on a GPU:", "", *head]
    for size in fit.DEVICES_GB:
        fitting = [[m for m in MODELS if (x[m][1] or 999) <= size] for x in found.values()]
        cells = [max(models, key=list(MODELS).index, default="none") for models in fitting]
        lines.append(f"| {size} GB | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(page: Path, table: str) -> None:
    """Replace the part of the page between the marks."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    text = f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="no runs, the tables of the page alone")
    parser.add_argument("--model", help="folder or name of SmolLM2-135M-Instruct")
    options = parser.parse_args()
    if not options.model and not options.draw:
        parser.error("needs --model")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for script, flags in [] if options.draw else JOBS:
        name = f"{script}.py {flags}"
        results[name] = measure(options.model, script, flags)
        print(f"{name}: {results[name]}", flush=True)
        RESULTS.write_text(json.dumps(results) + "\n")
    write(PAGE, estimated_tables(estimates()))


if __name__ == "__main__":
    main()
