"""WholeEpisodes in real vector environments: what it lets through, and what it gives an environment."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from short_runs import assert_equal, load, only_run, scalars, small_run

import dqn_cartpole_vec as script

CPU = torch.device("cpu")


class Small(gym.Env):
    """Episodes of two steps that pay 1; observations are zeros."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.reset_seed, self.step_count = seed, 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.step_count += 1
        return np.zeros(2, np.float32), 1.0, self.step_count == 2, False, self.info()

    def info(self):
        return {}


class Draws(Small):
    """Pays what it draws from its own action space, as one with a random opponent may."""

    def __init__(self):
        self.action_space = gym.spaces.Discrete(10**6)

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(self.action_space.sample()), *rest


class Measures(Small):
    """Reports in its last step what `of_seed` has for the seed of its reset, modulo 3."""

    of_seed = ({"level": 0}, {"level": 0.75}, {})

    def reset(self, *, seed=None, options=None):
        self.measures = {} if seed is None else self.of_seed[seed % 3]
        return super().reset(seed=seed)

    def info(self):
        return {"measures": self.measures} if self.step_count == 2 else {}


class Unmeasured(Measures):
    """Its measure is no number in any episode, as the time to a goal that is never reached."""

    of_seed = ({"level": float("nan")}, {"level": float("inf")}, {"level": float("-inf")})


class Growing(Small):
    """The arrays in its info have another length in each step and in each environment."""

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        return obs, self.info()

    def info(self):
        length = (self.reset_seed or 0) % 3 + self.step_count
        return {"path": np.arange(length), "history": np.zeros((length, 2)), "episode": length}


class Strict(Small):
    """Notes its actions, and takes only those of its space, with the space's type."""

    seen = []

    def __init__(self, action_space):
        self.action_space = action_space

    def step(self, action):
        assert self.action_space.contains(action)
        assert action.dtype == self.action_space.dtype
        self.seen.append(int(action))
        return super().step(action)


class NotFinite(Small):
    """The second step gives a number that is none."""

    def __init__(self, where, number):
        self.where, self.number = where, number

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.step_count == 2 and self.where == "obs":
            obs[1] = self.number
        return obs, self.number if self.step_count == 2 and self.where == "reward" else reward, *rest


class Lists(Small):
    """Its observations are lists, which vector environments make arrays of."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return [0.5, 1.5], {}

    def step(self, action):
        return [1.0, 2.0], *super().step(action)[1:]


for entry_point in (Draws, Measures, Unmeasured, Growing, Lists):
    gym.register(f"{entry_point.__name__}-v0", entry_point=entry_point, disable_env_checker=True)
SPACES = {"Int8": gym.spaces.Discrete(3, dtype=np.int8), "Start": gym.spaces.Discrete(3, start=-1)}
SPACES["Both"] = gym.spaces.Discrete(3, start=5, dtype=np.int8)
for name, space in SPACES.items():
    gym.register(f"Strict{name}-v0", entry_point=Strict, kwargs={"action_space": space}, disable_env_checker=True)
for where in ("obs", "reward"):
    for number in (float("nan"), float("inf")):
        kwargs = {"where": where, "number": number}
        gym.register(f"Bad-{where}-{number}-v0", entry_point=NotFinite, kwargs=kwargs, disable_env_checker=True)


def new_envs(env_id, num_envs, vector="sync"):
    return script.closing(script.make_envs(script.Args(env_id=env_id, vector=vector), num_envs))


def new_agent(args):
    with new_envs(args.env_id, 1) as envs:
        return script.Agent(args, envs)


# ----- Draws of an environment's own -----
def own_draws(seed, count):
    """Returns what an environment draws that was reset with this seed."""
    space = gym.spaces.Discrete(10**6, seed=seed)
    return [float(space.sample()) for _ in range(count)]


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_each_environment_draws_from_a_stream_of_its_own(vector):
    with new_envs("Draws-v0", 4, vector) as envs:
        for _ in range(2):
            # The second time tells that a seeded reset starts the stream anew.
            envs.reset(seed=7)
            rewards = np.array([envs.step(np.zeros(4, int))[1] for _ in range(4)])
            # Two steps are an episode; the reset that follows has no seed, and the stream goes on.
            np.testing.assert_array_equal(rewards.T, [own_draws(7 + i, 4) for i in range(4)])


def test_the_scores_of_an_evaluation_are_those_of_its_seeds_whatever_num_envs_is():
    found = []
    for num_envs in (1, 4, 13):
        args = script.Args(env_id="Draws-v0", num_envs=num_envs, eval_episodes=40, hidden_sizes=(1,))
        found.append(script.evaluate(new_agent(args), args, 300, CPU)["return"].tolist())
    assert found == [[sum(own_draws(300 + i, 2)) for i in range(40)]] * 3
    assert len(set(found[0])) == 40


class SeededLength(gym.Env):
    """Episodes of 1 or 4 steps, by the seed of the reset; without one, of 2."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 2 if seed is None else 1 + 3 * (seed % 2)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


gym.register("SeededLength-v0", SeededLength, disable_env_checker=True)


def test_an_episode_counts_once_where_another_one_follows_before_the_rest_have_ended():
    """The first and the third environment end after a step, and again after two more."""
    args = script.Args(env_id="SeededLength-v0", num_envs=4, eval_episodes=4, hidden_sizes=(1,))
    assert script.evaluate(new_agent(args), args, 300, CPU)["return"].tolist() == [1, 4, 1, 4]


# ----- Measures -----
@pytest.mark.parametrize("vector", ["sync", "async"])
def test_whole_numbers_and_fractions_are_measured_in_the_same_step(vector):
    with new_envs("Measures-v0", 2, vector) as envs:
        envs.reset(seed=0)
        assert list(script.finished_episodes(envs.step(np.zeros(2, int))[4]).items()) == []
        episodes = list(script.finished_episodes(envs.step(np.zeros(2, int))[4]).items())
    assert episodes == [
        (0, {"return": 2.0, "length": 2.0, "level": 0.0}),
        (1, {"return": 2.0, "length": 2.0, "level": 0.75}),
    ]


def test_what_was_not_measured_is_not_0():
    """Of seeds 0 to 5 each third reports nothing: the mean is that of 0, 0.75, 0, 0.75. So too of seeds 2 to 5."""
    with new_envs("Measures-v0", 3) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(3, int))
        episodes = list(script.finished_episodes(envs.step(np.zeros(3, int))[4]).items())
    assert [list(episode) for _, episode in episodes] == [["return", "length", "level"]] * 2 + [["return", "length"]]
    args = script.Args(env_id="Measures-v0", eval_episodes=6)
    levels = script.evaluate(new_agent(args), args, 0, CPU)["level"]
    np.testing.assert_array_equal(levels, [0, 0.75, np.nan] * 2)
    args = script.Args(env_id="Measures-v0", eval_episodes=4)
    levels = script.evaluate(new_agent(args), args, 2, CPU)["level"]
    np.testing.assert_array_equal(levels, [np.nan, 0, 0.75, np.nan])


def test_a_measure_without_a_number_in_any_episode_ends_no_run(tmp_path):
    _, args = small_run("dqn_cartpole_vec", tmp_path, env_id="Unmeasured-v0", eval_every=100)
    script.train(args)
    assert {tag for tag in scalars(only_run(tmp_path)) if tag.startswith("eval/")} == {
        *("eval/return_mean", "eval/return_std", "eval/length_mean")
    }


# ----- Info -----
@pytest.mark.parametrize("vector", ["sync", "async"])
def test_info_of_any_length_and_name_does_no_harm(tmp_path, vector):
    with new_envs("Growing-v0", 3, vector) as envs:
        _, infos = envs.reset(seed=0)
        assert infos == {}
        assert list(envs.step(np.zeros(3, int))[4]) == []
        infos = envs.step(np.zeros(3, int))[4]
        found = [(i, {"return": 2.0, "length": 2.0}) for i in range(3)]
        assert list(script.finished_episodes(infos).items()) == found
    _, args = small_run("dqn_cartpole_vec", tmp_path, env_id="Growing-v0", num_envs=3, vector=vector)
    _, scores = script.train(args)
    assert scores.tolist() == [2.0, 2.0]


# ----- Actions -----
@pytest.mark.parametrize(("name", "first"), [("Int8", 0), ("Start", -1), ("Both", 5)])
def test_actions_are_of_the_space_and_count_from_0_outside(tmp_path, monkeypatch, name, first):
    stored, add = set(), script.ReplayBuffer.add

    def noting(self, obs, next_obs, action, *rest):
        stored.update(action.tolist())
        add(self, obs, next_obs, action, *rest)

    monkeypatch.setattr(script.ReplayBuffer, "add", noting)
    monkeypatch.setattr(Strict, "seen", [])
    changes = {"total_timesteps": 500, "num_envs": 4, "start_e": 1.0, "end_e": 1.0, "eval_greedy": False}
    agent, _ = script.train(small_run("dqn_cartpole_vec", tmp_path, env_id=f"Strict{name}-v0", **changes)[1])
    assert stored == {0, 1, 2}
    assert set(Strict.seen) == {first, first + 1, first + 2}
    # Two evaluations episodes of two steps come after the 500.
    assert len(Strict.seen) == 504
    assert agent(torch.zeros(1, 2)).shape == (1, 3)


def test_where_actions_start_changes_no_weight(tmp_path):
    agents = []
    for name in ("Int8", "Start", "Both"):
        script.train(small_run("dqn_cartpole_vec", tmp_path / name, env_id=f"Strict{name}-v0")[1])
        agents.append(load(only_run(tmp_path / name))["agent"])
    assert_equal(agents[0], agents[1])
    assert_equal(agents[0], agents[2])


# ----- Numbers that are none -----
# gymnasium warns of an error in an environment's own process before it raises it.
@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("where", ["obs", "reward"])
@pytest.mark.parametrize("vector", ["sync", "async"])
def test_a_number_that_is_not_finite_is_told(where, number, vector):
    env_id = f"Bad-{where}-{number}-v0"
    with new_envs(env_id, 2, vector) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(2, int))
        with pytest.raises(FloatingPointError, match=f"{env_id} is not finite in a step: .*{number}"):
            envs.step(np.zeros(2, int))


def test_observations_may_be_lists():
    with new_envs("Lists-v0", 2) as envs:
        assert envs.reset(seed=0)[0].tolist() == [[0.5, 1.5]] * 2
        assert envs.step(np.zeros(2, int))[0].tolist() == [[1.0, 2.0]] * 2
        assert (
            list(script.finished_episodes(envs.step(np.zeros(2, int))[4]).values())
            == [{"return": 2.0, "length": 2}] * 2
        )
