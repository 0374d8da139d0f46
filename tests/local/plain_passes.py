"""The oracle of every decoder: plain passes of the model, without cache, mask or padding."""

import torch

from coca_mindspeed.local.inverse_cdf import numbers_per_draw, tokens_at
from coca_mindspeed.local.sampler import sample_responses
from coca_mindspeed.local.static_decoder import decodes_statically

_LOOK = 16  # tokens whose numbers the static decoder draws at once


def numbers_of(policy, lengths, new, generator):
    """The uniform numbers ``[new, responses, numbers]`` of one batch, CPU: of all responses, or of the unfinished."""
    numbers = numbers_per_draw(policy.vocabulary)

    def rand(*size):
        return torch.rand(*size, numbers, generator=generator, device=generator.device).cpu()

    if decodes_statically(policy):
        return torch.cat([rand(min(_LOOK, new - start), len(lengths)) for start in range(0, new, _LOOK)])
    uniform = torch.zeros(new, len(lengths), numbers)
    for t in range(int(lengths.max())):
        going = lengths > t
        uniform[t, going] = rand(int(going.sum()))
    return uniform


def assert_plain(samples, policy, uniform=None, *, new, temperature=1.0, tolerance=2e-5, model=None):
    """Responses have the log-probs and the entropy of plain passes, and end at an end token or after ``new`` tokens.

    With ``uniform`` (see :func:`numbers_of`), its tokens are those at these numbers, give or take ``tolerance``.
    ``model`` makes the plain passes; None: the policy's own.
    """
    model = model or policy.model
    for row, (ids, length) in enumerate(zip(samples.token_ids, samples.lengths.tolist(), strict=True)):
        prompt, response = samples.prompts[row], ids[:length].tolist()
        text = torch.tensor([[*prompt, *response]], device=model.device)
        with torch.inference_mode(), policy.autocast():
            logits = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = policy.sampling_logits(logits, temperature).log_softmax(-1).cpu()
        if uniform is not None:
            near = [(uniform[:length, row] + change).clamp(0, 1 - 2**-24) for change in (0, -tolerance, tolerance)]
            drawn = torch.stack([tokens_at(expected.exp(), numbers)[0][:, 0] for numbers in near])
            assert bool((drawn == ids[:length]).any(dim=0).all()), row
        ended = [token in policy.eos_ids for token in response]
        assert not any(ended[:-1])
        assert ended[-1] == bool(samples.finished[row])
        assert ended[-1] or length == new
        log_probs = expected.gather(1, ids[:length, None])[:, 0]
        torch.testing.assert_close(samples.log_probs[row, :length], log_probs, atol=tolerance, rtol=tolerance)
        entropy = torch.special.entr(expected.exp()).sum(-1).mean()
        torch.testing.assert_close(samples.entropy[row], entropy, atol=tolerance, rtol=max(tolerance, 1e-3))
        assert bool((samples.token_ids[row, length:] == policy.pad_id).all())
        assert bool((samples.log_probs[row, length:] == 0).all())


def sample_as_plain(policy, prompts, *, seed=0, group_size=4, new=24, temperature=1.0, **compared):
    """Sample responses and compare them, tokens included; returns them."""
    first, again = (torch.Generator(policy.device).manual_seed(seed) for _ in range(2))
    settings = {"group_size": group_size, "max_new_tokens": new, "temperature": temperature}
    samples = sample_responses(policy, prompts, generator=first, **settings)
    uniform = numbers_of(policy, samples.lengths, new, again)
    assert_plain(samples, policy, uniform, new=new, temperature=temperature, **compared)
    return samples
