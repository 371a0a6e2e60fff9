"""The CUDA path on a pretended device: its runs equal those of the CPU, and hardly wait."""

import contextlib
import itertools
import json
import subprocess
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from pretended_cuda import CUDA, Generator, pretended_cuda
from small import letter_tokenizer, reward_model_job, save_model, small_llama

import grpo
import ppo
import rloo
import sampling
from plumbing import decoding, forward, metrics
from plumbing.runs import Interrupted, Run
from tasks import add_prompts

REPOSITORY = Path(__file__).parent.parent
SCRIPTS = {"ppo": ppo, "grpo": grpo, "rloo": rloo}
MEASURED = ("time/", "memory/", "tokens_per_second")
SMALL = "--num_steps 2 --prompts_per_step 4 --num_eval_prompts 8 --eval_every 2 --seed 3".split()


def train(script: str, folder: Path, *flags: str) -> tuple[list[dict], str]:
    """The metrics without what is measured, and the samples, of a run into the folder; the records
    of tokens, where the flags ask for them, are among the metrics.
    """
    if "--record_tokens" not in flags:
        flags = (*flags, "--record_tokens", "false")
    sums = folder.with_name("sums.jsonl")  # a few: to read all that there are takes longest
    sums.write_text("\n".join(json.dumps(row) for row in add_prompts()[0][:320]))
    prompts = ("--prompts", str(sums))
    SCRIPTS[script].main([*SMALL, *prompts, *flags, "--output_dir", str(folder)])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Decoding rounds otherwise in tensors of one shape: the log-probs as drawn differ by that.
    left_out = (*MEASURED, "val/sampler", "sampler_logprobs")
    if (tokens := folder / "tokens.jsonl").exists():
        lines += [json.loads(line) for line in tokens.read_text().splitlines()]
    lines = [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in lines]
    return lines, (folder / "samples.jsonl").read_text()


@pytest.mark.parametrize(
    "command",
    [
        "ppo --lora_r 2 --num_epochs 2 --num_mini_batches 2 --micro_batch_size 3",
        "grpo --disable_dropout false --num_mini_batches 2 --micro_batch_tokens 40",
        "rloo --gradient_checkpointing --num_mini_batches 2 --rollout_batch_size 8 --record_tokens",
        *(
            pytest.param(command, marks=pytest.mark.slow)
            for command in (
                "ppo --record_tokens",
                "grpo --record_tokens",
                "rloo",
                "rloo --lora_r 2 --merge_adapter --save_best",
                "grpo --kl_coef 0 --num_epochs 2 --num_mini_batches 2 --loss_type dapo",
                "ppo --kl_coef 0 --whiten_rewards --missing_eos_penalty 1 --max_new_tokens 20",
                "grpo --bf16 false --max_new_tokens 20 --temperature 1.5",
            )
        ),
    ],
)
def test_a_run_on_the_device_equals_one_on_the_cpu_to_the_bit(command, tmp_path):
    script, *flags = command.split()
    expected = train(script, tmp_path / "cpu", *flags, "--device", "cpu")
    with pretended_cuda() as gpu:
        found = train(script, tmp_path / "cuda", *flags, "--device", "cuda")
    assert found[0] == expected[0] and found[1] == expected[1]
    assert gpu.replays > 10, "the decode loop ran without CUDA graphs"
    assert len([x for x in found[0] if "eval/reward" in x]) == 2 and found[0][0]["grad_norm"] > 0


def test_a_run_that_is_resumed_on_the_device_equals_one_on_the_cpu_to_the_bit(
    tmp_path, monkeypatch
):
    expected = train("ppo", tmp_path / "cpu", "--device", "cpu")
    log = Run.log

    def stop(self, step, line):
        log(self, step, line)
        self.signals.number = 2 if step == 1 else None

    with pretended_cuda():
        with monkeypatch.context() as m, pytest.raises(Interrupted):
            m.setattr(Run, "log", stop)
            train("ppo", tmp_path / "cuda", "--device", "cuda")
        found = train("ppo", tmp_path / "cuda", "--device", "cuda", "--resume")
    assert found == expected


def test_a_reward_model_on_the_device_gives_the_scores_of_the_cpu(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=64, num_labels=1,
        pad_token_id=0, bos_token_id=None, eos_token_id=19,
    )  # fmt: skip
    torch.manual_seed(0)
    judge = save_model(
        tmp_path / "judge",
        transformers.GPT2ForSequenceClassification(config),
        letter_tokenizer(),
    )
    model = save_model(tmp_path / "m", small_llama(vocab_size=20), letter_tokenizer())
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": x}) for x in "abcdehno"))
    flags = ["--model", model, "--prompts", str(tmp_path / "p.jsonl"), "--reward_model", judge]
    flags += ["--max_new_tokens", "6", "--bf16", "false"]
    expected, _ = train("ppo", tmp_path / "cpu", *flags, "--device", "cpu")
    with pretended_cuda():
        found, _ = train("ppo", tmp_path / "cuda", *flags, "--device", "cuda")
    assert found[0]["objective/scores"] == pytest.approx(expected[0]["objective/scores"], abs=1e-6)


def test_training_a_reward_model_on_the_device_equals_the_cpu_and_waits_twice_a_step(
    tmp_path, monkeypatch
):
    """For the norm of the gradient, and for the metrics: whatever the micro-batches."""
    job, log, waits = reward_model_job(tmp_path), Run.log, []
    flags = {"center_rewards_coef": 0.1, "num_steps": 4, "eval_every": 10}
    expected = job(**flags)
    for size in (16, 2):
        with pretended_cuda() as gpu:

            def noted(self, step, line, gpu=gpu):
                waits.append(gpu.waits.total())
                log(self, step, line)

            monkeypatch.setattr(Run, "log", noted)
            found = job(**flags, device="cuda", micro_batch_size=size)
            monkeypatch.setattr(Run, "log", log)
        assert [b - a for a, b in itertools.pairwise(waits[:4])] == [2, 2, 2]
        waits.clear()
        for a, b in zip(expected, found, strict=True):
            for name in (x for x in a if not x.startswith(MEASURED)):
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name


FAMILIES = {
    "Llama": {"tie_word_embeddings": True},
    "Gemma3Text": {"sliding_window": 4, "sliding_window_pattern": 2},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}


@pytest.mark.parametrize(
    ("family", "script"),
    [
        ("Llama", "ppo"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in itertools.product(FAMILIES, ("ppo", "grpo"))
            if pair != ("Llama", "ppo")
        ),
    ],
)
def test_other_architectures_agree_with_the_cpu_to_rounding(family, script, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=20, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=19, pad_token_id=0, **FAMILIES[family],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    folder = save_model(tmp_path / "m", model, letter_tokenizer())
    (tmp_path / "p.jsonl").write_text(
        "\n".join(json.dumps({"prompt": x}) for x in ("a", "the", "xyz", "q", "rs", "no", "b", "e"))
    )
    (tmp_path / "reward.py").write_text(
        "def spread(completions, completion_ids, **columns):\n"
        "    return [sum(ids) % 7 - 3.0 for ids in completion_ids]\n"
    )
    flags = ["--model", folder, "--prompts", str(tmp_path / "p.jsonl"), "--bf16", "false"]
    flags += ["--reward", f"{tmp_path}/reward.py:spread", "--max_new_tokens", "12"]
    flags += ["--num_mini_batches", "2", "--learning_rate", "1e-3", "--kl_coef", "0.1"]
    expected, texts = train(script, tmp_path / "cpu", *flags, "--device", "cpu")
    with pretended_cuda() as gpu:
        found, their_texts = train(script, tmp_path / "cuda", *flags, "--device", "cuda")
    assert gpu.replays > 10 and their_texts == texts
    for line, other in zip(found, expected, strict=True):
        unknown = [{name for name, value in x.items() if value is None} for x in (line, other)]
        assert unknown[0] == unknown[1]
        line, other = ({name: value or 0.0 for name, value in x.items()} for x in (line, other))
        assert line == pytest.approx(other, rel=1e-3, abs=1e-5)


# --- What waits for the device ---


def waits_per_step(
    script: str, folder: Path, *flags: str, evaluations: list[Counter] | None = None
) -> list[Counter]:
    """Of each step, without what comes before the first; those of evaluations and of the records
    after them go to a list of their own.
    """
    found, before = [], {"waits": Counter()}
    log = Run.log
    with pretended_cuda() as gpu, pytest.MonkeyPatch.context() as m:

        def apart(method):
            def wrapped(*args):
                start, result = gpu.waits.copy(), method(*args)
                before["waits"] = gpu.waits.copy()
                if evaluations is not None:
                    evaluations.append(gpu.waits - start)
                return result

            return wrapped

        def logged(self, step, line):
            log(self, step, line)
            if "objective/scores" in line:
                found.append(gpu.waits - before["waits"])
            before["waits"] = gpu.waits.copy()

        m.setattr(Run, "evaluate", apart(Run.evaluate))
        m.setattr(Run, "show", apart(Run.show))
        m.setattr(Run, "log", logged)
        train(
            script, folder, *flags, "--device", "cuda", "--sample_every", "100", "--record_tokens"
        )
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_waits_for_the_device_a_few_times_whatever_the_micro_batches(script, tmp_path):
    """The decode loop looks every eighth token whether rows are left, and an optimiser step needs
    to know that its gradient is finite; all metrics leave the device together.
    """
    flags = [] if script == "ppo" else ["--num_generations", "8"]
    evaluations = []
    whole = waits_per_step(script, tmp_path / "a", *flags, evaluations=evaluations)
    cut = waits_per_step(script, tmp_path / "b", *flags, "--micro_batch_size", "2")
    updates = {"ppo": 8, "grpo": 1, "rloo": 1}[script]
    # Prefill, the rollout's copy, the lap; RLOO the KL of each completion; and the metrics.
    bound = {"ppo": 4, "grpo": 4, "rloo": 5}[script] + updates
    assert bound <= 12
    for step in (*whole, *cut):
        assert 2 < step.total() <= bound, step
    assert [x.total() for x in whole] == [x.total() for x in cut]
    largest = sorted(x.total() for x in evaluations)[-2:]  # an evaluation, and a record after it
    share = sum(largest) / 3  # every third step, as the shortest runs do
    assert 0 < bound + share <= 20, largest


def test_of_a_long_completion_every_eighth_token_is_waited_for(tmp_path):
    short = waits_per_step("grpo", tmp_path / "a", "--max_new_tokens", "7")
    never = ["--max_new_tokens", "39", "--reward", "brevity", "--temperature", "3"]
    long = waits_per_step("grpo", tmp_path / "b", *never)
    assert long[0].total() - short[0].total() <= 39 // 8


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_cache_is_cleared_between_the_phases_of_a_step(script, tmp_path, monkeypatch):
    """And where the device has no work left, so that nothing waits for it: see waits_per_step."""
    order, module = [], SCRIPTS[script]
    with pretended_cuda() as gpu, monkeypatch.context() as m:
        m.setattr(torch.cuda, "empty_cache", lambda: order.append("clear"))
        for name in ("sample", "micro_batches", "step_metrics"):
            original = getattr(module, name)

            def noted(*args, name=name, original=original, **kwargs):
                order.append(name)
                return original(*args, **kwargs)

            m.setattr(module, name, noted)
        flags = ["--num_mini_batches", "1", "--num_epochs", "1"]
        train(script, tmp_path / "r", "--device", "cuda", *flags)
    assert order == ["sample", "clear", "micro_batches", "step_metrics", "clear"] * 2
    assert gpu.replays > 0


# --- Mistakes that only a device shows ---


def cpu_mask(m: pytest.MonkeyPatch) -> None:
    original = sampling.completion_mask
    m.setattr(sampling, "completion_mask", lambda *args: original(*args).cpu())


def cpu_generator(m: pytest.MonkeyPatch) -> None:
    original = grpo.sampling_options

    def options(*args):
        return original(*args) | {"generator": torch.Generator().manual_seed(0)}

    m.setattr(grpo, "sampling_options", options)


def cpu_rows(m: pytest.MonkeyPatch) -> None:
    original = forward._part
    m.setattr(forward, "_part", lambda rollout, rows: (rows, original(rollout, rows)[1]))


def numpy_of_scores(m: pytest.MonkeyPatch) -> None:
    original = metrics.objective_metrics

    def with_numpy(scores, kl, logprobs, mask, kl_coef):
        logprobs.numpy()
        return original(scores, kl, logprobs, mask, kl_coef)

    m.setattr(metrics, "objective_metrics", with_numpy)


@pytest.mark.parametrize("mistake", [cpu_mask, cpu_generator, cpu_rows, numpy_of_scores])
def test_a_tensor_or_generator_of_the_other_device_is_an_error(mistake, tmp_path, monkeypatch):
    with pretended_cuda(), pytest.raises((RuntimeError, TypeError)):
        mistake(monkeypatch)
        train("grpo", tmp_path / "r", "--device", "cuda")


def test_a_wait_while_a_graph_is_captured_leaves_the_decode_loop_without_graphs(
    tmp_path, monkeypatch
):
    original = decoding._next_logits

    def waiting(model, tokens, mask, cache, **options):
        int(tokens.max())
        return original(model, tokens, mask, cache, **options)

    monkeypatch.setattr(decoding, "_next_logits", waiting)
    with pretended_cuda() as gpu, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train("grpo", tmp_path / "r", "--device", "cuda")
    assert gpu.replays == 0
    assert any("without CUDA graphs" in str(w.message) for w in caught)


def test_a_wait_for_every_token_is_counted(tmp_path, monkeypatch):
    original = sampling.draw

    def waiting(logits, *args):
        if logits.max().item() > 1e9:
            raise AssertionError
        return original(logits, *args)

    right = waits_per_step("grpo", tmp_path / "a")
    monkeypatch.setattr(sampling, "draw", waiting)
    wrong = waits_per_step("grpo", tmp_path / "b")
    assert wrong[0].total() - right[0].total() >= 4


@pytest.mark.parametrize("name", ["tokens", "mask", "column"])
def test_a_tensor_that_is_replaced_while_a_graph_holds_its_address_is_stale(
    name, tmp_path, monkeypatch
):
    expected = train("grpo", tmp_path / "cpu", "--device", "cpu")
    original = decoding.StaticStep.__call__

    def replacing(self, *args):
        setattr(self, name, getattr(self, name).clone())
        return original(self, *args)

    monkeypatch.setattr(decoding.StaticStep, "__call__", replacing)
    with pretended_cuda():
        found = train("grpo", tmp_path / "cuda", "--device", "cuda")
    assert found != expected


@contextlib.contextmanager
def captured(graph):
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def test_the_device_is_as_strict_as_a_real_one():
    on_cpu, is_there = torch.ones(3), torch.cuda.is_available()
    with pretended_cuda() as gpu:
        x = torch.arange(3.0, device="cuda", requires_grad=True)
        assert x.device == CUDA and (2 * x).view(3, 1).device == CUDA and x.is_cuda
        assert on_cpu.device.type == "cpu" and torch.ones(2).device.type == "cpu"
        (x**2).sum().backward()
        assert x.grad.device == CUDA
        assert (x + torch.tensor(1.0)).device == CUDA, "a scalar may come from the CPU"
        with pytest.raises(RuntimeError, match="on the CPU"):
            x + on_cpu
        with pytest.raises(RuntimeError, match="on the CPU"):
            x[torch.tensor([0, 1])]
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(2, device="cuda", generator=Generator("cpu"))
        with pytest.raises(TypeError):
            x.detach().numpy()
        assert not gpu.waits
        x.sum().item(), x.tolist(), x.cpu(), x[x > 1], torch.tensor([1], device="cuda")
        on_cpu.to("cuda"), torch.cuda.synchronize(), bool(x.isfinite().all()), x.nonzero()
        assert gpu.waits.total() == 9
        on_cpu.to("cuda", non_blocking=True)
        assert gpu.waits.total() == 9
        y = x.detach().clone()
        y[0] = torch.tensor(7.0)
        y[:2] = 0.0
        assert gpu.waits.total() == 10, "a copy into a tensor waits as well"
        with pytest.raises(RuntimeError, match="on the CPU"):
            torch.stack([y[0], torch.tensor(1.0)])
        graph, total = torch.cuda.CUDAGraph(), torch.zeros((), device="cuda")
        with pytest.raises(RuntimeError, match="non-default stream"):
            graph.capture_begin()
        with captured(graph):
            doubled = 2 * x.detach()
            total += doubled.sum()
        assert total.cpu() == 0 and doubled.cpu().isnan().all(), "capturing runs nothing"
        x.data.add_(1)
        graph.replay()
        assert total.cpu() == 12 and doubled.tolist() == [2, 4, 6]
        for forbidden in (lambda: x.sum().item(), lambda: on_cpu.to("cuda", non_blocking=True)):
            with pytest.raises(RuntimeError, match="capture"), captured(torch.cuda.CUDAGraph()):
                forbidden()
        with pytest.raises(RuntimeError, match="captures_underway"):
            torch.cuda.empty_cache()
    assert torch.ones(1).device.type == "cpu" and torch.cuda.is_available() == is_there


@pytest.mark.slow
def test_the_benchmark_for_a_gpu_is_rehearsed_without_an_error(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import gpu

    run = subprocess.run

    def without_tests(command, **options):
        """These tests are running already."""
        if "pytest" not in command:
            return run(command, **options)
        assert (REPOSITORY / command[-1]).exists()
        output = "FAILED tests/test_cuda.py::test_a - it is\n1 failed, 2 passed in 3.4s\n"
        return subprocess.CompletedProcess(command, 1, stdout=output)

    monkeypatch.setattr(subprocess, "run", without_tests)
    gpu.main(["--rehearse"])
    printed = capsys.readouterr().out
    for found in (
        "2 passed in 3.4s; failed: `tests/test_cuda.py::test_a`",
        "| rows | ours |",
        "| with clear_cache |",
        "| grpo, ours |",
        "| ppo, ours |",
    ):
        assert found in printed
