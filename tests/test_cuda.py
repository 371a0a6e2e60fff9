"""What must hold on a GPU: `pytest -m cuda` runs it on a real one, or else on a pretended one."""

import contextlib
import functools
import signal
import warnings

import pytest
import torch
from pretended_cuda import SYNCHRONIZES, pretended_cuda
from small import EOS, job_maker, small_gpt2, small_llama

import grpo
import ppo
import rloo
from plumbing.decoding import Decoder
from plumbing.run import Interrupted, Run, signals
from sampling import generate

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    # On a GPU where no graph can be captured, the tests must not pass without graphs.
    pytest.mark.filterwarnings("error:decoding without CUDA graphs"),
]
# test_pretended_cuda.py runs all scripts on the pretended GPU.
SCRIPTS = [ppo, grpo, rloo] if torch.cuda.is_available() else [grpo]
PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5], [0, 8, 9, 10, 11]])
MASK = PROMPTS > 0


@pytest.fixture(autouse=True)
def device():
    with contextlib.nullcontext() if torch.cuda.is_available() else pretended_cuda():
        yield
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def train(request, tmp_path):
    run = job_maker(tmp_path)(request.param)
    return functools.partial(run, num_steps=3, eval_every=3, device="cuda")


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_greedy_completions_are_those_of_model_generate(make):
    model = make().eval().to("cuda")
    options = {"max_new_tokens": 12, "pad_token_id": 0}
    ours = generate(model, PROMPTS, MASK, eos_token_ids=[EOS], top_k=1, **options).tokens
    options |= {"attention_mask": MASK.to("cuda"), "eos_token_id": EOS, "do_sample": False}
    theirs = model.generate(PROMPTS.to("cuda"), **options)
    assert ours.device.type == "cuda"
    assert ours[:, : theirs.shape[1]].tolist() == theirs.tolist()


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_a_cuda_graph_samples_what_an_ordinary_forward_pass_does(make):
    model, found = make().eval().to("cuda"), []
    for static in (True, False):
        options = {"max_new_tokens": 20, "pad_token_id": 0, "num_generations": 16}
        options |= {"generator": torch.Generator("cuda").manual_seed(0)}
        options |= {"decoder": Decoder(model, static=static)}
        found.append(generate(model, PROMPTS, MASK, eos_token_ids=[EOS], **options))
    assert found[0].tokens.tolist() == found[1].tokens.tolist()
    assert torch.allclose(found[0].logprobs, found[1].logprobs, atol=1e-4)
    lengths = found[0].completion_mask.sum(1)
    assert lengths.min() < lengths.max() == 20, "rows end at different times"


def test_a_step_waits_for_the_device_a_few_times(train, monkeypatch):
    """By PyTorch's own count, which leaves out torch.cuda.synchronize."""
    waits, end_step = [], Run._end_step
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")

        def ended(self, steps_done):
            waits.append(sum(SYNCHRONIZES in str(w.message) for w in seen))
            assert not any("without CUDA graphs" in str(w.message) for w in seen)
            end_step(self, steps_done)
            seen.clear()

        monkeypatch.setattr(Run, "_end_step", ended)
        torch.cuda.set_sync_debug_mode("warn")
        train()
    assert len(waits) == 3, "of which the first is evaluated and recorded"
    assert 2 <= min(waits[1:]) <= max(waits[1:]) <= 12


def test_a_run_starts_at_ratio_1_and_kl_0_and_goes_on_as_if_it_had_not_been_stopped(
    train, monkeypatch
):
    train = functools.partial(train, num_epochs=2, num_mini_batches=2)
    whole, log = train(), Run.log
    assert abs(whole[0]["objective/kl"]) < 1e-4 and whole[0]["val/ratio_max_dev_first"] < 1e-4

    def stop(self, step, meter, **more):
        log(self, step, meter, **more)
        signals.seen = signal.SIGINT if step == 1 else None

    with monkeypatch.context() as m, pytest.raises(Interrupted):
        m.setattr(Run, "log", stop)
        train()
    resumed = train(resume=True, overwrite=False)
    for name in ("grad_norm", "objective/kl", "eval/reward"):
        assert [line.get(name) for line in resumed] == [line.get(name) for line in whole]


def test_in_bfloat16_with_an_adapter_the_weights_move_and_stay_finite(train):
    lines = train(bf16=True, lora_r=4)
    assert all(0 < line["grad_norm"] < 1e3 for line in lines[:-1])
    assert lines[-2]["objective/kl"] != 0
