"""Every causal language model of transformers that builds small: sampling, log-probs, padding.

Sliding windows, logit soft-capping, logit scaling, grouped queries, tied embeddings, learned and
rotary positions, ALiBi and mixtures of experts are all among them.
"""

import pytest
import torch
import transformers
from small import letter_tokenizer, make_rollout, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from common import ValueModel, disable_dropout
from plumbing.decoding import can_be_static
from plumbing.errors import InputError
from plumbing.forward import completion_logprobs, completion_values
from plumbing.loading import load_policy
from sampling import generate

pytestmark = pytest.mark.slow
VOCAB, EOS = 20, 19
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
# Each with what differs from SIZES, or with all that the config takes.
CONFIGS = {
    # learned positions
    "GPT2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "GPTNeo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "GPTBigCode": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "OPT": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "BioGpt": SIZES,
    "XGLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    # ALiBi
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    # rotary positions, tied and untied embeddings, grouped queries
    "GPTNeoX": SIZES,
    "GPTJ": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "CodeGen": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Llama": GROUPED | {"tie_word_embeddings": True},
    "Mistral": GROUPED | {"sliding_window": 4},
    "Ministral": GROUPED | {"sliding_window": 4},
    "Qwen2": GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": GROUPED,
    "Gemma": GROUPED,
    "Gemma2": GROUPED
    | {"sliding_window": 4, "final_logit_softcapping": 3.0}
    | {"attn_logit_softcapping": 5.0},
    "Gemma3Text": GROUPED | {"sliding_window": 4, "sliding_window_pattern": 2},
    "Phi": SIZES,
    "Phi3": GROUPED,
    "StableLm": GROUPED,
    "Starcoder2": GROUPED | {"sliding_window": 4},
    "Cohere": GROUPED | {"logit_scale": 0.3},
    "Cohere2": GROUPED | {"logit_scale": 0.3, "sliding_window": 4},
    "Olmo": GROUPED,
    "Olmo2": GROUPED,
    "Olmo3": GROUPED | {"sliding_window": 4},
    "Granite": GROUPED | {"logits_scaling": 2.0, "residual_multiplier": 0.5},
    "SmolLM3": GROUPED,
    "Nemotron": GROUPED,
    "Glm": GROUPED,
    "Glm4": GROUPED,
    "Helium": GROUPED,
    "Ernie4_5": GROUPED,
    "Exaone4": GROUPED | {"sliding_window": 4},
    "SeedOss": GROUPED,
    "HunYuanDenseV1": GROUPED,
    "Apertus": GROUPED,
    "Arcee": GROUPED,
    "Persimmon": SIZES,
    "DiffLlama": GROUPED,
    "BitNet": GROUPED,
    # mixtures of experts
    "Mixtral": EXPERTS,
    "Qwen2Moe": EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": EXPERTS | {"moe_intermediate_size": 16},
    "Olmoe": EXPERTS,
    "GptOss": EXPERTS | {"sliding_window": 4},
    "GraniteMoe": EXPERTS,
}


def build(name: str) -> PreTrainedModel:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    tokens = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**(CONFIGS[name] | tokens))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # so that logits are far from uniform, and biases and norms not trivial
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p) / max(1.0, p.shape[-1] / 32) ** 0.5)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def model(request) -> PreTrainedModel:
    return build(request.param)


PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10], [11, 12, 13, 14]]
RAGGED = make_rollout(PROMPTS, [[2, 3, EOS], [4, 5, 6, 7, 8], [EOS], [9, 1, 2, EOS]], eos=EOS)


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    return RAGGED.tokens[:, :7], RAGGED.attention_mask[:, :7]


def sample(model: PreTrainedModel, **options):
    ids, mask = padded()
    settings = {"max_new_tokens": 8, "eos_token_ids": [EOS], "pad_token_id": 0}
    generator = torch.Generator().manual_seed(0)
    return generate(model, ids, mask, generator=generator, **(settings | options))


def test_greedy_sampling_gives_the_tokens_of_the_library(model):
    for row, prompt in enumerate(PROMPTS):  # alone: the library's padding differs between models
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=8, pad_token_id=0, eos_token_id=EOS,
        )[0, len(prompt) :]  # fmt: skip
        ours = sample(model, top_k=1)
        real = ours.completion_mask[row]
        assert ours.tokens[row, 7:][real].tolist() == theirs.tolist()


def test_log_probs_recorded_while_sampling_are_those_of_the_training_forward(model):
    rollout = sample(model, temperature=0.8, num_generations=4)
    disable_dropout(model)
    logprobs, _ = completion_logprobs(model.train(), rollout, 0.8)
    model.eval()
    assert (logprobs != 0).any()
    assert torch.allclose(logprobs, rollout.logprobs, atol=1e-4)


def test_a_static_cache_and_bfloat16_weights_change_no_more_than_rounding(model):
    plain = sample(model, num_generations=3)
    if can_be_static(model):
        static = sample(model, num_generations=3, static=True)
        assert torch.equal(static.tokens, plain.tokens)
        assert torch.allclose(static.logprobs, plain.logprobs, atol=1e-4)
    rounded = sample(model, num_generations=3, bf16=True)
    same = (rounded.tokens == plain.tokens)[:, 7:].cumprod(1).bool() & plain.completion_mask
    off = (rounded.logprobs - plain.logprobs)[same].abs()
    assert same.float().mean() > 0.3 and 0 < off.mean() < 0.05


def test_a_row_alone_is_the_row_in_a_left_padded_batch_whatever_the_micro_batch(model):
    whole, entropies = completion_logprobs(model, RAGGED, 1.0)
    limits = {"max_rows": 1}, {"max_rows": 3}, {"max_tokens": 20}
    parts = [completion_logprobs(model, RAGGED, 1.0, **limit) for limit in limits]
    for i, prompt in enumerate(PROMPTS):
        completion = RAGGED.tokens[i, 7:][RAGGED.completion_mask[i]].tolist()
        alone, _ = completion_logprobs(model, make_rollout([prompt], [completion], eos=EOS), 1.0)
        assert torch.allclose(whole[i, : len(completion)], alone[0], atol=1e-4)
    for part, part_entropies in parts:
        assert torch.allclose(part, whole, atol=1e-4)
        assert torch.allclose(part_entropies, entropies, atol=1e-4)


def test_the_value_model_reads_every_architecture(model):
    value_model = ValueModel.on_backbone_of(model).eval()
    torch.nn.init.normal_(value_model.head.weight)
    values = completion_values(value_model, RAGGED)
    alone = completion_values(value_model, RAGGED[1:2])
    assert values[0, 0] != 0 and torch.allclose(values[1:2], alone, atol=1e-4)


def test_it_loads_as_a_policy(model, tmp_path):
    if transformers.__version__ == "5.0.0" and type(model).__name__.startswith("Apertus"):
        pytest.skip("transformers 5.0.0 can't load its own Apertus")
    folder = save_model(tmp_path, model, letter_tokenizer())
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        assert torch.allclose(load_policy(folder)(tokens).logits, model(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("name", ["T5", "Bart", "Mamba", "Rwkv", "Bert", "RecurrentGemma"])
def test_a_model_that_cannot_be_supported_gets_one_line(name, tmp_path):
    """No causal language model, or one without a key-value cache that holds every token."""
    config = getattr(transformers, f"{name}Config")
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "d_model": 32}
    sizes |= {"num_attention_heads": 2, "d_ff": 32, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "intermediate_size": 32, "state_size": 4}
    sizes |= {"lru_width": 32, "attention_window_size": 8, "pad_token_id": 0, "eos_token_id": EOS}
    kinds = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM")
    kind = next(k for k in kinds if hasattr(transformers, f"{name}{k}"))
    model = getattr(transformers, f"{name}{kind}")(config(**sizes))
    folder = save_model(tmp_path, model, letter_tokenizer())
    with pytest.raises(InputError) as error:
        load_policy(folder)
    assert str(error.value).startswith(f"--model {folder}: ") and "\n" not in str(error.value)
