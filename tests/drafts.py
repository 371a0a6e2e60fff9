"""What students write first, and what they get wrong, with the points that grade.py gives:

    python tests/drafts.py    # a line a function: its draft, wrong versions, a detached one

A draft is the formula of the handout in a few lines, without the extremes: at least half of the
points. A wrong version is our own code with one mistake: at most a quarter. A detached one has all
values right and no gradient: at most half.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "course"))

import grade
from problems import FILES, PROBLEMS, REPOSITORY, Problem, function_of

DRAFTS = {  # of a loop the formulas are the solution
    "token_logprobs": """
def token_logprobs(logits, tokens):
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
""",
    "kl_estimate": """
def kl_estimate(logprobs, ref_logprobs, estimator):
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    return torch.exp(-d) - 1 + d
""",
    "completion_mask": """
def completion_mask(completions, eos_token_ids):
    is_eos = sum((completions == token).float() for token in eos_token_ids)
    return (is_eos.cumsum(1) - is_eos == 0).float()
""",
    "masked_whiten": """
def masked_whiten(x, mask):
    n = mask.sum()
    mean = (x * mask).sum() / n
    variance = ((x - mean) ** 2 * mask).sum() / (n - 1)
    return (x - mean) / torch.sqrt(variance + 1e-8) * mask
""",
    "disable_dropout": """
def disable_dropout(*models):
    count = 0
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
                count += 1
    return count
""",
    "reference": """
def reference(policy, kl_coef, named=None):
    if kl_coef == 0:
        return contextlib.nullcontext
    model = copy.deepcopy(policy) if named is None else named
    model.eval()
    for p in model.parameters():
        p.requires_grad = False
    return lambda: contextlib.nullcontext(model)
""",
    "decode": """
def decode(step, logits, uniforms, eos, stop, settings):
    drawn, logprob = draw(logits, uniforms[0], **settings)
    tokens, logprobs = [drawn], [logprob]
    for t in range(1, len(uniforms)):
        drawn, logprob = step(drawn, uniforms[t], settings)
        tokens.append(drawn)
        logprobs.append(logprob)
    tokens = torch.stack(tokens, dim=1)
    return tokens, torch.stack(logprobs, dim=1), torch.isin(tokens, eos)
""",
    "completion_logprobs": """
def completion_logprobs(model, rollout, temperature, *, bf16=False, entropy=True, **options):
    mask = rollout.completion_mask
    P = rollout.tokens.shape[1] - mask.shape[1]
    inputs = model_inputs(model, rollout.tokens, rollout.attention_mask)
    logits = model(**inputs).logits[:, P - 1 : -1] / temperature
    return token_logprobs(logits, rollout.tokens[:, P:]) * mask, token_entropy(logits) * mask
""",
    "shape_rewards": """
def shape_rewards(scores, kl, mask, kl_coef):
    rewards = -kl_coef * kl
    rewards[torch.arange(len(scores)), mask.sum(1) - 1] += scores
    return rewards
""",
    "gae": """
def gae(rewards, values, mask, gamma, lam):
    rewards, values, T = rewards * mask, values * mask, values.shape[1]
    advantages, next_advantage = torch.zeros_like(values), 0
    for t in reversed(range(T)):
        next_value = values[:, t + 1] if t + 1 < T else 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * mask[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values
""",
    "policy_loss": """
def policy_loss(logprobs, old_logprobs, advantages, clip_range):
    ratio = torch.exp(logprobs - old_logprobs)
    free, held = -advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.max(free, held), ratio, held > free
""",
    "value_loss": """
def value_loss(values, old_values, returns, clip_range_value):
    near = old_values + (values - old_values).clamp(-clip_range_value, clip_range_value)
    free, held = (values - returns) ** 2, (near - returns) ** 2
    return 0.5 * torch.max(free, held), held > free
""",
    "schedule": """
def schedule(step, num_steps, warmup_steps):
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (num_steps - step) / (num_steps - warmup_steps)
""",
    "group_advantages": """
def group_advantages(rewards, num_generations, scale_rewards="group"):
    groups = rewards.view(-1, num_generations)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    return advantages.flatten()
""",
    "grpo_loss": """
def grpo_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_range, loss_type="grpo", cispo_bound=5.0,
    max_new_tokens=None, ref_logprobs=None, kl_coef=0.0, **options,
):
    A, ratio = advantages.unsqueeze(1), torch.exp(logprobs - old_logprobs)
    free, held = -A * ratio, -A * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.max(free, held)
    if loss_type == "cispo":
        loss = -A * ratio.clamp(max=cispo_bound).detach() * logprobs
    if ref_logprobs is not None:
        u = torch.exp(ref_logprobs - logprobs)
        loss = loss + kl_coef * (u - 1 - u.log())
    loss, B = loss * mask, len(loss)
    if loss_type == "grpo":
        total = (loss.sum(1) / mask.sum(1)).mean()
    elif loss_type == "dr_grpo":
        total = loss.sum() / (B * max_new_tokens)
    else:
        total = loss.sum() / mask.sum()
    return total, ratio, held > free
""",
    "rloo_advantages": """
def rloo_advantages(rewards, num_generations):
    groups = rewards.view(-1, num_generations)
    others = (groups.sum(1, keepdim=True) - groups) / (num_generations - 1)
    return (groups - others).flatten()
""",
    "rloo_loss": """
def rloo_loss(logprobs, advantages, mask, num_rows=None):
    return -(advantages * (logprobs * mask).sum(1)).mean()
""",
    "preference_loss": """
def preference_loss(chosen, rejected, margin=0.0, center_rewards_coef=0.0):
    loss = -torch.log(torch.sigmoid(chosen - rejected - margin))
    return loss + center_rewards_coef * (chosen + rejected) ** 2
""",
    "last_real_token": """
def last_real_token(x, mask):
    return x[torch.arange(len(x)), mask.sum(1) - 1]
""",
}
LOWER = ("torch.max(", "torch.min(")
WRONG = {  # what is wrong: the line of ours, and what stands there
    "token_logprobs": {
        "off by one": ("tokens.unsqueeze(-1)", "(tokens.unsqueeze(-1) + 1) % logits.shape[-1]")
    },
    "kl_estimate": {"sign": ("d = logprobs - ref_logprobs", "d = ref_logprobs - logprobs")},
    "completion_mask": {"off by one": ("eos_before == 0", "is_eos.cumsum(1) == 0")},
    "masked_whiten": {"mask": ("masked_mean(x, mask)", "x.mean()")},
    "disable_dropout": {
        "evaluation mode": ("sites = 0", "return sum(model.eval() is model for model in models)")
    },
    "reference": {"the policy itself": ("copy_what_trains(policy)", "policy")},
    "decode": {"off by one": ("uniforms[t + 1, rows]", "uniforms[t, rows]")},
    "completion_logprobs": {
        "off by one": ("[:, -mask.shape[1] :][mask]", "[:, -mask.shape[1] - 1 : -1][mask]"),
        "temperature": ("logits if temperature == 1 else logits / temperature", "logits"),
    },
    "shape_rewards": {
        "off by one": ("mask.sum(1, keepdim=True))", "mask.sum(1, keepdim=True) - 1)"),
        "mask": ("mask & (mask.cumsum(1) ==", "(torch.arange(1, mask.shape[1] + 1) - 4 + 0 *"),
    },
    "gae": {"off by one": ("gamma * next_value", "gamma * values[:, t]")},
    "policy_loss": {"minimum": LOWER},
    "value_loss": {"another middle": ("values.clamp(old_values -", "values.clamp(returns -")},
    "ppo_loop": {"no whitening": ("masked_whiten(advantages, mask)", "advantages")},
    "schedule": {"rise off by one": ("return (step + 1)", "return step")},
    "group_advantages": {
        "of the batch": ("groups.nanmean(dim=1, keepdim=True)", "groups.nanmean()")
    },
    "grpo_loss": {
        "mask": ("masked_mean(loss, mask, dim=1)", "loss.mean(1)"),
        "sign of the KL": ("(logprobs, ref_logprobs,", "(ref_logprobs, logprobs,"),
    },
    "grpo_loop": {
        "sign": ("(loss - bonus).backward()", "(bonus - loss).backward()"),
        "of the micro-batch": ("num_rows=len(mini_batch)", "num_rows=len(rows)"),
    },
    "rloo_advantages": {
        "own reward": ("nansum(1, keepdim=True) - groups", "nansum(1, keepdim=True)")
    },
    "rloo_loss": {"sign": ("return -(", "return ("), "mean of tokens": (".sum(1)", ".mean(1)")},
    "rloo_loop": {"mean of tokens": ("kl.sum(1)", "kl.mean(1)")},
    "preference_loss": {"margin": ("rejected - margin", "rejected + margin")},
    "last_real_token": {"off by one": (".argmax(1)", ".argmax(1) - 1")},
}
HAVE_GRADIENT = """token_logprobs kl_estimate completion_logprobs policy_loss value_loss grpo_loss
rloo_loss preference_loss last_real_token""".split()
WITHOUT_GRADIENT = """
{name}_with_gradient = {name}

def {name}(*args, **options):
    with torch.no_grad():
        return {name}_with_gradient(*args, **options)
"""


def version(text: str, problem: Problem, kind: str) -> str:
    """The text of a file with the draft of a function, its wrong version, or without gradient."""
    if kind == "detached":
        return text + WITHOUT_GRADIENT.format(name=problem.name)
    node, lines = function_of(text, problem.function), text.split("\n")
    ours = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    if kind == "draft":
        return text.replace(ours, DRAFTS[problem.name])
    old, new = WRONG[problem.name][kind]
    assert ours.count(old) == 1, f"{problem.name} has {old!r} {ours.count(old)} times"
    return text.replace(ours, ours.replace(old, new))


def points(problem: Problem, kind: str) -> int:
    """What a hand-in gets that has this version of a function; the rest is ours."""
    texts = {file: (REPOSITORY / file).read_text(encoding="utf-8") for file in FILES}
    texts[problem.file] = version(texts[problem.file], problem, kind)
    return grade.graded(texts, [problem], 120)[0]["score"]


def table() -> dict[str, dict[str, int]]:
    """{problem: {version: points}}, a line each."""
    found = {}
    for problem in PROBLEMS:
        kinds = ["draft"] * (problem.name in DRAFTS) + [*WRONG[problem.name]]
        kinds += ["detached"] * (problem.name in HAVE_GRADIENT)
        found[problem.name] = scores = {kind: points(problem, kind) for kind in kinds}
        print(f"{problem.name:20} of {problem.points}:", scores)
    return found


if __name__ == "__main__":
    grade.FORKSERVER.set_forkserver_preload(grade.PRELOAD)
    table()
