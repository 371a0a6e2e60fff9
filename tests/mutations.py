"""Plants one bug after the other into a copy of the code, and says which test catches each.

  python tests/mutations.py                # all, on two cores: about an hour
  python tests/mutations.py KL clip        # those whose description holds one of the words
  python tests/mutations.py --list FILE    # those of a JSON file: [[function, old, new, bug], ...]

A bug is one edit within one function, which is found by its name: `gae`, `Meter.add`, `ppo.main`
where several files have it. The fast tests are tried first, those that name the function before
the others; then the slow ones. Some mutants change nothing that a test could see, so read those
that survive.
"""

import argparse
import ast
import functools
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
CODE = [p for folder in (".", "plumbing", "tools") for p in (REPOSITORY / folder).glob("*.py")]
# The tests start in processes that are forked off one which has the slow imports.
FORKSERVER = multiprocessing.get_context("forkserver")
PRELOAD = """pytest torch numpy tqdm tokenizers datasets peft transformers.models.gpt2.modeling_gpt2
transformers.models.llama.modeling_llama""".split()
STUCK = "the tests"  # don't start, or don't end: no test has caught anything

# function, text (once in the function), what it becomes, the bug in words
# fmt: off
MUTATIONS = [
    ("masked_mean", "(x.sum(), mask.sum()) if dim is None", "(x.sum(), torch.ones_like(x).sum()) if dim is None", "mean over padding too"),
    ("masked_mean", "    x = x.masked_fill(~mask, 0)\n", "", "padding summed into a masked mean"),
    ("masked_whiten", "(mask.sum() - 1).clamp(min=1)", "mask.sum().clamp(min=1)", "no Bessel correction in whitening"),
    ("masked_whiten", "torch.rsqrt(variance + 1e-8)", "1 / (variance + 1e-8)", "whitening divides by the variance"),
    ("masked_whiten", "return whitened if shift_mean else", "return whitened if not shift_mean else", "whitening shifts the mean the wrong way"),
    ("token_logprobs", "return at_least_float32(logits).log_softmax(-1).gather", "return logits.log_softmax(-1).gather", "log-probs in half precision"),
    ("token_logprobs", "return at_least_float32(logits).log_softmax(-1).gather", "return at_least_float32(logits).softmax(-1).gather", "probabilities for log-probs"),
    ("entropy_of", "logprobs.clamp(min=torch.finfo(logprobs.dtype).min)", "logprobs", "entropy is NaN for a token of probability 0"),
    ("kl_estimate", "    d = logprobs - ref_logprobs\n", "    d = ref_logprobs - logprobs\n", "KL turned round"),
    ("kl_estimate", "return torch.expm1(-d - excess) + d", "return torch.expm1(d) - d", "k3 with the ratio upside down"),
    ("kl_estimate", "return torch.expm1(-d - excess) + d", "return torch.exp(-d - excess) - 1 + d", "k3 loses its digits near 0"),
    ("kl_estimate", "excess = (-d - 20).clamp(min=0).detach()", "excess = 0", "k3 overflows"),
    ("gae", "delta = rewards[:, t] + gamma * next_value - values[:, t]", "delta = rewards[:, t] + next_value - values[:, t]", "no discount in GAE's delta"),
    ("gae", "delta = rewards[:, t] + gamma * next_value - values[:, t]", "delta = rewards[:, t] + gamma * next_value", "GAE without the value of the state"),
    ("gae", "(delta + gamma * lam * next_advantage)", "(delta + lam * next_advantage)", "no discount in GAE's sum"),
    ("gae", "(delta + gamma * lam * next_advantage)", "(delta + gamma * next_advantage)", "GAE without lambda"),
    ("gae", "        next_value = values[:, t]\n", "        next_value = rewards[:, t]\n", "GAE bootstraps from the reward"),
    ("gae", "rewards, values = rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)", "pass", "GAE reads values at padding"),
    ("gae", "next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~mask[:, t], 0)", "next_advantage = delta + gamma * lam * next_advantage", "advantages leak out of padding"),
    ("gae", "return advantages, advantages + values", "return advantages, advantages", "returns without the value"),
    ("group_advantages", "(groups - mean).masked_fill(is_flat(groups), 0)", "groups - mean", "constant groups keep their rounding error"),
    ("model_inputs", "position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)", "position_ids = torch.arange(attention_mask.shape[1]).expand_as(attention_mask)", "positions count the left padding"),
    ("model_inputs", "(attention_mask.long().cumsum(1) - 1).clamp(min=0)", "attention_mask.long().cumsum(1)", "positions start at 1"),
    ("model_inputs", "return {\"input_ids\": tokens} |", "return {\"input_ids\": tokens.masked_fill_(~attention_mask[:, -tokens.shape[1] :].bool(), 0)} |", "the tokens are changed before they are read"),
    ("model_inputs", "= attention_mask.long()\n    return", "= torch.ones_like(attention_mask.long())\n    return", "padding is attended to"),
    ("_score_tokens", "logits if temperature == 1 else", "logits if temperature >= 1 else", "temperature missing from the log-probs"),
    ("completion_logprobs", "hidden = hidden[row, column]", "hidden = hidden.roll(-1, 1)[row, column]", "logits one to the right"),
    ("_score_tokens", "logprobs if entropy_grad else logprobs.detach()", "logprobs", "the entropy carries gradient"),
    ("completion_values", "return values.masked_fill(~rollout.completion_mask.bool(), 0)", "return values.masked_fill(~rollout.completion_mask.bool(), 0).detach()", "the values carry no gradient"),
    ("completion_values", "completion_states(value_model.backbone, rollout)", "completion_states(value_model.backbone, rollout).roll(-1, 1)", "the value knows the action"),
    ("completion_values", "return values.masked_fill(~rollout.completion_mask.bool(), 0)", "return values", "values at padding are not 0"),
    ("micro_batches", "for batch in batches]", "for batch in batches[: max(1, len(batches) - 1)]]", "the last, smaller micro-batch is lost"),
    ("disable_dropout", "                module.p = 0.0\n", "                pass\n", "nn.Dropout left on"),
    ("disable_dropout", "                    sites += _zero_noise(quiet_configs[id(config)][0])\n", "", "dropout read from the config left on"),
    ("gae", "rewards, values = rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)", "rewards, values = rewards.masked_fill_(~mask, 0), values.masked_fill_(~mask, 0)", "GAE changes its inputs"),
    ("from_hub_or_folder", "\"dtype\": torch.float32", "\"dtype\": \"auto\"", "a checkpoint in bfloat16 is trained in bfloat16"),
    ("ValueModel.__init__", "        nn.init.zeros_(self.head.weight)\n", "", "the value head starts at random"),
    ("ValueModel.on_backbone_of", "            backbone = copy_of(backbone)\n", "            pass\n", "value model and policy share their weights"),
    ("reference", "    if kl_coef == 0:\n        return contextlib.nullcontext(None)\n", "", "a reference without KL"),
    ("reference", "copied = copy_of(policy).eval().requires_grad_(False)", "copied = policy", "the reference is the policy itself"),
    ("reference", "    if has_new_adapter(policy):\n        return AdapterOff(policy)\n", "    if hasattr(policy, 'peft_config'):\n        return AdapterOff(policy)\n", "the base model as reference of a trained adapter"),
    ("AdapterOff.__enter__", "        self.stack.enter_context(self.policy.disable_adapter())\n", "", "the adapter is on in its own reference"),
    ("AdapterOff.__enter__", "        return self.stack.enter_context(evaluating(self.policy))", "        return self.policy", "dropout in the reference of an adapter"),
    ("evaluating", "        model.train(was_training)", "        model.train()", "evaluation mode is not restored"),
    ("eos_token_ids", "    for source in (model.generation_config, model.config, tokenizer):", "    for source in (tokenizer,):", "only one of several EOS ids"),
    ("completion_mask", "    return eos_before == 0", "    return (eos_before + is_eos) == 0", "EOS is masked out"),
    ("generate", "prompt_ids = prompt_ids.repeat_interleave(num_generations, dim=0)", "prompt_ids = prompt_ids.repeat(num_generations, 1)", "the completions of a prompt are not consecutive"),
    ("sample", "prompt_mask.split(num_prompts))", "prompt_mask.split(num_prompts)[::-1])", "sub-batches get the masks of others"),
    ("draw", "logits.float() / temperature", "logits.float()", "temperature ignored in sampling"),
    ("draw", "    if top_k == 1:", "    if False:", "greedy draws among equally likely tokens"),
    ("draw", "sorted_probs.cumsum(-1) - sorted_probs", "sorted_probs.cumsum(-1)", "top_p drops the token that crosses p"),
    ("_first_above", "threshold, right=True)", "threshold, right=False)", "a token of probability 0 can be drawn"),
    ("completion_mask", "torch.tensor(eos_token_ids, dtype=completions.dtype)", "torch.tensor(eos_token_ids[:1], dtype=completions.dtype)", "the mask ends at one of several EOS ids"),
    ("generate", "drawn_mask = completion_mask(ends.long(), [1])", "drawn_mask = tokens != pad_token_id", "the mask inferred from the ids of padding"),
    ("generate", "    top_k: int = 0,\n", "    top_k: int = 50,\n", "top_k 50 by default"),
    ("generate", "    top_p: float = 1.0,\n", "    top_p: float = 0.9,\n", "top_p 0.9 by default"),
    ("generate", "(temperature, top_k, top_p)", "(model.generation_config.temperature or temperature, top_k, top_p)", "the temperature of generation_config"),
    ("Decoder.drop_ended", "if 0 < num_running <= min(size, 7 / 8 * num_rows):", "if False:", "finished rows go on"),
    ("Decoder._take", "self.uniforms[t, rows]", "self.uniforms[t, : len(rows)]", "random numbers of dropped rows go to others"),
    ("generate", "with evaluating(model):", "with torch.no_grad():", "dropout while sampling"),
    ("generate", "attention_mask=torch.cat([to(model.device, prompt_mask), drawn_mask], dim=1)", "attention_mask=torch.cat([to(model.device, prompt_mask), torch.ones_like(drawn_mask)], dim=1)", "padding after EOS counts as text"),
    ("generate", "logprobs.masked_fill(~drawn_mask, 0)", "logprobs.clone()", "log-probs recorded after EOS"),
    ("shape_rewards", "is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))", "is_last = torch.arange(mask.shape[1], device=mask.device) == mask.shape[1] - 1", "the score in the last column, not on the last token"),
    ("shape_rewards", "is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))", "is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True)); is_last = is_last.roll(1, 1) & ~mask | is_last & mask[:, -1:]", "the score one slot after the last token"),
    ("shape_rewards", "(-kl_coef * kl).masked_fill(~mask, 0)", "(kl_coef * kl).masked_fill(~mask, 0)", "the KL is a bonus"),
    ("policy_loss", "    return torch.max(free, bounded), bounded > free", "    return torch.min(free, bounded), bounded > free", "minimum for maximum in PPO's clip"),
    ("policy_loss", "    return torch.max(free, bounded), bounded > free", "    return free, bounded > free", "no clip"),
    ("policy_loss", "policy_ratio(logprobs - old_logprobs)", "policy_ratio(old_logprobs - logprobs)", "PPO's ratio upside down"),
    ("value_loss", "values.clamp(old_values - clip_range_value, old_values + clip_range_value)", "(values - old_values).clamp(-clip_range_value, clip_range_value)", "values clipped around 0"),
    ("value_loss", "return 0.5 * torch.max(free, bounded)", "return torch.max(free, bounded)", "no half in the value loss"),
    ("value_loss", "return 0.5 * torch.max(free, bounded)", "return 0.5 * torch.min(free, bounded)", "minimum in the value loss"),
    ("ppo.main", "        disable_dropout(policy, value_model)", "        disable_dropout(policy)", "dropout left on in the value model"),
    ("ppo.main", "            advantages = masked_whiten(advantages, mask)\n", "", "advantages not whitened"),
    ("ppo.main", "((loss * m).sum() / num_tokens)", "((loss * m).sum() / m.sum())", "PPO normalises by the micro-batch"),
    ("ppo.main", "num_tokens = lengths[mini_batch].sum()", "num_tokens = len(mini_batch)", "PPO sums over tokens and averages over rows"),
    ("ppo.main", "((loss * m).sum() / num_tokens)", "(loss.sum() / num_tokens)", "PPO's loss is not masked"),
    ("ppo.main", "loss = pg + config.vf_coef * vf", "loss = pg - config.vf_coef * vf", "the value loss is maximised"),
    ("ppo.main", "                optimizer.zero_grad()\n", "", "gradients pile up in PPO"),
    ("ppo.main", "            set_learning_rate(optimizer, config, step)\n", "", "constant learning rate in PPO"),
    ("schedule", "return (step + 1) / warmup_steps", "return 1.0", "no warm-up"),
    ("schedule", "    warmup_steps = min(warmup_steps, num_steps // 2)\n", "", "a short run never reaches its learning rate"),
    ("schedule", "(num_steps - step) / (num_steps - warmup_steps)", "(num_steps - step) / num_steps", "the learning rate drops after the warm-up"),
    ("ppo.main", "            advantages = masked_whiten(advantages, mask)\n", "            advantages = masked_whiten(advantages, mask)\n            returns = advantages + old_values\n", "returns from whitened advantages"),
    ("ppo.main", "sampling = sampling_options(config, policy, tokenizer)", "sampling = sampling_options(config, policy, tokenizer) | {\"top_k\": 5}", "PPO samples with top_k"),
    ("ppo.main", "old_logprobs = rollout_logprobs(policy, rollout, config)", "old_logprobs = rollout.logprobs", "old log-probs of the decode loop"),
    ("ppo.main", ".split(B // config.num_mini_batches)", ".split(B)", "num_mini_batches adds no steps"),
    ("Totals.end_mini_batch", "if not grad_norm.isfinite():", "if False:", "a NaN goes into the weights"),
    ("Meter.add_policy", "self.add(\"val/ratio\", ratio, where)", "self.add(\"val/ratio\", ratio)", "PPO's mean ratio over padding too"),
    ("ppo.main", "value_loss(\n                        values, old_values[rows], returns[rows]", "value_loss(\n                        values, old_values[rows], advantages[rows]", "the value model learns advantages"),
    ("ppo.main", "num_tokens = lengths[mini_batch].sum()", "num_tokens = lengths.sum()", "PPO counts the tokens of the rollout, not of the minibatch"),
    ("group_advantages", "centred = (groups - mean).masked_fill", "centred = (groups - groups.nanmean()).masked_fill", "the mean of the batch for that of the group"),
    ("group_advantages", "(num_known - 1).clamp(min=1)\n        centred = centred / (variance.sqrt() + 1e-4)", "(num_known - 1).clamp(min=1)\n        centred = centred / (variance + 1e-4)", "GRPO divides by the variance"),
    ("group_advantages", "/ (num_known - 1).clamp(min=1)", "/ num_known.clamp(min=1)", "no Bessel correction in GRPO"),
    ("group_advantages", "/ (num_known - 1).clamp(min=1)", "/ (num_generations - 1)", "missing rewards count in GRPO's standard deviation"),
    ("_score_tokens", "logits if temperature == 1 else logits / temperature", "logits * temperature", "logits times the temperature"),
    ("group_advantages", "variance = ((known - known.mean()) ** 2).sum() / max(1, len(known) - 1)", "variance = (centred**2).nansum(dim=1, keepdim=True) / (num_known - 1).clamp(min=1)", "scale_rewards batch scales by the group"),
    ("group_advantages", "if (groups < 0).any():", "if False:", "MaxRL with a negative mean"),
    ("importance_ratio", "mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)", "mean = log_ratio.sum(1, keepdim=True)", "GSPO without its length normalisation"),
    ("importance_ratio", "mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)", "mean = log_ratio.mean(1, keepdim=True)", "GSPO averages over padding"),
    ("importance_ratio", "log_ratio = (logprobs - old_logprobs).masked_fill", "log_ratio = (old_logprobs - logprobs).masked_fill", "GRPO's ratio upside down"),
    ("grpo_loss", "    high = clip_range if clip_range_high is None else clip_range_high", "    high = clip_range", "clip-higher ignored"),
    ("grpo_loss", "ratio.clamp(max=cispo_bound).detach()", "ratio.clamp(max=cispo_bound)", "CISPO's weight carries gradient"),
    ("grpo_loss", "loss, clipped = torch.max(free, bounded), bounded > free", "loss, clipped = torch.min(free, bounded), bounded > free", "minimum for maximum in GRPO's clip"),
    ("grpo_loss", "loss = loss + kl_coef * kl\n", "loss = loss - kl_coef * kl\n", "GRPO rewards the KL"),
    ("grpo.main", "kl_estimate(old_logprobs, ref_logprobs, \"k1\")", "kl_estimate(old_logprobs, ref_logprobs, \"k3\")", "GRPO logs the KL as k3"),
    ("grpo_loss", "ref_logprobs.masked_fill(~mask, 0), \"k3\")", "ref_logprobs.masked_fill(~mask, 0), \"k1\")", "k1 as a loss, whose expected gradient is 0"),
    ("grpo_loss", "kl_estimate(logprobs, ref_logprobs.masked", "kl_estimate(logprobs.detach(), ref_logprobs.masked", "the KL carries no gradient"),
    ("grpo_loss", "    loss = loss.masked_fill(~mask, 0)  # (B, T)\n", "", "padding counts in GRPO's loss"),
    ("grpo_loss", "return masked_mean(loss, mask, dim=1).sum() / num_rows", "return masked_mean(loss, mask, dim=1).mean()", "GRPO normalises by the micro-batch"),
    ("grpo.main", "            set_learning_rate(optimizer, config, step)\n", "", "constant learning rate in GRPO"),
    ("grpo_loss", "return loss.sum() / num_tokens.clamp(min=1)", "return loss.sum() / num_tokens", "an empty minibatch divides by 0"),
    ("grpo_loss", "return loss.sum() / num_tokens.clamp(min=1)", "return loss.sum() / mask.sum().clamp(min=1)", "DAPO normalises by the micro-batch"),
    ("grpo_loss", "return loss.sum() / (num_rows * max_new_tokens)", "return masked_mean(loss, mask, dim=1).sum() / num_rows", "Dr. GRPO that still divides by the length"),
    ("grpo.main", "        disable_dropout(policy)\n", "        pass\n", "dropout left on in GRPO"),
    ("grpo.main", "num_tokens = lengths[mini_batch].sum()", "num_tokens = lengths.sum()", "DAPO counts the tokens of the rollout, not of the minibatch"),
    ("grpo.main", "single_update = config.num_epochs * config.num_mini_batches == 1 and", "single_update = config.num_epochs == 1 and", "old log-probs taken for new ones at the second minibatch"),
    ("grpo.main", "                optimizer.zero_grad()\n", "", "gradients pile up in GRPO"),
    ("rloo_advantages", "/ (num_known - 1).clamp(min=1)", "/ num_known.clamp(min=1)", "the baseline divides by G"),
    ("rloo_advantages", "baseline = (groups.nansum(dim=1, keepdim=True) - groups) /", "baseline = groups.nansum(dim=1, keepdim=True) /", "the baseline holds its own reward"),
    ("rloo_advantages", "/ (num_known - 1).clamp(min=1)", "/ (num_generations - 1)", "missing rewards count in the baseline"),
    ("rloo_advantages", "masked_fill(is_flat(groups), 0)", "masked_fill(num_known < 2, 0)", "RLOO's constant groups keep their rounding error"),
    ("rloo_advantages", "masked_fill(is_flat(groups), 0)", "masked_fill(is_flat(groups) & (num_known > 1), 0)", "the only known reward of a group is an advantage"),
    ("rloo_loss", ".masked_fill(~mask.bool(), 0).sum(1)", ".masked_fill(~mask.bool(), 0).mean(1)", "RLOO's ratio is a mean over tokens"),
    ("policy_ratio", "return (log_ratio - excess).exp()", "return log_ratio.exp()", "a long ratio overflows"),
    ("policy_ratio", "excess = (log_ratio - 20).clamp(min=0).detach()", "excess = (log_ratio - 20).clamp(min=0)", "a long ratio has no gradient"),
    ("rloo_loss", "loss, clipped = torch.max(free, bounded), bounded > free", "loss, clipped = torch.min(free, bounded), bounded > free", "minimum for maximum in RLOO's clip"),
    ("rloo_loss", "return loss.sum() / num_rows, clipped", "return loss.mean(), clipped", "RLOO normalises by the micro-batch"),
    ("rloo.main", "scores - config.kl_coef * kl.sum(1)", "scores + config.kl_coef * kl.sum(1)", "RLOO rewards the KL"),
    ("rloo.main", "scores - config.kl_coef * kl.sum(1)", "scores - config.kl_coef * kl.mean(1)", "RLOO's KL is a mean over tokens"),
    ("rloo.main", "old_logprobs[rows] = logprobs.detach()", "pass", "a single update compares with other log-probs than its own"),
    ("rloo.main", "kl = kl_estimate(old_logprobs, ref_logprobs, \"k1\")", "kl = kl_estimate(old_logprobs, ref_logprobs, \"k3\")", "k3 in RLOO's reward"),
    ("rloo.main", "                optimizer.zero_grad()\n", "", "gradients pile up in RLOO"),
    ("rloo.main", "grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)", "grad_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])", "max_grad_norm ignored"),
    ("rloo.main", "            set_learning_rate(optimizer, config, step)\n", "", "constant learning rate in RLOO"),
    ("Totals.add", "x.masked_fill(~mask, 0).sum()\n", "x.sum()\n", "metrics add up padding"),
    ("Totals.add", "self.counts.get(name, 0) + mask.sum()", "self.counts.get(name, 0) + x.numel()", "metrics count padding"),
    ("Totals.add", "self.sums[name] = self.sums.get(name, 0) + x", "self.sums[name] = x", "metrics hold the last micro-batch alone"),
    ("explained_variance.variance", "return masked_mean((x - masked_mean(x, mask)) ** 2, mask)", "return ((x - x.mean()) ** 2).mean()", "explained variance over padding too"),
    ("Meter.objective", "kl.masked_fill(~mask, 0).sum(1)", "kl.sum(1)", "the KL of a completion with its padding"),
    ("Meter.objective", "{\"objective/kl\": None, \"objective/kl_token\": None}", "{\"objective/kl\": 0.0, \"objective/kl_token\": 0.0}", "an unknown KL logged as 0"),
    ("Meter.__init__", "1 - here.finished.float().mean().item()", "here.finished.float().mean().item()", "the share of those that did end"),
    ("_samples", "manual_seed(config.seed + 1)", "manual_seed(config.seed)", "evaluation with the random numbers of training"),
    ("Run.__init__", "        self.first_step = 0\n", "        self.first_step = 0\n        self.model = copy.deepcopy(self.model)\n", "the model from before the training is saved"),
    ("_parser", "allow_abbrev=False", "allow_abbrev=True", "a flag that lacks letters is another flag"),
    ("parse_flags", "value.tiny if config.model == \"tiny\" else value.other", "value.other", "the tiny model gets the defaults of the others"),
    ("score_texts", "(scores * torch.tensor(weights)).nansum(dim=1)", "scores.nansum(dim=1)", "the weights of the rewards are ignored"),
    ("score_texts", "(scores * torch.tensor(weights)).nansum(dim=1)", "(scores * torch.tensor(weights)).sum(dim=1)", "one missing reward hides the others"),
    ("rewards._arguments", "[copy.deepcopy(row) for row in rows for _ in range(num_generations)]", "[copy.deepcopy(row) for row in rows * num_generations]", "answers are checked against those of other rows"),
    ("completion_ids", "row[:length]", "row", "the ids for the reward hold padding"),
    ("Task.score", "score_texts(self.rewards, self.weights, rows, texts, completion_ids(rollout))", "score_texts(self.rewards, self.weights, rows, texts, [self.tokenizer(text).input_ids for text in texts])", "the text is encoded again for the reward"),
    ("decode", "ids[:-1] if finished else ids)", "ids)", "EOS is part of the text"),
    ("token_ids", "tokenizer(written, add_special_tokens=False)", "tokenizer(written)", "EOS after a chat prompt"),
    ("without_second_bos", "ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids", "ids", "two BOS before a prompt"),
    ("encode_prompts", "pad_rows(ids, PADDING, \"left\", \"cpu\")", "pad_rows(ids, PADDING, \"right\", \"cpu\")", "prompts padded on the right"),
    ("RewardModel.__call__", "0, \"right\", device)", "0, \"left\", self.model.device)", "the reward model reads shifted positions"),
    ("_order", "random.Random(f\"{seed},{number}\")", "random.Random(f\"{seed}\")", "the same order of prompts in every pass"),
    ("split_prompts", "train, heldout = rows[num_heldout:], rows", "train, heldout = rows, rows", "held-out prompts are trained on"),
    ("numeric_match", "Decimal(n[-1])", "Decimal(n[0])", "the first number counts as the answer"),
    ("_check_settings", "if name not in FREE_ON_RESUME and", "if False and", "a resumed run takes other settings"),
    ("_check_settings", "if before[\"script\"] != config.script:", "if False:", "a run of another script is resumed"),
    ("Run._resume", "self.optimizer.load_state_dict(state[\"optimizer\"])", "pass", "a resumed run starts with a new optimiser"),
    ("Run._resume", "generator.set_state(its_state)", "pass", "a resumed run draws the first random numbers again"),
    ("Run._open_files", "            file.truncate(state[name] if state else 0)\n", "", "lines after the checkpoint stay"),
    ("read_state", "if parts.testzip() is not None:", "if False:", "a damaged checkpoint is used"),
    ("Run.__init__", "register_step_pre_hook", "register_step_post_hook", "an interrupt within the optimiser saves half an update"),
    ("generate", "completion_mask(ends.long(), [1])", "completion_mask(ends.long(), [1]).cpu()", "a mask on the CPU"),
    ("Decoder.step", "        self.t.fill_(self.num_drawn)\n", "        self.t.fill_(self.num_drawn)\n        self.last.any().item()\n", "the decode loop waits for every token"),
    ("Decoder.step", "self.column.fill_(num_read - 1)", "self.column = torch.full_like(self.column, num_read - 1)", "a tensor is replaced while a graph holds its address"),
    ("Decoder._warm_up", "torch.cuda.set_sync_debug_mode(\"error\")", "pass", "a forward pass that waits is captured, and fails half-way"),
    ("mask_is_known", "    with _replacing:", "    with contextlib.nullcontext():", "two threads leave transformers without its masks"),
    ("grpo.main", "mini_batch, has_gradient, max_tokens", "mini_batch, None, max_tokens", "GRPO computes rows that have no gradient"),
    ("Run._save_at_exit", "and not self.weights_moved and", "and", "half an update is saved as a step"),
    ("write_state", "new = path.with_name(f\"{path.name}.new\")", "new = path", "a checkpoint is overwritten in place"),
    ("evaluate", "{\"num_generations\": 1, \"top_k\": 1}", "{\"num_generations\": 1}", "the greedy evaluation samples"),
    ("Run.log", "if name not in self.warned:", "if True:", "a warning at every step"),
    ("warnings_about", "if kl is not None and kl > 10 and", "if kl is not None and kl > 100 and", "no warning of a large KL"),
    ("micro_batches", "order = lengths.argsort(descending=True, stable=True)", "order = lengths.argsort(stable=True)", "short rows first"),
    ("_over_rollout", "return found[torch.cat([rows for rows, _ in parts]).argsort()]", "return found", "sorted rows are not put back"),
    ("_repeat_cache_rows", "cache.reorder_cache(which)", "cache.reorder_cache(which.sort().values)", "keys of another row's prompt"),
    ("completion_states", "padding = length - int(prompt_lengths.max())", "padding = 0", "padding columns are read"),
    ("_score_in_chunks", "if torch.is_grad_enabled() and len(tokens) > size:", "if False:", "all logits are kept for the backward pass"),
    ("draw", "(uniform * total).unsqueeze(1)", "uniform.unsqueeze(1)", "the uniform number is compared with an unnormalised sum"),
    ("Decoder.__exit__", "self.in_rollout = self.is_fresh = False", "self.in_rollout = False", "the weights of an earlier rollout decode"),
    ("Decoder.drop_ended", "            self._view_cache()  # all", "            # all", "after a replay rows move without the tokens that it wrote"),
    ("half_precision_copy", "merged = weight.float() + ", "merged = weight.float() - ", "an adapter is taken away from the copy"),
    ("PreallocatedLayer.batch_select_indices", "new.copy_(states[indices])", "new.copy_(states[: len(indices)])", "rows that leave the cache are the last ones"),
    ("PreallocatedLayer.update", "index_copy_(2, self.past, new)", "index_copy_(2, self.past - 1, new)", "the static step writes one column to the left"),
    ("mask_of_tokens", " and kind is causal_mask_function and", " and", "past its window a layer of the copy sees all tokens"),
    ("add_adapter", "\"lora_alpha\": 32,", "\"lora_alpha\": 2 * rank,", "LoRA alpha grows with the rank"),
    ("eos_token_ids", "return sorted(found - {None})", "return sorted(filter(None, found))", "an EOS with id 0 (GPT-NeoX) is lost"),
    ("generate", "stop(tokens[rows, : t + 1], None)", "stop(torch.cat([to(model.device, prompt_ids)[rows], tokens[rows, : t + 1]], dim=1), None)", "a stop string may begin in the prompt"),
    ("generate", "seen = 0 ", "seen = 1 ", "a stop string of one token is missed at the start"),
    ("generate", "finished=ends.any(dim=1)", "finished=(torch.isin(tokens, eos) & drawn_mask).any(dim=1)", "what a stop string ended counts as truncated"),
    ("stop_criteria", "    criteria.embedding_vec[special] = -1\n", "", "the name of a special token ends a completion"),
    ("overlong_penalty", "(mask.shape[1] - buffer)) / max(1, buffer))", "(mask.shape[1] - buffer)) / mask.shape[1])", "the length penalty doesn't reach 1"),
    ("replace_flat_groups", "useful = sorted({*range(len(prompts))} - {*_flat_groups(scores, G)})", "useful = range(len(prompts))", "dynamic sampling puts flat groups in"),
    ("Meter.add_policy", "kl_estimate(sampled, old_logprobs, \"k3\")", "kl_estimate(old_logprobs, sampled, \"k3\")", "the sampler's KL turned round"),
    ("_score_tokens", "logprobs if entropy_grad else logprobs.detach()", "logprobs.detach()", "the entropy bonus has no gradient"),
    ("grpo.main", "bonus = config.entropy_coef * (entropy * m).sum() / num_tokens", "bonus = config.entropy_coef * (entropy * m).sum() / m.sum()", "GRPO's bonus changes with the micro-batch"),
    ("evaluate", "(right > 0).any(1)", "(right > 0).all(1)", "pass@k where all k are right"),
    ("preference_loss", "loss = -logsigmoid(chosen - rejected - margin)", "loss = -logsigmoid(rejected - chosen - margin)", "the rejected text is preferred"),
    ("preference_loss", "loss = -logsigmoid(chosen - rejected - margin)", "loss = -torch.sigmoid(chosen - rejected - margin).log()", "the loss of a badly wrong pair is infinite"),
    ("reward_model.main", "preference_loss(chosen, rejected, margin, config.center_rewards_coef)", "preference_loss(chosen, rejected, 0.0, config.center_rewards_coef)", "the margins of the data are not used"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = mask.long().sum(1) - 1", "the last real token by a count, wrong for padding on the left"),
    ("_with_tokens", "if ids[\"chosen_ids\"] == ids[\"rejected_ids\"]:", "if False:", "equal pairs are kept"),
]
# fmt: on


def planted(function: str, old: str, new: str, bug: str) -> tuple[Path, str]:
    """The file of a function, and its text with the bug. Raises ValueError for a stale entry."""
    module, _, rest = function.partition(".")
    files = [path for path in CODE if path.stem == module] if rest else []
    names, found = (rest if files else function).split("."), []
    for path in files or CODE:
        lines, tree = parsed(path)
        for node in functions_called(names, tree):
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if body.count(old) == 1 and old != new:
                after = [
                    *lines[: node.lineno - 1],
                    body.replace(old, new),
                    *lines[node.end_lineno :],
                ]
                found.append((path, "\n".join(after)))
    if len(found) != 1:
        raise ValueError(f"{bug}: {len(found)} functions called {function} have {old!r} once")
    ast.parse(found[0][1])
    return found[0]


@functools.cache
def parsed(path: Path) -> tuple[list[str], ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text.split("\n"), ast.parse(text)


def functions_called(names: list[str], tree: ast.AST) -> list[ast.AST]:
    """The functions, or classes, of a name; of several names each lies within the one before."""
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = [x for x in ast.walk(tree) if isinstance(x, kinds) and x.name == names[0]]
    if len(names) == 1:
        return nodes
    return [x for node in nodes for x in functions_called(names[1:], node) if x is not node]


def first_failure(edit: tuple[Path, str] | None, *rounds: list[str]) -> str | None:
    """The first test that fails with the edit (file, its text) in a copy of the repository, or
    None. A round of tests runs if those before it have caught nothing. Tests that don't start or
    don't end are named by STUCK.
    """
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work) / "copy"
        ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", ".*_cache")
        shutil.copytree(REPOSITORY, copy, ignore=ignored)
        if edit is not None:
            path, text = edit
            (copy / path.relative_to(REPOSITORY)).write_text(text, encoding="utf-8")
        for tests in rounds:
            output = Path(work) / "output"
            process = FORKSERVER.Process(target=run_pytest, args=(copy, tests, output))
            process.start()
            process.join(900)
            if process.is_alive():
                process.kill()
                process.join()
                return f"{STUCK} don't end"
            if process.exitcode != 0:
                # 1: a test failed. An error on import and the like have other codes.
                failed = r"^(?:FAILED|ERROR) tests/(\S+?::\w+)"
                match = re.search(failed, output.read_text(), re.MULTILINE)
                caught = process.exitcode == 1 and match
                return match[1] if caught else f"{STUCK} don't start"
    return None


def run_pytest(folder: Path, tests: list[str], output: Path) -> None:
    """In a process of its own, which sees nothing of the repository that this file lies in."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    of_the_original = str(REPOSITORY), str(REPOSITORY / "tests"), ""
    sys.path[:] = [str(folder), *(p for p in sys.path if p not in of_the_original)]
    # One process, for several bugs are tried at the same time. kill -9 takes half a minute.
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "not kill_9"]
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(code)  # without the seconds that torch takes to end


def rounds_for(function: str) -> tuple[list[str], list[str]]:
    """Fast tests, then slow ones. First come the files that are called after the function or its
    file, then the steps by hand, then those that mention it most often.
    """
    words = [word for word in function.split(".") if word not in ("main", "__init__")]

    def key(path: Path) -> tuple[bool, bool, int]:
        called = any(re.search(rf"(^|_){word}(_|$)", path.stem) for word in words)
        mentions = rf"\b({'|'.join(words)})\b"
        by_hand = function.endswith("main") and "by_hand" in path.stem
        return called, by_hand, len(re.findall(mentions, path.read_text(encoding="utf-8")))

    files = sorted((REPOSITORY / "tests").glob("test_*.py"), key=key, reverse=True)
    names = [f"tests/{path.name}" for path in files]
    return ["-m", "not slow", *names], ["-m", "slow", *names]


def attempt(function: str, edit: tuple[Path, str]) -> tuple[str, str | None]:
    """Which kind of tests catches an edit (fast, slow, none), and the first test that does."""
    for kind, tests in zip(("fast", "slow"), rounds_for(function), strict=True):
        if (found := first_failure(edit, tests)) is not None:
            return ("none" if found.startswith(STUCK) else kind), found
    return "none", None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--list", type=Path, metavar="FILE", help="other bugs, as JSON")
    options = parser.parse_args()
    bugs = json.loads(options.list.read_text()) if options.list else MUTATIONS
    # A stale entry ends it here.
    chosen = [(bug[0], bug[3], planted(*bug)) for bug in bugs]
    chosen = [x for x in chosen if not options.words or any(w in x[1] for w in options.words)]
    os.environ["OMP_NUM_THREADS"] = "1"
    FORKSERVER.set_forkserver_preload(PRELOAD)
    if (failed := first_failure(None, ["-m", "not slow"])) is not None:
        raise SystemExit(f"without any bug: {failed}")
    count = dict.fromkeys(("fast", "slow", "none"), 0)
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda x: attempt(x[0], x[2]), chosen)
        for (function, bug, _), (kind, test) in zip(chosen, results, strict=True):
            count[kind] += 1
            print(f"{kind:5} {function:24} {bug:60} {test or 'SURVIVED'}", flush=True)
    print(f"{count['fast'] + count['slow']} of {len(chosen)} caught, {count['fast']} by fast tests")
    if count["none"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
