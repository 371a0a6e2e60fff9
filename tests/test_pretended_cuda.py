"""The CUDA path on a pretended device: its runs equal those of the CPU."""

import json
import shutil
from unittest import mock

import pytest
import torch
from pretended_cuda import CUDA, Generator, pretended_cuda
from small import computed, small_gpt2
from torch.optim.optimizer import register_optimizer_step_post_hook

import grpo
import ppo
import rloo
from common import Fault, InputError
from plumbing import models
from plumbing.run import run_main
from sampling import Decoder, sample

RUNS = {  # the updates of a step, and flags
    grpo: (2, {"num_mini_batches": 2}),
    ppo: (2, {"num_epochs": 2, "lora_r": 2}),
    rloo: (1, {"gradient_checkpointing": True}),
}


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.__name__)
def test_a_run_that_is_stopped_and_resumed_on_the_device_equals_one_on_the_cpu_to_the_bit(
    script, make_job, monkeypatch
):
    """And the cache is cleared between the phases of a step. Rows that share a micro-batch share
    their prompt on the CPU alone, which rounds otherwise: so each has one of its own.
    """
    updates, flags = RUNS[script]
    flags |= {"num_steps": 2, "eval_every": 2, "max_new_tokens": 12, "save_every": 1}
    flags |= {"micro_batch_tokens": 1}
    run, sample, order = make_job(script), script.sample, []
    expected = computed(run(**flags)), (run.folder / "samples.jsonl").read_text()

    def noted(*args, **options):
        order.append("sample")
        return sample(*args, **options)

    def clear():
        order.append("clear")
        if order.count("clear") == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(script, "sample", noted)
    with pretended_cuda() as gpu:
        monkeypatch.setattr(torch.cuda, "empty_cache", clear)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
        hook = register_optimizer_step_post_hook(lambda *_: order.append("update"))
        with pytest.raises(KeyboardInterrupt):
            run(**flags, device="cuda")
        lines = computed(run(**flags, device="cuda", resume=run.folder))
        hook.remove()
    step = ["sample", "wait", "clear", *(updates * ["update"]), "wait", "clear"]
    assert order == ["clear", *step, *step, "clear", *step]  # the first to fit a micro-batch
    for line in expected[0] + lines:  # tensors of other shapes round otherwise in decoding
        line.pop("val/sampler_kl", None), line.pop("objective/entropy", None)
    assert (lines, (run.folder / "samples.jsonl").read_text()) == expected
    assert lines[0]["grad_norm"] > 0 and gpu.replays > 40


def test_what_fails_within_a_capture_is_named_and_without_graphs_it_works(capsys):
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    options = {"num_generations": 1, "max_rows": 2, "max_new_tokens": 4}
    options |= {"eos_token_ids": [], "pad_token_id": 0}

    def wait(module, inputs, output):
        output.sum().item()

    def run_out(module, inputs, output):
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pretended_cuda():
        model = small_gpt2().eval().to("cuda")
        hook = model.transformer.ln_f.register_forward_hook(wait)
        with pytest.raises(Fault, match=r"--cuda_graphs false \(_local_scalar_dense"):
            sample(model, prompts, prompts > 0, **options)
        sample(model, prompts, prompts > 0, decoder=Decoder(model, graphs=False), **options)
        hook.remove()
        model.transformer.ln_f.register_forward_hook(run_out)
        with pytest.raises(SystemExit):
            run_main(lambda: sample(model, prompts, prompts > 0, **options))
        sample(model, prompts, prompts > 0, decoder=Decoder(model, graphs=False), **options)
    assert capsys.readouterr().err.startswith("error: out of memory: lower --micro_batch_tokens")


def test_a_gpu_without_code_in_this_torch_or_that_it_cannot_see_is_named_in_a_line(
    monkeypatch, capsys
):
    error = RuntimeError("CUDA error: no kernel image is available\nFor debugging")
    broken = mock.patch.object(torch.Tensor, "item", side_effect=error)
    with pretended_cuda(), broken, pytest.raises(InputError) as raised:
        models.pick_device(None)
    message = "--device cuda: RuntimeError: CUDA error: no kernel image is available"
    assert str(raised.value) == message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for found, lines in ((None, 0), ("/usr/bin/nvidia-smi", 1)):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        assert models.pick_device(None).type == "cpu"
        assert capsys.readouterr().out.count("On the CPU: this torch is a CPU build, or") == lines


def test_a_micro_batch_that_does_not_fit_is_halved_and_config_json_keeps_it(
    make_job, monkeypatch, capsys
):
    run, sizes, one_pass = make_job(ppo), [], models._one_pass
    logprobs = models.completion_logprobs

    def tried(config, trained, part):
        sizes.append(len(part.finished))
        assert not part.attention_mask.all(), "a mask of padding takes memory"
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        one_pass(config, trained, part)

    def scored(*args, entropy_grad, **options):
        assert not entropy_grad, "it would keep fewer logits than the run"
        return logprobs(*args, entropy_grad=entropy_grad, **options)

    monkeypatch.setattr(models, "completion_logprobs", scored)
    monkeypatch.setattr(models, "_one_pass", tried)
    with pretended_cuda():
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: sizes.append("reset"))
        run(device="cuda", micro_batch_tokens=1000)
    kept = json.loads((run.folder / "config.json").read_text())["micro_batch_tokens"]
    assert sizes == [8, 4, 2, "reset"]
    assert kept == 2 * (4 + 6)  # the longest prompt, and max_new_tokens
    assert f"--micro_batch_tokens 1000 doesn't fit: it is {kept} here" in capsys.readouterr().out


def test_the_device_is_as_strict_as_a_real_one():
    on_cpu = torch.ones(3)
    with pretended_cuda() as gpu:
        x = torch.arange(3.0, device="cuda", requires_grad=True)
        (x**2).sum().backward()
        assert x.grad.device == (2 * x).view(3, 1).device == CUDA and on_cpu.device.type == "cpu"
        for wrong in (
            lambda: x + on_cpu,
            lambda: on_cpu[x.long()],
            lambda: torch.rand(2, device="cuda", generator=Generator("cpu")),
        ):
            with pytest.raises(RuntimeError, match=r"on the CPU|generator"):
                wrong()
        assert not gpu.waits
        x.sum().item(), x.tolist(), x.cpu(), x[x > 1], x[torch.tensor([0])], x.nonzero()
        assert gpu.waits.total() == 6
        y, graph = x.detach().clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = 2 * y
            y += 1
        assert doubled.cpu().isnan().all() and y.tolist() == [0, 1, 2], "capturing runs nothing"
        graph.replay(), graph.replay()
        assert doubled.tolist() == [2, 4, 6]
        y = y + 1
        graph.replay()
        assert doubled.tolist() == [4, 6, 8], "a tensor that was replaced is stale"
        with pytest.raises(RuntimeError, match="captured"), torch.cuda.graph(graph):
            y.sum().item()
