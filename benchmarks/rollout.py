"""Rollouts on a CPU against model.generate, in turns: CPU seconds of both, and their ratio.

  python benchmarks/rollout.py --model FOLDER                # SmolLM2-135M-Instruct, say
  python benchmarks/rollout.py --model FOLDER --bf16 false

The model is loaded and set up as a run does it: in bfloat16 training sets the kind of attention.
Each line is a length of the prompts. model.generate has the weights in the same precision.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import disable_dropout  # noqa: E402
from grpo import Config  # noqa: E402
from plumbing.config import complete  # noqa: E402
from plumbing.decoder import Decoder  # noqa: E402
from plumbing.models import load_policy, set_up_training  # noqa: E402
from sampling import sample  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--bf16", choices=("true", "false"), default="true")
    parser.add_argument("--lengths", nargs="+", type=int, default=[45, 163, 361])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new_tokens", type=int, default=64)
    args = parser.parse_args()
    half = torch.bfloat16 if args.bf16 == "true" else None
    flags = {"model": args.model, "bf16": half is not None, "device": "cpu", "reward": ["brevity"]}
    config = complete(Config, flags, {})
    policy, tokenizer = load_policy(config)
    set_up_training(config, policy)
    disable_dropout(policy)
    plain = AutoModelForCausalLM.from_pretrained(args.model, dtype=half or torch.float32)
    G, T = 8, args.new_tokens
    for length in args.lengths:
        ids = torch.arange(4 * length).view(4, length) % 1000 + 100
        mask, decoder = torch.ones_like(ids), Decoder(policy, half)
        both = {"max_new_tokens": T, "pad_token_id": 0, "temperature": 1.0, "top_k": 0}
        own = {"num_generations": G, "max_rows": len(ids) * G, "eos_token_ids": []} | both
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
        print(f"{length} tokens: {ours:.1f} s, generate {theirs:.1f} s, ratio {ours / theirs:.2f}")
        print(seconds, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
