"""tools/: fit.py, evaluate.py, and outgrow.py, whose settings verl's own files must know."""

import asyncio
import copy
import importlib
import importlib.util
import json
import re
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from small import (
    byte_tokenizer,
    letter_tokenizer,
    make_rollout,
    save_model,
    small_gpt2,
    small_llama,
)
from transformers import Qwen2Config

from common import ValueModel
from plumbing.config import parse_flags
from plumbing.data import prompt_batch
from plumbing.errors import InputError
from plumbing.forward import completion_values
from plumbing.memory import LARGEST, SMALLEST, estimate, largest_limits
from plumbing.models import load_tokenizer
from tools import evaluate, fit, outgrow

SIZES = "--prompts_per_step 4 --num_generations 2 --max_new_tokens 6"


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model", small_llama(vocab_size=20), letter_tokenizer())


def parts_of(script, model, flags=SIZES, prompt_tokens=8, device="cpu", memory=None):
    flags = ["--model", str(model), "--bf16", "false", *flags.split()]
    config = fit.config_of(script, flags, device)
    return estimate(fit.counts_of(config, prompt_tokens), config, prompt_tokens, memory)


def test_the_parts_of_the_memory_are_those_that_one_counts_by_hand(model):
    n, config = small_llama(vocab_size=20).num_parameters(), small_llama().config
    head = 20 * config.hidden_size
    parts = parts_of("grpo", model, f"{SIZES} --num_eval_prompts 2")
    assert parts["weights"] == parts["gradients"] == parts["reference"] == 4 * n
    assert parts["moments"] == 8 * n
    states = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert parts["KV cache"] == 8 * (8 + 6) * states * 4
    on_gpu = parts_of("grpo", model, f"{SIZES} --num_eval_prompts 2", memory=2**30)
    assert on_gpu["KV cache"] == 8 * 128 * states * 4
    assert parts["logits"] == 8 * 6 * 20 * 14 > 4 * head, "the larger one"
    assert parts_of("grpo", model, f"{SIZES} --entropy_coef 0.1")["logits"] == 8 * 6 * 20 * 23
    evaluated = parts_of("grpo", model, f"{SIZES} --num_eval_prompts 12")
    assert evaluated["KV cache"] == 12 / 8 * parts["KV cache"], "more rows than a step has"
    assert parts_of("grpo", model, "--kl_coef 0")["reference"] == 0
    config = fit.config_of("grpo", ["--model", str(model), *SIZES.split()], "cpu")
    config = replace(config, bf16=False, num_eval_prompts=2)
    counts = replace(fit.counts_of(config, 8), kept=0.0)
    assert estimate(counts, config, 8)["decoding"] == 8 * 20 * 20
    counts = replace(counts, kept=1e6)  # the prompts take more than the tokens that are drawn
    expected = 4 * 8 * 0.6e6 / small_llama().config.num_hidden_layers
    assert estimate(counts, config, 8)["decoding"] == pytest.approx(expected)
    assert 1.5 * 4 * n < parts_of("ppo", model)["weights"] < 2 * 4 * n + 1000, "and a value model"


@pytest.mark.parametrize("half", ["--bf16", "--fp16"])
def test_decoding_in_half_precision_takes_a_copy_and_half_of_the_cache(half, model):
    flags = ["--model", str(model), "--bf16", "false"]
    whole = fit.counts_of(fit.config_of("grpo", flags, "cuda"), 8)
    counts = fit.counts_of(fit.config_of("grpo", [*flags, half, "true"], "cuda"), 8)
    assert counts.states == whole.states / 2 and whole.decoding_copy == 0
    assert counts.decoding_copy == 2 * small_llama(vocab_size=20).num_parameters()


def test_rollout_and_update_share_a_gpus_memory_and_there_are_no_gradients_in_a_rollout(model):
    for flags in (SIZES, f"{SIZES} --micro_batch_tokens 14 --rollout_batch_size 8"):
        parts = parts_of("grpo", model, flags, memory=2**30)
        there = sum(parts[x] for x in ("weights", "moments", "reference"))
        rollout = sum(parts[x] for x in ("KV cache", "decoding"))
        update = sum(parts[x] for x in ("gradients", "activations", "logits"))
        assert parts["peak"] == there + max(rollout, update)
        assert parts["needed"] > parts["peak"]


@pytest.mark.parametrize("script", ["ppo", "grpo", "rloo"])
def test_seven_billion_weights_fit_24_gb_with_an_adapter_and_gradient_checkpointing(
    script, tmp_path
):
    """Of Qwen2.5-7B. Its frozen weights are in bfloat16, and PPO's value model shares them."""
    sizes = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
    sizes |= {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    Qwen2Config(**sizes, tie_word_embeddings=False).save_pretrained(tmp_path)
    flags = ["--model", str(tmp_path), "--lora_r", "16", "--gradient_checkpointing"]
    config = fit.config_of(script, [*flags, "--max_new_tokens", "256"], "cuda")
    counts = fit.counts_of(config, 200)
    assert 15.2e9 < counts.weights < 15.8e9 and counts.decoding_copy < 2e8
    assert fit.fits(fit.on_gpu(counts, config, 200, 24)[1], 24)


def test_a_run_takes_the_largest_limits_that_fit_its_gpu(model):
    config = fit.config_of("grpo", ["--model", model, *"--max_new_tokens 40".split()], "cuda")
    counts = replace(fit.counts_of(config, 8), kept=1e5, states=10**5)
    config = replace(config, prompts_per_step=512)

    def needed(memory, **limits):
        return estimate(counts, replace(config, **limits), 8, memory)["needed"]

    for memory in (2 * 10**9, 3 * 10**9, 4 * 10**9):
        limits = largest_limits(counts, config, 8, memory)
        assert needed(memory, **limits) <= memory
        for name, limit in limits.items():
            assert needed(memory, **limits | {name: 2 * limit}) > memory
    assert largest_limits(counts, config, 8, 10**8) == SMALLEST
    assert largest_limits(counts, config, 8, 10**12) == LARGEST


@pytest.mark.slow
def test_an_adapter_takes_hardly_any_gradients_and_no_reference(model):
    pytest.importorskip("peft")
    whole, adapter = parts_of("ppo", model), parts_of("ppo", model, f"{SIZES} --lora_r 2")
    assert adapter["gradients"] < 0.3 * whole["gradients"] and adapter["reference"] == 0


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
@pytest.mark.parametrize(("generations", "prompt_tokens"), [(2, 40), (1, 8)])
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
    prompts[:generations] = [prompt[1:] for prompt in prompts[:generations]]  # so there is padding
    rollout = make_rollout(prompts, [[1] * 6] * len(prompts))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        completion_values(model, rollout)
    expected = sum(x.untyped_storage().nbytes() for x in kept.values())
    flags = f"--prompts_per_step 4 --num_generations {generations} --num_mini_batches 1"
    config = f"--model {folder} --bf16 false --max_new_tokens 6 {flags}".split()
    config = fit.config_of("rloo" if generations > 1 else "ppo", config, "cpu")
    counts = fit.counts_of(config, prompt_tokens)
    counts = replace(counts, kept=counts.kept / counts.models, models=1)
    found = estimate(counts, config, prompt_tokens)["activations"]
    assert found == pytest.approx(expected, rel=0.15)


def test_fit_leaves_the_folder_of_a_run_alone_and_does_not_ask_what_is_in_it(
    model, tmp_path, capsys
):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("no run")
    fit.main(["--model", model, "--output_dir", str(folder)])
    assert "fits: 8 GB" in capsys.readouterr().out and len([*folder.iterdir()]) == 1


def test_fit_says_what_the_peak_fits_and_what_it_cannot_read_in_one_line(model, capsys):
    fit.main(["--script", "grpo", "--model", model, "--prompt_tokens", "12", "--device", "cpu"])
    assert "fits: 8 GB, 16 GB" in capsys.readouterr().out
    for flag in ("--micro_batch_tokens", "--micro-batch-tokens"):
        fit.main(["--model", model, flag, "64"])
        limits = "(--rollout_batch_size 1024 --micro_batch_tokens 64)"
        assert f"fits: 8 GB {limits}, 16 GB {limits}, 24" in capsys.readouterr().out
    with pytest.raises(InputError, match="--prompt_tokens 0: must be a whole number above 0"):
        fit.main(["--prompt_tokens", "0"])
    with pytest.raises(InputError, match=r"--model nowhere/at/all: its config can't be read"):
        fit.main(["--model", "nowhere/at/all"])


def test_evaluate_takes_a_column_that_the_prompts_of_the_task_lack(model, tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text('{"question": "x"}\n{"question": "yy"}\n')
    template = "--prompt_template {question} --reward brevity --max_new_tokens 4"
    flags = f"--model {model} --eval_prompts {tmp_path}/q.jsonl --device cpu {template}"
    evaluate.main(flags.split())
    printed = capsys.readouterr().out
    assert "2 prompts: eval/reward -0.0" in printed and "yy -> " in printed


# --- outgrow.py: the same job for verl ---


if not all(map(importlib.util.find_spec, "verl omegaconf tensordict datasets".split())):
    pytest.skip("needs verl: see the head of test_verl_parity.py", allow_module_level=True)
OmegaConf = importlib.import_module("omegaconf").OmegaConf
VERL = Path(importlib.util.find_spec("verl").origin).parent
DEFAULTS = OmegaConf.load(VERL / "trainer" / "config" / "_generated_ppo_trainer.yaml")
REWARDS = """
def has_answer(completions, answer, **columns):
    return [None if a is None else float(str(a) in c) for a, c in zip(answer, completions)]
def length(completions, **columns):
    return [float(len(c)) for c in completions]
def by_ids(completion_ids):
    return completion_ids
"""
ANSWERS = [7, "7", None, [1, {"a": 2}], 1.5, "null", 7, 8, 9]  # a column has one type there


@pytest.fixture
def outgrown(tmp_path):
    """outgrown(script, flags) -> verl's settings of that run; raises for a name that verl lacks."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": x}) for i, x in enumerate(ANSWERS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))

    def write(script, flags=""):
        given = "--device cpu --overwrite --prompts HERE/rows.jsonl --reward HERE/rewards.py:length"
        args = shlex.split(f"{given} {flags}".replace("HERE", str(tmp_path)))
        config = parse_flags(importlib.import_module(script).Config, "", args)
        (run := tmp_path / "a run = it's").mkdir(exist_ok=True)  # for Hydra and the shell alike
        (run / "config.json").write_text(json.dumps({"script": script, **vars(config)}))
        outgrow.main([str(run)])
        _, text = (run / "verl" / "run.sh").read_text().split("verl.trainer.main_ppo")
        text = text.replace("${GPUS:-1}", "2").replace("${NODES:-1}", "1").replace('"$@"', "")
        verls = copy.deepcopy(DEFAULTS)
        for setting in shlex.split(text.replace("\\\n", " ")):
            name, value = setting.split("=", 1)
            OmegaConf.set_struct(verls, not name.startswith("+"))
            place, value = name.removeprefix("+"), json.loads(value)
            OmegaConf.update(verls, place, value, force_add=name.startswith("+"))
        return verls

    return write


def test_sizes_steps_models_and_learning_rates_are_those_of_the_run(outgrown):
    sizes = "--prompts_per_step 12 --num_generations 2 --num_mini_batches 3 --num_epochs 4"
    sizes += " --num_steps 7 --max_new_tokens 4 --lora_r 4"
    numbers = "--learning_rate 0.2 --warmup_steps 3 --temperature 0.7 --seed 5 --lam 0.9"
    config = outgrown("ppo", f"{sizes} {numbers}")
    data, (actor, rollout) = config.data, map(config.actor_rollout_ref.get, ("actor", "rollout"))
    assert (data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs) == (12, 4, 4)
    assert (rollout.n, rollout.temperature, rollout.seed) == (2, 0.7, 5)
    assert (config.trainer.total_training_steps, data.max_response_length) == (7, 4)
    assert (config.algorithm.adv_estimator, config.algorithm.lam) == ("gae", 0.9)
    for optimizer in (actor.optim, config.critic.optim):
        assert (optimizer.lr, optimizer.lr_warmup_steps) == (0.2, 3)
    for model in (config.actor_rollout_ref.model, config.critic.model):
        assert (model.lora_rank, model.override_config.attn_pdrop) == (4, 0)
    config = outgrown("ppo", "--disable_dropout false")
    assert "attn_pdrop" not in config.actor_rollout_ref.model.override_config


def test_the_losses_have_their_names_and_bounds_in_verl(outgrown):
    def loss(script, flags=""):
        actor = outgrown(script, flags).actor_rollout_ref.actor
        mode = actor.policy_loss.loss_mode, actor.loss_agg_mode
        return [*mode, actor.clip_ratio_low, actor.clip_ratio_high]

    assert loss("grpo", "--clip_range 0.1") == ["vanilla", "seq-mean-token-mean", 0.1, 0.1]
    assert loss("grpo", "--clip_range_high 0.28")[2:] == [0.2, 0.28]
    assert loss("grpo", "--loss_type dapo") == ["vanilla", "token-mean", 0.2, 0.2]
    assert loss("grpo", "--loss_type gspo") == ["gspo", "seq-mean-token-mean", 0.2, 0.2]
    assert loss("grpo", "--loss_type cispo") == ["cispo", "token-mean", 1.0, 4.0]
    assert loss("rloo")[:2] == ["vanilla", "seq-mean-token-sum"]
    assert loss("ppo")[:2] == ["vanilla", "token-mean"]
    flags = "--scale_rewards none --max_new_tokens 9 --dynamic_sampling 2"
    config = outgrown("grpo", f"--loss_type dr_grpo {flags}")
    assert config.actor_rollout_ref.actor.loss_scale_factor == 9
    assert not config.algorithm.norm_adv_by_std_in_grpo
    assert config.algorithm.filter_groups.enable


def test_the_kl_is_in_the_loss_of_grpo_and_in_the_reward_of_the_others(outgrown):
    actor = outgrown("grpo", "--kl_coef 0.3").actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.3, "k3")
    for script, flags, kind in (("ppo", "--kl_estimator k2", "k2"), ("rloo", "", "k1")):
        algorithm = outgrown(script, f"--kl_coef 0.3 {flags}").algorithm
        found = algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef, algorithm.kl_penalty
        assert found == (True, 0.3, kind)
    assert not outgrown("ppo", "--kl_coef 0").algorithm.use_kl_in_reward


def test_a_flag_that_verl_has_nothing_for_is_named(outgrown, capsys):
    flags = "--stop a b --overlong_buffer 2 --mask_truncated_completions"
    outgrown("grpo", f"{flags} --scale_rewards batch --prompts_per_step 3 --num_mini_batches 2")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not")]
    assert lines[0] == "not carried over: --stop ['a', 'b']"
    names = {line.split()[3] for line in lines}
    given = {flag for flag in flags.split() if flag.startswith("--")}
    assert names == given | {"--scale_rewards", "--num_mini_batches"}
    outgrown("ppo", "--missing_eos_penalty 1 --verifier HERE/rewards.py:length")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not")]
    assert [line.split()[3] for line in lines] == ["--missing_eos_penalty", "--verifier"]
    outgrown("rloo")
    assert "not carried" not in capsys.readouterr().out


def test_what_verl_has_not_at_all_is_refused_in_one_line(outgrown, tmp_path):
    (tmp_path / "config.json").write_text('{"script": "reward_model"}')
    with pytest.raises(InputError, match=f"^{tmp_path}: a run of reward_model.py, and verl has no"):
        outgrow.main([str(tmp_path)])
    model = save_model(tmp_path / "adapter", small_llama(vocab_size=300), byte_tokenizer())
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    with pytest.raises(InputError, match="an adapter; merge it"):
        outgrown("ppo", f"--model {model}")
    with pytest.raises(InputError, match="verl serves reward models itself"):
        outgrown("ppo", "--reward_model x")
    assert not [*tmp_path.glob("*/verl")]


@pytest.fixture
def verl(monkeypatch):
    """Imports a module of the installed verl."""
    for name in ("verl", "verl.experimental.reward_loop"):  # their __init__ imports everything
        package = types.ModuleType(name)
        package.__path__ = [str(VERL.joinpath(*name.split(".")[1:]))]
        package.DataProto = object
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("ray", "verl.utils.ray_utils", "verl.utils.reward_score"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("verl.")]:
        del sys.modules[name]


def read_by_verl(verl, config, split):
    """(rows, token ids of the prompts) as verl's dataset and its agent loop have them."""
    wiring = verl("verl.utils.tokenizer.continuous_token_wiring")
    model = config.actor_rollout_ref.model
    tokenizer = verl("verl.utils.tokenizer").hf_tokenizer(model.tokenizer_path or model.path)
    dataset = verl("verl.utils.dataset.rl_dataset").RLHFDataset(
        config.data[f"{split}_files"], tokenizer, config.data
    )
    builder = wiring.create_continuous_token_builder(tokenizer, hf_model_type="llama")
    rows = [dataset[i] for i in range(len(dataset))]
    return rows, [builder.build_initial_tokens(row["raw_prompt"]) for row in rows]


def scores_of_verl(verl, config, rows, texts):
    """The scores by verl's own reward manager, with its own loader of our function."""
    tokenizer, items = load_tokenizer("tiny"), []
    for row, text in zip(rows, texts, strict=True):
        ids = torch.tensor(tokenizer(text).input_ids)
        batch = {"responses": ids, "attention_mask": torch.ones(len(ids) + 3, dtype=torch.long)}
        items.append([types.SimpleNamespace(batch=batch, non_tensor_batch=row)])

    async def ask():
        manager = verl("verl.trainer.ppo.reward").load_reward_manager(config, tokenizer)
        manager.loop = asyncio.get_running_loop()
        return [await manager.run_single(item) for item in items]

    return [float(result["reward_score"]) for result in asyncio.run(ask())]


@pytest.mark.slow
def test_verl_reads_the_same_prompts_in_the_same_order_with_the_same_tokens(verl, outgrown):
    flags = "--eval_prompts HERE/rows.jsonl --num_steps 3 --prompts_per_step 4 --seed 5"
    config = outgrown("ppo", f"{flags} --num_eval_prompts 6")
    given = [{"prompt": f"{i}+1="} for i in range(9)]
    for split, ours in (("train", prompt_batch(given, 0, 12, 5)), ("val", given[:6])):
        _, ids = read_by_verl(verl, config, split)
        assert ids == [load_tokenizer("tiny")(row["prompt"]).input_ids for row in ours]
    assert not config.data.shuffle
    assert config.data.max_prompt_length == max(map(len, ids)) == 4


@pytest.mark.slow
def test_a_chat_model_gets_its_template_for_messages(verl, outgrown, tmp_path):
    tokenizer = byte_tokenizer()
    turn = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = turn + "|<assistant>"
    model = save_model(tmp_path / "chat", small_llama(vocab_size=300), tokenizer)
    rows = [json.dumps({"prompt": [{"role": "user", "content": f"{i}"}]}) for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    _, ids = read_by_verl(verl, outgrown("grpo", f"--model {model} --num_steps 1"), "val")
    assert {re.sub(r"\d", "N", tokenizer.decode(x)) for x in ids} == {"<user>N|<assistant>"}
    begun = {"prompt": [{"role": "assistant", "content": "So"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(begun)] * 9))
    with pytest.raises(InputError, match="as other tokens: give chat messages, of which the last"):
        outgrown("grpo", f"--model {model} --num_steps 1")


@pytest.mark.slow
def test_verl_adds_the_rewards_with_their_weights_and_leaves_none_out(verl, outgrown):
    both = "--reward HERE/rewards.py:has_answer HERE/rewards.py:length --reward_weights 2 0.5"
    config = outgrown("rloo", f"--eval_prompts HERE/rows.jsonl {both}")
    rows, _ = read_by_verl(verl, config, "val")
    texts = ["7", "17", "777", "[1, {'a': 2}]", "1.4", "null", "", "12345678", "0"]
    expected = [2 * r + len(text) / 2 for r, text in zip([1, 1, 0, 1, 0, 1, 0, 1, 0], texts)]
    assert scores_of_verl(verl, config, rows, texts) == expected
    config = outgrown("grpo", "--reward HERE/rewards.py:has_answer")
    with pytest.raises(ValueError, match="every reward is None"):
        scores_of_verl(verl, config, rows[2:3], ["1"])
