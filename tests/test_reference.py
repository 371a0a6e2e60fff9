"""Which model is the reference; adapters (LoRA), merged ones too; loading models."""

import copy
import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small import RAGGED, SMALL_MODELS, letter_tokenizer, save_model, small_gpt2, small_llama
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

import grpo
import ppo
import rloo
from common import ValueModel, base_model, reference, store_in_bfloat16
from plumbing import models
from plumbing.errors import Fault, InputError
from plumbing.forward import completion_logprobs, completion_values
from plumbing.half import half_precision_copy
from plumbing.models import add_adapter, load_causal, load_tokenizer
from plumbing.run import check_saving
from plumbing.run import save_model as save_trained


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return completion_logprobs(model, RAGGED, 0.7)[0]


def names_of_trained(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def train(policy: torch.nn.Module) -> torch.nn.Module:
    """As after some training: of an adapter B is not 0 any more."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p), alpha=0.1)
    return policy


@pytest.fixture(params=SMALL_MODELS)
def policy(request) -> PeftModel:
    """A small model with a new adapter, in training mode, its dropout still on."""
    return add_adapter(SMALL_MODELS[request.param](dropout=0.3), 4).train()


# --- Which reference ---


@pytest.mark.problem("reference", 1)
def test_without_kl_there_is_no_reference_with_or_without_adapter(policy):
    for model in (policy, small_gpt2()):
        with reference(model, kl_coef=0.0) as ref:
            assert ref is None


PARTS = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
RANDOM_B = {"target_modules": "all-linear", "init_lora_weights": False}


@pytest.mark.problem("reference", 2)
@pytest.mark.parametrize("adapter", [None, RANDOM_B, PARTS])
def test_it_is_a_frozen_copy_of_what_trains_and_shares_what_does_not(adapter):
    """With a reload by name, or the base model under a trained adapter (huggingface/trl#1340), the
    KL at step 0 would not be 0. What modules_to_save names isn't switched off with the adapter.
    """
    policy = train(small_llama())
    policy = get_peft_model(policy, LoraConfig(r=4, **adapter)) if adapter else policy
    before, trained = logprobs(policy), names_of_trained(policy)
    ref = reference(policy.train(), kl_coef=0.1)
    assert policy.training
    with ref as model:
        assert torch.equal(logprobs(model), before)
        assert not model.training and not names_of_trained(model)
        memory = {p.data_ptr() for p in policy.parameters()}
        own = {name for name, p in model.named_parameters() if p.data_ptr() not in memory}
    assert own == trained == names_of_trained(policy)
    train(policy)
    with ref as model:
        assert torch.equal(logprobs(model), before)
    assert not torch.allclose(logprobs(policy), before, atol=1e-2)


@pytest.mark.problem("reference", 1)
def test_of_a_new_adapter_it_is_the_base_model_and_costs_no_memory(policy):
    expected = logprobs(copy.deepcopy(policy).unload().eval())
    ref, trained = reference(policy, kl_coef=0.1), names_of_trained(policy)
    with ref as model:
        assert model is policy  # no copy
        assert torch.equal(logprobs(model), expected)  # and no dropout either, though it is on
    train(policy)
    for _ in range(2):  # as often as there are steps; and after an error the adapter is on again
        with pytest.raises(ZeroDivisionError), ref as model:
            assert torch.equal(logprobs(model), expected)
            raise ZeroDivisionError
        assert policy.training and names_of_trained(policy) == trained
        assert not torch.allclose(logprobs(policy), expected, atol=1e-2)


# --- Frozen weights in bfloat16 ---

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def bytes_by_kind(model: torch.nn.Module) -> dict[str, set[int]]:
    """How many bytes a weight takes, of those that train and of each kind that is frozen."""
    found, head = {}, base_model(model).get_output_embeddings()
    for module in model.modules():
        kind = "embedding" if isinstance(module, torch.nn.Embedding) else "matrix"
        for p in module.parameters(recurse=False):
            kind = "vector" if p.dim() == 1 else "head" if module is head else kind
            found.setdefault("trained" if p.requires_grad else kind, set()).add(p.element_size())
    return found


def exact_in_bfloat16(model: torch.nn.Module) -> torch.nn.Module:
    """As if loaded from a checkpoint in bfloat16, as most are."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


@pytest.mark.parametrize(
    ("make", "exact", "device", "embedding", "head"),
    [
        (small_llama, True, GPU, {2}, {2}),
        (small_llama, False, GPU, {4}, {2}),
        (small_llama, True, CPU, {2}, {4}),
        # Tied: its embeddings are its head as well. Those of positions aren't.
        (small_gpt2, True, GPU, {2}, {2}),
        (small_gpt2, False, GPU, {4}, {4}),
        (small_gpt2, True, CPU, {2, 4}, {4}),
    ],
)
def test_frozen_matrices_take_two_bytes_and_embeddings_where_nothing_is_lost(
    make, exact, device, embedding, head
):
    model = exact_in_bfloat16(make()) if exact else make()
    found = bytes_by_kind(store_in_bfloat16(add_adapter(model, 4), device))
    expected = {"trained": {4}, "matrix": {2}, "vector": {4}, "embedding": embedding, "head": head}
    assert found == expected


@pytest.mark.parametrize("name", SMALL_MODELS)
@pytest.mark.parametrize("exact", [True, False])
def test_under_autocast_a_base_in_bfloat16_changes_no_logprob_and_no_gradient(name, exact):
    """To the bit: autocast rounds a matrix at every pass otherwise. So do reference and values."""
    found, model = [], SMALL_MODELS[name]()
    model = exact_in_bfloat16(model) if exact else model
    for stored in (False, True):
        torch.manual_seed(0)
        policy = add_adapter(copy.deepcopy(model), 4)
        policy = train(store_in_bfloat16(policy, CPU) if stored else policy)
        value_model = ValueModel.on_backbone_of(policy)
        torch.nn.init.constant_(value_model.head.weight, 0.1)
        logprobs, _ = completion_logprobs(policy, RAGGED, 0.7, bf16=True)
        values = completion_values(value_model, RAGGED, bf16=True)
        (logprobs + values).sum().backward()
        gradients = [
            p.grad for m in (policy, value_model) for p in m.parameters() if p.requires_grad
        ]
        assert all(g.dtype == torch.float32 for g in gradients) and gradients[-1].abs().sum() > 0
        with torch.no_grad(), reference(model.requires_grad_(True), 0.1, bf16=stored) as ref:
            of_reference, _ = completion_logprobs(ref, RAGGED, 0.7, bf16=True)
        found.append([logprobs, values, of_reference, *gradients])
    for x, expected in zip(*found, strict=True):
        assert torch.equal(x, expected)
    shared = {p for p in policy.parameters() if not p.requires_grad}
    assert {p for p in value_model.parameters() if not p.requires_grad} <= shared


def test_the_merged_model_is_saved_in_float32_and_the_one_that_trains_stays_as_it_is(tmp_path):
    policy = train(store_in_bfloat16(add_adapter(small_llama(vocab_size=20), 4), CPU))
    before = copy.deepcopy(policy.state_dict())
    save_trained(tmp_path, policy, letter_tokenizer())
    assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
    layer = base_model(policy).model.layers[0].mlp.down_proj
    added = (
        layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    )
    saved = load_causal(str(tmp_path / "model")).model.layers[0].mlp.down_proj.weight
    assert torch.allclose(saved, layer.weight.float() + added, atol=1e-6)


# --- Adapters ---


@pytest.mark.parametrize(("name", "layers", "rank"), [("gpt2", 8, 1), ("llama", 14, 16)])
def test_a_new_adapter_changes_nothing_and_is_on_all_layers_but_the_head(name, layers, rank):
    """Scaled by 32 over its rank."""
    model = SMALL_MODELS[name]().eval()
    before = logprobs(model)
    policy = add_adapter(model, rank)
    assert torch.equal(logprobs(policy), before)
    adapted = {n: m for n, m in policy.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert len(adapted) == layers and not any("lm_head" in name for name in adapted)
    assert {m.scaling["default"] for m in adapted.values()} == {32 / rank}
    assert {m.lora_A["default"].weight.shape[0] for m in adapted.values()} == {rank}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Lora", {"use_dora": True}),
        ("Lora", {"target_modules": [], "target_parameters": ["q_proj.weight"]}),
        ("Vera", {"target_modules": ["q_proj"]}),
        ("UniLora", {"theta_d_length": 64}),
        ("Shira", {"init_weights": False}),
        ("Hira", {}),
    ],
)
def test_adapters_that_look_at_weights_or_hold_buffers_and_indices_decode_in_bfloat16(
    kind, options
):
    options = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    policy = train(get_peft_model(small_llama(), getattr(peft, f"{kind}Config")(**options))).eval()
    rounded = half_precision_copy(policy, torch.bfloat16)
    assert 0 < (logprobs(rounded) - logprobs(policy)).abs().mean() < 0.1


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_the_copy_that_decodes_has_the_adapter_merged_and_says_the_same(make):
    policy = train(add_adapter(make(), 4)).eval()
    copied = half_precision_copy(policy, torch.float32)
    assert not any(hasattr(module, "base_layer") for module in copied.modules())
    with policy.disable_adapter():
        without = logprobs(policy)
    assert (logprobs(policy) - without).abs().max() > 0.01
    assert torch.allclose(logprobs(copied), logprobs(policy), atol=1e-4)


def test_the_value_model_of_an_adapted_policy_trains_its_own_adapter_over_the_same_base(policy):
    value_model = ValueModel.on_backbone_of(train(policy))
    assert (completion_values(value_model, RAGGED) == 0).all()
    trained = names_of_trained(value_model)
    assert {"head.weight", "head.bias"} < trained
    assert all("lora_" in name or name.startswith("head") for name in trained)
    of_policy = {p.data_ptr(): p.requires_grad for p in policy.parameters()}
    for name, p in value_model.named_parameters():
        assert of_policy.get(p.data_ptr()) is (None if name in trained else False)


@pytest.mark.parametrize("script", [ppo, grpo, pytest.param(rloo, marks=pytest.mark.slow)])
def test_an_adapter_is_trained_saved_and_trained_on_from_where_it_was(script, make_job, tmp_path):
    job, flags = make_job(script), {"num_epochs": 2, "num_eval_prompts": 3}
    lines = job(lora_r=4, num_steps=3, learning_rate=0.02, **flags)
    first, second = job.folder / "adapter", tmp_path / "second"
    assert not (first / "model.safetensors").exists()
    lines2 = job(model=first, output_dir=second, **flags)
    assert lines2[0]["eval/reward"] == lines[-1]["eval/reward"]  # it starts where the first ended
    for x in (lines, lines2):
        assert x[0]["objective/kl"] == 0 and x[0]["val/ratio_max_dev_first"] < 1e-5
    assert lines[2]["objective/kl"] != 0
    base = AutoModelForCausalLM.from_pretrained(job.model)
    for folder in (first, second / "adapter"):
        saved = load_causal(str(folder)).unload()
        for p, q in zip(saved.parameters(), base.parameters(), strict=True):
            assert torch.equal(p, q)  # the base model never changes


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """(A policy with a trained adapter, the folder where it is saved, seen from another one)."""
    save_model(tmp_path / "base", small_llama(), letter_tokenizer())
    monkeypatch.chdir(tmp_path)
    policy = train(load_causal("base", lora_r=2)).eval()
    policy.save_pretrained("adapter")
    monkeypatch.chdir("/")
    return policy, tmp_path / "adapter"


@pytest.mark.parametrize("layers", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_an_adapter_of_tied_embeddings_merges_into_the_same_model(layers, tmp_path):
    tied = small_llama().config
    tied.tie_word_embeddings = True
    model = LlamaForCausalLM(tied)
    policy = train(get_peft_model(model, LoraConfig(target_modules=layers, task_type="CAUSAL_LM")))
    before = logprobs(policy.eval())
    save_trained(tmp_path, policy, letter_tokenizer())
    assert torch.allclose(logprobs(load_causal(str(tmp_path / "model"))), before, atol=1e-4)


def test_a_merged_model_that_is_another_one_is_not_saved_and_the_adapter_is(
    adapter, tmp_path, monkeypatch
):
    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", lambda model: small_gpt2())
    with pytest.raises(Fault, match=r"load .*/adapter with peft\.PeftModel, there is no .*/model$"):
        save_trained(tmp_path / "run", adapter[0], letter_tokenizer())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["adapter"]


@pytest.mark.parametrize("settings", [{"temperature": 0.6}, {"early_stopping": True}])
def test_a_generation_config_that_transformers_refuses_is_saved_as_it_was(
    settings, tmp_path, monkeypatch
):
    """By 5.0 to 5.20 where a flag has no effect, as temperature without do_sample."""

    def save_pretrained(self, *args: object, **kwargs: object) -> None:
        if settings.items() <= self.to_dict().items():
            raise ValueError("GenerationConfig is invalid: ")
        save(self, *args, **kwargs)

    save = GenerationConfig.save_pretrained
    monkeypatch.setattr(GenerationConfig, "save_pretrained", save_pretrained)
    model = small_gpt2(vocab_size=20)
    model.generation_config.update(**settings)
    check_saving("m", model, letter_tokenizer())
    save_trained(tmp_path, model, letter_tokenizer())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config
    assert settings.items() <= saved.to_dict().items() and saved.eos_token_id == 19


def test_what_cannot_be_saved_is_refused_before_the_first_step(monkeypatch):
    bias = LoraConfig(target_modules=["q_proj"], lora_bias=True)  # q_proj has none to merge it into
    with pytest.raises(InputError, match=r"^--model m: can't be saved: Impossible to merge"):
        check_saving("m", get_peft_model(small_llama(), bias), letter_tokenizer())
    tokenizer = letter_tokenizer()
    monkeypatch.setattr(type(tokenizer), "save_pretrained", Mock(side_effect=ValueError("odd")))
    with pytest.raises(InputError, match=r"^--model m: can't be saved: odd$"):
        check_saving("m", small_gpt2(), tokenizer)


def test_an_adapter_has_its_own_tokenizer_or_else_that_of_its_base(adapter):
    folder = adapter[1]
    assert len(load_tokenizer(str(folder))) == 20
    own = letter_tokenizer()
    own.add_tokens(["<more>"])
    own.save_pretrained(folder)
    assert len(load_tokenizer(str(folder))) == 21


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", "{", "adapter_config.json is damaged"),
        ("adapter_config.json", "[]", "adapter_config.json is damaged"),
        ("adapter_config.json", '{"base_model_name_or_path": null}', "names no base_model_name"),
        ("adapter_config.json", '{"base_model_name_or_path": "nowhere-at-all"}', "no such folder"),
        ("adapter_model.safetensors", "nothing", "its adapter can't be trained"),
    ],
)
def test_an_adapter_at_fault_is_refused_in_one_line(file, content, message, adapter):
    (adapter[1] / file).write_text(content)
    with pytest.raises(InputError, match=message) as error:
        load_causal(str(adapter[1]))
    assert "\n" not in str(error.value)


def test_a_second_adapter_and_a_missing_peft_are_refused(adapter, monkeypatch):
    with pytest.raises(InputError, match=r"--lora_r 4: .* holds an adapter already"):
        load_causal(str(adapter[1]), lora_r=4)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="adapters need peft: pip install peft"):
        load_causal(str(adapter[1]))


# --- Loading ---


def test_a_checkpoint_in_bfloat16_is_trained_in_float32(tmp_path):
    """A step of AdamW at 1e-6 is lost in bfloat16 weights (NVIDIA-NeMo/Automodel#3444: at 6e-6)."""
    saved = small_gpt2().bfloat16()
    saved.save_pretrained(tmp_path)
    for p, q in zip(load_causal(str(tmp_path)).parameters(), saved.parameters(), strict=True):
        assert p.dtype == torch.float32 and torch.equal(p, q.float())


def test_every_eos_id_of_the_model_is_found():
    """Gemma 3 and Phi 3.5 have several; missing one, a row runs on (huggingface/trl#7039)."""
    model, tokenizer = small_llama(), SimpleNamespace(eos_token_id=36)
    model.generation_config.eos_token_id = [39, 38]
    model.config.eos_token_id = 37
    assert models.eos_token_ids(model, tokenizer) == [36, 37, 38, 39]
    model.config.eos_token_id = 0  # GPT-NeoX
    assert 0 in models.eos_token_ids(model, tokenizer)


def test_a_device_that_is_busy_or_too_old_says_so(monkeypatch):
    def empty(*args: object, device: str) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(InputError, match=r"^--device cuda: .* cuda, cpu: .* devices are busy$"):
        models.pick_device(None)


@pytest.mark.parametrize("load", [load_causal, load_tokenizer])
def test_a_checkpoint_with_its_own_code_is_refused_in_one_line_and_nobody_is_asked(
    load, tmp_path, monkeypatch
):
    save_model(tmp_path, small_gpt2(vocab_size=20), letter_tokenizer())
    own = {"auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}}
    for file in ("config.json", "tokenizer_config.json"):
        (tmp_path / file).write_text(json.dumps(own | {"model_type": "own"}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'has_run')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    with pytest.raises(InputError, match=r"needs its own code, which is never run here[^\n]*$"):
        load(str(tmp_path))
    assert not (tmp_path / "has_run").exists()


def test_a_model_without_gradient_checkpointing_is_refused_in_one_line(small_model, monkeypatch):
    monkeypatch.setattr(type(small_model.base_model), "supports_gradient_checkpointing", False)
    config = SimpleNamespace(gradient_checkpointing=True, bf16=False)
    with pytest.raises(InputError, match=r"^--gradient_checkpointing: [^\n]*$"):
        models.set_up_training(config, small_model)
