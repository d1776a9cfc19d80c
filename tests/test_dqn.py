"""dqn_cartpole_vec.py, whose training dqn_balancing_plate.py shares: targets, exploration, known answers, time limits.

test_dqn_training.py has what all DQN scripts do alike.
"""

import inspect
import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from dqn_runs import memories_of, tiny, updates_of
from short_runs import assert_equal, command_line, failed, flags_of, load, only_run, scalars, spy
from torch import nn

import dqn_atari
import dqn_balancing_plate
import dqn_cartpole_vec as script

CPU = torch.device("cpu")


# ----- Targets and losses -----
NEXT_TARGET_Q = [[10.0, 3.0], [10.0, 3.0], [3.0, 10.0], [-4.0, -2.0]]
NEXT_Q = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [5.0, 1.0]]


@pytest.mark.parametrize(
    ("next_q", "epsilon", "targets"),
    [
        # The largest of the target network: 1 + 0.99 * 10 = 10.9; nothing after a termination; 0 + 9.9; 2 - 1.98.
        (NEXT_TARGET_Q, 0.0, [10.9, 1.0, 9.9, 0.02]),
        # Action 1, 1, 1, 0 is picked by the other network: 1 + 2.97; a termination; 0 + 9.9; 2 - 3.96.
        (NEXT_Q, 0.0, [3.97, 1.0, 9.9, -1.96]),
        # 0.6 of the largest and 0.4 of the mean, 6.5 and -3: 0.6 * 10 + 0.4 * 6.5 = 8.6, and 0.6 * -2 - 1.2 = -2.4.
        (NEXT_TARGET_Q, 0.4, [1 + 0.99 * 8.6, 1.0, 0.99 * 8.6, 2 - 0.99 * 2.4]),
        # 0.6 * 3 + 2.6 = 4.4, 8.6 as above, and 0.6 * -4 - 1.2 = -3.6.
        (NEXT_Q, 0.4, [1 + 0.99 * 4.4, 1.0, 0.99 * 8.6, 2 - 0.99 * 3.6]),
    ],
    ids=["plain", "double", "plain epsilon-greedy", "double epsilon-greedy"],
)
def test_targets(next_q, epsilon, targets):
    rewards, terminations = torch.tensor([1.0, 1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    got = script.td_targets(rewards, terminations, torch.tensor(next_q), torch.tensor(NEXT_TARGET_Q), 0.99, epsilon)
    torch.testing.assert_close(got, torch.tensor(targets))


def linear(weight, bias):
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor(weight).unsqueeze(-1))
        network.bias.copy_(torch.tensor(bias))
    return network


def two_transitions():
    return script.Batch(
        obs=torch.tensor([[1.0], [2.0]]),
        next_obs=torch.tensor([[2.0], [3.0]]),
        actions=torch.tensor([0, 1]),
        rewards=torch.tensor([1.0, -1.0]),
        terminations=torch.tensor([0.0, 1.0]),
    )


@pytest.mark.parametrize(
    ("epsilon", "double", "loss", "value", "gradient"),
    [
        # Q(1) = [1, 0.5], Q(2) = [2, 1.5]: the actions 0 and 1 are worth 1 and 1.5, on average 1.25.
        # Target network at 2: [2, 4]; so 1 + 0.5 * 4 = 3, and -1 after the termination. Errors -2 and 2.5.
        # Half of the gradient 2 * error / 2 goes to each weight times its observation: -2 * 1 and 2.5 * 2.
        (0, False, "mse", (4 + 6.25) / 2, [-2.0, 5.0]),
        # Half of 1.5 and of 2; the gradients of single errors are cut to -1 and 1.
        (0, False, "huber", (1.5 + 2.0) / 2, [-0.5, 1.0]),
        # The learning network picks action 0 at 2: 1 + 0.5 * 2 = 2. Errors -1 and 2.5.
        (0, True, "mse", (1 + 6.25) / 2, [-1.0, 5.0]),
        (0, True, "huber", (0.5 + 2.0) / 2, [-0.5, 1.0]),
        # Half of what follows is the mean, 3: 1 + 0.5 * 3.5 = 2.75 and 1 + 0.5 * 2.5 = 2.25. Errors -1.75 and -1.25.
        (0.5, False, "mse", (1.75**2 + 6.25) / 2, [-1.75, 5.0]),
        (0.5, True, "mse", (1.25**2 + 6.25) / 2, [-1.25, 5.0]),
    ],
)
def test_the_loss_of_linear_networks(epsilon, double, loss, value, gradient):
    q_network, target_network = linear([1.0, 1.0], [0.0, -0.5]), linear([1.0, 1.0], [0.0, 2.0])
    got, mean_q = script.q_learning_loss(q_network, target_network, two_transitions(), 0.5, epsilon, double, loss)
    assert got.item() == pytest.approx(value)
    assert mean_q.item() == pytest.approx(1.25)
    assert not mean_q.requires_grad
    got.backward()
    assert q_network.weight.grad.flatten().tolist() == pytest.approx(gradient)
    assert target_network.weight.grad is None
    assert target_network.bias.grad is None
    if not epsilon:  # the text of its own that scripts for images have
        got, mean_q = dqn_atari.q_learning_loss(q_network, target_network, two_transitions(), 0.5, double, loss)
        assert (got.item(), mean_q.item()) == (pytest.approx(value), pytest.approx(1.25))


def test_double_dqn_picks_the_next_action_by_what_the_action_led_to():
    """At 1 the learning network values the actions 2 and 1, at 3, to which that led, 2 and 3: it picks action 1.

    The target network has 10 and 4 everywhere: 1 + 0.5 * 4 = 3, an error of 1. Action 0 would give 6, an error of 4.
    """
    columns = {"obs": [[1.0]], "next_obs": [[3.0]], "actions": [0], "rewards": [1.0], "terminations": [0.0]}
    batch = script.Batch(**{name: torch.tensor(x) for name, x in columns.items()})
    q_network, target_network = linear([0.0, 1.0], [2.0, 0.0]), linear([0.0, 0.0], [10.0, 4.0])
    for double, error in ((True, 1), (False, 4)):
        loss, _ = script.q_learning_loss(q_network, target_network, batch, 0.5, 0, double, "mse")
        assert loss.item() == pytest.approx(error**2)


@pytest.mark.parametrize("double", [False, True])
def test_no_gradient_flows_through_the_targets(double):
    """With one network for both the targets move with it, but are taken as constants."""
    network = linear([1.0, 1.0], [0.0, -0.5])
    loss, _ = script.q_learning_loss(network, network, two_transitions(), 0.5, 0, double, "mse")
    loss.backward()
    # Targets 1 + 0.5 * 2 = 2 and -1, errors -1 and 2.5. Through the first target 0.5 * 2 * 1 would be added.
    assert network.weight.grad.flatten().tolist() == pytest.approx([-1.0, 5.0])
    assert network.bias.grad.tolist() == pytest.approx([-1.0, 2.5])


def test_a_target_network_follows_by_a_share_or_becomes_a_copy():
    q_network, target_network = linear([1.0, -3.0], [0.1, 7e-5]), linear([2.0, 5.0], [0.3, 1e6])
    before = deepcopy(q_network.state_dict())
    script.update_target(q_network, target_network, 0.25)
    assert target_network.weight.flatten().tolist() == pytest.approx([1.75, 3.0])
    assert target_network.bias.tolist() == pytest.approx([0.25, 750_000.0])
    script.update_target(q_network, target_network, 1.0)
    assert_equal(dict(target_network.state_dict()), dict(q_network.state_dict()))
    assert_equal(dict(q_network.state_dict()), dict(before))
    # A copy and not the same.
    assert q_network.weight.data_ptr() != target_network.weight.data_ptr()


# ----- Exploration -----
@pytest.mark.parametrize(
    ("start", "end", "fraction", "epsilons"),
    [
        (1.0, 0.05, 0.5, [1.0, 0.81, 0.62, 0.43, 0.24, 0.05, 0.05, 0.05, 0.05, 0.05]),
        (1.0, 0.05, 0.0, [0.05] * 10),
        # Upwards, and over a time that is no whole number of turns.
        (0.0, 1.0, 0.25, [0.0, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_epsilon_goes_straight_from_start_to_end_and_stays(tmp_path, monkeypatch, start, end, fraction, epsilons):
    """10 turns of 2 steps, of which each takes the epsilon of the step that it starts from."""
    used = []
    spy(monkeypatch, script, "epsilon_greedy", lambda _, epsilon: used.append(epsilon))
    changes = {"start_e": start, "end_e": end, "exploration_fraction": fraction, "learning_starts": 0}
    script.train(tiny(script, tmp_path, total_timesteps=20, **changes))
    # Greedy evaluations follow.
    assert used[:10] == pytest.approx(epsilons)


def test_each_environment_explores_for_itself():
    """10,000 environments, epsilon 0.5 and 5 actions, of which 3 is best: it is taken by 0.5 + 0.5 / 5 = 60 %."""
    torch.manual_seed(0)
    q_values = torch.tensor([0.0, 1.0, 2.0, 9.0, -1.0]).expand(10_000, 5)
    counts = torch.bincount(script.epsilon_greedy(q_values, 0.5), minlength=5)
    # 6,000 with a deviation of 49; the other four have 1,000 each, with a deviation of 30.
    assert counts[3].item() == pytest.approx(6000, abs=5 * 49)
    assert counts[[0, 1, 2, 4]].tolist() == pytest.approx([1000] * 4, abs=5 * 30)


def test_epsilon_0_is_greedy_and_1_is_uniform():
    torch.manual_seed(0)
    q_values = torch.randn(10_000, 4)
    assert torch.equal(script.epsilon_greedy(q_values, 0.0), q_values.argmax(-1))
    actions = script.epsilon_greedy(q_values, 1.0)
    assert torch.bincount(actions, minlength=4).tolist() == pytest.approx([2500] * 4, abs=5 * 44)
    # Whatever the values say: a quarter agrees by chance.
    assert (actions == q_values.argmax(-1)).sum().item() == pytest.approx(2500, abs=5 * 44)


def new_agent(env_id, **changes):
    args = script.Args(env_id=env_id, **changes)
    torch.manual_seed(0)
    with script.closing(script.make_envs(args, 1)) as envs:
        return script.Agent(args, envs)


def test_a_network_acts_greedily_or_with_its_epsilon():
    agent, obs = new_agent("CartPole-v1", hidden_sizes=(4,), end_e=0.2), torch.zeros(4000, 4)
    with torch.no_grad():
        best = agent(obs).argmax(-1)
        assert torch.equal(agent.act(obs, greedy=True), best)
        # Half of the random actions are the best one: 10 % of 4,000 differ, with a deviation of 19.
        assert (agent.act(obs, greedy=False) != best).sum().item() == pytest.approx(400, abs=5 * 19)


def test_hidden_layers_are_those_asked_for():
    agent = new_agent("Acrobot-v1", hidden_sizes=(5, 7))
    assert [tuple(x.shape) for x in agent.parameters()] == [(5, 6), (5,), (7, 5), (7,), (3, 7), (3,)]
    assert [tuple(x.shape) for x in new_agent("Acrobot-v1", hidden_sizes=()).parameters()] == [(3, 6), (3,)]
    # Numbers of other types are taken as float32.
    torch.testing.assert_close(agent(torch.ones(1, 6, dtype=torch.float64)), agent(torch.ones(1, 6)))


def test_the_story_of_both_scripts_is_the_same():
    """So what is tested on one of them holds for the other, but for what makes an agent of the plate the best one."""
    for name in ("train", "make_envs", "Agent"):
        one, other = (inspect.getsource(getattr(x, name)) for x in (script, dqn_balancing_plate))
        ranked = "evaluation = {}\n                    run.keep_best(evaluation, quality(evaluation))"
        evaluate = "evaluate(agent, args, args.seed + 10_000, device)"
        other = other.replace(ranked.format(evaluate), f"run.keep_best({evaluate})")
        assert one == other.replace("run.keep_best(evaluation, quality(evaluation))", "run.keep_best(evaluation)"), name
    assert inspect.getsource(script.Args.check) == inspect.getsource(dqn_balancing_plate.Args.check)


# ----- When updates happen -----
@pytest.mark.parametrize(
    ("num_envs", "total", "starts", "global_step", "updates", "copies"),
    [
        # 4 steps at a time meet multiples of 10 only each fifth turn: `step % 10 == 0` would give 20 updates.
        (4, 400, 0, 400, 40, 4),
        # 133 turns of 3 end at 399; a modulo would give 13 updates.
        (3, 400, 0, 399, 39, 3),
        (4, 300, 100, 300, 20, 2),
        (32, 600, 0, 576, 57, 5),
    ],
)
def test_long_runs_have_exactly_the_updates_of_their_steps(
    tmp_path, monkeypatch, num_envs, total, starts, global_step, updates, copies
):
    copied = []
    spy(monkeypatch, script, "update_target", lambda *_: copied.append(1))
    changes = {"train_frequency": 10, "target_network_frequency": 100, "batch_size": 2, "learning_starts": starts}
    script.train(tiny(script, tmp_path, num_envs=num_envs, total_timesteps=total, **changes))
    checkpoint = load(only_run(tmp_path))
    got = checkpoint["counters"]["global_step"], updates_of(checkpoint), len(copied)
    assert got == (global_step, updates, copies)


# ----- What a run logs -----
@pytest.mark.parametrize(("double", "loss"), [(False, "huber"), (True, "mse")])
def test_updates_and_evaluations_do_what_the_flags_say(tmp_path, monkeypatch, double, loss):
    asked, taus, norms, seeds, step = set(), set(), [], [], torch.optim.Adam.step

    def noting(self, *args, **kwargs):
        norms.append(math.hypot(*(weights.grad.norm().item() for weights in self.param_groups[0]["params"])))
        return step(self, *args, **kwargs)

    spy(monkeypatch, script, "q_learning_loss", lambda *args: asked.add(args[3:]))
    spy(monkeypatch, script, "update_target", lambda *args: taus.add(args[2]))
    spy(monkeypatch, script, "evaluate", lambda agent, args, seed, *_: seeds.append(seed))
    monkeypatch.setattr(torch.optim.Adam, "step", noting)
    flags = {"gamma": 0.7, "target_e": 0.25, "tau": 0.3, "total_timesteps": 200, "eval_every": 200, "seed": 5}
    script.train(tiny(script, tmp_path, **flags, double=double, loss=loss))
    assert (asked, taus) == ({(0.7, 0.25, double, loss)}, {0.3})
    # The games that choose best.pt are others than those at the end.
    assert seeds == [10_005, 20_005]
    # The log has the gradients' length, and they are not scaled.
    logged = [value for _, value in scalars(only_run(tmp_path))["losses/grad_norm"]]
    assert logged[-1] == pytest.approx(np.mean(norms[-25:]), rel=1e-5)


# ----- Known answers -----
ANSWERS = {
    "num_envs": 4,
    "learning_starts": 64,
    "batch_size": 32,
    "buffer_size": 4000,
    "start_e": 1.0,
    "end_e": 1.0,
    "eval_episodes": 1,
    "loss": "mse",
}


def q_of(agent, number):
    """Returns the values of both actions where the vector is [number]."""
    with torch.no_grad():
        return agent(torch.tensor([[float(number)]]))[0].tolist()


def test_the_values_of_a_single_step_are_its_rewards(tmp_path):
    """Of [1] action 1 pays 1, of [0] action 0 does, and nothing follows: gamma plays no part."""
    own = {"hidden_sizes": (32,), "learning_rate": 1e-2}
    changes = {"total_timesteps": 1200, "target_network_frequency": 20, "gamma": 0.99}
    agent, scores = script.train(tiny(script, tmp_path, "RightAction", **{**ANSWERS, **own, **changes}))
    assert scores.tolist() == [1.0]
    assert q_of(agent, 1) == pytest.approx([0, 1], abs=0.1)
    assert q_of(agent, 0) == pytest.approx([1, 0], abs=0.1)


def test_a_reward_of_1_for_ever_is_worth_1_over_1_minus_gamma_across_time_limits(tmp_path):
    """4 steps that look all the same, cut by a time limit: 1 / (1 - 0.8) = 5; 2.5 if that were an end."""
    own = {"hidden_sizes": (), "learning_rate": 2e-2, "anneal_lr": False}
    # 40 copies, after which 0.8^40 = 0.0001 of the first error is left.
    changes = {"total_timesteps": 1664, "target_network_frequency": 40, "gamma": 0.8}
    agent, _ = script.train(tiny(script, tmp_path, "ConstantTrunc", **{**ANSWERS, **own, **changes}))
    assert q_of(agent, 1) == pytest.approx([5, 5], abs=0.25)


@pytest.mark.parametrize(("end", "last_value"), [("Trunc", 10.9), ("Term", 1.0)])
def test_the_target_of_a_last_step_is_10_9_where_time_ran_out_and_1_where_the_task_ended(
    tmp_path, monkeypatch, end, last_value
):
    """Where the observation is [k] and all values are 10, a step that pays 1 is worth 1 + 0.99 * 10, or 1 at an end."""
    memories = memories_of(script, monkeypatch)
    changes = {"total_timesteps": 14, "learning_starts": 13, "train_frequency": 100}
    script.train(tiny(script, tmp_path, f"Ramp3{end}", **changes))
    batch = memories[0].sample(500, CPU)
    tens = torch.full((500, 2), 10.0)
    targets = script.td_targets(batch.rewards, batch.terminations, tens, tens, 0.99, 0)
    found = {(int(a), int(b), round(c, 4)) for a, b, c in zip(batch.obs, batch.next_obs, targets.tolist(), strict=True)}
    assert found == {(0, 1, 10.9), (1, 2, 10.9), (2, 3, last_value)}


# ----- Environments -----
def test_a_memory_never_gives_what_the_environments_did_not_make(tmp_path, monkeypatch):
    """Each batch of a run, whose memory is overwritten many times: of [k] follows [k + 1], and [3] ends the task."""
    batches, sample = [], script.ReplayBuffer.sample

    def checking(self, *args):
        batch = sample(self, *args)
        batches.append(set(zip(*(x.flatten().tolist() for x in batch), strict=True)))
        return batch

    monkeypatch.setattr(script.ReplayBuffer, "sample", checking)
    script.train(tiny(script, tmp_path, "Ramp3Term", buffer_size=40, num_envs=3, batch_size=64))
    # Of the steps 41 to 399 each 4th.
    assert len(batches) == 89
    assert set().union(*batches) == {(k, k + 1, action, 1, k == 2) for k in range(3) for action in range(2)}


@pytest.mark.parametrize(
    ("max_episode_steps", "length"),
    [
        # The limit that is registered, a shorter one, a longer one, and none but that of evaluations.
        (None, 7),
        (5, 5),
        (9, 9),
        (0, 30),
    ],
)
def test_the_time_limit_is_the_registered_one_or_that_of_the_flag(tmp_path, monkeypatch, max_episode_steps, length):
    monkeypatch.setattr(script, "EVAL_MAX_STEPS", 30)
    memories = memories_of(script, monkeypatch)
    args = tiny(script, tmp_path, "RampLimit7", total_timesteps=100, max_episode_steps=max_episode_steps)
    _, scores = script.train(args)
    assert scores.tolist() == [length, length]
    logged = scalars(only_run(tmp_path))
    assert logged["eval/length_mean"] == [(100, length)]
    # 50 turns of training.
    ends = [2 * length * k for k in range(1, 50 // length + 1) for _ in range(2)]
    assert logged["charts/episodic_length"] == [(step, length) for step in ends]
    # A time limit is no end of the task.
    assert memories[0].sample(1000, CPU).terminations.max() == 0


def test_cartpole_is_cut_off_at_exactly_the_limit(tmp_path):
    """Always pushing to one side a pole falls after 8 to 11 steps."""
    for limit, lengths in ((5, {5}), (0, {8, 9, 10, 11})):
        args = tiny(script, tmp_path, "CartPole-v1", max_episode_steps=limit, eval_episodes=10)
        agent = new_agent("CartPole-v1")
        for parameter in agent.parameters():
            nn.init.zeros_(parameter)
        evaluation = script.evaluate(agent, args, 1, CPU)
        assert set(evaluation["length"]) <= lengths
        assert evaluation["return"].tolist() == evaluation["length"].tolist()


# ----- Reproducibility -----
def test_evaluations_do_not_disturb_environments_that_draw_from_numpy(tmp_path):
    for name, changes in (("one", {}), ("other", {"eval_every": 100})):
        script.train(tiny(script, tmp_path / name, "GlobalDraw", **changes))
    one, other = (load(only_run(tmp_path / name)) for name in ("one", "other"))
    assert_equal(one["agent"], other["agent"])


# ----- Resumed runs -----
@pytest.mark.parametrize("env", ["NanLater", "RampNanObs", "RampNanReset"])
def test_a_number_that_is_none_ends_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, capsys, env):
    """These environments give nan from their 50th step on, which is a turn of 2, or in the reset that follows."""
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(script, tmp_path, env, checkpoint_every=60)))
    assert status == 1
    assert "finite" in text
    checkpoint = load(only_run(tmp_path))
    # What a reset gives is told only by the loss, once it is drawn from the memory.
    assert checkpoint["counters"]["global_step"] in ((60, 120) if env == "RampNanReset" else (60,))
    assert all(weights.isfinite().all() for weights in checkpoint["agent"].values())


# ----- What a wrong use gets -----
@pytest.mark.parametrize(("flags", "message"), [
    (["--target-e=1.5"], "--target-e 1.5 must be between 0 and 1"),
    (["--buffer-size=1"], "--buffer-size 1 must be between 2 and inf"),
    (["--hidden-sizes", "8", "0"], "--hidden-sizes 0 must be between 1 and 10,000"),
    (["--hidden-sizes", "1000000", "1000000"], "--hidden-sizes 1000000 must be between 1 and 10,000"),
    (["--max-episode-steps=-1"], "--max-episode-steps -1 must be between 0 and inf"),
    # The limits that depend on others replace none of those that do not.
    (["--num-envs=1", "--batch-size=0"], "--batch-size 0 must be between 1 and inf"),
    (["--total-timesteps=2", "--learning-starts=0", "--gamma=2"], "--gamma 2.0 must be between 0 and 1"),
    (["--vector=threads"], "--vector"),
    (["--env-id=CartPole"], "gymnasium has no 'CartPole'; the nearest ids: CartPole-v"),
    (["--env-id=Pendulum-v1"], "has Box (3,) float32 and Box (1,) float32; ppo_cartpole.py takes"),
    (["--env-id=small_envs:Ramp3Term-v0"], "has Box (1, 36, 36) uint8 and Discrete () int64; ppo_cartpole.py"),
    (["--env-id=FrozenLake-v1"], "has Discrete () int64 and Discrete () int64; ppo_cartpole.py"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")  # fmt: skip
def test_a_wrong_value_is_refused(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(script, tmp_path / "runs")), *flags)
    assert status == 2
    assert message in text
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_is_found_by_its_module(tmp_path, monkeypatch):
    """A user's module beside their own files, with an observation of another type."""
    (tmp_path / "my_ladder.py").write_text(
        "import gymnasium\nimport small_envs\n"
        "gymnasium.register('Mine-v0', lambda: gymnasium.wrappers.FlattenObservation(small_envs.Ramp(shape=(2, 2))))\n"
    )
    monkeypatch.chdir(tmp_path)
    command_line(
        script, monkeypatch, *flags_of(tiny(script, tmp_path / "runs", "my_ladder:Mine-v0", total_timesteps=100))
    )
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith("my_ladder-Mine-v0__dqn_cartpole_vec__1__")
    assert load(folder)["agent"]["layers.0.weight"].shape == (8, 4)
