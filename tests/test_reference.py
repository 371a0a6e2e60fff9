"""Which model is the reference; adapters (LoRA); loading models."""

import copy
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small import (
    RAGGED,
    SMALL_MODELS,
    letter_tokenizer,
    near,
    save_model,
    small_gpt2,
    small_llama,
)
from torch import Tensor, nn

from common import Rollout, reference, unwrap
from forward import ValueModel, completion_logprobs, completion_values
from grpo import Config
from plumbing import models
from plumbing.data import Task
from plumbing.errors import InputError
from plumbing.models import add_adapter, load_policy, load_tokenizer, spread_weights
from plumbing.preferences import load_classifier


@torch.no_grad()
def logprobs(model: nn.Module, rollout: Rollout = RAGGED, bf16: bool = False) -> Tensor:
    return completion_logprobs(model, rollout, 0.7, bf16=bf16)[0]


def names_of_trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def train(policy: nn.Module) -> nn.Module:
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
def test_the_reference_is_none_named_or_a_copy(policy):
    for model in (policy, small_gpt2()):
        with reference(model, kl_coef=0.0)() as ref:
            assert ref is None, "without a KL there is none"
    with reference(model, 0.1)() as ref:
        assert ref is not model, "it would move with the policy"
    with reference(small_gpt2(), 0.1, named := small_llama(dropout=0.3).train())() as ref:
        assert ref is named, "a model that is named is the reference itself, no copy"
        assert not ref.training and not names_of_trained(ref), "in evaluation mode, frozen"


def test_a_named_reference_gets_no_adapter(monkeypatch):
    config = Config(model="tiny", reference="tiny", bf16=True, lora_r=2, device="cpu")
    policy, tokenizer = load_policy(config)
    task = Task([], [], [], tokenizer=tokenizer, tokens={"a": [1], "b": [1, 2]})
    for limit in (None, 2 + config.max_new_tokens):
        monkeypatch.setattr(models, "context_length", lambda model, x=limit: x)
        named = models.load_reference(config, task)
        assert task.frozen_models.pop() is named and not hasattr(named, "peft_config")
        assert {model.config._attn_implementation for model in (policy, named)} == {"eager"}
    monkeypatch.setattr(models, "context_length", lambda model: limit - 1)
    with pytest.raises(InputError, match=r"2 tokens and .* new ones don't fit into"):
        models.load_reference(config, task)


PARTS = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
RANDOM_B = {"target_modules": "all-linear", "init_lora_weights": False}


@pytest.mark.problem("reference", 2, "whole")
@pytest.mark.problem("reference", 1, "trained parts")
@pytest.mark.parametrize("adapter", [None, RANDOM_B, PARTS], ids=["whole", "trained", "parts"])
def test_the_reference_copies_and_freezes_what_trains(adapter):
    """With a reload by name, or the base model under a trained adapter (huggingface/trl#1340), the
    KL at step 0 would not be 0. What modules_to_save names isn't switched off with the adapter.
    """
    policy = train(small_llama())
    policy = get_peft_model(policy, LoraConfig(r=4, **adapter)) if adapter else policy
    for name, p in policy.named_parameters():
        p.data[:1] *= "lora_B" not in name  # a trained B may contain zeros
    before, trained = logprobs(policy), names_of_trained(policy)
    ref = reference(policy.train(), kl_coef=0.1)
    assert policy.training, "the policy stays in training mode"
    with ref() as model:
        near(logprobs(model), before, "the KL at step 0 isn't 0", 0, 0)
        assert not model.training and not names_of_trained(model), "in evaluation mode, frozen"
        memory = {p.data_ptr() for p in policy.parameters()}
        own = {name for name, p in model.named_parameters() if p.data_ptr() not in memory}
    assert own == trained, "what trains is copied, and nothing else"
    assert names_of_trained(policy) == trained, "the policy trains what it did before"
    train(policy)
    with ref() as model:
        near(logprobs(model), before, "the reference moves when the policy trains", 0, 0)
    assert not torch.allclose(logprobs(policy), before, atol=1e-2)


@pytest.mark.problem("reference", 1)
def test_a_new_adapter_makes_the_base_the_reference(policy):
    expected = logprobs(copy.deepcopy(policy).unload().eval())
    ref, trained = reference(policy, kl_coef=0.1), names_of_trained(policy)
    with ref() as model:
        assert model is policy, "no copy: the policy with its adapter switched off"
        near(logprobs(model), expected, "of the base, with dropout off too", 0, 0)
    train(policy)
    for _ in range(2):  # as often as there are steps; and after an error the adapter is on again
        with pytest.raises(ZeroDivisionError), ref() as model:
            near(logprobs(model), expected, "the reference moves when the adapter trains", 0, 0)
            raise ZeroDivisionError
        assert policy.training, "after the reference, and an error, the policy trains again"
        assert names_of_trained(policy) == trained, "the adapter trains again"
        assert not torch.allclose(logprobs(policy), expected, atol=1e-2)


# --- Adapters ---


@pytest.mark.parametrize(("name", "layers", "rank"), [("gpt2", 8, 1), ("llama", 14, 16)])
def test_a_new_adapter_changes_no_output(name, layers, rank):
    model = SMALL_MODELS[name]().eval()
    before = logprobs(model)
    policy = add_adapter(model, rank)
    assert torch.equal(logprobs(policy), before)
    adapted = {n: m for n, m in policy.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert len(adapted) == layers and not any("lm_head" in name for name in adapted)
    assert {m.scaling["default"] for m in adapted.values()} == {32 / rank}
    assert {m.lora_A["default"].weight.shape[0] for m in adapted.values()} == {rank}


def test_the_value_model_trains_its_own_adapter(policy):
    value_model = ValueModel.on_backbone_of(train(policy))
    trained = names_of_trained(value_model)
    assert {"head.weight", "head.bias"} < trained
    assert all("lora_" in name or name.startswith("head") for name in trained)
    of_policy = {p.data_ptr(): p.requires_grad for p in policy.parameters()}
    for name, p in value_model.named_parameters():
        assert of_policy.get(p.data_ptr()) is (None if name in trained else False), name


# --- Loading ---


def loaded(model: object, bf16: bool = False, lora_r: int = 0) -> nn.Module:
    config = {"model": str(model), "bf16": bf16, "half": None, "lora_r": lora_r, "device": "cpu"}
    config |= {"gradient_checkpointing": False, "stop": []}
    return load_policy(SimpleNamespace(**config))[0]


def test_weights_of_a_bfloat16_checkpoint_train_in_float32(tmp_path, monkeypatch):
    """A step of AdamW at 1e-6 is lost in bfloat16 weights (NVIDIA-NeMo/Automodel#3444: at 6e-6)."""
    saved = small_llama(vocab_size=20).bfloat16()
    save_model(tmp_path, saved, letter_tokenizer())
    monkeypatch.setitem(sys.modules, "peft", None)  # it is optional
    policy = loaded(tmp_path, bf16=True)
    assert type(policy.model.norm) is nn.RMSNorm, "PyTorch's own is six times as fast"
    for p, q in zip(policy.parameters(), saved.parameters(), strict=True):
        assert p.dtype == torch.float32 and p.requires_grad and torch.equal(p, q.float())


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
@pytest.mark.parametrize(("half", "bits"), [(torch.bfloat16, 16), (torch.float16, 13)])
def test_small_steps_show_in_a_tenth_of_rounded_weights(make, half, bits):
    """On the grid of the type, where checkpoints lie, it would show in none. Of weights halfway
    between two of its numbers, as many of a 4-bit file are, half would go a whole spacing too far.
    """
    origin = make().to(half).float()
    for p in origin.parameters():
        p.data[0] = 0
        p.data.view(torch.int32)[1::2] += 2 ** (bits - 1)  # every second row lies halfway
        p.data[-1] = 7e4  # which float16 can't hold
    lowest = lambda low, high, shape, **_: torch.full(shape, low).int()  # noqa: E731
    highest = lambda low, high, shape, **_: torch.full(shape, high - 1).int()  # noqa: E731
    for draw in (lowest, highest, torch.randint):
        policy = copy.deepcopy(origin)
        with mock.patch("torch.randint", draw):
            spread_weights(policy.base_model, half)
        for (name, p), q in zip(policy.named_parameters(), origin.parameters(), strict=True):
            assert torch.equal(p.to(half), q.to(half)) and not p[0].any(), name
            assert half is torch.bfloat16 or torch.equal(p[-1], q[-1]), name
    kinds = "Linear", "Conv1D"  # which is how GPT-2 calls it
    linear = [m for m in policy.base_model.modules() if type(m).__name__ in kinds]
    linear = {p for module in linear for p in module.parameters()}
    assert len(linear) > 10
    for (name, p), q in zip(policy.named_parameters(), origin.parameters(), strict=True):
        assert p in linear or torch.equal(p, q), name
        if p in linear and p.dim() == 2:
            moved = (p.detach().view(torch.int32) + round(0.1 * 2**bits)).view(torch.float32)
            shows = (moved.to(half) != p.to(half))[1:-1].float()
            assert shows.mean() == pytest.approx(0.1, abs=0.04), name
            assert shows[::2].mean() == pytest.approx(0.1, abs=0.06), f"{name}, from halfway"


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt2 lora", "llama lora"])
def test_bfloat16_begins_with_the_log_probs_of_the_checkpoint(name):
    """To the bit: else the KL at step 0 wouldn't be 0. An adapter's base is left as it is."""
    name, _, has_adapter = name.partition(" ")
    policy = SMALL_MODELS[name]().bfloat16().float()
    policy = train(add_adapter(policy, 4)) if has_adapter else policy
    config = SimpleNamespace(bf16=True, half=None, gradient_checkpointing=False)
    models.set_up_training(config, policy)
    origins = copy.deepcopy((policy, ValueModel.on_backbone_of(policy)))
    spread_weights(unwrap(policy).base_model)
    both = policy, ValueModel.on_backbone_of(policy)
    for value_model in (both[1], origins[1]):
        nn.init.constant_(value_model.head.weight, 0.5)
    for model, origin in zip(both, origins, strict=True):
        pairs = list(zip(model.parameters(), origin.parameters(), strict=True))
        assert any(not torch.equal(p, q) for p, q in pairs)
        assert all(torch.equal(p, q) for p, q in pairs if not p.requires_grad)
    for score, model, origin in zip((logprobs, completion_values), both, origins, strict=True):
        found = score(model, RAGGED, bf16=True)
        assert torch.equal(found, score(origin, RAGGED, bf16=True)) and found.any()


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_an_adapter_keeps_its_base_in_bfloat16(make, tmp_path):
    """But not norms and biases, nor the head, which makes logits. GPT-2's is its embedding too."""
    save_model(tmp_path, make(vocab_size=20), letter_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft's, of weights that are stored transposed
        policy = loaded(tmp_path, bf16=True, lora_r=1)
    head = policy.get_output_embeddings().weight
    frozen = [p for p in policy.parameters() if not p.requires_grad and p is not head]
    kept = {(p.dim(), p.dtype) for p in frozen}
    assert kept == {(2, torch.bfloat16), (1, torch.float32)} and head.dtype == torch.float32
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in loaded(tmp_path, lora_r=4).parameters()} == {torch.float32}


def test_a_saved_adapter_trains_on_with_its_tokenizer(tmp_path, monkeypatch):
    base, folder = save_model(tmp_path / "base", small_llama(), letter_tokenizer()), tmp_path / "a"
    monkeypatch.chdir(tmp_path)
    policy = train(loaded("base", lora_r=2))
    policy.save_pretrained(folder)
    monkeypatch.chdir(folder)
    again = loaded(folder)
    assert torch.equal(logprobs(again), logprobs(policy))
    assert names_of_trained(again) == names_of_trained(policy)
    assert len(load_tokenizer(str(folder), base)) == 20
    own = letter_tokenizer()
    own.add_tokens(["<more>"])
    own.save_pretrained(folder)
    assert len(load_tokenizer(str(folder), base)) == 21
    # Without files transformers makes up an empty tokenizer for GPT-2, and fails for Llama.
    for make, fault in (small_gpt2, "has no tokenizer files"), (small_llama, "^the tokenizer of "):
        make().save_pretrained(tmp_path / "n")
        with pytest.raises(InputError, match=fault):
            load_tokenizer(str(tmp_path / "n"))


def test_every_eos_id_of_the_model_is_found():
    """Gemma 3 and Phi 3.5 have several; missing one, a row runs on (huggingface/trl#7039)."""
    model, tokenizer = small_llama(), SimpleNamespace(eos_token_id=36)
    model.generation_config.eos_token_id = [39, 38]
    model.config.eos_token_id = 0  # GPT-NeoX
    assert models.eos_token_ids(model, tokenizer) == [0, 36, 38, 39]
    model.config.eos_token_id = None
    assert models.eos_token_ids(model, tokenizer) == [36, 38, 39]


def test_an_error_names_missing_and_surplus_weights(tmp_path, capsys):
    name = save_model(tmp_path / "m", small_llama(vocab_size=20), letter_tokenizer())
    config, file = Config(model=name, device="cpu", bf16=False), tmp_path / "m" / "config.json"
    text, layers = file.read_text(), '"num_hidden_layers": '
    for load in (lambda: load_policy(config), lambda: load_classifier(name, new_head=True)):
        file.write_text(text)
        load()  # a classifier takes no lm_head
        assert capsys.readouterr().out == ""
        file.write_text(text.replace(layers + "2", layers + "1"))
        load()
        assert "m: 9 weights aren't loaded, model.layers.1.inp" in capsys.readouterr().out
        file.write_text(text.replace(layers + "2", layers + "3"))
        with pytest.raises(InputError, match=r"m: is no .*, its checkpoint has no model.layers.2"):
            load()
    torch.save({}, tmp_path / "m" / "pytorch_model.bin")  # a pickle can run any code when loaded
    (tmp_path / "m" / "model.safetensors").unlink()
    config.lora_r = 1
    with pytest.raises(InputError, match=r"^--model .*m --lora_r 1: OSError"):
        load_policy(config)
