"""Plants one bug after the other in a function of the program, and says which test sees it.

  python tests/mutations.py                             # all bugs, all fast tests
  python tests/mutations.py 20 40 tests/test_ppo.py     # bugs 20 to 39, by some files

All is loaded once. For each bug the process forks, changes the code of the function, and runs the
tests up to the first that fails; files that name the function often come first.
"""

import ast
import functools
import inspect
import os
import signal
import sys
import tempfile
import types
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from _pytest.runner import runtestprotocol

REPOSITORY = Path(__file__).resolve().parent.parent
TEXTS = ("test_course", "test_pages", "test_mutations")  # they read files, in which no bug is
# Module and function, text that is in it once, what it becomes, the bug in words.
# fmt: off
BUGS = [
    ("common.completion_mask", "torch.tensor(eos_token_ids,", "torch.tensor(eos_token_ids[:1],", "the mask knows one of several EOS ids"),
    ("common.masked_whiten", "(mask.sum() - 1)", "mask.sum()", "no Bessel correction in whitening"),
    ("common.token_logprobs", "at_least_float32(logits)", "logits", "log-probs in half precision"),
    ("common.entropy_of", "logprobs.clamp(min=torch.finfo(logprobs.dtype).min)", "logprobs", "the entropy is NaN where a token has probability 0"),
    ("common.policy_ratio", ".clamp(min=0).detach()", ".clamp(min=0)", "a large ratio has no gradient"),
    ("common.importance_ratio", "masked_mean(log_ratio, mask, dim=1).unsqueeze(1)", "log_ratio.sum(1, keepdim=True)", "GSPO without its normalisation by length"),
    ("common.is_flat", "lowest >= highest", "highest - lowest < 1e-3", "rewards that differ a little count as equal"),
    ("common.gae", "(x.cpu().masked_fill(~mask, 0) for", "(x.cpu() for", "GAE reads the values at padding"),
    ("common.completion_logprobs", "if temperature == 1 else", "if temperature >= 1 else", "the temperature is missing from the log-probs"),
    ("common.completion_logprobs", "logprobs if entropy_grad else logprobs.detach()", "logprobs.detach()", "the entropy bonus has no gradient"),
    ("common.completion_logprobs", "at_least_float32(logits_from(model, states.to(head.weight.dtype)))", "logits_from(model, states.to(head.weight.dtype)).bfloat16().float()", "logits are rounded to bfloat16"),
    ("common.completion_values", "completion_states(value_model.backbone, rollout))", "completion_states(value_model.backbone, rollout).roll(-1, 1))", "the value knows the action"),
    ("common.completion_states", "cache.reorder_cache(prompt_of_row)", "cache.reorder_cache(prompt_of_row.sort().values)", "rows get the keys of another prompt"),
    ("common._over_rollout", "found[torch.cat([rows for rows, _ in parts]).argsort()]", "found", "log-probs stay in the order of the lengths"),
    ("common.micro_batches", "len(distinct | {prompts[row]}) * P", "(len(parts[-1]) + 1) * P", "a prompt that rows share counts for each"),
    ("common.micro_batches", "rows[wanted] if wanted.any() else rows[:1]", "rows[wanted]", "an update without any gradient has no row"),
    ("common.disable_dropout", "            sites += _zero_noise(module)\n", "", "dropout that is a number is left on"),
    ("common.ValueModel.__init__", "        nn.init.zeros_(self.head.weight)\n", "", "the value head starts at random"),
    ("common.ValueModel.on_backbone_of", "getattr(config, \"word_embed_proj_dim\", config.hidden_size)", "config.hidden_size", "the value head has OPT's inner width"),
    ("common.reference", "if has_new_adapter(policy):", "if hasattr(policy, \"peft_config\"):", "the base model is the reference of a trained adapter"),
    ("common.AdapterOff.__enter__", "        self.stack.enter_context(self.policy.disable_adapter())\n", "", "the adapter is on in its own reference"),
    ("common.evaluating", "model.train(was_training)", "model.train()", "a model in evaluation mode comes back in training mode"),
    ("common.schedule", "    warmup_steps = min(warmup_steps, num_steps // 2)\n", "", "a short run never reaches its learning rate"),
    ("common.blame", "(InputError, Fault, MemoryError, torch.OutOfMemoryError)", "(InputError, Fault, MemoryError)", "missing memory is the user's fault"),
    ("ppo.shape_rewards", "mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))", "torch.arange(mask.shape[1]) == mask.shape[1] - 1", "the score sits in the last column"),
    ("ppo.policy_loss", ", clipped_loss > unclipped_loss", ", (ratio - 1).abs() > clip_range", "tokens count as clipped where the clip decides nothing"),
    ("ppo.value_loss", "values.clamp(old_values - clip_range_value, old_values + clip_range_value)", "values.clamp(-clip_range_value, clip_range_value)", "values are clipped around 0"),
    ("ppo.Config", "lam: float = flag(0.95,", "lam: float = flag(0.99,", "another default of lambda"),
    ("ppo.main", "disable_dropout(policy, value_model)", "disable_dropout(policy)", "the value model keeps its dropout"),
    ("ppo.main", "advantages = masked_whiten(advantages, mask)", "advantages = masked_whiten(advantages, mask)\n        returns = advantages + old_values", "the returns are those of whitened advantages"),
    ("ppo.main", "((loss * m).sum() / num_tokens)", "((loss * m).sum() / m.sum())", "PPO's loss is a mean over the micro-batch"),
    ("ppo.main", "num_tokens = mask[mini_batch].sum()", "num_tokens = mask.sum() / config.num_mini_batches", "every minibatch counts as many tokens"),
    ("ppo.main", "old_logprobs = rollout_logprobs(policy, rollout, config)", "old_logprobs = rollout.logprobs", "PPO's old log-probs are the sampler's"),
    ("ppo.main", ", allow_none=False)", ")", "PPO takes a completion without a score"),
    ("ppo.Config", "\"discount\", least=0, most=1", "\"discount\", least=0", "a discount above 1 is taken"),
    ("ppo.main", "* ~rollout.finished", "* mask[:, -1]", "EOS as the last token pays the penalty"),
    ("grpo.group_advantages", "if (groups < 0).any():", "if (mean < 0).any():", "MaxRL takes a negative reward in a good group"),
    ("grpo.group_advantages", ".masked_fill(is_flat(groups), 0)", "", "equal rewards keep what rounding leaves"),
    ("grpo.group_advantages", "centred.nan_to_num(0)", "centred", "a missing reward is an advantage of NaN"),
    ("grpo.grpo_loss", "clip_range if clip_range_high is None else clip_range_high", "clip_range", "the upper clip range is ignored"),
    ("grpo.grpo_loss", "ratio.clamp(max=cispo_bound).detach()", "ratio.clamp(max=cispo_bound)", "CISPO's weight carries gradient"),
    ("grpo.grpo_loss", "kl * importance_ratio(logprobs,", "kl * importance_ratio(logprobs.detach(),", "the ratio of the unbiased KL carries no gradient"),
    ("grpo.grpo_loss", "masked_fill(~mask, 0), \"k3\")", "masked_fill(~mask, 0), \"k1\")", "k1 in a loss, whose gradient is 0 on average"),
    ("grpo.grpo_loss", "masked_mean(loss, mask, dim=1).sum() / num_rows", "masked_mean(loss, mask, dim=1).mean()", "GRPO's loss is a mean over the micro-batch"),
    ("grpo.main", "config.num_epochs * config.num_mini_batches == 1", "config.num_epochs == 1", "the second minibatch takes its own log-probs for the old ones"),
    ("grpo.main", "== 1 and config.disable_dropout", "== 1", "with dropout the update's log-probs pass for the old ones"),
    ("grpo.main", "flat.long().argsort(stable=True)", "flat.long().argsort(stable=True, descending=True)", "of too many groups the flat ones are kept"),
    ("grpo.main", "ref_logprobs, \"k1\")", "ref_logprobs, \"k3\")", "GRPO logs another KL than PPO and RLOO"),
    ("grpo.main", "(entropy * m).sum() / num_tokens", "(entropy * m).sum() / m.sum()", "GRPO's bonus grows with the number of micro-batches"),
    ("grpo.main", "has_gradient |= config.kl_coef + config.entropy_coef > 0", "has_gradient |= has_bonus", "rows whose KL has a gradient are left out"),
    ("rloo.main", "kl_estimate(old_logprobs,", "kl_estimate(rollout.logprobs,", "RLOO's KL is of the sampler's log-probs"),
    ("rloo.Config", "    smallest_group = 2\n", "", "RLOO takes groups of one"),
    ("rloo.main", "config.num_epochs * config.num_mini_batches == 1", "config.num_epochs == 1", "RLOO's second minibatch takes its own log-probs for the old ones"),
    ("rloo.main", "logprobs.detach() if single_update else old_logprobs[rows]", "logprobs.detach()", "each of RLOO's updates is on policy"),
    ("rloo.main", "        set_learning_rate(optimizer, config, step)\n", "", "RLOO's learning rate is constant"),
    ("sampling.sample", "prompt_mask.split(num_prompts))", "prompt_mask.split(num_prompts)[::-1])", "sub-batches get the masks of others"),
    ("sampling.generate", "completion_mask(ends.long(), [1])", "tokens != pad_token_id", "the mask is inferred from the ids"),
    ("sampling.generate", "with evaluating(model):", "with torch.no_grad():", "dropout while sampling"),
    ("sampling.decode", "uniforms[t + 1, rows]", "uniforms[t + 1, : len(rows)]", "random numbers go to other rows"),
    ("sampling.decode", "stop(tokens[rows, : t + 1], None)", "stop(tokens[rows, max(0, t - 1) : t + 1], None)", "a stop string of three tokens is missed"),
    ("sampling.Step.drop", "self.mask[kept]", "self.mask[: len(kept)]", "rows that go on get the masks of others"),
    ("sampling.draw", "sorted_probs.cumsum(-1) - sorted_probs", "sorted_probs.cumsum(-1)", "top_p drops the token that crosses p"),
    ("sampling._first_above", "right=True", "right=False", "a token of probability 0 can be drawn"),
    ("metrics.Totals.add", "x.masked_fill(~mask, 0).sum()", "x.sum()", "metrics add up padding"),
    ("metrics.Meter.objective", "{\"objective/kl\": None,", "{\"objective/kl\": 0.0,", "an unknown KL is logged as 0"),
    ("metrics.Meter.__init__", "1 - rollout.finished.float().mean().item()", "rollout.completion_mask[:, -1].float().mean().item()", "EOS as the last token counts as truncated"),
    ("metrics.Meter.add_policy", "kl_estimate(sampled, old_logprobs,", "kl_estimate(old_logprobs, sampled,", "the sampler's KL is turned round"),
    ("metrics.evaluate", "manual_seed(config.seed + 1)", "manual_seed(config.seed)", "evaluations draw the random numbers of training"),
    ("metrics.evaluate", "~verdicts.isnan().any(1)", "~verdicts.isnan().all(1)", "prompts with half of their verdicts count"),
    ("metrics.mean_and_error", "right.double().mean(1)", "right.double().flatten()", "completions of one prompt count as independent"),
    ("metrics.headline", "(metrics, first)", "(metrics, metrics)", "what was before is what is now"),
    ("data.Task.score", "(scores * weights).nansum(dim=1)", "(scores * weights).sum(dim=1)", "one missing reward hides the others"),
    ("data.call_reward", "[row for row in rows for _ in range(len(texts) // len(rows))]", "rows * (len(texts) // len(rows))", "completions are scored with the columns of other rows"),
    ("data.completion_ids", "row[:length]", "row", "the ids for a reward hold padding"),
    ("data.decode", "ids[:-1] if ids[-1] in eos_token_ids else ids", "ids", "EOS is part of the text"),
    ("data.prompt_tokens", "ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids", "ids", "two BOS in front of a prompt"),
    ("data._order", "f\"{seed},{number}\"", "f\"{number}\"", "the seed doesn't order the prompts"),
    ("data._prompt_of", "template.format(**row)", "template.format(**row).strip()", "a template loses the blanks at its ends"),
    ("config.complete", "given = embedded.get(given[\"model\"], {}) | given", "given = given | embedded.get(given[\"model\"], {})", "the embedded model's defaults beat the flags"),
    ("config.complete", "settings | {\"overwrite\": False} | given", "given | settings | {\"overwrite\": False}", "a resumed run takes no flag"),
    ("config._check_numbers", "(x <= 0 if least", "(x < 0 if least", "0 is taken where it makes no sense"),
    ("config._check_numbers", "not math.isfinite(x) or ", "", "a rate of NaN is taken"),
    ("models.load_policy", "torch.bfloat16 if has_adapter and config.bf16 else torch.float32", "\"auto\"", "a checkpoint in bfloat16 trains in bfloat16"),
    ("models.eos_token_ids", "sorted(found - {None})", "sorted(filter(None, found))", "an EOS whose id is 0 is lost"),
    ("models.add_adapter", "\"lora_alpha\": 32,", "\"lora_alpha\": 2 * rank,", "alpha grows with the rank"),
    ("models.spread_weights", "1 - 2**15, 2**15,", "0, 2**15,", "weights are spread to one side alone"),
    ("models.spread_weights", " if p.requires_grad", "", "an adapter's frozen base is spread"),
    ("models.spread_weights", "p.bfloat16().float()", "p.clone()", "weights are spread around themselves, and round to other numbers"),
    ("models.fuse", "child.variance_epsilon", "1e-12", "a norm without the model's epsilon"),
    ("run.Run.__init__", "register_step_pre_hook", "register_step_post_hook", "an end within the optimiser saves half an update"),
    ("run.Run.show", "if step % self.config.eval_every:", "if False:", "samples and tokens of every step are kept"),
    ("run.Run.save", "                write(new)\n", "                shutil.rmtree(old, ignore_errors=True)\n                write(new)\n", "the old model is removed before the new one is written"),
    ("run.Run._resume", "self.optimizer.load_state_dict(state[\"optimizer\"])", "pass", "a resumed run has a new optimiser"),
    ("run.Run._resume", "generator.set_state(its_state)", "pass", "a resumed run draws its first random numbers again"),
    ("run.Run._resume", "[\"step\"] < self.step", "[\"step\"] <= self.step", "a resumed run records a step twice"),
    ("run.Run.rescue", "not self.weights_moved and", "", "half an update is saved as a step"),
    ("metrics.read_lines", ".split(\"\\n\")[:-1]", ".split(\"\\n\")", "a torn last line of a record ends the reading"),
    ("reward_model.preference_loss", "-logsigmoid(chosen - rejected - margin)", "-torch.sigmoid(chosen - rejected - margin).log()", "the loss of a badly wrong pair is infinite"),
    ("reward_model.main", "preference_loss(chosen, rejected, margin,", "preference_loss(chosen, rejected, 0.0,", "the margins of pairs are not used"),
    ("reward_model.main", "prompt_batch(pairs.train, step, N, config.seed)", "prompt_batch(pairs.train, step, N, 0)", "the seed doesn't order the pairs"),
    ("preferences.text_ids", "ids if eos is None or ids[-1:] == [eos] else [*ids, eos]", "ids", "a text that is judged has no EOS"),
    ("preferences.sequence_scores", ", attention_mask=mask", "", "BERT reads the padding"),
    ("reward_model.pair_scores", "for which in (0, 1) for pair in pairs", "for pair in pairs for which in (0, 1)", "chosen and rejected texts are mixed"),
]
# fmt: on


def planted(target: str, old: str, new: str) -> tuple[Path, str]:
    """The file of a target such as run.Run.rescue, and its text with the bug. Raises ValueError."""
    module, *names = target.split(".")
    folder = REPOSITORY if (REPOSITORY / f"{module}.py").exists() else REPOSITORY / "plumbing"
    text = (path := folder / f"{module}.py").read_text(encoding="utf-8")
    node, lines = ast.parse(text), text.splitlines(keepends=True)
    for name in names:
        node = next(x for x in node.body if getattr(x, "name", None) == name)
    body = "".join(lines[node.lineno - 1 : node.end_lineno])
    if body.count(old) != 1:
        raise ValueError(f"{target}: {old!r} is in it {body.count(old)} times")
    lines[node.lineno - 1 : node.end_lineno] = [body.replace(old, new)]
    return path, "".join(lines)


def plant(target: str, old: str, new: str) -> None:
    """Put the bug into the loaded program: all that have imported the function get it."""
    path, text = planted(target, old, new)
    module = import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    changed = types.ModuleType(module.__name__)
    changed.__file__ = module.__file__
    exec(compile(text, path, "exec"), vars(changed))
    names = target.split(".")[1:]
    found, buggy = (functools.reduce(lambda x, n: vars(x)[n], names, m) for m in (module, changed))
    if isinstance(found, type):  # a Config
        return setattr(module, names[0], buggy)
    for part in ("__code__", "__defaults__", "__kwdefaults__"):
        setattr(inspect.unwrap(found), part, getattr(inspect.unwrap(buggy), part))


def first_failure(items: list[pytest.Item], bug: tuple | None) -> str:
    """The first test that fails with the bug, in a fork of this process; "" if none does."""
    ends, pipe = os.pipe()
    if (child := os.fork()) > 0:
        os.close(pipe)
        with os.fdopen(ends) as file:
            found = file.read()
        return "it hangs or dies" if os.waitpid(child, 0)[1] else found
    signal.alarm(900)  # it kills a process that hangs
    torch.set_num_threads(1)  # now: else threads race for PyTorch's pool, which the fork has lost
    try:
        if bug:
            plant(*bug[:3])
            name = bug[0].split(".")[-1].replace("main", "by hand")
            items = sorted(items, key=lambda item: -item.path.read_text("utf-8").count(name))
        for item, following in pairwise([*items, None]):
            if any(x.failed for x in runtestprotocol(item, nextitem=following, log=False)):
                os.write(pipe, item.nodeid.encode())
                break
        os._exit(0)
    finally:
        os._exit(1)


def main(first: str = "0", last: str = "999", *tests: str) -> None:
    bugs, unseen = BUGS[int(first) : int(last)], []

    @pytest.hookimpl(tryfirst=True)
    def over_bugs(session: pytest.Session) -> bool:  # in the place of pytest's loop over the tests
        out = sys.__stdout__  # pytest has replaced sys.stdout
        print("without a bug:", first_failure(session.items, None) or "all pass", file=out)
        for bug in bugs:
            test = first_failure(session.items, bug)
            unseen.extend([] if test else [bug])
            print(f"{bug[0]:30} {bug[3]:60} {test or 'UNSEEN'}", file=out, flush=True)
        return True

    options = ["-n", "0", "-q", "--capture=sys", "-m", "not slow", "-p", "no:cacheprovider"]
    options += [f"--ignore-glob=*{name}.py" for name in TEXTS]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder  # a fork leaves its files
        plugin = types.SimpleNamespace(pytest_runtestloop=over_bugs)
        pytest.main([*options, *tests], plugins=[plugin])
    print(f"{len(unseen)} of {len(bugs)} are unseen", *(bug[3] for bug in unseen), sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
