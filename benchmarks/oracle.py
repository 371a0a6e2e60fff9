"""Short runs, each reduced to a fingerprint: did a change of the code change a result?

  python benchmarks/oracle.py --write before.json     # before the change
  python benchmarks/oracle.py --compare before.json   # after it: names the runs that differ

A fingerprint has the metrics of every step except times and memory, and hashes of the saved weights
and of samples.jsonl. Every run computes on one thread, so on one machine a change that only moves
code must leave all of them equal to the bit.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))
MACHINE = ("time/", "memory/", "tokens_per_second")  # the metrics that no two runs share

STEPS = "--num_steps 4 --eval_every 2 --num_eval_prompts 64 --device cpu"
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
RUNS = {
    "ppo": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reward_model": "reward_model --num_steps 6 --eval_every 3 --device cpu",
    "two epochs of two minibatches": "grpo --num_epochs 2 --num_mini_batches 2",
    "two epochs of two minibatches, rloo": "rloo --num_epochs 2 --num_mini_batches 2",
    "no KL": "rloo --kl_coef 0 --micro_batch_tokens 512",
    "one update of PPO": "ppo --num_epochs 1 --num_mini_batches 1 --missing_eos_penalty 1",
    "dropout left on": "grpo --disable_dropout false",
    "adapter": "ppo --lora_r 4",
    "bfloat16": "ppo --bf16 true",
    "gradient checkpointing": "grpo --gradient_checkpointing --micro_batch_tokens 512",
    "chat model": "rloo --model {chat} --task add --prompts {sums} --reward numeric_match"
    " --max_new_tokens 6 --prompts_per_step 8 --system_prompt ''",
    "stop strings": "grpo --stop 8 --eval_generations 4",
    "reward model": "ppo --reward_model {reward_model}",
    "DAPO": "grpo --loss_type dapo --clip_range_high 0.28 --dynamic_sampling 2 --overlong_buffer 2"
    " --mask_truncated_completions",
    "GSPO": "grpo --loss_type gspo --clip_range 3e-4 --num_mini_batches 4",
    "entropy bonus": "rloo --entropy_coef 0.01 --num_mini_batches 2",
    "stopped and resumed": "grpo --save_every 1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", type=Path, help="where the fingerprints go")
    parser.add_argument("--compare", type=Path, help="fingerprints to compare with")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        spawned = multiprocessing.get_context("spawn")
        with spawned.Pool(options.processes, initializer=start, initargs=(folder,)) as pool:
            # The reward model first: another run trains on it.
            found = {"reward_model": pool.apply(fingerprint, ("reward_model",))}
            others = [name for name in RUNS if name not in found]
            found |= zip(others, pool.map(fingerprint, others, chunksize=1))
    if options.write:
        options.write.write_text(json.dumps(found) + "\n")
    if options.compare:
        before = json.loads(options.compare.read_text())
        for name, now in found.items():
            print(f"{name}: {difference(before.get(name), now) or 'equal'}")


def start(folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)


def fingerprint(name: str) -> dict:
    """Do the run of this name; returns its metrics and the hashes of what it saved."""
    if name == "chat model":
        chat_model()
    values = {"chat": "chat", "sums": "sums.jsonl", "reward_model": "runs/reward_model/model"}
    script, *flags = RUNS[name].format(**values).replace("''", "\0").split()
    flags = ["" if flag == "\0" else flag for flag in flags]
    folder = Path("runs", name)
    flags += ["--output_dir", str(folder)]
    if script != "reward_model":
        flags += STEPS.split()
    run = importlib.import_module(script).main
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if name == "stopped and resumed":
            stop_after_three_steps(run, flags)
            flags += ["--resume"]
        run(flags)
    return {
        "metrics": [measured(line) for line in (folder / "metrics.jsonl").open()],
        "weights": hash_of(*sorted((folder / "model").glob("*.safetensors"))),
        "samples": hash_of(folder / "samples.jsonl"),
    }


def stop_after_three_steps(run: object, flags: list[str]) -> None:
    """As Ctrl-C does: the step at hand ends and is saved."""
    import torch

    real, count = torch.optim.AdamW.step, 0

    def step(*args: object, **kwargs: object) -> None:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), 2)
        return real(*args, **kwargs)

    torch.optim.AdamW.step = step
    with contextlib.suppress(Exception):
        run(flags)
    torch.optim.AdamW.step = real
    assert count == 3, f"{count} steps"


def chat_model() -> None:
    """The embedded model with a chat template, and prompts for it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "tiny")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained("chat")
    AutoModelForCausalLM.from_pretrained(REPOSITORY / "tiny").save_pretrained("chat")
    rows = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(10, 60)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(line: str) -> dict[str, float]:
    return {k: v for k, v in json.loads(line).items() if not k.startswith(MACHINE)}


def hash_of(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def difference(before: dict | None, now: dict) -> str:
    """What differs between two fingerprints, in words; empty where nothing does."""
    if before is None:
        return "wasn't there before"
    found = [part for part in ("weights", "samples") if before[part] != now[part]]
    for old, new in zip(before["metrics"], now["metrics"]):
        names = [k for k in {**old, **new} if old.get(k) != new.get(k)]
        if names:
            shown = ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in names[:3])
            found.append(f"step {new['step']}: {shown}" + " ..." * (len(names) > 3))
            break
    if len(before["metrics"]) != len(now["metrics"]):
        found.append(f"{len(before['metrics'])} -> {len(now['metrics'])} lines of metrics")
    return "; ".join(found)


if __name__ == "__main__":
    main()
