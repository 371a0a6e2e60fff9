"""The problems of the assignment: which function of which file is written, and a hint each.

A function is found by its name, a step of a loop by the number of its comment: no marker clutters
the solution, which is the repository itself. The points of a problem are those of its properties:
the tests of tests/ that have the mark @pytest.mark.problem(name, points).
"""

from __future__ import annotations

import ast
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# The program, without its tests and docs: a list, so that nothing else of a folder is handed out.
# Tests compare the loops with the pages of one_page/.
PROGRAM = """common.py forward.py grpo.py ppo.py reward_model.py rloo.py sampling.py tasks.py
requirements.txt plumbing/__init__.py plumbing/errors.py plumbing/decoder.py plumbing/config.py
plumbing/curves.py plumbing/data.py plumbing/metrics.py plumbing/models.py
one_page/dpo.py one_page/grpo.py one_page/ppo.py one_page/reward_model.py one_page/rloo.py
one_page/sft.py one_page/tool.py
plumbing/preferences.py plumbing/run.py tools/__init__.py tools/look.html tools/look.py
tools/exact.py tools/to_trl.py tiny/README.md tiny/config.json tiny/generation_config.json
tiny/make.py tiny/model.safetensors tiny/temperature.py tiny/tokenizer.json
tiny/tokenizer_config.json tiny/cups/config.json tiny/cups/generation_config.json
tiny/cups/model.safetensors tiny/cups/tokenizer.json tiny/cups/tokenizer_config.json""".split()


@dataclass(frozen=True)
class Problem:
    """A function of a file to be written, with a hint; of `main` only this step. Without a hint it
    is a script of the submission, as a whole.
    """

    name: str
    file: str
    what: str
    hint: str = ""
    step: str = ""

    @property
    def function(self) -> str:
        return "main" if self.step else self.name if self.hint else ""

    @property
    def place(self) -> str:
        return self.file + (f", step {self.step} of `main`" if self.step else "")

    @property
    def properties(self) -> dict[str, int]:
        """{test: points}, a test as file::function."""
        return marked_tests()[self.name]

    @property
    def points(self) -> int:
        return sum(self.properties.values())

    @property
    def test_files(self) -> list[str]:
        return sorted({f"tests/{test.partition('::')[0]}" for test in self.properties})

    @property
    def test_command(self) -> str:
        return f"python -m pytest tests --problem {self.name}"


@functools.cache
def marked_tests() -> dict[str, dict[str, int]]:
    """{problem: {test: points}} of all tests with a mark; of some ids of a test: `test [ids]`."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted((REPOSITORY / "tests").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in getattr(node, "decorator_list", []):
                if ast.unparse(mark).startswith("pytest.mark.problem("):
                    name, points, *ids = map(ast.literal_eval, mark.args)
                    part = f"{path.name}::{node.name}" + "".join(f" [{x}]" for x in ids)
                    found.setdefault(name, {})[part] = points
    return found


PROBLEMS = [
    Problem(
        "token_logprobs", "common.py", "log-probs of given tokens",
        "The log-prob of a token is its logit less the log of the sum of all exponentials. There is"
        " a function for it along the last dimension; then pick one entry per token, by gather.",
    ),
    Problem(
        "kl_estimate", "common.py", "k1, k2 and k3",
        "k3 is the difference between two numbers that are nearly equal where d is small: how does"
        " torch compute exp(x) - 1 without losing digits?",
    ),
    Problem(
        "completion_mask", "common.py", "where a completion ends",
        "A position counts if no EOS comes strictly before it. A cumulative sum counts the EOS up"
        " to and including a position.",
    ),
    Problem(
        "masked_whiten", "common.py", "whitening under a mask",
        "What lies off the mask may be anything, and 0 * NaN is NaN: fill, don't multiply. The"
        " variance divides by the number of real entries less 1, and never by 0.",
    ),
    Problem(
        "disable_dropout", "common.py", "dropout off, all of it",
        "nn.Dropout modules are only one of three places. Modules may also have a probability as a"
        " float attribute (there is a helper), or read it from a config that they share with the"
        " model: they get a copy of it, for the config that is saved must stay as it is.",
    ),
    Problem(
        "reference", "common.py", "which reference model there is",
        "What is returned is called at each step, and gives a context manager. There are four"
        " cases: no KL, a named model, a new adapter, everything else. contextlib.nullcontext lends"
        " what you put into it; functions below this one copy a model and switch an adapter off.",
    ),
    Problem(
        "decode", "sampling.py", "the sampling loop",
        "draw() takes logits and a uniform number for each row; step() reads the tokens that were"
        " drawn and draws the next ones. A row that has ended may go on: what it draws then is cut"
        " off by `generate`. Dropping such rows only saves time.",
    ),
    Problem(
        "completion_logprobs", "forward.py", "log-probs of a completion by the training forward",
        "The logits at a position are about the token that comes after it. So which column of"
        " logits belongs to the first token of the completion? Prompts are padded on the left:"
        " model_inputs makes the position ids from the mask. autocast is used as in"
        " completion_values below.",
    ),
    Problem(
        "shape_rewards", "ppo.py", "PPO: rewards per token",
        "The last real token of a row is where the cumulative sum of the mask reaches its total.",
    ),
    Problem(
        "gae", "common.py", "generalised advantage estimation",
        "The recursion runs from the last token to the first. After the last real token of a row V"
        " and A are 0, whatever the value model says there: fill first, then recurse.",
    ),
    Problem(
        "policy_loss", "ppo.py", "PPO: the clipped surrogate",
        "The paper maximises a minimum, you minimise a maximum: of two losses, one with the ratio"
        " and one with the clipped ratio, both times the negative advantage.",
    ),
    Problem(
        "value_loss", "ppo.py", "PPO: the clipped value loss",
        "As with the policy: the worse of a free and a clipped prediction, which stays within"
        " clip_range_value of the old value.",
    ),
    Problem(
        "ppo_loop", "ppo.py", "PPO: rewards and advantages in the loop",
        "The advantages are whitened, the returns aren't: the value model must learn the real"
        " rewards.",
        step="4",
    ),
    Problem(
        "schedule", "common.py", "the learning rate of a step",
        "Two straight lines. At which step does the share have to be 1, and what would it be at the"
        " step after the last one?",
    ),
    Problem(
        "group_advantages", "grpo.py", "GRPO: advantages in the group",
        "Rewards may be NaN: nanmean and nansum leave them out, count those that are known. Equal"
        " rewards must give exactly 0, whatever rounding does: is_flat finds them.",
    ),
    Problem(
        "grpo_loss", "grpo.py", "GRPO: the loss and its variants",
        "A loss per token, then one of three ways to average it over the minibatch, whose counts"
        " are given so that shares of micro-batches add up. gspo has one ratio a row, that of the"
        " mean log-ratio of its tokens. cispo takes -A * min(ratio, cispo_bound) * logprobs, its"
        " weight without gradient, for the clipped surrogate. The unbiased KL is k3 times the ratio"
        " of the token.",
    ),
    Problem(
        "grpo_loop", "grpo.py", "GRPO: the update in the loop",
        "First the rate of this step. Each epoch is a new order of the rows, cut into minibatches,"
        " each of them one optimiser step over micro-batches. The loops and the metrics are there:"
        " fill in what they need. With a single update per rollout the old log-probs are the new"
        " ones, without gradient.",
        step="5",
    ),
    Problem(
        "rloo_advantages", "rloo.py", "RLOO: the leave-one-out baseline",
        "The baseline of a completion is the mean reward of its siblings. The sum of the others is"
        " the sum of all less one's own; a NaN is nobody's sibling.",
    ),
    Problem(
        "rloo_loss", "rloo.py", "RLOO: the loss",
        "A completion is one action: its log-prob is the sum of its tokens', padding left out. The"
        " mean over rows divides by num_rows, so that shares of micro-batches add up.",
    ),
    Problem(
        "rloo_loop", "rloo.py", "RLOO: rewards and advantages in the loop",
        "The KL is part of the reward, summed over the completion.",
        step="4",
    ),
    Problem(
        "preference_loss", "reward_model.py", "reward models: the loss of pairs",
        "For a pair that is badly wrong the sigmoid is 0 in float32, and its log minus infinity:"
        " there is a function for the log of a sigmoid.",
    ),
    Problem(
        "last_real_token", "plumbing/preferences.py", "reward models: where a text is scored",
        "The mask says where it is, the ids don't: pad may be a token that the text has as well,"
        " and the row that fills the width has no padding.",
    ),
]  # fmt: skip
# A submission as a whole: all of its files together, in a short run of each script.
SCRIPTS = [
    Problem(name, file, f"{file} runs two steps, and learns in a short run")
    for name, file in (
        ("ppo_script", "ppo.py"), ("grpo_script", "grpo.py"), ("rloo_script", "rloo.py"),
        ("reward_script", "reward_model.py"),
    )
]  # fmt: skip
BY_NAME = {problem.name: problem for problem in [*PROBLEMS, *SCRIPTS]}
# What is due at the end of each week of the plan in course/README.md. Week 5 has questions alone.
WEEKS = {
    1: "token_logprobs kl_estimate completion_mask masked_whiten decode completion_logprobs",
    2: "disable_dropout reference rloo_advantages rloo_loss schedule rloo_loop rloo_script",
    3: "shape_rewards gae policy_loss value_loss ppo_loop ppo_script group_advantages"
    " preference_loss last_real_token reward_script",
    4: "grpo_loss grpo_loop grpo_script",
}
FILES = sorted({problem.file for problem in PROBLEMS})  # those that have something to write
SHARED = [file for file in FILES if file not in {script.file for script in SCRIPTS}]


@functools.cache
def commit() -> str:
    """The commit that this repository is at, `-dirty` if it was changed; "" where git can't say.
    The autograder of Gradescope is no repository: there a file says it.
    """
    if (file := REPOSITORY / "version.txt").exists():
        return file.read_text(encoding="utf-8").strip()
    # Of full length, without tags: so that every clone says the same.
    command = "git describe --always --dirty --exclude=* --abbrev=40".split()
    options = {"cwd": REPOSITORY, "capture_output": True, "text": True, "check": True}
    try:
        return subprocess.run(command, **options).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class NotFound(Exception):
    """A file lacks a function or a step: one line that says which."""


def function_of(source: str, name: str) -> ast.FunctionDef:
    """The top-level function `name` of a source that parses. Raises NotFound."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise NotFound(f"there is no function {name}")
