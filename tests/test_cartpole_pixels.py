"""dqn_cartpole_pixels.py: what its frames show, that CartPole's state can be read from them, and other environments."""

import re
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from short_runs import assert_equal, command_line, failed, flags_of, load, only_run, resume, scalars, small_run
from torch import nn

import dqn_atari
import dqn_cartpole_pixels as script

sys.path.insert(0, str(ROOT / "benchmarks"))
import state_from_pixels

INK = 94
"""of CartPole's pole (202, 152, 101): 255 - 161, where 0.299 x 202 + 0.587 x 152 + 0.114 x 101 = 161.1"""
POLE = {"crop": (0.5, 0.6, 0.45, 0.55), "show_action": False, "stack": 1}
"""rows 200 to 239 and columns 270 to 329: of the cart nothing, of the upright pole its columns 295 to 305"""


def args_of(**changes):
    return script.Args(threads=1, cuda=False, **changes)


def shown(state, **changes):
    """Returns the frame (H, W) that shows a state of CartPole."""
    with script.make_env(args_of(**changes)) as env:
        env.reset(seed=1)
        env.unwrapped.state = np.array(state, float)
        return env.get_wrapper_attr("frame")(None)


# ----- Drawing -----
def test_cartpole_is_drawn_as_gymnasium_draws_it():
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=1)
    rng = np.random.default_rng(1)
    # From the centre to beyond both ends of an episode, where the cart leaves the picture.
    states = [np.zeros(4), *rng.uniform([-2.7, -1, -0.5, -1], [2.7, 1, 0.5, 1], (200, 4))]
    for state in states:
        env.unwrapped.state = state
        np.testing.assert_array_equal(script.draw_cartpole(state), env.render())
    env.close()


# ----- Frames -----
def test_the_crop_shows_the_pole_where_it_is():
    right = np.zeros((4, 60))
    right[:, 25:36] = INK
    np.testing.assert_array_equal(shown([0, 0, 0, 0], **POLE, resolution=(4, 60)), right)
    # 0.08 m are 10 of 600 pixels.
    np.testing.assert_array_equal(shown([0.08, 0, 0, 0], **POLE, resolution=(4, 60)), np.roll(right, 10, axis=1))


def test_a_smaller_frame_holds_means():
    """Of columns 290 to 299 the pole covers 5, of 300 to 309 6: grey means of 208 and 198.6."""
    assert shown([0, 0, 0, 0], **POLE, resolution=(1, 6)).tolist() == [[0, 0, 255 - 208, 255 - 199, 0, 0]]


def test_the_reference_line_is_black_and_three_pixels_wide():
    """Columns 299 to 301 of the picture are 29 to 31 of the crop."""
    frame = shown([1, 0, 0, 0], **POLE, resolution=(2, 60), reference_line=True)
    assert frame.tolist() == [[0] * 29 + [255] * 3 + [0] * 28] * 2


def test_the_default_crop_holds_the_pole_and_its_axle():
    """Nothing moves in the rows above 168; the cart's edge below 308 tells no more than the part above it."""
    upright = script.draw_cartpole(np.zeros(4))
    assert (upright[:168] == 255).all()
    assert (upright[168:308] != 255).any(axis=(1, 2)).sum() > 120
    np.testing.assert_array_equal(
        shown([0.3, 0, 0.1, 0]), shown([0.3, 0, 0.1, 0], crop=(168 / 400, 308 / 400, 0.0, 1.0))
    )


@pytest.mark.parametrize("first", [0, -1, 5])
def test_a_row_shows_the_action_and_a_stack_the_newest_frames_last(first):
    name = {0: "Ramp3Term", -1: "RampNegativeStart", 5: "RampLateStart"}[first]
    args = args_of(env_id=f"small_envs:{name}-v0", frame_skip=1, resolution=(2, 5), stack=3)
    with script.make_env(args) as env:
        start = env.reset(seed=1)[0]
        first_obs, second_obs = env.step(1)[0], env.step(0)[0]
    # It draws 40, 80, 120, and 0 is white. Of 5 columns the first action has 0 and 1, the second one 2, 3 and 4.
    frames = [[[255 - grey] * 5] * 2 for grey in (40, 80, 120)]
    rows = [[0] * 5, [0, 0, 255, 255, 255], [255, 255, 0, 0, 0]]
    empty, *seen = [[[0] * 5] * 3, *([*frame, row] for frame, row in zip(frames, rows, strict=True))]
    assert start.tolist() == [empty, empty, seen[0]]
    assert first_obs.tolist() == [empty, seen[0], seen[1]]
    assert second_obs.tolist() == seen


def test_an_action_is_repeated_until_the_episode_ends():
    """Three steps that pay 1 each are two decisions, of two steps and of one."""
    env = script.make_env(args_of(env_id="small_envs:Ramp3Term-v0", frame_skip=2, resolution=(2, 4)))
    env.reset(seed=1)
    (obs, *first), (_, *second) = env.step(0), env.step(1)
    assert [first[:3], second[:3]] == [[2.0, False, False], [1.0, True, False]]
    assert obs[-1, 0].tolist() == [255 - 120] * 4
    assert env.reset()[1] == {"whole_episode": (("return", 3.0), ("length", 2))}
    env.close()


def test_pictures_of_fractions_are_refused(monkeypatch):
    """From 0 to 1, which would all be one and the same byte."""
    monkeypatch.setattr("small_envs.Ramp.render", lambda self: np.full((36, 36, 3), 0.5))
    env = script.make_env(args_of(env_id="small_envs:Ramp3Term-v0"))
    with pytest.raises(script.UsageError, match="it draws no pictures of bytes"):
        env.reset(seed=1)


def test_differences_are_those_of_frames_that_follow_each_other():
    with script.closing(script.make_envs(args_of(stack=3, differences=True), 1)) as envs:
        agent = script.Agent(args_of(stack=3, differences=True), envs)
    agent.layers = nn.Identity()
    obs = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    torch.testing.assert_close(agent(obs), torch.tensor([[0.2, 0.8, 1.0]]))
    agent.differences = False
    torch.testing.assert_close(agent(obs), torch.tensor([[0.0, 0.2, 1.0]]))


# ----- What can be read from an observation -----
def test_the_state_can_be_read_from_an_observation_and_no_speed_without_the_action():
    """By the smallest network, one linear layer, in whole episodes that it has not seen."""
    policies, args = state_from_pixels.POLICIES, args_of()
    fitted = [state_from_pixels.observations(args, policy, 1000, 0, spread=True) for policy in policies]
    held_out = [state_from_pixels.observations(args, policy, 400, 100_000, spread=False) for policy in policies]
    shares = state_from_pixels.shares_explained(fitted, held_out)
    for policy, explained in zip(policies, shares, strict=True):
        assert (explained >= 0.98).all(), f"{policy}: {explained}"
    # An action changes the speed by 0.4 m/s, of which the picture that follows it shows half a pixel.
    pictures = [[(obs[:, :, :-1], states) for obs, states in parts] for parts in (fitted, held_out)]
    for _, speed, _, rate in state_from_pixels.shares_explained(*pictures):
        assert max(speed, rate) < 0.98


# ----- Training -----
class Linear(nn.Module):
    """The values of two actions are linear in what the image shows, the same number everywhere."""

    def __init__(self, args, envs):
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, obs):
        return self.layer(obs.float()[:, 0, :1, 0])

    def act(self, obs, greedy):
        return self(obs).argmax(-1)


@pytest.mark.parametrize("end", ["Term", "Trunc", "Both"])
def test_training_is_that_of_dqn_atari(tmp_path, monkeypatch, end):
    """With its environments and network: what is tested of its `train` holds here too."""
    flags = {"env_id": f"small_envs:Ramp3{end}-v0", "double": True, "loss": "huber", "tau": 0.3, "gamma": 0.9}
    flags |= {"learning_rate": 0.01, "anneal_lr": True, "max_grad_norm": 0.1, "end_e": 0.1, "exploration_fraction": 0.5}
    # Each third step calls for an update, whether or not a turn of 4 ends there.
    flags |= {"num_envs": 4, "learning_starts": 25, "train_frequency": 3, "eval_every": 100, "eval_episodes": 1}
    _, atari_args = small_run("dqn_atari", tmp_path / "atari", **flags)
    _, args = small_run("dqn_cartpole_pixels", tmp_path / "pixels", **flags, stack=1)
    monkeypatch.setattr(script, "make_env", lambda args, *mode: dqn_atari.make_env(atari_args, *mode))
    for module in (dqn_atari, script):
        monkeypatch.setattr(module, "Agent", Linear)
    dqn_atari.train(atari_args)
    script.train(args)
    right, found = (load(only_run(tmp_path / name)) for name in ("atari", "pixels"))
    for part in ("agent", "target_network", "optimizer", "counters"):
        assert_equal(found[part], right[part], part)
    right, found = (scalars(only_run(tmp_path / name)) for name in ("atari", "pixels"))
    assert found.keys() == right.keys()
    for tag in found.keys() - {"charts/SPS"}:
        assert found[tag] == right[tag], tag


def test_an_endless_evaluation_is_cut_and_a_film_is_as_fast_as_the_game(tmp_path, monkeypatch, capsys):
    """17 decisions of 2 steps; the environment's 30 pictures a second are of single steps."""
    monkeypatch.setattr(script, "EVAL_MAX_STEPS", 17)
    _, args = small_run("dqn_cartpole_pixels", tmp_path, env_id="small_envs:RampEndless-v0", eval_episodes=1)
    script.train(args)
    assert "episode 0: return=34 length=17, at the cap\n" in capsys.readouterr().out
    with script.make_env(args) as env:
        assert env.metadata["render_fps"] == 15


# ----- Environments and arguments -----
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env-id=Pendulum-v1"], "Box .*; ppo_cartpole.py takes"),
        (["--env-id=small_envs:RightAction-v0"], "cannot be used"),
        (["--crop", "0.5", "0.4", "0", "1"], r"--crop \(0.5, 0.4, 0.0, 1.0\) leaves nothing"),
        (["--crop", "0.5", "0.5005", "0", "1"], "leaves nothing"),  # rows 200 to 200 of 400
        (["--env-kwargs=[1]"], r"--env-kwargs \[1\] cannot be used"),
        (["--crop", "0", "1.5", "0", "1"], "--crop 1.5 must be between 0 and 1"),
        (["--resolution", "0", "80"], "--resolution 0 must be between 1 and 1,000"),
        (["--show-action", "--resolution", "40", "1"], "--resolution 40 1: --show-action needs a column for each"),
        (["--frame-skip=0"], "--frame-skip 0 must be between 1 and 255"),
        # With as many rows as the stack is high, none would ever have all its frames.
        (["--stack=16", "--num-envs=2", "--buffer-size=63"], "--buffer-size 63 must be between 64"),
    ],
)
def test_what_cannot_be_shown_is_refused(flags, message, tmp_path, monkeypatch, capsys):
    status, text = failed(script, monkeypatch, capsys, *flags, f"--run-dir={tmp_path}", "--no-cuda")
    assert status == 2
    assert re.search(message, text), text
    assert list(tmp_path.iterdir()) == []


def test_the_least_memory_of_a_high_stack_is_learned_from(tmp_path):
    """The rows of one environment are 16 more than the stack is high."""
    _, args = small_run("dqn_cartpole_pixels", tmp_path, stack=16, num_envs=1, buffer_size=32, learning_starts=60)
    script.train(args)
    assert scalars(only_run(tmp_path))["losses/td_loss"]


@pytest.mark.parametrize("env_id", ["Acrobot-v1", "MountainCar-v0", "CartPole-v1"])
def test_other_environments_train_and_go_on(env_id, tmp_path, monkeypatch):
    own = {"eval_episodes": 1, "frame_skip": 8, "total_timesteps": 60, "env_kwargs": '{"max_episode_steps": 80}'}
    _, args = small_run("dqn_cartpole_pixels", tmp_path, env_id=env_id, **own)
    command_line(script, monkeypatch, *flags_of(args))
    resume(script, monkeypatch, only_run(tmp_path), "--total-timesteps=100")
    assert load(only_run(tmp_path))["counters"]["global_step"] == 100


def test_a_frame_of_another_size_does_not_fit_a_checkpoint(tmp_path, monkeypatch, capsys):
    _, args = small_run("dqn_cartpole_pixels", tmp_path)
    script.train(args)
    status, text = failed(script, monkeypatch, capsys, f"--evaluate={only_run(tmp_path)}", "--stack=3", "--no-cuda")
    assert status == 2
    assert "no checkpoint that fits" in text
