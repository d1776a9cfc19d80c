"""dqn_atari.py: its network, known answers, and images; test_dqn_training.py has what all DQN scripts do alike."""

import math

import pytest
import small_envs
import torch
from dqn_runs import memories_of, tiny
from short_runs import failed, flags_of, only_run, scalars, spy

import dqn_atari

CPU = torch.device("cpu")


# ----- Network -----
def new_agent(env_id, **changes):
    args = dqn_atari.Args(env_id=env_id, num_envs=1, threads=1, **changes)
    torch.manual_seed(0)
    with dqn_atari.closing(dqn_atari.make_envs(args, 1)) as envs:
        return dqn_atari.Agent(args, envs)


def test_a_network_acts_greedily_or_with_its_epsilon():
    agent = new_agent("small_envs:Ramp3Trunc-v0", end_e=0.2)
    obs = torch.zeros(4000, 1, 36, 36, dtype=torch.uint8)
    with torch.no_grad():
        best = agent(obs).argmax(-1)
        assert torch.equal(agent.act(obs, greedy=True), best)
        # Half of the random actions are the best one: 10 % of 4,000 differ, with a deviation of 19.
        assert (agent.act(obs, greedy=False) != best).sum().item() == pytest.approx(400, abs=5 * 19)


def test_pixels_are_scaled_to_1_and_left_as_they_are():
    agent = new_agent("PongNoFrameskip-v4")
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    before = obs.clone()
    with torch.no_grad():
        values = agent(obs)
        right = agent.head(agent.trunk(obs.double().div(255).float()))
    assert values.shape == (3, 6)
    assert torch.equal(obs, before)
    torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5)


# ----- What a run logs -----
@pytest.mark.parametrize(("double", "loss"), [(False, "huber"), (True, "mse")])
def test_updates_and_evaluations_do_what_the_flags_say(tmp_path, monkeypatch, double, loss):
    asked, norms, seeds, step = set(), [], [], torch.optim.Adam.step

    def noting(self, *args, **kwargs):
        norms.append(math.hypot(*(weights.grad.norm().item() for weights in self.param_groups[0]["params"])))
        return step(self, *args, **kwargs)

    spy(monkeypatch, dqn_atari, "q_learning_loss", lambda *args: asked.add(args[3:]))
    spy(monkeypatch, dqn_atari, "evaluate", lambda agent, args, seed, *_: seeds.append(seed))
    monkeypatch.setattr(torch.optim.Adam, "step", noting)
    flags = {"gamma": 0.7, "max_grad_norm": 0.01, "total_timesteps": 200, "eval_every": 200, "seed": 5}
    dqn_atari.train(tiny(dqn_atari, tmp_path, **flags, double=double, loss=loss))
    assert asked == {(0.7, double, loss)}
    # The games that choose best.pt are others than those at the end.
    assert seeds == [10_005, 20_005]
    # Longer gradients were scaled down, and the log has their length before.
    assert max(norms) == pytest.approx(0.01, rel=1e-3)
    assert max(value for _, value in scalars(only_run(tmp_path))["losses/grad_norm"]) > 0.1


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
    "max_grad_norm": 1000.0,
}


def q_of(agent, number):
    """Returns the values of both actions where the image is `number` everywhere."""
    with torch.no_grad():
        return agent(torch.full((1, 1, 36, 36), number, dtype=torch.uint8))[0].tolist()


def test_the_values_of_a_single_step_are_its_rewards(tmp_path):
    """Bright pays 1 for action 1, dark for action 0, and nothing follows: gamma plays no part."""
    changes = {"total_timesteps": 1200, "target_network_frequency": 20, "gamma": 0.99}
    agent, scores = dqn_atari.train(tiny(dqn_atari, tmp_path, "RightAction", **{**ANSWERS, **changes}))
    assert scores.tolist() == [1.0]
    assert q_of(agent, 200) == pytest.approx([0, 1], abs=0.1)
    assert q_of(agent, 0) == pytest.approx([1, 0], abs=0.1)


def test_a_reward_of_1_for_ever_is_worth_1_over_1_minus_gamma_across_time_limits(tmp_path):
    """4 steps that look all the same, cut by a time limit: 1 / (1 - 0.8) = 5; 2.5 if that were an end."""
    # 40 copies, after which 0.8^40 = 0.0001 of the first error is left.
    changes = {"total_timesteps": 1664, "target_network_frequency": 40, "gamma": 0.8, "learning_rate": 3e-4}
    agent, _ = dqn_atari.train(tiny(dqn_atari, tmp_path, "ConstantTrunc", **{**ANSWERS, **changes}))
    assert q_of(agent, 128) == pytest.approx([5, 5], abs=0.25)


# ----- Environments -----
@pytest.mark.parametrize(("first_action", "own"), [("NegativeStart", {-1, 0}), ("LateStart", {5, 6})])
def test_actions_that_do_not_start_at_0(tmp_path, monkeypatch, first_action, own):
    """The environment gets actions of its space and refuses others; the memory and the network count from 0."""
    memories, taken = memories_of(dqn_atari, monkeypatch), set()
    spy(monkeypatch, small_envs.Ramp, "step", lambda self, action: taken.add(int(action)))
    args = tiny(dqn_atari, tmp_path, f"Ramp{first_action}", total_timesteps=200)
    agent, scores = dqn_atari.train(args)
    assert scores.tolist() == [3.0, 3.0]
    assert taken == own
    assert set(memories[0].sample(500, CPU).actions.tolist()) == {0, 1}
    assert len(q_of(agent, 0)) == 2


def test_a_memory_never_gives_what_the_environments_did_not_make(tmp_path, monkeypatch):
    """Each batch of a run, whose memory is overwritten many times, holds transitions that were stored before."""
    stored, batches = set(), []

    def note(self, obs, next_obs, action, reward, termination):
        rows = zip(obs, next_obs, action, reward, termination, strict=True)
        stored.update((a.tobytes(), b.tobytes(), int(c), float(d), bool(e)) for a, b, c, d, e in rows)

    sample = dqn_atari.ReplayBuffer.sample

    def checking(self, *args):
        batch = sample(self, *args)
        rows = zip(*(x.numpy() for x in batch), strict=True)
        assert {(a.tobytes(), b.tobytes(), int(c), float(d), bool(e)) for a, b, c, d, e in rows} <= stored
        batches.append(1)
        return batch

    spy(monkeypatch, dqn_atari.ReplayBuffer, "add", note)
    monkeypatch.setattr(dqn_atari.ReplayBuffer, "sample", checking)
    dqn_atari.train(tiny(dqn_atari, tmp_path, "Ramp3Term", buffer_size=40))
    assert len(batches) == 90
    # Of [k] follows [k + 1], with either action and its own end: no more and no less.
    assert len(stored) == 6


@pytest.mark.parametrize("backend", ["ale", "gymnasium"])
def test_breakout_trains(tmp_path, monkeypatch, backend):
    turns = []
    spy(monkeypatch, dqn_atari.ReplayBuffer, "add", lambda *_: turns.append(1))
    changes = {
        "backend": backend,
        "total_timesteps": 800,
        "learning_starts": 400,
        "train_frequency": 40,
        "start_e": 1,
        # Evaluated at random too, since a greedy policy that never serves would play for 27,000 steps.
        "end_e": 1,
        "eval_greedy": False,
    }
    args = tiny(
        dqn_atari, tmp_path, "BreakoutNoFrameskip-v4", batch_size=32, buffer_size=500, eval_episodes=1, **changes
    )
    agent, _ = dqn_atari.train(args)
    assert len(turns) == 400
    assert agent.head.out_features == 4
    logged = scalars(only_run(tmp_path))
    assert all(
        math.isfinite(value)
        for tag in ("losses/td_loss", "losses/q_values", "losses/grad_norm")
        for _, value in logged[tag]
    )
    # Whole games, of more steps than a life has: not one point for each lost life.
    assert 2 <= len(logged["charts/episodic_return"]) <= 8
    assert min(value for _, value in logged["charts/episodic_length"]) > 100


@pytest.mark.parametrize(
    ("env", "stack", "shape"),
    [("RampGrey", 4, (4, 84, 84)), ("RampColour", 4, (4, 84, 84)), ("Ramp3Term", 1, (1, 36, 36))],
)
def test_own_images_are_no_stack_of_frames(tmp_path, monkeypatch, env, stack, shape):
    memories = memories_of(dqn_atari, monkeypatch)
    dqn_atari.train(tiny(dqn_atari, tmp_path, env, total_timesteps=60))
    assert (memories[0].stack, memories[0].obs_shape) == (stack, shape)


# ----- What a wrong use gets -----
@pytest.mark.parametrize(("flags", "message"), [
    (["--max-grad-norm=0"], "--max-grad-norm 0.0 must be between 1e-12 and inf"),
    (["--buffer-size=31"], "--buffer-size 31 must be between 32 and inf"),
    (["--backend=envpool"], "--backend"),
    (["--env-id=CartPole-v1"], "--env-id CartPole-v1 with --env-kwargs {} cannot be used: it has Box (4,) float32 "),
    (["--env-id=Pong-v4"], "skips frames at random; use PongNoFrameskip-v4 or ALE/Pong-v5"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")  # fmt: skip
def test_a_wrong_value_is_refused(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, text = failed(dqn_atari, monkeypatch, capsys, *flags_of(tiny(dqn_atari, tmp_path / "runs")), *flags)
    assert status == 2
    assert message in text
    assert list(tmp_path.iterdir()) == []
