"""Flags, faults, metrics and files: what a user of the command line meets."""

import dataclasses
import functools
import itertools
import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from small import EOS, byte_tokenizer, letter_tokenizer, make_rollout, save_model, small_gpt2
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MambaConfig,
    RwkvConfig,
    T5Config,
    T5Model,
)

import grpo
import plumbing.scoring
import ppo
import rloo
from plumbing import evaluation, loading, runs
from plumbing.advice import warnings_about
from plumbing.config import HEADINGS, ByModel, RunConfig, flag, parse_flags
from plumbing.errors import Fault, InputError, first_line, optional_library
from plumbing.loading import fast_at_bfloat16, load_policy, load_tokenizer, pick_device
from plumbing.metrics import (
    Meter,
    Stopwatch,
    explained_variance,
    group_metrics,
    is_flat,
    objective_metrics,
    rollout_metrics,
)
from plumbing.runs import run_main

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def small_folder(tmp_path) -> str:
    return save_model(tmp_path / "small", small_gpt2(vocab_size=20), letter_tokenizer())


def fails(args: list[str], code: int, capsys) -> str:
    """Run ppo.py in this process; it must end with `code` and one line, which is returned."""
    with pytest.raises(SystemExit) as exit_:
        run_main(lambda: ppo.main(args))
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert exit_.value.code == code
    assert error.startswith("error: ")
    return error


# --- Flags ---


@pytest.mark.parametrize(
    ("args", "message"),
    [  # more of them: faults.py
        (["--kl-coeff=1"], "unknown flag --kl-coeff: did you mean --kl_coef?"),
        (["--zzzzzz", "1"], "unknown flag --zzzzzz: --help lists the flags"),
        (["--kl_estimator", "k4"], "invalid choice: 'k4'"),
        (["--missing_eos_penalty", "inf"], "--missing_eos_penalty inf: must be a finite number"),
        (["--reward_weights", "nan"], "--reward_weights [nan]: must be a finite number"),
        (["--seed", "99999999999999999999"], "--seed 99999999999999999999: must be between"),
        (["--epsilon_high", "0.3"], "unknown flag --epsilon_high: did you mean --epsilon?"),
        (["--kl_coef", "-0.1"], "--kl_coef -0.1: must be 0 or greater"),
        (["--warmup_steps", "-1"], "--warmup_steps -1: must be 0 or greater"),
        (["--prompts_per_step", "12", "--num_mini_batches", "5"], "choose 4 or 6"),
        (["--prompts_per_step", "4", "--num_mini_batches", "9"], "choose 4"),
        (["--digits", "0"], "--digits 0 is out of range"),
        (["--max_new_tokens", "125"], "a prompt of 6 tokens leaves no room for 125 new ones"),
    ],
)
def test_a_flag_at_fault_gets_one_line_and_exit_code_2(args, message, capsys, tmp_path):
    folder = tmp_path / "run"
    assert message in fails([*args, "--output_dir", str(folder)], 2, capsys)
    assert not folder.exists()


def test_names_of_trl_are_understood():
    config = parse_flags(
        ppo.Config, "", ["--response_length", "9", "--cliprange=0.3", "--beta", "1"]
    )
    assert (config.max_new_tokens, config.clip_range, config.kl_coef) == (9, 0.3, 1.0)


@pytest.mark.parametrize(
    ("args", "name", "expected"),
    [
        (["--kl-coef", "1"], "kl_coef", 1.0),
        (["--kl-coef=1"], "kl_coef", 1.0),
        (["--kl_coef", "1e-2"], "kl_coef", 0.01),
        (["--overwrite"], "overwrite", True),
        (["--overwrite", "--seed", "3"], "overwrite", True),
        (["--overwrite", "false"], "overwrite", False),
        (["--disable_dropout", "False"], "disable_dropout", False),
        (["--bf16=true"], "bf16", True),
        (["--bf16", "no"], "bf16", False),
        (["--bf16"], "bf16", True),
        (["--model", "x/y"], "bf16", fast_at_bfloat16(pick_device(None))),
        (["--reward", "a", "b", "--seed", "3"], "reward", ["a", "b"]),
        (["--reward_weights=0.5"], "reward_weights", [0.5]),
        (["--missing_eos_penalty", "-1"], "missing_eos_penalty", -1.0),
        (["--device", "cpu"], "device", "cpu"),
        ([], "device", str(pick_device(None))),
        (["--kl_estimator", "k3"], "kl_estimator", "k3"),
    ],
)
def test_how_a_flag_may_be_written(args, name, expected):
    value = getattr(parse_flags(ppo.Config, "", args), name)
    assert value == expected and type(value) is type(expected)


def test_what_is_not_given_is_the_default_of_the_model_and_ten_times_the_rate_for_an_adapter(
    tmp_path,
):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}')
    rates = [
        ([], 5e-4),
        (["--lora_r", "4"], 5e-3),
        (["--model", "x/y"], 5e-5),
        (["--model", "x/y", "--lora_r", "4"], 5e-4),
        (["--model", str(tmp_path)], 5e-4),
        (["--model", "x/y", "--lora_r", "4", "--learning_rate", "3e-6"], 3e-6),
    ]
    for args, rate in rates:
        config = parse_flags(ppo.Config, "", args)
        assert config.learning_rate == pytest.approx(rate, rel=1e-12)
        tiny = config.model == "tiny"
        assert (config.task, config.num_steps) == (("add", 60) if tiny else ("sentiment", 40))
        assert config.micro_batch_tokens == (None if tiny else 1024)
        assert not any(isinstance(value, ByModel) for value in vars(config).values())


def test_a_script_changes_a_default_in_one_line_and_keeps_help_and_heading(capsys):
    @dataclasses.dataclass(kw_only=True)
    class Config(ppo.Config):
        kl_coef: float = flag(0.25)
        learning_rate: float = flag(1e-3)
        reward: list[str] = flag(["brevity"])
        my_flag: int = flag(3, "of mine")

    config = parse_flags(Config, "", ["--lora_r", "8"])
    assert (config.kl_coef, config.learning_rate, config.my_flag) == (0.25, 1e-2, 3)
    assert config.reward == ["brevity"] and config.reward is not Config().reward
    with pytest.raises(SystemExit):
        parse_flags(Config, "", ["--help"])
    text = capsys.readouterr().out
    assert re.search(r"--kl_coef X +weight of the KL penalty; .* \(0\.25\)\n", text)
    assert text.index("update:") < text.index("--kl_coef") < text.index("this algorithm:")
    assert re.search(r"--my_flag N +of mine \(3\)\n", text)


def test_each_script_gives_the_defaults_that_the_shared_flags_leave_open():
    """And no flag but those that differ is in two places."""
    open_ones = {
        field.name
        for field in dataclasses.fields(RunConfig)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    assert {"num_steps", "num_generations", "kl_coef", "learning_rate"} <= open_ones
    for script in (ppo, grpo, rloo):
        own = set(script.Config.__annotations__)
        assert open_ones <= own and script.Config.script == script.__name__
        shared = {field.name: field.default for field in dataclasses.fields(RunConfig)}
        assert all(vars(script.Config).get(name) != shared[name] for name in own & set(shared))


@pytest.mark.slow
def test_every_error_is_one_line_without_a_traceback_in_a_real_process(tmp_path):
    command = [sys.executable, REPOSITORY / "ppo.py", "--learnin_rate", "1"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: unknown flag --learnin_rate: did you mean --learning_rate?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_fault_ends_with_exit_code_1_and_an_interrupt_with_130(capsys):
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory.\nDetails")
    for error, code in ((Fault("broken"), 1), (out_of_memory, 1), (KeyboardInterrupt(), 130)):

        def main(error=error):
            raise error

        with pytest.raises(SystemExit) as exit_:
            run_main(main)
        assert exit_.value.code == code


# --- Models ---


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (False, "no such folder, and no model hub within reach; give a local folder, or use"),
        (OSError("no-such-model is not a valid repository"), "no such model on the hub; give a"),
        (OSError("no-such-model is a gated repository"), "accept its terms and log in, or give a"),
    ],
)
def test_a_model_that_is_nowhere_is_refused_with_the_two_ways_out(
    answer, message, capsys, monkeypatch, tmp_path
):
    def has_file(name, file):
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(loading, "has_file", has_file)
    error = fails(["--model", "no-such-model", "--output_dir", str(tmp_path / "run")], 2, capsys)
    assert message in error and error.endswith("or use --model tiny")


def test_an_impossible_model_name_is_refused(capsys, tmp_path):
    for name in ("a/b/c", "x" * 200):
        args = [f"--model={name}", "--output_dir", str(tmp_path / "run")]
        assert "no such model on the hub" in fails(args, 2, capsys)


def test_what_is_not_a_causal_language_model_is_refused(capsys, tmp_path):
    bert = BertConfig(vocab_size=257, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    models = {
        "bert": (BertForMaskedLM(bert), "not a causal language model"),
        "backbone": (
            T5Model(T5Config(vocab_size=257, d_model=16, d_ff=16, num_layers=1)),
            "CausalLM",
        ),
    }
    for name, (model, message) in models.items():
        folder = save_model(tmp_path / name, model, byte_tokenizer())
        assert message in fails(
            ["--model", folder, "--output_dir", str(tmp_path / "run")], 2, capsys
        )


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused(capsys, tmp_path):
    folder = save_model(tmp_path / "m", small_gpt2(vocab_size=20), byte_tokenizer())
    args = ["--model", folder, "--max_new_tokens", "2", "--output_dir", str(tmp_path / "run")]
    assert "they don't belong together" in fails(args, 2, capsys)


@pytest.mark.parametrize("kind", ["rwkv", "mamba"])
def test_a_model_without_a_key_value_cache_is_refused(kind, capsys, tmp_path):
    if kind == "rwkv":
        config = RwkvConfig(vocab_size=257, hidden_size=32, num_hidden_layers=2)
    else:
        config = MambaConfig(vocab_size=257, hidden_size=32, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config)
    folder = save_model(tmp_path / kind, model, byte_tokenizer())
    args = ["--model", folder, "--output_dir", str(tmp_path / "run")]
    assert "doesn't decode with a key-value cache" in fails(args, 2, capsys)


def test_a_model_whose_weights_are_not_finite_is_refused(capsys, tmp_path):
    model = small_gpt2(vocab_size=257)
    model.transformer.h[0].mlp.c_fc.weight.data[0, 0] = math.nan
    folder = save_model(tmp_path / "nan", model, byte_tokenizer())
    args = ["--model", folder, "--output_dir", str(tmp_path / "run")]
    assert "can't be used, its weights are not finite" in fails(args, 2, capsys)


def test_a_model_that_makes_its_logits_in_an_unknown_way_is_refused(monkeypatch):
    """The log-probs that train would not be the model's."""
    forward = GPT2LMHeadModel.forward

    @functools.wraps(forward)  # its arguments are looked at
    def doubled(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = 2 * out.logits
        return out

    assert loading._fault_of_forward(small_gpt2().eval()) is None
    monkeypatch.setattr(GPT2LMHeadModel, "forward", doubled)
    fault = loading._fault_of_forward(small_gpt2().eval())
    assert fault == "can't be used, its last layer makes logits in an unknown way"


def test_the_chosen_cuda_device_becomes_the_current_one(monkeypatch):
    """CUDA graphs are captured on the current device, whatever the device of their tensors."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch, "empty", lambda *a, device: types.SimpleNamespace(device=torch.device(device))
    )
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert loading.pick_device("cuda:1") == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]


def test_a_cached_model_without_its_tokenizer_gets_it_from_the_hub(monkeypatch, tmp_path):
    """As on the very first run: the weights have just been cached, the tokenizer has not."""
    small_gpt2(vocab_size=20).save_pretrained(tmp_path)
    asked = []

    def require_on_hub(name, flag):
        letter_tokenizer().save_pretrained(tmp_path)
        asked.append(name)

    monkeypatch.chdir(tmp_path.parent)
    name = f"./{tmp_path.name}"
    monkeypatch.setattr(loading, "_cached_folder", lambda name: str(tmp_path))
    monkeypatch.setattr(loading, "_require_on_hub", require_on_hub)
    monkeypatch.setattr(loading.Path, "exists", lambda self: False)
    assert len(load_tokenizer(name)) == 20 and asked == [name]
    assert len(load_tokenizer(name)) == 20 and len(asked) == 1


def test_without_a_hub_nothing_is_retried_for_a_minute(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("transformers would retry here")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", never)
    with pytest.raises(InputError, match="no model hub within reach"):
        load_policy("no-such-model")


def test_a_checkpoint_without_its_language_model_head_is_refused(capsys, tmp_path):
    config = GPT2Config(vocab_size=257, n_embd=32, n_layer=1, n_head=2, tie_word_embeddings=False)
    folder = save_model(tmp_path / "backbone", GPT2Model(config), byte_tokenizer())
    assert "its checkpoint has no lm_head.weight" in fails(
        ["--model", folder, "--output_dir", str(tmp_path / "run")], 2, capsys
    )


@pytest.mark.parametrize("damage", ["empty", "no tokenizer", "no weights", "broken config"])
def test_a_damaged_folder_is_refused(damage, capsys, tmp_path, small_folder):
    folder = Path(small_folder)
    if damage == "empty":
        folder = tmp_path / "empty"
        folder.mkdir()
    elif damage == "no tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    elif damage == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        (folder / "config.json").write_text("{")
    assert f"--model {folder}: can't be loaded" in fails(
        ["--model", str(folder), "--output_dir", str(tmp_path / "run")], 2, capsys
    )


def test_a_model_with_a_byte_level_tokenizer_no_pad_token_and_no_chat_template_trains(tmp_path):
    folder = save_model(tmp_path / "m", small_gpt2(0.1, vocab_size=257), byte_tokenizer())
    flags = "--num_steps 2 --prompts_per_step 4 --max_new_tokens 5 --num_eval_prompts 2"
    ppo.main(["--model", folder, "--output_dir", str(tmp_path / "run"), *flags.split()])
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[0])["objective/kl"] == 0


def test_the_help_has_groups_one_line_a_flag_and_the_defaults(capsys):
    for script in (ppo, grpo, rloo):
        with pytest.raises(SystemExit) as exit_:
            script.main(["--help"])
        lines = capsys.readouterr().out.split("\n")
        assert exit_.value.code == 0
        for heading in HEADINGS:
            assert f"{heading}:" in lines
        flags = [line for line in lines if line.startswith("  --") and "--help" not in line]
        assert len(flags) == len(dataclasses.fields(script.Config))
        value = r"( N| X| TEXT| NAME| \[BOOL\]| (X|TEXT) \[\2 \.\.\.\])"
        assert all(re.match(rf"  --\w+{value}  +\S", line) for line in flags), flags
        assert any("--temperature" in f and f.endswith("(1.0)") for f in flags)
        end = lines.index(f"{HEADINGS[-1]}:")
        rest = lines[lines.index(f"{HEADINGS[0]}:") : end]
        assert all(line.startswith("  --") or line[:1] != " " for line in rest), "one line a flag"
        assert max(map(len, lines)) <= 116 and "==SUPPRESS==" not in "".join(lines)


# --- The folder of a run ---


def test_a_folder_that_holds_a_run_is_left_alone_without_overwrite(capsys, tmp_path, small_folder):
    flags = "--num_steps 1 --prompts_per_step 2 --max_new_tokens 2 --num_eval_prompts 1".split()
    args = ["--model", small_folder, "--output_dir", str(tmp_path / "run"), *flags]
    ppo.main(args)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    error = fails(args, 2, capsys)
    assert "already holds a run: give --resume, --overwrite or another --output_dir" in error
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    ppo.main([*args, "--overwrite", "--seed", "1"])
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run.old/metrics.jsonl").read_text() == before
    assert (tmp_path / "run/metrics.jsonl").read_text() != before


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_overwrite_loses_nothing_if_the_new_command_is_at_fault(capsys, tmp_path, small_folder):
    flags = "--num_steps 1 --prompts_per_step 2 --max_new_tokens 2 --num_eval_prompts 1".split()
    args = ["--model", small_folder, "--output_dir", str(tmp_path / "run"), *flags]
    ppo.main(args)
    before = {p: p.read_bytes() for p in files_in(tmp_path / "run")}
    (tmp_path / "rewards").mkdir()  # Python may leave its __pycache__ beside a file of rewards
    bad = tmp_path / "rewards" / "bad.py"
    bad.write_text("def bad(completions, **kw): return 1 / 0")
    # Refused before it starts: nothing is touched.
    for fault in (["--reward", f"{bad}:worse"], ["--prompts", "nowhere.jsonl"]):
        fails([*args, "--overwrite", *fault], 2, capsys)
        assert {p: p.read_bytes() for p in files_in(tmp_path / "run")} == before
        assert sorted(p.name for p in tmp_path.iterdir()) == ["rewards", "run", "small"]
    # At its first call of the reward: the run is there under its new name.
    fails([*args, "--overwrite", "--reward", f"{bad}:bad"], 2, capsys)
    old = tmp_path / "run.old"
    kept = {tmp_path / "run" / p.relative_to(old): p.read_bytes() for p in files_in(old)}
    assert kept == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rewards", "run", "run.old", "small"]


def test_a_run_that_failed_before_its_first_step_is_simply_done_again(
    capsys, tmp_path, small_folder
):
    flags = "--num_steps 1 --prompts_per_step 2 --max_new_tokens 2 --num_eval_prompts 1".split()
    args = ["--model", small_folder, "--output_dir", str(tmp_path / "run"), *flags]
    (tmp_path / "bad.py").write_text("def bad(completions, **kw): return 1 / 0")
    fails([*args, "--reward", f"{tmp_path}/bad.py:bad"], 2, capsys)
    ppo.main(args)
    samples = [json.loads(x) for x in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    found = [(sample["step"], sample["split"]) for sample in samples]
    assert found == [(0, "heldout"), (0, "train"), (0, "train"), (1, "heldout")]


def test_a_folder_that_holds_something_else_is_never_written_to(capsys, tmp_path, small_folder):
    before = sorted((p.name, p.read_bytes()) for p in Path(small_folder).iterdir())
    for extra in ([], ["--overwrite"]):
        args = ["--model", small_folder, "--max_new_tokens", "2", "--output_dir", small_folder]
        assert "holds something that is not a run" in fails([*args, *extra], 2, capsys)
    assert sorted((p.name, p.read_bytes()) for p in Path(small_folder).iterdir()) == before


def test_an_output_folder_that_cannot_be_written_is_refused(capsys, tmp_path, small_folder):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "run")
    args = ["--model", small_folder, "--max_new_tokens", "2", "--output_dir", folder]
    assert "can't be written" in fails(args, 2, capsys)


def test_the_name_of_a_run_says_script_model_task_and_seed(tmp_path, small_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--num_steps 1 --prompts_per_step 2 --max_new_tokens 2 --num_eval_prompts 1 --seed 7"
    ppo.main(["--model", small_folder, *flags.split()])
    assert [path.name for path in Path("runs").iterdir()] == ["ppo-small-sentiment-s7"]


# --- Metrics ---


def test_a_metric_of_two_micro_batches_is_the_mean_over_all_tokens_not_of_means():
    x = torch.tensor([[1.0, 2.0, 3.0], [10.0, torch.nan, torch.nan]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    meter = Meter()
    for row in range(2):
        meter.add("m", x[row : row + 1], mask[row : row + 1])
    meter.add("rows", torch.tensor([2.0, 4.0, 9.0]))
    meter.add("rows", torch.tensor(1.0))
    hint = "over padding, a mean of means, or the last micro-batch alone?"
    assert meter.results() == {"m": 4.0, "rows": 4.0}, hint


def test_shares_are_added_up_within_a_minibatch_and_averaged_over_the_minibatches():
    meter = Meter()
    for shares, norm in (([1.0, 2.0, 4.0], 3.0), ([1.0], 5.0)):
        for share in shares:
            meter.add_share("loss", torch.tensor(share, requires_grad=True))
        meter.end_mini_batch(torch.tensor(norm))
    assert meter.results() == {"loss": 4.0, "grad_norm": 4.0}


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_a_fault(norm):
    with pytest.raises(Fault, match=f"the gradient is {norm}: lower --learning_rate"):
        Meter().end_mini_batch(torch.tensor(norm))


@pytest.mark.parametrize("per_row", [False, True])
def test_the_metrics_of_the_policy_leave_out_padding_and_weigh_every_token_or_row_the_same(per_row):
    """Micro-batches of ragged rows, in another order than the rollout's, NaN at padding. The
    largest deviation of the ratio is that of the first minibatch alone.
    """
    nan = torch.nan
    rollout = make_rollout([[1], [1], [1]], [[5, EOS], [5], [5, 6, EOS]])
    mask = rollout.completion_mask
    old = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0], [4.0, 5.0, 6.0]])
    moved = torch.tensor([[1.0, 3.0, nan], [5.0, nan, nan], [1.0, 1.0, 1.0]])
    entropy = torch.tensor([[1.0, 2.0, nan], [6.0, nan, nan], [3.0, 3.0, 3.0]])
    ratio, clipped = torch.tensor([1.25, 0.5, 1.5]), torch.tensor([True, False, False])
    if not per_row:
        ratio = ratio.unsqueeze(1).expand(3, 3).masked_fill(~mask, nan)
        clipped = clipped.unsqueeze(1).expand(3, 3) | ~mask
    meter = Meter()
    for rows in ([2, 1], [0]):
        at = torch.tensor(rows)
        new = (old + moved)[at].requires_grad_()
        meter.add_policy(rollout, at, new, old[at], entropy[at], ratio[at], clipped[at], mask[at])
    meter.end_mini_batch(torch.tensor(1.0))
    first = meter.results()["val/ratio_max_dev_first"]
    far = torch.full_like(old, 9.0)
    far = far[:, 0] if per_row else far
    meter.add_policy(rollout, torch.arange(3), old, old, entropy, far, clipped, mask)
    assert first == 0.5 and meter.results()["val/ratio_max_dev_first"] == 0.5
    assert torch.equal(meter.old_logprobs, old), "rows were exchanged"
    results = meter.results()
    # The second pass adds a squared distance of 0, and the same entropies again.
    assert results["policy/approxkl_avg"] == pytest.approx(0.5 * (1 + 9 + 25 + 3) / 12)
    assert results["policy/entropy_avg"] == pytest.approx((1 + 2 + 6 + 9) / 6)
    by_row, by_token = ((1.25 + 0.5 + 1.5) / 3, 1 / 3), ((2.5 + 0.5 + 4.5) / 6, 2 / 6)
    mean_ratio, share_clipped = by_row if per_row else by_token
    assert results["val/ratio"] == pytest.approx((mean_ratio + 9) / 2)
    assert results["policy/clipfrac_avg"] == pytest.approx(share_clipped)


def test_what_the_metrics_keep_of_a_micro_batch_holds_no_graph_of_it():
    """Else the activations of every micro-batch would stay in memory until the step is logged."""
    rollout = make_rollout([[1], [1]], [[5, EOS], [5]])
    mask, rows = rollout.completion_mask, torch.arange(2)
    old = torch.zeros(2, 2)
    new = torch.full((2, 2), 0.1, requires_grad=True)
    entropy, ratio = new**2, new.exp()
    meter = Meter()
    meter.add_policy(rollout, rows, new * 1, old, entropy, ratio, ratio > 1, mask)
    meter.add_largest("largest", entropy)
    meter.add_share("share", entropy.sum())
    kept = [*meter.sums.values(), *meter.shares.values(), *meter.last_pass.values()]
    assert len(kept) > 8 and not any(x.requires_grad for x in kept)


def test_each_lap_of_a_step_is_the_time_since_the_one_before(monkeypatch):
    now = itertools.accumulate([100.0, 2.0, 5.0])
    monkeypatch.setattr("plumbing.metrics.time.perf_counter", lambda: next(now))
    watch = Stopwatch(torch.device("cpu"))
    watch.lap("rollout")
    watch.lap("update")
    assert watch.laps == {"rollout": 2.0, "update": 5.0}


def test_an_empty_mask_gives_0_not_nan():
    meter = Meter()
    meter.add("m", torch.ones(2), torch.zeros(2).bool())
    assert meter.results() == {"m": 0}


def test_explained_variance_is_1_for_the_returns_themselves_and_0_for_a_constant():
    returns = torch.tensor([[1.0, 2.0, 5.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0]]).bool()
    assert explained_variance(returns, returns, mask) == pytest.approx(1)
    assert explained_variance(torch.full((1, 4), 3.0), returns, mask) == pytest.approx(0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    garbage = returns.masked_fill(~mask, -50)
    assert explained_variance(garbage, returns, mask) == pytest.approx(1), "over padding?"
    # A shift is no spread.
    assert explained_variance(returns + 7, returns, mask) == pytest.approx(1)
    assert explained_variance(returns, torch.full((1, 4), 0.1), mask) == 0


def test_the_objective_is_a_sum_of_kl_per_completion_and_leaves_out_padding_and_missing_scores():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    kl = torch.tensor([[1.0, 2, 3, 99], [4, 99, 99, 99], [-1, 3, 99, 99]])
    logprobs = torch.where(mask, -0.5 * kl.abs(), torch.tensor(99.0))
    scores = torch.tensor([10.0, torch.nan, 4.0])
    metrics = objective_metrics(scores, kl, logprobs, mask, kl_coef=0.5)
    expected = {
        "objective/kl": (6 + 4 + 2) / 3,
        "objective/kl_token": 12 / 6,
        "objective/entropy": 0.5 * (1 + 2 + 3 + 4 + 1 + 3) / 6,
        "objective/scores": 7,
        "objective/non_score_reward": -0.5 * 4,
        "objective/rlhf_reward": ((10 - 0.5 * 6) + (4 - 0.5 * 2)) / 2,
    }
    assert metrics == pytest.approx(expected), "over padding, or a missing score counted?"
    unknown = objective_metrics(scores, None, logprobs, mask, kl_coef=0.5)
    assert unknown["objective/kl"] is None and unknown["objective/kl_token"] is None
    assert unknown["objective/non_score_reward"] == 0 and unknown["objective/rlhf_reward"] == 7


def test_the_spread_within_a_group_leaves_out_missing_scores_and_counts_flat_groups_as_0():
    nan = torch.nan
    scores = torch.tensor([1.0, 3, nan, 5, 5, 5, 0, 0, 6, nan, nan, nan])
    metrics = group_metrics(scores, 3)
    assert is_flat(torch.tensor([[nan, 2.0], [nan, nan], [1.0, 2.0]])).tolist() == [[1], [1], [0]]
    stds = [2**0.5, 0, 12**0.5, 0]  # with Bessel's correction; no score has no spread
    hint = "other groups, a missing score counted, or flat groups left out?"
    assert metrics["reward/std_within_group"] == pytest.approx(sum(stds) / 4), hint
    assert metrics["reward/frac_flat_groups"] == 0.5, hint


def test_lengths_count_eos_and_neither_prompt_nor_padding():
    completions = [[5, EOS], [6, 7, 8, 9, 10], [EOS], [5, 6, 7, EOS]]
    rollout = make_rollout([[1, 2, 3], [4], [1], [2, 2]], completions, extra_right=2)
    metrics = rollout_metrics(rollout, {"time/rollout": 2.5, "time/update": 1.5})
    assert (metrics["length/mean"], metrics["length/max"]) == (3, 5)
    assert (metrics["length/truncated_frac"], metrics["val/num_eos_tokens"]) == (0.25, 3)
    assert (metrics["time/rollout"], metrics["time/update"]) == (2.5, 1.5)
    assert metrics["tokens_per_second"] == 3 and metrics["memory/peak_gb"] > 0.01


def test_nan_is_written_as_null_so_that_metrics_stay_json(tmp_path, small_folder):
    file = tmp_path / "none.py"
    file.write_text(
        "calls = []\n"
        "def none(completions, **kw):\n"
        "    calls.append(1)\n"
        "    return [None if len(calls) == 1 else 1.0] * len(completions)\n"
    )
    flags = "--num_steps 1 --prompts_per_step 2 --max_new_tokens 2 --num_eval_prompts 2".split()
    flags += ["--model", small_folder, "--reward", f"{file}:none"]
    ppo.main([*flags, "--output_dir", str(tmp_path / "run")])
    sample = (tmp_path / "run/samples.jsonl").read_text().splitlines()[0]
    assert json.loads(sample)["score"] is None and "NaN" not in sample


# --- Evaluation, samples, warnings, trackers ---


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_prompts_are_completed_sampled_and_greedily(make_job):
    lines = make_job(grpo)(num_steps=4, eval_every=2, reward_weights=0.5)
    measured = [line["step"] for line in lines if "eval/reward_greedy" in line]
    assert measured == [0, 2, 4]
    assert all("eval/reward" in lines[i] for i in measured)
    assert {line.get("eval/accuracy_greedy") for line in lines} == {None}


def test_an_evaluation_is_the_mean_of_the_scores_that_there_are(make_job, tmp_path):
    (tmp_path / "some.py").write_text(
        "def some(completions, **columns):\n    return [None, *range(2, len(completions) + 1)]\n"
    )
    job = make_job(grpo)
    flags = {"num_steps": 1, "reward": f"{tmp_path}/some.py:some", "num_eval_prompts": 3}
    line = job(**flags)[0]
    assert line["eval/reward"] == line["eval/reward_greedy"] == 2.5, "None, 2 and 3"


def test_a_library_that_is_there_and_broken_is_one_line_as_a_missing_one_is(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise ImportError('undefined symbol: x')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("broken_library", "library_that_is_not_there"):
        with pytest.raises(InputError, match=r"^pip install it$"):
            optional_library(name, "pip install it")


def test_half_a_surrogate_pair_in_a_completion_is_written_and_read_again(make_job, monkeypatch):
    """No UTF-8 can hold it, and a byte-level tokenizer can decode to it."""
    half = "a\ud800"
    decode = plumbing.scoring.decode
    monkeypatch.setattr(plumbing.scoring, "decode", lambda *args: [half for _ in decode(*args)])
    job = make_job(grpo)
    job(reward="brevity")
    samples = lines_of(job.folder / "samples.jsonl")
    assert {x["completion"] for x in samples} == {half}


def test_each_sample_stands_beside_its_own_prompt(make_job, tmp_path):
    (tmp_path / "length.py").write_text(
        "def length(prompts, completions, **columns):\n    return [len(p) for p in prompts]\n"
    )
    job = make_job(grpo)
    job(reward=f"{tmp_path}/length.py:length", completions=24, sample_every=1)
    samples = lines_of(job.folder / "samples.jsonl")
    assert len({x["prompt"] for x in samples if x["split"] == "train"}) > 3
    assert all(x["score"] == len(x["prompt"]) for x in samples)


def test_the_accuracy_is_that_of_all_batches_of_the_held_out_prompts(tmp_path):
    found = []
    for rows in (32, 8):
        flags = ["--num_steps", "1", "--num_eval_prompts", "32", "--prompts_per_step", "8"]
        flags += ["--rollout_batch_size", str(rows), "--output_dir", f"{tmp_path}/{rows}"]
        grpo.main([*flags, "--device", "cpu"])
        line = lines_of(tmp_path / str(rows) / "metrics.jsonl")[0]
        assert line["eval/accuracy"] == line["eval/reward"]
        assert line["eval/accuracy_greedy"] == line["eval/reward_greedy"]
        found.append(line["eval/accuracy_greedy"])
    assert found[0] == found[1]


def test_an_evaluation_without_any_score_is_unknown_not_0(make_job, tmp_path, capsys):
    (tmp_path / "none.py").write_text(
        "def none(completions):\n    return [None] * len(completions)\n"
    )
    job = make_job(grpo)
    lines = job(num_steps=1, reward=f"{tmp_path}/none.py:none", save_best="true")
    assert lines[0]["eval/reward"] is None and lines[1]["eval/reward_greedy"] is None
    assert "eval/reward unknown (was unknown)" in capsys.readouterr().out
    assert (job.folder / "model" / "config.json").exists(), "no evaluation was the best: the last"


def test_the_first_line_of_an_error_is_the_first_that_says_something():
    assert first_line(RuntimeError("\n\n  CUDA error: 7\nmore")) == "CUDA error: 7"
    assert first_line(RuntimeError()) == ""


def test_greedy_evaluation_takes_the_likeliest_token_whatever_the_seed(make_job):
    first, second = (
        make_job(grpo)(seed=seed, num_generations=4, num_eval_prompts=8)[0] for seed in (0, 1)
    )
    assert first["eval/reward_greedy"] == second["eval/reward_greedy"]
    assert first["eval/reward"] != second["eval/reward"]


def test_samples_from_training_are_recorded_whole_and_a_few_are_printed(make_job, capsys):
    job = make_job(grpo)
    job(num_steps=5, sample_every=2, eval_every=100)
    samples = lines_of(job.folder / "samples.jsonl")
    steps = [sample["step"] for sample in samples if sample["split"] == "train"]
    assert steps == [0] * 8 + [2] * 8 + [4] * 8
    output = capsys.readouterr().out
    block = output.split("step 2: samples from training\n")[1].split("\n")
    shown = next(s for s in samples if (s["step"], s["split"]) == (2, "train"))
    assert block[0].startswith(f"  {shown['score']:5.2f}  {shown['prompt']}")
    assert all(re.match(r"  +-?[\d.]+  ", line) for line in block[:4])


def test_the_best_model_is_kept_where_asked_for(make_job, monkeypatch):
    evaluate = runs.Run.evaluate
    values = iter([0.1, 0.0, 0.7, 0.0, 0.3, 0.0, 0.2, 0.0])  # sampled, greedy
    monkeypatch.setattr(evaluation, "verify", lambda *args: torch.tensor([[next(values)]]).double())
    kept = []

    def spy(self, step):
        found = evaluate(self, step)
        kept.append({k: p.detach().clone() for k, p in self.policy.named_parameters()})
        return found

    monkeypatch.setattr(runs.Run, "evaluate", spy)
    job = make_job(grpo)
    verifier = f"{job.folder.parent}/reward.py:spread"  # is not called
    job(num_steps=3, eval_every=1, save_best="true", learning_rate=1e-2, verifier=verifier)
    saved = AutoModelForCausalLM.from_pretrained(job.folder / "model")
    found = dict(saved.named_parameters())
    for index, weights in enumerate(kept):
        same = all(torch.equal(found[name], p) for name, p in weights.items())
        assert same == (index == 1), index


STEP = {
    "objective/kl": 0.1,
    "objective/scores": 0.5,
    "val/ratio_max_dev_first": 0.0,
    "reward/frac_flat_groups": 0.1,
    "length/truncated_frac": 0.1,
}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([{"objective/kl": -0.1 - 0.01 * (i % 2)} for i in range(10)], "negative KL"),
        ([{"objective/kl": 10.5}], "large KL"),
        ([{"val/ratio_max_dev_first": 0.02}], "ratio"),
        ([{"reward/frac_flat_groups": 0.6}], "flat groups"),
        ([{"length/truncated_frac": 0.6}], "truncated"),
        ([{}] * 5, "constant reward"),
    ],
)
def test_each_warning_has_a_cause_and_a_remedy(changes, name):
    varied = [STEP | {"objective/scores": i / 10} | c for i, c in enumerate(changes)]
    history = [STEP | c for c in changes] if name == "constant reward" else varied
    [(found, text)] = warnings_about(history, bf16=False)
    assert found == name and "\n" not in text
    assert any(word in text for word in ("--", "look at", "prompts too", "inspect_reward.py"))


@pytest.mark.parametrize(
    "changes",
    [
        [{"objective/kl": None}] * 3,
        [{"objective/kl": (-1) ** i * 0.5 - 0.02} for i in range(10)],  # noise
        [{"objective/kl": 9.9}],
        [{"val/ratio_max_dev_first": 0.009}],
        [{"reward/frac_flat_groups": 0.5, "length/truncated_frac": 0.5}],
        [{}] * 4,
    ],
)
def test_no_warning_without_a_cause(changes):
    history = [STEP | {"objective/scores": i / 10} | c for i, c in enumerate(changes)]
    assert warnings_about(history, bf16=False) == []


@pytest.mark.parametrize(("spread", "warned"), [(0.02, True), (0.03, False)])
def test_the_kl_is_negative_beyond_chance_by_the_error_of_its_mean_over_ten_steps(spread, warned):
    """Around -0.05: four errors of the mean are 0.027 and 0.040, and -0.02 is allowed."""
    changes = [{"objective/kl": -0.05 + spread * (-1) ** i} for i in range(10)]
    history = [STEP | {"objective/scores": i / 10} | c for i, c in enumerate(changes)]
    found = [name for name, _ in warnings_about(history, bf16=False)]
    assert found == ["negative KL"] * warned


@pytest.mark.parametrize("num_steps", [1, 12])
def test_an_infinite_kl_raises_the_warning_of_a_large_one(num_steps):
    infinite = dict.fromkeys(["objective/kl", "objective/kl_token"], torch.inf)
    changes = [{"objective/kl_token": 0.01}] * (num_steps - 1) + [infinite]
    history = [STEP | {"objective/scores": i / 10} | c for i, c in enumerate(changes)]
    [(found, text)] = warnings_about(history, bf16=False)
    assert found == "large KL" and "the KL is inf" in text and "--kl_coef" in text


@pytest.mark.parametrize(
    ("kl", "num_tokens", "warned"),
    [(12.0, 500, False), (12.0, 24, True), (60.0, 500, True), (9.9, 5, False)],
)
def test_a_large_kl_is_one_of_many_nats_that_are_many_per_token_too(kl, num_tokens, warned):
    """12 nats are much for 24 tokens, .5 each, and little for 500, .024 each."""
    history = [STEP | {"objective/kl": kl, "objective/kl_token": kl / num_tokens}]
    assert [name for name, _ in warnings_about(history, bf16=False)] == ["large KL"] * warned


def test_rounding_to_bfloat16_is_no_reason_to_warn_of_the_ratio():
    history = [STEP | {"val/ratio_max_dev_first": 0.3}]
    assert warnings_about(history, bf16=True) == []


def test_a_warning_is_given_once_and_without_groups_there_are_no_flat_ones(make_job, capsys):
    make_job(ppo)(num_steps=3, temperature=0.001)  # always the same tokens, to the limit
    output = capsys.readouterr().out
    assert re.search(r"warning, step 0: \d+% of the completions were cut", output)
    assert output.count("of the completions were cut") == 1, "at each step?"
    assert "groups" not in output


def test_tensorboard_gets_every_known_metric_of_every_step(make_job, monkeypatch):
    scalars, writers = [], []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            writers.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            scalars.append((step, name, value))

        def flush(self):
            pass

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    job = make_job(grpo)
    lines = job(num_steps=2, kl_coef=0, tensorboard="true")
    assert writers == [(str(job.folder / "tensorboard"), None)]
    expected = [
        (x["step"], k, v) for x in lines for k, v in x.items() if k != "step" and v is not None
    ]
    assert [s for s in scalars if s[1] != "step"] == expected
    scalars.clear()
    job(num_steps=3, kl_coef=0, tensorboard="true", overwrite="false", resume="true")
    assert writers[1][1] == 2, "what is there of later steps would be there twice"


def test_weights_and_biases_gets_every_step_under_the_name_of_the_run(make_job, monkeypatch):
    logged, started = [], []
    module = types.ModuleType("wandb")

    def init(**options):
        started.append(options)
        return types.SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics)))

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    lines = make_job(grpo)(num_steps=2, wandb="true")
    assert started[0]["name"] == "run" and started[0]["config"]["num_steps"] == 2
    assert started[0]["resume"] is None, "it would go on with another run of this name"
    assert [step for step, _ in logged] == [0, 1, 2]
    assert logged[0][1]["objective/scores"] == lines[0]["objective/scores"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_with_its_command(name, monkeypatch, make_job):
    module = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"--{name}: pip install {name}"):
        make_job(grpo)(**{name: "true"})


@pytest.mark.draws
def test_where_matplotlib_is_there_a_run_ends_with_its_curves(make_job):
    job = make_job(grpo)
    job(num_steps=2)
    assert (job.folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
