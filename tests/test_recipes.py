"""docs/recipes.md: every command as it stands, on small models and a few rows under the same names,
and its figures of memory."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from small import byte_tokenizer, save_model, small_gpt2
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import grpo
import ppo
import rloo
from tools import evaluate, fit

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
MAINS = {"ppo": ppo.main, "grpo": grpo.main, "rloo": rloo.main, "evaluate": evaluate.main}
SMALL = """--num_steps 1 --prompts_per_step 4 --max_new_tokens 6 --num_eval_prompts 10
--micro_batch_tokens 2048 --rollout_batch_size 16 --bf16 false --device cpu""".split()


def blocks() -> list[str]:
    """The indented blocks of the page."""
    found = re.findall(r"(?:^    .*\n(?:(?:    .*)?\n)*)", PAGE, re.MULTILINE)
    return ["".join(f"{line[4:]}\n" for line in b.rstrip().split("\n")) for b in found]


COMMANDS = [b.replace("\\\n", " ").strip() for b in blocks() if b.startswith("python ")]
FILES = {
    name: next(b for b in blocks() if PAGE.index(f"`{name}`:") < PAGE.index(b.split("\n")[0]))
    for name in ("gsm8k.txt", "countdown.txt", "countdown.py", "reviews.py")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the commands name, as folders of the same names: models, datasets, files."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    path = tmp_path_factory.mktemp("recipes")
    chat = byte_tokenizer()
    chat.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=1024, eos_token_id=256,
            bos_token_id=None,
        )
    )  # fmt: skip
    for name in ("0.5B", "1.5B"):
        save_model(path / "Qwen" / f"Qwen2.5-{name}-Instruct", model, chat)
    trained = "runs/grpo-Qwen-Qwen2.5-0.5B-Instruct-gsm8k-s0/model"
    save_model(path / "trained" / trained, model, chat)
    save_model(path / "gpt2", small_gpt2(vocab_size=257), byte_tokenizer())
    size = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    judge = BertForSequenceClassification(BertConfig(vocab_size=257, num_labels=2, **size))
    words = byte_tokenizer()
    words.pad_token = words.eos_token
    save_model(path / "lvwerra" / "distilbert-imdb", judge, words)
    for split in ("train", "test"):
        lines = (REPOSITORY / f"tests/gsm8k/{split}.jsonl").read_text().splitlines()
        rows = datasets.Dataset.from_list([json.loads(line) for line in lines])
        (path / "openai/gsm8k/main").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(path / f"openai/gsm8k/main/{split}-00000-of-00001.parquet")
    rows = [{"target": 98, "nums": [44, 19, 35]}, {"target": 6, "nums": [1, 2, 3]}] * 10
    (path / "Jiayi-Pan/Countdown-Tasks-3to4/data").mkdir(parents=True)
    file = path / "Jiayi-Pan/Countdown-Tasks-3to4/data/train-00000-of-00001.parquet"
    datasets.Dataset.from_list(rows).to_parquet(file)
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


def test_the_page_has_a_command_for_each_job():
    scripts = [Path(shlex.split(c)[1]).stem for c in COMMANDS]
    assert scripts == ["ppo", "grpo", "rloo", "evaluate", "grpo", "grpo", "ppo"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c.split()[1:4]))
def test_each_command_runs_as_it_stands(command, folder, tmp_path, monkeypatch, capsys):
    for part in folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    if "runs/" in command:
        (tmp_path / "runs").symlink_to(folder / "trained" / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    program, *flags = shlex.split(command)[1:]
    script = Path(program).stem
    scripts_alone = ("--num_steps", "--prompts_per_step", "--micro_batch_tokens")
    pairs = list(zip(SMALL[::2], SMALL[1::2]))
    pairs = [p for p in pairs if script != "evaluate" or p[0] not in scripts_alone]
    small = [x for pair in pairs for x in pair]
    if "--overlong_buffer" in flags:
        small += ["--overlong_buffer", "4"]
    MAINS[script]([*flags, *small])
    out = capsys.readouterr().out
    if script == "evaluate":
        assert "10 prompts: eval/reward" in out and "pass@8" in out and "standard error" in out
        return
    (run,) = (tmp_path / "runs").iterdir()
    first, *_ = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    if "gsm8k" in command:
        assert "30 prompts to train on, 10 held out" in out
        assert first["eval/accuracy"] is not None and first["eval/accuracy_se"] is not None
        (message,) = samples[0]["prompt"]
        assert message["role"] == "user" and "####" in FILES["gsm8k.txt"]
        assert message["content"].endswith("?\n" + FILES["gsm8k.txt"].split("\n")[1])
    if "Countdown" in command:
        assert "Using the numbers [44, 19, 35], write an equation that equals 98." in str(samples)


def test_the_reward_of_countdown_reads_an_equation_and_runs_nothing_else(tmp_path):
    functions = {}
    exec(FILES["countdown.py"], functions)

    def score(text, nums=(3, 5, 2), target=16):
        message = [{"role": "assistant", "content": text}]
        return functions["right"]([message], nums=[list(nums)], target=[target])[0]

    assert score("so <answer> (3 + 5) * 2 </answer>") == 1
    assert score("<answer>1</answer> <answer>2*(5+3)</answer>") == 1
    for text in (
        "(3 + 5) * 2", "<answer>(3 + 5) * 2", "<answer>3 + 5 * 2</answer>", "<answer>16</answer>",
        "<answer>(3 + 5) * 2 + 2 - 2</answer>", "<answer>(3 + 5 * 2</answer>",
        "<answer>exit()</answer>", "<answer>3(5) + 2</answer>", "<answer>35 ** 2</answer>",
        "<answer>" + "-" * 3000 + "3 + 5 + 2</answer>",
    ):  # fmt: skip
        assert score(text) == 0, text
    assert score("<answer>3 / (5 - 5)</answer>", (3, 5, 5)) == 0
    assert score("<answer>64**95**44</answer>", (64, 95, 44), 5) == 0, "and at once"
    assert (
        score("<answer>7//2</answer>", (7, 2), 3) == score("<answer>1.5</answer>", (1, 5), 1.5) == 0
    )


def test_the_figures_of_memory_are_those_of_the_tool(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import memory

    configs = {"Qwen/Qwen2.5-0.5B-Instruct": "Qwen2.5-0.5B", "gpt2": "gpt2"}
    configs["Qwen/Qwen2.5-1.5B-Instruct"] = "Qwen2.5-1.5B"
    monkeypatch.chdir(tmp_path)
    for name, key in configs.items():
        memory.MODELS[key].save_pretrained(tmp_path / name)
    found = []
    for command in (c for c in COMMANDS if "evaluate" not in c):
        program, *flags = shlex.split(command)[1:]
        tokens = {"gpt2": "16"}.get(flags[1], "200")
        fit.main(["--script", Path(program).stem, "--prompt_tokens", tokens, *flags])
        found.append(re.search(r"peak +([\d.]+) GB", capsys.readouterr().out)[1])
    expected = re.findall(r"About (\d+(?:\.\d+)?) GB", PAGE)
    assert [f"{float(x):.0f}" for x in found] == [f"{float(x):.0f}" for x in expected]
