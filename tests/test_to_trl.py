"""tools/to_trl.py: a run's settings have TRL's names, and TRL trains its job on two processes."""

import dataclasses
import json
import re
import subprocess
import sys
import typing
from importlib import import_module, reload
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small import letter_tokenizer, run_command, save_model, small_gpt2, small_llama
from transformers import set_seed

from common import unwrap
from plumbing.config import parse_flags
from plumbing.errors import InputError
from plumbing.models import TINY, load_policy, spread_weights
from tools import look, to_trl

ROOT = Path(__file__).parent.parent


def config_of(script, flags=""):
    module = import_module(script)
    return parse_flags(module.Config, "", {"tiny": module.TINY}, f"--device cpu {flags}".split())


def fields(script, flags="", num_processes=1):
    return to_trl.fields_of(config_of(script, flags), num_processes, longest=6)


SAME = "--temperature 0.7 --seed 5 --max_grad_norm 2 --learning_rate 0.2 --bf16"
SIZES = "--prompts_per_step 12 --num_generations 2 --num_mini_batches 3 --max_new_tokens 4"
STEPS = "--num_steps 7 --num_epochs 2 --num_mini_batches 2 --save_every 5 --eval_every 4"
LOSS = "--clip_range 0.1 --clip_range_high 0.3 --entropy_coef 0.5 --mask_truncated_completions"
FIELDS = [  # (script, flags, the fields)
    ("rloo", "--kl_coef 0.3 --num_steps 7", "beta: 0.3, adam_beta2: .95, max_steps: 7"),
    ("rloo", "--prompts_per_step 6 --num_generations 2", "per_device_train_batch_size: 12"),
    ("rloo", SAME, "temperature: 0.7, seed: 5, learning_rate: 0.2, bf16: true, report_to: none"),
    ("grpo", f"{STEPS} --warmup_steps 3", "max_steps: 28, num_iterations: 2, warmup_steps: 12"),
    ("grpo", STEPS, "save_steps: 20, eval_steps: 16, logging_steps: 4, eval_on_start: true"),
    ("grpo", "--num_steps 5 --warmup_steps 9", "warmup_steps: 2"),
    ("grpo", SIZES, "generation_batch_size: 24, max_completion_length: 4, num_generations: 2"),
    ("grpo", f"{SIZES} --eval_generations 3", "per_device_eval_batch_size: 24"),
    ("grpo", LOSS, "epsilon: 0.1, epsilon_high: 0.3, mask_truncated_completions: true"),
    ("grpo", LOSS, "use_bias_correction_kl: false, loss_type: grpo, scale_rewards: group"),
    ("grpo", "--kl_estimator unbiased", "use_bias_correction_kl: true"),
    ("grpo", "--loss_type gspo", "importance_sampling_level: sequence, loss_type: grpo, seed: 0"),
    ("grpo", "--loss_type cispo", "loss_type: cispo, epsilon_high: 5"),
    # What TRL has nothing for.
    ("grpo", "--stop a b --scale_rewards mean", "lost: [stop, scale_rewards], scale_rewards: none"),
    ("grpo", "--oversample 2 --entropy_coef 0.1", "lost: [oversample]"),
]


@pytest.mark.parametrize(("script", "flags", "expected"), FIELDS)
def test_a_flag_has_its_field_or_is_named(script, flags, expected):
    expected = {"lost": []} | yaml.safe_load(f"{{{expected}}}")
    found = fields(script, flags) | {"lost": to_trl.not_in_trl(config_of(script, flags))}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    "tokens, processes, sizes", [(4096, 1, "8, 1"), (30, 2, "2, 2"), (1, 2, "1, 4")]
)
def test_a_process_computes_its_share_of_a_minibatch(tokens, processes, sizes):
    found = fields("grpo", f"{SIZES} --micro_batch_tokens {tokens}", processes)  # rows of 10 tokens
    rows, passes = found["per_device_train_batch_size"], found["gradient_accumulation_steps"]
    assert f"{rows}, {passes}" == sizes, "whole numbers"
    # TRL's own rule for an update: so many completions, over all processes.
    assert rows * passes * processes == found["generation_batch_size"] / 3
    with pytest.raises(InputError, match="into 3 minibatches on 5 processes"):
        fields("grpo", SIZES, num_processes=5)


# By hand: flags that main, load_policy or load_task read, and those without effect in TRL.
READ = """model lora_r disable_dropout device task prompts prompt_template system_prompt
eval_prompts reward reward_weights reward_model verifier num_eval_prompts overlong_buffer"""
NO_EFFECT = "output_dir overwrite resume rollout_batch_size fp16 cuda_graphs"


@pytest.mark.parametrize("script", ["grpo", "rloo"])
def test_no_flag_is_lost_on_the_way_to_trl(script):
    config = config_of(script, "--num_generations 4 --micro_batch_tokens 20")
    kinds, lost = typing.get_type_hints(type(config)), []
    for field in dataclasses.fields(config):
        kind, value = str(kinds[field.name]), getattr(config, field.name)
        if "Literal" in kind and "list" not in kind:
            other = next(x for x in typing.get_args(kinds[field.name]) if x != value)
        else:
            numbers = not value if "bool" in kind else (value or 1) * 2
            other = ["x"] if "list" in kind else "x" if "str" in kind else numbers
        changed = dataclasses.replace(config, **{field.name: other})
        same = to_trl.fields_of(changed, 1, 6) == to_trl.fields_of(config, 1, 6)
        if same and field.name not in [*to_trl.not_in_trl(changed), *f"{READ} {NO_EFFECT}".split()]:
            lost.append(field.name)
    assert not lost, "give them a field in tools/to_trl.py, or add them to READ or NO_EFFECT here"


def test_one_line_refuses_what_trl_cannot_train(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    refused = {
        "ppo": "a run of ppo.py; for PPO docs/outgrow.md names verl, for reward models TRL's"
    }
    for script, words in (refused | {"grpo": "pip install trl"}).items():
        (tmp_path / "config.json").write_text(json.dumps({"script": script}))
        code, text = run_command(to_trl, [str(tmp_path)], capsys)
        assert code == 2 and text.count("\n") == 1 and words in text, text


@pytest.mark.parametrize("tool", [look, to_trl])
def test_a_tool_runs_from_any_folder(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", ["elsewhere", *sys.path])
    with pytest.raises(SystemExit):
        reload(tool).main(["--help"])
    assert sys.path[:2] == [str(ROOT), "elsewhere"]
    assert tool.__doc__.strip() in capsys.readouterr().out, "its help"


RANK = """import atexit
import os
import torch

def note(kind, value):
    with open(f"{os.path.dirname(__file__)}/{kind}-{os.environ.get('RANK')}", "a") as file:
        file.write(f"{value}\\n")

atexit.register(lambda: note("connected", torch.distributed.is_initialized()))

def rank(completions, **columns):
    note("scored-by", len(completions))
    return [float(os.environ.get("RANK", 0))] * len(completions)
"""


OF_GPT2 = "position ids, which GPT-2 needs where prompts are of unequal length"
ALL = "--lora_r 2 --bf16 --overlong_buffer 1 --verifier numeric_match --stop x"
STOP = "--stop ['x']"
JOBS = [  # (script, model, longest prompts, flags, TRL's bf16, what TRL lacks, weights)
    ("grpo", small_gpt2, (3, 5), ALL, True, [STOP, OF_GPT2], [1, 1, 0, 1]),
    ("grpo", small_gpt2, (1, 1), "--lora_r 2 --disable_dropout false", False, [], [1]),
    ("rloo", small_llama, (5, 3), "--bf16 --stop x --reward_weights 2", False, [STOP], [2]),
]


@pytest.mark.parametrize(("script", "make", "longest", "flags", "bf16", "lacks", "weights"), JOBS)
def test_trl_gets_the_job_with_the_weights_spread(
    script, make, longest, flags, bf16, lacks, weights, tmp_path, monkeypatch, capsys
):
    """In bfloat16 they are spread: else TRL's first steps would be rounded away as well."""
    trl = pytest.importorskip("trl")
    model = save_model(tmp_path / "m", make(0.1, vocab_size=20), letter_tokenizer())
    for name, length in zip(("prompts", "eval_prompts"), longest):
        some = (1, 1), (length, "b")  # a column of JSON may hold numbers and texts
        rows = [{"prompt": "x" * (n - 1) + " ", "answer": "1", "column": x} for n, x in some]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows * 2)))
        flags += f" --{name} {tmp_path / name}"
    sizes = "--num_eval_prompts 3 --prompts_per_step 6 --max_new_tokens 8 --micro_batch_tokens 25"
    flags = f"--model {model} --bf16 false --reward brevity {sizes} {flags} --num_generations 2"
    config, judge = config_of(script, flags), mock.MagicMock(__name__="judge")
    monkeypatch.setattr("plumbing.data.RewardModel", lambda *_: judge)
    has_judge = len(weights) > 1
    more = {"script": script, "device": "cuda", "reward_model": "judge" if has_judge else None}
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config) | more))
    monkeypatch.setattr(trl, f"{script.upper()}Trainer", trainer := mock.MagicMock())
    given = f"--bf16 {bf16} --use_cpu --resume_from_checkpoint c".split()
    to_trl.main([str(tmp_path), *given])
    assert re.findall(r"^not in TRL: (.*)", capsys.readouterr().out, re.M) == lacks
    options = trainer.call_args.kwargs
    settings, policy = options["args"], options["model"]
    assert len(options["reward_funcs"]) == len(weights) and settings.reward_weights == weights
    assert judge.model.to.mock_calls == [mock.call(torch.device("cpu"))] * has_judge
    assert settings.output_dir == str(tmp_path / "trl")
    assert settings.per_device_train_batch_size == 25 // (max(longest) + 8)
    assert (len(options["train_dataset"]), len(options["eval_dataset"])) == (8, 3)
    assert options["processing_class"].eos_token
    trainer().train.assert_called_once_with(resume_from_checkpoint="c")
    trainer().save_model.assert_called_once_with()
    set_seed(config.seed)
    expected, _ = load_policy(config)
    if bf16:
        spread_weights(unwrap(expected).base_model)
    if config.bf16 and config.lora_r:  # the head as well: TRL decodes without autocast
        expected.get_output_embeddings().bfloat16()
    for p, q in zip(policy.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q) and p.dtype == q.dtype
    dropout = {m.p for m in policy.modules() if isinstance(m, torch.nn.Dropout)}
    assert dropout <= {0.0 if config.disable_dropout else 0.1}
    monkeypatch.setenv("RANK", "1")  # of two processes that would say the same, one does
    trainer.side_effect = ImportError("no vLLM")
    with pytest.raises(InputError, match="TRL: ImportError: no vLLM"):
        to_trl.main([str(tmp_path), *given])
    assert "not in TRL" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo", "rloo"])
def test_trl_trains_a_job_on_two_processes(script, tmp_path):
    pytest.importorskip("trl")
    (tmp_path / "my_rewards.py").write_text(RANK)
    run, out = tmp_path / "run", tmp_path / "out"
    sizes = "--num_steps 1 --prompts_per_step 1 --num_generations 4 --num_eval_prompts 4 --stop x"
    reward = f"--reward {tmp_path}/my_rewards.py:rank --verifier numeric_match"
    import_module(script).main(f"--device cpu --output_dir {run} {sizes} {reward}".split())
    command = "-m torch.distributed.run --standalone --nproc_per_node 2 tools/to_trl.py"
    flags = f"{run} --max_steps 2 --use_cpu --output_dir {out}"
    done = subprocess.run(
        [sys.executable, *command.split(), *flags.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not in TRL: --stop ['x']") == 1
    # Each process scores its half of the completions of the one prompt: before the first step, in
    # two steps and after the last.
    for process in "01":
        counts = (tmp_path / f"scored-by-{process}").read_text().split()
        assert counts == ["2"] * 4, process
        connected = (tmp_path / f"connected-{process}").read_text()
        assert connected == "False\n", "left connected, one of 15 jobs was aborted"
    history = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    steps = [record for record in history if "reward" in record]
    assert len(steps) == 2
    for record in steps:  # 0 and 1: in the mean, and in the same group
        assert record["reward"] == 0.5 and record["frac_reward_zero_std"] == 0
        assert "rewards/numeric_match/mean" in record
    assert (out / "tokenizer.json").is_file()
    before, after = load_file(TINY / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
