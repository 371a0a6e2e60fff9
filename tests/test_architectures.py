"""Families of causal language models: what differs in each is sampled and trained rightly."""

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from small import make_rollout, near
from transformers import AutoModelForCausalLM, PreTrainedModel

from forward import completion_logprobs
from plumbing import models
from plumbing.models import GATED_MLPS, GatedMLP, add_adapter, context_length, fuse
from sampling import generate

VOCAB, EOS = 20, 19
SIZES = {"hidden_size": 36, "intermediate_size": 56, "num_hidden_layers": 3, "head_dim": 8}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"rms_norm_eps": 0.03}
WINDOW = {"sliding_window": 5}  # shorter than the longest prompt
DEEPSEEK = SIZES | {  # its cache also keeps what picks the tokens to attend to
    "num_key_value_heads": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 64, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "GPT2": {"n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 6},
    "Llama": SIZES | {"tie_word_embeddings": True},
    "Mistral": SIZES | WINDOW,  # in all layers
    "Phi3": SIZES | WINDOW,
    "Qwen2": SIZES | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": SIZES,
    "Gemma2": SIZES | WINDOW | {"final_logit_softcapping": 3.0},
    "Gemma3Text": SIZES | WINDOW | {"sliding_window_pattern": 2},
    "Qwen3Moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Cohere": SIZES | {"logit_scale": 0.3},
    "DeepseekV32": DEEPSEEK,
    "Granite": SIZES | {"logits_scaling": 2.0, "residual_multiplier": 0.5},
}
FUSED = ["GPT2", "Llama", "Mistral", "Phi3", "Qwen2", "Qwen3"]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10], [0, 12, 13, 14]]  # 0 is padding as well
RAGGED = make_rollout(PROMPTS, [[2, 3, EOS], [4, 5, 6, 7, 8], [EOS], [9, 1, 2, EOS]], eos=EOS)


@pytest.fixture(params=FAMILIES)
def model(request) -> PreTrainedModel:
    torch.manual_seed(0)
    tokens = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0}
    config = getattr(transformers, f"{request.param}Config")(**FAMILIES[request.param], **tokens)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # so that logits are far from uniform, and biases and norms not trivial
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def fused(model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(model)
    fuse(model)
    return model


def sample(model: PreTrainedModel, **options):
    torch.manual_seed(0)
    options |= {"max_new_tokens": 8, "eos_token_ids": [EOS], "pad_token_id": 0}
    return generate(model, RAGGED.tokens[:, :7], RAGGED.attention_mask[:, :7], **options)


def test_greedy_sampling_gives_the_tokens_of_the_library(model):
    ours = sample(fused(model), top_k=1)
    for row, prompt in enumerate(PROMPTS):  # alone: the library's padding differs between models
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": EOS}
        theirs = model.generate(ids, do_sample=False, max_new_tokens=8, **options)
        found = ours.tokens[row, 7:][ours.completion_mask[row]]
        assert found.tolist() == theirs[0, len(prompt) :].tolist()


@pytest.mark.problem("decode", 1)
def test_sampling_records_the_log_probs_of_the_forward(model):
    """Sampled at a temperature and scored without it is the commonest mistake of all."""
    model = fused(model)
    rollout = sample(model, temperature=0.8, num_generations=5)
    assert rollout.tokens.shape == (20, 15), "20 rows of 7 prompt and 8 new tokens"
    assert not rollout.logprobs.requires_grad, "sampling has no gradient"
    logprobs, _ = completion_logprobs(model, rollout, 0.8)
    assert logprobs.abs().max() > 1
    hint = "log-probs as drawn, of the temperature 0.8, are those of the training forward"
    near(rollout.logprobs, logprobs, hint, atol=1e-4)


def test_longrope_refuses_rows_that_would_change_others():
    """Beyond it all rows of a batch are read by the frequencies of `long_factor`."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0} | factors
    own = {"original_max_position_embeddings": 8, "rope_parameters": rope, "pad_token_id": 0}
    config = transformers.Phi3Config(**SIZES | {"hidden_size": 48, "vocab_size": VOCAB} | own)
    assert context_length(SimpleNamespace(config=config)) == 8
    del config.rope_parameters["rope_type"]
    assert context_length(SimpleNamespace(config=config)) == 64
    assert context_length(SimpleNamespace(config=transformers.MptConfig(max_seq_len=64))) == 64
    assert context_length(SimpleNamespace(config=transformers.BloomConfig())) is None
    of_text = transformers.Gemma3Config(text_config={"max_position_embeddings": 64})
    assert context_length(SimpleNamespace(config=of_text)) == 64, "it also reads pictures"


@pytest.mark.parametrize("model", FUSED, indirect=True)
def test_fused_layers_change_no_more_than_rounding(model):
    """Where a variance is as small as eps, another eps would show."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.3)
    ours, real = fused(model), RAGGED.attention_mask
    new = {type(x) for x in ours.modules()} - {type(x) for x in model.modules()} - {GatedMLP}
    assert new in ({torch.nn.GELU}, {torch.nn.RMSNorm})
    theirs, ours_too = (m(RAGGED.tokens, attention_mask=real).logits[real] for m in (model, ours))
    assert torch.allclose(ours_too, theirs, atol=1e-5)
    assert [*ours.state_dict()] == [*model.state_dict()]


def gradients(model: PreTrainedModel) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Logits, the gradient of each weight, and the bytes that the forward pass keeps for it."""
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logits = model(RAGGED.tokens, RAGGED.attention_mask).logits
    logits[RAGGED.attention_mask].square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return logits.detach(), grads, sum(kept.values())


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "float32") for name in GATED_MLPS)]
    + [("Qwen2MLP", kind) for kind in ("bfloat16", "checkpoints", "adapter")],
)
def test_a_gated_mlp_keeps_less_and_changes_nothing(name, kind):
    family = name.removesuffix("MLP") + "Text" * (name == "Gemma3MLP")
    config = getattr(transformers, f"{family}Config")(**SIZES, vocab_size=VOCAB, pad_token_id=0)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).train()
    with mock.patch.object(models, "RMS_NORMS", []):
        ours = fused(theirs)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    both = ours, theirs
    if kind == "checkpoints":
        for model in both:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "adapter":
        both = [add_adapter(model, 2) for model in both]
        both[1].load_state_dict(both[0].state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bfloat16"):
        (logits, grads, kept), (expected, their_grads, all_kept) = map(gradients, both)
    assert torch.equal(logits, expected)
    assert len(grads) > 6 and all(map(torch.equal, grads, their_grads))
    wide, width = (SIZES[f"{name}_size"] for name in ("intermediate", "hidden"))
    numbers = 3 * wide * (2 * RAGGED.tokens.numel() + width)  # and the weights of down_proj
    assert all_kept - kept == {"float32": 4, "bfloat16": 2}.get(kind, 0) * numbers
