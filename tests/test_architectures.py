"""Families of causal language models: what differs in each is sampled and trained rightly."""

import pytest
import torch
import transformers
from small import letter_tokenizer, make_rollout, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from common import disable_dropout
from plumbing.decoding import Decoder
from plumbing.forward import completion_logprobs
from plumbing.models import load_causal
from sampling import generate

VOCAB, EOS = 20, 19
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "GPT2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "Llama": SIZES | {"tie_word_embeddings": True},
    "Qwen2": SIZES | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Gemma2": SIZES | {"sliding_window": 4, "final_logit_softcapping": 3.0},
    "Gemma3Text": SIZES | {"sliding_window": 4, "sliding_window_pattern": 2},
    "Qwen3Moe": SIZES | EXPERTS,
    "Cohere": SIZES | {"logit_scale": 0.3},
    "Granite": SIZES | {"logits_scaling": 2.0, "residual_multiplier": 0.5},
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10], [11, 12, 13, 14]]
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


def sample(model: PreTrainedModel, half=None, static=None, **options):
    options["decoder"] = Decoder(model, half, static)
    options = {"max_new_tokens": 8, "eos_token_ids": [EOS], "pad_token_id": 0} | options
    ids, mask = RAGGED.tokens[:, :7], RAGGED.attention_mask[:, :7]
    return generate(model, ids, mask, generator=torch.Generator().manual_seed(0), **options)


def test_greedy_sampling_gives_the_tokens_of_the_library(model):
    ours = sample(model, top_k=1)
    for row, prompt in enumerate(PROMPTS):  # alone: the library's padding differs between models
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": EOS}
        theirs = model.generate(ids, do_sample=False, max_new_tokens=8, **options)
        found = ours.tokens[row, 7:][ours.completion_mask[row]]
        assert found.tolist() == theirs[0, len(prompt) :].tolist()


def test_pytorchs_own_gelu_in_the_place_of_gpt2s_changes_no_more_than_rounding(tmp_path):
    torch.manual_seed(0)
    sizes = FAMILIES["GPT2"] | {"vocab_size": VOCAB, "initializer_range": 0.5}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    expected = model(RAGGED.tokens).logits
    loaded = load_causal(save_model(tmp_path, model, letter_tokenizer()))
    assert {type(block.mlp.act) for block in loaded.transformer.h} == {torch.nn.GELU}
    assert torch.allclose(loaded(RAGGED.tokens).logits, expected, atol=1e-4)
    assert loaded.config.activation_function == "gelu_new", "which is saved"


def test_log_probs_recorded_while_sampling_are_those_of_the_training_forward(model):
    rollout = sample(model, temperature=0.8, num_generations=4)
    disable_dropout(model)
    logprobs, _ = completion_logprobs(model.train(), rollout, 0.8)
    assert (logprobs != 0).any()
    assert torch.allclose(logprobs, rollout.logprobs, atol=1e-4)


def test_the_copy_that_decodes_is_the_model_but_for_its_rounding(model):
    """Fused norms, the activation, one mask for all layers: here a copy that isn't rounded."""
    plain = sample(model, num_generations=3, temperature=2.0)
    for static in (False, True):
        copied = sample(
            model, num_generations=3, temperature=2.0, half=torch.float32, static=static
        )
        assert torch.equal(copied.tokens, plain.tokens)
        assert torch.allclose(copied.logprobs, plain.logprobs, atol=1e-4)


def test_a_static_cache_and_bfloat16_weights_change_no_more_than_rounding(model):
    plain = sample(model, num_generations=3)
    static = sample(model, num_generations=3, static=True)
    assert torch.equal(static.tokens, plain.tokens)
    assert torch.allclose(static.logprobs, plain.logprobs, atol=1e-4)
    rounded = sample(model, num_generations=3, half=torch.bfloat16)
    same = (rounded.tokens == plain.tokens)[:, 7:].cumprod(1).bool() & plain.completion_mask
    off = (rounded.logprobs - plain.logprobs)[same].abs()
    assert same.float().mean() > 0.3 and 0 < off.mean() < 0.05
