"""The one place that decides the reference model, and adapters (LoRA)."""

import copy
import json
import sys

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small import RAGGED, SMALL_MODELS, letter_tokenizer, save_model, small_gpt2, small_llama
from transformers import AutoModelForCausalLM, GPT2Config, GPT2ForSequenceClassification

import grpo
import ppo
import rloo
from common import ValueModel, disable_dropout, reference
from plumbing import loading
from plumbing.checkpoints import save_model as save_trained
from plumbing.errors import InputError
from plumbing.forward import completion_logprobs, completion_values
from plumbing.loading import add_adapter, load_policy, load_tokenizer
from sampling import generate


def train_adapter(policy: PeftModel) -> PeftModel:
    """As after some training: B is not 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.5)
    return policy


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return completion_logprobs(model, RAGGED, 0.7)[0]


@pytest.fixture(params=SMALL_MODELS)
def policy(request) -> PeftModel:
    """A small model with a new adapter, in training mode, its dropout still on."""
    return add_adapter(SMALL_MODELS[request.param](dropout=0.3), 4).train()


# --- Which reference ---


def test_without_kl_there_is_no_reference_with_or_without_adapter(policy):
    for model in (policy, small_gpt2()):
        with reference(model, kl_coef=0.0) as ref:
            assert ref is None


def test_of_a_full_policy_it_is_a_frozen_copy_of_the_weights_in_memory(small_model):
    """A reference reloaded by name misses changes made in memory: KL at step 0 would not be 0."""
    with torch.no_grad():
        next(small_model.parameters()).add_(0.1)
    ref = reference(small_model.train(), kl_coef=0.1)
    with ref as model:
        before = logprobs(model)
        assert torch.equal(before, logprobs(small_model))
        assert not model.training and not any(p.requires_grad for p in model.parameters())
        policy_memory = {p.data_ptr() for p in small_model.parameters()}
        assert not policy_memory & {p.data_ptr() for p in model.parameters()}
    with torch.no_grad():
        for p in small_model.parameters():
            p.mul_(1.5)
    with ref as model:
        assert torch.equal(logprobs(model), before)


def test_of_a_new_adapter_it_is_the_base_model_and_costs_no_memory(policy):
    base = SMALL_MODELS["gpt2" if "GPT2" in type(policy.get_base_model()).__name__ else "llama"]()
    expected = logprobs(base.eval())
    ref = reference(policy, kl_coef=0.1)
    with ref as model:
        assert model is policy  # no copy
        assert torch.equal(logprobs(model), expected)  # and no dropout either, though it is on
    train_adapter(policy)
    for _ in range(2):  # as often as there are steps
        with ref as model:
            assert torch.equal(logprobs(model), expected)
        assert policy.training
        assert not torch.allclose(logprobs(policy), expected, atol=1e-2)


def test_after_the_reference_was_read_the_adapter_trains_and_the_base_does_not(policy):
    disable_dropout(policy)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    with reference(policy, kl_coef=0.1) as model:
        logprobs(model)
    assert trained == {name for name, p in policy.named_parameters() if p.requires_grad}
    completion_logprobs(train_adapter(policy), RAGGED, 1.0)[0].sum().backward()
    with_gradient = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert with_gradient == trained


def test_the_adapter_is_on_again_after_an_error_in_the_reference(policy):
    disable_dropout(policy)
    ref = reference(policy, kl_coef=0.1)
    before = logprobs(train_adapter(policy))
    with pytest.raises(RuntimeError, match="in the middle"), ref:
        raise RuntimeError("in the middle")
    assert torch.equal(logprobs(policy), before) and policy.training


def test_of_a_trained_adapter_it_is_a_frozen_copy_of_that_adapter_over_the_same_base(policy):
    """With the base model as reference, KL at step 0 would not be 0 (huggingface/trl#1193)."""
    disable_dropout(train_adapter(policy))
    ref = reference(policy, kl_coef=0.1)
    with ref as model:
        before = logprobs(model)
        assert torch.equal(before, logprobs(policy))  # KL 0
        assert not model.training and not any(p.requires_grad for p in model.parameters())
        shared = {p.data_ptr() for p in policy.parameters() if not p.requires_grad}
        own = [p for p in model.parameters() if p.data_ptr() not in shared]
        num_trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        assert sum(p.numel() for p in own) == num_trained
    assert any(p.requires_grad for p in policy.parameters())
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.mul_(1.5)
    with ref as model:
        assert torch.equal(logprobs(model), before)
    assert not torch.allclose(logprobs(policy), before, atol=1e-2)


def test_a_new_adapter_that_starts_with_b_other_than_0_is_not_the_base_model_either():
    config = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
    policy = get_peft_model(small_llama(), config)
    with reference(policy, kl_coef=0.1) as model:
        assert model is not policy and torch.equal(logprobs(model), logprobs(policy))


def test_an_adapter_that_trains_more_than_lora_matrices_has_a_copy_as_its_reference():
    """modules_to_save are not switched off with the adapter: the base would not be the base."""
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    policy = get_peft_model(small_llama(), config)
    ref = reference(policy, kl_coef=0.1)
    with ref as model:
        assert model is not policy
        before = logprobs(model)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(0.1)
    with ref as model:
        assert torch.equal(logprobs(model), before)


# --- Adapters ---


def test_a_new_adapter_changes_nothing_and_is_on_every_linear_layer_but_the_head(policy):
    base = copy.deepcopy(policy).unload().eval()
    assert torch.equal(logprobs(policy.eval()), logprobs(base))
    adapted = {
        name.split(".lora_A")[0] for name, _ in policy.named_parameters() if "lora_A" in name
    }
    layers = 2 * (4 if "GPT2" in type(base).__name__ else 7)
    assert len(adapted) == layers and not any("lm_head" in name for name in adapted)


def test_dropout_inside_an_adapter_is_switched_off_and_the_saved_config_keeps_its_own():
    config = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear")
    policy = train_adapter(get_peft_model(small_llama(dropout=0.3), config)).train()
    assert not torch.equal(logprobs(policy), logprobs(policy))
    assert disable_dropout(policy) > 0
    assert torch.equal(logprobs(policy), logprobs(policy))
    assert policy.merge_and_unload().config.attention_dropout == 0.3


def test_the_value_model_of_an_adapted_policy_trains_its_own_adapter_over_the_same_base(policy):
    disable_dropout(train_adapter(policy))
    value_model = ValueModel.on_backbone_of(policy)
    assert (completion_values(value_model, RAGGED) == 0).all()
    trained = {name: p for name, p in value_model.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} < set(trained)
    assert all("lora_" in name or name.startswith("head") for name in trained)
    policy_memory = {p.data_ptr(): p.requires_grad for p in policy.parameters()}
    for name, p in value_model.named_parameters():
        assert policy_memory.get(p.data_ptr()) is (None if name in trained else False)


# --- Runs with adapters ---

SCRIPTS = [ppo, grpo, rloo]


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def job(request, make_job):
    return make_job(request.param)


def accuracy(lines: list[dict]) -> list[float]:
    return [line["eval/reward"] for line in lines if "eval/reward" in line]


def test_an_adapter_is_trained_saved_and_trained_on_from_where_it_was(job, tmp_path):
    lines = job(lora_r=4, num_steps=3, num_epochs=2, learning_rate=0.02, num_eval_prompts=3)
    assert lines[0]["objective/kl"] == 0 and lines[0]["val/ratio_max_dev_first"] < 1e-5
    assert lines[2]["objective/kl"] != 0
    first = job.folder / "model"
    saved = sorted(path.name for path in first.iterdir())
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
    trained = load_policy(str(first))
    assert any(p.any() for name, p in trained.named_parameters() if "lora_B" in name)

    more = {"model": first, "output_dir": tmp_path / "second"}
    lines2 = job(num_epochs=2, num_eval_prompts=3, **more)
    assert accuracy(lines2)[0] == accuracy(lines)[-1]  # it starts where the first one ended
    assert lines2[0]["objective/kl"] == 0 and lines2[0]["val/ratio_max_dev_first"] < 1e-5
    again = load_policy(str(tmp_path / "second/model"))
    base = AutoModelForCausalLM.from_pretrained(job.model)
    for p, q in zip(again.unload().parameters(), base.parameters(), strict=True):
        assert torch.equal(p, q)  # the base model never changes


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_an_adapter_is_scaled_by_32_over_its_rank(rank):
    policy = add_adapter(small_llama(), rank)
    layers = [m for m in policy.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert len(layers) == 14 and {m.scaling["default"] for m in layers} == {32 / rank}
    assert {m.lora_A["default"].weight.shape[0] for m in layers} == {rank}


def test_an_adapter_has_its_own_tokenizer_or_else_that_of_its_base(tmp_path):
    base = save_model(tmp_path / "base", small_llama(vocab_size=20), letter_tokenizer())
    adapter = tmp_path / "adapter"
    add_adapter(load_policy(base), 2).save_pretrained(adapter)
    assert len(load_tokenizer(str(adapter))) == 20
    own = letter_tokenizer()
    own.add_tokens(["<more>"])
    own.save_pretrained(adapter)
    assert len(load_tokenizer(str(adapter))) == 21


def test_the_best_model_is_merged_in_a_copy_and_the_adapter_trains_on(job, tmp_path):
    flags = {"lora_r": 4, "num_steps": 3, "learning_rate": 0.02, "eval_every": 1}
    found = []
    for merge in ("false", "true"):
        lines = job(**flags, save_best="true", merge_adapter=merge)
        found.append([{k: v for k, v in x.items() if k.partition("/")[0] != "time"} for x in lines])
    for line, other in zip(*found, strict=True):
        assert line["eval/reward"] == other["eval/reward"]
        assert line.get("grad_norm") == other.get("grad_norm")
    assert (job.folder / "adapter").exists()


def test_a_merged_model_is_a_plain_one_that_says_the_same_as_base_and_adapter(job):
    job(lora_r=4, num_steps=2, learning_rate=0.02, merge_adapter="true")
    merged = load_policy(str(job.folder / "model"))
    assert not isinstance(merged, PeftModel) and merged.config.resid_pdrop == 0.1
    folders = sorted(p.name for p in job.folder.iterdir() if p.is_dir())
    assert folders == ["adapter", "checkpoint", "model"]
    assert len(load_tokenizer(str(job.folder / "adapter"))) == 20
    adapted = load_policy(str(job.folder / "adapter"))
    assert torch.allclose(logits(merged), logits(adapted), atol=1e-5)
    assert not torch.allclose(logits(merged), logits(load_policy(job.model)), atol=1e-2)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(16).view(2, 8)).logits


def test_adapters_get_ten_times_the_learning_rate_unless_one_is_given(make_job):
    job = make_job(grpo)
    full = job()[0]["lr"]
    assert job(lora_r=2)[0]["lr"] == pytest.approx(10 * full)
    assert job(lora_r=2, learning_rate=0.003, warmup_steps=0)[0]["lr"] == 0.003
    adapter = str(job.folder / "model")
    other = job.folder.parent / "other"
    assert job(model=adapter, output_dir=other)[0]["lr"] == pytest.approx(10 * full)


def test_the_first_line_of_a_run_says_how_much_is_trained(make_job, capsys):
    make_job(grpo)(lora_r=1)
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("grpo: "))
    assert line.startswith("grpo: an adapter of 0.00 M on 0.0 M parameters on cpu")


def test_the_adapter_has_its_own_tokenizer_or_that_of_its_base(make_job, tmp_path):
    job = make_job(grpo)
    job(lora_r=2)
    folder = job.folder / "model"
    assert len(load_tokenizer(str(folder))) == 20
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert len(load_tokenizer(str(folder))) == 20


def test_an_adapter_finds_its_base_from_any_folder(tmp_path, monkeypatch):
    save_model(tmp_path / "base", small_llama(), letter_tokenizer())
    monkeypatch.chdir(tmp_path)
    load_policy("base", lora_r=2).save_pretrained(tmp_path / "adapter")
    monkeypatch.chdir("/")
    assert isinstance(load_policy(str(tmp_path / "adapter")), PeftModel)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("lora_r", "--lora_r 4: .* holds an adapter already, leave the flag out"),
        ("config", "adapter_config.json is damaged"),
        ("weights", "its adapter can't be trained"),
        ("base", "no such folder"),
        ("no base", "names no base_model_name_or_path, add it"),
        ("list", "adapter_config.json is damaged"),
        ("prompt tuning", "its adapter can't be trained: .*prompt learning"),
        ("no peft", "adapters need peft: pip install peft"),
    ],
)
def test_an_adapter_at_fault_is_refused_in_one_line(damage, message, tmp_path, monkeypatch):
    base = save_model(tmp_path / "base", small_llama(), letter_tokenizer())
    folder = tmp_path / "adapter"
    load_policy(base, lora_r=2).save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    if damage == "config":
        (folder / "adapter_config.json").write_text("{")
    elif damage == "weights":
        (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    elif damage == "base":
        config["base_model_name_or_path"] = "nowhere-at-all"
        (folder / "adapter_config.json").write_text(json.dumps(config))
    elif damage == "no base":
        config["base_model_name_or_path"] = None
        (folder / "adapter_config.json").write_text(json.dumps(config))
    elif damage == "list":
        (folder / "adapter_config.json").write_text("[]")
    elif damage == "prompt tuning":
        from peft import PromptTuningConfig

        soft = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), soft)
        model.save_pretrained(folder)
    elif damage == "no peft":
        monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=message) as error:
        load_policy(str(folder), lora_r=4 if damage == "lora_r" else 0)
    assert "\n" not in str(error.value)


def test_an_adapter_that_transformers_put_on_its_base_by_itself_is_refused(tmp_path, monkeypatch):
    """As with the name of an adapter on the hub: nothing of what it loads would train."""
    base = save_model(tmp_path / "base", small_llama(), letter_tokenizer())
    load_policy(base, lora_r=2).save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(loading, "adapter_base", lambda name: None)
    with pytest.raises(InputError, match="is an adapter, download it and give its folder"):
        load_policy(str(tmp_path / "adapter"))


def test_a_value_model_from_a_reward_model_is_refused_with_an_adapter(make_job, tmp_path):
    """All its weights would train, at the learning rate of an adapter."""
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, num_labels=1)
    config.bos_token_id = config.eos_token_id = 19
    folder = save_model(tmp_path / "rm", GPT2ForSequenceClassification(config), letter_tokenizer())
    with pytest.raises(InputError, match="not with an adapter"):
        make_job(ppo)(reward_model=folder, value_init="reward_model", lora_r=2)


def test_merging_without_an_adapter_and_a_negative_rank_are_refused(make_job):
    job = make_job(grpo)
    with pytest.raises(InputError, match="--merge_adapter: there is no adapter to merge"):
        job(merge_adapter="true")
    with pytest.raises(InputError, match="--lora_r -1: must be 0 or greater"):
        job(lora_r=-1)


def test_saving_an_adapter_asks_no_hub(tmp_path, monkeypatch):
    """peft would look there whether the vocabulary of the base model has grown."""

    def never(*args, **kwargs):
        raise AssertionError("asked the hub")

    monkeypatch.setattr(peft.utils.save_and_load, "check_file_exists_on_hf_hub", never)
    policy = add_adapter(small_llama(), 2)
    policy.peft_config["default"].base_model_name_or_path = "some/name"
    with pytest.raises(AssertionError, match="asked the hub"):
        policy.save_pretrained(tmp_path)
    save_trained(tmp_path, policy, letter_tokenizer(), merge_adapter=False)
    assert (tmp_path / "model/adapter_model.safetensors").exists()


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_an_adapter_decodes_in_bfloat16_too(make):
    policy = add_adapter(make().eval(), 4)
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    prompts = torch.tensor([[1, 2, 3], [0, 0, 4]])
    options = {"max_new_tokens": 4, "num_generations": 20, "eos_token_ids": [39], "pad_token_id": 0}
    exact, rounded, base = (
        generate(
            m, prompts, prompts > 0, generator=torch.Generator().manual_seed(0), **options, **more
        )
        for m, more in ((policy, {}), (policy, {"bf16": True}), (make().eval(), {}))
    )
    first = slice(None), 0
    assert (rounded.logprobs - exact.logprobs)[first].abs().median() < 0.05
    assert (base.logprobs - exact.logprobs)[first].abs().median() > 0.1, "the adapter is off?"
