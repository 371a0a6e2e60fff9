"""tools/fit.py: the parts of a run's memory, by hand on a model that is small enough."""

import pytest
import torch
from small import letter_tokenizer, save_model, small_gpt2, small_llama

from common import Rollout
from plumbing.errors import InputError
from plumbing.forward import completion_states
from tools import fit


def parts_of(script: str, folder: str, *flags: str) -> dict[str, float]:
    config = fit.config_of(script, ["--model", folder, "--bf16", "false", *flags], "cpu")
    return fit.estimate(script, config, prompt_tokens=8)


@pytest.fixture
def folder(tmp_path):
    return save_model(tmp_path / "m", small_llama(vocab_size=20), letter_tokenizer())


def test_the_parts_are_those_that_one_counts_by_hand(folder):
    n, model = small_llama(vocab_size=20).num_parameters(), small_llama().config
    flags = ["--prompts_per_step", "4", "--num_generations", "2", "--max_new_tokens", "6"]
    parts = parts_of("grpo", folder, *flags)
    assert parts["weights"] == parts["gradients"] == parts["reference"] == 4 * n
    assert parts["moments"] == 8 * n
    heads = model.num_key_value_heads * model.hidden_size // model.num_attention_heads
    assert parts["KV cache"] == 8 * (8 + 6) * model.num_hidden_layers * 2 * heads * 4
    assert parts["decoding"] == parts["logits"] * 8 / 48 == 8 * 20 * 4 * 4
    update = parts["activations"] + parts["logits"]
    both = update + parts["KV cache"] + parts["decoding"]
    assert parts["peak"] == pytest.approx(20 * n + fit.KEPT * both + fit.LIBRARIES)
    assert fit.peak(parts, "cuda") == 20 * n + update, "the larger one of rollout and update"
    # In a rollout there are no gradients.
    long = {"weights": 1, "gradients": 5, "KV cache": 9, "decoding": 1}
    assert fit.peak(long | {"activations": 2, "logits": 1}, "cuda") == 1 + 10


def test_without_a_kl_there_is_no_reference_and_ppo_has_a_second_model(folder):
    n = small_llama(vocab_size=20).num_parameters()
    assert "reference" not in parts_of("grpo", folder, "--kl_coef", "0")
    both = parts_of("ppo", folder)
    assert 1.5 * 4 * n < both["weights"] < 2 * 4 * n + 1000
    assert both["moments"] == 2 * both["weights"]


def test_an_adapter_takes_hardly_any_gradients_and_no_reference(folder):
    pytest.importorskip("peft")
    whole, adapter = (parts_of("ppo", folder, *flags) for flags in ([], ["--lora_r", "2"]))
    assert adapter["gradients"] < 0.3 * whole["gradients"] and "reference" not in adapter
    assert adapter["weights"] < whole["weights"], "the frozen weights are shared"


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
@pytest.mark.parametrize(("generations", "prompt_tokens"), [(2, 8), (2, 40), (1, 8)])
def test_activations_are_what_the_forward_pass_of_the_update_keeps(
    make, generations, prompt_tokens, tmp_path
):
    model = make(vocab_size=20).train()
    kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    prompts = torch.randint(20, (4, prompt_tokens)).repeat_interleave(generations, 0)
    tokens = torch.cat([prompts, torch.ones(len(prompts), 6, dtype=torch.long)], dim=1)
    real = torch.ones_like(tokens, dtype=torch.bool)
    scores = torch.zeros(len(prompts), 6), torch.ones(len(prompts), dtype=torch.bool)
    rollout = Rollout(tokens, real, real[:, -6:], *scores)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        completion_states(model.base_model, rollout)
    expected = sum(x.untyped_storage().nbytes() for x in kept.values())
    folder = save_model(tmp_path / "m", model, letter_tokenizer())
    # All but PPO want two completions of a prompt; the loss doesn't matter here.
    flags = f"--prompts_per_step 4 --num_generations {generations} --num_mini_batches 1"
    flags += " --max_new_tokens 6 --bf16 false"
    config = fit.config_of("ppo", ["--model", folder, *flags.split()], "cpu")
    parts = fit.estimate("grpo", config, prompt_tokens)
    assert parts["activations"] == pytest.approx(expected, rel=0.15)


def test_a_model_saved_in_bfloat16_counts_in_float32_as_it_is_loaded(folder, tmp_path):
    model = small_llama(vocab_size=20).bfloat16()
    rounded = save_model(tmp_path / "b", model, letter_tokenizer())
    assert parts_of("grpo", rounded) == parts_of("grpo", folder)


def test_on_a_gpu_a_pretrained_model_computes_in_bfloat16(folder):
    on_gpu, told, on_cpu = (
        fit.config_of("grpo", ["--model", folder, *flags], device)
        for flags, device in (([], "cuda"), (["--bf16=false"], "cuda"), ([], "cpu"))
    )
    assert on_gpu.bf16 and not told.bf16 and (on_gpu.device, on_cpu.device) == ("cuda", "cpu")


def test_a_micro_batch_of_fewer_tokens_keeps_less_and_checkpoints_least(folder):
    flags = ["--prompts_per_step", "8", "--num_generations", "4", "--max_new_tokens", "16"]
    sizes = [
        parts_of("grpo", folder, *flags, *more)["activations"]
        for more in ([], ["--micro_batch_tokens", "100"], ["--gradient_checkpointing"])
    ]
    assert sizes[0] > 3 * sizes[1] > 0 and sizes[2] < sizes[0]


def test_the_command_prints_the_parts_and_what_they_fit(folder, capsys):
    command = ["--script", "grpo", "--model", folder, "--prompt_tokens", "12"]
    fit.main([*command, "--device", "cpu"])
    text = capsys.readouterr().out
    assert "prompts of 12 tokens, on cpu" in text and "fits: 8 GB, 16 GB" in text
    fit.main(command)
    assert "on cuda" in capsys.readouterr().out, "whether this machine has a GPU or not"
    assert fit.describe({"peak": 30e9}, "cuda").endswith("fits: 40 GB, 80 GB")
    assert fit.describe({"peak": 99e9}, "cuda").endswith("fits: none of 8, 16, 24, 40, 80 GB")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--script", "sft"], "--script sft: choose ppo, grpo or rloo"),
        (["--device=mps"], "--device mps: choose cuda or cpu"),
        (["--prompt_tokens", "0"], "--prompt_tokens 0: must be a whole number above 0"),
        (["--model", "nowhere/at/all"], "--model nowhere/at/all: its config can't be read"),
    ],
)
def test_bad_input_is_one_line(flags, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=message.replace("/", ".")):
        fit.main(flags)


def test_a_flag_without_its_value_is_one_line():
    with pytest.raises(InputError, match="--prompt_tokens: needs a value"):
        fit.main(["--prompt_tokens"])
