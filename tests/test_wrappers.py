"""Environments as the agent sees them: ale-py's vector environment, the wrapper chain, and what both say of ends."""

import ast
import copy
import functools
import inspect
import types

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import small_envs
from ale_py.env import AtariEnv
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from short_runs import failed
from stable_baselines3.common import atari_wrappers as sb3

import dqn_atari
import ppo_atari
import ppo_cartpole
import ppo_continuous

NOOP = 0
gym.register_envs(ale_py)
native = functools.partial(AtariVectorEnv, num_threads=1, reward_clipping=False, autoreset_mode=AutoresetMode.SAME_STEP)


def make_envs(env_id, num_envs=1, **changes):
    args = ppo_atari.Args(env_id=env_id, num_envs=num_envs, threads=1, **changes)
    return ppo_atari.make_envs(args, num_envs)


def native_env(env_id, num_envs=1, max_frames=None):
    spec = copy.deepcopy(ppo_atari.find_spec(env_id))
    if max_frames:
        spec.kwargs["max_num_frames_per_episode"] = max_frames
    return ppo_atari.NativeAtariEnv(spec, num_envs, 1)


def chain_env(env_id):
    return ppo_atari.make_env(ppo_atari.Args(env_id=env_id, backend="gymnasium"))


def actions_of(*actions):
    return np.array(actions, dtype=np.int64)


def finished(infos):
    """Returns (environment, return, length) of each episode that ended."""
    return [(i, x["return"], x["length"]) for i, x in ppo_atari.finished_episodes(infos).items()]


def true_next_obs(obs, infos):
    """Returns what the step led to."""
    obs = obs.copy()
    for i, final_obs in enumerate(infos.get("final_obs", [])):
        obs[i] = obs[i] if final_obs is None else final_obs
    return obs


# The two ways of making Atari environments, compared


@pytest.mark.parametrize("game", ["Pong", "Breakout", "SpaceInvaders"])
def test_both_backends_show_the_same_game(game):
    # No-ops and FIRE at a reset are drawn and pressed differently, so here neither has them.
    spec = ppo_atari.find_spec(f"{game}NoFrameskip-v4")
    envs = native(spec.kwargs["game"], 1, noop_max=0, use_fire_reset=False)
    env = sb3.MaxAndSkipEnv(gym.make(spec.id, frameskip=1, obs_type="grayscale"), skip=4)
    env = gym.wrappers.ResizeObservation(env, (84, 84))
    env = gym.wrappers.FrameStackObservation(env, 4, padding_type="zero")
    rng = np.random.default_rng(0)

    obs, infos = envs.reset(seed=3)
    other_obs, other_info = env.reset(seed=3)
    np.testing.assert_array_equal(obs[0], other_obs)
    score, lives, terminated = 0, {int(infos["lives"][0])}, False
    while not terminated:
        action = int(rng.integers(env.action_space.n))
        obs, reward, termination, truncation, infos = envs.step(actions_of(action))
        other_obs, other_reward, terminated, truncated, other_info = env.step(action)
        assert reward[0] == other_reward
        assert termination[0] == terminated
        assert not truncation[0]
        assert not truncated
        score += reward[0]
        if not terminated:
            np.testing.assert_array_equal(obs[0], other_obs)
            assert infos["lives"][0] == other_info["lives"]
            assert infos["episode_frame_number"][0] == other_info["episode_frame_number"]
            lives.add(int(infos["lives"][0]))
    # It was a whole game: Pong is over when the enemy has 21 points, the others when no life is left.
    assert score < 0 if game == "Pong" else lives >= {1, 2, 3}
    # The end comes within a skip, where ale-py shows frames of the step before: the newest image may differ.
    np.testing.assert_array_equal(infos["final_obs"][0, :3], other_obs[:3])
    # And the next game begins.
    other_obs, _ = env.reset()
    np.testing.assert_array_equal(obs[0], other_obs)


@pytest.mark.parametrize(("game", "least"), [("freeway", 0), ("breakout", 1)])
def test_native_no_ops_at_a_reset(game, least):
    # 0 to 29 frames; FIRE, where there is one, is pressed first and is one of them, so then it is at least 1.
    envs = native(game, 1, max_num_frames_per_episode=4)
    envs.reset(seed=0)
    # Each step ends a game by the limit of 4 frames, and so shows how many frames the next one's reset took.
    frames = {int(envs.step(actions_of(NOOP))[4]["episode_frame_number"][0]) for _ in range(100)}
    assert frames == set(range(least, 30))


@pytest.mark.parametrize(("game", "fire_frames"), [("Freeway", 0), ("Breakout", 8)])
def test_chain_no_ops_at_a_reset(game, fire_frames):
    # 1 to 30 frames, and then, where there is a FIRE, it and action 2 for 4 frames each.
    env = chain_env(f"{game}NoFrameskip-v4")
    lives = env
    while not isinstance(lives, sb3.EpisodicLifeEnv):
        lives = lives.env
    env.reset(seed=0)
    frames = set()
    for _ in range(110):
        # As after a game's end, else only a life would begin.
        lives.was_real_done = True
        env.reset()
        frames.add(env.unwrapped.ale.getEpisodeFrameNumber())
    assert frames == set(range(1 + fire_frames, 31 + fire_frames))


@pytest.mark.parametrize("backend", ["ale", "gymnasium"])
def test_the_first_stack_is_one_image_behind_three_black_ones(backend):
    envs = make_envs("BreakoutNoFrameskip-v4", 2, backend=backend)
    obs, _ = envs.reset(seed=0)
    assert obs.shape == (2, 4, 84, 84)
    assert obs.dtype == np.uint8
    assert (obs[:, :3] == 0).all()
    assert (obs[:, 3].max((1, 2)) > 1).all()
    obs, *_ = envs.step(actions_of(NOOP, NOOP))
    assert (obs[:, :2] == 0).all()
    assert (obs[:, 2:].max((2, 3)) > 1).all()


def lives_of(envs):
    """Returns the lives of the only game."""
    return (
        envs.envs[0].unwrapped.ale.lives() if hasattr(envs, "envs") else int(envs.step(actions_of(NOOP))[4]["lives"][0])
    )


def lose_a_life(envs):
    """Steps one game of Breakout without moving until the ball is missed; returns what the last step did."""
    before = envs.reset(seed=0)[0]
    for _ in range(100):
        step = envs.step(actions_of(NOOP))
        if step[2][0]:
            return before, step
        before = step[0]
    raise AssertionError("no life was lost")


@pytest.mark.parametrize("backend", ["ale", "gymnasium"])
def test_a_lost_life_ends_the_recording_but_never_the_game(backend):
    envs = make_envs("BreakoutNoFrameskip-v4", backend=backend)
    _, (_, _, termination, truncation, infos) = lose_a_life(envs)
    assert (termination.tolist(), truncation.tolist()) == ([True], [False])
    assert finished(infos) == []
    assert lives_of(envs) == 4
    # Nor does the next life's loss end it, and no score is told.
    while not termination[0]:
        _, _, termination, _, infos = envs.step(actions_of(NOOP))
    assert finished(infos) == []


@pytest.mark.parametrize(("backend", "served"), [("ale", False), ("gymnasium", True)])
def test_who_serves_the_ball_after_a_lost_life(backend, served):
    # ale-py presses FIRE at the start of a game only, the chain after each lost life too. Without it Breakout stands
    # still for ever; with it the ball moves, and 10 steps without touching anything show it.
    envs = make_envs("BreakoutNoFrameskip-v4", backend=backend)
    _, (obs, *_) = lose_a_life(envs)
    images = [obs[0, 3], *(envs.step(actions_of(NOOP))[0][0, 3] for _ in range(10))]
    # The step of the loss itself may still show the ball, the one after it is the first to stand still.
    moved = any((image != images[1]).any() for image in images[2:])
    assert moved == served


# NativeAtariEnv


def test_native_lost_life_goes_on_with_the_same_stack():
    envs = native_env("BreakoutNoFrameskip-v4")
    before, (obs, *_) = lose_a_life(envs)
    np.testing.assert_array_equal(obs[0, :3], before[0, 1:])


def test_native_scores_are_those_of_whole_games():
    # The same games in parallel: `whole` is ended by a game's end only and has the raw rewards, so they can be summed.
    training, spec = native_env("ALE/MsPacman-v5", 2), ppo_atari.find_spec("ALE/MsPacman-v5")
    names = ("game", "repeat_action_probability", "full_action_space")
    whole = native(num_envs=2, frameskip=4, **{name: spec.kwargs[name] for name in names})
    assert training.reset(seed=5)[0].tolist() == whole.reset(seed=5)[0].tolist()
    rng = np.random.default_rng(0)
    scores, lengths, games, lost_lives, rewards = np.zeros(2), np.zeros(2), np.zeros(2), 0, set()
    for _ in range(1150):
        actions = rng.integers(0, training.single_action_space.n, 2)
        obs, reward, termination, truncation, infos = training.step(actions)
        whole_obs, whole_reward, whole_termination, whole_truncation, whole_infos = whole.step(actions)
        np.testing.assert_array_equal(obs, whole_obs)
        np.testing.assert_array_equal(infos["lives"], whole_infos["lives"])
        assert not (truncation | whole_truncation).any()
        # Every game's end is an end in training too; all others are lost lives.
        assert (termination | ~whole_termination).all()
        lost_lives += (termination & ~whole_termination).sum()
        assert reward.tolist() == np.sign(whole_reward).tolist()
        rewards |= set(whole_reward.tolist())
        scores += whole_reward
        lengths += 1
        ended = np.flatnonzero(whole_termination)
        assert finished(infos) == [(i, scores[i], lengths[i]) for i in ended]
        if len(ended):
            np.testing.assert_array_equal(infos["final_obs"][ended], whole_infos["final_obs"][ended])
            assert not (infos["final_obs"][ended] == obs[ended]).all()
        games += whole_termination
        scores[ended] = lengths[ended] = 0
    assert games.max() >= 2, "no environment played a second game"
    # Three lives a game: each game lost two before the one that ended it.
    assert lost_lives >= 2 * games.sum()
    assert max(rewards) > 1, "no reward was large enough for its sign to differ"


def test_native_reset_starts_scores_anew():
    envs = native_env("SpaceInvadersNoFrameskip-v4")

    def play(most_steps):
        """Plays one game with the same actions each time, and returns what was reported and how often was paid."""
        rng = np.random.default_rng(0)
        envs.reset(seed=0)
        paid = 0
        for _ in range(most_steps):
            _, reward, _, _, infos = envs.step(rng.integers(0, 6, 1))
            paid += reward[0]
            if finished(infos):
                return finished(infos), paid
        return [], paid

    ((_, score, length),), paid = play(2000)
    assert score >= 5 * paid > 0
    # Left in the middle, with points.
    reported, paid_so_far = play(200)
    assert reported == []
    assert paid_so_far > 0
    assert play(2000) == ([(0, score, length)], paid)


@pytest.mark.parametrize("max_frames", [400, 402])
def test_native_time_limit(max_frames):
    # 400 frames are 100 steps; two more frames need one more step, which stops in the middle of its skip.
    envs = native_env("PongNoFrameskip-v4", 2, max_frames=max_frames)
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    score = np.zeros(2)
    steps = -(-max_frames // 4)
    for _ in range(steps - 1):
        before, reward, termination, truncation, _ = envs.step(rng.integers(0, 6, 2))
        assert not (termination | truncation).any()
        score += reward
    obs, reward, termination, truncation, infos = envs.step(rng.integers(0, 6, 2))
    assert termination.tolist() == [False, False]
    assert truncation.tolist() == [True, True]
    # What the step led to continues the stack; what comes next is a new game.
    np.testing.assert_array_equal(infos["final_obs"][:, :3], before[:, 1:])
    assert (obs[:, :3] == 0).all()
    assert (infos["episode_frame_number"] < 30).all()
    assert finished(infos) == [(i, x, steps) for i, x in enumerate((score + reward).tolist())]


def test_native_life_lost_at_the_very_time_limit_ends_the_game():
    envs = native_env("BreakoutNoFrameskip-v4")
    envs.reset(seed=0)
    steps = 1
    while not envs.step(actions_of(NOOP))[2][0]:
        steps += 1
    envs = native_env("BreakoutNoFrameskip-v4", max_frames=4 * steps)
    before, _ = envs.reset(seed=0)
    for _ in range(steps - 1):
        before, _, termination, truncation, _ = envs.step(actions_of(NOOP))
        assert not (termination | truncation).any()
    _, _, termination, _, infos = envs.step(actions_of(NOOP))
    # Both at once counts as the life, or says so; the loop bootstraps from neither.
    assert termination.tolist() == [True]
    assert infos["lives"].tolist() == [5]
    assert finished(infos) == [(0, 0.0, steps)]
    np.testing.assert_array_equal(infos["final_obs"][0, :3], before[0, 1:])


# Ids: sticky actions, skipped frames, every game


@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "ALE/Pong-v5"])
def test_one_step_is_four_frames(env_id):
    # The v5 id alone skips 4 frames too, and 4 times 4 would be 16.
    envs, env = native_env(env_id, 2), chain_env(env_id)
    frames = envs.reset(seed=0)[1]["episode_frame_number"].copy()
    env.reset(seed=0)
    start = env.unwrapped.ale.getEpisodeFrameNumber()
    for t in range(1, 6):
        np.testing.assert_array_equal(envs.step(actions_of(0, 1))[4]["episode_frame_number"], frames + 4 * t)
        env.step(0)
        assert env.unwrapped.ale.getEpisodeFrameNumber() == start + 4 * t


@pytest.mark.parametrize(("env_id", "probability"), [("PongNoFrameskip-v4", 0.0), ("ALE/Pong-v5", 0.25)])
def test_sticky_actions_reach_the_emulator_and_are_told(capsys, env_id, probability):
    args = ppo_atari.Args(env_id=env_id, threads=1, cuda=False)
    ppo_atari.prepare(args)
    assert f"'repeat_action_probability': {probability}," in capsys.readouterr().out
    assert chain_env(env_id).unwrapped.ale.getFloat("repeat_action_probability") == probability
    # ale-py's vector environment does not tell. But of games that start with the same number of no-ops and get the
    # same actions, only those whose emulator draws, by its seed, which actions stick, come to differ.
    envs = native_env(env_id, 4)
    starts = envs.reset(seed=0)[1]["episode_frame_number"]
    assert starts[0] == starts[3]
    equal = [np.array_equal(*envs.step(np.full(4, 2 + t % 2))[0][[0, 3]]) for t in range(40)]
    assert all(equal) == (probability == 0)


def test_every_fourth_game_has_a_native_environment():
    games = [env_id for env_id in gym.registry if env_id.startswith("ALE/") and env_id.endswith("-v5")]
    assert len(games) > 100
    games = ["ALE/BasicMath-v5", *games[::4]]
    for env_id in games:
        envs = native_env(env_id)
        obs, infos = envs.reset()
        frames = infos["episode_frame_number"][0]
        obs, reward, termination, truncation, infos = envs.step(actions_of(envs.single_action_space.n - 1))
        assert obs.shape == (1, 4, 84, 84), env_id
        assert not (termination | truncation).any(), env_id
        assert infos["episode_frame_number"][0] == frames + 4, env_id
        assert np.isfinite(reward).all(), env_id


@pytest.mark.parametrize(
    "env_id",
    [
        "ALE/BasicMath-v5",
        "ALE/MsPacman-v5",  # has no FIRE
        "ALE/Backgammon-v5",  # has no NOOP
        "ALE/VideoCheckers-v5",  # nor has this
        "MontezumaRevengeNoFrameskip-v4",
    ],
)
def test_games_of_every_kind_have_a_gymnasium_environment(env_id):
    envs = make_envs(env_id, backend="gymnasium")
    obs, _ = envs.reset(seed=0)
    assert obs.shape == (1, 4, 84, 84)
    obs, reward, *_ = envs.step(actions_of(envs.single_action_space.n - 1))
    assert obs.max() > 1
    assert reward[0] in (-1, 0, 1)
    assert envs.single_action_space == native_env(env_id).single_action_space


@pytest.fixture
def own_pong():
    """Registers Pong-v9 with keyword arguments beside those of PongNoFrameskip-v4."""
    spec = ppo_atari.find_spec("PongNoFrameskip-v4")
    yield lambda limit=None, **kwargs: gym.register(
        "Pong-v9", entry_point=spec.entry_point, max_episode_steps=limit, kwargs=spec.kwargs | kwargs
    )
    gym.registry.pop("Pong-v9", None)


def test_an_own_time_limit_is_kept_or_refused(own_pong):
    own_pong(limit=200)
    with pytest.raises(ppo_atari.UsageError, match="time limit of their own, need --backend gymnasium"):
        make_envs("Pong-v9", backend="ale")
    envs = make_envs("Pong-v9", backend="gymnasium")
    envs.reset(seed=0)
    steps = [envs.step(actions_of(NOOP)) for _ in range(50)]
    # The limit is one of frames, and up to 30 are gone when the game is given to the agent.
    (ended,) = [t for t, step in enumerate(steps) if step[3][0]]
    assert 39 <= ended < 50
    assert not any(step[2][0] for step in steps)
    # Pressing FIRE and action 2 are the first two of its steps.
    assert finished(steps[ended][4]) == [(0, float(sum(step[1][0] for step in steps[: ended + 1])), ended + 3)]


def test_keyword_arguments_are_kept_or_refused(own_pong):
    with pytest.raises(ppo_atari.UsageError, match="--env-kwargs, and ids with a time limit of their own, need"):
        make_envs("PongNoFrameskip-v4", backend="ale", env_kwargs='{"difficulty": 1}')
    envs = make_envs("PongNoFrameskip-v4", backend="gymnasium", env_kwargs='{"difficulty": 1}')
    assert envs.envs[0].unwrapped._game_difficulty == 1
    # What is raised here is a line of `prepare`. Four times four frames would be 16.
    with pytest.raises((ppo_atari.UsageError, TypeError)):
        make_envs("PongNoFrameskip-v4", backend="gymnasium", env_kwargs='{"frameskip": 4}')
    own_pong(difficulty=1)
    with pytest.raises((ppo_atari.UsageError, TypeError)):
        make_envs("Pong-v9", backend="ale")


# The wrappers of the chain


class Script(gym.Env):
    """Frame k of an episode is black but for pixel k; pays 10^k; a dict tells at which frames which episode ends."""

    observation_space = gym.spaces.Box(0, 255, (1, 12), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, ends=None, lives=None, meanings=("NOOP", "FIRE", "RIGHT")):
        self.ends = ends or {}
        self.script_of_lives = lives or {}
        self.meanings = list(meanings)
        self.episode = -1
        self.actions = []
        self.ale = types.SimpleNamespace(lives=lambda: self.lives, getScreenGrayscale=self.image)

    def get_action_meanings(self):
        return self.meanings

    def image(self):
        image = np.zeros((1, 12), np.uint8)
        image[0, self.frame] = 200 + self.episode
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.frame = 0
        self.lives = 3
        self.actions.append("reset")
        return self.image(), {"episode": self.episode, "frame": 0, "seed": seed}

    def step(self, action):
        self.actions.append(action)
        self.frame += 1
        self.lives = self.script_of_lives.get(self.frame, self.lives)
        end = self.ends.get((self.episode, self.frame))
        info = {"episode": self.episode, "frame": self.frame}
        return self.image(), 10.0**self.frame, end == "term", end == "trunc", info


def lit(obs):
    return np.flatnonzero(obs).tolist()


def a_life_at_a_time(**script):
    env = ppo_atari.RecordEpisodeStatistics(Script(**script), stats_key="whole_episode")
    return ppo_atari.WholeEpisodes(sb3.FireResetEnv(sb3.EpisodicLifeEnv(env)))


def test_fire_is_pressed_after_a_lost_life():
    # FIRE and action 2 are frames 1 and 2; a life is lost at frame 4, then come the no-op, FIRE and action 2.
    env = a_life_at_a_time(lives={4: 2}, ends={(0, 8): "term"})
    assert "whole_episode" not in env.reset()[1]
    assert [env.step(0)[2] for _ in range(2)] == [False, True]
    obs, info = env.reset()
    assert env.unwrapped.actions == ["reset", 1, 2, 0, 0, 0, 1, 2]
    assert (lit(obs), info) == ([7], {})
    # Frame 8 ends the game: the score of all its frames.
    assert env.step(0)[2]
    assert env.reset()[1]["whole_episode"] == (("return", 111_111_110), ("length", 8))


@pytest.mark.parametrize("how", ["term", "trunc"])
def test_a_game_that_ends_in_the_no_op_after_a_lost_life_is_reported(how):
    env = a_life_at_a_time(lives={4: 2}, ends={(game, 5): how for game in range(3)})
    env.reset()
    for game in range(1, 4):
        assert [env.step(0)[2] for _ in range(2)] == [False, True]
        obs, info = env.reset()
        assert info["whole_episode"] == (("return", 111_110), ("length", 5))
        # Frame 2 of the next game.
        assert (lit(obs), obs.max()) == ([2], 200 + game)


def test_chain_scores_are_those_of_whole_games(monkeypatch):
    # What the emulator pays in a game, frame by frame, from its reset on, against what is reported at its end.
    paid = []
    real_reset, real_step = AtariEnv.reset, AtariEnv.step

    def reset(self, **kwargs):
        paid.append(0.0)
        return real_reset(self, **kwargs)

    def step(self, action):
        result = real_step(self, action)
        paid[-1] += result[1]
        return result

    monkeypatch.setattr(AtariEnv, "reset", reset)
    monkeypatch.setattr(AtariEnv, "step", step)
    envs = make_envs("SpaceInvadersNoFrameskip-v4", backend="gymnasium")
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    assert paid == [0]
    scores, rewards, ends = [], set(), 0
    while len(scores) < 2:
        _, reward, termination, truncation, infos = envs.step(rng.integers(0, 6, 1))
        rewards.add(float(reward[0]))
        ends += termination[0]
        assert not truncation.any()
        scores += [score for _, score, _ in finished(infos)]
        assert len(scores) == len(paid) - 1
    assert scores == paid[:2]
    assert max(scores) > 2 * ends
    assert rewards == {0.0, 1.0}
    # Three lives in each of the two games.
    assert ends == 6


# What ends look like to the training loop


def test_finished_episodes_are_each_reported_once():
    # 12 steps of 4 environments with episodes of 3 steps: 4 * 12 / 3 = 16, each of 3 rewards of 1.
    envs = make_envs("small_envs:Ramp3Term-v0", 4)
    envs.reset(seed=0)
    found = []
    for t in range(12):
        _, reward, termination, truncation, infos = envs.step(actions_of(0, 1, 0, 1))
        assert reward.tolist() == [1, 1, 1, 1]
        assert termination.tolist() == [t % 3 == 2] * 4
        assert not truncation.any()
        found.append(finished(infos))
    assert [len(episodes) for episodes in found] == [0, 0, 4] * 4
    assert found[2] == [(i, 3.0, 3) for i in range(4)] == found[11]


def test_finished_episodes_of_some_environments_only():
    whole = np.array([None, None])
    whole[1] = (("return", 7.5), ("length", 12), ("x", 2.5))
    assert ppo_atari.finished_episodes({"whole_episode": whole}) == {1: {"return": 7.5, "length": 12, "x": 2.5}}
    assert ppo_atari.finished_episodes({}) == {}


@pytest.mark.parametrize(("end", "vector"), [("Term", "sync"), ("Trunc", "sync"), ("Both", "sync"), ("Trunc", "async")])
def test_the_final_observation_is_what_the_step_led_to(end, vector):
    envs = make_envs(f"small_envs:Ramp3{end}-v0", 2, vector=vector)
    with ppo_atari.closing(envs):
        obs, _ = envs.reset(seed=0)
        assert (obs == 0).all()
        for k in (1, 2, 3, 1, 2, 3):
            obs, _, termination, truncation, infos = envs.step(actions_of(0, 1))
            assert termination.tolist() == [k == 3 and end != "Trunc"] * 2
            assert truncation.tolist() == [k == 3 and end != "Term"] * 2
            # The next image to act on is that of a new episode; what the step led to is the image of 3.
            assert (obs == k % 3).all()
            assert (true_next_obs(obs, infos) == k).all()


# Spaces other than Atari's


@pytest.mark.parametrize(("name", "first"), [("RampNegativeStart", -1), ("RampLateStart", 5)])
def test_actions_are_shifted_to_where_the_space_starts(monkeypatch, name, first):
    taken = []
    real_step = small_envs.Ramp.step

    def step(self, action):
        taken.append(int(action))
        return real_step(self, action)

    monkeypatch.setattr(small_envs.Ramp, "step", step)
    envs = make_envs(f"small_envs:{name}-v0")
    envs.reset(seed=0)
    chosen = np.random.default_rng(0).integers(0, 2, 50)
    for action in chosen:
        envs.step(actions_of(action))
    assert taken == (chosen + first).tolist()
    assert set(taken) == {first, first + 1}


@pytest.mark.parametrize("name", ["RampColour", "RampGrey", "RampOneChannel"])
def test_images_of_any_size_become_stacks_of_four(name):
    envs = make_envs(f"small_envs:{name}-v0", 2)
    assert envs.single_observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    obs, _ = envs.reset(seed=0)
    stacks = [obs]
    for _ in range(3):
        obs, _, _, _, infos = envs.step(actions_of(0, 0))
        stacks.append(true_next_obs(obs, infos))
    # Image k is k everywhere, in any size and without its colours.
    for k, stack in enumerate(stacks):
        assert stack.shape == (2, 4, 84, 84)
        assert stack.dtype == np.uint8
        for plane, value in enumerate([k - 3, k - 2, k - 1, k]):
            assert (stack[:, plane] == max(value, 0)).all()
    assert (obs == 0).all()


def test_a_stack_of_channels_stays_as_it_is():
    envs = make_envs("small_envs:Ramp3Term-v0", 2)
    obs, _ = envs.reset(seed=0)
    assert obs.shape == (2, 1, 36, 36)
    assert envs.single_observation_space == gym.spaces.Box(0, 255, (1, 36, 36), np.uint8)


class Spaces(gym.Env):
    """Has the spaces that it is given."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}


BUTTONS = gym.spaces.Discrete(3)
for name, *spaces in (
    ("Codes", gym.spaces.Box(0, 9, (7, 7, 3), np.uint8), BUTTONS),
    ("Stack20", gym.spaces.Box(0, 255, (4, 20, 20), np.uint8), BUTTONS),
    ("Mission", gym.spaces.Dict(image=gym.spaces.Box(0, 9, (7, 7, 3), np.uint8), text=gym.spaces.Text(9)), BUTTONS),
    ("Table", gym.spaces.Box(-1, 1, (5, 5)), BUTTONS),
    ("Racing", gym.spaces.Box(0, 255, (96, 96, 3), np.uint8), gym.spaces.Box(-1, 1, (3,))),
    ("Pixels", gym.spaces.Box(0, 255, (96, 96, 3), np.uint8), BUTTONS),
    ("Numbers", gym.spaces.Box(-1, 1, (5,)), BUTTONS),
    ("Levers", gym.spaces.Box(-1, 1, (5,)), gym.spaces.MultiDiscrete([2, 3])),
):
    kwargs = dict(zip(("observation_space", "action_space"), spaces, strict=True))
    gym.register(f"{name}-v0", entry_point=Spaces, kwargs=kwargs, disable_env_checker=True)
SCRIPTS_THAT_FIT = (
    "ppo_cartpole.py takes vectors and Discrete actions, ppo_continuous.py vectors and Box, *_atari.py uint8 images "
    "from 36 x 36 on and Discrete; envs/README.md tells more"
)


@pytest.mark.parametrize(("script", "name", "found"), [
    # Codes are no picture: enlarged and divided by 255 they would be nonsense.
    (ppo_atari, "Codes", "Box (7, 7, 3) uint8 and Discrete () int64"),
    (ppo_atari, "Stack20", "Box (4, 20, 20) uint8 and Discrete () int64"),
    # Of a space's parts nothing is printed: they may be functions.
    (ppo_atari, "Mission", "Dict None None and Discrete () int64"),
    (ppo_atari, "Racing", "Box (96, 96, 3) uint8 and Box (3,) float32"),
    (ppo_atari, "Numbers", "Box (5,) float32 and Discrete () int64"),
    (ppo_cartpole, "Codes", "Box (7, 7, 3) uint8 and Discrete () int64"),
    (ppo_cartpole, "Mission", "Dict None None and Discrete () int64"),
    (ppo_cartpole, "Table", "Box (5, 5) float32 and Discrete () int64"),
    (ppo_cartpole, "Pixels", "Box (96, 96, 3) uint8 and Discrete () int64"),
    (ppo_cartpole, "Levers", "Box (5,) float32 and MultiDiscrete (2,) int64"),
    (ppo_continuous, "Racing", "Box (96, 96, 3) uint8 and Box (3,) float32"),
    (ppo_continuous, "Numbers", "Box (5,) float32 and Discrete () int64"),
])  # fmt: skip
def test_spaces_that_do_not_fit_are_refused_with_what_does(tmp_path, monkeypatch, capsys, script, name, found):
    monkeypatch.chdir(tmp_path)
    status, error = failed(script, monkeypatch, capsys, f"--env-id={name}-v0", "--no-cuda")
    assert status == 2
    start = f"error: --env-id {name}-v0 with --env-kwargs {{}} cannot be used"
    assert error.startswith(f"{start}: it has {found}; {SCRIPTS_THAT_FIT}")
    assert list(tmp_path.iterdir()) == []


def code_of(function):
    """Returns a function's code without its docstring."""
    tree = ast.parse(inspect.getsource(function))
    del tree.body[0].body[0]
    return ast.unparse(tree)


def test_dqn_atari_has_the_environments_of_ppo_atari():
    for name in ("make_env", "make_envs"):
        assert code_of(getattr(dqn_atari, name)) == code_of(getattr(ppo_atari, name))
