"""Right answers to the problems of the course, written in other ways than the solution.

`<problem>__<way>`: the grader must give each of them all points. Names that a function takes from
its file (Tensor, nn, copy, ...) are that file's.
"""

import math

import numpy as np
import torch

from plumbing.inputs import model_inputs

# --- token_logprobs ---


def token_logprobs__log_sum_exp(logits, tokens):
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.gather(-1, tokens[..., None])[..., 0]
    return chosen - logits.logsumexp(dim=-1)


def token_logprobs__cross_entropy(logits, tokens):
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.to(torch.float32)
    flat = logits.reshape(-1, logits.shape[-1])
    loss = nn.functional.cross_entropy(flat, tokens.flatten(), reduction="none")
    return -loss.view(tokens.shape)


def token_logprobs__row_by_row(logits, tokens):
    rows = []
    for row, chosen in zip(logits.reshape(-1, logits.shape[-1]), tokens.flatten()):
        row = row.float()
        row = row - row.max()
        rows.append(row[chosen] - row.exp().sum().log())
    return torch.stack(rows).view(tokens.shape)


# --- kl_estimate ---


def kl_estimate__table(logprobs, ref_logprobs, estimator):
    d = logprobs - ref_logprobs
    formulas = {"k1": lambda: d, "k2": lambda: d.square() / 2, "k3": lambda: (-d).expm1() + d}
    if estimator not in formulas:
        raise ValueError(f"no estimator {estimator}")
    return formulas[estimator]()


def kl_estimate__by_the_reversed_difference(logprobs, ref_logprobs, estimator):
    r = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -r
        case "k2":
            return 0.5 * r * r
        case "k3":
            return torch.expm1(r) - r
    raise ValueError(estimator)


def kl_estimate__in_double_precision(logprobs, ref_logprobs, estimator):
    d = logprobs.double() - ref_logprobs.double()
    if estimator == "k1":
        found = d
    elif estimator == "k2":
        found = d.pow(2).mul(0.5)
    elif estimator == "k3":
        found = torch.exp(-d) - 1 + d
    else:
        raise ValueError("k1, k2 or k3")
    return found.to(logprobs.dtype)


# --- completion_mask ---


def completion_mask__loops(completions, eos_token_ids):
    mask = torch.zeros_like(completions, dtype=torch.bool)
    for i, row in enumerate(completions.tolist()):
        for t, token in enumerate(row):
            mask[i, t] = True
            if token in eos_token_ids:
                break
    return mask


def completion_mask__first_position(completions, eos_token_ids):
    is_eos = torch.zeros_like(completions, dtype=torch.bool)
    for eos in eos_token_ids:
        is_eos |= completions == eos
    width = completions.shape[1]
    first = torch.where(is_eos.any(1), is_eos.int().argmax(1), width)
    return torch.arange(width, device=completions.device) <= first[:, None]


def completion_mask__cumulative_product(completions, eos_token_ids):
    eos = torch.as_tensor(eos_token_ids, device=completions.device)
    alive = (~torch.isin(completions, eos)).long().cumprod(1)
    before = torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], 1)
    return before.bool()


# --- masked_whiten ---


def masked_whiten__index_by_the_mask(x, mask, shift_mean=True):
    mask = mask.bool()
    real = x[mask]
    mean = real.mean()
    variance = real.var() if real.numel() > 1 else torch.zeros_like(mean)
    found = (real - mean) / torch.sqrt(variance + 1e-8)
    if not shift_mean:
        found = found + mean
    return torch.zeros_like(x).masked_scatter(mask, found)


def masked_whiten__where(x, mask, shift_mean=True):
    m = mask.to(x.dtype)
    clean = torch.where(mask.bool(), x, 0)
    n = m.sum()
    mean = clean.sum() / n
    deviations = (clean - mean) * m
    std = (deviations.square().sum() / torch.clamp(n - 1, min=1) + 1e-8) ** 0.5
    return deviations / std + (0 if shift_mean else mean) * m


def masked_whiten__numpy(x, mask, shift_mean=True):
    array, keep = x.detach().numpy().astype(np.float64), mask.numpy().astype(bool)
    real, found = array[keep], np.zeros_like(array)
    variance = real.var(ddof=1) if real.size > 1 else 0.0
    found[keep] = (real - real.mean()) / np.sqrt(variance + 1e-8)
    if not shift_mean:
        found[keep] += real.mean()
    return torch.from_numpy(found).to(x.dtype)


# --- disable_dropout ---


def disable_dropout__class_names(*models):
    def silence(record):
        names = [k for k, v in vars(record).items() if "drop" in k or "jitter" in k]
        names = [k for k in names if type(getattr(record, k)) is float and getattr(record, k) > 0]
        for name in names:
            setattr(record, name, 0.0)
        return len(names)

    count = 0
    for model in models:
        for module in model.modules():
            if "Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0:
                module.p = 0.0
                count += 1
            count += silence(module)
            if module is not model and "config" in vars(module):
                module.config = copy.deepcopy(module.config)
                count += silence(module.config)
    return count


def disable_dropout__helper_of_the_file(*models):
    sites = 0
    for model in models:
        for module in model.modules():
            if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
                                   nn.AlphaDropout, nn.FeatureAlphaDropout)):  # fmt: skip
                sites += module.p > 0
                module.p = 0
            sites += _zero_noise(module)
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is not None and module is not model:
                module.config = copy.copy(config)
                sites += _zero_noise(module.config)
    return sites


def _quiet(thing):
    number = 0
    for name in list(vars(thing)):
        value = vars(thing)[name]
        if isinstance(value, float) and value > 0 and any(w in name for w in ("drop", "jitter")):
            vars(thing)[name] = 0.0
            number += 1
    return number


def disable_dropout__its_own_helper(*models):
    total = 0
    for model in models:
        own = id(model)
        stack = [model]
        while stack:
            module = stack.pop()
            stack.extend(module.children())
            if isinstance(module, nn.modules.dropout._DropoutNd):
                total += int(module.p > 0)
                module.p = 0.0
            total += _quiet(module)
            if "config" in module.__dict__ and id(module) != own:
                module.config = copy.copy(module.config)
                total += _quiet(module.config)
    return total


# --- reference ---


def reference__a_generator_each_time(policy, kl_coef):
    class Reference:
        def __init__(self):
            self.kind = "none" if kl_coef == 0 else "adapter" if has_new_adapter(policy) else "copy"
            if self.kind == "copy":
                self.copy = copy.deepcopy(policy).eval()
                for p in self.copy.parameters():
                    p.requires_grad = False

        def __enter__(self):
            if self.kind == "none":
                return None
            if self.kind == "copy":
                return self.copy
            self.off = policy.disable_adapter()
            self.off.__enter__()
            self.was_training = policy.training
            policy.eval()
            return policy

        def __exit__(self, *error):
            if self.kind == "adapter":
                self.off.__exit__(*error)
                policy.train(self.was_training)

    return Reference()


def reference__nullcontext_of_a_deep_copy(policy, kl_coef):
    if not kl_coef:
        return contextlib.nullcontext()
    if has_new_adapter(policy):
        return AdapterOff(policy)
    frozen = copy.deepcopy(policy)
    frozen.requires_grad_(False)
    frozen.eval()
    return contextlib.nullcontext(frozen)


def reference__adapter_judged_by_its_weights(policy, kl_coef):
    if kl_coef == 0:
        return contextlib.nullcontext(None)
    second = [p for name, p in policy.named_parameters() if "lora_B" in name]
    if second and all((p == 0).all() for p in second):
        return AdapterOff(policy)
    was_training = policy.training
    policy.eval()
    kept = copy_of(policy)
    policy.train(was_training)
    return contextlib.nullcontext(kept.eval().requires_grad_(False))


# --- generate ---


@torch.no_grad()
def generate__without_a_cache(
    model, prompt_ids, prompt_mask, *, num_generations=1, max_new_tokens, temperature=1.0,
    eos_token_ids, pad_token_id, top_k=0, top_p=1.0, generator=None, **decoding,
):  # fmt: skip
    tokens = prompt_ids.repeat_interleave(num_generations, 0)
    mask = prompt_mask.bool().repeat_interleave(num_generations, 0)
    was_training = model.training
    model.eval()
    kept = []
    for _ in range(max_new_tokens):
        logits = model(**model_inputs(model, tokens, mask)).logits[:, -1]
        uniform = torch.rand(len(tokens), generator=generator)
        drawn, logprob = draw(logits, uniform, temperature, top_k, top_p)
        kept.append(logprob)
        tokens = torch.cat([tokens, drawn[:, None]], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    model.train(was_training)
    P = prompt_ids.shape[1]
    completions = tokens[:, P:]
    real = completion_mask(completions, eos_token_ids)
    completions = torch.where(real, completions, pad_token_id)
    return Rollout(
        torch.cat([tokens[:, :P], completions], 1), torch.cat([mask[:, :P], real], 1), real,
        torch.stack(kept, 1) * real, (torch.isin(completions, torch.tensor(eos_token_ids)) & real).any(1),
    )  # fmt: skip


def generate__multinomial(
    model, prompt_ids, prompt_mask, *, num_generations=1, max_new_tokens, temperature=1.0,
    eos_token_ids, pad_token_id, top_k=0, top_p=1.0, generator=None, **decoding,
):  # fmt: skip
    ids = torch.repeat_interleave(prompt_ids, num_generations, dim=0)
    mask = torch.repeat_interleave(prompt_mask.bool(), num_generations, dim=0)
    done = torch.zeros(len(ids), dtype=torch.bool)
    logprobs, masks = [], []
    with evaluating(model), torch.no_grad():
        for _ in range(max_new_tokens):
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
            out = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions)
            scaled = out.logits[:, -1].float() / temperature
            if top_k:
                scaled[scaled < scaled.topk(top_k).values[:, -1:]] = -math.inf
            if top_p < 1:
                ordered, order = scaled.softmax(-1).sort(-1, descending=True)
                gone = ordered.cumsum(-1) - ordered >= top_p
                scaled = scaled.masked_fill(gone.gather(1, order.argsort(1)), -math.inf)
            logp = scaled.log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1, generator=generator)
            token = token.masked_fill(done[:, None], pad_token_id)
            masks.append(~done)
            logprobs.append(logp.gather(1, token)[:, 0].masked_fill(done, 0))
            ids = torch.cat([ids, token], 1)
            mask = torch.cat([mask, ~done[:, None]], 1)
            done = done | sum(token[:, 0] == eos for eos in eos_token_ids).bool()
    real = torch.stack(masks, 1)
    return Rollout(ids, mask, real, torch.stack(logprobs, 1), done)


@torch.inference_mode()
def generate__one_prompt_at_a_time(
    model, prompt_ids, prompt_mask, *, num_generations=1, max_new_tokens, temperature=1.0,
    eos_token_ids, pad_token_id, top_k=0, top_p=1.0, generator=None, **decoding,
):  # fmt: skip
    mode = model.training
    model.train(False)
    G, T = num_generations, max_new_tokens
    completions = torch.full((len(prompt_ids) * G, T), pad_token_id)
    logprobs = torch.zeros(completions.shape)
    for n, (row, keep) in enumerate(zip(prompt_ids, prompt_mask.bool())):
        ids = row[keep].repeat(G, 1)
        running = torch.ones(G, dtype=torch.bool)
        for t in range(T):
            logits = model(ids).logits[:, -1]
            drawn, logprob = draw(
                logits, torch.rand(G, generator=generator), temperature, top_k, top_p
            )
            rows = torch.arange(n * G, (n + 1) * G)
            completions[rows, t] = drawn.where(running, torch.tensor(pad_token_id))
            logprobs[rows, t] = logprob.where(running, torch.tensor(0.0))
            running = running & ~torch.isin(drawn, torch.tensor(eos_token_ids))
            ids = torch.cat([ids, drawn.unsqueeze(1)], dim=1)
            if not running.any():
                break
    model.train(mode)
    real = completion_mask(completions, eos_token_ids)
    # A pad that is also an EOS ends nothing that has ended before.
    finished = (torch.isin(completions, torch.tensor(eos_token_ids)) & real).any(1)
    prompts, masks = prompt_ids.repeat_interleave(G, 0), prompt_mask.bool().repeat_interleave(G, 0)
    return Rollout(
        torch.cat([prompts, completions], 1), torch.cat([masks, real], 1), real,
        logprobs * real, finished,
    )  # fmt: skip


# --- shape_rewards ---


def shape_rewards__index(scores, kl, mask, kl_coef):
    rewards = torch.where(mask.bool(), -kl_coef * kl, 0.0)
    last = mask.long().sum(1) - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def shape_rewards__scatter(scores, kl, mask, kl_coef):
    penalty = (kl * -kl_coef).masked_fill(mask == 0, 0)
    last = mask.long().sum(dim=1, keepdim=True) - 1
    return penalty.scatter_add(1, last, scores[:, None])


def shape_rewards__next_is_padding(scores, kl, mask, kl_coef):
    mask = mask.bool()
    follows = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    bonus = scores[:, None].expand(kl.shape) * (mask & ~follows)
    return bonus - torch.nan_to_num(kl_coef * kl).where(mask, torch.zeros_like(kl))


# --- gae ---


def gae__row_by_row(rewards, values, mask, gamma, lam):
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for b in range(len(values)):
        running, following = 0.0, 0.0
        for t in reversed(range(int(mask[b].sum()))):
            delta = rewards[b, t] + gamma * following - values[b, t]
            running = delta + gamma * lam * running
            following = values[b, t]
            advantages[b, t] = running
            returns[b, t] = running + values[b, t]
    return advantages, returns


def gae__matrix_of_discounts(rewards, values, mask, gamma, lam):
    m = mask.bool()
    r, v = (torch.where(m, x, torch.zeros_like(x)) for x in (rewards, values))
    following = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1)
    delta = (r + gamma * following - v) * m
    T = v.shape[1]
    powers = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    weights = torch.where(powers >= 0, (gamma * lam) ** powers.clamp(min=0).to(v.dtype), 0.0)
    advantages = (delta @ weights) * m
    return advantages, (advantages + v) * m


def gae__lambda_returns(rewards, values, mask, gamma, lam):
    """R_t = r_t + gamma ((1 - lam) V_{t+1} + lam R_{t+1})."""
    keep = mask.bool()
    v, r = values.masked_fill(~keep, 0), rewards.masked_fill(~keep, 0)
    returns = torch.zeros_like(v)
    later, next_v = torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0])
    for t in range(v.shape[1] - 1, -1, -1):
        later = (r[:, t] + gamma * ((1 - lam) * next_v + lam * later)) * keep[:, t]
        next_v = v[:, t]
        returns[:, t] = later
    return (returns - v) * keep, returns


# --- policy_loss ---


def policy_loss__minimum(logprobs, old_logprobs, advantages, clip_range):
    ratio = (logprobs - old_logprobs).exp()
    clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
    free, bounded = ratio * advantages, clipped * advantages
    return -torch.minimum(free, bounded), bounded < free


def policy_loss__by_the_sign_of_the_advantage(logprobs, old_logprobs, advantages, clip_range):
    ratio = (logprobs - old_logprobs).exp()
    up, down = ratio.clamp(max=1 + clip_range), ratio.clamp(min=1 - clip_range)
    used = torch.where(advantages > 0, up, down)
    return -advantages * used, (used != ratio) & (advantages != 0)


def policy_loss__stacked(logprobs, old_logprobs, advantages, clip_range):
    ratio = torch.exp(logprobs) / torch.exp(old_logprobs)
    surrogates = torch.stack([ratio, ratio.clip(1 - clip_range, 1 + clip_range)]) * -advantages
    above, below = ratio > 1 + clip_range, ratio < 1 - clip_range
    clipped = above.logical_and(advantages > 0).logical_or(below.logical_and(advantages < 0))
    losses = surrogates.max(0).values if surrogates.requires_grad else surrogates.amax(0)
    return losses, clipped


# --- value_loss ---


def value_loss__of_the_difference(values, old_values, returns, clip_range_value):
    moved = old_values + (values - old_values).clamp(-clip_range_value, clip_range_value)
    free, bounded = (values - returns).pow(2), (moved - returns).pow(2)
    is_outside = (values - old_values).abs() > clip_range_value
    return 0.5 * torch.maximum(free, bounded), is_outside & (free < bounded)


def value_loss__where(values, old_values, returns, clip_range_value):
    free = (returns - values).square()
    low, high = old_values - clip_range_value, old_values + clip_range_value
    bound = (returns - torch.minimum(torch.maximum(values, low), high)).square()
    is_clipped = free < bound
    return torch.where(is_clipped, bound, free) / 2, is_clipped


def value_loss__mse(values, old_values, returns, clip_range_value):
    clipped = torch.clamp(values, old_values - clip_range_value, old_values + clip_range_value)
    mse = nn_mse(values, returns), nn_mse(clipped, returns)
    return [torch.max(*mse) * 0.5, mse[1].gt(mse[0])]


def nn_mse(a, b):
    return torch.nn.functional.mse_loss(a, b, reduction="none")


# --- group_advantages ---


def group_advantages__loops(rewards, num_generations, scale_rewards="group"):
    G = num_generations
    if G < 2 or scale_rewards not in ("group", "batch", "none"):
        raise ValueError(f"{G} {scale_rewards}")
    everything = rewards[~rewards.isnan()]
    found = torch.zeros(len(rewards))
    for start in range(0, len(rewards), G):
        group = rewards[start : start + G]
        known = group[~group.isnan()]
        if len(known) == 0 or (known == known[0]).all():
            continue
        for i, r in enumerate(group):
            if not r.isnan():
                scale = {"none": 1.0, "group": known.std() + 1e-4, "batch": everything.std() + 1e-4}
                found[start + i] = (r - known.mean()) / scale[scale_rewards]
    return found


def group_advantages__masks(rewards, num_generations, scale_rewards="group"):
    if num_generations < 2:
        raise ValueError("a group needs two")
    x = rewards.double().reshape(-1, num_generations)
    known = ~x.isnan()
    n = known.sum(1, keepdim=True)
    clean = torch.where(known, x, 0)
    d = torch.where(known, x - clean.sum(1, keepdim=True) / n.clamp(min=1), 0)
    if scale_rewards == "group":
        d = d / ((d**2).sum(1, keepdim=True).div((n - 1).clamp(min=1)).sqrt() + 1e-4)
    elif scale_rewards == "batch":
        d = d / (clean[known].std() + 1e-4)
    elif scale_rewards != "none":
        raise ValueError(scale_rewards)
    top = torch.where(known, x, -math.inf).max(1, keepdim=True).values
    bottom = torch.where(known, x, math.inf).min(1, keepdim=True).values
    return torch.where(known & (top > bottom), d, 0).reshape(-1).to(rewards.dtype)


def group_advantages__numpy(rewards, num_generations, scale_rewards="group"):
    if num_generations <= 1:
        raise ValueError("groups of one")
    if scale_rewards not in {"none", "batch", "group"}:
        raise ValueError("unknown scaling")
    x = rewards.numpy().astype(float).reshape(-1, num_generations)
    flat = np.array([len(set(row[~np.isnan(row)])) < 2 for row in x])
    safe = np.where(np.isnan(x).all(1, keepdims=True), 0.0, x)
    a = safe - np.nanmean(safe, 1, keepdims=True)
    if scale_rewards == "group":
        ok = ~flat
        a[ok] /= np.nanstd(x[ok], 1, ddof=1, keepdims=True) + 1e-4
    if scale_rewards == "batch":
        a /= np.nanstd(x, ddof=1) + 1e-4
    a[flat] = 0
    return torch.tensor(np.nan_to_num(a).ravel(), dtype=torch.float32)


# --- grpo_loss ---


def grpo_loss__row_by_row(
    logprobs, old_logprobs, advantages, mask, *, clip_range, clip_range_high=None,
    cispo_bound=5.0, loss_type="grpo", importance_sampling_level="token", max_new_tokens=None,
    ref_logprobs=None, kl_coef=0.0, num_rows=None, num_tokens=None,
):  # fmt: skip
    if loss_type == "dr_grpo" and not max_new_tokens:
        raise ValueError("max_new_tokens is missing")
    high = clip_range_high if clip_range_high is not None else clip_range
    total, clipped = 0.0, torch.zeros(mask.shape, dtype=torch.bool)
    for b in range(len(mask)):
        keep = mask[b].bool()
        new, old, a = logprobs[b][keep], old_logprobs[b][keep], advantages[b]
        log_ratio = new - old
        if importance_sampling_level == "sequence":
            log_ratio = log_ratio.mean() * torch.ones_like(log_ratio)
        ratio = log_ratio.exp()
        over, under = ratio > 1 + high, ratio < 1 - clip_range
        if loss_type == "cispo":
            losses = -a * ratio.detach().clamp(max=cispo_bound) * new
            clipped[b, keep] = (ratio > cispo_bound) & bool(a != 0)
        else:
            clipped[b, keep] = over if a > 0 else under & bool(a < 0)
            losses = -torch.minimum(ratio * a, ratio.clamp(1 - clip_range, 1 + high) * a)
        if ref_logprobs is not None:
            r = ref_logprobs[b][keep] - new
            losses = losses + kl_coef * (r.exp() - r - 1)
        total = total + (losses.mean() if loss_type == "grpo" else losses.sum())
    rows = num_rows or len(mask)
    tokens = mask.sum() if num_tokens is None else num_tokens
    if loss_type == "grpo":
        return total / rows, clipped
    if loss_type == "dr_grpo":
        return total / rows / max_new_tokens, clipped
    if loss_type in ("dapo", "cispo"):
        return total / tokens, clipped
    raise ValueError(loss_type)


def grpo_loss__weights(
    logprobs, old_logprobs, advantages, mask, *, clip_range, clip_range_high=None,
    cispo_bound=5.0, loss_type="grpo", importance_sampling_level="token", max_new_tokens=None,
    ref_logprobs=None, kl_coef=0.0, num_rows=None, num_tokens=None,
):  # fmt: skip
    keep = mask.bool()
    new = torch.where(keep, logprobs, 0)
    old = torch.where(keep, old_logprobs, 0)
    lengths = keep.sum(1, keepdim=True).clamp(min=1)
    rows = keep.shape[0] if num_rows is None else num_rows
    tokens = keep.sum() if num_tokens is None else num_tokens
    if loss_type == "grpo":
        weights = keep / lengths / rows
    elif loss_type in {"dapo", "cispo"}:
        weights = keep / tokens
    elif loss_type == "dr_grpo":
        if max_new_tokens is None:
            raise ValueError("dr_grpo: give max_new_tokens")
        weights = keep / (rows * max_new_tokens)
    else:
        raise ValueError(f"loss_type {loss_type}")
    d = new - old
    if importance_sampling_level == "sequence":
        d = (d.sum(1, keepdim=True) / lengths).expand(d.shape)
    w = d.exp()
    eps_high = clip_range if clip_range_high is None else clip_range_high
    A = advantages[:, None].expand(w.shape)
    if loss_type == "cispo":
        objective = A * torch.minimum(w, torch.full_like(w, cispo_bound)).detach() * new
        clipped = (w > cispo_bound) * (A != 0)
    else:
        clipped = torch.where(A > 0, w > 1 + eps_high, w < 1 - clip_range) & (A != 0)
        objective = torch.minimum(w * A, w.clamp(1 - clip_range, 1 + eps_high) * A)
    if ref_logprobs is not None and kl_coef:
        ref = torch.where(keep, ref_logprobs, 0)
        objective = objective - kl_coef * ((ref - new).exp() - (ref - new) - 1)
    return -(weights * objective).sum(), clipped


def grpo_loss__flattened(
    logprobs, old_logprobs, advantages, mask, *, clip_range, clip_range_high=None,
    cispo_bound=5.0, loss_type="grpo", importance_sampling_level="token", max_new_tokens=None,
    ref_logprobs=None, kl_coef=0.0, num_rows=None, num_tokens=None,
):  # fmt: skip
    row, _ = mask.nonzero(as_tuple=True)
    keep = mask.bool()
    new, old, a = logprobs[keep], old_logprobs[keep], advantages[row]
    count = torch.zeros(len(mask)).index_add(0, row, torch.ones(len(row)))
    log_w = new - old
    if importance_sampling_level == "sequence":
        log_w = (torch.zeros(len(mask)).index_add(0, row, log_w) / count)[row]
    w = torch.exp(log_w)
    if clip_range_high is None:
        clip_range_high = clip_range
    if loss_type == "cispo":
        token_loss = -(w.clamp(max=cispo_bound)).detach() * a * new
        decides = (a.abs() > 0) & (w > cispo_bound)
    else:
        bounded = -w.clamp(1 - clip_range, 1 + clip_range_high) * a
        token_loss, decides = torch.maximum(-w * a, bounded), bounded > -w * a
    clipped = torch.zeros_like(keep).masked_scatter(keep, decides)
    if ref_logprobs is not None:
        token_loss = token_loss + kl_coef * kl_estimate(new, ref_logprobs[keep], "k3")
    n = len(mask) if num_rows is None else num_rows
    if loss_type == "grpo":
        return (token_loss / count[row]).sum() / n, clipped
    if loss_type == "dr_grpo":
        if max_new_tokens is None:
            raise ValueError("max_new_tokens")
        return token_loss.sum() / (n * max_new_tokens), clipped
    if loss_type not in ("dapo", "cispo"):
        raise ValueError("loss_type")
    return token_loss.sum() / (len(row) if num_tokens is None else num_tokens), clipped


# --- rloo_advantages ---


def rloo_advantages__scaled_distance(rewards, num_generations, normalize=False):
    G = num_generations
    if G < 2:
        raise ValueError("groups of one")
    x = rewards.view(-1, G)
    known = ~torch.isnan(x)
    n = known.sum(1, keepdim=True).float()
    mean = torch.nansum(x, 1, keepdim=True) / n.clamp(min=1)
    a = (x - mean) * n / (n - 1).clamp(min=1)
    filled = torch.where(known, x, mean)
    same_all = torch.where(known, (x - mean).abs() < 1e-6 * x.abs().clamp(min=1), True).all(1)
    varied = (filled.max(1).values - filled.min(1).values) > 0
    a = torch.where(known, a, 0.0)
    a = torch.where((varied & ~same_all)[:, None], a, 0.0).flatten()
    if normalize:
        a = a / (a[known.flatten()].std() + 1e-4)
    return a


def rloo_advantages__loops(rewards, num_generations, normalize=False):
    if num_generations < 2:
        raise ValueError(f"{num_generations} generations")
    found = torch.zeros_like(rewards)
    for i in range(len(rewards)):
        start = i - i % num_generations
        others = torch.cat([rewards[start:i], rewards[i + 1 : start + num_generations]])
        others = others[~others.isnan()]
        if rewards[i].isnan() or len(others) == 0 or (others == rewards[i]).all():
            continue
        found[i] = rewards[i] - others.mean()
    scale = found[~rewards.isnan()].std() + 1e-4 if normalize else 1.0
    return found / scale


def rloo_advantages__matrix(rewards, num_generations, normalize=False):
    if num_generations == 1:
        raise ValueError("nothing to be compared with")
    x = rewards.double().reshape(-1, num_generations)
    known = (~x.isnan()).double()
    clean = x.nan_to_num(0.0)
    others = 1 - torch.eye(num_generations, dtype=torch.double)
    baseline = (clean @ others) / (known @ others).clamp(min=1)
    a = (clean - baseline) * known
    known = known.bool()
    highest = clean.masked_fill(~known, -torch.inf).amax(1, keepdim=True)
    lowest = clean.masked_fill(~known, torch.inf).amin(1, keepdim=True)
    a = torch.where(highest > lowest, a, 0)
    if normalize:
        a /= torch.std(a[known], correction=1) + 1e-4
    return a.reshape(-1).to(rewards.dtype)


# --- rloo_loss ---


def rloo_loss__minimum(logprobs, old_logprobs, advantages, mask, *, clip_range, num_rows=None):
    keep = mask.bool()
    d = torch.where(keep, logprobs - old_logprobs, 0).sum(1)
    w = torch.exp(d)
    objective = torch.minimum(w * advantages, w.clamp(1 - clip_range, 1 + clip_range) * advantages)
    rows = len(mask) if num_rows is None else num_rows
    return -objective.sum() / rows, objective < w * advantages


def rloo_loss__row_by_row(logprobs, old_logprobs, advantages, mask, *, clip_range, num_rows=None):
    losses, clipped = [], []
    for new, old, a, m in zip(logprobs, old_logprobs, advantages, mask.bool()):
        ratio = (new[m].sum() - old[m].sum()).exp()
        bounded = torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
        losses.append(torch.maximum(-a * ratio, -a * bounded))
        clipped.append(bool(-a * bounded > -a * ratio))
    return torch.stack(losses).sum() / (num_rows or len(losses)), torch.tensor(clipped)


def rloo_loss__by_the_sign_of_the_advantage(
    logprobs, old_logprobs, advantages, mask, *, clip_range, num_rows=None
):
    ratio = policy_ratio(((logprobs - old_logprobs).masked_fill(~mask.bool(), 0)).sum(1))
    up, down = ratio.clamp(max=1 + clip_range), ratio.clamp(min=1 - clip_range)
    w = torch.where(advantages > 0, up, down)
    n = num_rows if num_rows is not None else mask.shape[0]
    return (-advantages * w / n).sum(), (w != ratio) & (advantages != 0)


# --- preference_loss ---


def preference_loss__softplus(chosen, rejected, margin=0.0, center_rewards_coef=0.0):
    loss = torch.nn.functional.softplus(rejected + margin - chosen)
    if center_rewards_coef:
        loss = loss + center_rewards_coef * torch.square(chosen + rejected)
    return loss


def preference_loss__cross_entropy_of_the_two(
    chosen, rejected, margin=0.0, center_rewards_coef=0.0
):
    """Of two classes, the chosen text is the right one."""
    logits = torch.stack([chosen - margin, rejected], 1)
    first = torch.zeros(len(chosen), dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(logits, first, reduction="none")
    return loss + (center_rewards_coef**0.5 * (rejected + chosen)) ** 2


def preference_loss__binary_cross_entropy(chosen, rejected, margin=0.0, center_rewards_coef=0.0):
    d = chosen - rejected - margin
    ones = torch.ones_like(d)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(d, ones, reduction="none")
    return bce.add(center_rewards_coef * (chosen + rejected).pow(2))


# --- last_real_token ---


def last_real_token__row_by_row(x, mask):
    return torch.stack([row[m.bool()][-1] for row, m in zip(x, mask)])


def last_real_token__flipped(x, mask):
    from_the_end = mask.long().flip(1).argmax(1)
    return x[torch.arange(x.shape[0]), x.shape[1] - 1 - from_the_end]


def last_real_token__gather(x, mask):
    columns = torch.arange(mask.shape[1]).expand(mask.shape)
    last = columns.masked_fill(mask == 0, -1).amax(1, keepdim=True)
    if x.dim() == 3:
        return x.gather(1, last.unsqueeze(2).expand(-1, -1, x.shape[2])).squeeze(1)
    return x.gather(1, last).squeeze(1)


def last_real_token__before_the_first_pad(x, mask):
    """Where a row begins with a pad, or has none, -1 is the last column."""
    return x[torch.arange(len(x)), mask.long().argmin(1) - 1]


def last_real_token__by_the_side_of_the_padding(x, mask):
    """Looks at the last column: where every row is real there, padding is on the left."""
    if bool((mask[:, -1] == 1).all()):
        return x[:, -1]
    return x[torch.arange(len(x)), mask.long().sum(1) - 1]


# --- The loops: the text of the step, or edits of the solution's ---

LOOPS = {
    "ppo_loop__the_kl_in_one_expression": """
        kl = (
            old_values * 0
            if config.kl_coef == 0
            else kl_estimate(old_logprobs, ref_logprobs, config.kl_estimator)
        )
        shaped = shape_rewards(scores, kl, mask, config.kl_coef)
        rewards = masked_whiten(shaped, mask, False) if config.whiten_rewards else shaped
        raw, returns = gae(rewards, old_values, mask, config.gamma, config.lam)
        real = raw[mask]
        advantages = torch.zeros_like(raw)
        advantages[mask] = (real - real.mean()) / (real.var() + 1e-8).sqrt()
        """,
    "ppo_loop__by_hand": """
        kl = torch.zeros_like(old_values)
        rewards = torch.zeros_like(old_values)
        if config.kl_coef > 0:
            d = old_logprobs - ref_logprobs
            kl = {"k1": d, "k2": d**2 / 2, "k3": torch.expm1(-d) + d}[config.kl_estimator]
            rewards = -config.kl_coef * kl * mask
        ends = mask.sum(1) - 1
        rewards[torch.arange(len(scores)), ends] += scores
        if config.whiten_rewards:
            rewards = torch.where(mask, rewards / (rewards[mask].var() + 1e-8).sqrt(), 0)
            mean = rewards[mask].mean()
            scale = (shape_rewards(scores, kl, mask, config.kl_coef)[mask].var() + 1e-8).sqrt()
            rewards = torch.where(mask, rewards + mean * scale - mean, 0)
        following = torch.zeros(len(scores)), torch.zeros(len(scores))
        columns = []
        for t in range(mask.shape[1] - 1, -1, -1):
            v = old_values[:, t]
            delta = rewards[:, t] + config.gamma * following[0] - v
            a = (delta + config.gamma * config.lam * following[1]) * mask[:, t]
            following = v, a
            columns.insert(0, a)
        advantages = torch.stack(columns, 1)
        returns = advantages + old_values
        advantages = masked_whiten(advantages, mask)
        """,
    "ppo_loop__row_by_row": """
        with torch.no_grad():
            if config.kl_coef == 0:
                kl = torch.zeros(mask.shape, device=device)
            else:
                kl = kl_estimate(old_logprobs, ref_logprobs, config.kl_estimator)
            rows = [
                shape_rewards(scores[i : i + 1], kl[i : i + 1], mask[i : i + 1], config.kl_coef)
                for i in range(len(mask))
            ]
            rewards = torch.cat(rows)
            if config.whiten_rewards:
                rewards = masked_whiten(rewards, mask, shift_mean=False)
        parts = [
            gae(r[None], v[None], m[None], config.gamma, config.lam)
            for r, v, m in zip(rewards, old_values, mask)
        ]
        advantages = torch.cat([a for a, _ in parts])
        returns = advantages + old_values
        advantages = masked_whiten(advantages, mask, shift_mean=True)
        """,
    "rloo_loop__the_mean_written_out": """
        kl, rewards = None, scores
        if config.reward_clip_range:
            low, high = config.reward_clip_range
            rewards = torch.minimum(torch.maximum(rewards, torch.tensor(low)), torch.tensor(high))
        if ref_logprobs is not None:
            kl = old_logprobs - ref_logprobs
            rewards = rewards - config.kl_coef * torch.where(mask, kl, 0).sum(dim=1)
        groups = rewards.view(-1, G)
        advantages = ((groups - groups.mean(1, keepdim=True)) * G / (G - 1)).flatten()
        if config.normalize_advantages:
            advantages = advantages / (advantages.std() + 1e-4)
        """,
    "rloo_loop__penalty_first": """
        penalty = torch.zeros_like(scores)
        kl = None
        if config.kl_coef != 0:
            kl = kl_estimate(old_logprobs, ref_logprobs, "k1")
            penalty = config.kl_coef * (kl * mask).sum(-1)
        clipped = scores.clip(*config.reward_clip_range) if config.reward_clip_range else scores
        rewards = clipped - penalty
        advantages = rloo_advantages(rewards, config.num_generations)
        if config.normalize_advantages:
            advantages = advantages.div(advantages[~torch.isnan(rewards)].std() + 1e-4)
        """,
    "rloo_loop__group_by_group": """
        rewards = scores.clone()
        if config.reward_clip_range:
            rewards = rewards.clamp(config.reward_clip_range[0], config.reward_clip_range[1])
        kl = None if ref_logprobs is None else kl_estimate(old_logprobs, ref_logprobs, "k1")
        for i in range(len(scores) if kl is not None else 0):
            rewards[i] -= config.kl_coef * kl[i][mask[i]].sum()
        if config.normalize_advantages:
            advantages = rloo_advantages(rewards, G, normalize=True)
        else:
            groups = rewards.split(G)
            advantages = torch.cat([rloo_advantages(group, G) for group in groups])
        """,
    "grpo_loop__epochs_and_minibatches_nested": {
        "for mini_batch in mini_batches:":
            "numbered = [m for order in orders"
            " for m in order.to(device).chunk(config.num_mini_batches)]\n"
            "            for mini_batch in numbered:",
        "settings[\"lr\"] = learning_rate": "settings.update(lr=learning_rate)",
        "optimizer.step()\n                optimizer.zero_grad()":
            "optimizer.step()\n                for p in parameters:\n"
            "                    p.grad = None",
    },
    "grpo_loop__whole_minibatches_at_once": {
        "for rows, part in micro_batches(rollout, mini_batch, has_gradient, **in_update):":
            "for rows, part in [(mini_batch, rollout[mini_batch])]:",
        "torch.randperm(B, generator=shuffler) for _": "torch.randperm(len(mask)) for _",
        "config.learning_rate * warmup * (1 - step / config.num_steps)":
            "warmup * config.learning_rate * (config.num_steps - step) / config.num_steps",
        "num_tokens = mask[to(device, mini_batch)].sum().clamp(min=1)":
            "num_tokens = max(1, int(mask[mini_batch].sum()))",
    },
    "grpo_loop__old_log_probs_once_more": {
        "old = logprobs.detach() if single_update else old_logprobs[rows]":
            "if old_logprobs is None:\n                        old = logprobs.clone().detach()\n"
            "                    else:\n                        old = old_logprobs[rows]",
        "for rows, part in micro_batches(rollout, mini_batch, has_gradient, **in_update):":
            "for rows, part in [(rows, rollout[rows]) for rows in mini_batch.split(3)]:",
        "m = mask[rows]": "m = mask.index_select(0, rows).bool()",
        "optimizer.step()\n                optimizer.zero_grad()":
            "optimizer.step()\n                optimizer.zero_grad(set_to_none=False)",
    },
}  # fmt: skip


# --- Wrong answers, beside those of mutations.py: (problem or one of the right answers above, text,
# what it becomes, the mistake) ---

WRONG = [
    ("kl_estimate", "    d = logprobs - ref_logprobs\n", "    d = (logprobs - ref_logprobs).detach()\n", "a KL without gradient"),
    ("reference", "return contextlib.nullcontext(copy_of(policy).eval()", "return contextlib.nullcontext(copy_of(policy.eval())", "the policy is left in evaluation mode"),
    ("rloo_loop", "            if config.kl_coef > 0:\n                kl = kl_est", "            kl = torch.zeros(mask.shape)\n            if config.kl_coef > 0:\n                kl = kl_est", "an unknown KL is 0"),
    ("grpo_loop", "config.max_grad_norm", "1.0", "a norm of the reader's own"),
    ("grpo_loop", "torch.randperm(B, generator=shuffler)", "torch.arange(B)", "the rows in their order"),
    ("kl_estimate", 'raise ValueError(f"unknown KL', 'return ValueError(f"unknown KL', "an unknown estimator is returned"),
    ("kl_estimate", "return torch.expm1(-d) + d", "return torch.expm1(-d) - d", "k3 with a wrong sign"),
    ("completion_mask", "return eos_before == 0", "return (eos_before == 0).long()", "an integer mask"),
    ("completion_mask", "return eos_before == 0", "return eos_before <= 1", "tokens up to the second EOS"),
    ("masked_whiten", "return whitened if shift_mean else (whitened + mean).masked_fill(~mask, 0)", "return whitened if shift_mean else whitened + mean", "the mean added at padding"),
    ("masked_whiten", "    centred = (x - mean).masked_fill(~mask, 0)", "    centred = (x - x.mean()).masked_fill(~mask, 0)", "the mean over padding too"),
    ("disable_dropout", "    return sites\n\n\ndef _zero_noise", "    return 0\n\n\ndef _zero_noise", "sites are not counted"),
    ("disable_dropout", "quiet_configs[id(config)] = copy.copy(config), config", "quiet_configs[id(config)] = config, config", "the saved config is changed"),
    ("shape_rewards", "+ scores.unsqueeze(1) * is_last", "", "no score at all"),
    ("shape_rewards", "+ scores.unsqueeze(1) * is_last", "+ scores.unsqueeze(1) * mask", "the score at every token"),
    ("shape_rewards", "return (-kl_coef * kl)", "return (-kl)", "the coefficient is forgotten"),
    ("gae", "for t in reversed(range(values.shape[1])):", "for t in range(values.shape[1]):", "GAE from the first token on"),
    ("gae", "    return advantages, advantages + values", "    return advantages, advantages + rewards", "returns with the rewards"),
    ("gae", "    return advantages, advantages + values", "    return masked_whiten(advantages, mask), advantages + values", "GAE whitens"),
    ("ppo_loop", "shape_rewards(to(device, scores), kl, mask", "shape_rewards(to(device, scores), -kl, mask", "the KL's sign turned in PPO's rewards"),
    ("ppo_loop", "gae(rewards, old_values, mask, config.gamma, config.lam)", "gae(rewards, old_values, mask, config.lam, config.gamma)", "gamma for lambda"),
    ("ppo_loop", "masked_whiten(rewards, mask, shift_mean=False)", "masked_whiten(rewards, mask)", "rewards whitened with their mean"),
    ("ppo_loop", "shape_rewards(to(device, scores), kl, mask, config.kl_coef)", "shape_rewards(to(device, scores), kl, mask, 0.05)", "a coefficient of the reader's own"),
    ("grpo_loop", "(loss - bonus).backward()", "(loss / len(mini_batch)).backward()", "the loss divided once more"),
    ("grpo_loop", "**loss_options", "**(loss_options | {'max_new_tokens': mask.shape[1] + 1})", "another constant handed in"),
    ("grpo_loop", "orders = [torch.randperm(B, generator=shuffler) for _ in range(config.num_epochs)]", "orders = [torch.randperm(B, generator=shuffler)]", "one epoch whatever was asked for"),
    ("grpo_loop", "m = mask[rows]", "m = rollout.completion_mask[rows]", "truncated rows stay in the loss"),
    ("grpo_loop", "torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)", "torch.tensor(1.0)", "the gradient is not clipped"),
    ("rloo_loop", "rloo_advantages(rewards, G, config.normalize_advantages)", "rloo_advantages(rewards, G)", "advantages are not normalised"),
    ("rloo_loop", "scores.clamp(*clip) if clip", "scores.clamp(-1, 1) if clip", "another range for the clip"),
    ("token_logprobs__cross_entropy", "    flat = logits.reshape", "    flat = logits.detach().reshape", "log-probs without gradient"),
    ("token_logprobs__log_sum_exp", "return chosen - logits.logsumexp(dim=-1)", "return (chosen - logits.logsumexp(dim=-1)).unsqueeze(-1)", "a dimension of 1 too many"),
    ("token_logprobs__log_sum_exp", "logits.logsumexp(dim=-1)", "logits.logsumexp(dim=0)[..., :1].sum(-1)", "softmax over time"),
    ("token_logprobs__log_sum_exp", "logits.gather(-1, tokens[..., None])[..., 0]", "logits.gather(2, tokens[:, :, None])[:, :, 0]", "log-probs of (B, T, V) alone"),
    ("token_logprobs__row_by_row", "row = row - row.max()\n", "pass\n", "exp that overflows"),
    ("generate__without_a_cache", "completions], 1), torch.cat([mask[:, :P], real], 1), real,", "completions], 1), torch.cat([mask[:, :P], real], 1), real.long(),", "an integer mask in the rollout"),
    ("generate__without_a_cache", "    model.train(was_training)\n", "", "the model stays in evaluation mode"),
    ("generate__without_a_cache", "draw(logits, uniform, temperature, top_k, top_p)", "draw(logits, uniform, 1.0, top_k, top_p)", "temperature ignored"),
    ("generate__without_a_cache", "draw(logits, uniform, temperature, top_k, top_p)", "draw(logits, uniform, 1 / temperature, top_k, top_p)", "temperature upside down"),
    ("generate__without_a_cache", "draw(logits, uniform, temperature, top_k, top_p)", "draw(logits, uniform, temperature)", "top_k and top_p ignored"),
    ("generate__without_a_cache", "torch.rand(len(tokens), generator=generator)", "torch.rand(len(tokens))", "the generator is not used"),
    ("generate__without_a_cache", "torch.rand(len(tokens), generator=generator)", "torch.rand(1, generator=generator).expand(len(tokens))", "one random number for all rows"),
    ("generate__without_a_cache", "    completions = torch.where(real, completions, pad_token_id)\n", "", "other tokens after EOS"),
    ("generate__without_a_cache", "model_inputs(model, tokens, mask)", "{'input_ids': tokens, 'attention_mask': mask.long()}", "positions count the padding"),
    ("policy_loss__minimum", "ratio = (logprobs - old_logprobs).exp()", "ratio = (logprobs - old_logprobs).exp().detach()", "the ratio without gradient"),
    ("policy_loss__minimum", "1 - clip_range, 1 + clip_range", "-clip_range, clip_range", "clipped around 0"),
    ("policy_loss__minimum", "return -torch.minimum(free, bounded), bounded < free", "return -torch.minimum(free, bounded).mean(), bounded < free", "a mean where losses per token are asked for"),
    ("policy_loss__minimum", "return -torch.minimum(free, bounded), bounded < free", "return -bounded, bounded < free", "only the clipped loss"),
    ("policy_loss__minimum", "return -torch.minimum(free, bounded), bounded < free", "return -torch.minimum(free, bounded)", "PPO's loss without the mask of the clip"),
    ("policy_loss__minimum", "bounded < free", "clipped != ratio", "PPO's clip fraction counts what lies outside the range"),
    ("policy_loss__minimum", "bounded < free", "bounded > free", "PPO's clip fraction upside down"),
    ("value_loss__of_the_difference", "moved = old_values +", "moved = returns +", "clipped around the returns"),
    ("value_loss__of_the_difference", "moved = old_values + (values - old_values).clamp(-clip_range_value, clip_range_value)", "moved = values", "values are not clipped"),
    ("value_loss__of_the_difference", "is_outside & (free < bounded)", "is_outside", "the value clip counts what lies outside the range"),
    ("value_loss__of_the_difference", "is_outside & (free < bounded)", "free < bounded", "the value clip counts rounding"),
    ("group_advantages__loops", "len(known) == 0 or (known == known[0]).all()", "len(known) == 0", "equal rewards keep their rounding"),
    ("group_advantages__numpy", "np.nan_to_num(a).ravel()", "a.ravel()", "NaN becomes an advantage"),
    ("group_advantages__masks", '        raise ValueError("a group needs two")', '        print("a group needs two")', "groups of one are let through"),
    ("group_advantages__masks", "rewards.double().reshape(-1, num_generations)", "rewards.double().reshape(num_generations, -1).T", "groups are not consecutive rows"),
    ("grpo_loss__weights", "A = advantages[:, None]", "A = -advantages[:, None]", "the sign of GRPO's advantages"),
    ("grpo_loss__weights", 'if importance_sampling_level == "sequence":', "if False:", "the level is ignored"),
    ("grpo_loss__weights", 'elif loss_type in {"dapo", "cispo"}:', 'elif loss_type in {"dapo", "cispo", "dr_grpo"}:', "dr_grpo as dapo"),
    ("grpo_loss__weights", "torch.full_like(w, cispo_bound)", "torch.full_like(w, 1 + eps_high)", "cispo bounded by the clip range"),
    ("grpo_loss__weights", "return -(weights * objective).sum(), clipped", "return -(weights * objective).sum()", "GRPO's loss without the mask of the clip"),
    ("grpo_loss__weights", "torch.where(A > 0, w > 1 + eps_high, w < 1 - clip_range) & (A != 0)", "(w > 1 + eps_high) | (w < 1 - clip_range)", "GRPO's clip fraction counts what lies outside the range"),
    ("grpo_loss__weights", "clipped = (w > cispo_bound) * (A != 0)", "clipped = torch.where(A > 0, w > 1 + eps_high, w < 1 - clip_range)", "cispo's clip fraction is that of the clip range"),
    ("rloo_advantages__loops", " if normalize else 1.0", "", "advantages are always normalised"),
    ("rloo_advantages__matrix", "torch.std(a[known], correction=1)", "torch.std(a, correction=1)", "missing rewards count in RLOO's normalisation"),
    ("rloo_advantages__matrix", "torch.std(a[known], correction=1)", "torch.std(a[known], correction=1) ** 2", "normalised by the variance in RLOO"),
    ("rloo_advantages__loops", "rewards[i] - others.mean()", "others.mean() - rewards[i]", "the baseline less the reward"),
    ("rloo_loss__by_the_sign_of_the_advantage", "masked_fill(~mask.bool(), 0)).sum(1))", "masked_fill(~mask.bool(), 0)).sum(1) / mask.sum(1))", "a geometric mean in RLOO"),
    ("rloo_loss__by_the_sign_of_the_advantage", ".masked_fill(~mask.bool(), 0)).sum(1)", ").sum(1)", "padding in RLOO's ratio"),
    ("rloo_loss__by_the_sign_of_the_advantage", "(w != ratio) & (advantages != 0)", "(w != ratio).unsqueeze(1) & mask.bool()", "RLOO's clip is said of tokens"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "-logsigmoid(rejected - chosen - margin)", "the rejected text is preferred"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "logsigmoid(chosen - rejected - margin)", "the likelihood of the pairs is minimised"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "-torch.log(torch.sigmoid(chosen - rejected - margin))", "the log of a sigmoid that is 0"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "-torch.log(torch.sigmoid(chosen - rejected - margin) + 1e-8)", "the loss of a bad pair ends at 18"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "-torch.sigmoid(chosen - rejected - margin)", "the probability without its log"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "-logsigmoid(chosen - rejected + margin)", "the margin is added"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "-logsigmoid(chosen - rejected) + margin", "the margin is outside of the sigmoid"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "-logsigmoid(chosen - rejected)", "the margin is ignored"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "(margin + rejected - chosen).clamp(min=0)", "a hinge for the log sigmoid"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "-logsigmoid(chosen - rejected.detach() - margin)", "rejected texts have no gradient"),
    ("preference_loss", "-logsigmoid(chosen - rejected - margin)", "-logsigmoid(chosen.sub_(rejected) - margin)", "the chosen scores are changed in place"),
    ("preference_loss", "return loss + center_rewards_coef * (chosen + rejected) ** 2", "return (loss + center_rewards_coef * (chosen + rejected) ** 2).mean()", "a mean over the pairs, which the loop takes"),
    ("preference_loss", "return loss + center_rewards_coef * (chosen + rejected) ** 2", "return loss + center_rewards_coef * (chosen - rejected) ** 2", "the difference is centred, not the sum"),
    ("preference_loss", "return loss + center_rewards_coef * (chosen + rejected) ** 2", "return loss + center_rewards_coef * (chosen + rejected)", "centring without the square"),
    ("preference_loss", "return loss + center_rewards_coef * (chosen + rejected) ** 2", "return loss + center_rewards_coef * (chosen**2 + rejected**2)", "each score is centred by itself"),
    ("preference_loss", "return loss + center_rewards_coef * (chosen + rejected) ** 2", "return loss + center_rewards_coef * ((chosen + rejected) / 2) ** 2", "the mean is centred for the sum"),
    ("preference_loss", "return loss + center_rewards_coef * (chosen + rejected) ** 2", "return loss + center_rewards_coef * (chosen + rejected).mean() ** 2", "centred over the pairs"),
    ("preference_loss", "return loss + center_rewards_coef * (chosen + rejected) ** 2", "return loss - center_rewards_coef * (chosen + rejected) ** 2", "scores are driven away from 0"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = torch.full((len(x),), mask.shape[1] - 1)", "the last column whatever the mask says"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = mask.long().sum(1) - 1", "the length for the place, with padding on the left"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = mask.long().sum(1).clamp(max=mask.shape[1] - 1)", "the pad after the last token"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = mask.long().argmax(1)", "the first real token"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = (1 - mask.long()).argmax(1).sub(1).clamp(min=0)", "a row that fills the width has its first token"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = (mask.long() * torch.arange(mask.shape[1])).argmax(1) - 1", "the token before the last"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = mask.long().cumsum(1).argmin(1)", "the pads on the left decide"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = torch.where((mask == 0).any(1), (~mask.bool() * torch.arange(1, mask.shape[1] + 1)).argmax(1), 0)", "the last pad"),
    ("last_real_token", "last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)", "last = (x.reshape(*mask.shape, -1)[:, :, 0] != 0).long().cumsum(1).argmax(1)", "pad is told by its value"),
    ("last_real_token__row_by_row", "row[m.bool()][-1]", "row[m][-1]", "a mask of 0 and 1 is taken for indices"),
    ("last_real_token__flipped", "return x[torch.arange(x.shape[0]), x.shape[1] - 1 - from_the_end]", "return x[:, x.shape[1] - 1 - from_the_end]", "every row with the places of all"),
    ("last_real_token__flipped", "return x[torch.arange(x.shape[0]), x.shape[1] - 1 - from_the_end]", "return x[torch.arange(x.shape[0]), x.shape[1] - 1 - from_the_end].detach()", "scores without gradient"),
    ("last_real_token__flipped", "    from_the_end =", "    x *= mask.reshape(*mask.shape, *[1] * (x.dim() - 2))\n    from_the_end =", "what is off the mask is cleared in place"),
    ("last_real_token__row_by_row", "return torch.stack([row[m.bool()][-1] for row, m in zip(x, mask)])", "keep = mask.reshape(*mask.shape, *[1] * (x.dim() - 2))\n    last = mask.long().flip(1).cumsum(1).flip(1) == 1\n    return (x * keep * last.reshape(keep.shape)).sum(1)", "a product for a choice, which keeps NaN"),
]  # fmt: skip

# Of mutations.py, what is no mistake in an assignment.
HARMLESS = {
    "GRPO computes rows that have no gradient",  # which is slower, and no mistake
    "each number of rows is another graph",  # slower on CUDA, the same tokens
    "advantages leak out of padding",  # only where there is padding amid a completion
    "finished rows go on",  # what they draw is masked out
    "random numbers of dropped rows go to others",  # other tokens, of the same distribution
    "GRPO's advantages stay in float64",  # the right numbers, and the docstring names no type
    "RLOO's advantages stay in float64",
    "GRPO's advantages in half precision",  # of rewards in half precision, which no check has
    "RLOO's constant groups keep their rounding error",  # nothing divides by their deviation of 0
}
