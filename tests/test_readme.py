"""What README.md and docs/running.md tell a reader to type: every command, with the files that the
README writes.
"""

import re
import shlex
from pathlib import Path

import pytest
from small import byte_tokenizer, save_model, small_gpt2

import grpo
import ppo
import reward_model
import rloo
from tools import evaluate, fit, inspect_reward, look, plot

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = README + (REPOSITORY / "docs" / "running.md").read_text(encoding="utf-8")
MAINS = {
    "ppo": ppo.main, "grpo": grpo.main, "rloo": rloo.main, "plot": plot.main,
    "inspect_reward": inspect_reward.main, "fit": fit.main,
    "evaluate": evaluate.main, "reward_model": reward_model.main, "look": look.main,
}  # fmt: skip
SHORT = "--num_steps 1 --prompts_per_step 4 --num_eval_prompts 2 --max_new_tokens 4".split()
SAYS = {"inspect_reward": "scores: mean", "fit": "80 GB", "evaluate": "2 prompts: eval/reward"}
SAYS |= {"look": "look.html"}
EVALUATE = "--num_eval_prompts 2 --max_new_tokens 4".split()
JUDGE = "--num_steps 1 --pairs_per_step 2 --num_eval_pairs 2".split()
PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
INSPECT = "--num_prompts 2 --num_generations 2 --max_new_tokens 4".split()


def commands() -> list[str]:
    """The commands in blocks and in the text, without the installation before them."""
    blocks = re.findall(r"^    (?:pip .* && )?(python .*)$", PAGES, re.MULTILINE)
    inline = re.findall(r"`(python [^`]*)`", PAGES)
    return sorted({c.split("  #")[0] for c in blocks + inline if "-m pytest" not in c})


def file_of(name: str) -> str:
    """The block that follows the file's name."""
    lines = README.split(f"`{name}`\n\n")[1].split("\n")
    block = [line[4:] for line in lines[: next(i for i, x in enumerate(lines) if not x)]]
    return "\n".join(block) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_each_command_runs(command, tmp_path, monkeypatch, capsys):
    """In a folder with a small model under the name gpt2, fewer steps, and a run to be plotted."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "gpt2", small_gpt2(vocab_size=257), byte_tokenizer())
    for name in ("my_prompts.jsonl", "my_rewards.py"):
        Path(name).write_text(file_of(name))
    program, *flags = shlex.split(command)[1:]
    script = Path(program).stem
    if "--help" in flags:
        with pytest.raises(SystemExit) as end:
            MAINS[script](flags)
        assert end.value.code == 0 and "--learning_rate" in capsys.readouterr().out
        return
    if script == "plot":
        ppo.main(SHORT)
        flags = [str(path) for flag in flags for path in tmp_path.glob(flag)]
    if script == "look":
        ppo.main(SHORT)
        grpo.main(SHORT)
        flags = ["runs/ppo-tiny-add-s0" if flag == "RUN" else flag for flag in flags]
    if "--reward_model" in flags:
        reward_model.main([*JUDGE, "--num_pairs", "2"])
    Path("my_pairs.jsonl").write_text(PAIR * 2)
    judge = JUDGE if "my_pairs.jsonl" in flags else [*JUDGE, "--num_pairs", "2"]
    more = {
        "reward_model": judge,
        "plot": [],
        "look": [],
        "inspect_reward": INSPECT,
        "fit": [],
        "evaluate": EVALUATE,
    }.get(script, SHORT)
    MAINS[script]([*flags, *more])
    if script in SAYS:
        assert SAYS[script] in capsys.readouterr().out
        return
    if "my_prompts.jsonl" in flags:
        assert "2 prompts to train on" in capsys.readouterr().out
    made = "curves.png" if script == "plot" else "runs/*/model/model.safetensors"
    assert list(tmp_path.glob(made))
