"""Rollouts on a CPU against model.generate, in turns: CPU seconds of both, and their ratio.

  python benchmarks/rollout.py --model FOLDER                # SmolLM2-135M-Instruct, say
  python benchmarks/rollout.py --model FOLDER --bf16 false

Eight completions of one prompt, a line for each length of the prompt. The model is loaded and set
up as by a run, for training in bfloat16 sets the kind of attention. model.generate has weights of
the same precision.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import disable_dropout
from grpo import Config
from plumbing.config import complete
from plumbing.decoder import Decoder
from plumbing.models import load_policy
from sampling import sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--bf16", choices=("true", "false"), default="true")
    parser.add_argument("--lengths", nargs="+", type=int, default=[45, 163, 361])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--new_tokens", type=int, default=32)
    args = parser.parse_args()
    half = torch.bfloat16 if args.bf16 == "true" else None
    flags = {"model": args.model, "bf16": half is not None, "device": "cpu", "reward": ["brevity"]}
    config = complete(Config, flags, {})
    policy, _ = load_policy(config)
    disable_dropout(policy)
    plain = AutoModelForCausalLM.from_pretrained(args.model, dtype=half or torch.float32)
    G, T = 8, args.new_tokens
    for length in args.lengths:
        ids = torch.arange(length).view(1, length) * 37 % 1000 + 100
        mask, decoder = torch.ones_like(ids), Decoder(policy, half)
        both = {"max_new_tokens": T, "pad_token_id": 0, "temperature": 1.0, "top_k": 0}
        own = {"num_generations": G, "max_rows": G, "eos_token_ids": []} | both
        its = {"num_return_sequences": G, "do_sample": True, "min_new_tokens": T} | both
        seconds = {"ours": [], "generate": []}
        for _ in range(args.rounds):
            begun = time.process_time()
            sample(policy, ids, mask, decoder=decoder, **own)
            seconds["ours"].append(time.process_time() - begun)
            begun = time.process_time()
            plain.generate(ids, attention_mask=mask, **its)
            seconds["generate"].append(time.process_time() - begun)
        ours, theirs = (statistics.median(x) for x in seconds.values())
        found = f"{ours:.1f} s, generate {theirs:.1f} s, ratio {ours / theirs:.2f}"
        print(f"{length} tokens: {found}", flush=True)


if __name__ == "__main__":
    main()
