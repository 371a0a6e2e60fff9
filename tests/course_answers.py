"""Right answers to the problems of the course, written in other ways than the solution.

`<problem>__<way>`: the grader must give each of them all points. Names that a function takes from
its file (Tensor, nn, copy, ...) are that file's.
"""

import math

import numpy as np
import torch

# --- token_logprobs ---


def token_logprobs__log_sum_exp(logits, tokens):
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.gather(2, tokens[:, :, None])[:, :, 0]
    return chosen - logits.logsumexp(dim=2)


def token_logprobs__cross_entropy(logits, tokens):
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.to(torch.float32)
    return -nn.functional.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")


def token_logprobs__row_by_row(logits, tokens):
    rows = []
    for row, chosen in zip(logits, tokens):
        row = row.float()
        row = row - row.max(dim=-1, keepdim=True).values
        normal = row.exp().sum(-1).log()
        rows.append(row[torch.arange(len(chosen)), chosen] - normal)
    return torch.stack(rows)


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
    eos_token_ids, pad_token_id, top_k=0, top_p=1.0, generator=None, bf16=False, static=None,
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
    eos_token_ids, pad_token_id, top_k=0, top_p=1.0, generator=None, bf16=False, static=None,
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
    eos_token_ids, pad_token_id, top_k=0, top_p=1.0, generator=None, bf16=False, static=None,
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
    return -torch.minimum(ratio * advantages, clipped * advantages)


def policy_loss__by_the_sign_of_the_advantage(logprobs, old_logprobs, advantages, clip_range):
    ratio = (logprobs - old_logprobs).exp()
    up, down = ratio.clamp(max=1 + clip_range), ratio.clamp(min=1 - clip_range)
    return -advantages * torch.where(advantages > 0, up, down)


def policy_loss__stacked(logprobs, old_logprobs, advantages, clip_range):
    ratio = torch.exp(logprobs) / torch.exp(old_logprobs)
    surrogates = torch.stack([ratio, ratio.clip(1 - clip_range, 1 + clip_range)]) * -advantages
    return surrogates.amax(0) if not surrogates.requires_grad else surrogates.max(0).values


# --- value_loss ---


def value_loss__of_the_difference(values, old_values, returns, clip_range_value):
    moved = old_values + (values - old_values).clamp(-clip_range_value, clip_range_value)
    return 0.5 * torch.maximum((values - returns).pow(2), (moved - returns).pow(2))


def value_loss__where(values, old_values, returns, clip_range_value):
    free = (returns - values).square()
    low, high = old_values - clip_range_value, old_values + clip_range_value
    bound = (returns - torch.minimum(torch.maximum(values, low), high)).square()
    return torch.where(free > bound, free, bound) / 2


def value_loss__mse(values, old_values, returns, clip_range_value):
    clipped = torch.clamp(values, old_values - clip_range_value, old_values + clip_range_value)
    mse = nn_mse(values, returns), nn_mse(clipped, returns)
    return torch.max(*mse) * 0.5


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
    loss_type="grpo", importance_sampling_level="token", max_new_tokens=None, ref_logprobs=None,
    kl_coef=0.0, num_rows=None, num_tokens=None,
):  # fmt: skip
    if loss_type == "dr_grpo" and not max_new_tokens:
        raise ValueError("max_new_tokens is missing")
    high = clip_range_high if clip_range_high is not None else clip_range
    total = 0.0
    for b in range(len(mask)):
        keep = mask[b].bool()
        new, old, a = logprobs[b][keep], old_logprobs[b][keep], advantages[b]
        log_ratio = new - old
        if importance_sampling_level == "sequence":
            log_ratio = log_ratio.mean() * torch.ones_like(log_ratio)
        ratio = log_ratio.exp()
        if loss_type == "cispo":
            losses = -a * ratio.detach().clamp(max=high) * new
        else:
            losses = -torch.minimum(ratio * a, ratio.clamp(1 - clip_range, 1 + high) * a)
        if ref_logprobs is not None:
            r = ref_logprobs[b][keep] - new
            losses = losses + kl_coef * (r.exp() - r - 1)
        total = total + (losses.mean() if loss_type == "grpo" else losses.sum())
    rows = num_rows or len(mask)
    tokens = mask.sum() if num_tokens is None else num_tokens
    if loss_type == "grpo":
        return total / rows
    if loss_type == "dr_grpo":
        return total / rows / max_new_tokens
    if loss_type in ("dapo", "cispo"):
        return total / tokens
    raise ValueError(loss_type)


def grpo_loss__weights(
    logprobs, old_logprobs, advantages, mask, *, clip_range, clip_range_high=None,
    loss_type="grpo", importance_sampling_level="token", max_new_tokens=None, ref_logprobs=None,
    kl_coef=0.0, num_rows=None, num_tokens=None,
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
        objective = A * torch.minimum(w, torch.full_like(w, eps_high)).detach() * new
    else:
        objective = torch.minimum(w * A, w.clamp(1 - clip_range, 1 + eps_high) * A)
    if ref_logprobs is not None and kl_coef:
        ref = torch.where(keep, ref_logprobs, 0)
        objective = objective - kl_coef * ((ref - new).exp() - (ref - new) - 1)
    return -(weights * objective).sum()


def grpo_loss__flattened(
    logprobs, old_logprobs, advantages, mask, *, clip_range, clip_range_high=None,
    loss_type="grpo", importance_sampling_level="token", max_new_tokens=None, ref_logprobs=None,
    kl_coef=0.0, num_rows=None, num_tokens=None,
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
        token_loss = -(w.clamp(max=clip_range_high)).detach() * a * new
    else:
        token_loss = torch.maximum(-w * a, -w.clamp(1 - clip_range, 1 + clip_range_high) * a)
    if ref_logprobs is not None:
        token_loss = token_loss + kl_coef * kl_estimate(new, ref_logprobs[keep], "k3")
    n = len(mask) if num_rows is None else num_rows
    if loss_type == "grpo":
        return (token_loss / count[row]).sum() / n
    if loss_type == "dr_grpo":
        if max_new_tokens is None:
            raise ValueError("max_new_tokens")
        return token_loss.sum() / (n * max_new_tokens)
    if loss_type not in ("dapo", "cispo"):
        raise ValueError("loss_type")
    return token_loss.sum() / (len(row) if num_tokens is None else num_tokens)


# --- rloo_advantages ---


def rloo_advantages__scaled_distance(rewards, num_generations):
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
    return torch.where((varied & ~same_all)[:, None], a, 0.0).flatten()


def rloo_advantages__loops(rewards, num_generations):
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
    return found


def rloo_advantages__matrix(rewards, num_generations):
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
    return torch.where(highest > lowest, a, 0).reshape(-1).to(rewards.dtype)


# --- rloo_loss ---


def rloo_loss__minimum(logprobs, old_logprobs, advantages, mask, *, clip_range, num_rows=None):
    keep = mask.bool()
    d = torch.where(keep, logprobs - old_logprobs, 0).sum(1)
    w = torch.exp(d)
    objective = torch.minimum(w * advantages, w.clamp(1 - clip_range, 1 + clip_range) * advantages)
    return -objective.sum() / (len(mask) if num_rows is None else num_rows)


def rloo_loss__row_by_row(logprobs, old_logprobs, advantages, mask, *, clip_range, num_rows=None):
    losses = []
    for new, old, a, m in zip(logprobs, old_logprobs, advantages, mask.bool()):
        ratio = (new[m].sum() - old[m].sum()).exp()
        bounded = torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
        losses.append(torch.maximum(-a * ratio, -a * bounded))
    return torch.stack(losses).sum() / (num_rows or len(losses))


def rloo_loss__by_the_sign_of_the_advantage(
    logprobs, old_logprobs, advantages, mask, *, clip_range, num_rows=None
):
    w = sequence_ratio(logprobs, old_logprobs, mask)
    w = torch.where(advantages > 0, w.clamp(max=1 + clip_range), w.clamp(min=1 - clip_range))
    n = num_rows if num_rows is not None else mask.shape[0]
    return (-advantages * w / n).sum()


# --- The loops: (problem, a text for each step, or edits of the solution's) ---

LOOPS = {
    "ppo_loop__the_kl_in_one_expression": [
        """
        kl = (
            old_logprobs * 0
            if config.kl_coef == 0
            else kl_estimate(old_logprobs, ref_logprobs, config.kl_estimator)
        )
        shaped = shape_rewards(scores, kl, mask, config.kl_coef)
        rewards = masked_whiten(shaped, mask, False) if config.whiten_rewards else shaped
        """,
        """
        raw, returns = gae(rewards, old_values, mask, config.gamma, config.lam)
        real = raw[mask]
        advantages = torch.zeros_like(raw)
        advantages[mask] = (real - real.mean()) / (real.var() + 1e-8).sqrt()
        rollout_seconds = time.perf_counter() - rollout_started
        """,
    ],
    "ppo_loop__by_hand": [
        """
        kl = torch.zeros_like(old_values)
        rewards = torch.zeros_like(old_values)
        if ref_logprobs is not None:
            d = old_logprobs - ref_logprobs
            kl = {"k1": d, "k2": d**2 / 2, "k3": torch.expm1(-d) + d}[config.kl_estimator]
            rewards = -config.kl_coef * kl * mask
        ends = mask.sum(1) - 1
        rewards[torch.arange(batch_size), ends] += scores
        if config.whiten_rewards:
            rewards = torch.where(mask, rewards / (rewards[mask].var() + 1e-8).sqrt(), 0)
            mean = rewards[mask].mean()
            scale = (shape_rewards(scores, kl, mask, config.kl_coef)[mask].var() + 1e-8).sqrt()
            rewards = torch.where(mask, rewards + mean * scale - mean, 0)
        """,
        """
        rollout_seconds = seconds_since(rollout_started, device)
        following = torch.zeros(batch_size), torch.zeros(batch_size)
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
    ],
    "ppo_loop__row_by_row": [
        """
        with torch.no_grad():
            if ref_logprobs is None:
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
        """,
        """
        parts = [
            gae(r[None], v[None], m[None], config.gamma, config.lam)
            for r, v, m in zip(rewards, old_values, mask)
        ]
        advantages = torch.cat([a for a, _ in parts])
        returns = advantages + old_values
        advantages = masked_whiten(advantages, mask, shift_mean=True)
        rollout_seconds = seconds_since(rollout_started, device)
        """,
    ],
    "rloo_loop__the_mean_written_out": [
        """
        kl, rewards = None, scores
        if config.reward_clip_range:
            low, high = config.reward_clip_range
            rewards = torch.minimum(torch.maximum(rewards, torch.tensor(low)), torch.tensor(high))
        if ref_logprobs is not None:
            kl = old_logprobs - ref_logprobs
            rewards = rewards - config.kl_coef * torch.where(mask, kl, 0).sum(dim=1)
        """,
        """
        groups = rewards.view(-1, G)
        advantages = ((groups - groups.mean(1, keepdim=True)) * G / (G - 1)).flatten()
        if config.normalize_advantages:
            advantages = advantages / (advantages.std() + 1e-4)
        rollout_seconds = seconds_since(rollout_started, device)
        """,
    ],
    "rloo_loop__penalty_first": [
        """
        penalty = torch.zeros_like(scores)
        kl = None
        if config.kl_coef != 0:
            kl = kl_estimate(old_logprobs, ref_logprobs, "k1")
            penalty = config.kl_coef * (kl * mask).sum(-1)
        clipped = scores.clip(*config.reward_clip_range) if config.reward_clip_range else scores
        rewards = clipped - penalty
        """,
        """
        rollout_seconds = time.perf_counter() - rollout_started
        advantages = rloo_advantages(rewards, config.num_generations)
        if config.normalize_advantages:
            advantages = normalize(advantages, ~torch.isnan(rewards))
        """,
    ],
    "rloo_loop__group_by_group": [
        """
        rewards = scores.clone()
        if config.reward_clip_range:
            rewards = rewards.clamp(config.reward_clip_range[0], config.reward_clip_range[1])
        kl = None if ref_logprobs is None else kl_estimate(old_logprobs, ref_logprobs, "k1")
        for i in range(batch_size if kl is not None else 0):
            rewards[i] -= config.kl_coef * kl[i][mask[i]].sum()
        """,
        """
        groups = rewards.split(G)
        advantages = torch.cat([rloo_advantages(group, G) for group in groups])
        known = ~rewards.isnan()
        if config.normalize_advantages:
            advantages = normalize(advantages, known=known)
        rollout_seconds = seconds_since(rollout_started, device)
        """,
    ],
    "grpo_loop__epochs_and_minibatches_nested": {
        "for index, mini_batch in enumerate(mini_batches):":
            "numbered = [m for order in orders"
            " for m in order.to(device).chunk(config.num_mini_batches)]\n"
            "            for index, mini_batch in enumerate(numbered):",
        "for group in optimizer.param_groups:\n                group[\"lr\"] = learning_rate":
            "optimizer.param_groups[0].update(lr=learning_rate)",
        "optimizer.step()\n                optimizer.zero_grad()":
            "optimizer.step()\n                for p in parameters:\n"
            "                    p.grad = None",
    },
    "grpo_loop__whole_minibatches_at_once": {
        "for rows in micro_batches(rollout, mini_batch, *sizes):": "for rows in [mini_batch]:",
        "torch.randperm(batch_size, generator=shuffler) for _": "torch.randperm(batch_size) for _",
        "config.learning_rate * (1 - step / config.num_steps)":
            "config.learning_rate * (config.num_steps - step) / config.num_steps",
        "num_tokens = loss_mask[mini_batch].sum()": "num_tokens = int(loss_mask[mini_batch].sum())",
    },
    "grpo_loop__old_log_probs_once_more": {
        "if old_is_new:\n                        old_logprobs[rows] = logprobs.detach()\n"
        "                    m, old, adv = loss_mask[rows], old_logprobs[rows], advantages[rows]":
            "m, adv = loss_mask[rows], advantages[rows]\n"
            "                    old = logprobs.detach() if old_is_new else old_logprobs[rows]\n"
            "                    old_logprobs[rows] = old",
        "for rows in micro_batches(rollout, mini_batch, *sizes):": "for rows in mini_batch.split(3):",
        "loss_mask = mask & rollout.finished.unsqueeze(1)":
            "loss_mask = torch.where(rollout.finished[:, None], mask, False)",
        "optimizer.step()\n                optimizer.zero_grad()":
            "optimizer.step()\n                optimizer.zero_grad(set_to_none=False)",
    },
}  # fmt: skip


# --- Wrong answers, beside those of mutations.py: (problem, text, what it becomes, the mistake) ---

WRONG = [
    ("token_logprobs", "return _full(logits).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)", "return _full(logits).detach().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)", "log-probs without gradient"),
    ("kl_estimate", "    d = logprobs - ref_logprobs\n", "    d = (logprobs - ref_logprobs).detach()\n", "a KL without gradient"),
    ("generate", "        completion_mask=drawn_mask,\n", "        completion_mask=drawn_mask.long(),\n", "an integer mask in the rollout"),
    ("reference", "return contextlib.nullcontext(copy_of(policy).eval()", "return contextlib.nullcontext(copy_of(policy.eval())", "the policy is left in evaluation mode"),
    ("rloo_loop", "            kl = None\n", "            kl = torch.zeros_like(old_logprobs)\n", "an unknown KL is 0"),
    ("grpo_loop", "config.max_grad_norm", "1.0", "a norm of the reader's own"),
    ("grpo_loop", "torch.randperm(batch_size, generator=shuffler)", "torch.arange(batch_size)", "the rows in their order"),
    ("token_logprobs", "tokens.unsqueeze(-1)).squeeze(-1)", "tokens.unsqueeze(-1))", "a dimension of 1 too many"),
    ("token_logprobs", "return _full(logits).log_softmax(-1)", "return _full(logits).log_softmax(1)", "softmax over time"),
    ("token_logprobs", "return _full(logits).log_softmax(-1)", "return _full(logits).exp().div(_full(logits).exp().sum(-1, keepdim=True)).log()", "exp that overflows"),
    ("kl_estimate", 'raise ValueError(f"unknown KL', 'return ValueError(f"unknown KL', "an unknown estimator is returned"),
    ("kl_estimate", "return torch.expm1(-d) + d", "return torch.expm1(-d) - d", "k3 with a wrong sign"),
    ("completion_mask", "return eos_before == 0", "return (eos_before == 0).long()", "an integer mask"),
    ("completion_mask", "return eos_before == 0", "return eos_before <= 1", "tokens up to the second EOS"),
    ("masked_whiten", "return whitened if shift_mean else (whitened + mean).masked_fill(~mask, 0)", "return whitened if shift_mean else whitened + mean", "the mean added at padding"),
    ("masked_whiten", "    centred = (x - mean).masked_fill(~mask, 0)", "    centred = (x - x.mean()).masked_fill(~mask, 0)", "the mean over padding too"),
    ("disable_dropout", "    return sites\n\n\ndef _zero_noise", "    return 0\n\n\ndef _zero_noise", "sites are not counted"),
    ("disable_dropout", "quiet_configs[id(config)] = copy.copy(config), config", "quiet_configs[id(config)] = config, config", "the saved config is changed"),
    ("generate", "with evaluating(model),", "model.eval()\n    with", "the model stays in evaluation mode"),
    ("generate", "drawn, drawn_logprobs = draw(logits, uniforms[t, rows], temperature, top_k, top_p)", "drawn, drawn_logprobs = draw(logits, uniforms[t, rows], 1.0, top_k, top_p)", "temperature ignored"),
    ("generate", "drawn, drawn_logprobs = draw(logits, uniforms[t, rows], temperature, top_k, top_p)", "drawn, drawn_logprobs = draw(logits, uniforms[t, rows], 1 / temperature, top_k, top_p)", "temperature upside down"),
    ("generate", "uniforms[t, rows], temperature, top_k, top_p)", "uniforms[t, rows], temperature)", "top_k and top_p ignored"),
    ("generate", "uniforms = torch.rand(max_new_tokens, num_rows, generator=generator, device=device)", "uniforms = torch.rand(max_new_tokens, num_rows, device=device)", "the generator is not used"),
    ("generate", "uniforms = torch.rand(max_new_tokens, num_rows, generator=generator, device=device)", "uniforms = torch.rand(max_new_tokens, 1, generator=generator, device=device).expand(-1, num_rows)", "one random number for all rows"),
    ("generate", "tokens=torch.cat([prompt_ids, tokens.masked_fill(~drawn_mask, pad_token_id)], dim=1)", "tokens=torch.cat([prompt_ids, tokens], dim=1)", "other tokens after EOS"),
    ("shape_rewards", "+ scores.unsqueeze(1) * is_last", "", "no score at all"),
    ("shape_rewards", "+ scores.unsqueeze(1) * is_last", "+ scores.unsqueeze(1) * mask", "the score at every token"),
    ("shape_rewards", "return (-kl_coef * kl)", "return (-kl)", "the coefficient is forgotten"),
    ("gae", "for t in reversed(range(values.shape[1])):", "for t in range(values.shape[1]):", "GAE from the first token on"),
    ("gae", "    return advantages, advantages + values", "    return advantages, advantages + rewards", "returns with the rewards"),
    ("gae", "    return advantages, advantages + values", "    return masked_whiten(advantages, mask), advantages + values", "GAE whitens"),
    ("policy_loss", "ratio = torch.exp(logprobs - old_logprobs)", "ratio = torch.exp(logprobs - old_logprobs).detach()", "the ratio without gradient"),
    ("policy_loss", "ratio.clamp(1 - clip_range, 1 + clip_range))", "ratio.clamp(-clip_range, clip_range))", "clipped around 0"),
    ("policy_loss", "return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))", "return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)).mean()", "a mean where losses per token are asked for"),
    ("policy_loss", "return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))", "return -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)", "only the clipped loss"),
    ("value_loss", "clipped = values.clamp(old_values - clip_range_value, old_values + clip_range_value)", "clipped = values.clamp(returns - clip_range_value, returns + clip_range_value)", "clipped around the returns"),
    ("value_loss", "clipped = values.clamp(old_values - clip_range_value, old_values + clip_range_value)", "clipped = values", "values are not clipped"),
    ("ppo_loop", "kl = kl_estimate(old_logprobs, ref_logprobs, config.kl_estimator)", "kl = kl_estimate(ref_logprobs, old_logprobs, config.kl_estimator)", "the reference first"),
    ("ppo_loop", "gae(rewards, old_values, mask, config.gamma, config.lam)", "gae(rewards, old_values, mask, config.lam, config.gamma)", "gamma for lambda"),
    ("ppo_loop", "masked_whiten(rewards, mask, shift_mean=False)", "masked_whiten(rewards, mask)", "rewards whitened with their mean"),
    ("ppo_loop", "rewards = shape_rewards(scores, kl, mask, config.kl_coef)", "rewards = shape_rewards(scores, kl, mask, 0.05)", "a coefficient of the reader's own"),
    ("group_advantages", "    return centred.masked_fill(groups.isnan() | is_flat(groups), 0).flatten()", "    return centred.masked_fill(groups.isnan(), 0).flatten()", "equal rewards keep their rounding"),
    ("group_advantages", "    return centred.masked_fill(groups.isnan() | is_flat(groups), 0).flatten()", "    return centred.masked_fill(is_flat(groups), 0).flatten()", "NaN becomes an advantage"),
    ("group_advantages", '        raise ValueError(f"num_generations is', '        print(f"num_generations is', "groups of one are let through"),
    ("group_advantages", "groups = (rewards * 1.0).view(-1, num_generations)", "groups = (rewards * 1.0).view(num_generations, -1).T", "groups are not consecutive rows"),
    ("grpo_loss", "A = advantages.unsqueeze(1)", "A = -advantages.unsqueeze(1)", "the sign of GRPO's advantages"),
    ("grpo_loss", "ratio = importance_ratio(logprobs, old_logprobs, mask, importance_sampling_level)", "ratio = importance_ratio(logprobs, old_logprobs, mask, 'token')", "the level is ignored"),
    ("grpo_loss", 'if loss_type in ("dapo", "cispo"):', 'if loss_type in ("dapo", "cispo", "dr_grpo"):', "dr_grpo as dapo"),
    ("grpo_loop", "loss.backward()", "(loss / len(mini_batch)).backward()", "the loss divided once more"),
    ("grpo_loop", "max_new_tokens=config.max_new_tokens,\n                        ref", "max_new_tokens=mask.shape[1] + 1,\n                        ref", "another constant handed in"),
    ("grpo_loop", "orders = [\n                torch.randperm(batch_size, generator=shuffler) for _ in range(config.num_epochs)\n            ]", "orders = [torch.randperm(batch_size, generator=shuffler)]", "one epoch whatever was asked for"),
    ("grpo_loop", "                    m, old, adv = loss_mask[rows]", "                    m, old, adv = mask[rows]", "truncated rows stay in the loss"),
    ("grpo_loop", "torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)", "torch.tensor(1.0)", "the gradient is not clipped"),
    ("rloo_advantages", "    return (groups - baseline).masked_fill(~known | is_flat(groups), 0).flatten()", "    return (baseline - groups).masked_fill(~known | is_flat(groups), 0).flatten()", "the baseline less the reward"),
    ("rloo_loss", "ratio = sequence_ratio(logprobs, old_logprobs, mask)", "ratio = sequence_ratio(logprobs, old_logprobs, mask) ** (1 / mask.sum(1))", "a geometric mean in RLOO"),
    ("rloo_loss", "ratio = sequence_ratio(logprobs, old_logprobs, mask)", "ratio = (logprobs - old_logprobs).sum(1).exp()", "padding in RLOO's ratio"),
    ("rloo_loop", "advantages = normalize(advantages, known=~rewards.isnan())", "pass", "advantages are not normalised"),
    ("rloo_loop", "rewards = rewards.clamp(*config.reward_clip_range)", "rewards = rewards.clamp(-1, 1)", "another range for the clip"),
]  # fmt: skip

# Of mutations.py, what is no mistake in an assignment.
HARMLESS = {
    "each number of rows is another graph",  # slower on CUDA, the same tokens
    "advantages leak out of padding",  # only where there is padding amid a completion
    "finished rows go on",  # what they draw is masked out
    "random numbers of dropped rows go to others",  # other tokens, of the same distribution
}
