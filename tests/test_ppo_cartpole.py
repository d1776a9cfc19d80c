"""ppo_cartpole.py: its length, its formulas, what it logs, resumed runs, and that it learns."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT
from short_runs import assert_equal, command_line, failed, flags_of, load, only_run, resume, scalars, spy

import ppo_atari
import ppo_cartpole as script

# 64 steps an iteration in 2 minibatches, twice over: 4 updates an iteration; 3 iterations.
TINY = {
    "env_id": "small_envs:VectorRamp3Trunc-v0",
    "num_envs": 2,
    "num_steps": 32,
    "num_minibatches": 2,
    "update_epochs": 2,
    "total_timesteps": 192,
    "learning_rate": 1e-3,
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "eval_episodes": 2,
    "eval_every": 0,
    "checkpoint_every": 0,
    "threads": 1,
    "cuda": False,
    "progress": False,
}


def tiny(run_dir, env="VectorRamp3Trunc", **changes):
    env_id = env if "-" in env else f"small_envs:{env}-v0"
    return script.Args(**{**TINY, "env_id": env_id, "run_dir": str(run_dir), **changes})


def test_what_is_to_be_read_is_short():
    text = (ROOT / "ppo_cartpole.py").read_text()
    assert text[: text.index("# ----- Bookkeeping -----")].count("\n") <= 300


# ----- Formulas -----
def test_advantages_by_hand():
    """Gamma 0.5, lambda 0.5, all values 1, all rewards 1, backwards with 0.25 times the tail.

    Environment 0: the last step is cut off, delta 1 + 0.5 - 1 = 0.5; before it 0.5 + 0.25 * 0.5 = 0.625; the first
    step terminated: delta 1 - 1 = 0, and the sum stops. Environment 1 never ends, but for the middle step's time limit:
    0.5; 0.5; 0.5 + 0.25 * 0.5.
    """
    ones = torch.ones(3, 2)
    terminations = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    dones = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    got = script.gae_advantages(ones, ones, ones, (terminations, dones), 0.5, 0.5)
    assert got.tolist() == [[0.0, 0.625], [0.625, 0.5], [0.5, 0.5]]


def test_advantages_are_those_of_the_other_scripts():
    generator = torch.Generator().manual_seed(1)
    rewards, values, next_values = torch.randn(3, 17, 5, generator=generator)
    terminations, truncations = (torch.rand(2, 17, 5, generator=generator) < 0.2).float()
    dones = torch.maximum(terminations, truncations)
    got = script.gae_advantages(rewards, values, next_values, (terminations, dones), 0.97, 0.9)
    assert torch.equal(got, ppo_atari.compute_gae(rewards, values, next_values, terminations, dones, 0.97, 0.9))


def test_a_new_policy_is_near_uniform_and_a_network_of_its_own():
    torch.manual_seed(1)
    agent = script.Agent(3, 4)
    obs = torch.randn(100, 3)
    assert (agent.policy(obs).probs - 0.25).abs().max() < 0.02
    assert agent.value(obs).shape == (100,)
    agent.value(obs).sum().backward()
    assert all(weights.grad is None for weights in agent.actor.parameters())
    assert all(weights.grad is not None for weights in agent.critic.parameters())


def test_actions_are_the_most_probable_ones_or_sampled():
    agent = script.Agent(1, 3)
    with torch.no_grad():
        for weights in agent.actor.parameters():
            weights.zero_()
        agent.actor[-1].bias.copy_(torch.tensor([0.2, 0.5, 0.3]).log())
    obs = torch.zeros(10_000, 1, dtype=torch.float64)
    assert (agent.act(obs, greedy=True) == 1).all()
    torch.manual_seed(1)
    shares = agent.act(obs, greedy=False).bincount(minlength=3) / 10_000
    # The deviation of a share is at most 0.005.
    assert shares.tolist() == pytest.approx([0.2, 0.5, 0.3], abs=0.02)


@pytest.mark.parametrize(
    ("window", "means"), [(1, [4.0, 2.0, 6.0, 8.0]), (2, [4.0, 3.0, 4.0, 7.0]), (9, [4.0, 3.0, 4.0, 5.0])]
)
def test_a_moving_average(window, means):
    assert script.moving_average(np.array([4.0, 2.0, 6.0, 8.0]), window).tolist() == means


# ----- Runs -----
def test_what_is_learned_from_is_what_the_environments_did(tmp_path, monkeypatch):
    """An episode shows 0, 1, 2 and ends with 3 by a time limit: nothing terminates, every third step ends."""
    given, valued = [], []
    spy(monkeypatch, script, "gae_advantages", lambda *args: given.append(args))
    spy(monkeypatch, script.Agent, "value", lambda self, obs: valued.append(obs))
    script.train(tiny(tmp_path, num_steps=6, num_minibatches=1, total_timesteps=12))
    rewards, _, _, (terminations, dones), gamma, gae_lambda = given[0]
    obs, next_obs = valued[:2]
    assert obs[:, 0].tolist() == [[0], [1], [2], [0], [1], [2]]
    assert next_obs[:, 1].tolist() == [[1], [2], [3], [1], [2], [3]]
    assert rewards.eq(1).all()
    assert not terminations.any()
    assert dones[:, 0].tolist() == [0, 0, 1, 0, 0, 1]
    assert (gamma, gae_lambda) == (0.9, 0.8)
    assert {x.dtype for x in (rewards, terminations, dones)} == {torch.float32}


def test_what_is_logged(tmp_path):
    script.train(tiny(tmp_path, eval_every=64))
    logged = scalars(only_run(tmp_path))
    losses = ["approx_kl", "clipfrac", "entropy", "explained_variance", "grad_norm", "old_approx_kl"]
    losses += ["policy_loss", "value_loss"]
    tags = [f"losses/{name}" for name in losses]
    tags += ["charts/SPS", "charts/episodic_length", "charts/episodic_return", "charts/learning_rate"]
    assert sorted(logged) == sorted([*tags, "eval/length_mean", "eval/return_mean", "eval/return_std"])
    for tag in ("losses/value_loss", "losses/explained_variance", "charts/SPS", "eval/return_mean"):
        assert [step for step, _ in logged[tag]] == [64, 128, 192], tag
    rates = [rate for _, rate in logged["charts/learning_rate"]]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    # Both environments end an episode in every third turn, at steps 6, 12, ...
    assert logged["charts/episodic_return"] == [(step, 3.0) for step in range(6, 193, 6) for _ in range(2)]
    # The policy starts near uniform over two actions.
    assert logged["losses/entropy"][0][1] == pytest.approx(math.log(2), abs=0.01)


def test_every_step_is_in_each_pass_once(tmp_path, monkeypatch):
    """2 passes of 2 minibatches over 64 samples, whose log-probabilities tell them apart."""
    minibatches = []
    spy(monkeypatch, script, "policy_loss", lambda new, old, *_: minibatches.append(old))
    script.train(tiny(tmp_path, "VectorRampLimit7", total_timesteps=64))
    assert [len(x) for x in minibatches] == [32, 32, 32, 32]
    first, second = (torch.cat(minibatches[i : i + 2]) for i in (0, 2))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)
    assert load(only_run(tmp_path))["counters"]["updates"] == 4


def test_the_same_seed_gives_the_same_run_whatever_is_evaluated_and_saved(tmp_path):
    runs = {
        "plain": {},
        "again": {},
        "evaluated": {"eval_every": 64, "eval_episodes": 3, "eval_greedy": False},
        "saved": {"checkpoint_every": 64},
        "plot": {"plot": True},
        "async": {"vector": "async"},
    }
    plain = None
    for name, changes in runs.items():
        torch.rand(3)
        script.train(tiny(tmp_path / name, "VectorRightAction", **changes))
        checkpoint, logged = load(only_run(tmp_path / name)), scalars(only_run(tmp_path / name))
        plain = plain or (checkpoint, logged)
        for part in ("agent", "optimizer"):
            assert_equal(checkpoint[part], plain[0][part], f"{name}: {part}")
        for tag, points in plain[1].items():
            if tag != "charts/SPS" and not tag.startswith("eval/"):
                assert logged[tag] == points, f"{name}: {tag}"
    script.train(tiny(tmp_path / "other", "VectorRightAction", seed=2))
    other = load(only_run(tmp_path / "other"))["agent"]
    assert not torch.equal(other["actor.0.weight"], plain[0]["agent"]["actor.0.weight"])


def test_a_plot_of_the_returns(tmp_path, monkeypatch, capsys):
    from matplotlib.axes import Axes

    lines = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *args, **kwargs: lines.append(args) or plot(self, *args, **kwargs))
    script.train(tiny(tmp_path, plot=True))
    folder = only_run(tmp_path)
    assert f"plot: {folder / 'returns.png'}\n" in capsys.readouterr().out
    assert (folder / "returns.png").read_bytes().startswith(b"\x89PNG")
    (steps, returns, _), (average_steps, average) = lines
    assert list(steps) == list(average_steps) == [step for step in range(6, 193, 6) for _ in range(2)]
    assert list(returns) == list(average) == [3.0] * 64


def test_a_plot_without_an_episode_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "EVAL_MAX_STEPS", 5)
    script.train(tiny(tmp_path, "VectorRampEndless", plot=True, total_timesteps=64))
    assert "plot: no episode has ended, there is nothing to draw\n" in capsys.readouterr().out
    assert not (only_run(tmp_path) / "returns.png").exists()


# ----- Resumed runs -----
def interrupt(monkeypatch, args, turn):
    """Trains until the first environment sends this process SIGTERM in a turn; returns the run folder."""
    monkeypatch.setenv("SIGNAL_AT", f"{turn}:SIGTERM")
    with pytest.raises(script.Interrupted) as exit_info:
        script.train(dataclasses.replace(args, env_id="small_envs:VectorSignalAt-v0"))
    assert exit_info.value.code == 143
    return only_run(args.run_dir)


def test_a_resumed_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """The signal comes in turn 70, the 6th of the third iteration, which is dropped."""
    script.train(tiny(tmp_path / "straight", "VectorSignalAt"))
    capsys.readouterr()
    folder = interrupt(monkeypatch, tiny(tmp_path / "cut"), 70)
    assert f"interrupted at step 128; go on with: python ppo_cartpole.py --resume {folder}\n" in capsys.readouterr().out
    stopped = load(folder)
    assert {name: stopped["counters"][name] for name in ("iteration", "global_step", "updates")} == {
        "iteration": 2, "global_step": 128, "updates": 8
    }  # fmt: skip
    resume(script, monkeypatch, folder)
    resumed, whole = load(folder), load(only_run(tmp_path / "straight"))
    for name in ("iteration", "global_step", "updates"):
        assert resumed["counters"][name] == whole["counters"][name]
    logged, logged_straight = scalars(folder), scalars(only_run(tmp_path / "straight"))
    assert logged["charts/learning_rate"] == logged_straight["charts/learning_rate"]
    assert logged["losses/policy_loss"][:2] == logged_straight["losses/policy_loss"][:2]
    assert [step for step, _ in logged["losses/policy_loss"]] == [64, 128, 192]


def test_a_finished_run_says_so_and_logs_nothing(tmp_path, monkeypatch, capsys):
    script.train(tiny(tmp_path, eval_every=64))
    folder = only_run(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")]
    assert of_run == ["eval: mean=3 std=0 min=3 max=3 episodes=2 mean_length=3"]
    resume(script, monkeypatch, folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "this run is finished, at step 192; a larger --total-timesteps goes on"
    assert [line for line in lines if line.startswith("eval:")] == of_run
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    resume(script, monkeypatch, folder, "--total-timesteps=256")
    assert load(folder)["counters"]["iteration"] == 4


def test_another_batch_size_is_refused(tmp_path, monkeypatch, capsys):
    script.train(tiny(tmp_path))
    flags = ("--resume", str(only_run(tmp_path)), "--num-envs=4", "--total-timesteps=1000", "--no-cuda")
    status, text = failed(script, monkeypatch, capsys, *flags)
    assert (status, text) == (
        2,
        "error: --num-envs times --num-steps, the batch size, must stay what it was in a resumed run\n",
    )


def test_an_agent_file_is_evaluated_as_its_run_but_not_resumed(tmp_path, monkeypatch, capsys):
    script.train(tiny(tmp_path / "run", "VectorRightAction", eval_greedy=False, eval_episodes=8))
    of_run = [x for x in capsys.readouterr().out.splitlines() if x.startswith(("eval:", "episode "))]
    content = load(only_run(tmp_path / "run"))
    path = tmp_path / "agent.pt"
    torch.save({name: content[name] for name in ("script", "format_version", "args", "counters", "agent")}, path)
    command_line(script, monkeypatch, "--evaluate", str(path), "--threads=1", "--no-cuda")
    assert [x for x in capsys.readouterr().out.splitlines() if x.startswith(("eval:", "episode "))] == of_run
    flags = ("--resume", str(path), "--total-timesteps=256", "--threads=1", "--no-cuda")
    status, text = failed(script, monkeypatch, capsys, *flags)
    assert status == 2
    assert "an agent file has no optimizer: it can be evaluated, not resumed" in text


# ----- Errors -----
@pytest.mark.parametrize(
    ("env", "message"),
    [
        # An environment's 50th step is step 100 of both; the episode of that one ends with the 51st.
        ("VectorRampNanObs", "environment 0 gave observation[0] = nan at step 100"),
        ("VectorRampNanReset", "environment 0 gave observation[0] = nan at step 102"),
    ],
)
def test_a_number_that_is_none_ends_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, capsys, env, message):
    args = tiny(tmp_path, env, checkpoint_every=64)
    status, text = failed(script, monkeypatch, capsys, *flags_of(args))
    assert status == 1
    assert text.startswith(f"error: {message}"), text
    assert load(only_run(tmp_path))["counters"]["global_step"] == 64


def test_weights_that_overflow_are_never_saved(tmp_path, monkeypatch, capsys):
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(tmp_path, learning_rate=1e38)))
    assert (status, text) == (1, "error: a loss is not finite at step 64; the run cannot go on\n")
    assert not (only_run(tmp_path) / "latest.pt").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env-id=Pendulum-v1"], "wants Discrete actions, not Box(-2.0, 2.0, (1,), float32); for a Box use ppo_cont"),
        (["--env-id=ALE/Pong-v5"], "this script wants a vector, not Box(0, 255, (210, 160, 3), uint8); for images"),
        (["--env-id=CartPole"], "--env-id CartPole: there is no environment of this id; the nearest: CartPole-v0"),
        (["--num-minibatches=3"], "--num-minibatches 3 must divide num_envs * num_steps = 64 into minibatches of 2"),
        (["--num-minibatches=64"], "--num-minibatches 64 must divide num_envs * num_steps = 64 into minibatches of 2"),
        (["--total-timesteps=63"], "--total-timesteps 63 must be at least num_envs * num_steps = 64, one iteration"),
        (["--clip-coef=0"], "--clip-coef 0.0 must be a finite number above 0"),
        (["--gamma=1.1"], "--gamma 1.1 must be a finite number at least 0 and at most 1"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path, monkeypatch, capsys, flags, message):
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(tmp_path / "runs")), *flags)
    assert status == 2
    assert message in text
    assert not (tmp_path / "runs").exists()


def test_a_rollout_larger_than_the_free_memory_is_refused(tmp_path, monkeypatch, capsys):
    """A step takes 2 observations of 1 number, 5 numbers more, of 4 bytes, and an action of 8: 36 bytes; 64 of them."""
    for free, fits in ((64 * 36, True), (64 * 36 - 1, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        args = tiny(tmp_path / str(fits), total_timesteps=64)
        if fits:
            script.train(args)
        else:
            status, text = failed(script, monkeypatch, capsys, *flags_of(args))
            assert status == 2
            assert "the storage takes 0.00 GiB, more than the 0.00 GiB that are free on cpu" in text


def test_a_plot_without_its_package_is_refused_before_the_run(tmp_path, monkeypatch, capsys):
    find_spec = script.importlib.util.find_spec
    without = {"matplotlib": lambda name: None}
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: without.get(name, find_spec)(name))
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(tmp_path / "runs", plot=True)))
    assert (status, text) == (2, "error: --plot needs a package that is missing: pip install matplotlib\n")
    assert not (tmp_path / "runs").exists()


# ----- Learning -----
@pytest.mark.parametrize(("end", "value"), [("Trunc", 10.0), ("Term", 2.304)])
def test_the_value_of_a_constant_reward_under_a_time_limit(tmp_path, end, value):
    """As test_learning.py has it: a reward of 1 for ever is worth 1 / (1 - 0.9), and a limit of 4 steps is no end."""
    args = tiny(
        tmp_path, f"VectorConstant{end}", num_steps=16, num_envs=4, total_timesteps=64 * 60, gae_lambda=0.95,
        learning_rate=3e-3, update_epochs=8, max_grad_norm=10.0, eval_episodes=1
    )  # fmt: skip
    agent, _ = script.train(args)
    with torch.no_grad():
        assert agent.value(torch.ones(1, 1)).item() == pytest.approx(value, rel=0.06)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_learned(tmp_path, seed):
    """Random play falls after 22 steps, a policy that leans to one side after 9."""
    args = script.Args(
        seed=seed, total_timesteps=25_600, eval_every=0, checkpoint_every=0, eval_episodes=20, progress=False,
        cuda=False, run_dir=str(tmp_path)
    )  # fmt: skip
    _, scores = script.train(args)
    assert len(scores) == 20
    assert sum(scores) / 20 >= 150
