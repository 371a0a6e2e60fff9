"""What an update keeps in a GPU's memory, counted on a CPU: python benchmarks/memory.py [MODEL ...]

bytes: what the forward pass of a token saves in a layer for the backward pass. Autograd says what
it saves, and each piece of memory counts once. grpo_gb and ppo_gb: the peaks of an update by
`peak_gb`, with passes of 8,192 and of 1,024 tokens. Names with _trl: the same of TRL's own forward
pass, where trl is installed.
"""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import gpu
import torch
import transformers
from torch import Tensor, nn

from common import Rollout, disable_dropout
from forward import CHUNK, completion_logprobs
from plumbing.models import fuse

SIZES = dict(zip(gpu.SHAPE, (1536, 8960, 28, 12, 2, 128, 151936)))
gpu.MODELS["qwen-1.5b"] = ("Qwen2", SIZES)


def our_pass(model: nn.Module, rollout: Rollout) -> object:
    fuse(model)
    with mock.patch("torch.nn.functional.rms_norm", gpu.rms_norm):
        return completion_logprobs(model, rollout, 1.0, bf16=True)


def trl_pass(model: nn.Module, rollout: Rollout) -> object:
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    autocast = SimpleNamespace(autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    inputs = rollout.tokens, rollout.attention_mask.long(), rollout.completion_mask.shape[1]
    forward = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__
    return forward(SimpleNamespace(accelerator=autocast), model, *inputs, compute_entropy=True)


def count(name: str, forward: Callable = our_pass) -> dict[str, int]:
    """Bytes of a token in a layer: what two more rows of 4 tokens add to a second layer. And the
    weights of a layer.
    """
    found = {}
    for layers, rows in ((1, 2), (1, 4), (2, 2), (2, 4)):  # a single row needs fewer copies
        with mock.patch.dict(gpu.MODELS[name][1], vocab_size=300):
            model = gpu.model_of(name, layers=layers).train()
        disable_dropout(model)
        tokens = torch.arange(4 * rows).view(rows, 4)  # rows share no prompt, as on CUDA
        mask, memory = tokens > 0, {}  # with padding: attention takes a mask for it

        def keep(x: Tensor, memory: dict = memory) -> Tensor:
            memory[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            forward(model, Rollout(tokens, mask, mask[:, 2:], mask[:, 2:], mask[:, 0]))
        for x in (*model.parameters(), *model.buffers()):
            memory.pop(x.untyped_storage().data_ptr(), None)
        found[layers, rows] = sum(x.nbytes() for x in memory.values())
        found[layers] = model.num_parameters()
    more = found[2, 4] - found[2, 2] - found[1, 4] + found[1, 2]
    tokens = 2 * (4 if forward is trl_pass else 3)  # we don't read the last one
    return {"bytes": round(more / tokens), "weights": found[2] - found[1]}


def peak_gb(
    name: str,
    counted: dict[str, int],
    num_tokens: int = 8192,
    num_models: int = 1,
    num_logits: int = 2 * CHUNK,
    is_trl: bool = False,
) -> float:
    """The peak of an update with passes of at most `num_tokens`, a reference, and `num_models` that
    train, two in PPO; prompts of 51 tokens, 256 completions of 256, all decoded at once.
    """
    kind, sizes = gpu.MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    L, V, heads = config.num_hidden_layers, config.vocab_size, config.num_attention_heads
    in_layers = L * counted["weights"]
    weights, rows = in_layers + V * config.hidden_size, num_tokens // (51 + 256)
    # Weights, gradients, Adam's moments, a reference, and what autocast rounds to bfloat16.
    total = (16 * num_models + 4) * weights + 2 * in_layers
    total += rows * (51 + 256) * L * counted["bytes"]
    if is_trl:  # its head needs no memory to speak of, and no cache stays
        return total / 1e9
    # The weights and the cache of the decoder, in bfloat16; the cache has 384 columns.
    width = getattr(config, "num_key_value_heads", heads) * config.hidden_size // heads
    total += 2 * weights + 2 * 2 * L * width * 256 * 384
    # A chunk of logits takes 20 bytes a logit, and leaves 4 of them.
    chunk, last = num_logits // V, rows * 256
    head = (20 * min(chunk, last - n) + 4 * min(n, 5 * chunk) for n in range(0, last, chunk))
    return (total + max(head) * V) / 1e9


def main() -> None:
    for name in sys.argv[1:] or ("gpt2", "qwen", "qwen-1.5b"):
        found = {"model": name}
        for system, forward in (("", our_pass), ("_trl", trl_pass)):
            is_trl = forward is trl_pass
            if is_trl and not find_spec("trl"):
                continue
            counted = count(name, forward)
            found[f"bytes{system}"] = counted["bytes"]
            for script, models in (("grpo", 1), ("ppo", 2)):
                peaks = (peak_gb(name, counted, n, models, is_trl=is_trl) for n in (8192, 1024))
                found[f"{script}_gb{system}"] = [round(x, 1) for x in peaks]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
