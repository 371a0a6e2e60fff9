"""The same work through this project and through TRL: rollout, update and step time, peak memory.

  python benchmarks/speed.py --chat_model FOLDER      # a chat model, SmolLM2-135M-Instruct say
  python benchmarks/speed.py --jobs grpo-tiny rollout-gpt2 --rounds 5
  python benchmarks/speed.py --ppo_python ENV/bin/python     # an environment with trl==1.12.0
  python benchmarks/speed.py --draw                   # the table from speed.json, without a run

A rollout alone goes through `model.generate`, GRPO and RLOO through trl>=1.13, PPO through
trl==1.12.0, the last that has it, in an environment of its own. Each system runs in a process of
its own, in turns; the first step of each process warms up and isn't counted. speed.json has
medians, docs/performance.md their ratios.
"""

import argparse
import importlib.util
import itertools
import json
import os
import platform
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
from plumbing.models import fast_at_bfloat16  # noqa: E402  (cuDNN's attention is off, for all)

STEPS = 3  # of each process, the first not counted
TRL_BATCH = 8  # rows per forward pass of its update

QUESTIONS = [
    "What is the capital of France?", "Name three colours.", "Who wrote Hamlet?",
    "How many days has a week?", "What is ice made of?", "Say good morning in Spanish.",
    "What do bees make?", "Give me a word that rhymes with moon.",
]  # fmt: skip

# rows = prompts x generations. "full": no completion ends before max_new_tokens.
SIZES = ("name", "model", "prompts", "generations", "max_new_tokens")
JOBS = {
    "rollout-tiny": ("rollout, embedded model", "tiny", 32, 8, 5),
    "rollout-chat": ("rollout, chat prompts", "chat", 4, 8, 128),
    "rollout-gpt2": ("rollout, GPT-2", "gpt2", 4, 8, 64),
    "grpo-tiny": ("GRPO, embedded model", "tiny", 32, 8, 5),
    "grpo-chat": ("GRPO, chat prompts", "chat", 4, 8, 128),
    "grpo-full": ("GRPO, full length", "full", 4, 8, 64),
    "grpo-gpt2": ("GRPO, GPT-2", "gpt2", 4, 8, 64),
    "rloo-chat": ("RLOO, chat prompts", "chat", 8, 4, 128),
    "ppo-full": ("PPO, full length", "full", 16, 1, 48),
}
JOBS = {name: dict(zip(SIZES, sizes, strict=True)) for name, sizes in JOBS.items()}


def brief(completions: list, **columns) -> list[float]:
    """A reward that costs nothing: shorter is better."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [-len(text) / 100 for text in texts]


# --- Models and prompts ---


def random_gpt2(folder: Path, vocab_size: int = 50257, **sizes: int) -> str:
    """A GPT-2 of random weights, by default of the size of GPT-2 small, and a tokenizer of words
    w0, w1, ...: its completions have full length. Returns the folder.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    eos = vocab_size - 1
    config = GPT2Config(vocab_size=vocab_size, bos_token_id=eos, eos_token_id=eos, **sizes)
    GPT2LMHeadModel(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(eos)} | {"<eos>": eos}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    tokenizer.pad_token = "<eos>"
    tokenizer.save_pretrained(folder)
    return str(folder)


def prepare(folder: Path, chat_model: str | None) -> dict[str, str]:
    """Write the models into `folder`: {name: path}."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    paths = {"tiny": str(REPOSITORY / "tiny"), "gpt2": random_gpt2(folder / "gpt2")}
    if chat_model is not None:
        # For full lengths the same weights, with an EOS that is never sampled.
        model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(chat_model)
        unused = next(t for t in reversed(tokenizer.all_special_tokens) if t != tokenizer.eos_token)
        tokenizer.pad_token, tokenizer.eos_token = tokenizer.eos_token, unused
        for config in (model.config, model.generation_config):
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
        paths |= {
            "chat": chat_model,
            "full": str(folder / "full"),
            "scores": str(folder / "scores"),
        }
        model.save_pretrained(paths["full"])
        tokenizer.save_pretrained(paths["full"])
        scorer = AutoModelForSequenceClassification.from_pretrained(
            paths["full"], num_labels=1, dtype=torch.float32
        )
        scorer.save_pretrained(paths["scores"])
        tokenizer.save_pretrained(paths["scores"])
    return paths


def prompts(model: str, number: int) -> list:
    if model == "tiny":
        return [f"{10 + i % 90}+{10 + 7 * i % 90}=" for i in range(number)]
    if model == "gpt2":
        return [" ".join(f"w{(31 * i + 7 * j) % 50256}" for j in range(16)) for i in range(number)]
    return [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(number)]


# --- One system at one job: each returns a list of steps ---


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    from plumbing.run import peak_memory

    return peak_memory("cpu") / 1e9


def rollouts(job: dict) -> list[dict]:
    """Rollouts alone: `generate` against `model.generate`, in the same dtype."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from common import completion_mask
    from plumbing.data import encode_prompts
    from plumbing.decoding import Decoder
    from plumbing.models import eos_token_ids
    from sampling import sample

    tokenizer = AutoTokenizer.from_pretrained(job["path"])
    is_ours, half = job["system"] == "ours", torch.bfloat16 if job["bf16"] else None
    # Ours rounds the weights itself, at every rollout.
    dtype = torch.float32 if is_ours else half or torch.float32
    model = AutoModelForCausalLM.from_pretrained(job["path"], dtype=dtype).to(device()).eval()
    asked = [{"prompt": prompt} for prompt in prompts(job["model"], job["prompts"])]
    ids, mask = encode_prompts(tokenizer, asked)
    eos, steps = eos_token_ids(model, tokenizer), []
    options = job.get("options", {})
    decoder = Decoder(model, half, **options) if is_ours else None
    if is_ours:
        decoder.updates_before = -1  # so graphs and memory are kept, as after a first update
    for seed in range(STEPS):
        torch.manual_seed(seed)
        started = clock()
        if is_ours:
            rollout = sample(
                model, ids, mask, num_generations=job["generations"],
                max_rows=job["prompts"] * job["generations"],
                max_new_tokens=job["max_new_tokens"], eos_token_ids=eos, pad_token_id=0,
                decoder=decoder,
            )  # fmt: skip
            real = rollout.completion_mask
        else:
            each = job["generations"]
            ids, mask = ids.to(device()), mask.to(device())
            rows = ids.repeat_interleave(each, 0), mask.repeat_interleave(each, 0).long()
            tokens = model.generate(
                rows[0], attention_mask=rows[1],
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=eos,
                pad_token_id=0, max_new_tokens=job["max_new_tokens"], **options,
            )  # fmt: skip
            real = completion_mask(tokens[:, ids.shape[1] :], eos)
        seconds = clock() - started
        steps.append({"rollout": seconds, "tokens": int(real.sum())})
    return steps


def ours(job: dict) -> list[dict]:
    """Steps of ppo.py, grpo.py or rloo.py, from the records of the run."""
    script = importlib.import_module(job["kind"])
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps({"prompt": p}) for p in prompts(job["model"], job["prompts"])]
        (Path(folder) / "prompts.jsonl").write_text("\n".join(lines * 2) + "\n")
        flags = {
            "model": job["path"], "prompts": f"{folder}/prompts.jsonl", "num_steps": STEPS,
            "prompts_per_step": job["prompts"], "num_generations": job["generations"],
            "max_new_tokens": job["max_new_tokens"], "learning_rate": 1e-6, "num_eval_prompts": 1,
            "rollout_batch_size": job["prompts"] * job["generations"], "eval_every": 100,
            "bf16": job["bf16"], "output_dir": f"{folder}/run",
        } | job.get("flags", {})  # fmt: skip
        if job["kind"] == "ppo":
            flags |= {"kl_coef": 0.05, "num_mini_batches": 1, "num_epochs": 4}
        if job["kind"] == "ppo" and job.get("scores"):
            flags |= {"reward_model": job["scores"]}
        else:
            flags |= {"reward": f"{Path(__file__).resolve()}:brief"}
        script.main([f"--{name}={value}" for name, value in flags.items()])
        text = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[:STEPS]
    steps = []
    for line in map(json.loads, text):
        rollout, update = line["time/rollout"], line["time/update"]
        tokens = line["length/mean"] * job["prompts"] * job["generations"]
        steps.append({"rollout": rollout, "update": update, "tokens": tokens})
    return steps


def trl_groups(job: dict) -> list[dict]:
    """Steps of TRL's GRPOTrainer or RLOOTrainer."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    steps = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.started = clock()

        def on_step_end(self, *args, **kwargs):
            steps.append(steps_now | {"update": clock() - self.started - steps_now["rollout"]})

    steps_now = {}
    name = job["kind"].upper()
    rows, at_once = job["prompts"] * job["generations"], job.get("trl_batch", TRL_BATCH)
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(trl, f"{name}Config")(
            output_dir=folder, bf16=job["bf16"], report_to=[], max_steps=STEPS, logging_steps=1000,
            per_device_train_batch_size=min(rows, at_once),
            gradient_accumulation_steps=max(1, rows // at_once),
            num_generations=job["generations"], max_completion_length=job["max_new_tokens"],
            beta=0.04, learning_rate=1e-6, save_strategy="no", disable_tqdm=True,
            gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(),
            model_init_kwargs={"dtype": "float32"}, temperature=1.0, top_k=0,
        )  # fmt: skip
        data = Dataset.from_list([{"prompt": p} for p in prompts(job["model"], job["prompts"])] * 4)
        trainer = getattr(trl, f"{name}Trainer")(
            model=job["path"], reward_funcs=brief, args=config, train_dataset=data,
            callbacks=[Clock()],
        )  # fmt: skip
        make = trainer._generate_and_score_completions

        def timed(inputs):
            started = clock()
            output = make(inputs)
            steps_now["rollout"] = clock() - started
            steps_now["tokens"] = int(output["completion_mask"].sum())
            return output

        trainer._generate_and_score_completions = timed
        trainer.train()
    return steps


def trl_ppo(job: dict) -> list[dict]:
    """Steps of PPOTrainer of trl==1.12.0."""
    import trl.experimental.ppo.ppo_trainer as module
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    tokenizer = AutoTokenizer.from_pretrained(job["path"], padding_side="left")
    load = {"dtype": torch.float32}
    policy, ref = (AutoModelForCausalLM.from_pretrained(job["path"], **load) for _ in range(2))
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(job["scores"], num_labels=1, **load)
        for _ in range(2)
    )
    rows = job["prompts"] * job["generations"]
    chats = prompts(job["model"], job["prompts"]) * (STEPS + 1)
    template = {"add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(chat, **template) for chat in chats]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    data = Dataset.from_list([{"input_ids": row} for row in ids])
    marks, rollout_seconds = [], []
    make = module.batch_generation

    def timed(*args, **kwargs):
        started = clock()
        marks.append(started)
        output = make(*args, **kwargs)
        rollout_seconds.append(clock() - started)
        return output

    module.batch_generation = timed
    with tempfile.TemporaryDirectory() as folder:
        config = module.PPOConfig(
            output_dir=folder, bf16=job["bf16"], report_to=[], total_episodes=rows * STEPS,
            per_device_train_batch_size=rows, gradient_accumulation_steps=1, num_mini_batches=1,
            num_ppo_epochs=4, response_length=job["max_new_tokens"], learning_rate=1e-6,
            local_rollout_forward_batch_size=rows, num_sample_generations=0, save_strategy="no",
            gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        )  # fmt: skip
        trainer = module.PPOTrainer(
            args=config, processing_class=tokenizer, model=policy, ref_model=ref,
            reward_model=reward, value_model=value, train_dataset=data,
        )  # fmt: skip
        trainer.train()
        marks.append(clock())
    tokens = rows * job["max_new_tokens"]
    whole = [b - a for a, b in itertools.pairwise(marks)]
    return [
        {"rollout": r, "update": step - r, "tokens": tokens}
        for r, step in zip(rollout_seconds, whole)
    ]


# --- Rounds and table ---


def work(job: dict) -> None:
    """One process: run the job, print its steps as the last line."""
    torch.set_num_threads(job["threads"])
    if job["system"] == "ours":
        from plumbing.run import keep_freed_memory

        keep_freed_memory()  # as the scripts do
    if job["kind"] == "rollout":
        steps = rollouts(job)
    elif job["system"] == "ours":
        steps = ours(job)
    else:
        steps = trl_ppo(job) if job["kind"] == "ppo" else trl_groups(job)
    print("\n" + json.dumps({"steps": steps[1:], "peak_gb": peak_gb()}))


def machine() -> dict:
    """What the figures were measured on."""
    import transformers

    info = {"threads": torch.get_num_threads(), "cpu": platform.processor() or platform.machine()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        info["cpu"] = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
    return info | {"torch": torch.__version__, "transformers": transformers.__version__}


def summary(runs: list[dict]) -> dict[str, float]:
    """Medians over the steps of all rounds of one system."""
    steps = [step for run in runs for step in run["steps"]]
    figures = {
        "tokens_per_s": [s["tokens"] / s["rollout"] for s in steps],
        "peak_gb": [run["peak_gb"] for run in runs],
    }
    if "update" in steps[0]:
        figures["update_s"] = [s["update"] for s in steps]
        whole = [1000 * (s["update"] + s["rollout"]) / s["tokens"] for s in steps]
        figures["step_ms_per_token"] = whole
    return {name: round(statistics.median(values), 4) for name, values in figures.items()}


COLUMNS = {
    "tokens_per_s": "tokens per second of rollout",
    "update_s": "time of update",
    "step_ms_per_token": "time of step, per token",
    "peak_gb": "peak memory",
}


def ratios(jobs: dict[str, dict]) -> str:
    """Markdown: ours over the other's, a row per job."""
    lines = [f"| ours / other | other | {' | '.join(COLUMNS.values())} |", "|---" * 6 + "|"]
    for name, job in JOBS.items():
        if name not in jobs:
            continue
        (mine, other), (_, system) = jobs[name].values(), jobs[name]
        # TRL's PPO times its decoding alone, ours all before the update: whole steps compare.
        parts = ("tokens_per_s", "update_s") if name.startswith("ppo") else ()
        known = [c if c in mine and c not in parts else "" for c in COLUMNS]
        cells = [f"{mine[c] / other[c]:.2f}" if c else "" for c in known]
        system = "TRL" if system == "trl" else f"`{system}`"
        lines.append(f"| {job['name']} | {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(job: dict, systems: dict[str, str], rounds: int) -> dict[str, dict]:
    """Both systems in turns, each with its Python: {system: medians}."""
    runs = {system: [] for system in systems}
    for _ in range(rounds):
        for system, python in systems.items():
            command = [python, __file__, "--worker", json.dumps(job | {"system": system})]
            environment = os.environ | {"OMP_NUM_THREADS": str(job["threads"])}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode != 0:
                sys.exit(f"{job['name']}, {system}: {done.stderr[-2000:]}")
            runs[system].append(json.loads(done.stdout.strip().splitlines()[-1]))
    return {system: summary(found) for system, found in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", nargs="*", choices=JOBS, help="default: all that can be run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--chat_model", help="folder of a small chat model")
    parser.add_argument("--ppo_python", help="python of an environment with trl==1.12.0")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(json.loads(args.worker))
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"jobs": {}}
    if args.draw:
        return print(ratios(before["jobs"]))

    torch.set_num_threads(args.threads)
    bf16 = fast_at_bfloat16(device())
    results = {"machine": machine(), "bf16": bf16, "jobs": {}}
    # The jobs that aren't measured now stay, if they are from this machine.
    if before.get("machine", {}).get("cpu") == results["machine"]["cpu"]:
        results["jobs"] = before["jobs"]
    with tempfile.TemporaryDirectory() as folder:
        paths = prepare(Path(folder), args.chat_model)
        for name in args.jobs or JOBS:
            job, kind = JOBS[name], name.split("-")[0]
            python = args.ppo_python if kind == "ppo" else sys.executable
            if job["model"] not in paths or python is None:
                print(f"{name}: left out, it needs --chat_model or --ppo_python")
                continue
            job = job | {"kind": kind, "path": paths[job["model"]], "threads": args.threads}
            job |= {"bf16": bf16 and job["model"] != "tiny", "scores": paths.get("scores")}
            other = "model.generate" if kind == "rollout" else "trl"
            systems = {"ours": sys.executable, other: python}
            results["jobs"][name] = measure(job, systems, args.rounds)
            print(name, json.dumps(results["jobs"][name]), flush=True)
            RESULTS.write_text(json.dumps(results) + "\n")
    print(ratios(results["jobs"]))


if __name__ == "__main__":
    main()
