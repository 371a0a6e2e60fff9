"""Plants one bug after the other into a copy of the code, and lists which test catches each.

  python tests/mutations.py              # all, on two cores, into docs/evidence/mutations.md
  python tests/mutations.py KL clip      # those whose description holds one of the words; the
                                         # rest of the table stays

A mutation is one edit of one place. Those that no test catches are listed as survivors, with the
reason where it is known why: then the edit changes nothing that can be seen. A second table has
each test of test_pitfalls.py, run alone on a mutation of its own. All tests must pass on a copy
without any bug first.
"""

import ast
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
TABLE = REPOSITORY / "docs" / "evidence" / "mutations.md"
# The tests start in processes that are forked off one which has the slow imports.
FORKSERVER = multiprocessing.get_context("forkserver")
PRELOAD = """pytest torch numpy tqdm tokenizers datasets peft transformers.models.gpt2.modeling_gpt2
transformers.models.llama.modeling_llama""".split()
# The quick ones first: most bugs are caught within a second of the tests' start.
TESTS = """test_common test_grpo test_rloo test_sampling test_ppo test_groups_by_hand
test_ppo_by_hand test_reference test_scripts test_pitfalls test_architectures test_golden
test_config test_properties test_extras test_stopping test_evaluation test_runs test_tasks
test_prompts test_tokens test_reward_model test_plot test_fit test_outgrow test_outgrow_verl
test_faults test_resume test_pretended_cuda test_cuda""".split()
# Which of them catch the bugs of a file soonest, where it isn't the test file of the same name.
QUICKEST = {
    "ppo": "ppo ppo_by_hand config extras",
    "grpo": "grpo groups_by_hand config extras",
    "rloo": "rloo groups_by_hand config extras",
    "common": "common reference sampling",
    "forward": "common pretended_cuda",
    "inputs": "common sampling pretended_cuda",
    "loading": "common",
    "decoding": "sampling pretended_cuda",
    "data": "tasks prompts",
    "prompts": "tasks prompts",
    "answers": "tasks prompts",
    "scoring": "tasks pretended_cuda",
    "inspect_reward": "tasks",
    "config": "config runs",
    "metrics": "groups_by_hand ppo_by_hand runs",
    "advice": "runs",
    "checkpoints": "resume",
    "runs": "runs resume",
    "curves": "plot",
    "tokens": "tokens ppo_by_hand groups_by_hand",
    "reward_models": "reward_model tasks",
    "pairs": "reward_model",
    "judging": "reward_model",
}
PITFALLS = Path(__file__).with_name("test_pitfalls.py")
STUCK = "the tests"  # don't start, or don't end: no test has caught anything
EQUIVALENT: dict[str, str] = {}

# file, text (once in the file), what it becomes, the bug in words
# fmt: off
MUTATIONS = [
    ("common.py", "return total / count.clamp(min=1)", "return total / max(1, x.numel())", "mean over padding too"),
    ("common.py", "    x = x.masked_fill(~mask, 0)\n", "", "padding summed into a masked mean"),
    ("common.py", "centred = (x - mean).masked_fill(~mask, 0)", "centred = x - mean", "padding counts in the variance of whitening"),
    ("common.py", "(mask.sum() - 1).clamp(min=1)", "mask.sum().clamp(min=1)", "no Bessel correction in whitening"),
    ("common.py", "torch.rsqrt(variance + 1e-8)", "1 / (variance + 1e-8)", "whitening divides by the variance"),
    ("common.py", "torch.rsqrt(variance + 1e-8)", "torch.rsqrt(variance)", "whitening a constant divides by 0"),
    ("common.py", "return whitened if shift_mean else", "return whitened if not shift_mean else", "whitening shifts the mean the wrong way"),
    ("common.py", "return at_least_float32(logits).log_softmax(-1).gather", "return logits.log_softmax(-1).gather", "log-probs in half precision"),
    ("common.py", "return at_least_float32(logits).log_softmax(-1).gather", "return at_least_float32(logits).softmax(-1).gather", "probabilities for log-probs"),
    ("common.py", "logprobs.clamp(min=torch.finfo(logprobs.dtype).min)", "logprobs", "entropy is NaN for a token of probability 0"),
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
    ("grpo.py", "groups = rewards.double().view(", "groups = rewards.view(", "constant groups keep their rounding error"),
    ("plumbing/metrics.py", "return lowest >= highest", "return lowest > highest", "no group counts as flat"),
    ("plumbing/metrics.py", "lowest = groups.masked_fill(unknown, torch.inf).amin", "lowest = groups.masked_fill(unknown, 0).amin", "a missing reward hides a constant group"),
    ("plumbing/inputs.py", "position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]", "position_ids = torch.arange(attention_mask.shape[1]).expand_as(attention_mask)[:, -tokens.shape[1] :]", "positions count the left padding"),
    ("plumbing/inputs.py", "(attention_mask.long().cumsum(1) - 1).clamp(min=0)", "attention_mask.long().cumsum(1)", "positions start at 1"),
    ("plumbing/inputs.py", 'return {"input_ids": tokens} |', 'return {"input_ids": tokens.masked_fill_(~attention_mask[:, -tokens.shape[1] :].bool(), 0)} |', "the tokens are changed before they are read"),
    ("plumbing/inputs.py", '"attention_mask": attention_mask.long()}', '"attention_mask": torch.ones_like(attention_mask.long())}', "padding is attended to"),
    ("plumbing/forward.py", "logits if temperature == 1 else logits / temperature", "logits", "temperature missing from the log-probs"),
    ("plumbing/forward.py", "logits if temperature == 1 else logits / temperature", "logits * temperature", "logits times the temperature"),
    ("plumbing/forward.py", "hidden = hidden[row, column]", "hidden = hidden.roll(-1, 1)[row, column]", "logits one to the right"),
    ("plumbing/forward.py", "    return logprobs, entropies\n", "    return logprobs + ~rollout.completion_mask.bool(), entropies\n", "log-probs at padding are not 0"),
    ("plumbing/forward.py", "    return logprobs, entropies\n", "    return logprobs, entropies + ~rollout.completion_mask.bool()\n", "entropies at padding are not 0"),
    ("plumbing/forward.py", "entropy = token_entropy(logits if entropy_grad else logits.detach())", "entropy = token_entropy(logits)", "the entropy carries gradient"),
    ("plumbing/forward.py", "    return in_order.masked_fill(~rollout.completion_mask.bool(), 0)", "    return in_order.masked_fill(~rollout.completion_mask.bool(), 0).detach()", "the values carry no gradient"),
    ("plumbing/forward.py", "completion_states(value_model.backbone, part)", "completion_states(value_model.backbone, part).roll(-1, 1)", "the value knows the action"),
    ("plumbing/forward.py", "return in_order.masked_fill(~rollout.completion_mask.bool(), 0)", "return in_order", "values at padding are not 0"),
    ("plumbing/forward.py", "for batch in batches]\n", "for batch in batches[: max(1, len(batches) - 1)]]\n", "the last, smaller micro-batch is lost"),
    ("common.py", "                module.p = 0.0\n", "                pass\n", "nn.Dropout left on"),
    ("common.py", "            sites += _zero_noise(module)\n", "", "functional dropout left on"),
    ("common.py", "                    sites += _zero_noise(quiet_configs[id(config)][0])\n", "", "dropout read from the config left on"),
    ("common.py", 'if ("drop" in name or "jitter" in name)', 'if ("drop" in name and name != "layerdrop" or "jitter" in name)', "layerdrop left on"),
    ("common.py", "rewards, values = rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)", "rewards, values = rewards.masked_fill_(~mask, 0), values.masked_fill_(~mask, 0)", "GAE changes its inputs"),
    ("plumbing/loading.py", '"dtype": torch.float32', '"dtype": "auto"', "a checkpoint in bfloat16 is trained in bfloat16"),
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
    ("common.py", "        model.train(was_training)", "        pass", "sampling leaves the evaluation mode on"),
    ("plumbing/loading.py", "    for source in (model.generation_config, model.config, tokenizer):", "    for source in (tokenizer,):", "only one of several EOS ids"),
    ("common.py", "    return eos_before == 0", "    return (eos_before + is_eos) == 0", "EOS is masked out"),
    ("common.py", "is_eos.cumsum(1) - is_eos\n", "is_eos.cumsum(1) - 1\n", "mask off where no EOS was seen"),
    ("sampling.py", "prompt_ids = prompt_ids.repeat_interleave(num_generations, dim=0)", "prompt_ids = prompt_ids.repeat(num_generations, 1)", "the completions of a prompt are not consecutive"),
    ("sampling.py", "prompt_mask.split(num_prompts))", "prompt_mask.split(num_prompts)[::-1])", "sub-batches get the masks of others"),
    ("sampling.py", "num_prompts = max_rows // num_generations", "num_prompts = max_rows", "sub-batches G times as large"),
    ("plumbing/prompts.py", "if len(rows) < 10:", "if len(rows) < 2:", "of two prompts one is trained on"),
    ("plumbing/data.py", "if has_own_reward or task.row_fault is None", "if task.row_fault is None", "a reward of one's own needs the answers of the task's"),
    ("sampling.py", "logits = logits.float() / temperature", "logits = logits.float()", "temperature ignored in sampling"),
    ("sampling.py", "sorted_probs.cumsum(-1) - sorted_probs", "sorted_probs.cumsum(-1)", "top_p drops the token that crosses p"),
    ("sampling.py", "logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]", "logits.topk(min(top_k, logits.shape[-1])).values[:, :1]", "top_k keeps one token"),
    ("sampling.py", "threshold.unsqueeze(1), right=True)", "threshold.unsqueeze(1), right=False)", "a token of probability 0 can be drawn"),
    ("sampling.py", "threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))", "pass", "the cumulated probabilities may end below the uniform number"),
    ("common.py", "torch.tensor(eos_token_ids, dtype=completions.dtype)", "torch.tensor(eos_token_ids[:1], dtype=completions.dtype)", "the mask ends at one of several EOS ids"),
    ("sampling.py", "decoder.until_stop(completion_mask(tokens, eos_token_ids))", "decoder.until_stop(tokens != pad_token_id)", "the mask inferred from the ids of padding"),
    ("sampling.py", "    top_k: int = 0,\n", "    top_k: int = 50,\n", "top_k 50 by default"),
    ("sampling.py", "    top_p: float = 1.0,\n", "    top_p: float = 0.9,\n", "top_p 0.9 by default"),
    ("sampling.py", "    if top_k > 0:\n", "    if top_k > 1:\n", "top_k 1 has no effect"),
    ("sampling.py", "uniforms[t, rows], temperature, top_k, top_p)", "uniforms[t, rows], model.generation_config.temperature or temperature, top_k, top_p)", "the temperature of generation_config"),
    ("plumbing/decoding.py", "        self.running &= ~torch.isin(drawn, self.eos)\n", "", "finished rows go on"),
    ("sampling.py", "uniforms[t, rows]", "uniforms[t, : len(rows)]", "random numbers of dropped rows go to others"),
    ("plumbing/decoding.py", "self.mask[:, length - 1] = True", "pass", "drawn tokens are masked from the next ones"),
    ("sampling.py", "with evaluating(model), uncompiled", "with uncompiled", "dropout while sampling"),
    ("sampling.py", "attention_mask=torch.cat([to(device, prompt_mask), drawn_mask], dim=1)", "attention_mask=torch.cat([to(device, prompt_mask), torch.ones_like(drawn_mask)], dim=1)", "padding after EOS counts as text"),
    ("sampling.py", "logprobs=logprobs.masked_fill(~drawn_mask, 0)", "logprobs=logprobs", "log-probs recorded after EOS"),
    ("sampling.py", "finished=(torch.isin(tokens, decoder.eos) & drawn_mask).any(dim=1)", "finished=torch.isin(tokens[:, -1], decoder.eos)", "only rows that end at the limit with EOS are finished"),
    ("ppo.py", "is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))", "is_last = torch.arange(mask.shape[1], device=mask.device) == mask.shape[1] - 1", "the score in the last column, not on the last token"),
    ("ppo.py", "is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))", "is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True)); is_last = is_last.roll(1, 1) & ~mask | is_last & mask[:, -1:]", "the score one slot after the last token"),
    ("ppo.py", "(-kl_coef * kl).masked_fill(~mask, 0)", "(kl_coef * kl).masked_fill(~mask, 0)", "the KL is a bonus"),
    ("ppo.py", "(-kl_coef * kl).masked_fill(~mask, 0)", "(-kl_coef * kl)", "KL paid at padding"),
    ("ppo.py", "    return torch.max(free, bounded), bounded > free", "    return torch.min(free, bounded), bounded > free", "minimum for maximum in PPO's clip"),
    ("ppo.py", "    return torch.max(free, bounded), bounded > free", "    return free, bounded > free", "no clip"),
    ("ppo.py", "    return torch.max(free, bounded), bounded > free", "    return torch.max(free, bounded), free > bounded", "PPO counts the tokens that the clip leaves alone"),
    ("ppo.py", "    return torch.max(free, bounded), bounded > free", "    return torch.max(free, bounded), bounded != free", "PPO counts every token outside of the clip range"),
    ("ppo.py", "policy_ratio(logprobs - old_logprobs)", "policy_ratio(old_logprobs - logprobs)", "PPO's ratio upside down"),
    ("ppo.py", "bounded_values = values.clamp(old_values - clip_range_value, old_values + clip_range_value)", "bounded_values = values.clamp(-clip_range_value, clip_range_value)", "values clipped around 0"),
    ("ppo.py", "return 0.5 * torch.max(free, bounded)", "return torch.max(free, bounded)", "no half in the value loss"),
    ("ppo.py", "return 0.5 * torch.max(free, bounded)", "return 0.5 * torch.min(free, bounded)", "minimum in the value loss"),
    ("ppo.py", "return 0.5 * torch.max(free, bounded), bounded > free", "return 0.5 * torch.max(free, bounded), free > bounded", "PPO counts the values that the clip leaves alone"),
    ("ppo.py", "        disable_dropout(policy, value_model)", "        disable_dropout(policy)", "dropout left on in the value model"),
    ("ppo.py", "scores = scores - config.missing_eos_penalty * ~on_cpu", "scores = scores - config.missing_eos_penalty * on_cpu", "the penalty on those that did end"),
    ("ppo.py", "            advantages = masked_whiten(advantages, mask)\n", "", "advantages not whitened"),
    ("ppo.py", "loss = (loss * m).sum() / num_tokens", "loss = (loss * m).sum() / m.sum()", "PPO normalises by the micro-batch"),
    ("ppo.py", "loss = (loss * m).sum() / num_tokens", "loss = (loss * m).sum() / len(rows)", "PPO sums over tokens and averages over rows"),
    ("ppo.py", "loss = (loss * m).sum() / num_tokens", "loss = loss.sum() / num_tokens", "PPO's loss is not masked"),
    ("ppo.py", "loss = pg + config.vf_coef * vf", "loss = pg - config.vf_coef * vf", "the value loss is maximised"),
    ("ppo.py", "                optimizer.zero_grad()\n", "", "gradients pile up in PPO"),
    ("ppo.py", '            for settings in optimizer.param_groups:\n                settings["lr"] = learning_rate\n', "", "constant learning rate in PPO"),
    ("ppo.py", "config.learning_rate * warmup *", "config.learning_rate *", "no warm-up in PPO"),
    ("ppo.py", "betas=(0.9, 0.95)", "betas=(0.9, 0.999)", "Adam remembers too long in PPO"),
    ("ppo.py", "masked_whiten(rewards, mask, shift_mean=False)", "masked_whiten(rewards, rewards != 0, shift_mean=False)", "rewards whitened where they are not 0"),
    ("ppo.py", "            advantages = masked_whiten(advantages, mask)\n", "            advantages = masked_whiten(advantages, mask)\n            returns = advantages + old_values\n", "returns from whitened advantages"),
    ("ppo.py", "sampling = sampling_options(config, policy, tokenizer)", 'sampling = sampling_options(config, policy, tokenizer) | {"top_k": 5}', "PPO samples with top_k"),
    ("ppo.py", "old_logprobs, _ = completion_logprobs(policy, rollout, **in_rollout)", "old_logprobs = rollout.logprobs", "old log-probs of the decode loop"),
    ("ppo.py", ".split(B // config.num_mini_batches)", ".split(B)", "num_mini_batches adds no steps"),
    ("ppo.py", "            mask = rollout.completion_mask  #", "            rollout.tokens.masked_fill_(~rollout.attention_mask, 1)\n            mask = rollout.completion_mask  #", "PPO trains on other tokens after EOS"),
    ("plumbing/metrics.py", "if not grad_norm.isfinite():", "if False:", "a NaN goes into the weights"),
    ("plumbing/metrics.py", 'self.add("val/ratio", ratio, where)', 'self.add("val/ratio", ratio)', "PPO's mean ratio over padding too"),
    ("plumbing/metrics.py", "0.5 * (logprobs - old_logprobs) ** 2, mask)", "0.5 * (logprobs - old_logprobs) ** 2)", "PPO's KL to the old policy over padding too"),
    ("ppo.py", "value_loss(\n                        values, old_values[rows], returns[rows]", "value_loss(\n                        values, old_values[rows], advantages[rows]", "the value model learns advantages"),
    ("ppo.py", "                with torch.no_grad(), ref as ref_model:\n", "                ref_model = ref.__enter__()\n                with torch.no_grad():\n", "the reference context is never left"),
    ("ppo.py", "single_update = config.num_epochs * config.num_mini_batches == 1 and", "single_update = config.num_mini_batches == 1 and", "PPO takes old log-probs for new ones in the second epoch"),
    ("ppo.py", "num_tokens = mask[to(device, mini_batch)].sum()", "num_tokens = mask.sum()", "PPO counts the tokens of the rollout, not of the minibatch"),
    ("grpo.py", "centred = groups - groups.nanmean(dim=1, keepdim=True)", "centred = groups - groups.nanmean()", "the mean of the batch for that of the group"),
    ("grpo.py", "(variance.sqrt() + 1e-4)", "(variance + 1e-4)", "GRPO divides by the variance"),
    ("grpo.py", "/ (num_known - 1).clamp(min=1)", "/ num_known.clamp(min=1)", "no Bessel correction in GRPO"),
    ("grpo.py", "/ (num_known - 1).clamp(min=1)", "/ (num_generations - 1)", "missing rewards count in GRPO's standard deviation"),
    ("grpo.py", "groups.nanmean(dim=1, keepdim=True)", "groups.nan_to_num(0).mean(dim=1, keepdim=True)", "missing rewards count in GRPO's mean"),
    ("grpo.py", ".to(torch.promote_types(rewards.dtype, torch.float32))", "", "GRPO's advantages stay in float64"),
    ("grpo.py", ".to(torch.promote_types(rewards.dtype, torch.float32))", ".to(rewards.dtype)", "GRPO's advantages in half precision"),
    ("grpo.py", "(variance.sqrt() + 1e-4)", "(variance.sqrt() + 1e-8)", "1e-8 for 1e-4"),
    ("grpo.py", "(groups[~groups.isnan()].std() + 1e-4)", "(((centred**2).nansum(dim=1, keepdim=True) / (num_known - 1).clamp(min=1)).sqrt() + 1e-4)", "scale_rewards batch scales by the group"),
    ("common.py", "mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)", "mean = log_ratio.sum(1, keepdim=True)", "GSPO without its length normalisation"),
    ("common.py", "mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)", "mean = log_ratio.mean(1, keepdim=True)", "GSPO averages over padding"),
    ("common.py", "log_ratio = mean.expand_as(log_ratio).masked_fill(~mask.bool(), 0)", "log_ratio = mean.expand_as(log_ratio)", "GSPO's ratio at padding is not 1"),
    ("common.py", "log_ratio = (logprobs - old_logprobs).masked_fill(~mask.bool(), 0)", "log_ratio = logprobs - old_logprobs", "the ratio at padding is not 1"),
    ("common.py", "log_ratio = (logprobs - old_logprobs).masked_fill", "log_ratio = (old_logprobs - logprobs).masked_fill", "GRPO's ratio upside down"),
    ("grpo.py", "    high = clip_range if clip_range_high is None else clip_range_high", "    high = clip_range", "clip-higher ignored"),
    ("grpo.py", "ratio.clamp(max=cispo_bound).detach()", "ratio.clamp(max=cispo_bound)", "CISPO's weight carries gradient"),
    ("grpo.py", "ratio.clamp(max=cispo_bound).detach()", "ratio.clamp(1 - clip_range, cispo_bound).detach()", "CISPO bounded below"),
    ("grpo.py", "ratio.clamp(max=cispo_bound).detach()", "ratio.clamp(max=1 + high).detach()", "CISPO takes its bound from the clip range"),
    ("grpo.py", "clipped = (ratio > cispo_bound) & (A != 0)", "clipped = (ratio <= cispo_bound) & (A != 0)", "CISPO counts the tokens that it doesn't bound"),
    ("grpo.py", "clipped = (ratio > cispo_bound) & (A != 0)", "clipped = ratio > cispo_bound", "CISPO counts tokens without an advantage"),
    ("grpo.py", "        clipped = (ratio > cispo_bound) & (A != 0)\n", "", "CISPO counts the tokens that a clip would change"),
    ("grpo.py", "loss, clipped = torch.max(free, bounded), bounded > free", "loss, clipped = torch.min(free, bounded), bounded > free", "minimum for maximum in GRPO's clip"),
    ("grpo.py", "torch.max(free, bounded), bounded > free", "torch.max(free, bounded), free > bounded", "GRPO counts the tokens that the clip leaves alone"),
    ("grpo.py", 'LOSS_FLAGS = """clip_range clip_range_high cispo_bound', 'LOSS_FLAGS = """clip_range cispo_bound', "--clip_range_high doesn't reach the loss"),
    ("grpo.py", "clip_range clip_range_high cispo_bound loss_type", "clip_range clip_range_high loss_type", "--cispo_bound doesn't reach the loss"),
    ("grpo.py", "cispo_bound loss_type importance_sampling_level", "cispo_bound loss_type", "--importance_sampling_level doesn't reach the loss"),
    ("grpo.py", 'max_new_tokens kl_coef""".split()', 'max_new_tokens""".split()', "--kl_coef doesn't reach GRPO's loss"),
    ("grpo.py", 'loss = loss + kl_coef * kl\n', 'loss = loss - kl_coef * kl\n', "GRPO rewards the KL"),
    ("grpo.py", 'kl_estimate(meter.old_logprobs, ref_logprobs, "k1")', 'kl_estimate(meter.old_logprobs, ref_logprobs, "k3")', "GRPO logs the KL as k3"),
    ("rloo.py", "(step + 1) / max(1, config.warmup_steps)", "step / max(1, config.warmup_steps)", "the warm-up starts at 0 in RLOO"),
    ("grpo.py", 'ref_logprobs.masked_fill(~mask, 0), "k3")', 'ref_logprobs.masked_fill(~mask, 0), "k1")', "k1 as a loss, whose expected gradient is 0"),
    ("grpo.py", "kl_estimate(logprobs, ref_logprobs.masked", "kl_estimate(logprobs.detach(), ref_logprobs.masked", "the KL carries no gradient"),
    ("grpo.py", "    loss = loss.masked_fill(~mask, 0)  # (B, T)\n", "", "padding counts in GRPO's loss"),
    ("grpo.py", "return masked_mean(loss, mask, dim=1).sum() / num_rows", "return masked_mean(loss, mask, dim=1).mean()", "GRPO normalises by the micro-batch"),
    ("grpo.py", "return masked_mean(loss, mask, dim=1).sum() / num_rows", "return loss.mean(dim=1).sum() / num_rows", "GRPO divides by T, not by the length"),
    ("grpo.py", '            for settings in optimizer.param_groups:\n                settings["lr"] = learning_rate\n', "", "constant learning rate in GRPO"),
    ("grpo.py", "config.learning_rate * warmup *", "config.learning_rate *", "no warm-up in GRPO"),
    ("grpo.py", "betas=(0.9, 0.95)", "betas=(0.9, 0.999)", "Adam remembers too long in GRPO"),
    ("grpo.py", "return loss.sum() / num_tokens.clamp(min=1)", "return loss.sum() / num_tokens", "an empty minibatch divides by 0"),
    ("grpo.py", "return loss.sum() / num_tokens.clamp(min=1)", "return loss.sum() / mask.sum().clamp(min=1)", "DAPO normalises by the micro-batch"),
    ("grpo.py", "return loss.sum() / (num_rows * max_new_tokens)", "return masked_mean(loss, mask, dim=1).sum() / num_rows", "Dr. GRPO that still divides by the length"),
    ("grpo.py", "return loss.sum() / (num_rows * max_new_tokens)", "return loss.sum() / (num_rows * loss.shape[1] * 2)", "Dr. GRPO divides by another constant"),
    ("grpo.py", "        disable_dropout(policy)\n", "        pass\n", "dropout left on in GRPO"),
    ("grpo.py", "mask = mask & rollout.finished.unsqueeze(1)", "mask = mask & ~rollout.finished.unsqueeze(1)", "those that did end are masked"),
    ("grpo.py", "num_tokens = mask[to(device, mini_batch)].sum()", "num_tokens = mask.sum()", "DAPO counts the tokens of the rollout, not of the minibatch"),
    ("grpo.py", "ref_logprobs=ref_rows, **counts, **loss_options", "ref_logprobs=ref_rows, **counts | {\"num_rows\": len(rows)}, **loss_options", "the loop hands in the rows of the micro-batch"),
    ("grpo.py", "single_update = config.num_epochs * config.num_mini_batches == 1 and", "single_update = config.num_epochs == 1 and", "old log-probs taken for new ones at the second minibatch"),
    ("grpo.py", "                optimizer.zero_grad()\n", "", "gradients pile up in GRPO"),
    ("rloo.py", "/ (num_known - 1).clamp(min=1)", "/ num_known.clamp(min=1)", "the baseline divides by G"),
    ("rloo.py", "baseline = (groups.nansum(dim=1, keepdim=True) - groups) /", "baseline = groups.nansum(dim=1, keepdim=True) /", "the baseline holds its own reward"),
    ("rloo.py", "/ (num_known - 1).clamp(min=1)", "/ (num_generations - 1)", "missing rewards count in the baseline"),
    ("rloo.py", "(centred[~centred.isnan()].std() + 1e-4)", "(centred[~centred.isnan()].var() + 1e-4)", "normalised by the variance"),
    ("rloo.py", "centred[~centred.isnan()].std()", "centred.nan_to_num(0).std()", "missing rewards count in the normalisation"),
    ("rloo.py", ".masked_fill(num_known < 2, torch.nan)", ".masked_fill(num_known < 2, 0)", "missing rewards beside a single one count in the normalisation"),
    ("rloo.py", "groups = rewards.double().view(", "groups = rewards.view(", "RLOO's constant groups keep their rounding error"),
    ("rloo.py", ".to(torch.promote_types(rewards.dtype, torch.float32))", "", "RLOO's advantages stay in float64"),
    ("rloo.py", ".masked_fill(num_known < 2, torch.nan)", "", "the only known reward of a group is an advantage"),
    ("rloo.py", ".masked_fill(~mask.bool(), 0).sum(1)", ".masked_fill(~mask.bool(), 0).mean(1)", "RLOO's ratio is a mean over tokens"),
    ("common.py", "return (log_ratio - excess).exp()", "return log_ratio.exp()", "a long ratio overflows"),
    ("common.py", "excess = (log_ratio - 20).clamp(min=0)", "excess = (log_ratio - 0).clamp(min=0)", "the ratio never exceeds 1"),
    ("common.py", "excess = (log_ratio - 20).clamp(min=0).detach()", "excess = (log_ratio - 20).clamp(min=0)", "a long ratio has no gradient"),
    ("rloo.py", "loss, clipped = torch.max(free, bounded), bounded > free", "loss, clipped = torch.min(free, bounded), bounded > free", "minimum for maximum in RLOO's clip"),
    ("rloo.py", "torch.max(free, bounded), bounded > free", "torch.max(free, bounded), free > bounded", "RLOO counts the completions that the clip leaves alone"),
    ("rloo.py", "rloo_advantages(rewards, G, config.normalize_advantages)", "rloo_advantages(rewards, G)", "--normalize_advantages has no effect"),
    ("rloo.py", "return loss.sum() / num_rows, clipped", "return loss.mean(), clipped", "RLOO normalises by the micro-batch"),
    ("rloo.py", "rewards - config.kl_coef * kl.sum(1)", "rewards + config.kl_coef * kl.sum(1)", "RLOO rewards the KL"),
    ("rloo.py", "rewards - config.kl_coef * kl.sum(1)", "rewards - config.kl_coef * kl.mean(1)", "RLOO's KL is a mean over tokens"),
    ("rloo.py", 'kl = kl_estimate(old_logprobs, ref_logprobs, "k1")', 'kl = kl_estimate(old_logprobs, ref_logprobs, "k3")', "k3 in RLOO's reward"),
    ("rloo.py", "rewards = scores.clamp(*clip) if clip else scores", "rewards = scores", "rewards are not clipped"),
    ("rloo.py", "single_update = config.num_epochs * config.num_mini_batches == 1 and", "single_update = config.num_mini_batches == 1 and", "old log-probs taken for new ones in the second epoch"),
    ("rloo.py", "                optimizer.zero_grad()\n", "", "gradients pile up in RLOO"),
    ("rloo.py", "                grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)", "                grad_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])", "max_grad_norm ignored"),
    ("rloo.py", '            for settings in optimizer.param_groups:\n                settings["lr"] = learning_rate\n', "", "constant learning rate in RLOO"),
    ("rloo.py", "config.learning_rate * warmup *", "config.learning_rate *", "no warm-up in RLOO"),
    ("rloo.py", "betas=(0.9, 0.95)", "betas=(0.9, 0.999)", "Adam remembers too long in RLOO"),
    ("plumbing/metrics.py", "x.masked_fill(~mask, 0).sum()\n", "x.sum()\n", "metrics add up padding"),
    ("plumbing/metrics.py", "self.counts.get(name, 0) + mask.sum()", "self.counts.get(name, 0) + x.numel()", "metrics count padding"),
    ("plumbing/metrics.py", "self.sums[name] = self.sums.get(name, 0) + x", "self.sums[name] = x", "metrics hold the last micro-batch alone"),
    ("plumbing/metrics.py", "self.shares[name] = self.shares.get(name, 0.0) + x.detach()", "self.shares[name] = x.detach()", "the logged loss is that of the last micro-batch"),
    ("plumbing/metrics.py", "self.shares, self.first_mini_batch = {}, False", "self.first_mini_batch = False", "the loss of a minibatch counts in the next one"),
    ("plumbing/metrics.py", "self.shares, self.first_mini_batch = {}, False", "self.shares = {}", "the first minibatch never ends"),
    ("plumbing/metrics.py", "self.old_logprobs[rows] = old_logprobs", "self.old_logprobs[: len(rows)] = old_logprobs", "old log-probs are noted for other rows"),
    ("plumbing/metrics.py", 'self.add("policy/clipfrac_avg", clipped, where)', 'self.add("policy/clipfrac_avg", clipped)', "the share of clipped tokens over padding too"),
    ("plumbing/metrics.py", 'self.add("policy/entropy_avg", entropy, mask)', 'self.add("policy/entropy_avg", entropy)', "the entropy of the update over padding too"),
    ("plumbing/metrics.py", 'self.add("grad_norm", grad_norm)', 'self.sums["grad_norm"], self.counts["grad_norm"] = grad_norm, 1', "the norm of the last gradient for their mean"),
    ("plumbing/metrics.py", "self.laps[name], self.started = now - self.started, now", "self.laps[name], self.started = now, now - self.started", "time and length of a lap are exchanged"),
    ("plumbing/metrics.py", "self.laps[name], self.started = now - self.started, now", "self.laps[name] = now - self.started", "the update's time holds the rollout's"),
    ("plumbing/metrics.py", "(x if mask is None else x.masked_fill(~mask, 0)).detach().max()", "x.detach().max()", "a maximum over padding too"),
    ("plumbing/metrics.py", "self.sums[name] = torch.maximum(self.sums.get(name, largest), largest)", "self.sums[name] = largest", "the maximum of the last micro-batch"),
    ("plumbing/metrics.py", "x / max(1, n)", "x / n", "a metric of nothing divides by 0"),
    ("plumbing/metrics.py", "return masked_mean((x - masked_mean(x, mask)) ** 2, mask)", "return ((x - x.mean()) ** 2).mean()", "explained variance over padding too"),
    ("plumbing/metrics.py", "variance(returns), variance(returns - values)", "variance(returns), masked_mean((returns - values) ** 2, mask)", "explained variance without the mean of the errors"),
    ("plumbing/metrics.py", "torch.where(constant, 0.0, 1 - errors / whole)", "1 - errors / whole", "explained variance of constant returns"),
    ("plumbing/metrics.py", "kl.masked_fill(~mask, 0).sum(1)", "kl.sum(1)", "the KL of a completion with its padding"),
    ("plumbing/metrics.py", "kl.masked_fill(~mask, 0).sum(1)", "kl.masked_fill(~mask, 0).mean(1)", "the KL of a completion as a mean"),
    ("plumbing/metrics.py", "None if kl is None else masked_mean(kl, mask)", "None if kl is None else kl.mean()", "the KL of a token over padding too"),
    ("plumbing/metrics.py", "masked_mean(-logprobs, mask)", "-logprobs.mean()", "the entropy over padding too"),
    ("plumbing/metrics.py", "None if kl is None else kl_per_row.mean()", "kl_per_row.mean()", "an unknown KL logged as 0"),
    ("plumbing/metrics.py", "\"objective/scores\": scores.nanmean()", "\"objective/scores\": scores.nansum() / len(scores)", "a missing score counts as 0 in the metrics"),
    ("plumbing/metrics.py", "(-kl_coef * kl_per_row).mean()", "(kl_coef * kl_per_row).mean()", "the sign of the logged KL penalty"),
    ("plumbing/metrics.py", "(scores - kl_coef * kl_per_row).nanmean()", "(scores - kl_coef * kl_per_row).mean()", "a missing score makes the logged reward NaN"),
    ("plumbing/metrics.py", "groups = scores.cpu().view(-1, num_generations)", "groups = scores.cpu().view(num_generations, -1).T", "the spread within other groups"),
    ("plumbing/metrics.py", "group[~group.isnan()].std()", "group[~group.isnan()].std(correction=0)", "no Bessel correction in the logged spread"),
    ("plumbing/metrics.py", "group[~group.isnan()].std()", "group.std()", "a missing score in the logged spread"),
    ("plumbing/metrics.py", "sum(stds) / len(groups)", "sum(stds) / max(1, len(stds))", "flat groups left out of the logged spread"),
    ("plumbing/metrics.py", "lengths = rollout.completion_mask.sum(1)", "lengths = rollout.attention_mask.sum(1)", "the logged length holds the prompt"),
    ("plumbing/metrics.py", "1 - rollout.finished.float().mean().item()", "rollout.finished.float().mean().item()", "the share of those that did end"),
    ("plumbing/evaluation.py", "manual_seed(config.seed + 1)", "manual_seed(config.seed)", "evaluation with the random numbers of training"),
    ("plumbing/runs.py", "self.weights = checkpoints.trained_weights(policy=self.policy, value=self.value_model)\n", "self.weights = checkpoints.trained_weights(policy=self.policy, value=self.value_model)\n        self.policy = __import__('copy').deepcopy(self.policy)\n", "the model from before the training is saved"),
    ("plumbing/config.py", "allow_abbrev=False", "allow_abbrev=True", "a flag that lacks letters is another flag"),
    ("plumbing/config.py", 'value.tiny if config.model == "tiny" else value.other', 'value.other', "the tiny model gets the defaults of the others"),
    ("plumbing/config.py", 'value.tiny if config.model == "tiny" else value.other', 'value.other if config.model == "tiny" else value.tiny', "the defaults of the tiny model and of others are exchanged"),
    ("plumbing/config.py", 'if has_adapter and "learning_rate" not in given:', 'if has_adapter:', "the learning rate that was given is changed for an adapter"),
    ("plumbing/config.py", 'name in LOWEST and value < LOWEST[name]', 'name in LOWEST and value < 0', "a bound of CISPO below 1"),
    ("plumbing/scoring.py", "(scores * torch.tensor(task.weights)).nansum(dim=1)", "scores.nansum(dim=1)", "the weights of the rewards are ignored"),
    ("plumbing/scoring.py", "(scores * torch.tensor(task.weights)).nansum(dim=1)", "(scores * torch.tensor(task.weights)).sum(dim=1)", "one missing reward hides the others"),
    ("plumbing/scoring.py", "total.masked_fill(scores.isnan().all(dim=1), math.nan)", "total", "a completion without any reward gets 0"),
    ("plumbing/scoring.py", "    rows = [row for row in rows for _ in range(num_generations)]\n    columns", "    rows = rows * num_generations\n    columns", "rewards are given the prompts of other rows"),
    ("plumbing/scoring.py", "    rows = [row for row in rows for _ in range(num_generations)]\n    right", "    rows = rows * num_generations\n    right", "answers are checked against those of other rows"),
    ("plumbing/scoring.py", "row[-len(mask) :][mask].tolist()", "row[-len(mask) :].tolist()", "the ids for the reward hold padding"),
    ("plumbing/scoring.py", "texts, ids = decode(tokenizer, rollout, task.stop), completion_ids(rollout)\n", "texts, ids = decode(tokenizer, rollout, task.stop), completion_ids(rollout)\n    ids = [tokenizer(text).input_ids for text in texts]\n", "the text is encoded again for the reward"),
    ("plumbing/scoring.py", "ids[:-1] if finished else ids)", "ids)", "EOS is part of the text"),
    ("plumbing/stopping.py", "    text = tokenizer.decode(prompt + completion, skip_special_tokens=True)\n", "    before, text = \"\", tokenizer.decode(completion, skip_special_tokens=True)\n", "the space before the first word is lost"),
    ("plumbing/scoring.py", "ids = tokenizer(text, add_special_tokens=False).input_ids\n    except", "ids = tokenizer(text).input_ids\n    except", "two BOS before a chat prompt"),
    ("plumbing/scoring.py", "tokenize=False, add_generation_prompt=True)", "tokenize=False)", "the assistant's turn is not opened"),
    ("plumbing/scoring.py", "pad_rows(ids, PADDING, \"left\", \"cpu\")", "pad_rows(ids, PADDING, \"right\", \"cpu\")", "prompts padded on the right"),
    ("plumbing/reward_models.py", "    last = last_real_token(hidden, mask)  # (B, L, D)", "    last = last_real_token(hidden, mask.roll(-1, 1) & mask)  # (B, L, D)", "the reward model's score is read before EOS"),
    ("plumbing/reward_models.py", '0, "right", self.model.device)', '0, "left", self.model.device)', "the reward model reads shifted positions"),
    ("plumbing/reward_models.py", "tokenizer(text_of(prompt) + completion if prompt else completion)", "tokenizer(completion)", "the reward model reads no prompt"),
    ("plumbing/reward_models.py", "return tokenizer(text, add_special_tokens=False).input_ids", "return tokenizer(text).input_ids", "two BOS before what the reward model reads"),
    ("plumbing/prompts.py", 'random.Random(f"{seed},{p}")', 'random.Random(f"{seed}")', "the same order of prompts in every pass"),
    ("plumbing/prompts.py", "train, heldout = rows[num_heldout:], rows", "train, heldout = rows, rows", "held-out prompts are trained on"),
    ("plumbing/data.py", "return task.reward_model.model\n", "return policy\n", "--value_init reward_model starts from the policy"),
    ("plumbing/answers.py", "Decimal(n[-1])", "Decimal(n[0])", "the first number counts as the answer"),
    ("plumbing/checkpoints.py", "if name not in FREE_ON_RESUME and", "if False and", "a resumed run takes other settings"),
    ("plumbing/checkpoints.py", "if script != config.script:", "if False:", "a run of another script is resumed"),
    ("plumbing/checkpoints.py", 'optimizer.load_state_dict(state["optimizer"])', "pass", "a resumed run starts with a new optimiser"),
    ("plumbing/checkpoints.py", 'generator.set_state(state["generators"][name])', "pass", "a resumed run draws the first random numbers again"),
    ("plumbing/checkpoints.py", 'torch.set_rng_state(state["torch"])', "pass", "a resumed run draws another dropout"),
    ("plumbing/checkpoints.py", 'p.copy_(state["weights"][name])', "pass", "a resumed run starts with the first weights"),
    ("plumbing/runs.py", "    file.truncate(length)\n", "", "lines after the checkpoint stay"),
    ("plumbing/checkpoints.py", 'if checksum.to_bytes(4, "big") != file.read():', "if False:", "a damaged checkpoint is used"),
    ("plumbing/checkpoints.py", "weights_only=True, map", "weights_only=False, map", "what a checkpoint holds is run"),
    ("plumbing/runs.py", "register_step_pre_hook", "register_step_post_hook", "an interrupt within the optimiser saves half an update"),
    ("plumbing/runs.py", "if not overwrite:  # begun", "if False:  # begun", "a run that has just begun is moved away"),
    ("plumbing/decoding.py", "if not logits.logsumexp(-1).isfinite().all():", "if False:", "weights that are not finite end in a traceback"),
    ("plumbing/loading.py", "if logits.isnan().any():", "if False:", "weights that are not finite are another fault"),
    ("sampling.py", "decoder.until_stop(completion_mask(tokens, eos_token_ids))", "decoder.until_stop(completion_mask(tokens, eos_token_ids).cpu())", "a mask on the CPU"),
    ("plumbing/scoring.py", "torch.Generator(policy.device)", "torch.Generator()", "a generator of the wrong device"),
    ("plumbing/decoding.py", "self.running &= ~torch.isin(drawn, self.eos)\n", "self.running &= ~torch.isin(drawn, self.eos)\n        self.running.any().item()\n", "the decode loop waits for every token"),
    ("plumbing/decoding.py", "self.column.fill_(column)", "self.column = torch.full_like(self.column, column)", "a tensor is replaced while a graph holds its address"),
    ("plumbing/decoding.py", 'torch.cuda.set_sync_debug_mode("error")', "pass", "a forward pass that waits is captured, and fails half-way"),
    ("grpo.py", 'watch.lap("time/rollout")\n            clear_cache()', 'clear_cache()\n            watch.lap("time/rollout")', "the cache is emptied while the device works"),
    ("plumbing/decoding.py", "to(self.device, distinct), to(self.device, which)", "distinct, to(self.device, which)", "the prompts stay on the CPU"),
    ("plumbing/forward.py", "    part.copy_on_cpu = on_cpu(rollout)[rows]", "    assert rows is not None", "each micro-batch is transferred to the CPU again"),
    ("plumbing/forward.py", "return x.pin_memory().to(device, non_blocking=True)", "return x.to(device)", "each index waits for the device"),
    ("plumbing/inputs.py", "masking_utils._ignore_causal_mask_sdpa = answer", "assert answer is not None", "each forward pass asks the device for its mask"),
    ("plumbing/inputs.py", "if is_compiled else contextlib.nullcontext()", "if model else contextlib.nullcontext()", "a stance for all threads is set where nothing is compiled"),
    ("plumbing/inputs.py", 'torch.compiler.set_stance("force_eager") if', "contextlib.nullcontext() if", "sampling is compiled for each length"),
    ("plumbing/inputs.py", "if compiled or not hasattr", "if not hasattr", "a compiled forward pass sees a function that is replaced"),
    ("plumbing/inputs.py", "    with _replacing:", "    with contextlib.nullcontext():", "two threads leave transformers without its masks"),
    ("plumbing/inputs.py", "if threading.get_ident() != this_thread:", "if False:", "a thread is told of another one's mask"),
    ("plumbing/inputs.py", "(no_padding or padding_mask is None) and ask", "ask", "padding is seen where a mask could be skipped"),
    ("plumbing/metrics.py", 'watch.lap("time/update", wait=False)', 'watch.lap("time/update")', "the metrics are waited for twice"),
    ("plumbing/scoring.py", "PADDING = 0", "PADDING = 50256", "padding by an id that the model doesn't know"),
    ("grpo.py", "(config.kl_coef + config.entropy_coef > 0)", "(config.entropy_coef > 0)", "rows without advantage lose their KL in GRPO"),
    ("grpo.py", "mini_batch, has_gradient, **in_update", "mini_batch, None, **in_update", "GRPO computes rows that have no gradient"),
    ("rloo.py", "mini_batch, has_gradient, **in_update", "mini_batch, None, **in_update", "RLOO computes rows that have no gradient"),
    ("plumbing/forward.py", "if wanted[rows].any() else rows[:1]", "if wanted[rows].any() else rows", "no row is left out where all could be"),
    ("plumbing/loading.py", "        torch.cuda.set_device(device)\n", "        pass\n", "CUDA graphs on another device"),
    ("ppo.py", "logprobs.detach() if single_update else", "logprobs.detach() if old_logprobs is None else", "PPO's single update takes the rounding of another forward pass"),
    ("rloo.py", "logprobs.detach() if single_update else", "logprobs.detach() if old_logprobs is None else", "RLOO's single update takes the rounding of another forward pass"),
    ("plumbing/runs.py", "and not self.weights_moved and", "and", "half an update is saved as a step"),
    ("plumbing/checkpoints.py", 'new = path.with_name(f"{path.name}.new")', "new = path", "a checkpoint is overwritten in place"),
    ("plumbing/checkpoints.py", "            os.fsync(file.fileno())\n        new.replace(path)\n", "        new.replace(path)\n", "a checkpoint takes its name before it is on the disk"),
    ("plumbing/runs.py", "if not config.resume and _holds_run(folder):", "if not config.resume and folder.exists():", "a run without a step takes the place of the one in .old"),
    ("plumbing/evaluation.py", "(\"_greedy\", 1, {\"top_k\": 1})", "(\"_greedy\", 1, {})", "the greedy evaluation samples"),
    ("plumbing/runs.py", "and value > self.best:", "and (value < self.best or self.best == -math.inf):", "the worst model is kept"),
    ("plumbing/runs.py", "if name not in self.warned:", "if True:", "a warning at every step"),
    ("plumbing/advice.py", "if kl is not None and kl > 10 and", "if kl is not None and kl > 100 and", "no warning of a large KL"),
    ("plumbing/advice.py", "if kl is not None and kl > 10 and", "if kl is not None and math.isfinite(kl) and kl > 10 and", "no warning of an infinite KL"),
    ("plumbing/advice.py", ' and now.get("objective/kl_token", math.inf) > 0.1:', ":", "a warning of the KL of long texts"),
    ("plumbing/advice.py", "< -0.02 - 4 * error", "< -0.02", "a warning of noise"),
    ("plumbing/advice.py", "if flat > 0.5:", "if flat > 0.9:", "no warning of flat groups"),
    ("plumbing/curves.py", "values.mean(0)", "values[0]", "the first seed is drawn, not the mean"),
    ("plumbing/curves.py", "(values.min(0), values.max(0))", "(values.mean(0), values.max(0))", "half a band"),
    ("tools/inspect_reward.py", "share = (between - within)", "share = between", "luck counts as explained by the prompt"),
    ("tasks.py", "len(set(runs)) / len(runs) - 1", "len(runs) / len(words) - 1", "no repetition is seen"),
    ("tasks.py", "re.fullmatch(p, text_of(c), re.DOTALL)", "re.search(p, text_of(c), re.DOTALL)", "a part that has the format is enough"),
    ("plumbing/forward.py", "order = lengths.argsort(descending=True, stable=True)", "order = lengths.argsort(stable=True)", "short rows first"),
    ("plumbing/forward.py", "(too_many or len(batches[-1]) == max_rows)", "too_many", "micro-batches of any number of rows"),
    ("plumbing/forward.py", "+ (len(batches[-1]) + 1) * wider[1]", "+ (len(batches[-1]) + 1) * widths[1]", "a micro-batch is as wide as its last row"),
    ("plumbing/forward.py", "torch.cat(found, dim=1)[:, _order(batches)]", "torch.cat(found, dim=1)", "sorted rows are not put back, log-probs"),
    ("plumbing/forward.py", "torch.cat(values)[_order(batches)]", "torch.cat(values)", "sorted rows are not put back, values"),
    ("plumbing/forward.py", "tokens = len(prompts | {prompt}) * wider[0] +", "tokens = (len(batches[-1]) + 1) * wider[0] +", "a shared prompt is counted for every row"),
    ("plumbing/forward.py", "if len(first) == len(which) or checkpointed", "if True", "a prompt is read for every completion"),
    ("plumbing/forward.py", "cache.reorder_cache(which)", "cache.reorder_cache(which.sort().values)", "keys of another row's prompt"),
    ("plumbing/forward.py", 'x[which] if which.device.type == "cuda" else x.index_select(0, which)', "x[which]", "gradients of a prompt's rows added up in any order"),
    ("plumbing/forward.py", "cache.reorder_cache(which)", "cache.batch_select_indices(which)", "gradients of a prompt's keys added up in any order"),
    ("plumbing/forward.py", "torch.cat([of_rows, states", "torch.cat([of_rows[which.sort().indices], states", "the first token is predicted by another row's prompt"),
    ("plumbing/forward.py", "torch.where(mask.bool(), rollout.tokens[:, :length], -1)", "rollout.tokens[:, :length]", "padding passes for a token of the same id"),
    ("plumbing/forward.py", "columns = slice(padding, length", "columns = slice(padding + 1, length", "a column of a prompt is not read"),
    ("plumbing/forward.py", "int(here.completion_mask.bool().any(0).sum())", "int(here.completion_mask.bool().all(0).sum())", "completions cut to the shortest"),
    ("plumbing/forward.py", "padding = length - int(prompt_lengths.max())", "padding = 0", "padding columns are read"),
    ("plumbing/forward.py", "if torch.is_grad_enabled() and len(tokens) > size:", "if False:", "all logits are kept for the backward pass"),
    ("plumbing/forward.py", "zip(hidden.split(size), tokens.split(size), strict=True)", "zip(hidden.split(size), tokens.flip(0).split(size), strict=True)", "tokens of other positions are scored"),
    ("plumbing/forward.py", "logits = cap * torch.tanh(logits / cap)", "pass", "final soft cap left out"),
    ("plumbing/forward.py", "logits = logits * scale\n", "pass\n", "logit scale left out"),
    ("plumbing/forward.py", "logits = logits / scale\n", "pass\n", "logit scaling left out"),
    ('common.py', 'with torch.autocast(hidden.device.type, enabled=False):', 'if True:', 'values in bfloat16'),
    ("plumbing/loading.py", 'backbone.gradient_checkpointing_enable({"use_reentrant": False})', "pass", "gradient checkpointing is not switched on"),
    ('sampling.py', 'uniform * total)\n', 'uniform)\n', 'the uniform number is compared with an unnormalised sum'),
    ('sampling.py', 'before = (cumulative - weights).gather', 'before = cumulative.gather', 'the block of a token is taken off twice'),
    ('sampling.py', 'drawn = block * 128 + token', 'drawn = token', 'the token of the first block'),
    ('sampling.py', 'return drawn, logprobs.squeeze(1) - total.log()', 'return drawn, logprobs.squeeze(1)', 'log-probs of the sampler are not normalised'),
    ('plumbing/decoding.py', 'new.copy_(states[indices])', 'new.copy_(states[: len(indices)])', 'rows that leave the cache are the last ones'),
    ('plumbing/decoding.py', '        if self.buffers is None:  # the prompts\n', '        if True:\n', 'keys and values are concatenated at every token'),
    ('plumbing/decoding.py', 'self.keys.index_copy_(2, self.column, keys)', 'self.keys.index_copy_(2, self.column - 1, keys)', 'the static step writes one column to the left'),
    ('plumbing/decoding.py', 'self.column.fill_(column)', 'self.column.fill_(column - 1)', 'the static step is one column behind'),
    ('plumbing/decoding.py', 'size = len(self.rows) // 2 if self.static_step is not None else num_running', 'size = num_running', 'each number of rows is another graph'),
    ('plumbing/decoding.py', 'self.running.long().argsort(descending=True, stable=True)', 'self.running.long().argsort(stable=True)', 'running rows leave the batch'),
    ('plumbing/decoding.py', '{id(p): nn.Parameter(p.bfloat16(), requires_grad=False)', '{id(p): nn.Parameter(p.detach(), requires_grad=False)', 'bf16 decodes in float32'),
    ('plumbing/decoding.py', 'setattr(module, name, buffer.bfloat16())', 'pass', 'positions added in float32'),
    # Left alive by a list that was written without a look at the tests.
    ("ppo.py", "if scores.isnan().any():", "if scores.isnan().all():", "single missing rewards slip into PPO as NaN"),
    ("plumbing/forward.py", "rows = rows[wanted[rows]] if wanted[rows].any() else rows[:1]", "kept = wanted[: len(rows)]\n        rows = rows[kept] if kept.any() else rows[:1]", "wanted is indexed by position, not by row"),
    ("plumbing/decoding.py", "if limit is not None and capacity > limit:", "if limit is not None and capacity >= limit:", "a rollout that exactly fills the context is refused"),
    ("plumbing/decoding.py", "if not logits.logsumexp(-1).isfinite().all():", "if not logits.logsumexp(-1).isfinite().any():", "non-finite logits fault only if every row has them"),
    ("plumbing/decoding.py", "def bfloat16_copy(model: nn.Module) -> nn.Module:", "import functools  # noqa: E402\n\n\n@functools.cache\ndef bfloat16_copy(model: nn.Module) -> nn.Module:", "cached bf16 copy: samples come from stale weights"),
    ("plumbing/runs.py", "self.first_metrics, self.best = state[\"first_metrics\"], state[\"best\"]", "self.first_metrics = state[\"first_metrics\"]", "best evaluation forgotten on resume"),
    ("plumbing/evaluation.py", "sum(known) / len(known) if known else None", "sum(known) / len(scores) if known else None", "eval reward divides by unscored completions too"),
    ("plumbing/evaluation.py", "right += [verify(task, part, part_texts, rollout)]", "right = [verify(task, part, part_texts, rollout)]", "eval accuracy from the last evaluation batch alone"),
    ("plumbing/runs.py", "    rows = [row for row in rows for _ in range(G)]\n", "    rows = rows * G\n", "training samples are recorded beside wrong prompts"),
    ("plumbing/checkpoints.py", "save_best tensorboard wandb micro_batch_size", "save_best tensorboard wandb prompts_per_step micro_batch_size", "prompts_per_step may change on resume unnoticed"),
    ("plumbing/checkpoints.py", "zlib.crc32(block, checksum), size", "zlib.crc32(block), size", "checksum covers the last 16 MB block only"),
    ("plumbing/checkpoints.py", "policy, options = copy.deepcopy(policy).merge_and_unload(), {}", "policy, options = policy.merge_and_unload(), {}", "merging for save_best destroys the adapter in training"),
    ("plumbing/metrics.py", "    return lowest >= highest\n", "    return lowest == highest\n", "group without any known reward isn't flat"),
    ("plumbing/config.py", "value is not None and not 0 <= value <= 1:", "value is not None and not 0 < value <= 1:", "gamma 0 and lam 0 are refused"),
    ("plumbing/reward_models.py", "if (longest := max(map(len, ids))) > limit:", "if (longest := max(map(len, ids))) >= limit:", "text that just fits the reward model refused"),
    ("plumbing/data.py", "        if config.prompts or config.eval_prompts:\n            task.verifier = None", "        task.verifier = None", "accuracy lost with --reward on the task's own prompts"),
    ("plumbing/scoring.py", "if limit is not None and len(ids) + new > limit:", "if limit is not None and len(ids) + new >= limit:", "prompt that exactly fills the context is refused"),
    ("plumbing/runs.py", ".st_size > 0 or (folder / CHECKPOINT).exists()", ".st_size > 0 and (folder / CHECKPOINT).exists()", "run without a checkpoint is silently started over"),
    ("plumbing/data.py", "faults = () if has_own_reward or task.row_fault is None", "faults = () if config.reward or task.row_fault is None", "--reward_model alone still demands the task's answer column"),
    ("plumbing/prompts.py", ".read_text(encoding=\"utf-8\").split(\"\\n\")", ".read_text(encoding=\"utf-8\").splitlines()", "prompt files split at Unicode line separators"),
    ("plumbing/loading.py", "\"lora_alpha\": 32,", "\"lora_alpha\": 2 * rank,", "LoRA alpha grows with the rank"),
    ("plumbing/loading.py", " and not any(Path(name).glob(\"tokenizer*\")):", ":", "adapter's own tokenizer ignored for the base's"),
    ("plumbing/curves.py", "re.sub(r\"-s\\d+$\", \"\"", "re.sub(r\"-s\\d$\", \"\"", "seeds of two digits not joined into one curve"),
    ("tools/outgrow.py", "\"warmup_steps\": config.warmup_steps * updates,", "\"warmup_steps\": config.warmup_steps,", "TRL's warmup counted in rollouts, not optimiser steps"),
    ("sampling.py", "dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, above >= top_p)", "dropped = (above >= top_p).gather(1, order)", "top_p undoes the sort with the permutation instead of its inverse"),
    ("tasks.py", "numbers = range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)", "numbers = range(10 ** (digits - 1), 10**digits)", "with --digits 1 there is no 0"),
    ("plumbing/answers.py", "texts = [re.sub(COMMA, \"\", text_of(c)) for c in completions]", "texts = [text_of(c).replace(\",\", \"\") for c in completions]", "numeric_match joins the numbers of '3,4' to 34"),
    ("tasks.py", "re.fullmatch(r\"-?\\d{1,18}\", str(row.get(\"answer\")))", "re.fullmatch(r\"\\d{1,18}\", str(row.get(\"answer\")))", "prompts with a negative answer are refused"),
    ("plumbing/errors.py", "(str(error).strip().split(\"\\n\") or [\"\"])[0]", "(str(error).split(\"\\n\") or [\"\"])[0]", "an error whose text begins with a line break is shown as nothing"),
    ("plumbing/tokens.py", "manual_seed(config.seed + 2)", "manual_seed(config.seed + 2 + step)", "held-out completions in tokens.jsonl are drawn with other random numbers each time"),
    ("plumbing/tokens.py", 'self.sampling | {"generator": generator}', "self.sampling", "to record tokens draws from the generator of the run"),
    ("plumbing/tokens.py", "with evaluating(model), uncompiled", "with uncompiled", "to record tokens draws dropout from the generator of the run"),
    ("plumbing/tokens.py", "kl_estimate(old_logprobs, ref_logprobs, estimator)", 'kl_estimate(old_logprobs, ref_logprobs, "k1")', "the KL in tokens.jsonl is k1 whatever --kl_estimator says"),
    ("plumbing/tokens.py", "(i // G, i % G) for i in rows", "(i % G, i // G) for i in rows", "prompt and completion exchanged in tokens.jsonl"),
    ("plumbing/tokens.py", "key=lambda i: found.places[i][::-1]", "key=lambda i: found.places[i]", "what doesn't fit into tokens.jsonl are the last prompts"),
    ("plumbing/tokens.py", "rollout.tokens[i, -T - 1 :][: length + 1]", "rollout.tokens[i, -T - 1 :][: length]", "the last token is missing in tokens.jsonl"),
    ("plumbing/tokens.py", "columns | meter.last_pass", "columns", "ratio and clip of training tokens aren't recorded"),
    ("plumbing/tokens.py", "if step == config.num_steps else []", "if False else []", "the held-out completions of the last evaluation aren't recorded"),
    ("plumbing/tokens.py", "if i % G < OF_EACH", "if i < OF_EACH", "the first four held-out completions are recorded, of whatever prompt"),
    ("plumbing/tokens.py", "self._records(step, waiting, updated)", "self._records(step, waiting, False)", "held-out completions have no log-probs after the update"),
    ("plumbing/tokens.py", "MOST_BYTES // _times(self.config)", "MOST_BYTES", "tokens.jsonl grows with the number of steps"),
    ("plumbing/tokens.py", "alone = both.startswith(start)", "alone = False", "the space in front of a token is lost in tokens.jsonl"),
    ("plumbing/tokens.py", "if math.isfinite(x) else None", "if True else None", "tokens.jsonl has NaN where a number isn't known"),
    ("plumbing/metrics.py", "torch.nan)\n            self.last_pass", "1.0)\n            self.last_pass", "a completion that is left out of the update has a ratio"),
    ("grpo.py", "scores + overlong_penalty(rollout, config.overlong_buffer), G, config.scale_rewards\n        ),", "scores, G, config.scale_rewards\n        ),", "the credit of held-out completions leaves the overlong penalty out"),
    ("ppo.py", "scores = to(device, scores - config.missing_eos_penalty * ~on_cpu(rollout).finished)", "scores = to(device, scores)", "the credit of held-out completions leaves the penalty for a missing EOS out"),
    ("rloo.py", "rloo_rewards(scores, kl, config), G, config.normalize_advantages\n        ),", "scores, G, config.normalize_advantages\n        ),", "the credit of held-out completions leaves the KL out"),
    ("plumbing/config.py", "max_grad_norm eval_every save_every sample_every\n", "max_grad_norm eval_every save_every\n", "--sample_every 0 isn't refused and divides by zero in the run"),
    ("plumbing/config.py", "value.tiny if config.model == \"tiny\" else value.other", "value.tiny if \"tiny\" in config.model else value.other", "any model with 'tiny' in its name or path gets the embedded model's defaults"),
    ("plumbing/runs.py", "if step > 0 and not (self.config.save_best and self.best > -math.inf):", "if step > 0 and not self.config.save_best:", "--save_best without any known evaluation leaves no model"),
    ("plumbing/trackers.py", "resume = \"allow\" if config.resume else None", "resume = \"allow\"", "a new run goes on with the W&B run of the same name"),
    ("plumbing/prompts.py", "random.Random(f\"{seed},{p}\")", "random.Random(seed + p)", "the second pass of seed 0 has the order of the first of seed 1"),
    ("plumbing/data.py", "    sys.modules[module_spec.name] = module  # dataclasses and pickle look modules up by name\n", "", "reward files with dataclasses and postponed annotations fail on import"),
    ("plumbing/scoring.py", "for row in task.train + task.heldout:", "for row in task.train:", "held-out prompts aren't checked: too long ones fail in the run"),
    ("plumbing/scoring.py", "if max(ids) >= vocab_size:", "if max(ids) > vocab_size:", "the first id beyond the vocabulary passes the check"),
    ("plumbing/scoring.py", "arguments = columns | {\"prompts\": prompts, \"completions\": completions, \"completion_ids\": ids}", "arguments = {\"prompts\": prompts, \"completions\": completions, \"completion_ids\": ids} | columns", "a column named completions replaces what was sampled"),
    ("plumbing/scoring.py", "keys = sorted({key for row in rows for key in row} - {\"prompt\"})", "keys = sorted(set(rows[0]) - {\"prompt\"})", "columns that the first row lacks don't reach the reward"),
    ("plumbing/loading.py", "return sorted(found - {None})", "return sorted(filter(None, found))", "an EOS with id 0 (GPT-NeoX) is lost"),
    ("tools/inspect_reward.py", "describe_scores(scores.view(-1, config.num_generations))", "describe_scores(scores.view(config.num_generations, -1))", "groups are cut across prompts"),
    ("tools/plot.py", "raise SystemExit(2) from None", "raise SystemExit(1) from None", "plot.py: exit code 1 for bad input"),
    ("tools/fit.py", "return there + max(rollout, parts[\"gradients\"] + update)", "return there + parts[\"gradients\"] + max(rollout, update)", "the gradients are counted in the rollout as well"),
    ("tools/outgrow.py", "count = -(-max_steps // updates) * config.prompts_per_step", "count = max_steps // updates * config.prompts_per_step", "the prompts of the last, partial rollout are missing, all of them for a small --max_steps"),
    ("tools/outgrow.py", "vars(config).get(\"cispo_bound\" if is_cispo else \"clip_range_high\")", "vars(config).get(\"clip_range_high\")", "cispo_bound doesn't reach TRL"),
    ("plumbing/answers.py", 'Decimal(str(a).replace(",", ""))', "Decimal(str(a))", "numeric_match raises for an answer with commas"),
    ("plumbing/data.py", "if task.reward_model.tokenizer.get_vocab() != tokenizer.get_vocab():", "if len(task.reward_model.tokenizer) != len(tokenizer):", "--value_init reward_model accepts another vocabulary of the same size"),
    ("plumbing/loading.py", '    if (own - logits).abs().max() > 1e-4 * logits.abs().max():\n        return "can\'t be used, its last layer makes logits in an unknown way"\n', "", "models whose logits are made in an unknown way are trained"),
    ("rloo.py", "num_rows=len(mini_batch),", "num_rows=max(1, int(has_gradient[mini_batch].sum())),", "RLOO's mean is over the rows with a gradient"),
    # Real data, evaluation, options of later papers.
    ("plumbing/prompts.py", "rows.append(row | {\"prompt\": _prompt_of(row, column, template)})", "rows.append(row | {\"prompt\": _prompt_of(row, \"prompt\", template)})", "--prompt_column is ignored"),
    ("plumbing/prompts.py", "        return match[0][0]  # {{ or }}\n", "        return match[0]\n", "doubled braces stay doubled"),
    ("plumbing/prompts.py", "filled = fill(template, row | {\"prompt\": text_of(prompt)})", "filled = fill(template, row)", "messages are written into the template as a list"),
    ("plumbing/prompts.py", "return [{\"role\": \"system\", \"content\": system}] * bool(system) + messages", "return [{\"role\": \"system\", \"content\": system}] + messages", "an empty system message"),
    ("plumbing/data.py", "task.train, task.heldout = (rows, []) if heldout else split_prompts(rows)", "task.train, task.heldout = split_prompts(rows)", "a tenth of the prompts is not trained on, and not evaluated either"),
    ("plumbing/data.py", "config.eval_split or \"test\", (flag", "config.split, (flag", "evaluation on the split that is trained on"),
    ("plumbing/data.py", "if template is not None and not config.prompts:", "if template is not None:", "held-out prompts get the template twice"),
    ("plumbing/data.py", "task.verifier = load_reward(config.verifier or is_verifier, rewards, \"--verifier\")", "task.verifier = load_reward(is_verifier or config.verifier, rewards, \"--verifier\")", "the reward goes before the verifier that is named"),
    ("plumbing/answers.py", "    for pattern in (MARKED, BOXED):", "    for pattern in (BOXED,):", "gsm8k doesn't look at ####"),
    ("plumbing/answers.py", "for x in reversed(pattern.findall(text))", "for x in pattern.findall(text)", "the first #### counts"),
    ("plumbing/answers.py", "number = _number(str(answer).rpartition(\"####\")[2])", "number = _number(str(answer).partition(\"####\")[0])", "the solution's last number counts as the answer"),
    ("plumbing/answers.py", ".replace(\"\\\\$\", \"\").replace(\"$\", \"\")", "", "a dollar sign hides the number"),
    ("plumbing/stopping.py", "return next(filter(is_complete, range(start + 1, len(ids) + 1)))", "return len(ids)", "a stop string ends a completion at the last token that was looked at"),
    ("plumbing/stopping.py", "first = max(0, start - self.longest)", "first = start", "a stop string across two looks is missed"),
    ("plumbing/stopping.py", "if end is not None or not self.eos.isdisjoint(ids):", "if not self.eos.isdisjoint(ids):", "after a stop string a later one counts"),
    ("plumbing/stopping.py", "(columns < torch.tensor(ends).unsqueeze(1))", "(columns < torch.tensor(ends).unsqueeze(1) - 1)", "the token that completes the stop string is off the mask"),
    ("plumbing/decoding.py", "        if self.stop_search.recent:\n            self.stop_search.look(self.rows)\n", "", "the last tokens are not looked at for a stop string"),
    ("sampling.py", "& drawn_mask).any(dim=1) | stopped,", "& drawn_mask).any(dim=1),", "what a stop string ended counts as truncated"),
    ("plumbing/scoring.py", "            text = whole if any(string in whole for string in stop) else text\n", "", "the reward reads a stop string without its last token"),
    ("plumbing/extras.py", "return (old_logprobs - rollout.logprobs)", "return (rollout.logprobs - old_logprobs)", "the weight of importance sampling upside down"),
    ("plumbing/extras.py", "advantages.view(len(advantages), -1) * log_ratio.exp().clamp(max=cap)", "advantages.view(len(advantages), -1) * log_ratio.exp().clamp(min=cap)", "the cap is a floor"),
    ("plumbing/extras.py", "_log_ratio(old_logprobs, rollout, mask).sum(1)", "_log_ratio(old_logprobs, rollout, mask).mean(1)", "RLOO's weight is a mean over the tokens"),
    ("plumbing/extras.py", "(mask.shape[1] - buffer)) / buffer)", "(mask.shape[1] - buffer)) / mask.shape[1])", "the length penalty doesn't reach 1"),
    ("plumbing/extras.py", "        seen |= {id(row) for row in prompts}\n", "", "dynamic sampling draws a prompt twice"),
    ("plumbing/extras.py", "order = random.Random(f\"{config.seed},{step},{sampling_round}\")", "order = random.Random(f\"{config.seed},{step}\")", "each round of dynamic sampling has the same order"),
    ("plumbing/extras.py", "useful = sorted({*range(len(prompts))} - {*_flat_groups(scores, G)})", "useful = range(len(prompts))", "dynamic sampling puts flat groups in"),
    ("plumbing/extras.py", "torch.cat([scores, others[2]])[rows],", "scores,", "dynamic sampling keeps the scores of the dropped groups"),
    ("plumbing/extras.py", "        return nn.functional.pad(x, (width - x.shape[1], 0))", "        return nn.functional.pad(x, (0, width - x.shape[1]))", "dynamic sampling pads prompts on the right"),
    ("plumbing/metrics.py", "kl_estimate(sampled, old_logprobs, \"k3\")", "kl_estimate(old_logprobs, sampled, \"k3\")", "the sampler's KL turned round"),
    ("plumbing/forward.py", "entropy = token_entropy(logits if entropy_grad else logits.detach())", "entropy = token_entropy(logits.detach())", "the entropy bonus has no gradient"),
    ("ppo.py", "- config.entropy_coef * entropy  # [2] eq. 9", "+ config.entropy_coef * entropy  # [2] eq. 9", "PPO's bonus is a penalty"),
    ("grpo.py", "bonus = config.entropy_coef * (entropy * m).sum() / num_tokens", "bonus = config.entropy_coef * (entropy * m).sum() / m.sum()", "GRPO's bonus changes with the micro-batch"),
    ("rloo.py", "(config.kl_coef + config.entropy_coef > 0)", "(config.kl_coef > 0)", "RLOO leaves rows out that the entropy bonus needs"),
    ("grpo.py", "            scores = scores + overlong_penalty(rollout, config.overlong_buffer)  # [3] eq. 13\n", "", "--overlong_buffer is ignored"),
    ("plumbing/evaluation.py", "means = right.double().mean(1)", "means = right.double().flatten()", "the K completions of a prompt count as K prompts"),
    ("plumbing/evaluation.py", "math.comb(n - c, k) / math.comb(n, k)", "((n - c) / n) ** k", "pass@k by the biased estimator"),
    ("plumbing/evaluation.py", "        for start in range(0, len(rows), most // K):", "        for start in range(0, len(rows), most):", "prompts are left out of an evaluation of K completions"),
    ("reward_model.py", "loss = -logsigmoid(chosen - rejected - margin)", "loss = -logsigmoid(rejected - chosen - margin)", "the rejected text is preferred"),
    ("reward_model.py", "loss = -logsigmoid(chosen - rejected - margin)", "loss = -logsigmoid(chosen - rejected + margin)", "the margin makes a pair easier"),
    ("reward_model.py", "loss = -logsigmoid(chosen - rejected - margin)", "loss = -torch.sigmoid(chosen - rejected - margin).log()", "the loss of a badly wrong pair is infinite"),
    ("reward_model.py", "return loss + center_rewards_coef * (chosen + rejected) ** 2", "return loss + center_rewards_coef * (chosen - rejected) ** 2", "centring pulls the two scores together"),
    ("reward_model.py", "return loss + center_rewards_coef * (chosen + rejected) ** 2", "return loss + center_rewards_coef * (chosen + rejected).abs()", "centring by the distance, not its square"),
    ("reward_model.py", "(loss.sum() / N).backward()", "(loss.sum() / len(part)).backward()", "the reward model's gradient grows with the number of micro-batches"),
    ("reward_model.py", "preference_loss(chosen, rejected, margin, config.center_rewards_coef)", "preference_loss(chosen, rejected, 0.0, config.center_rewards_coef)", "the margins of the data are not used"),
    ("reward_model.py", "preference_loss(chosen, rejected, margin, config.center_rewards_coef)", "preference_loss(chosen, rejected, margin)", "--center_rewards_coef is ignored"),
    ("reward_model.py", "    if config.disable_dropout:\n        disable_dropout(model)\n", "", "the reward model trains with dropout"),
    ("reward_model.py", "config.micro_batch_size or 2 * N) // 2)", "config.micro_batch_size or 2 * N))", "the reward model's micro-batch is twice as large as asked for"),
    ("reward_model.py", "math.ceil(len(pairs.train) / config.pairs_per_step)", "len(pairs.train) // config.pairs_per_step", "the last pairs of the pass are never seen"),
    ("reward_model.py", "* warmup * (1 - step / config.num_steps)", "* warmup", "the reward model's learning rate doesn't fall"),
    ("plumbing/reward_models.py", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = mask.long().sum(1) - 1", "the last real token by a count, wrong for padding on the left"),
    ("plumbing/reward_models.py", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = torch.full_like(mask[:, 0].long(), mask.shape[1] - 1)", "the score is read at padding"),
    ("plumbing/reward_models.py", "torch.arange(1, mask.shape[1] + 1, device", "torch.arange(mask.shape[1], 0, -1, device", "the score is read at the first token"),
    ("plumbing/reward_models.py", "                nn.init.zeros_(head.weight)\n", "", "a new head starts at random"),
    ("plumbing/reward_models.py", '"pooler" not in w]', "True]", "a BERT that was never a classifier is refused"),
    ("plumbing/pairs.py", "        chosen, rejected = sequence_scores(model, tokens, mask).chunk(2)\n", "        rejected, chosen = sequence_scores(model, tokens, mask).chunk(2)\n", "chosen and rejected scores are exchanged"),
    ("plumbing/pairs.py", 'for key in ("chosen", "rejected") for pair in pairs]\n    tokens', 'for pair in pairs for key in ("chosen", "rejected")]\n    tokens', "the scores of one pair are taken for those of another"),
    ("plumbing/pairs.py", 'if ids["chosen_ids"] == ids["rejected_ids"]:', "if False:", "equal pairs are kept"),
    ("plumbing/pairs.py", "elif max(map(len, ids.values())) > limit:", 'elif len(ids["chosen_ids"]) > limit:', "only a chosen text can be too long"),
    ("plumbing/pairs.py", "pair if rng.random() >= label_noise else pair[::-1]", "pair", "no label is flipped"),
    ("plumbing/pairs.py", "        task.heldout, config.num_eval_pairs, 0.0\n", "        task.heldout, config.num_eval_pairs, config.label_noise\n", "held-out labels are flipped too"),
    ("plumbing/pairs.py", "    return texts[0][: len(start)], [text[len(start) :] for text in texts]", "    return texts[0][: len(start)], texts", "a prompt that the texts hold already is there twice"),
    ("plumbing/pairs.py", "        return texts[0][:length], [text[length:] for text in texts]", "        return [], texts", "pairs without a prompt are split without regard to what they ask"),
    ("plumbing/pairs.py", "for p in train + heldout)", "for p in train)", "a held-out token that the model doesn't know"),
    ("plumbing/judging.py", "longer = scores[0] - scores[1], (lengths[0] - lengths[1]).double()", "longer = scores[0] - scores[1], (lengths[0] + lengths[1]).double()", "the length of the prompt counts in the length correlation"),
    ("plumbing/judging.py", "            scores[:, part] = torch.stack", "            scores[:, : len(part)] = torch.stack", "the scores of batches of pairs overwrite one another"),
    ("reward_model.py", 'meter.add("reward/margin", chosen - rejected)', 'meter.add("reward/margin", rejected - chosen)', "the margin is logged with the wrong sign"),
    ("reward_model.py", 'meter.add("reward/mean", (chosen + rejected) / 2)', 'meter.add("reward/mean", chosen + rejected)', "the mean score is logged twice as large"),
    ("plumbing/reward_models.py", "        with torch.autocast(device, enabled=False):\n            return model(", "        if True:\n            return model(", "BERT's scores are bfloat16"),
    ("plumbing/pairs.py", "for pair in zip(right, wrong):", "for pair in zip(wrong, right):", "wrong sums are preferred"),
    ("plumbing/judging.py", "    with evaluating(model):\n", "    if True:\n", "the reward model is evaluated with dropout"),
    ("plumbing/judging.py", "return (differences.sign() / 2 + 0.5).mean().item()", "return (differences > 0).double().mean().item()", "a tie counts as wrong"),
    ("plumbing/judging.py", "confidence = torch.sigmoid(margins.abs())", "confidence = torch.sigmoid(margins)", "the confidence of a wrong pair is below a half"),
    ("plumbing/judging.py", "error += here.double().mean().item() * abs(said - was)", "error += abs(said - was) / NUM_BINS", "each bin weighs the same in the calibration error"),
    ("plumbing/runs.py", "        self._save_if_best(metrics[\"eval/accuracy\"])\n        return metrics\n\n    def _save", "        return metrics\n\n    def _save", "--save_best keeps no reward model"),
    ("plumbing/config.py", "value.learned if learned and value.learned else by_model", "by_model", "a learned reward is trusted as a verifier is"),
]
# A test of test_pitfalls.py, and a bug that it catches on its own.
PAIRS = [
    ("test_01_masks_inferred_from_ids_drop_eos_where_pad_equals_eos", "the mask inferred from the ids of padding"),
    ("test_01_masks_inferred_from_ids_drop_eos_where_pad_equals_eos", "EOS is masked out"),
    ("test_01_in_a_run_where_pad_equals_eos_every_eos_token_gets_a_gradient", "the mask inferred from the ids of padding"),
    ("test_02_left_padding_without_position_ids_shifts_learned_positions", "positions count the left padding"),
    ("test_03_one_of_several_eos_ids_is_missed", "the mask ends at one of several EOS ids"),
    ("test_04_an_empty_completion_divides_by_zero", "an empty minibatch divides by 0"),
    ("test_05_the_score_is_read_at_the_wrong_token", "the reward model's score is read before EOS"),
    ("test_06_the_score_sits_in_the_slot_after_eos", "the score one slot after the last token"),
    ("test_06_the_score_sits_in_the_slot_after_eos", "the score in the last column, not on the last token"),
    ("test_07_advantages_and_losses_feel_the_padding", "GAE reads values at padding"),
    ("test_07_in_ppo_every_token_of_a_minibatch_weighs_the_same_and_padding_nothing", "PPO normalises by the micro-batch"),
    ("test_07_in_ppo_every_token_of_a_minibatch_weighs_the_same_and_padding_nothing", "PPO's loss is not masked"),
    ("test_08_the_temperature_is_missing_from_the_log_probs", "temperature missing from the log-probs"),
    ("test_09_the_checkpoints_generation_config_leaks_into_sampling", "the temperature of generation_config"),
    ("test_10_dropout_that_is_no_module_stays_on", "functional dropout left on"),
    ("test_11_top_k_and_top_p_make_the_kl_negative", "PPO samples with top_k"),
    ("test_11_what_top_k_and_top_p_do_to_the_estimate", "top_k 1 has no effect"),
    ("test_12_old_log_probs_of_the_decode_loop_differ_from_those_of_the_training_forward", "old log-probs of the decode loop"),
    ("test_13_small_steps_are_lost_in_bfloat16_weights", "a checkpoint in bfloat16 is trained in bfloat16"),
    ("test_14_log_probs_drift_with_the_batch_shape", "padding is attended to"),
    ("test_15_the_fast_log_softmax_of_half_precision_is_not_that_of_float32", "log-probs in half precision"),
    ("test_16_gradient_accumulation_is_not_the_gradient_of_the_big_batch", "DAPO normalises by the micro-batch"),
    ("test_16_gradient_accumulation_is_not_the_gradient_of_the_big_batch", "RLOO normalises by the micro-batch"),
    ("test_16_in_a_run_the_gradient_does_not_depend_on_the_micro_batch", "PPO sums over tokens and averages over rows"),
    ("test_16_in_a_run_the_gradient_does_not_depend_on_the_micro_batch", "the loop hands in the rows of the micro-batch"),
    ("test_17_num_mini_batches_adds_no_optimiser_steps", "num_mini_batches adds no steps"),
    ("test_18_the_kl_in_the_loss_has_no_gradient_or_one_whose_mean_is_0", "k1 as a loss, whose expected gradient is 0"),
    ("test_18_the_kl_in_the_loss_has_no_gradient_or_one_whose_mean_is_0", "the KL carries no gradient"),
    ("test_18_the_gradient_of_k3_is_0_at_the_reference_and_in_expectation_that_of_the_kl", "k1 as a loss, whose expected gradient is 0"),
    ("test_18_the_gradient_of_k3_is_0_at_the_reference_and_in_expectation_that_of_the_kl", "k3 with the ratio upside down"),
    ("test_19_a_group_of_equal_rewards_gets_an_advantage_of_rounding_errors", "constant groups keep their rounding error"),
    ("test_20_a_missing_reward_counts_as_0_and_a_short_list_goes_unnoticed", "missing rewards count in the baseline"),
    ("test_21_groups_are_mixed_up", "the completions of a prompt are not consecutive"),
    ("test_22_max_grad_norm_is_ignored", "max_grad_norm ignored"),
    ("test_23_the_learning_rate_counts_another_unit_than_the_loop", "constant learning rate in PPO"),
    ("test_24_the_ratio_is_not_1_before_the_first_update", "dropout left on in GRPO"),
    ("test_25_logits_or_values_are_read_one_token_off", "logits one to the right"),
    ("test_25_logits_or_values_are_read_one_token_off", "the value knows the action"),
    ("test_26_the_reference_is_not_the_policy_that_the_run_starts_from", "the base model as reference of a trained adapter"),
    ("test_27_gradient_checkpointing_switches_the_cache_off_while_sampling", "dropout while sampling"),
    ("test_27_gradient_checkpointing_switches_the_cache_off_while_sampling", "sampling leaves the evaluation mode on"),
    ("test_28_the_value_head_starts_at_random", "the value head starts at random"),
    ("test_29_what_is_saved_is_not_what_was_trained", "the model from before the training is saved"),
    ("test_31_metrics_average_over_padding", "PPO's mean ratio over padding too"),
    ("test_31_metrics_average_over_padding", "metrics count padding"),
    ("test_32_means_of_means_and_the_last_micro_batch_alone_are_logged", "metrics hold the last micro-batch alone"),
    ("test_33_decoded_text_is_encoded_again", "the text is encoded again for the reward"),
    ("test_33_the_ids_that_are_trained_on_are_those_that_were_sampled", "PPO trains on other tokens after EOS"),
    ("test_k1_negated_and_k3_with_the_ratio_upside_down", "KL turned round"),
    ("test_k1_negated_and_k3_with_the_ratio_upside_down", "k3 with the ratio upside down"),
    ("test_dr_grpo_still_divides_by_each_length", "Dr. GRPO that still divides by the length"),
    ("test_inputs_are_changed_in_place", "GAE changes its inputs"),
    ("test_the_tokens_and_masks_that_a_model_reads_are_changed_in_place", "the tokens are changed before they are read"),
    ("test_a_few_likely_tokens_are_all_that_is_ever_drawn", "top_k 50 by default"),
    ("test_top_k_and_top_p_are_off_by_default", "top_p 0.9 by default"),
    ("test_minimum_for_maximum_where_the_advantage_is_negative", "minimum for maximum in PPO's clip"),
    ("test_minimum_for_maximum_where_the_advantage_is_negative", "minimum for maximum in RLOO's clip"),
    ("test_whitening_adds_the_mean_back_or_goes_row_by_row", "whitening shifts the mean the wrong way"),
    ("test_returns_depend_on_the_whitening", "returns from whitened advantages"),
    ("test_a_chat_template_and_the_tokenizer_both_write_bos", "two BOS before a chat prompt"),
    ("test_a_misspelt_flag_is_silently_ignored", "a flag that lacks letters is another flag"),
    ("test_gae_runs_over_padding_to_the_end_of_the_row", "GAE reads values at padding"),
    ("test_a_nan_loss_is_skipped_without_a_word", "a NaN goes into the weights"),
    ("test_an_entropy_of_a_token_of_probability_0_is_nan", "entropy is NaN for a token of probability 0"),
]
# fmt: on


def run_tests(mutation: tuple[str, str, str, str] | None, *rounds: list[str]) -> str | None:
    """The name of the first test that fails with the mutation planted, or None. A round of tests
    runs if those before it have caught nothing.
    """
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work) / "copy"
        ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", ".*_cache")
        shutil.copytree(REPOSITORY, copy, ignore=ignored)
        if mutation is not None:
            file, text, replacement, _ = mutation
            (copy / file).write_text((copy / file).read_text().replace(text, replacement))
        failures = (first_failure(copy, tests) for tests in rounds if tests)
        return next(filter(None, failures), None)


def first_failure(folder: Path, tests: list[str]) -> str | None:
    """The name of the first of the tests that fails, or None. Tests that don't start or don't end
    have caught nothing; they are named by STUCK.
    """
    output = folder.parent / "output"
    process = FORKSERVER.Process(target=run_pytest, args=(folder, tests, output))
    process.start()
    process.join(900)
    if process.is_alive():
        process.kill()
        process.join()
        return f"{STUCK} don't end"
    if process.exitcode == 0:
        return None
    # 1: a test failed. An error on import, a name that is not there and the like have other codes.
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+?::\w+)", output.read_text(), re.MULTILINE)
    return found[1] if process.exitcode == 1 and found else f"{STUCK} don't start"


def run_pytest(folder: Path, tests: list[str], output: Path) -> None:
    """In a process of its own, which sees nothing of the repository that this file lies in."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    of_the_original = str(REPOSITORY), str(REPOSITORY / "tests"), ""
    sys.path[:] = [str(folder), *(p for p in sys.path if p not in of_the_original)]
    # One process, for several bugs are tried at the same time. kill_9 takes half a minute, a
    # rehearsal a whole one.
    left_out = "not kill_9 and not rehearsed"
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", left_out]
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(code)  # without the seconds that torch takes to end


def is_caught(test: str | None) -> bool:
    return test is not None and not test.startswith(STUCK)


def check_lists() -> None:
    """Refuse lists that don't fit the code: each text is there once, the file with the bug is
    Python, each bug has its own name, and each pair names what there is.
    """
    stale = [bug for file, *edit, bug in MUTATIONS if not can_be_planted(file, *edit)]
    names = [bug for *_, bug in MUTATIONS]
    stale += [bug for bug in set(names) if names.count(bug) > 1]
    there = set(re.findall(r"^def (test_\w+)", PITFALLS.read_text(), re.MULTILINE))
    paired = {test for test, _ in PAIRS}
    stale += [bug for _, bug in PAIRS if bug not in names] + sorted(paired ^ there)
    if stale:
        raise SystemExit(f"the lists of mutations.py are stale: {'; '.join(stale)}")


def can_be_planted(file: str, text: str, replacement: str) -> bool:
    path = REPOSITORY / file
    before = path.read_text() if path.exists() else ""
    try:
        ast.parse(before.replace(text, replacement))
    except SyntaxError:
        return False
    return before.count(text) == 1 and text != replacement


def earlier() -> dict[tuple[str, str], str]:
    """What the table has: {(file or pitfall test, bug): test that caught it, or yes or no}."""
    page = TABLE.read_text() if TABLE.exists() else ""
    lines = page.partition("\n## ")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {(first, bug): result for first, bug, result in cells}


def quickest_first(file: str) -> tuple[list[str], list[str]]:
    """The test files that catch the bugs of a file soonest, and the others."""
    stem = Path(file).stem
    own = [f"tests/test_{name}.py" for name in QUICKEST.get(stem, stem).split()]
    everything = [f"tests/{name}.py" for name in TESTS]
    return [test for test in own if test in everything], [t for t in everything if t not in own]


def main() -> None:
    words = sys.argv[1:]
    check_lists()
    os.environ["OMP_NUM_THREADS"] = "1"
    FORKSERVER.set_forkserver_preload(PRELOAD)
    chosen = [m for m in MUTATIONS if not words or any(word in m[3] for word in words)]
    bugs = {m[3]: m for m in chosen}
    pairs = [(test, bug) for test, bug in PAIRS if bug in bugs]
    started = time.perf_counter()
    if (failed := run_tests(None, [f"tests/{name}.py" for name in TESTS])) is not None:
        raise SystemExit(f"without any bug: {failed}")
    found = earlier() if words else {}

    def alone(pair: tuple[str, str]) -> str | None:
        return run_tests(bugs[pair[1]], [f"tests/{PITFALLS.name}::{pair[0]}"])

    with ThreadPoolExecutor(2) as pool:
        for (test, bug), result in zip(pairs, pool.map(alone, pairs), strict=True):
            found[test, bug] = "yes" if is_caught(result) else "no"
            print(f"{test[:66]:66} {bug:50} {result or 'SURVIVED'}", flush=True)
        caught = pool.map(lambda m: run_tests(m, *quickest_first(m[0])), chosen)
        for (file, _, _, bug), result in zip(chosen, caught, strict=True):
            found[file, bug] = result or EQUIVALENT.get(bug, "nothing")
            print(f"{file:12} {bug:66} {result or 'SURVIVED'}", flush=True)
    print(f"{(time.perf_counter() - started) / 60:.0f} minutes")

    rows = [(file, bug, found.get((file, bug), "not run")) for file, _, _, bug in MUTATIONS]
    alone_rows = [(test, bug, found.get((test, bug), "not run")) for test, bug in PAIRS]
    number_caught = sum("::" in result for *_, result in rows)
    number_alone = sum(result == "yes" for *_, result in alone_rows)
    lines = [
        "# Planted bugs, and the tests that catch them",
        "",
        "Each row is a bug, which is one edit of one place in the code, and the first test that fails",
        f"with it: {number_caught} of {len(rows)} are caught. `python tests/mutations.py` plants",
        "them in a copy of the code, one after the other, and writes this page but for its last",
        "section. Without a bug all tests pass; tests that don't start or don't end catch nothing. The",
        "tests were written for this list, so the share says little about bugs that nobody thought of:",
        "the last section is about those.",
        "",
        "| file | bug | caught by |",
        "|---|---|---|",
        *(f"| {file} | {bug} | {result} |" for file, bug, result in rows),
        "",
        f"Each test of {PITFALLS.name} run alone, with a bug of the kind that it is named after: "
        f"{number_alone} of {len(alone_rows)} fail, as they must.",
        "",
        "| test | bug | caught |",
        "|---|---|---|",
        *(f"| {test} | {bug} | {result} |" for test, bug, result in alone_rows),
    ]
    TABLE.parent.mkdir(exist_ok=True)
    others = "".join(TABLE.read_text().partition("\n## ")[1:]) if TABLE.exists() else ""
    TABLE.write_text("\n".join(lines) + "\n" + others)
    explained = EQUIVALENT.values()
    missed = [bug for _, bug, result in rows if "::" not in result and result not in explained]
    missed += [f"{test} with {bug}" for test, bug, result in alone_rows if result != "yes"]
    print(f"{number_caught} of {len(rows)} caught, {number_alone} of {len(alone_rows)} alone")
    if missed:
        raise SystemExit(f"not caught, and not explained: {', '.join(missed)}")


if __name__ == "__main__":
    main()
