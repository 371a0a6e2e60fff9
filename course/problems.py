"""The problems of the assignment, and how a function is taken out of a file or put into it.

Functions are found by their name through `ast`, steps of a loop by the numbers of their comments:
no marker clutters the solution, which is the repository itself.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import symtable
import textwrap
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Problem:
    """A function of a file to be written; of `main` only the steps in `steps`. The hints go from
    the idea to a recipe.
    """

    name: str
    points: int
    file: str
    function: str
    what: str
    hints: tuple[str, str, str]
    steps: tuple[str, ...] = ()

    @property
    def test_command(self) -> str:
        """What tries the problem: the tests of its function, or two steps of its script."""
        if self.steps:
            return f"python {self.file} --num_steps 2 --num_eval_prompts 64 --overwrite"
        file, words = TESTS[self.name]
        return f'python -m pytest tests/{file} -k "{words}"'


PROBLEMS = [
    Problem(
        "token_logprobs", 4, "common.py", "token_logprobs", "log-probs of given tokens",
        (
            "The log-prob of a token is its logit less the log of the sum of all exponentials.",
            "There is a function for it along the last dimension; then pick one entry per token.",
            "Convert bfloat16 and float16 to float32 first; take the log of the softmax over the"
            " vocabulary; pick with gather, whose index needs a last dimension of size 1.",
        ),
    ),
    Problem(
        "kl_estimate", 5, "common.py", "kl_estimate", "k1, k2 and k3",
        (
            "All three are functions of d, the log-prob under the policy less that under the"
            " reference.",
            "k3 is the difference between two numbers that are nearly equal where d is small: how"
            " does torch compute exp(x) - 1 without losing digits?",
            "Write d once, then one case per estimator with the formulas above; k3 by expm1 of -d;"
            " any other name is a ValueError that says which names there are.",
        ),
    ),
    Problem(
        "completion_mask", 4, "common.py", "completion_mask", "where a completion ends",
        (
            "A position counts if no EOS comes strictly before it.",
            "How many EOS come before each position? A cumulative sum counts them up to and"
            " including it.",
            "Mark the tokens that are any of the EOS ids; from the cumulative sum along the row"
            " take the mark itself away; the mask is where that is 0.",
        ),
    ),
    Problem(
        "masked_whiten", 4, "common.py", "masked_whiten", "whitening under a mask",
        (
            "Mean and variance over the real entries alone; what lies off the mask may be anything,"
            " even NaN.",
            "0 * NaN is NaN: fill, don't multiply. The variance divides by the number of entries"
            " less 1.",
            "Take the masked mean off and fill with 0 off the mask; the variance is the sum of the"
            " squares over (count - 1), at least 1; multiply by 1 / sqrt(variance + 1e-8); add the"
            " mean again where it is not to be shifted; 0 off the mask.",
        ),
    ),
    Problem(
        "disable_dropout", 4, "common.py", "disable_dropout", "dropout off, all of it",
        (
            "nn.Dropout modules are only one of three places where models keep a probability.",
            "Modules may also have it as a float attribute, or read it from a config that they"
            " share with the model; the config that is saved must stay as it is.",
            "For each module of each model: set p of dropout modules to 0; set float attributes"
            " whose name has drop or jitter in it to 0, by the helper that is there; give a module"
            " with a config of its own a shallow copy of it, made quiet the same way, but not the"
            " whole model; count what was above 0.",
        ),
    ),
    Problem(
        "reference", 5, "common.py", "reference", "which reference model there is",
        (
            "Three cases: no KL, a new adapter, everything else.",
            "A context manager that can be entered often and gives None, the policy with its"
            " adapter switched off, or a copy that never changes.",
            "contextlib.nullcontext gives what you put into it. Without KL: None. With a new"
            " adapter (there is a function that says so): the class AdapterOff. Else a copy by the"
            " function that shares what doesn't train, in evaluation mode and without gradients.",
        ),
    ),
    Problem(
        "generate", 9, "sampling.py", "generate", "the sampling loop",
        (
            "Read the prompts, then draw a token for each row, read it, and so on. Decoder of"
            " plumbing/decoding.py has the cache; a loop without one is right as well, and slower.",
            "All in evaluation mode and without gradients. Decoder takes the repeated prompts;"
            " prefill() gives the first logits, rows says which rows are left, step() reads what"
            " they drew and whether it ends them. Without it, model_inputs of plumbing/models.py"
            " makes the positions from the mask.",
            "Repeat each prompt num_generations times; take a uniform number for each row and token"
            " from the given generator; at each step draw() a token for the rows that are left and"
            " note it with its log-prob, and whether it ends the row: it is an EOS, or stop(the"
            " row's tokens, None) says so. Stop when step() gives None. At the end the mask is True"
            " up to the first end, the rest becomes pad_token_id, log-prob 0.",
        ),
    ),
    Problem(
        "shape_rewards", 4, "ppo.py", "shape_rewards", "PPO: rewards per token",
        (
            "Every real token pays for its KL; the last real one gets the score as well.",
            "The last real token of a row is where the cumulative sum of the mask reaches its"
            " total.",
            "Take -kl_coef * kl and fill it with 0 off the mask; add the scores, as a column, at"
            " the last real tokens.",
        ),
    ),
    Problem(
        "gae", 7, "common.py", "gae", "generalised advantage estimation",
        (
            "The recursion runs from the last token to the first.",
            "After the last real token of a row V and A are 0, whatever the value model says there:"
            " fill first, then recurse.",
            "Fill rewards and values with 0 off the mask; start with next value and next advantage"
            " 0; for t from the end: delta, then the advantage, 0 off the mask; keep them in order;"
            " the returns are advantages + values.",
        ),
    ),
    Problem(
        "policy_loss", 4, "ppo.py", "policy_loss", "PPO: the clipped surrogate",
        (
            "The paper maximises a minimum, you minimise a maximum.",
            "Two losses, one with the ratio, one with the clipped ratio, both times the negative"
            " advantage. The clip decides where the second is larger than the first.",
            "policy_ratio turns the difference of the log-probs into the ratio; clamp it to"
            " 1 - clip_range .. 1 + clip_range; return the larger of the two losses at each token,"
            " and where it is the clipped one.",
        ),
    ),
    Problem(
        "value_loss", 4, "ppo.py", "value_loss", "PPO: the clipped value loss",
        (
            "As with the policy: the worse of a free and a clipped prediction.",
            "The clipped prediction stays within clip_range_value of the old value.",
            "Clamp the values between old_values -+ clip_range_value; return half of the larger"
            " squared error, and where it is that of the clipped prediction.",
        ),
    ),
    Problem(
        "ppo_loop", 5, "ppo.py", "main", "PPO: rewards and advantages in the loop",
        (
            "Shape the rewards from scores and KL, then advantages and returns.",
            "The advantages are whitened, the returns aren't: the value model must learn the real"
            " rewards.",
            "shape_rewards; gae with gamma and lam; masked_whiten of the advantages.",
        ),
        steps=("4",),
    ),
    Problem(
        "group_advantages", 5, "grpo.py", "group_advantages", "GRPO: advantages in the group",
        (
            "The group's mean is the baseline. The difference is divided by the standard deviation"
            " of the group or of the batch plus 1e-4, by the group's mean, or not at all.",
            "Rewards may be NaN: nanmean and nansum leave them out, count those that are known."
            " Equal rewards must give exactly 0, whatever rounding does: is_flat finds them.",
            "Refuse groups of one with a ValueError; reshape to (N, G), at least float32; take the"
            " group's mean off, and fill flat groups with 0; divide by the standard deviation of"
            " the group or the batch plus 1e-4, by the mean (refuse rewards below 0 by an"
            " InputError), or not at all; 0 where it is NaN; flatten.",
        ),
    ),
    Problem(
        "grpo_loss", 8, "grpo.py", "grpo_loss", "GRPO: the loss and its variants",
        (
            "A loss per token, then one of three ways to average it over the minibatch. grpo and"
            " gspo: over the tokens of each completion, then over the completions; dapo and cispo:"
            " over all tokens; dr_grpo: the sum over rows times max_new_tokens. cispo takes"
            " -A * min(ratio, cispo_bound) * logprobs, its weight without gradient, for the clipped"
            " surrogate.",
            "importance_ratio gives the ratio: at the level of the sequence for gspo, of the token"
            " else. The counts come from the whole minibatch, so that shares of micro-batches add"
            " up. The clip decides at a token as in PPO; for cispo where the bound is below the"
            " ratio, and A isn't 0.",
            "Per token: the clipped surrogate, or that of cispo; plus kl_coef * k3; 0 off the mask."
            " Then: grpo and gspo the mean of each row, summed, over num_rows; dapo and cispo the"
            " sum over num_tokens; dr_grpo the sum over num_rows * max_new_tokens. Return it with"
            " the mask of the clip.",
        ),
    ),
    Problem(
        "grpo_loop", 9, "grpo.py", "main", "GRPO: the update in the loop",
        (
            "First set_learning_rate. Each epoch is a new order of the rows, cut into minibatches,"
            " each of them one optimiser step over micro-batches. The loops and the metrics are"
            " there: fill in what they need.",
            "Gradients of micro-batches add up, so zero them after the step alone; the shares need"
            " the counts of the whole minibatch. With a single update per rollout the old log-probs"
            " are the new ones, without gradient.",
            "Look at the same step of ppo.py or rloo.py, which you have: the same skeleton, with"
            " grpo_loss, the rows of ref_logprobs where there are any, num_rows and num_tokens.",
        ),
        steps=("5",),
    ),
    Problem(
        "rloo_advantages", 4, "rloo.py", "rloo_advantages", "RLOO: the leave-one-out baseline",
        (
            "The baseline of a completion is the mean reward of its siblings.",
            "The sum of the others is the sum of all less one's own; a NaN is nobody's sibling.",
            "Refuse groups of one with a ValueError; reshape to (N, G), at least float32; the"
            " baseline is (nansum - own) over (number of known - 1, at least 1), the advantage the"
            " reward less it; 0 in a group that is_flat, which one with a single known reward is,"
            " and where the reward is NaN; flatten.",
        ),
    ),
    Problem(
        "rloo_loss", 4, "rloo.py", "rloo_loss", "RLOO: the loss",
        (
            "A completion is one action: one ratio per row.",
            "policy_ratio of the sum of the log-ratios of its tokens, padding left out; the clip is"
            " that of PPO, on rows.",
            "The larger of -A * ratio and -A * clipped ratio, summed over the rows and divided by"
            " the number of rows of the whole minibatch; and in which rows it is the clipped one.",
        ),
    ),
    Problem(
        "rloo_loop", 4, "rloo.py", "main", "RLOO: rewards and advantages in the loop",
        (
            "In RLOO the KL is part of the reward, summed over the completion.",
            "Its estimate is k1, and (B, T): the reward is (B,). Where kl_coef is 0 there is no"
            " reference, and the reward is the score.",
            "kl by k1 where kl_coef is above 0; the rewards are the scores less kl_coef times the"
            " sum of a row of kl; then rloo_advantages; has_gradient is True where the advantage"
            " isn't 0, and everywhere if entropy_coef is above 0; on the CPU.",
        ),
        steps=("4",),
    ),
    Problem(
        "preference_loss", 4, "reward_model.py", "preference_loss",
        "reward models: the loss of pairs",
        (
            "The header has the formula: what is asked of a pair is that its two scores differ.",
            "For a pair that is badly wrong the sigmoid is 0 in float32, and its log minus"
            " infinity: there is a function for the log of a sigmoid.",
            "Take the rejected score and the margin off the chosen one; the negative log sigmoid"
            " of it; add center_rewards_coef times the square of the sum of both scores. No mean:"
            " the loop takes it.",
        ),
    ),
    Problem(
        "last_real_token", 3, "plumbing/preferences.py", "last_real_token",
        "reward models: where a text is scored",
        (
            "The mask says where it is, the ids don't: pad may be a token that the text has as"
            " well, and the row that fills the width has no padding.",
            "Number the columns from 1 and multiply by the mask: where is the largest number?",
            "The argmax along the row of mask times column number; then pick with one index per"
            " row, arange(B), beside it: that does for x of two and of three dimensions.",
        ),
    ),
]  # fmt: skip
BY_NAME = {problem.name: problem for problem in PROBLEMS}
# The repository's own tests come along with the starter: a file, and words in the names of the
# tests that are about the problem.
TESTS = {
    "token_logprobs": ("test_common.py", "logprobs or half_precision"),
    "kl_estimate": ("test_common.py", "k1 or k2 or k3 or estimator"),
    "completion_mask": ("test_common.py", "first_eos"),
    "masked_whiten": ("test_common.py", "whiten"),
    "gae": ("test_common.py", "gae or advantage or padding_never"),
    "disable_dropout": ("test_common.py", "dropout"),
    "reference": ("test_reference.py", "there_is_no_reference or it_is"),
    "generate": ("test_sampling.py", "eos or recorded or drawn or prompt or rows"),
    "shape_rewards": ("test_ppo.py", "score"),
    "policy_loss": ("test_ppo.py", "clip_stops or ratio"),
    "value_loss": ("test_ppo.py", "value"),
    "group_advantages": ("test_grpo.py", "advantages or group"),
    "grpo_loss": ("test_grpo.py", "loss or gradient or clip or cispo or shares"),
    "rloo_advantages": ("test_rloo.py", "baseline or advantages or group"),
    "rloo_loss": ("test_rloo.py", "loss or clip or ratio or shares"),
    "preference_loss": ("test_reward_model.py", "loss"),
    "last_real_token": ("test_reward_model.py", "last_real_token"),
}


class NotFound(Exception):
    """A file lacks a function or a step: one line that says which."""


def function_of(source: str, name: str) -> ast.FunctionDef:
    """The top-level function `name` of a source that parses. Raises NotFound."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise NotFound(f"there is no function {name}")


def solution_lines(source: str, problem: Problem) -> list[tuple[int, int]]:
    """The spans of lines, from 1, both ends included, that are the solution: the function's body
    after its docstring, or the code under the numbered comments of its steps. Of a step loops stay,
    and the statements that measure or tidy up, see GIVEN.
    """
    function = function_of(source, problem.function)
    if not problem.steps:
        first = function.body[int(ast.get_docstring(function) is not None)]
        return [(_start(source, first), function.end_lineno)]
    lines = source.split("\n")
    numbered = re.compile(r" +# (\d)\. ")
    places = [
        (n, match[1])
        for n in range(function.lineno, function.end_lineno + 1)
        if (match := numbered.match(lines[n - 1]))
    ]
    bodies = [node.body for node in ast.walk(function) if isinstance(node, (ast.For, ast.With))]
    spans, found = [], []
    for (start, number), (end, _) in itertools.pairwise(places):
        if number in problem.steps:
            found.append(number)
            body = next(b for b in bodies if any(start < node.lineno < end for node in b))
            spans += _holes(source, [node for node in body if start < node.lineno < end])
    if tuple(found) != problem.steps:
        raise NotFound(f"{problem.file} lacks one of the steps {', '.join(problem.steps)}")
    return spans


# Of a step these are no part of its solution: metrics, times, the memory between phases.
GIVEN = re.compile(r"(meter|run)\.|meter = Meter\(|clear_cache\(")


def _holes(source: str, body: list[ast.stmt]) -> list[tuple[int, int]]:
    """The spans of a step's statements, those of the same level that follow each other together."""
    spans, joins = [], False
    for node in body:
        if isinstance(node, ast.For):
            spans += _holes(source, node.body)
        is_kept = isinstance(node, ast.For) or GIVEN.match(ast.unparse(node)) is not None
        if not is_kept and joins:
            spans[-1] = spans[-1][0], node.end_lineno
        elif not is_kept:
            spans.append((_start(source, node), node.end_lineno))
        joins = not is_kept
    return spans


def _start(source: str, node: ast.stmt) -> int:
    """The first line of a statement, with the comments right above it, but not that of its step,
    whose first line has the number and whose others are indented.
    """
    lines, start = source.split("\n"), node.lineno
    while re.match(r" *# (?! |\d\. )", lines[start - 2]):
        start -= 1
    return start


def to_be_set(source: str, problem: Problem, span: tuple[int, int]) -> list[str]:
    """The names that a hole gives a value, or entries of, and that the loop reads after it."""
    start, end = span
    function = function_of(source, problem.function)
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store) and start <= n.lineno <= end}
    stored |= {
        node.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and start <= node.lineno <= end
    }
    loaded = {n.id for n in names if isinstance(n.ctx, ast.Load) and n.lineno > end}
    return sorted(stored & loaded)


def without_solutions(source: str, problems: list[Problem], hints: int) -> str:
    """The source of a file in which the solutions of `problems` are left to the reader, with the
    first `hints` of the hints.
    """
    lines = source.split("\n")
    cuts = [(span, p) for p in problems for span in solution_lines(source, p)]
    for (start, end), problem in sorted(cuts, key=lambda cut: cut[0], reverse=True):
        indent = re.match(r" *", lines[start - 1])[0]
        width = 100 - len(indent) - 2
        new = []
        is_first = (start, end) == solution_lines(source, problem)[0]
        for hint in problem.hints[:hints] if is_first else ():
            new += [f"{indent}# {line}" for line in textwrap.wrap(hint, width)]
        message = ""
        if problem.steps and (names := to_be_set(source, problem, (start, end))):
            message = f'("set {", ".join(names)}")'
        new.append(f"{indent}raise NotImplementedError{message}")
        lines[start - 1 : end] = new
    return "\n".join(lines)


def top_level(source: str) -> list[tuple[ast.stmt, str]]:
    """The statements of a file with their text. Of a file that doesn't parse, those that do: an
    error in one function must not cost the others.
    """
    parts = [source]
    if not _parses(source):
        parts = []
        for line in source.split("\n"):
            starts = line[:1] not in ("", " ", "\t", "#", ")", "]", "}")
            if starts and not (parts and parts[-1].split("\n")[-1].startswith("@")):
                parts.append(line)
            elif parts:
                parts[-1] += "\n" + line
    found = []
    for part in filter(_parses, parts):
        lines = part.split("\n")
        for node in ast.parse(part).body:
            decorators = getattr(node, "decorator_list", [])
            start = min([node.lineno, *(d.lineno for d in decorators)])
            found.append((node, "\n".join(lines[start - 1 : node.end_lineno])))
    return found


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
        symtable.symtable(source, "submission", "exec")  # also two arguments of one name
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def names_of(node: ast.stmt) -> set[str]:
    """The names that a top-level statement gives a meaning: definitions, imports, also in a try or
    an if, and plain assignments. Loops and calls at the top level are scratch code.
    """
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, (ast.Try, ast.If)):
        return set().union(*(names_of(n) for n in node.body), *(names_of(n) for n in node.orelse))
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    plain = isinstance(node, (ast.Assign, ast.AnnAssign))
    return {t.id for t in targets if isinstance(t, ast.Name)} if plain else set()


def globals_of(text: str) -> set[str]:
    """The names that a piece of code takes from its module."""

    def read(table: symtable.SymbolTable) -> set[str]:
        top = table.get_type() == "module"
        own = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
        known = {s.get_name() for s in table.get_symbols() if not (top or s.is_global())}
        return (own - known).union(*(read(child) for child in table.get_children()))

    return read(symtable.symtable(text, "submission", "exec"))


def splice(solution: str, submission: str, function: str) -> str:
    """The solution's file, without its own `function` and with the submission's at its end.

    Helpers, constants and imports of the submission come with it where it needs them: those that
    are new, and those that have been changed, but no other problem's function; nothing else of the
    submission is run. So a fault in one function can't cost the points of another. Raises NotFound.
    """
    text, _ = _splice(solution, submission, function)
    return text


def splice_files(texts: dict[str, str], problem: Problem) -> dict[str, str]:
    """{path: text} of the file of a problem, see `splice`, and of modules beside it with what it
    imports from other files of the submission, whose texts are given by their paths.

    Only names that the repository's file lacks come from there: a function of the solution stays
    as it is, here and for whoever imports it.
    """
    text, missing = _splice(_repository(problem.file), texts[problem.file], problem.function)
    found, asked = {problem.file: text}, {}
    while missing:
        module, names = missing.popitem()
        file = MODULES[module]
        if file not in texts or names <= asked.setdefault(module, set()):
            continue
        asked[module] |= names
        theirs = top_level(texts[file])
        taken = _with_helpers(_repository(file), theirs, set(), asked[module], "")
        parts, more = _texts(_repository(file), theirs, taken)
        head = f"import {module} as _original\n\nglobals().update("
        head += 'dict(item for item in vars(_original).items() if item[0][:2] != "__"))'
        found[f"{beside(module)}.py"] = "\n\n\n".join([head, *parts]) + "\n"
        for name in more:
            missing[name] = missing.get(name, set()) | more[name]
    return found


MODULES = {p.file.removesuffix(".py").replace("/", "."): p.file for p in PROBLEMS}


def beside(module: str) -> str:
    """The module with what a submission has in `module` and the repository has not."""
    return f"submitted_{module.replace('.', '_')}"


@functools.cache
def _repository(file: str) -> str:
    return (REPOSITORY / file).read_text(encoding="utf-8")


@functools.cache
def _meanings(source: str) -> dict[str, str]:
    """{name: what gives it its meaning} of the top level of a file."""
    return {name: ast.dump(node) for node, _ in top_level(source) for name in names_of(node)}


Parts = list[tuple[ast.stmt, str]]


def _splice(solution: str, submission: str, function: str) -> tuple[str, dict[str, set[str]]]:
    """`splice`, and {module: names} of what is to be had from other files of the submission."""
    theirs = top_level(submission)
    found = [i for i, (node, _) in enumerate(theirs) if function in names_of(node)]
    if not found:
        if re.search(rf"^def {function}\b", submission, re.MULTILINE):
            raise NotFound(f"{function} doesn't parse, python says where: check its syntax")
        raise NotFound(f"there is no function {function}")
    wanted = globals_of(theirs[found[-1]][1])
    taken = _with_helpers(solution, theirs, {found[-1]}, wanted, function)
    parts, missing = _texts(solution, theirs, taken)
    return "\n\n\n".join([_without(solution, function).rstrip(), *parts]) + "\n", missing


def _without(source: str, function: str) -> str:
    """The source without a function: it must not lie beside the submission's."""
    node, lines = function_of(source, function), source.split("\n")
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join([*lines[: start - 1], *lines[node.end_lineno :]])


def _with_helpers(
    solution: str, theirs: Parts, taken: set[int], wanted: set[str], function: str
) -> set[int]:
    """`taken`, and the places of the statements that the names in `wanted` need, directly or not,
    and that the solution hasn't got like that. None is of `function`, or of another problem.
    """
    ours, others = _meanings(solution), {p.function for p in PROBLEMS} - {function}
    taken, wanted, grown = set(taken), set(wanted), True
    while grown:
        grown = False
        for index, (node, text) in enumerate(theirs):
            names = names_of(node) & wanted
            is_new = any(ours.get(name) != ast.dump(node) for name in names - others)
            if index not in taken and is_new and function not in names:
                taken.add(index)
                wanted |= globals_of(text)
                grown = True
    return taken


def _texts(solution: str, theirs: Parts, taken: set[int]) -> tuple[list[str], dict[str, set[str]]]:
    """The statements to be put after the solution, and {module: names} of what they import that is
    in the submission's file of that module alone.
    """
    parts, missing = [], {}
    for index in sorted(taken):
        node, text = theirs[index]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            parts.append(text)
            continue
        texts = [text]
        if new := _new_names(node):
            protected = _meanings(solution).keys() | {p.function for p in PROBLEMS}
            kept = [a for a in node.names if a not in new]
            new = [a for a in new if (a.asname or a.name) not in protected]
            missing.setdefault(node.module, set()).update(a.name for a in new)
            pairs = [(node.module, kept), (beside(node.module), new)]
            texts = [ast.unparse(ast.ImportFrom(m, names, 0)) for m, names in pairs if names]
        # Where it fails, a name stays undefined, and that is said where it is used.
        for text in texts:
            parts.append(f"try:\n{textwrap.indent(text, '    ')}\nexcept Exception:\n    pass")
    return parts, missing


def _new_names(node: ast.stmt) -> list[ast.alias]:
    """What an import asks of a file of the submission that the repository's file hasn't got."""
    if not isinstance(node, ast.ImportFrom) or node.level or node.module not in MODULES:
        return []
    known = _meanings(_repository(MODULES[node.module]))
    return [a for a in node.names if a.name not in known and a.name != "*"]
