"""What must hold on a GPU: `pytest -m cuda` runs it on a real one, or else on a pretended one."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from pretended_cuda import SYNCHRONIZES, pretended_cuda
from small import EOS, small_gpt2, small_llama

import grpo
import ppo
import rloo
from plumbing.runs import Interrupted, Run
from sampling import generate

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    # On a GPU where no graph can be captured, the tests must not pass without graphs.
    pytest.mark.filterwarnings("error:decoding without CUDA graphs"),
]
# Of a pretended GPU tests/test_pretended_cuda.py has all scripts in float32, compared to the bit.
SCRIPTS = [ppo, grpo, rloo] if torch.cuda.is_available() else [grpo]
IN_BFLOAT16 = SCRIPTS if torch.cuda.is_available() else [ppo]
PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5], [0, 8, 9, 10, 11]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])


@pytest.fixture(autouse=True)
def device():
    if torch.cuda.is_available():
        yield
    else:
        with pretended_cuda():
            yield


def train(script, folder: Path, *flags: str) -> list[dict]:
    small = "--num_steps 3 --prompts_per_step 4 --num_eval_prompts 8 --eval_every 3 --device cuda"
    script.main([*small.split(), *flags, "--output_dir", str(folder)])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "memory/", "tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(measured)} for line in lines]


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_greedy_completions_are_those_of_model_generate(make):
    model = make().eval().to("cuda")
    options = {"max_new_tokens": 12, "pad_token_id": 0}
    ours = generate(model, PROMPTS, MASK, eos_token_ids=[EOS], top_k=1, **options)
    theirs = model.generate(
        PROMPTS.to("cuda"),
        attention_mask=MASK.to("cuda"),
        do_sample=False,
        eos_token_id=EOS,
        **options,
    )
    width = theirs.shape[1]
    assert ours.tokens.device.type == "cuda"
    assert ours.tokens[:, :width].tolist() == theirs.tolist()


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_a_cuda_graph_samples_what_an_ordinary_forward_pass_does(make):
    model = make().eval().to("cuda")
    found = []
    for static in (True, False):
        generator = torch.Generator("cuda").manual_seed(0)
        options = {"max_new_tokens": 20, "pad_token_id": 0, "num_generations": 16}
        options |= {"generator": generator, "static": static, "temperature": 1.5}
        found.append(generate(model, PROMPTS, MASK, eos_token_ids=[EOS], **options))
    assert found[0].tokens.tolist() == found[1].tokens.tolist()
    assert torch.allclose(found[0].logprobs, found[1].logprobs, atol=1e-4)
    lengths = found[0].completion_mask.sum(1)
    assert lengths.min() < lengths.max() == 20, "rows end at different times"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_before_the_first_update_the_ratio_is_1_and_the_kl_0(script, tmp_path):
    first = train(script, tmp_path / "r", "--num_epochs", "2", "--num_mini_batches", "2")[0]
    assert abs(first["objective/kl"]) < 1e-4 and first["val/ratio_max_dev_first"] < 1e-4
    assert first["grad_norm"] > 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_step_waits_for_the_device_a_few_times(script, tmp_path, monkeypatch):
    """By PyTorch's own count, which leaves out torch.cuda.synchronize."""
    waits, log = [], Run.log
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")

        def logged(self, step, line):
            log(self, step, line)
            waits.append(sum(SYNCHRONIZES in str(w.message) for w in seen))
            seen.clear()

        monkeypatch.setattr(Run, "log", logged)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(script, tmp_path / "r", "--sample_every", "100", "--record_tokens", "false")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert 2 <= min(waits[1:-1]) <= max(waits[1:-1]) <= 12


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not(script, tmp_path, monkeypatch):
    whole = train(script, tmp_path / "whole")
    log = Run.log

    def stop(self, step, line):
        log(self, step, line)
        self.signals.number = 2 if step == 1 else None

    with monkeypatch.context() as m, pytest.raises(Interrupted):
        m.setattr(Run, "log", stop)
        train(script, tmp_path / "r")
    assert train(script, tmp_path / "r", "--resume") == whole


@pytest.mark.parametrize("script", IN_BFLOAT16, ids=lambda script: script.__name__)
def test_in_bfloat16_with_an_adapter_the_weights_move_and_stay_finite(script, tmp_path):
    lines = train(script, tmp_path / "r", "--bf16", "true", "--lora_r", "4")
    assert all(0 < line["grad_norm"] < 1e3 for line in lines[:-1])
    assert lines[-2]["objective/kl"] != 0
