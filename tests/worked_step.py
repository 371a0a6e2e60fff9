"""The step that docs/equations.md works by hand, with the functions of the scripts."""

import conftest  # noqa: F401, the path
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import grpo
import ppo
import rloo

STEP = {  # completions of 12+9=: score, probabilities of the tokens before the update, and now
    "2 1 EOS": (1.0, (0.4, 0.5, 0.9), (0.6, 0.45, 0.9)),
    "2 2 EOS": (0.0, (0.4, 0.2, 0.9), (0.6, 0.1, 0.9)),
    "3 EOS": (0.0, (0.1, 0.5), (0.1, 0.55)),
    "1 1 1": (0.0, (0.5, 0.2, 0.1), (0.3, 0.25, 0.11)),
}


def worked_step() -> str:
    """GRPO's and RLOO's losses of STEP, by the functions of the scripts."""
    scores, *probs = zip(*STEP.values())
    scores = torch.tensor(scores).double()
    old, new = (pad_sequence([Tensor(p).double().log() for p in x], True) for x in probs)
    mask, new = old != 0, new.requires_grad_()
    ratio = (new - old).exp()

    def line(start: str, numbers: list[Tensor], clipped: Tensor) -> str:
        return start + "".join(f"{x + 0.0:8.3g}" for x in numbers) + "  clipped" * bool(clipped)

    A = grpo.group_advantages(scores, 4)
    loss, _, clipped = grpo.grpo_loss(new, old, A, mask, clip_range=0.2)
    [slopes] = torch.autograd.grad(loss, new)
    each, _, _ = ppo.policy_loss(new, old, A.unsqueeze(1), 0.2)  # GRPO's of a token is PPO's
    lines = ["score       A  token  pi_old      pi   ratio    loss   slope"]
    for i, text in enumerate(STEP):
        for t, token in enumerate(text.split()):
            first = line(f"{scores[i]:5.0f}", [A[i]], False) if t == 0 else " " * 13
            numbers = [x[i, t] for x in (old.exp(), new.exp(), ratio, each, slopes)]
            lines.append(line(f"{first}  {token:5}", numbers, clipped[i, t]))
    lines += [f"GRPO's loss: {loss:.3g}", "", "completion       A  log pi    loss   slope"]

    A, now = rloo.rloo_advantages(scores, 4), old.requires_grad_()  # its one update comes first
    [slopes] = torch.autograd.grad(loss := rloo.rloo_loss(now, A, mask), now)
    for i, text in enumerate(STEP):
        logprob = now[i].sum()
        lines.append(line(f"{text:10}", [A[i], logprob, -A[i] * logprob, slopes[i, 0]], False))
    return "\n".join([*lines, f"RLOO's loss: {loss:.3g}"])


if __name__ == "__main__":
    print(worked_step())
