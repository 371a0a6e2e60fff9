"""tools/fit.py, the memory of a run before it is started, and tools/evaluate.py."""

import json

import pytest
import torch
from small import letter_tokenizer, make_rollout, save_model, small_gpt2, small_llama

import ppo
from common import ValueModel
from plumbing.errors import InputError
from plumbing.forward import completion_values
from tools import evaluate, fit

SIZES = "--prompts_per_step 4 --num_generations 2 --max_new_tokens 6"


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model", small_llama(vocab_size=20), letter_tokenizer())


def parts_of(script, model, flags=SIZES, prompt_tokens=8):
    flags = ["--model", model, "--bf16", "false", *flags.split()]
    return fit.estimate(script, fit.config_of(script, flags, "cpu"), prompt_tokens)


def test_the_parts_of_the_memory_are_those_that_one_counts_by_hand(model):
    n, config = small_llama(vocab_size=20).num_parameters(), small_llama().config
    parts = parts_of("grpo", model)
    assert parts["weights"] == parts["gradients"] == parts["reference"] == 4 * n
    assert parts["moments"] == 8 * n
    states = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert parts["KV cache"] == 8 * (8 + 6) * states * 4
    assert parts["decoding"] == parts["logits"] * 8 / 48 == 8 * 20 * 4 * 4
    assert "reference" not in parts_of("grpo", model, "--kl_coef 0")
    assert 1.5 * 4 * n < parts_of("ppo", model)["weights"] < 2 * 4 * n + 1000, "and a value model"


def test_rollout_and_update_share_a_gpus_memory_and_there_are_no_gradients_in_a_rollout():
    parts = {"weights": 1, "gradients": 5, "KV cache": 9, "decoding": 1, "activations": 2}
    assert fit.peak(parts | {"logits": 1}, "cuda") == 1 + 10
    assert fit.peak(parts | {"logits": 4}, "cuda") == 1 + 5 + 6


@pytest.mark.slow
def test_an_adapter_takes_hardly_any_gradients_and_no_reference(model):
    pytest.importorskip("peft")
    whole, adapter = parts_of("ppo", model), parts_of("ppo", model, f"{SIZES} --lora_r 2")
    assert adapter["gradients"] < 0.3 * whole["gradients"] and "reference" not in adapter


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
@pytest.mark.parametrize(("generations", "prompt_tokens"), [(2, 8), (2, 40), (1, 8)])
def test_activations_are_what_the_forward_pass_keeps(make, generations, prompt_tokens, tmp_path):
    model = make(vocab_size=20).train()
    folder = save_model(tmp_path / "model", model, letter_tokenizer())
    model = ValueModel.on_backbone_of(model)
    kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    prompts = torch.randint(1, 19, (4, prompt_tokens)).repeat_interleave(generations, 0).tolist()
    rollout = make_rollout(prompts, [[1] * 6] * len(prompts))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        completion_values(model, rollout)
    expected = sum(x.untyped_storage().nbytes() for x in kept.values())
    flags = f"--prompts_per_step 4 --num_generations {generations} --num_mini_batches 1"
    config = f"--model {folder} --bf16 false --max_new_tokens 6 {flags}".split()
    parts = fit.estimate("grpo", fit.config_of("ppo", config, "cpu"), prompt_tokens)
    assert parts["activations"] == pytest.approx(expected, rel=0.15)


def test_fit_says_what_the_peak_fits_and_what_it_cannot_read_in_one_line(model, capsys):
    fit.main(["--script", "grpo", "--model", model, "--prompt_tokens", "12", "--device", "cpu"])
    assert "fits: 8 GB, 16 GB" in capsys.readouterr().out
    assert fit.describe({"peak": 30e9}, "cuda").endswith("fits: 40 GB, 80 GB")
    with pytest.raises(InputError, match="--prompt_tokens 0: must be a whole number above 0"):
        fit.main(["--prompt_tokens", "0"])
    with pytest.raises(InputError, match=r"--model nowhere/at/all: its config can't be read"):
        fit.main(["--model", "nowhere/at/all"])


def test_evaluate_prints_what_a_run_logs_of_the_same_model(model, tmp_path, capsys):
    rows = [json.dumps({"prompt": p}) for p in ("x", "yy y", "zzz", "w", "the", "a b")] * 4
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    (tmp_path / "r.py").write_text(
        "def length(completions):\n    return [len(c) / 8 for c in completions]\n"
        "def right(completions):\n    return [float('a' in c) for c in completions]\n"
    )
    flags = f"""--model {model} --prompts {tmp_path}/p.jsonl --eval_prompts {tmp_path}/p.jsonl
        --reward {tmp_path}/r.py:length --verifier {tmp_path}/r.py:right --max_new_tokens 4
        --eval_generations 4 --num_eval_prompts 100 --bf16 false --device cpu""".split()
    run, out = tmp_path / "run", tmp_path / "out.jsonl"
    ppo.main([*flags, "--num_steps", "1", "--output_dir", str(run)])
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    capsys.readouterr()
    evaluate.main([*flags, "--rollout_batch_size", "32", "--output", str(out)])
    printed = capsys.readouterr().out
    for name in ("reward", "reward_greedy", "accuracy", "accuracy_greedy", "pass_at_k"):
        assert f"{line[f'eval/{name}']:.3f}" in printed, name
    assert f"accuracy is {line['eval/accuracy_se']:.4f}" in printed
    samples = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    found = [json.loads(x)["completion"] for x in out.read_text().splitlines()]
    assert found == [x["completion"] for x in samples if x["split"] == "heldout" and x["step"] == 0]
    with pytest.raises(InputError, match=r"--output .*out.jsonl: is there already"):
        evaluate.main([*flags, "--output", str(out)])
