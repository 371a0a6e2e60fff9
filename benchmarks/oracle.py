"""Short runs, each reduced to a fingerprint: did a change of the code change a result?

  python benchmarks/oracle.py --write before.json     # before the change
  python benchmarks/oracle.py --compare before.json --tolerance 1e-4   # after it

A fingerprint has the metrics of every step except times and memory, and hashes of the saved weights
and of samples.jsonl. Every run computes on one thread: on one machine a change that only moves code
leaves all equal to the bit, and one that adds up in another order leaves metrics within 1e-4.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
MACHINE = ("time/", "memory/", "tokens_per_second")  # the metrics that no two runs share

STEPS = "--num_steps 4 --eval_every 2 --num_eval_prompts 64 --device cpu"
RUNS = {
    "reward_model": "reward_model --num_steps 6 --eval_every 3 --device cpu",
    "ppo": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "two epochs of two minibatches": "grpo --num_epochs 2 --num_mini_batches 2",
    "two epochs of two minibatches, rloo": "rloo --num_epochs 2 --num_mini_batches 2",
    "no KL": "rloo --kl_coef 0 --micro_batch_tokens 512",
    "one update of PPO": "ppo --num_epochs 1 --num_mini_batches 1 --missing_eos_penalty 1",
    "dropout left on": "grpo --disable_dropout false",
    "adapter": "ppo --lora_r 4",
    "bfloat16": "ppo --bf16 true",
    "gradient checkpointing": "grpo --gradient_checkpointing --micro_batch_tokens 512",
    "chat model": "rloo --model chat --task add --prompts sums.jsonl --reward numeric_match"
    " --max_new_tokens 6 --prompts_per_step 8 --system_prompt ''",
    "stop strings": "grpo --stop 8 --eval_generations 4",
    "reward model": "ppo --reward_model runs/reward_model/model",
    "DAPO": "grpo --loss_type dapo --clip_range_high 0.28 --oversample 2 --overlong_buffer 2"
    " --mask_truncated_completions",
    "GSPO": "grpo --loss_type gspo --clip_range 3e-4 --num_mini_batches 4",
    "entropy bonus": "rloo --entropy_coef 0.01 --num_mini_batches 2",
    "stopped and resumed": "grpo --save_every 1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", type=os.path.abspath, help="where the fingerprints go")
    parser.add_argument("--compare", type=Path, help="fingerprints to compare with")
    parser.add_argument("--tolerance", type=float, default=0.0, help="of the metrics, relative")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    before, found = json.loads(options.compare.read_text()) if options.compare else {}, {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        # The embedded model with a chat template, and prompts for it.
        shutil.copytree(REPOSITORY / "tiny", "chat")
        Path("chat", "chat_template.jinja").write_text(CHAT)
        rows = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(10, 60)]
        Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spawned = multiprocessing.get_context("spawn")
        with spawned.Pool(options.processes, os.chdir, (folder,)) as pool:
            # In this order: one run trains on the reward model of the first.
            for name, now in zip(RUNS, pool.imap(fingerprint, RUNS)):
                found[name] = now
                if name in before:
                    print(name, difference(before[name], now, options.tolerance), sep=": ")
    if options.write:
        Path(options.write).write_text(json.dumps(found) + "\n")


def fingerprint(name: str) -> dict:
    """Do the run of this name; returns its metrics and the hashes of what it saved."""
    torch.set_num_threads(1)
    folder = Path("runs", name)
    script, *flags = shlex.split(RUNS[name] + (name != "reward_model") * f" {STEPS}")
    script = importlib.import_module(script)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        flags += ["--output_dir", str(folder)]
        if name == "stopped and resumed":
            hook = register_optimizer_step_pre_hook(interrupt)
            try:
                script.run_main(lambda: script.main(flags))
                raise AssertionError("nothing has interrupted it")
            except SystemExit:
                hook.remove()
            flags = ["--resume", str(folder)]
        script.main(flags)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    lines = [{k: line[k] for k in line if not k.startswith(MACHINE)} for line in lines]
    found = {"metrics": lines}
    for part, pattern in {"weights": "model/*.safetensors", "samples": "samples.jsonl"}.items():
        content = b"".join(path.read_bytes() for path in sorted(folder.glob(pattern)))
        found[part] = hashlib.sha256(content).hexdigest()
    return found


def interrupt(optimizer: torch.optim.Optimizer, *args: object) -> None:
    """As Ctrl-C does, before the third update."""
    if any(state["step"] == 2 for state in optimizer.state.values()):
        raise KeyboardInterrupt


def difference(before: dict, now: dict, tolerance: float) -> str:
    """Whether two fingerprints differ, and how far apart the metrics are at most that both have,
    relative to what it was, or to .01.
    """
    if before == now:
        return "equal"
    worst, where = 0.0, "in weights, samples or names of metrics alone"
    for old, new in zip(before["metrics"], now["metrics"], strict=True):
        for name in old.keys() & new.keys():
            a, b = old[name], new[name]
            apart = float(a != b) if None in (a, b) else abs(a - b) / max(0.01, abs(a))
            if apart > worst:
                worst, where = apart, f"step {new['step']}: {name} {a} -> {b}"
    verdict = "within the tolerance" if worst <= tolerance > 0 else "DIFFERS"
    return f"{verdict}, {worst:.1e} {where}"


if __name__ == "__main__":
    main()
