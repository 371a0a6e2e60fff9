"""Plants one bug after the other into a copy of the code, and lists which test catches each.

  python tests/mutations.py              # all of them, on two cores, into docs/mutations.md
  python tests/mutations.py KL clip      # those whose description holds one of the words

A mutation is one edit of one place. Those that no test catches are listed as survivors, with the
reason where it is known why: then the edit changes nothing that can be seen.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
TABLE = REPOSITORY / "docs" / "mutations.md"
# The quick ones first: most bugs are caught within a second of the tests' start.
TESTS = """test_common test_grpo test_rloo test_sampling test_ppo test_groups_by_hand test_ppo_by_hand
test_reference test_scripts test_pitfalls test_architectures test_golden test_runs
test_tasks""".split()
EQUIVALENT: dict[str, str] = {}

# file, text (once in the file), what it becomes, the bug in words
# fmt: off
MUTATIONS = [
    ("common.py", "return total / count.clamp(min=1)", "return total / max(1, x.numel())", "mean over padding too"),
    ("common.py", "total = x.masked_fill(~mask, 0).sum() if dim is None else x.masked_fill(~mask, 0).sum(dim)", "total = x.sum() if dim is None else x.sum(dim)", "padding summed into a masked mean"),
    ("common.py", "centred = (x - mean).masked_fill(~mask, 0)", "centred = x - mean", "padding counts in the variance of whitening"),
    ("common.py", "(mask.sum() - 1).clamp(min=1)", "mask.sum().clamp(min=1)", "no Bessel correction in whitening"),
    ("common.py", "torch.rsqrt(variance + 1e-8)", "1 / (variance + 1e-8)", "whitening divides by the variance"),
    ("common.py", "torch.rsqrt(variance + 1e-8)", "torch.rsqrt(variance)", "whitening a constant divides by 0"),
    ("common.py", "return whitened if shift_mean else", "return whitened if not shift_mean else", "whitening shifts the mean the wrong way"),
    ("common.py", "return _full(logits).log_softmax(-1).gather", "return logits.log_softmax(-1).gather", "log-probs in half precision"),
    ("common.py", "return _full(logits).log_softmax(-1).gather", "return _full(logits).softmax(-1).gather", "probabilities for log-probs"),
    ("common.py", "torch.special.entr(_full(logits).softmax(-1)).sum(-1)", "(-_full(logits).softmax(-1) * _full(logits).log_softmax(-1)).sum(-1)", "entropy is NaN for a token of probability 0"),
    ("common.py", "    d = logprobs - ref_logprobs\n", "    d = ref_logprobs - logprobs\n", "KL turned round"),
    ("common.py", "return d**2 / 2", "return d**2", "k2 doubled"),
    ("common.py", "return torch.expm1(-d) + d", "return torch.expm1(d) - d", "k3 with the ratio upside down"),
    ("common.py", "return torch.expm1(-d) + d", "return torch.exp(-d) - 1 + d", "k3 loses its digits near 0"),
    ("common.py", "delta = rewards[:, t] + gamma * next_value - values[:, t]", "delta = rewards[:, t] + next_value - values[:, t]", "no discount in GAE's delta"),
    ("common.py", "delta = rewards[:, t] + gamma * next_value - values[:, t]", "delta = rewards[:, t] + gamma * next_value", "GAE without the value of the state"),
    ("common.py", "(delta + gamma * lam * next_advantage)", "(delta + lam * next_advantage)", "no discount in GAE's sum"),
    ("common.py", "(delta + gamma * lam * next_advantage)", "(delta + gamma * next_advantage)", "GAE without lambda"),
    ("common.py", "        next_value = values[:, t]\n", "        next_value = rewards[:, t]\n", "GAE bootstraps from the reward"),
    ("common.py", "rewards, values = rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)", "pass", "GAE reads values at padding"),
    ("common.py", "next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~mask[:, t], 0)", "next_advantage = delta + gamma * lam * next_advantage", "advantages leak out of padding"),
    ("common.py", "return advantages, advantages + values", "return advantages, advantages", "returns without the value"),
    ("common.py", "torch.stack(advantages[::-1], dim=1)", "torch.stack(advantages, dim=1)", "advantages in reverse order"),
    ("common.py", "return lowest >= highest", "return lowest > highest", "constant groups keep their rounding error"),
    ("common.py", "lowest = groups.masked_fill(unknown, torch.inf).amin", "lowest = groups.masked_fill(unknown, 0).amin", "a missing reward hides a constant group"),
    ("common.py", "position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]", "position_ids = torch.arange(attention_mask.shape[1]).expand_as(attention_mask)[:, -tokens.shape[1] :]", "positions count the left padding"),
    ("common.py", "(attention_mask.long().cumsum(1) - 1).clamp(min=0)", "attention_mask.long().cumsum(1)", "positions start at 1"),
    ("common.py", '"attention_mask": attention_mask.long()}', '"attention_mask": torch.ones_like(attention_mask.long())}', "padding is attended to"),
    ("common.py", ".logits[:, -width - 1 : -1] / temperature", ".logits[:, -width - 1 : -1]", "temperature missing from the log-probs"),
    ("common.py", ".logits[:, -width - 1 : -1] / temperature", ".logits[:, -width - 1 : -1] * temperature", "logits times the temperature"),
    ("common.py", ".logits[:, -width - 1 : -1] / temperature", ".logits[:, -width:] / temperature", "logits one to the right"),
    ("common.py", "logprobs.append(drawn.masked_fill(~mask, 0))", "logprobs.append(drawn)", "log-probs at padding are not 0"),
    ("common.py", "token_entropy(logits.detach()).masked_fill(~mask, 0)", "token_entropy(logits.detach())", "entropies at padding are not 0"),
    ("common.py", "value[:, -width - 1 : -1].masked_fill(~mask, 0)", "value[:, -width:].masked_fill(~mask, 0)", "the value knows the action"),
    ("common.py", "value[:, -width - 1 : -1].masked_fill(~mask, 0)", "value[:, -width - 1 : -1]", "values at padding are not 0"),
    ("common.py", "range(0, num_rows, size)]", "range(0, num_rows - size + 1, size)]", "the last, smaller micro-batch is lost"),
    ("common.py", "                module.p = 0.0\n", "                pass\n", "nn.Dropout left on"),
    ("common.py", "            sites += _zero_noise(module)\n", "", "functional dropout left on"),
    ("common.py", "                    sites += _zero_noise(quiet_configs[id(config)][0])\n", "", "dropout read from the config left on"),
    ("common.py", 'if ("drop" in name or "jitter" in name)', 'if "dropout" in name', "layerdrop left on"),
    ("common.py", "        nn.init.zeros_(self.head.weight)\n", "", "the value head starts at random"),
    ("common.py", "            backbone = copy.deepcopy(backbone).requires_grad_(True)", "            backbone = copy.deepcopy(backbone)", "a value model from a reward model stays frozen"),
    ("common.py", "            backbone = copy_of(backbone)\n", "            pass\n", "value model and policy share their weights"),
    ("common.py", "    if kl_coef == 0:\n        return contextlib.nullcontext(None)\n", "", "a reference without KL"),
    ("common.py", "return contextlib.nullcontext(copy_of(policy).eval().requires_grad_(False))", "return contextlib.nullcontext(policy)", "the reference is the policy itself"),
    ("common.py", "return contextlib.nullcontext(copy_of(policy).eval().requires_grad_(False))", "return contextlib.nullcontext(copy_of(policy).requires_grad_(False))", "the reference keeps training mode"),
    ("common.py", "return contextlib.nullcontext(copy_of(policy).eval().requires_grad_(False))", "return contextlib.nullcontext(copy_of(policy).eval())", "the reference gets gradients"),
    ("common.py", "    if has_new_adapter(policy):\n        return AdapterOff(policy)\n", "    if hasattr(policy, 'peft_config'):\n        return AdapterOff(policy)\n", "the base model as reference of a trained adapter"),
    ("common.py", "    if has_new_adapter(policy):\n        return AdapterOff(policy)\n", "", "a copy where the adapter could be switched off"),
    ("common.py", "        self.stack.enter_context(self.policy.disable_adapter())\n", "", "the adapter is on in its own reference"),
    ("common.py", "        return self.stack.enter_context(evaluating(self.policy))", "        return self.policy", "dropout in the reference of an adapter"),
    ("common.py", "        model.train(was_training)", "        model.train()", "evaluation mode is not restored"),
    ("common.py", "    for source in (model.generation_config, model.config, tokenizer):", "    for source in (tokenizer,):", "only one of several EOS ids"),
    ("sampling.py", "    return eos_before == 0", "    return (eos_before + is_eos.long()) == 0", "EOS is masked out"),
    ("sampling.py", "is_eos.long().cumsum(1) - is_eos.long()", "is_eos.long().cumsum(1) - 1", "mask off where no EOS was seen"),
    ("sampling.py", "prompt_ids = prompt_ids.repeat_interleave(num_generations, dim=0)", "prompt_ids = prompt_ids.repeat(num_generations, 1)", "the completions of a prompt are not consecutive"),
    ("sampling.py", "logits = logits.float() / temperature", "logits = logits.float()", "temperature ignored in sampling"),
    ("sampling.py", "sorted_probs.cumsum(-1) - sorted_probs", "sorted_probs.cumsum(-1)", "top_p drops the token that crosses p"),
    ("sampling.py", "logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]", "logits.topk(min(top_k, logits.shape[-1])).values[:, :1]", "top_k keeps one token"),
    ("sampling.py", "threshold.unsqueeze(1), right=True)", "threshold.unsqueeze(1), right=False)", "a token of probability 0 can be drawn"),
    ("sampling.py", "torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))", "uniform", "the cumulated probabilities may end below the uniform number"),
    ("sampling.py", "            running &= ~torch.isin(drawn, eos)\n", "", "finished rows go on"),
    ("sampling.py", "uniforms[t, rows]", "uniforms[t, : len(rows)]", "random numbers of dropped rows go to others"),
    ("sampling.py", "mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)", "mask = torch.cat([mask, mask.new_zeros(len(mask), 1)], dim=1)", "drawn tokens are masked from the next ones"),
    ("sampling.py", "    with evaluating(model):\n", "    if True:\n", "dropout while sampling"),
    ("sampling.py", "attention_mask=torch.cat([prompt_mask, drawn_mask], dim=1)", "attention_mask=torch.cat([prompt_mask, torch.ones_like(drawn_mask)], dim=1)", "padding after EOS counts as text"),
    ("sampling.py", "logprobs=logprobs.masked_fill(~drawn_mask, 0)", "logprobs=logprobs", "log-probs recorded after EOS"),
    ("sampling.py", "finished=(torch.isin(tokens, eos) & drawn_mask).any(dim=1)", "finished=torch.isin(tokens[:, -1], eos)", "only rows that end at the limit with EOS are finished"),
    ("ppo.py", "is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))", "is_last = mask.cumsum(1) == mask.shape[1]", "the score on the last slot, not on the last token"),
    ("ppo.py", "(-kl_coef * kl).masked_fill(~mask, 0)", "(kl_coef * kl).masked_fill(~mask, 0)", "the KL is a bonus"),
    ("ppo.py", "(-kl_coef * kl).masked_fill(~mask, 0)", "(-kl_coef * kl)", "KL paid at padding"),
    ("ppo.py", "    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))", "    return torch.min(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))", "minimum for maximum in PPO's clip"),
    ("ppo.py", "    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))", "    return -advantages * ratio", "no clip"),
    ("ppo.py", "ratio = torch.exp(logprobs - old_logprobs)", "ratio = torch.exp(old_logprobs - logprobs)", "PPO's ratio upside down"),
    ("ppo.py", "    clipped = old_values + (values - old_values).clamp(-clip_range_value, clip_range_value)", "    clipped = values.clamp(-clip_range_value, clip_range_value)", "values clipped around 0"),
    ("ppo.py", "return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)", "return torch.max((values - returns) ** 2, (clipped - returns) ** 2)", "no half in the value loss"),
    ("ppo.py", "return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)", "return 0.5 * torch.min((values - returns) ** 2, (clipped - returns) ** 2)", "minimum in the value loss"),
    ("ppo.py", "        disable_dropout(policy, value_model)", "        disable_dropout(policy)", "dropout left on in the value model"),
    ("ppo.py", "- config.missing_eos_penalty * ~rollout.finished", "- config.missing_eos_penalty * rollout.finished", "the penalty on those that did end"),
    ("ppo.py", "            advantages = masked_whiten(advantages, mask)\n", "", "advantages not whitened"),
    ("ppo.py", "loss = ((pg + config.vf_coef * vf) * m).sum() / num_tokens", "loss = ((pg + config.vf_coef * vf) * m).sum() / m.sum()", "PPO normalises by the micro-batch"),
    ("ppo.py", "loss = ((pg + config.vf_coef * vf) * m).sum() / num_tokens", "loss = ((pg - config.vf_coef * vf) * m).sum() / num_tokens", "the value loss is maximised"),
    ("ppo.py", "                optimizer.zero_grad()\n", "", "gradients pile up in PPO"),
    ("ppo.py", "learning_rate = config.learning_rate * (1 - step / config.num_steps)", "learning_rate = config.learning_rate", "constant learning rate in PPO"),
    ("ppo.py", "value_loss(\n                        values, old_values[rows], returns[rows]", "value_loss(\n                        values, old_values[rows], advantages[rows]", "the value model learns advantages"),
    ("ppo.py", "                with ref as model:  # not around the lines above: it may switch an adapter off\n", "                old_logprobs, model = old_logprobs, ref.__enter__()\n                if True:\n", "the reference context is never left"),
    ("grpo.py", "centred = groups - groups.nanmean(dim=1, keepdim=True)", "centred = groups - groups.nanmean()", "the mean of the batch for that of the group"),
    ("grpo.py", "(_nanstd(groups, dim=1) + 1e-4)", "(_nanstd(groups, dim=1) ** 2 + 1e-4)", "GRPO divides by the variance"),
    ("grpo.py", "(count - 1).clamp(min=1)", "count.clamp(min=1)", "no Bessel correction in GRPO"),
    ("grpo.py", "(_nanstd(groups, dim=1) + 1e-4)", "(_nanstd(groups, dim=1) + 1e-8)", "1e-8 for 1e-4"),
    ("grpo.py", "(_nanstd(groups, dim=(0, 1)) + 1e-4)", "(_nanstd(groups, dim=1) + 1e-4)", "scale_rewards batch scales by the group"),
    ("grpo.py", "mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)", "mean = log_ratio.sum(1, keepdim=True)", "GSPO without its length normalisation"),
    ("grpo.py", "mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)", "mean = log_ratio.mean(1, keepdim=True)", "GSPO averages over padding"),
    ("grpo.py", "log_ratio = (logprobs - old_logprobs).masked_fill", "log_ratio = (old_logprobs - logprobs).masked_fill", "GRPO's ratio upside down"),
    ("grpo.py", "    high = clip_range if clip_range_high is None else clip_range_high\n", "    high = clip_range\n", "clip-higher ignored"),
    ("grpo.py", "loss = -A * ratio.clamp(max=high).detach() * logprobs", "loss = -A * ratio.clamp(max=high) * logprobs", "CISPO's weight carries gradient"),
    ("grpo.py", "loss = -A * ratio.clamp(max=high).detach() * logprobs", "loss = -A * ratio.clamp(1 - clip_range, high).detach() * logprobs", "CISPO bounded below"),
    ("grpo.py", "loss = torch.max(-A * ratio, -A * ratio.clamp(1 - clip_range, 1 + high))", "loss = torch.min(-A * ratio, -A * ratio.clamp(1 - clip_range, 1 + high))", "minimum for maximum in GRPO's clip"),
    ("grpo.py", 'loss = loss + kl_coef * kl_estimate(logprobs, ref_logprobs.masked_fill(~mask, 0), "k3")', 'loss = loss - kl_coef * kl_estimate(logprobs, ref_logprobs.masked_fill(~mask, 0), "k3")', "GRPO rewards the KL"),
    ("grpo.py", 'ref_logprobs.masked_fill(~mask, 0), "k3")', 'ref_logprobs.masked_fill(~mask, 0), "k1")', "k1 as a loss, whose expected gradient is 0"),
    ("grpo.py", "kl_estimate(logprobs, ref_logprobs.masked", "kl_estimate(logprobs.detach(), ref_logprobs.masked", "the KL carries no gradient"),
    ("grpo.py", "    loss = loss.masked_fill(~mask, 0)  # (B, T)\n", "", "padding counts in GRPO's loss"),
    ("grpo.py", "return masked_mean(loss, mask, dim=1).sum() / num_rows", "return masked_mean(loss, mask, dim=1).mean()", "GRPO normalises by the micro-batch"),
    ("grpo.py", "return masked_mean(loss, mask, dim=1).sum() / num_rows", "return loss.mean(dim=1).sum() / num_rows", "GRPO divides by T, not by the length"),
    ("grpo.py", "return loss.sum() / num_tokens.clamp(min=1)", "return loss.sum() / mask.sum().clamp(min=1)", "DAPO normalises by the micro-batch"),
    ("grpo.py", "return loss.sum() / (num_rows * max_new_tokens)", "return masked_mean(loss, mask, dim=1).sum() / num_rows", "Dr. GRPO that still divides by the length"),
    ("grpo.py", "return loss.sum() / (num_rows * max_new_tokens)", "return loss.sum() / (num_rows * loss.shape[1] * 2)", "Dr. GRPO divides by another constant"),
    ("grpo.py", "        disable_dropout(policy)  #", "        pass  #", "dropout left on in GRPO"),
    ("grpo.py", "loss_mask = mask & rollout.finished.unsqueeze(1)", "loss_mask = mask & ~rollout.finished.unsqueeze(1)", "those that did end are masked"),
    ("grpo.py", "num_tokens = loss_mask[mini_batch].sum()", "num_tokens = loss_mask.sum()", "DAPO counts the tokens of the rollout, not of the minibatch"),
    ("grpo.py", "num_rows=len(mini_batch),", "num_rows=len(rows),", "the loop hands in the rows of the micro-batch"),
    ("grpo.py", "old_is_new = config.num_epochs * config.num_mini_batches == 1 and", "old_is_new = config.num_epochs == 1 and", "old log-probs taken for new ones at the second minibatch"),
    ("grpo.py", "                optimizer.zero_grad()\n", "", "gradients pile up in GRPO"),
    ("rloo.py", "others = known.sum(dim=1, keepdim=True) - 1", "others = known.sum(dim=1, keepdim=True)", "the baseline divides by G"),
    ("rloo.py", "baseline = (groups.nansum(dim=1, keepdim=True) - groups) / others", "baseline = groups.nansum(dim=1, keepdim=True) / others", "the baseline holds its own reward"),
    ("rloo.py", "others = known.sum(dim=1, keepdim=True) - 1", "others = torch.full_like(known.sum(dim=1, keepdim=True), num_generations - 1)", "missing rewards count in the baseline"),
    ("rloo.py", "return advantages / (std + 1e-4)", "return advantages / (std**2 + 1e-4)", "normalised by the variance"),
    ("rloo.py", "std = advantages[known].std() if", "std = advantages.std() if", "missing rewards count in the normalisation"),
    ("rloo.py", ".masked_fill(~mask.bool(), 0).sum(1)", ".masked_fill(~mask.bool(), 0).mean(1)", "RLOO's ratio is a mean over tokens"),
    ("rloo.py", "return log_ratio.clamp(max=20).exp()", "return log_ratio.exp()", "a long ratio overflows"),
    ("rloo.py", "return log_ratio.clamp(max=20).exp()", "return log_ratio.clamp(max=0).exp()", "the ratio never exceeds 1"),
    ("rloo.py", "loss = torch.max(-advantages * ratio, -advantages * clipped)", "loss = torch.min(-advantages * ratio, -advantages * clipped)", "minimum for maximum in RLOO's clip"),
    ("rloo.py", "return loss.sum() / (len(loss) if num_rows is None else num_rows)", "return loss.mean()", "RLOO normalises by the micro-batch"),
    ("rloo.py", "rewards = rewards - config.kl_coef * kl.sum(1)", "rewards = rewards + config.kl_coef * kl.sum(1)", "RLOO rewards the KL"),
    ("rloo.py", "rewards = rewards - config.kl_coef * kl.sum(1)", "rewards = rewards - config.kl_coef * kl.mean(1)", "RLOO's KL is a mean over tokens"),
    ("rloo.py", 'kl = kl_estimate(old_logprobs, ref_logprobs, "k1")', 'kl = kl_estimate(old_logprobs, ref_logprobs, "k3")', "k3 in RLOO's reward"),
    ("rloo.py", "            if config.reward_clip_range:\n                rewards = rewards.clamp(*config.reward_clip_range)\n", "", "rewards are not clipped"),
    ("rloo.py", "single_update = config.num_epochs * config.num_mini_batches == 1 and", "single_update = config.num_mini_batches == 1 and", "old log-probs taken for new ones in the second epoch"),
    ("rloo.py", "                optimizer.zero_grad()\n", "", "gradients pile up in RLOO"),
    ("rloo.py", "                grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)", "                grad_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])", "max_grad_norm ignored"),
]
# fmt: on


def run_tests(mutation: tuple[str, str, str, str]) -> str | None:
    """The name of the test that catches the mutation, or None."""
    file, text, replacement, _ = mutation
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work) / "copy"
        ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", ".*_cache", "docs")
        shutil.copytree(REPOSITORY, copy, ignore=ignored)
        source = (copy / file).read_text()
        assert source.count(text) == 1, f"{file} holds {source.count(text)} times: {text}"
        (copy / file).write_text(source.replace(text, replacement))
        tests = [f"tests/{name}.py" for name in TESTS if (copy / f"tests/{name}.py").exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        try:
            result = subprocess.run(
                command, cwd=copy, capture_output=True, text=True, timeout=600, env=environment
            )
        except subprocess.TimeoutExpired:
            return "(the tests don't end)"
    if result.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+?)(?:\[| |$)", result.stdout, re.MULTILINE)
    return found[1] if found else "(the tests don't start)"


def main() -> None:
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m[3] for word in words)]
    started, rows = time.perf_counter(), []
    with ThreadPoolExecutor(2) as pool:
        for mutation, test in zip(chosen, pool.map(run_tests, chosen), strict=True):
            rows.append((mutation[0], mutation[3], test))
            print(f"{mutation[0]:12} {mutation[3]:66} {test or 'SURVIVED'}", flush=True)
    caught = sum(test is not None for *_, test in rows)
    minutes = (time.perf_counter() - started) / 60
    print(f"{caught} of {len(rows)} caught, {minutes:.0f} minutes")
    if not words:
        lines = [
            "# Planted bugs, and the tests that catch them",
            "",
            f"Made by `python tests/mutations.py`: {caught} of {len(rows)} are caught.",
            "",
            "| file | bug | caught by |",
            "|---|---|---|",
        ]
        for file, bug, test in rows:
            lines.append(f"| {file} | {bug} | {test or EQUIVALENT.get(bug, 'nothing')} |")
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join(lines) + "\n")
    unexplained = [bug for _, bug, test in rows if test is None and bug not in EQUIVALENT]
    if unexplained:
        raise SystemExit(f"not caught, and not explained: {', '.join(unexplained)}")


if __name__ == "__main__":
    main()
