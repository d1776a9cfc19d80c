"""ppo_continuous.py and rpo_continuous.py: bounds of actions, running statistics, time limits, RPO's noise."""

import dataclasses
import difflib
import functools
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import AffineTransform, Gumbel, Laplace, Normal, TanhTransform, TransformedDistribution

import ppo_continuous
import rpo_continuous

both = pytest.mark.parametrize("script", [ppo_continuous, rpo_continuous], ids=lambda script: script.__name__)

# 64 samples an iteration in 2 minibatches, twice over: 4 updates an iteration; 2 iterations.
TINY = {
    "env_id": "small_envs:Line3Trunc-v0",
    "num_envs": 2,
    "num_steps": 32,
    "num_minibatches": 2,
    "update_epochs": 2,
    "total_timesteps": 128,
    "eval_episodes": 2,
    "eval_every": 0,
    "checkpoint_every": 0,
    "threads": 1,
    "cuda": False,
    "progress": False,
}


def tiny(script, run_dir, **changes):
    return script.Args(**{**TINY, "run_dir": str(run_dir), **changes})


def only_run(run_dir):
    (folder,) = Path(run_dir).iterdir()
    return folder


def load(path):
    return torch.load(path, weights_only=True)


def scalars(folder):
    """Returns {tag: [(step, value), ...]} of all event files in a run folder, purged as TensorBoard purges."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def recorded(monkeypatch, module, name):
    """Lets a function of a script, or a method of a class, note (arguments, result) of each call; returns the list."""
    function, calls = getattr(module, name), []

    @functools.wraps(function)
    def noting(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append((args, result))
        return result

    monkeypatch.setattr(module, name, noting)
    return calls


def failed(script, monkeypatch, capsys, *flags):
    """Runs the command line, which must fail; returns exit status and what it says on standard error."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *flags])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_info:
        script.main()
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return exit_info.value.code, text


def bounds(low, high):
    return torch.tensor(low), torch.tensor(high)


# ----- Actions and their bounds -----
@both
@pytest.mark.parametrize("x", [-20.0, -9.0, -1.0, 0.0, 0.3, 5.0, 20.0])
def test_the_slope_of_the_squashing_is_exact_up_to_float_error(script, x):
    # log(1 - tanh(x)^2) = log 4 - 2 |x| - 2 log(1 + exp(-2 |x|)), in double precision; bounds -1 and 1 add log 1 = 0.
    right = math.log(4) - 2 * abs(x) - 2 * math.log1p(math.exp(-2 * abs(x)))
    got = script.squash_log_slope(torch.tensor([[x]]), *bounds([-1.0], [1.0]))
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(right, rel=1e-6, abs=1e-6)


@both
def test_squashed_actions_reach_asymmetric_bounds_and_never_pass_them(script):
    low, high = bounds([-0.3, 2.0, 0.1], [0.1, 5.0, 0.7])
    sample = torch.tensor([[-50.0] * 3, [0.0] * 3, [50.0] * 3])
    actions = script.squash(sample, low, high)
    assert (low <= actions).all()
    assert (actions <= high).all()
    torch.testing.assert_close(actions[0], low)
    torch.testing.assert_close(actions[2], high)
    torch.testing.assert_close(actions[1], torch.tensor([-0.1, 3.5, 0.4]))
    # By hand: 2 + 3 (1 + tanh 1) / 2 with tanh 1 = 0.7615942.
    assert script.squash(torch.ones(1, 3), low, high)[0, 1].item() == pytest.approx(4.6423912, rel=1e-6)


def squashing_agent(script, low, high, **changes):
    torch.manual_seed(1)
    return script.Agent(2, np.array(low), np.array(high), tanh=True, **changes)


@both
def test_squashed_log_probabilities_equal_those_of_torch(script):
    low, high = [-0.3, 2.0], [0.1, 5.0]
    agent = squashing_agent(script, low, high)
    policy = Normal(torch.tensor([[0.4, -0.2]]).expand(500, 2), torch.tensor([0.7, 1.5]))
    sample = policy.sample()
    scale = (torch.tensor(high) - torch.tensor(low)) / 2
    transforms = [TanhTransform(), AffineTransform(torch.tensor(low) + scale, scale)]
    squashed = TransformedDistribution(Normal(policy.loc[:1].double(), policy.scale[:1].double()), transforms)
    x = sample.double()
    # torch's own chain of changes of variables, in double precision, one dimension after the other.
    right = squashed.base_dist.log_prob(x) - transforms[0].log_abs_det_jacobian(x, x.tanh()) - scale.double().log()
    torch.testing.assert_close(agent.logprob(policy, sample).double(), right.sum(-1), rtol=1e-5, atol=1e-5)
    # And, where the inverse is exact enough, of the actions themselves.
    inner = (sample.abs() < 3).all(-1)
    actions = agent.bounded(sample).double()[inner]
    got = agent.logprob(policy, sample)[inner].double()
    torch.testing.assert_close(got, squashed.log_prob(actions).sum(-1), rtol=1e-3, atol=1e-3)


@both
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.5, 0.5), (-2.0, 2.0)])
def test_the_squashed_density_integrates_to_1_and_its_entropy_is_right(script, mean, std):
    agent = squashing_agent(script, [-0.3], [0.9])
    policy = Normal(torch.tensor([[mean]]), torch.tensor([std]))
    sample = torch.linspace(mean - 9 * std, mean + 9 * std, 200_001).unsqueeze(-1)
    action = agent.bounded(sample).squeeze(-1).double()
    logprob = agent.logprob(policy, sample).double()
    # Over the actions, whose steps are uneven, and with them in double precision where float32 ones would be equal.
    action = -0.3 + 1.2 * (1 + sample.squeeze(-1).double().tanh()) / 2
    assert torch.trapezoid(logprob.exp(), action).item() == pytest.approx(1, abs=1e-3)
    right = -torch.trapezoid(logprob.exp() * logprob, action).item()
    estimate = agent.entropy(Normal(torch.full((200_000, 1), mean), torch.tensor([std])))
    assert estimate.shape == (200_000,)
    assert estimate.mean().item() == pytest.approx(right, abs=0.02)


@both
def test_the_correction_cancels_in_the_ratio_of_stored_samples(script):
    agent = squashing_agent(script, [-1.0], [1.0])
    old, new = (Normal(torch.tensor([[mean]]), torch.tensor([1.0])) for mean in (0.0, 0.5))
    sample = torch.tensor([[-3.0], [0.2], [10.0]])
    # By hand: log N(x; 0.5, 1) - log N(x; 0, 1) = 0.5 x - 0.125.
    right = torch.tensor([-1.625, -0.025, 4.875])
    torch.testing.assert_close(agent.logprob(new, sample) - agent.logprob(old, sample), right)
    uncorrected = (new.log_prob(sample) - old.log_prob(sample)).sum(-1)
    torch.testing.assert_close(uncorrected, right)
    # Stored as an action instead, and inverted, the last sample is cut at the edge: atanh(1 - 1e-6) = 7.254, and the
    # logarithm of the ratio 3.502 in place of 4.875.
    inverted = torch.atanh(agent.bounded(sample).double().clamp(-1 + 1e-6, 1 - 1e-6)).float()
    wrong = agent.logprob(new, inverted) - agent.logprob(old, inverted)
    torch.testing.assert_close(wrong[:2], right[:2], rtol=1e-3, atol=1e-3)
    assert wrong[2].item() == pytest.approx(3.502, abs=1e-3)


@both
def test_leaving_the_correction_out_does_not_change_what_is_learned(script, tmp_path, monkeypatch):
    args = tiny(script, tmp_path, action_bounds="tanh", env_id="Pendulum-v1")
    agent, _ = script.train(args)
    monkeypatch.setattr(script, "squash_log_slope", lambda sample, low, high: torch.zeros(sample.shape[:-1]))
    other, _ = script.train(args)
    for name, tensor in agent.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


@both
@pytest.mark.parametrize("action_bounds", ["clip", "tanh"])
def test_the_environment_gets_bounded_actions_and_the_storage_keeps_samples(
    script, tmp_path, monkeypatch, action_bounds
):
    """FAULTS 08: the actor's mean is 5, bounds are -0.3 to 0.1 and 2 to 5."""
    make_agent = script.make_agent

    def make_shifted(*args):
        agent = make_agent(*args)
        agent.actor_and_critic[-1].bias.data[0].fill_(5.0)
        return agent

    monkeypatch.setattr(script, "make_agent", make_shifted)
    ratios = recorded(monkeypatch, script, "policy_loss")
    changes = recorded(monkeypatch, script, "policy_change")
    stored = recorded(monkeypatch, script, "compute_gae")
    storage = recorded(monkeypatch, script.VectorRollout, "empty")
    envs = recorded(monkeypatch, script, "make_envs")
    # A limit that is never met lets the change of the policy be computed in each minibatch, not only once in the end.
    noise = {"rpo_alpha": 0.0, "target_kl": 1e6} if script is rpo_continuous else {"target_kl": 1e6}
    args = tiny(script, tmp_path, env_id="small_envs:LineAsymmetric-v0", action_bounds=action_bounds, **noise)
    script.train(args)
    seen = np.array(envs[0][1].envs[0].unwrapped.seen)
    assert seen.shape == (64, 2)
    # The environment itself asserts that they are within the bounds. With a mean of 5 most are at them.
    assert (seen[:, 0] >= 0.099).mean() > 0.9
    assert (seen[:, 1] >= 4.99).mean() > 0.4
    rollout = storage[0][1]
    assert (rollout.actions[..., 0] > 1).float().mean() > 0.9
    assert rollout.actions[..., 0].mean().item() == pytest.approx(5, abs=0.7)
    # The first minibatch of an update is before any change, in each of the 2 iterations.
    assert len(stored) == 2
    assert len(ratios) == 8
    assert len(changes) == 10
    for i in (0, 1):
        (new_logprobs, logprobs, *_), _ = ratios[4 * i]
        assert ((new_logprobs - logprobs).exp() - 1).abs().max() < 1e-5
        assert changes[5 * i][1][1].abs() < 1e-6
        assert changes[5 * i][1][2] == 0
    assert ((ratios[1][0][0] - ratios[1][0][1]).exp() - 1).abs().max() > 1e-4


@both
@pytest.mark.parametrize(
    "env_id",
    [f"small_envs:Line{x}-v0" for x in ("Matrix", "3Float64", "Unbounded", "Float64Actions", "Float16Actions")],
)
def test_boxes_of_other_shapes_and_types_train(script, tmp_path, env_id):
    _, scores = script.train(tiny(script, tmp_path, env_id=env_id))
    assert scores == [3, 3]


@both
@pytest.mark.parametrize("action_bounds", ["clip", "tanh"])
def test_bounds_are_those_of_the_environment_at_hand(script, tmp_path, monkeypatch, capsys, action_bounds):
    """The environment itself asserts that no action is beyond 0.5, where the run's own had bounds of 1."""
    script.train(tiny(script, tmp_path, total_timesteps=64, action_bounds=action_bounds))
    folder = str(only_run(tmp_path))
    for flags in (["--evaluate", folder, "--no-eval-greedy"], ["--resume", folder, "--total-timesteps=128"]):
        monkeypatch.setattr(sys, "argv", ["script", *flags, "--env-id=small_envs:LineHalf-v0", "--no-cuda"])
        script.main()
    assert "mean=3 " in capsys.readouterr().out.splitlines()[-3]


@both
def test_environments_that_draw_actions_of_their_own_are_seeded(script, tmp_path):
    runs = [script.train(tiny(script, tmp_path, env_id="small_envs:LineDraws-v0")) for _ in range(2)]
    assert_same_weights(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert len(set(runs[0][1])) > 0


@both
def test_a_deviation_that_depends_on_the_state(script):
    agent = script.Agent(2, np.array([-1.0]), np.array([1.0]), state_dependent_std=True)
    *inner, last = agent.actor_and_critic
    # Weights are (2, in, out), biases (2, 1, out), the actor's come first.
    weight, bias = last.weight.data[0], last.bias.data[0, 0]
    weight[:] = torch.tensor([0.0, 1.0])
    bias[:] = torch.tensor([0.25, 0.5])
    obs = torch.tensor([[0.0, 0.0], [2.0, -1.0]])
    policy = agent.policy(obs)
    assert policy.mean.flatten().tolist() == [0.25, 0.25]
    hidden = obs
    for layer in inner:
        hidden = (hidden @ layer.weight[0] + layer.bias[0]).tanh()
    torch.testing.assert_close(policy.scale.flatten(), (hidden.sum(-1) + 0.5).clamp(-5, 2).exp())
    # exp(2) = 7.389 at most, exp(-5) = 0.0067 at least.
    bias[1] = 100
    assert agent.policy(obs).scale.flatten().tolist() == pytest.approx([math.exp(2)] * 2)
    bias[1] = -100
    assert agent.policy(obs).scale.flatten().tolist() == pytest.approx([math.exp(-5)] * 2)


@both
@pytest.mark.parametrize("log_std", [-1.5, 0.0, 1.0])
def test_the_deviation_at_the_start_is_that_of_the_flag(script, log_std):
    envs = script.make_envs(script.Args(), 1, training=False)
    obs = 10 * torch.randn(1000, 3, generator=torch.Generator().manual_seed(1))
    for state_dependent_std, tolerance in ((False, 1e-6), (True, 0.1)):
        args = script.Args(log_std_init=log_std, state_dependent_std=state_dependent_std)
        policy = script.make_agent(args, envs, torch.device("cpu")).policy(obs)
        # The gain of the outputs is 0.01, and 64 numbers within +-1 are at most 8 long: at most 0.08 beside the bias.
        assert (policy.scale.log() - log_std).abs().max() < tolerance
        assert policy.mean.abs().max() < 0.1
    envs.close()


@both
@pytest.mark.parametrize(
    "flags", [{"state_dependent_std": True}, {"action_bounds": "tanh", "ent_coef": 0.01}, {"hidden_sizes": (8,)}]
)
def test_other_policies_train(script, tmp_path, flags):
    agent, scores = script.train(tiny(script, tmp_path, **flags))
    assert scores == [3, 3]
    sizes = [layer.weight.shape[-1] for layer in agent.actor_and_critic]
    assert sizes == [*flags.get("hidden_sizes", (64, 64)), 2 if "state_dependent_std" in flags else 1]
    assert ("log_std" in agent.state_dict()) != flags.get("state_dependent_std", False)


@both
def test_greedy_actions_are_means_and_sampled_ones_are_not(script):
    agent = squashing_agent(script, [-2.0], [2.0])
    agent.actor_and_critic[-1].bias.data[0].fill_(0.5)
    agent.actor_and_critic[-1].weight.data[0].zero_()
    obs = torch.zeros(1000, 2)
    # By hand: 2 tanh(0.5) = 0.924234.
    assert agent.act(obs, greedy=True).flatten().tolist() == pytest.approx([0.924234] * 1000, abs=1e-5)
    assert agent.act(obs, greedy=False).std() > 0.5


# ----- Networks and losses -----
@both
@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_the_batched_networks_are_two_separate_ones(script, state_dependent_std):
    torch.manual_seed(1)
    agent = script.Agent(5, -np.ones(3), np.ones(3), hidden_sizes=(16, 8), state_dependent_std=state_dependent_std)
    for parameter in agent.actor_and_critic.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    obs = torch.randn(40, 5)
    outputs = []
    for i in range(2):
        *inner, last = [(layer.weight[i].double(), layer.bias[i].double()) for layer in agent.actor_and_critic]
        hidden = agent.normalise(obs).double()
        for weight, bias in inner:
            hidden = (hidden @ weight + bias).tanh()
        outputs.append(hidden @ last[0] + last[1])
    policy, values = agent(obs)
    torch.testing.assert_close(policy.mean.double(), outputs[0][:, :3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values.double(), outputs[1][:, 0], rtol=1e-5, atol=1e-5)
    assert torch.equal(agent.value(obs), values)
    assert torch.equal(agent.policy(obs).mean, policy.mean)
    # Each loss moves its own network, and of the critic's last layer the first output alone.
    layers = list(agent.actor_and_critic)
    for own, loss in ((0, policy.mean.sum() + policy.scale.sum()), (1, values.sum())):
        gradients = torch.autograd.grad(loss, [layer.weight for layer in layers], retain_graph=True)
        assert all(gradient[own].any() and not gradient[1 - own].any() for gradient in gradients)
    assert gradients[-1][1, :, 0].all()
    assert not gradients[-1][1, :, 1:].any()


@both
def test_both_networks_start_orthogonal(script):
    agent = script.Agent(5, -np.ones(3), np.ones(3))
    *inner, last = [layer.weight for layer in agent.actor_and_critic]
    for weight in inner:
        for network in weight.double():
            rows = network if len(network) <= network.shape[1] else network.T
            torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows), dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(last[0].T @ last[0], 1e-4 * torch.eye(3), rtol=0, atol=1e-8)
    torch.testing.assert_close(last[1].norm(dim=0), torch.tensor([1.0, 0.0, 0.0]))
    assert not any(layer.bias.any() for layer in agent.actor_and_critic)


@both
def test_the_lean_normal_distribution_is_torchs(script):
    torch.manual_seed(1)
    for scale in (torch.rand(3) + 0.1, torch.rand(50, 3) + 0.1):
        loc, value = torch.randn(50, 3), torch.randn(50, 3)
        lean, right = script.LeanNormal(loc, scale), Normal(loc, scale)
        torch.testing.assert_close(lean.log_prob(value), right.log_prob(value), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lean.entropy(), right.entropy())
        assert torch.equal(lean.mean, right.mean)
        states = torch.get_rng_state()
        sample, rsample = lean.sample(), lean.rsample()
        torch.set_rng_state(states)
        assert torch.equal(sample, right.sample())
        assert torch.equal(rsample, right.rsample())


@both
@pytest.mark.parametrize(
    ("new_value", "old_value", "target", "clip_coef", "loss", "gradient"),
    [
        # Clipped to 0.2: max((1 - 2)^2, (0.2 - 2)^2) = max(1, 3.24). The clipped value wins and has no gradient.
        (1.0, 0.0, 2.0, 0.2, 1.62, 0.0),
        # Without clipping half of 1; the gradient is new - target.
        (1.0, 0.0, 2.0, None, 0.5, -1.0),
        # Moved past the target: max((1 - 0.5)^2, (0.2 - 0.5)^2) = max(0.25, 0.09). The unclipped value wins.
        (1.0, 0.0, 0.5, 0.2, 0.125, 0.5),
        # Downwards likewise: clipped to 2.8, max((1 - 2.5)^2, (2.8 - 2.5)^2) = 2.25.
        (1.0, 3.0, 2.5, 0.2, 1.125, -1.5),
        # Within the clip both are the same.
        (0.1, 0.0, 2.0, 0.2, 1.805, -1.9),
    ],
)
def test_critic_loss_of_one_sample(script, new_value, old_value, target, clip_coef, loss, gradient):
    new_values, values, returns = (torch.tensor([x], dtype=torch.float64) for x in (new_value, old_value, target))
    new_values.requires_grad_()
    result = script.critic_loss(new_values, values, returns, clip_coef)
    result.backward()
    assert result.shape == ()
    assert result.item() == pytest.approx(loss)
    assert new_values.grad.item() == pytest.approx(gradient)


@both
@pytest.mark.parametrize("clip_coef", [None, 0.2])
def test_critic_loss_and_its_gradient_are_those_of_the_definition(script, clip_coef):
    generator = torch.Generator().manual_seed(1)
    new_values, values, returns = torch.randn(3, 1000, generator=generator, dtype=torch.float64)
    new_values.requires_grad_()
    clipped = values + (new_values - values).clamp(-0.2, 0.2)
    errors = (new_values - returns).square(), (clipped - returns).square()
    right = 0.5 * (errors[0] if clip_coef is None else torch.max(*errors)).mean()
    loss = script.critic_loss(new_values, values, returns, clip_coef)
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(*(torch.autograd.grad(x, new_values)[0] for x in (loss, right)))


@both
def test_each_pass_over_a_batch_visits_each_sample_once_and_in_another_order(script):
    torch.manual_seed(0)
    batch = [torch.arange(64), torch.arange(64).unsqueeze(-1) * 10.0]
    pieces = list(script.minibatches(batch, 16, 3))
    assert [x.shape for x, _ in pieces] == [(16,)] * 12
    assert all(torch.equal(x * 10.0, y[:, 0]) for x, y in pieces)
    passes = [torch.cat([x for x, _ in pieces[k : k + 4]]).tolist() for k in (0, 4, 8)]
    for order in passes:
        assert sorted(order) == list(range(64)) != order
    assert passes[0] != passes[1] != passes[2] != passes[0]
    # Samples are mixed, not whole minibatches: no two hold the same samples.
    assert len({frozenset(x.tolist()) for x, _ in pieces}) == 12


@both
def test_the_optimizer_steps_the_networks_own_tensors(script, tmp_path, monkeypatch):
    """Resumed or not: what an update leaves in the checkpoint's networks is what its one vector of parameters holds."""
    vectors = []
    adam = torch.optim.Adam

    def noting(parameters, **kwargs):
        vectors.extend(parameters)
        return adam(parameters, **kwargs)

    monkeypatch.setattr(torch.optim, "Adam", noting)
    agents = [script.train(tiny(script, tmp_path))[0]]
    agents.append(script.train(tiny(script, tmp_path, resume=str(only_run(tmp_path)), total_timesteps=192))[0])
    assert len(vectors) == 2
    for agent, vector in zip(agents, vectors, strict=True):
        assert torch.equal(torch.nn.utils.parameters_to_vector(agent.parameters()), vector)
    assert not torch.equal(*vectors)


@both
@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e6])
def test_gradients_are_clipped_to_their_common_length(script, tmp_path, monkeypatch, max_grad_norm):
    lengths = []
    step = torch.optim.Adam.step

    def noting(self):
        lengths.append(self.param_groups[0]["params"][0].grad.norm().item())
        return step(self)

    monkeypatch.setattr(torch.optim.Adam, "step", noting)
    script.train(tiny(script, tmp_path, max_grad_norm=max_grad_norm, total_timesteps=64))
    ((_, logged),) = scalars(only_run(tmp_path))["losses/grad_norm"]
    assert logged > 0.01
    assert (
        lengths == pytest.approx([1e-3] * 4, rel=1e-3)
        if max_grad_norm < 1
        else logged == pytest.approx(np.mean(lengths))
    )


# ----- Running statistics -----
@both
@given(
    data=st.lists(
        hnp.arrays(np.float32, st.tuples(st.integers(1, 7), st.just(3)), elements=st.floats(-1e3, 1e3, width=32)),
        min_size=1,
        max_size=5,
    )
)
def test_merged_statistics_equal_those_of_all_samples(script, data):
    statistics = script.RunningMeanStd((3,))
    for part in data:
        statistics.update(torch.from_numpy(part))
    samples = np.concatenate(data).astype(np.float64)
    assert statistics.count.item() == len(samples)
    np.testing.assert_allclose(statistics.mean.numpy(), samples.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(statistics.var.numpy(), samples.var(0), rtol=1e-9, atol=1e-6)


@both
def test_observations_are_scaled_by_their_statistics(script):
    agent = script.Agent(2, np.array([-1.0]), np.array([1.0]))
    obs = torch.tensor([[1.0, 100.0], [3.0, 300.0]])
    # Before any statistics observations stay as they are, within +-10.
    assert agent.normalise(obs).tolist() == [[1, 10], [3, 10]]
    agent.obs_statistics.update(obs)
    # Means 2 and 200, deviations 1 and 100.
    torch.testing.assert_close(agent.normalise(obs), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    torch.testing.assert_close(agent.normalise(torch.tensor([[50.0, 250.0]])), torch.tensor([[10.0, 0.5]]))
    plain = script.Agent(2, np.array([-1.0]), np.array([1.0]), norm_obs=False)
    plain.obs_statistics.update(obs)
    assert torch.equal(plain.normalise(obs), obs)


@both
@pytest.mark.parametrize("num_steps", [12, 5, 1])
def test_rewards_are_scaled_by_the_returns_of_whole_episodes(script, num_steps):
    """FAULTS 58: rewards 1, gamma 0.99, episodes of 2 steps: the returns are 1, 1.99, 1, 1.99, ..."""
    scaler = script.RewardScaler(num_envs=2, gamma=0.99)
    rewards, dones = torch.ones(12, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]]).repeat(6, 1)
    for start in range(0, 12, num_steps):
        scaled = scaler(rewards[start : start + num_steps], dones[start : start + num_steps])
    # FAULTS 56: 12 steps of 2 environments are 24 rewards.
    assert scaler.statistics.count.item() == 24
    assert scaler.statistics.mean.item() == pytest.approx(1.495)
    assert scaler.statistics.var.item() == pytest.approx(0.495**2)
    assert scaled.dtype == torch.float32
    assert scaled[-1].tolist() == pytest.approx([1 / 0.495] * 2)


@both
def test_environments_have_returns_of_their_own(script):
    scaler = script.RewardScaler(num_envs=2, gamma=0.5)
    # Returns by hand: environment 0 has 2, 1, 8.5 (no end), environment 1 has 4, 4 (ended before), 2.
    scaler(torch.tensor([[2.0, 4.0], [0.0, 4.0], [8.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    returns = np.array([2, 1, 8.5, 4, 4, 2])
    assert scaler.statistics.mean.item() == pytest.approx(returns.mean())
    assert scaler.statistics.var.item() == pytest.approx(returns.var())
    assert scaler.last_return.tolist() == [8.5, 2]


@both
def test_scaled_rewards_stay_within_10(script):
    scaler = script.RewardScaler(num_envs=1, gamma=0.0)
    rewards = torch.zeros(1000, 1)
    rewards[-1] = -1.0
    # Variance 0.001 - 0.001^2, deviation 0.0316: -31.6 unless cut.
    assert scaler(rewards, torch.zeros(1000, 1))[-1].item() == -10


@both
def test_statistics_count_every_observation_and_evaluation_leaves_them(script, tmp_path, monkeypatch):
    """FAULTS 06: 2 iterations of 64 steps; the evaluations between and after them count nothing."""
    agent, _ = script.train(tiny(script, tmp_path, eval_every=64, eval_episodes=10))
    assert agent.obs_statistics.count.item() == 128
    # Episodes have the observations 0, 1, 2; the 64 steps of an environment hold 22, 21 and 21 of them.
    raw = np.array([0, 1, 2] * 22)[:64]
    np.testing.assert_allclose(agent.obs_statistics.mean.numpy(), [raw.mean(), -raw.mean()], rtol=1e-12)
    np.testing.assert_allclose(agent.obs_statistics.var.numpy(), [raw.var()] * 2, rtol=1e-12)
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    checkpoint = load(only_run(tmp_path) / "latest.pt")
    assert checkpoint["reward_scaler"]["statistics.count"].item() == 128

    # As a resumed run and an evaluation see an observation.
    envs = script.make_envs(tiny(script, tmp_path), 1, training=False)
    loaded = script.make_agent(tiny(script, tmp_path), envs, torch.device("cpu"))
    script.load_weights(loaded, checkpoint["agent"], "latest.pt")
    with script.StopSignal() as stop:
        script.evaluate(loaded, envs, 10, 1, True, torch.device("cpu"), stop)
    envs.close()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    obs = torch.tensor([[1.7, -0.4]])
    torch.testing.assert_close(loaded.normalise(obs), agent.normalise(obs), rtol=0, atol=1e-6)
    right = (obs.numpy() - [[raw.mean(), -raw.mean()]]) / raw.std()
    np.testing.assert_allclose(loaded.normalise(obs).numpy(), right, atol=1e-6)


@both
def test_flags_switch_the_scaling_off(script, tmp_path, monkeypatch):
    targets = recorded(monkeypatch, script, "compute_gae")
    agent, _ = script.train(tiny(script, tmp_path, norm_obs=False, norm_reward=False))
    assert torch.equal(targets[0][0][0], torch.ones(32, 2))
    assert torch.equal(agent.normalise(torch.tensor([[5.0, 700.0]])), torch.tensor([[5.0, 700.0]]))


# ----- Time limits -----
@both
@pytest.mark.parametrize(
    ("end", "advantages"), [("Trunc", [1.74645, 0.9]), ("Term", [-7.5645, -9.0]), ("Both", [-7.5645, -9.0])]
)
def test_the_advantages_of_an_episode_of_two_steps(script, tmp_path, monkeypatch, end, advantages):
    """FAULTS 01 and 05: value 10 everywhere, rewards 1, gamma 0.99, lambda 0.95."""
    monkeypatch.setattr(script.Agent, "value", lambda self, obs: torch.full(obs.shape[:-1], 10.0))
    calls = recorded(monkeypatch, script, "compute_gae")
    args = tiny(
        script, tmp_path, env_id=f"small_envs:Line2{end}-v0", num_envs=1, num_steps=2, num_minibatches=1,
        total_timesteps=2, norm_reward=False, gamma=0.99, gae_lambda=0.95,
    )  # fmt: skip
    script.train(args)
    assert calls[0][1].flatten().tolist() == pytest.approx(advantages, abs=1e-5)


@both
def test_the_critic_sees_what_a_time_limit_cut_off(script, tmp_path, monkeypatch):
    storage = recorded(monkeypatch, script.VectorRollout, "empty")
    script.train(tiny(script, tmp_path, num_steps=4, num_minibatches=1, total_timesteps=8))
    rollout = storage[0][1]
    # Episodes of 3 steps; no pair (2 -> 0), which no transition made. The 4 steps shown are those of the one iteration.
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 0]
    assert rollout.next_obs[:, 0, 0].tolist() == [1, 2, 3, 1]
    assert rollout.dones[:, 0].tolist() == [0, 0, 1, 0]
    assert rollout.terminations.sum() == 0


# ----- Runs -----
@both
def test_the_same_seed_gives_the_same_weights_whatever_is_evaluated_and_saved(script, tmp_path):
    agent, scores = script.train(tiny(script, tmp_path / "a", env_id="Pendulum-v1"))
    other = tiny(script, tmp_path / "b", env_id="Pendulum-v1", eval_every=64, checkpoint_every=64, capture_video=True)
    again, same_scores = script.train(other)
    assert_same_weights(agent, again)
    assert scores == same_scores
    one, two = (scalars(only_run(tmp_path / name)) for name in "ab")
    timings = {"charts/SPS", "eval/return_mean", "eval/return_std", "eval/length_mean"}
    assert {tag: points for tag, points in one.items() if tag not in timings} == {
        tag: points for tag, points in two.items() if tag not in timings
    }
    assert len(list((only_run(tmp_path / "b") / "videos").glob("*.mp4"))) == 2
    different, _ = script.train(tiny(script, tmp_path / "c", env_id="Pendulum-v1", seed=2))
    assert not torch.equal(agent.log_std, different.log_std)


@both
def test_a_process_for_each_environment_gives_the_same_weights(script, tmp_path):
    agent, _ = script.train(tiny(script, tmp_path, env_id="Pendulum-v1"))
    other, _ = script.train(tiny(script, tmp_path, env_id="Pendulum-v1", vector="async"))
    assert_same_weights(agent, other)


@both
def test_a_logged_loss_is_the_mean_over_all_minibatches(script, tmp_path, monkeypatch):
    """FAULTS 16."""
    value_losses = recorded(monkeypatch, script, "critic_loss")
    changes = recorded(monkeypatch, script, "policy_change")
    script.train(tiny(script, tmp_path, total_timesteps=64, target_kl=1e6, learning_rate=0.01))
    logged = scalars(only_run(tmp_path))
    for tag, values in {
        "losses/value_loss": [result.detach() for _, result in value_losses],
        "losses/approx_kl": [result[1] for _, result in changes[:4]],
        "losses/old_approx_kl": [result[0] for _, result in changes[:4]],
        "losses/clipfrac": [result[2] for _, result in changes[:4]],
    }.items():
        assert len(values) == 4
        assert len(set(map(float, values))) > 1, tag
        ((_, got),) = logged[tag]
        assert got == pytest.approx(float(sum(values) / 4), rel=1e-4, abs=1e-7), tag


@both
def test_a_run_logs_what_the_contract_names(script, tmp_path):
    script.train(tiny(script, tmp_path, eval_every=64, learning_rate=0.01))
    logged = scalars(only_run(tmp_path))
    per_iteration = {
        *(f"losses/{name}" for name in script.LOSS_NAMES), "losses/explained_variance", "charts/learning_rate",
        "charts/SPS", "eval/return_mean", "eval/return_std", "eval/length_mean",
    }  # fmt: skip
    assert logged.keys() == per_iteration | {"charts/episodic_return", "charts/episodic_length"}
    for tag in per_iteration:
        assert [step for step, _ in logged[tag]] == [64, 128], tag
    # Episodes of 3 steps in 2 environments: 21 whole ones in 64 steps each, at steps 6, 6, 12, 12, ...
    assert [step for step, _ in logged["charts/episodic_return"]] == [6 * (1 + i // 2) for i in range(42)]
    assert {value for _, value in logged["charts/episodic_return"] + logged["charts/episodic_length"]} == {3}
    assert [value for _, value in logged["charts/learning_rate"]] == pytest.approx([0.01, 0.005])


@both
def test_a_resumed_run_goes_on_where_it_was(script, tmp_path, monkeypatch, capsys):
    """Training that is stopped in its third iteration and resumed has the counters and the rate of one in one go."""
    changes = {"total_timesteps": 256, "learning_rate": 0.01}
    script.train(tiny(script, tmp_path / "whole", **changes))
    # The 140th step over both environments is the 70th of each; the third iteration starts after 64 of each.
    monkeypatch.setenv("SIGNAL_AT", "70:SIGTERM")
    with pytest.raises(script.Interrupted):
        script.train(tiny(script, tmp_path / "cut", **changes))
    folder = only_run(tmp_path / "cut")
    saved = load(folder / "latest.pt")
    assert saved["counters"]["global_step"] == 128
    loaded = {}
    restore = script.restore

    def noting(checkpoint, path, counters, **modules):
        restore(checkpoint, path, counters, **modules)
        loaded.update({name: module.state_dict() for name, module in modules.items()})
        for name in ("agent", "reward_scaler"):
            for key, tensor in saved[name].items():
                assert torch.equal(tensor, loaded[name][key]), key

    monkeypatch.setattr(script, "restore", noting)
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--resume", str(folder), "--no-cuda"])
    script.main()
    assert loaded.keys() == {"agent", "reward_scaler", "optimizer"}
    one, two = (load(only_run(tmp_path / name) / "latest.pt") for name in ("whole", "cut"))
    for counter in ("global_step", "iteration", "updates"):
        assert one["counters"][counter] == two["counters"][counter], counter
    assert one["optimizer"]["param_groups"] == two["optimizer"]["param_groups"]
    assert one["agent"]["obs_statistics.count"] == two["agent"]["obs_statistics.count"] == 256
    whole, cut = (scalars(only_run(tmp_path / name)) for name in ("whole", "cut"))
    assert whole["charts/learning_rate"] == cut["charts/learning_rate"]


@both
def test_an_agent_file_is_evaluated_as_its_run(script, tmp_path, monkeypatch, capsys):
    script.train(tiny(script, tmp_path, env_id="Pendulum-v1"))
    content = load(only_run(tmp_path) / "latest.pt")
    for part in ("optimizer", "reward_scaler", "random_states"):
        del content[part]
    torch.save(content, tmp_path / "agent.pt")
    closing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")]
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--evaluate", str(tmp_path / "agent.pt"), "--no-cuda"])
    script.main()
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")] == closing
    status, text = failed(script, monkeypatch, capsys, "--resume", str(tmp_path / "agent.pt"))
    assert status == 2
    assert "it can be evaluated, not resumed" in text


# ----- Wrong input -----
@pytest.mark.filterwarnings("ignore:.*The environment Ant-v3 is out of date:DeprecationWarning")
@both
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--env-id", "CartPole-v1"], ["wants a Box of real actions, not Discrete(2)", "ppo_cartpole.py or the DQN"]),
        (["--env-id", "PongNoFrameskip-v4"], ["wants a Box of real actions, not Discrete(6)", "ppo_atari.py"]),
        (["--env-id", "CarRacing-v3"], ["wants vectors, not Box(0, 255, (96, 96, 3), uint8)", "FlattenObservation"]),
        (["--env-id", "Pendulum"], ["there is no environment of this id; the nearest: Pendulum-v1"]),
        (["--env-id=small_envs:LineUnbounded-v0", "--action-bounds=tanh"], ["--action-bounds tanh", "use clip"]),
        (["--env-id=small_envs:LineFixed-v0", "--action-bounds=tanh"], ["without two different bounds", "use clip"]),
        (["--env-id=small_envs:LineUndrawable-v0", "--capture-video"], ["error: the package that draws is missing"]),
        (["--env-id=Pendulun-v1", "--capture-video"], ["there is no environment of this id; the nearest: Pendulum-v1"]),
        (["--env-id", ":Pendulum-v1"], ["--env-id :Pendulum-v1: there is no module ''"]),
        (["--env-id", "Ant-v3"], ["error: ", "gymnasium-robotics"]),
        (["--hidden-sizes", "64", "0"], ["--hidden-sizes 64 0 must be 1 or more each"]),
        (["--num-minibatches", "3"], ["--num-minibatches 3 must divide num_envs * num_steps = 2048"]),
        (["--total-timesteps", "100"], ["--total-timesteps 100 must be at least num_envs * num_steps = 2048"]),
        (["--action-bounds", "wrap"], ["--action-bounds"]),
        (["--gamma", "1.5"], ["--gamma 1.5 must be a finite number"]),
    ],
    ids=lambda x: " ".join(x) if x[0].startswith("--") else "",
)  # fmt: skip
def test_what_a_wrong_use_gets(script, tmp_path, monkeypatch, capsys, flags, parts):
    monkeypatch.chdir(tmp_path)
    status, text = failed(script, monkeypatch, capsys, "--no-cuda", *flags)
    assert status == 2
    text = " ".join(text.replace("│", " ").split())
    for part in parts:
        assert part in text
    assert list(tmp_path.iterdir()) == []


@both
@pytest.mark.parametrize(
    ("what", "vector", "message"),
    [
        # The 50th step of each environment is the 100th of both together; the entry with index 1 is nan.
        ("Obs", "sync", "environment 0 gave observation[1] = nan at step 100"),
        ("Reward", "sync", "environment 0 gave reward = nan at step 100"),
        # Episodes end at the 51st step, the 102nd of both together, and the next one starts in that step.
        ("Final", "sync", "environment 0 gave final_observation[1] = nan at step 102"),
        ("Final", "async", "environment 0 gave final_observation[1] = nan at step 102"),
        ("Reset", "sync", "environment 0 gave observation[1] = nan at step 102"),
    ],
)
def test_a_number_that_is_none_is_told_with_its_place(script, tmp_path, monkeypatch, capsys, what, message, vector):
    args = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items() if not isinstance(value, bool)]
    flags = [f"--env-id=small_envs:LineNan{what}-v0", f"--run-dir={tmp_path}", "--checkpoint-every=64", "--no-cuda"]
    status, text = failed(script, monkeypatch, capsys, *args, *flags, f"--vector={vector}")
    assert (status, text) == (1, f"error: {message}\n")
    assert load(only_run(tmp_path) / "latest.pt")["counters"]["global_step"] == 64


@both
def test_a_number_that_is_none_in_an_evaluation_ends_the_run(script, tmp_path, monkeypatch, capsys):
    """Of 60 evaluation episodes each of 2 environments has 30, of 3 steps; the 50th step is the 2nd of one."""
    args = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items() if not isinstance(value, bool)]
    flags = ["--env-id=small_envs:LineNanReward-v0", f"--run-dir={tmp_path}", "--eval-episodes=60", "--eval-every=64"]
    status, text = failed(script, monkeypatch, capsys, *args, *flags, "--total-timesteps=64", "--no-cuda")
    assert (status, text) == (1, "error: environment 0 gave reward = nan at step 2 of an evaluation\n")
    assert not (only_run(tmp_path) / "best.pt").exists()


@both
def test_a_run_that_was_interrupted_in_its_only_evaluation_gets_its_best_checkpoint(script, tmp_path, monkeypatch):
    # In 64 steps of 2 environments none of them comes to 40; in 60 evaluation episodes of 3 steps both do.
    monkeypatch.setenv("SIGNAL_AT", "40:SIGTERM")
    with pytest.raises(script.Interrupted):
        script.train(tiny(script, tmp_path, total_timesteps=64, eval_episodes=60))
    folder = only_run(tmp_path)
    assert sorted(path.name for path in folder.glob("*.pt")) == ["latest.pt"]
    monkeypatch.setattr(sys, "argv", ["script", "--resume", str(folder), "--no-cuda"])
    script.main()
    best, latest = (load(folder / f"{name}.pt") for name in ("best", "latest"))
    assert best["counters"] == latest["counters"]
    assert torch.equal(best["agent"]["log_std"], latest["agent"]["log_std"])


# ----- RPO -----
@pytest.mark.parametrize("changes", [{}, {"action_bounds": "tanh"}, {"target_kl": 0.001}])
def test_without_noise_rpo_is_ppo_bit_for_bit(tmp_path, changes):
    common = {"env_id": "Pendulum-v1", "eval_every": 64, **changes}
    agent, scores = ppo_continuous.train(tiny(ppo_continuous, tmp_path / "ppo", **common))
    other, other_scores = rpo_continuous.train(tiny(rpo_continuous, tmp_path / "rpo", **common, rpo_alpha=0.0))
    assert_same_weights(agent, other)
    assert scores == other_scores
    one, two = (scalars(only_run(tmp_path / name)) for name in ("ppo", "rpo"))
    assert one.keys() == two.keys()
    for tag in one.keys() - {"charts/SPS"}:
        assert one[tag] == two[tag], tag


def test_with_noise_rpo_is_another_algorithm(tmp_path):
    agent, _ = rpo_continuous.train(tiny(rpo_continuous, tmp_path, env_id="Pendulum-v1", rpo_alpha=0.0))
    other, _ = rpo_continuous.train(tiny(rpo_continuous, tmp_path, env_id="Pendulum-v1", rpo_alpha=0.5))
    assert not torch.equal(agent.log_std, other.log_std)


@pytest.mark.parametrize("kind", [Normal, Laplace, Gumbel])
def test_the_noise_is_uniform_within_alpha_and_moves_only_the_mean(kind):
    """FAULTS 19: alpha 0.5, 1e6 draws, deviation 1 / sqrt(12) = 0.2887."""
    torch.manual_seed(1)
    policy = kind(torch.full((1_000_000, 1), 3.0), torch.tensor([0.7]))
    moved = rpo_continuous.perturb(policy, 0.5)
    assert type(moved) is kind
    noise = moved.loc - 3.0
    assert noise.min() >= -0.5
    assert noise.max() <= 0.5
    assert noise.mean().item() == pytest.approx(0, abs=0.002)
    assert noise.std().item() == pytest.approx(0.2887, abs=0.002)
    assert torch.equal(moved.scale, policy.scale)
    assert rpo_continuous.perturb(policy, 0.0) is policy


def test_noise_is_drawn_for_each_sample_and_dimension_and_keeps_the_type():
    policy = Normal(torch.zeros(4, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    noise = rpo_continuous.perturb(policy, 0.1).loc
    assert noise.dtype == torch.float64
    assert noise.unique().numel() == 12


def test_acting_and_evaluation_carry_no_noise(tmp_path, monkeypatch):
    storage = recorded(monkeypatch, rpo_continuous.VectorRollout, "empty")
    calls = recorded(monkeypatch, rpo_continuous, "perturb")
    before = []
    make_agent = rpo_continuous.make_agent

    def keep_copy(args, envs, device):
        agent = make_agent(args, envs, device)
        before.append({name: tensor.clone() for name, tensor in agent.state_dict().items()})
        return agent

    monkeypatch.setattr(rpo_continuous, "make_agent", keep_copy)
    args = tiny(rpo_continuous, tmp_path, total_timesteps=64, eval_every=64)
    agent, _ = rpo_continuous.train(args)
    # 2 epochs of 2 minibatches, and nothing else, drew noise.
    assert len(calls) == 4
    rollout = storage[0][1]
    agent.load_state_dict(before[0])
    with torch.no_grad():
        logprobs = torch.stack(
            [agent.logprob(agent.policy(obs), rollout.actions[t]) for t, obs in enumerate(rollout.obs)]
        )
    torch.testing.assert_close(rollout.logprobs, logprobs, rtol=1e-6, atol=1e-6)


def test_the_variant_perturbs_acting_too(tmp_path, monkeypatch):
    calls = recorded(monkeypatch, rpo_continuous, "perturb")
    changes = recorded(monkeypatch, rpo_continuous, "policy_change")
    rpo_continuous.train(tiny(rpo_continuous, tmp_path, total_timesteps=64, rpo_perturb_acting=True, target_kl=1e6))
    # 32 steps of acting, and 4 minibatches.
    assert len(calls) == 36
    assert changes[0][1][1].abs() < 1e-6


@pytest.mark.parametrize("acting", [False, True])
def test_noise_does_not_end_an_update(tmp_path, monkeypatch, acting):
    """FAULTS 20: with alpha 0.5 the noisy policy is about 0.5^2 / 6 = 0.04 away from the old one at once."""
    losses = recorded(monkeypatch, rpo_continuous, "policy_loss")
    changes = recorded(monkeypatch, rpo_continuous, "policy_change")
    args = tiny(
        rpo_continuous, tmp_path, learning_rate=1e-5, target_kl=0.01, total_timesteps=64, rpo_perturb_acting=acting
    )
    rpo_continuous.train(args)
    # One for each minibatch, and one for all of them together.
    assert len(changes) == 5
    for _, (_, approx_kl, clip_frac) in changes:
        assert approx_kl < 1e-4
        assert clip_frac == 0
    (new_logprobs, logprobs, *_), _ = losses[0]
    noisy = ((new_logprobs - logprobs).exp() - 1 - (new_logprobs - logprobs)).mean()
    assert noisy > 0.01


@pytest.mark.parametrize(("final", "alphas"), [(None, [0.4, 0.4, 0.4]), (0.0, [0.4, 0.2, 0.0]), (1.0, [0.4, 0.7, 1.0])])
def test_alpha_goes_linearly_to_its_final_value(tmp_path, monkeypatch, final, alphas):
    calls = recorded(monkeypatch, rpo_continuous, "perturb")
    rpo_continuous.train(tiny(rpo_continuous, tmp_path, total_timesteps=192, rpo_alpha=0.4, rpo_alpha_final=final))
    assert [args[1] for args, _ in calls] == pytest.approx([alpha for alpha in alphas for _ in range(4)])


def test_alpha_never_goes_below_0(tmp_path, monkeypatch):
    """In floating point 0.1 + (0 - 0.1) * 3 / 3 is less than 0."""
    calls = recorded(monkeypatch, rpo_continuous, "perturb")
    rpo_continuous.train(tiny(rpo_continuous, tmp_path, total_timesteps=256, rpo_alpha=0.1, rpo_alpha_final=0.0))
    assert [args[1] for args, _ in calls[::4]] == pytest.approx([0.1, 0.2 / 3, 0.1 / 3, 0.0])
    assert calls[-1][0][1] == 0


@pytest.mark.parametrize("name", ["normal", "laplace", "gumbel"])
@pytest.mark.parametrize("tanh", [False, True])
def test_densities_and_entropies_by_numerical_integration(name, tanh):
    agent = rpo_continuous.Agent(2, np.array([-0.5]), np.array([2.0]), tanh=tanh, distribution=name)
    agent.log_std.data.fill_(math.log(0.6))
    agent.actor_and_critic[-1].bias.data[0].fill_(0.3)
    agent.actor_and_critic[-1].weight.data[0].zero_()
    with torch.no_grad():
        policy = agent.policy(torch.zeros(1, 2))
        x = torch.linspace(-8, 12, 400_001).unsqueeze(-1)
        logprob = agent.logprob(policy, x).double()
    points = x.squeeze(-1).double()
    if tanh:
        points = -0.5 + 2.5 * (1 + points.tanh()) / 2
    assert torch.trapezoid(logprob.exp(), points).item() == pytest.approx(1, abs=2e-3)
    right = -torch.trapezoid(logprob.exp() * logprob, points).item()
    with torch.no_grad():
        entropy = agent.entropy(agent.policy(torch.zeros(200_000, 2))).mean().item()
        samples = agent.policy(torch.zeros(200_000, 2)).sample()
        mean = agent.act(torch.zeros(1, 2), greedy=True).item()
    assert entropy == pytest.approx(right, abs=0.02)
    # Means by hand: 0.3, for Gumbel 0.3 + 0.6 * 0.5772 = 0.6463; deviations 0.6, sqrt(2) 0.6, pi / sqrt(6) 0.6.
    center = {"normal": 0.3, "laplace": 0.3, "gumbel": 0.6463}[name]
    spread = {"normal": 0.6, "laplace": 0.8485, "gumbel": 0.7695}[name]
    assert samples.mean().item() == pytest.approx(center, abs=0.01)
    assert samples.std().item() == pytest.approx(spread, abs=0.01)
    assert mean == pytest.approx(-0.5 + 2.5 * (1 + math.tanh(center)) / 2 if tanh else center, abs=1e-3)


@pytest.mark.parametrize("name", ["laplace", "gumbel"])
def test_other_distributions_train(tmp_path, name):
    agent, scores = rpo_continuous.train(tiny(rpo_continuous, tmp_path, action_distribution=name))
    assert scores == [3, 3]
    assert all(tensor.isfinite().all() for tensor in agent.state_dict().values())


@both
def test_the_agent_alone_can_be_imported_and_used(script):
    """FAULTS 18: no name of the module's main block is needed, and the type is kept."""
    code = f"""
import numpy as np, torch
from {script.__name__} import Agent
agent = Agent(3, np.array([-1.0]), np.array([1.0]))
policy = agent.policy(torch.zeros(2, 3))
logprob = agent.logprob(policy, torch.zeros(2, 1))
assert logprob.shape == (2,) and logprob.dtype == torch.float32, logprob
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120, env=dict(os.environ))


def test_few_lines_make_ppo_into_rpo():
    """At most 40 changed lines, those for other distributions apart."""
    ppo, rpo = ((ROOT / f"{name}_continuous.py").read_text().splitlines() for name in ("ppo", "rpo"))
    changed = [line for line in difflib.ndiff(ppo, rpo) if line[:2] in ("+ ", "- ") and line[2:].strip()]
    others = [line for line in changed if any(word in line.lower() for word in ("distribution", "laplace"))]
    assert 20 < len(changed) - len(others) <= 40


# ----- Learning -----
def value_ratio(script, tmp_path, **changes):
    """Returns the critic's values of Pendulum's starts over the returns that the agent gets there without a limit."""
    args = tiny(
        script, tmp_path, env_id="small_envs:Pendulum20-v0", num_envs=16, num_steps=100, num_minibatches=16,
        update_epochs=10, total_timesteps=48_000, gamma=0.9, norm_reward=False, learning_rate=1e-3, clip_vloss=False,
        vf_coef=0.5, max_grad_norm=10.0, **changes,
    )  # fmt: skip
    agent, _ = script.train(args)
    make = functools.partial(gym.make, "Pendulum-v1", max_episode_steps=10**6)
    envs = gym.vector.SyncVectorEnv([make] * 100)
    obs, _ = envs.reset(seed=1)
    with torch.no_grad():
        values = agent.value(torch.from_numpy(obs))
        returns = np.zeros(100)
        # 0.9^100 is 0.00003.
        for t in range(100):
            obs, reward, *_ = envs.step(agent.act(torch.from_numpy(obs), greedy=False).numpy())
            returns += 0.9**t * reward
    envs.close()
    return values.mean().item() / returns.mean()


@both
def test_the_value_of_pendulum_is_that_without_its_time_limit(script, tmp_path):
    assert value_ratio(script, tmp_path) == pytest.approx(1, abs=0.15)


def test_the_value_of_pendulum_is_wrong_where_time_limits_are_ends(tmp_path, monkeypatch):
    right = ppo_continuous.compute_gae

    def without_the_rule(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
        return right(rewards, values, next_values, dones, dones, gamma, gae_lambda)

    monkeypatch.setattr(ppo_continuous, "compute_gae", without_the_rule)
    assert value_ratio(ppo_continuous, tmp_path) < 0.75


@both
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pendulum_is_learned(script, tmp_path, seed):
    """Random actions score about -1200, an agent that keeps the pendulum up about -150."""
    args = tiny(
        script, tmp_path, env_id="Pendulum-v1", seed=seed, num_envs=16, num_steps=128, num_minibatches=32,
        update_epochs=10, learning_rate=1e-3, total_timesteps=61_440, eval_episodes=50,
    )  # fmt: skip
    _, scores = script.train(args)
    assert np.mean(scores) > -400


@both
def test_defaults_are_those_of_pendulum(script):
    args = script.Args()
    assert (args.env_id, args.total_timesteps, args.threads) == ("Pendulum-v1", 200_000, 1)
    assert dataclasses.asdict(args).keys() >= {"hidden_sizes", "action_bounds", "norm_obs", "norm_reward"}
    assert importlib.import_module(script.__name__) is script
