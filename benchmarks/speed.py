"""The same work through this project and through TRL: rollout, update and step time, peak memory.

  python benchmarks/speed.py --chat_model FOLDER      # a chat model, SmolLM2-135M-Instruct say
  python benchmarks/speed.py --jobs grpo-tiny --rounds 5
  python benchmarks/speed.py --jobs                   # the table of speed.json alone

Each system runs in a process of its own, in turns; the first step of each process isn't counted.
speed.json has medians, docs/performance.md their ratios. TRL decodes with model.generate.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parent.parent
RESULTS = Path(__file__).with_suffix(".json")
sys.path.insert(0, str(REPOSITORY))
from plumbing.models import fast_half  # noqa: E402
from tasks import brevity  # noqa: E402

STEPS = 3  # of each process, the first not counted
TRL_BATCH = 8  # rows per forward pass of its update
SIZES = ("title", "prompts", "generations", "max_new_tokens")
JOBS = {
    "grpo-tiny": ("GRPO, embedded model", 32, 8, 5),
    "grpo-chat": ("GRPO, chat prompts", 4, 8, 128),
    "rloo-chat": ("RLOO, chat prompts", 8, 4, 128),
}


def prompts(model: str, number: int) -> list:
    if model == "tiny":
        return [f"{10 + i % 90}+{10 + 7 * i % 90}=" for i in range(number)]
    words = "moon ice bees spring music seven winter rivers".split()
    return [[{"role": "user", "content": f"Tell me about {words[i % 8]}."}] for i in range(number)]


# --- One system at one job: each returns a list of steps ---


def ours(job: dict) -> list[dict]:
    """Steps of grpo.py or rloo.py, from the records of the run."""
    script = importlib.import_module(job["kind"])
    rows = job["prompts"] * job["generations"]
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps({"prompt": prompt}) for prompt in 2 * job["asked"]]
        Path(folder, "prompts.jsonl").write_text("\n".join(lines))
        flags = {
            "model": job["model"], "prompts": f"{folder}/prompts.jsonl", "num_steps": STEPS,
            "prompts_per_step": job["prompts"], "num_generations": job["generations"],
            "max_new_tokens": job["max_new_tokens"], "learning_rate": 1e-6, "num_eval_prompts": 1,
            "rollout_batch_size": rows, "eval_every": 100, "bf16": job["bf16"],
            "device": job["device"], "reward": "brevity", "output_dir": f"{folder}/run",
        }  # fmt: skip
        script.main([f"--{name}={value}" for name, value in flags.items()])
        text = Path(folder, "run", "metrics.jsonl").read_text()
    steps = []
    for line in map(json.loads, text.splitlines()[:STEPS]):
        seconds = {"rollout": line["time/rollout"], "update": line["time/update"]}
        steps.append(seconds | {"tokens": rows * line["length/mean"]})
    return steps


def trl_groups(job: dict) -> list[dict]:
    """Steps of TRL's GRPOTrainer or RLOOTrainer."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    steps, now = [], {}

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            torch.accelerator.synchronize() if torch.cuda.is_available() else None
            steps.append(now | {"update": time.perf_counter() - self.started - now["rollout"]})

    name, rows = job["kind"].upper(), job["prompts"] * job["generations"]
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(trl, f"{name}Config")(
            output_dir=folder, bf16=job["bf16"], report_to=[], max_steps=STEPS, logging_steps=1000,
            per_device_train_batch_size=min(rows, job["batch"]), save_strategy="no", top_k=0,
            gradient_accumulation_steps=max(1, rows // job["batch"]), disable_tqdm=True,
            num_generations=job["generations"], max_completion_length=job["max_new_tokens"],
            beta=0.04, learning_rate=1e-6, gradient_checkpointing=False, temperature=1.0,
            model_init_kwargs={"dtype": "float32"}, use_cpu=job["device"] == "cpu",
        )  # fmt: skip
        trainer = getattr(trl, f"{name}Trainer")(
            model=job["model"], reward_funcs=brevity, args=config, callbacks=[Clock()],
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in 4 * job["asked"]]),
        )  # fmt: skip
        make = trainer._generate_and_score_completions

        def timed(inputs):
            started = time.perf_counter()
            output = make(inputs)
            now["tokens"] = int(output["completion_mask"].sum())  # waits for a GPU
            now["rollout"] = time.perf_counter() - started
            return output

        trainer._generate_and_score_completions = timed
        trainer.train()
    return steps


# --- Rounds and table ---


def work(job: dict) -> None:
    """One process: run the job, print its steps as the last line."""
    torch.set_num_threads(job["threads"])
    steps = ours(job) if job["system"] == "ours" else trl_groups(job)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print("\n" + json.dumps({"steps": steps[1:], "peak_gb": peak}))


def measure(job: dict, rounds: int) -> dict[str, dict]:
    """Both systems in turns: {system: medians}."""
    runs = {"ours": [], "trl": []}
    environment = os.environ | {"OMP_NUM_THREADS": str(job["threads"])}
    for system in [*runs] * rounds:
        command = [sys.executable, __file__, "--worker", json.dumps(job | {"system": system})]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            sys.exit(f"{job['title']}, {system}: {done.stderr[-2000:]}")
        runs[system].append(json.loads(done.stdout.strip().splitlines()[-1]))
    return {system: medians(found) for system, found in runs.items()}


def medians(runs: list[dict]) -> dict[str, float]:
    """Over the steps of all rounds of one system."""
    steps = [step for run in runs for step in run["steps"]]
    figures = {
        "tokens_per_s": [step["tokens"] / step["rollout"] for step in steps],
        "update_s": [step["update"] for step in steps],
        "step_ms_per_token": [1e3 * (x["update"] + x["rollout"]) / x["tokens"] for x in steps],
        "peak_gb": [run["peak_gb"] for run in runs],
    }
    return {name: round(statistics.median(values), 4) for name, values in figures.items()}


def ratios(jobs: dict[str, dict]) -> str:
    """Markdown: ours over TRL's, a row per job."""
    columns = {"tokens_per_s": "tokens per second of rollout", "update_s": "time of update"}
    columns |= {"step_ms_per_token": "time of step, per token", "peak_gb": "peak memory"}
    lines = [f"| ours / TRL | {' | '.join(columns.values())} |", "|---" * 5 + "|"]
    for name in [name for name in JOBS if name in jobs]:
        mine, other = jobs[name].values()
        cells = [f"{mine[column] / other[column]:.2f}" for column in columns]
        lines.append(f"| {JOBS[name][0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--chat_model", help="folder of a small chat model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(json.loads(args.worker))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"jobs": {}}
    for name in args.jobs:
        job = dict(zip(SIZES, JOBS[name], strict=True)) | {"threads": args.threads}
        job |= {"device": "cpu", "batch": TRL_BATCH}
        job["kind"], model = name.split("-")
        job["asked"] = prompts(model, job["prompts"])
        job["model"] = str(REPOSITORY / "tiny") if model == "tiny" else args.chat_model
        job["bf16"] = model == "chat" and fast_half(torch.device("cpu")) == torch.bfloat16
        if job["model"] is None:
            sys.exit(f"error: {name} needs --chat_model")
        results["jobs"][name] = measure(job, args.rounds)
        results["torch"] = torch.__version__
        RESULTS.write_text(json.dumps(results) + "\n")
    print(ratios(results["jobs"]))


if __name__ == "__main__":
    main()
