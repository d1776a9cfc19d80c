"""Replay memories: what is stored, what is overwritten, what is sampled, and what a checkpoint keeps of them."""

import io
import math

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dqn_atari
import dqn_cartpole_vec

both = pytest.mark.parametrize("script", [dqn_cartpole_vec, dqn_atari], ids=lambda script: script.__name__)
CPU = torch.device("cpu")


def random_cases(max_examples):
    return settings(max_examples=max_examples, deadline=None, database=None, derandomize=True)


def count(replay):
    """Returns how many transitions a memory can give."""
    if isinstance(replay, dqn_atari.ReplayBuffer):
        return int((replay.columns["earlier"] < replay.stack).sum())
    return min(replay.added, len(replay.columns.obs))


def all_sampled(replay):
    """Returns {action: (obs, next_obs, reward, termination)} of all that a memory gives, where no action is twice.

    Draws until each of n transitions was missed with a probability of exp(-25).
    """
    found = {}
    for _ in range(math.ceil(25 * count(replay) / 256)):
        batch = [x.numpy() for x in replay.sample(256, CPU)]
        actions, first = np.unique(batch[2], return_index=True)
        for action, i in zip(actions.tolist(), first.tolist(), strict=True):
            if action not in found:
                obs, next_obs, _, reward, termination = (x[i] for x in batch)
                found[action] = (obs.copy(), next_obs.copy(), float(reward), float(termination))
    return found


def assert_same_transition(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


# ----- Vectors -----
def fill(replay, num_envs, steps, first=0):
    """Adds transitions whose action is their number n: obs [n, 0.5], next_obs [n, 1.5], reward -n, odd ones end."""
    for t in range(steps):
        n = first + t * num_envs + np.arange(num_envs)
        obs, next_obs = (np.stack([n, np.full(num_envs, x)], -1) for x in (0.5, 1.5))
        replay.add(obs, next_obs, n, -1.0 * n, n % 2 == 1)


@pytest.mark.parametrize(
    ("capacity", "num_envs", "steps", "kept"),
    [
        (6, 2, 0, []),
        (6, 2, 1, [0, 1]),
        (6, 2, 3, [0, 1, 2, 3, 4, 5]),
        (6, 2, 4, [2, 3, 4, 5, 6, 7]),
        # A turn's transitions lie on both sides of the edge: rows 6, 0, 1 take the numbers 6, 7, 8.
        (7, 3, 3, [2, 3, 4, 5, 6, 7, 8]),
        (5, 4, 7, [23, 24, 25, 26, 27]),
        (4, 4, 3, [8, 9, 10, 11]),
        (5, 1, 12, [7, 8, 9, 10, 11]),
    ],
)
def test_a_ring_keeps_the_newest(capacity, num_envs, steps, kept):
    replay = dqn_cartpole_vec.ReplayBuffer(capacity, 2)
    fill(replay, num_envs, steps)
    assert count(replay) == len(kept)
    found = all_sampled(replay)
    assert sorted(found) == kept
    for n, (obs, next_obs, reward, termination) in found.items():
        assert (obs.tolist(), next_obs.tolist()) == ([n, 0.5], [n, 1.5])
        assert (reward, termination) == (-n, n % 2)


def test_what_is_sampled_has_the_types_that_the_loss_takes():
    replay = dqn_cartpole_vec.ReplayBuffer(8, 2)
    fill(replay, 2, 3)
    batch = replay.sample(5, CPU)
    assert [tuple(x.shape) for x in batch] == [(5, 2), (5, 2), (5,), (5,), (5,)]
    assert [x.dtype for x in batch] == [torch.float32, torch.float32, torch.int64, torch.float32, torch.float32]


def test_a_memory_of_vectors_copies_what_it_is_given():
    """Environments may hand out the same array at each step."""
    replay = dqn_cartpole_vec.ReplayBuffer(4, 1)
    obs, reward = np.ones((2, 1), np.float32), np.ones(2)
    replay.add(obs, obs, np.array([0, 1]), reward, np.zeros(2, bool))
    obs[:], reward[:] = 7, 7
    batch = replay.sample(10, CPU)
    assert batch.obs.unique().tolist() == batch.next_obs.unique().tolist() == batch.rewards.unique().tolist() == [1]


@random_cases(40)
@given(capacity=st.integers(4, 30), num_envs=st.integers(1, 4), steps=st.integers(0, 40))
def test_a_ring_of_any_size_keeps_the_newest(capacity, num_envs, steps):
    replay = dqn_cartpole_vec.ReplayBuffer(capacity, 2)
    fill(replay, num_envs, steps)
    total = num_envs * steps
    assert sorted(all_sampled(replay)) == list(range(max(0, total - capacity), total))


def through_a_file(replay):
    """Returns the state of a memory, as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ----- Single frames -----
class Naive:
    """Holds whole stacks, and works out which transitions a ring of single frames can still show.

    A ring has `rows` rows for each environment: one for each transition, one for what the last transition led to, and
    one for what each earlier sequence ended with. Of these the oldest S - 1 only serve the stacks after them.
    """

    def __init__(self, rows, num_envs, stack):
        self.rows, self.stack = rows, stack
        self.transitions, self.written = {}, [[] for _ in range(num_envs)]
        self.last_next_obs = None

    def restart(self):
        self.last_next_obs = None

    def add(self, obs, next_obs, action, reward, termination):
        for i, written in enumerate(self.written):
            goes_on = self.last_next_obs is not None and (obs[i] == self.last_next_obs[i]).all()
            if written and not goes_on:
                written.append(None)
            written.append(int(action[i]))
            self.transitions[int(action[i])] = (obs[i].copy(), next_obs[i].copy(), reward[i], float(termination[i]))
        self.last_next_obs = next_obs.copy()

    def kept(self):
        # The newest row holds what the last transition led to: rows - 1 are left, of which the oldest S - 1 are lost.
        newest = [written[-(self.rows - self.stack) :] for written in self.written]
        return {n: self.transitions[n] for written in newest for n in written if n is not None}


def assert_equals_naive(replay, naive):
    kept, found = naive.kept(), all_sampled(replay)
    assert found.keys() == kept.keys()
    assert count(replay) == len(kept)
    for n, transition in kept.items():
        assert_same_transition(found[n], transition)


class Stacks:
    """Environments that show stacks of random frames and end in every way, by a seeded draw."""

    ENDS = ["none", "terminated", "truncated", "both", "life lost", "life lost and reset"]

    def __init__(self, rng, num_envs, stack, frame, brightness, share_of_ends):
        self.rng, self.stack, self.frame, self.brightness = rng, stack, frame, brightness
        self.share_of_ends = share_of_ends
        self.count = 0
        self.obs = np.stack([self.first() for _ in range(num_envs)])

    def image(self):
        return self.rng.integers(self.brightness, size=self.frame, dtype=np.uint8)

    def first(self):
        return np.stack([np.zeros(self.frame, np.uint8)] * (self.stack - 1) + [self.image()])

    def reset(self):
        self.obs = np.stack([self.first() for _ in self.obs])

    def step(self):
        """Returns what `add` takes, actions numbered."""
        obs, self.obs = self.obs, self.obs.copy()
        num_envs = len(obs)
        next_obs = np.stack([np.concatenate([x[1:], self.image()[None]]) for x in obs])
        ends = np.where(self.rng.random(num_envs) < self.share_of_ends, self.rng.integers(1, 6, num_envs), 0)
        for i, end in enumerate(ends):
            resets = self.ENDS[end] not in ("none", "life lost")
            self.obs[i] = self.first() if resets else next_obs[i]
        action = self.count + np.arange(num_envs)
        self.count += num_envs
        termination = np.isin(ends, [1, 3, 4, 5])
        return obs, next_obs, action, self.rng.integers(-1, 2, num_envs).astype(float), termination


@random_cases(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_envs=st.integers(1, 4),
    stack=st.sampled_from([1, 2, 4]),
    rows=st.integers(16, 40),
    steps=st.integers(0, 120),
    # With few values some images equal each other by chance, those of a reset and those before it too.
    brightness=st.sampled_from([1, 2, 255]),
    share_of_ends=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    spare=st.integers(0, 3),
    restart_at=st.integers(0, 120),
)
def test_single_frames_give_what_whole_stacks_give(
    seed, num_envs, stack, rows, steps, brightness, share_of_ends, spare, restart_at
):
    """Bit for bit, over every kind of end, after the ring was full too, and after a restart from a checkpoint."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    envs = Stacks(rng, num_envs, stack, (1, 2), brightness, share_of_ends)
    # A capacity that the number of environments does not divide leaves the rest unused.
    capacity = rows * num_envs + min(spare, num_envs - 1)
    sizes = (capacity, num_envs, (stack, 1, 2), stack, CPU)
    replay, naive = dqn_atari.ReplayBuffer(*sizes), Naive(rows, num_envs, stack)
    for t in range(steps):
        if t == restart_at and t > 0:
            replay, stored = dqn_atari.ReplayBuffer(*sizes), through_a_file(replay)
            replay.load_state_dict(stored)
            assert_equals_naive(replay, naive)
            envs.reset()
            naive.restart()
        transitions = envs.step()
        replay.add(*transitions)
        naive.add(*transitions)
        if t % 50 == 49:
            assert_equals_naive(replay, naive)
    assert_equals_naive(replay, naive)


def test_the_oldest_stacks_are_lost_when_the_ring_is_full():
    """16 rows and stacks of 4, no end: the last row holds what came last, and the oldest 3 serve the stacks after."""
    envs = Stacks(np.random.default_rng(0), 1, 4, (1, 2), 255, 0.0)
    replay = dqn_atari.ReplayBuffer(16, 1, (4, 1, 2), 4, CPU)
    for count, kept in [(12, range(12)), (15, range(3, 15)), (16, range(4, 16)), (40, range(28, 40))]:
        while envs.count < count:
            replay.add(*envs.step())
        assert sorted(all_sampled(replay)) == list(kept)


def test_stacks_are_padded_with_zeros_and_never_reach_into_another_episode():
    """Frames are 10 + k in the first episode and 20 + k in the second, which a time limit parts after 2 steps."""
    replay = dqn_atari.ReplayBuffer(16, 1, (3, 1, 1), 3, CPU)

    def add(obs, next_obs, number, termination=False):
        obs, next_obs = (np.array(x, np.uint8).reshape(1, 3, 1, 1) for x in (obs, next_obs))
        replay.add(obs, next_obs, np.array([number]), np.ones(1), np.array([termination]))

    add([0, 0, 10], [0, 10, 11], 0)
    add([0, 10, 11], [10, 11, 12], 1)
    add([0, 0, 20], [0, 20, 21], 2)
    # A lost life: the future ends, the frames go on.
    add([0, 20, 21], [20, 21, 22], 3, termination=True)
    add([20, 21, 22], [21, 22, 23], 4)
    found = all_sampled(replay)
    assert {n: (x[0].flatten().tolist(), x[1].flatten().tolist(), x[3]) for n, x in found.items()} == {
        0: ([0, 0, 10], [0, 10, 11], 0),
        1: ([0, 10, 11], [10, 11, 12], 0),
        2: ([0, 0, 20], [0, 20, 21], 0),
        3: ([0, 20, 21], [20, 21, 22], 1),
        4: ([20, 21, 22], [21, 22, 23], 0),
    }


def test_images_are_sampled_with_the_types_that_the_loss_takes():
    envs = Stacks(np.random.default_rng(0), 2, 4, (3, 5), 255, 0.1)
    replay = dqn_atari.ReplayBuffer(64, 2, (4, 3, 5), 4, CPU)
    for _ in range(10):
        replay.add(*envs.step())
    batch = replay.sample(6, CPU)
    assert [tuple(x.shape) for x in batch] == [(6, 4, 3, 5), (6, 4, 3, 5), (6,), (6,), (6,)]
    assert [x.dtype for x in batch] == [torch.uint8, torch.uint8, torch.int64, torch.float32, torch.float32]


@both
def test_each_transition_is_drawn_as_often_as_any_other(script):
    """20 transitions, 20,000 draws: 1,000 each, with a deviation of sqrt(1,000 * 0.95) = 31."""
    torch.manual_seed(0)
    if script is dqn_atari:
        # Rows that are no transitions lie between those that are: every second transition ends its sequence.
        envs = Stacks(np.random.default_rng(0), 2, 4, (1, 2), 255, 0.5)
        replay = script.ReplayBuffer(64, 2, (4, 1, 2), 4, CPU)
        for _ in range(10):
            replay.add(*envs.step())
    else:
        replay = script.ReplayBuffer(64, 2)
        fill(replay, 2, 10)
    counts = torch.bincount(replay.sample(20_000, CPU).actions, minlength=20)
    assert counts.shape == (20,)
    assert counts.min() > 1000 - 5 * 31
    assert counts.max() < 1000 + 5 * 31


# ----- Real environments -----
def memory_of(script, monkeypatch, tmp_path, args, note=None):
    """Trains, with learning put off to the last step; `note(*transition)` may replace the actions that are stored."""
    made, add = [], script.ReplayBuffer.add

    def noting(self, obs, next_obs, action, reward, termination):
        made[:] = [self]
        action = note(obs, next_obs, action, reward, termination) if note else action
        add(self, obs, next_obs, action, reward, termination)

    monkeypatch.setattr(script.ReplayBuffer, "add", noting)
    common = {"eval_episodes": 1, "threads": 1, "cuda": False, "progress": False, "run_dir": str(tmp_path)}
    last = args["total_timesteps"] - 1
    script.train(script.Args(**{"learning_starts": last, "train_frequency": 10**6, **common, **args}))
    (replay,) = made
    return replay


@pytest.mark.parametrize("backend", ["ale", "gymnasium"])
def test_stacks_of_breakout_are_those_that_the_environment_gave(monkeypatch, tmp_path, backend):
    """Lost lives with and without a reset, ends of games, and the ring is full after a third of the way."""
    num_envs, rows = 3, 100
    naive, seen = Naive(rows, num_envs, 4), {"turns": 0, "ends": 0, "starts": 0}

    def note(obs, next_obs, action, reward, termination):
        # What a step led to is what it came from and one frame more, whatever ended: of one game, and never memory
        # that nobody wrote.
        np.testing.assert_array_equal(next_obs[:, :-1], obs[:, 1:])
        seen["turns"] += 1
        seen["ends"] += int(termination.sum())
        if naive.last_next_obs is not None:
            seen["starts"] += int((obs != naive.last_next_obs).any((1, 2, 3)).sum())
        number = num_envs * seen["turns"] + np.arange(num_envs)
        naive.add(obs.copy(), next_obs.copy(), number, reward, termination)
        return number

    args = {
        "env_id": "BreakoutNoFrameskip-v4",
        "backend": backend,
        "num_envs": num_envs,
        "buffer_size": rows * num_envs,
    }
    # Evaluated at random too, since a greedy policy that never serves would play for 27,000 steps.
    random_play = {"start_e": 1.0, "end_e": 1.0, "eval_greedy": False}
    args |= random_play | {"total_timesteps": 300 * num_envs}
    replay = memory_of(dqn_atari, monkeypatch, tmp_path, args, note)
    assert seen["turns"] == 300
    assert seen["ends"] >= 12
    # ale-py goes on after a lost life: only a game's end starts anew. gymnasium's wrapper makes a step in between.
    assert 3 <= seen["starts"] <= (seen["ends"] / 3 if backend == "ale" else seen["ends"])
    assert_equals_naive(replay, naive)


def transitions_in(replay):
    """Returns (obs, next_obs, termination) of all rows that hold a transition of a memory of Ramp, in any order."""
    torch.manual_seed(0)
    batch = replay.sample(2000, CPU)
    obs, next_obs = (x.flatten(1)[:, -1].tolist() for x in batch[:2])
    return set(zip(map(int, obs), map(int, next_obs), map(int, batch.terminations.tolist()), strict=True))


@both
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(("end", "termination"), [("Trunc", 0), ("Term", 1), ("Both", 1)])
def test_an_episode_ends_with_its_final_observation(script, monkeypatch, tmp_path, end, termination, num_envs):
    """8 steps of each environment are 8 transitions: none of the reset is made up, and a time limit is no end."""
    env_id = f"small_envs:{'Vector' if script is dqn_cartpole_vec else ''}Ramp3{end}-v0"
    sizes = {"num_envs": num_envs, "total_timesteps": 8 * num_envs, "buffer_size": 16 * num_envs}
    replay = memory_of(script, monkeypatch, tmp_path, {"env_id": env_id, **sizes})
    assert count(replay) == 8 * num_envs
    assert transitions_in(replay) == {(0, 1, 0), (1, 2, 0), (2, 3, termination)}


# ----- Memory -----
def announced_bytes(capsys):
    """Returns the storage that a run announced, which is rounded to 0.1 MiB."""
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("storage: ")]
    return float(line.split()[1].replace(",", "")) * 2**20


def test_images_take_a_byte_a_pixel_and_few_more(monkeypatch, tmp_path, capsys):
    """100,000 of 84 x 84 bytes and 17 more are 0.66 GiB, where whole stacks with next ones would take 5.26."""
    args = {"env_id": "small_envs:RampGrey-v0", "buffer_size": 100_000, "num_envs": 8, "total_timesteps": 8}
    replay = memory_of(dqn_atari, monkeypatch, tmp_path, args)
    assert replay.obs_shape == (4, 84, 84)
    assert sum(column.nbytes for column in replay.columns.values()) == 707_300_000
    assert announced_bytes(capsys) == pytest.approx(707_300_000, abs=0.06 * 2**20)


def test_a_memory_takes_room_only_as_it_is_filled():
    """100,000 images: 0.7 GB when full, and some megabytes before."""
    process = psutil.Process()
    before = process.memory_info().rss
    replay = dqn_atari.ReplayBuffer(100_000, 8, (4, 84, 84), 4, CPU)
    assert count(replay) == 0
    obs = np.zeros((8, 4, 84, 84), np.uint8)
    for t in range(10):
        replay.add(obs + t, obs + t + 1, np.arange(8), np.zeros(8), np.zeros(8, bool))
    replay.sample(32, CPU)
    assert replay.columns["frames"].nbytes == 705_600_000
    assert process.memory_info().rss - before < 50 * 2**20


def test_vectors_take_what_is_announced(monkeypatch, tmp_path, capsys):
    """CartPole: two observations of 4 float32, an int64 and two float32 are 48 bytes."""
    args = {"env_id": "CartPole-v1", "buffer_size": 200_000, "num_envs": 2, "total_timesteps": 16}
    replay = memory_of(dqn_cartpole_vec, monkeypatch, tmp_path, args)
    assert sum(column.nbytes for column in replay.columns) == 200_000 * 48
    assert announced_bytes(capsys) == pytest.approx(200_000 * 48, abs=0.06 * 2**20)


# ----- Checkpoints -----
def some_memory(script, transitions=30, capacity=64):
    """Returns a memory with content, and one of the same sizes without."""
    if script is dqn_atari:
        replay, fresh = (script.ReplayBuffer(capacity, 2, (4, 1, 2), 4, CPU) for _ in range(2))
        envs = Stacks(np.random.default_rng(0), 2, 4, (1, 2), 255, 0.2)
        for _ in range(transitions // 2):
            replay.add(*envs.step())
    else:
        replay, fresh = (script.ReplayBuffer(capacity, 2) for _ in range(2))
        fill(replay, 2, transitions // 2)
    return replay, fresh


@both
@pytest.mark.parametrize("transitions", [0, 2, 30, 62, 64, 66, 200])
def test_a_memory_is_loaded_as_it_was_saved(script, transitions):
    replay, fresh = some_memory(script, transitions)
    fresh.load_state_dict(through_a_file(replay))
    assert (fresh.added, count(fresh)) == (replay.added, count(replay))
    assert replay.added == transitions
    # The same is drawn with the same seed.
    batches = []
    for memory in (replay, fresh) if transitions else ():
        torch.manual_seed(5)
        batches.append(memory.sample(256, CPU))
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_holds_the_rows_that_are_filled():
    """Of 10,000 rows for each of 2 environments 30 are filled, or 31 where an episode ended: 1,000 bytes a frame."""
    replay = dqn_atari.ReplayBuffer(20_000, 2, (4, 10, 100), 4, CPU)
    for t in range(30):
        obs, next_obs = np.full((2, 4, 10, 100), t, np.uint8), np.full((2, 4, 10, 100), t + 1, np.uint8)
        replay.add(obs, next_obs, np.zeros(2), np.zeros(2), np.zeros(2, bool))
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    assert 31 * 2 * 1017 < len(file.getvalue()) < 31 * 2 * 1017 + 5000


@pytest.mark.parametrize(
    "sizes",
    [(66, 2, (4, 1, 2), 4), (64, 4, (4, 1, 2), 4), (64, 2, (4, 2, 1), 4), (64, 2, (4, 1, 2), 1)],
    ids=["rows", "environments", "images", "stack"],
)
def test_a_memory_of_other_sizes_is_refused(sizes):
    replay, _ = some_memory(dqn_atari)
    with pytest.raises(dqn_atari.UsageError, match="other sizes; --no-save-replay starts a new one"):
        dqn_atari.ReplayBuffer(*sizes, CPU).load_state_dict(through_a_file(replay))
