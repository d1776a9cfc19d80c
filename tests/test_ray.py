"""What ppo_atari_ray.py does on real Ray clusters of this machine; README says how to install Ray and run this."""

import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import psutil
import pytest
from conftest import ROOT
from short_runs import assert_equal, command_line, failed, flags_of, hashes, load, only_run, resume, scalars, spy

import ppo_atari
import ppo_atari_ray as script

if not os.environ.get("RAY_TESTS"):
    pytest.skip("wants RAY_TESTS=1 and requirements-ray.txt", allow_module_level=True)

# Ray's own warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")
# Games of 200 frames end by a time limit in the first rollout and later, which the wire and the rewards must tell.
gym.register(
    "ShortBreakout-v0",
    entry_point="ale_py.env:AtariEnv",
    kwargs={"game": "breakout", "max_num_frames_per_episode": 200, "frameskip": 1},
    disable_env_checker=True,
)
SIZES = {"num_envs": 4, "num_steps": 40, "num_minibatches": 2, "update_epochs": 1, "total_timesteps": 480}
SIZES |= {
    "env_id": "test_ray:ShortBreakout-v0",
    "eval_every": 0,
    "checkpoint_every": 160,
    "eval_episodes": 1,
    "seed": 3,
}
SIZES |= {"cuda": False, "threads": 1, "progress": False}
"""160 samples an iteration in 2 minibatches; 3 iterations"""
signals_are_heard = pytest.mark.skipif(os.name == "nt", reason="Windows ends a process at once")


def arguments(run_dir, **changes):
    return script.Args(**{**SIZES, "run_dir": str(run_dir), "envs_per_shard": 1, "num_workers": 1, **changes})


def weights_of(monkeypatch, program, args):
    """Trains, and returns the weights after each iteration."""
    found = []

    def note(run, scalars):
        if "losses/value_loss" in scalars:
            found.append({name: x.clone() for name, x in run.modules["agent"].state_dict().items()})

    with monkeypatch.context() as patch:
        spy(patch, program.Run, "log", note)
        program.train(args)
    return found


def at_iteration(monkeypatch, number, act):
    """Lets something happen at the end of an iteration."""
    seen = []

    def note(run, scalars):
        seen.extend(["charts/waiting"] * ("charts/waiting" in scalars))
        if len(seen) == number and "charts/waiting" in scalars:
            act()

    spy(monkeypatch, script.Run, "log", note)


def start(args):
    """Starts a run in a process of its own, and returns it when its run folder has been told."""
    command = [sys.executable, str(ROOT / "ppo_atari_ray.py"), *flags_of(args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    said = []
    while not said or not said[-1].startswith("a new run"):
        said.append(process.stdout.readline())
        assert said[-1], said
    return process


@pytest.fixture
def cluster():
    """Two nodes of one core on this machine, with a secret of their own."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    os.environ.setdefault("RAY_AUTH_TOKEN", "6f" * 32)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


# ----- The wire -----
def test_only_the_newest_image_of_a_stack_that_follows_another_is_sent():
    stacks = np.array([[0, 0, 0, 1], [0, 0, 1, 2], [5, 6, 7, 8], [6, 7, 8, 9]], np.uint8)
    obs = np.tile(stacks[:, None, :, None, None], (1, 2, 1, 3, 5))  # (T, E, C, H, W)
    obs[1, 1, 0, 2, 4] = 7  # this one does not follow: its oldest image is another
    follows, newest, older = script.pack(obs)
    assert follows.tolist() == [[False, False], [True, False], [False, False], [True, True]]
    assert (script.zlib.decompress(newest)[::15], len(script.zlib.decompress(older))) == (
        bytes([1, 1, 2, 2, 8, 8, 9, 9]),
        5 * 3 * 15,
    )
    assert np.array_equal(script.unpack(follows, newest, older, (4, 3, 5)), obs)


def test_stacks_of_one_image_are_sent_whole():
    obs = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 1, 2, 2)
    assert np.array_equal(script.unpack(*script.pack(obs), (1, 2, 2)), obs)


# ----- The same result -----
def test_a_single_shard_gives_the_weights_of_ppo_atari(tmp_path, monkeypatch):
    args = ppo_atari.Args(**SIZES, run_dir=str(tmp_path / "one"))
    expected = weights_of(monkeypatch, ppo_atari, args)
    found = weights_of(monkeypatch, script, arguments(tmp_path / "two", envs_per_shard=4))
    assert len(expected) == 3
    assert_equal(found, expected)
    logs = [scalars(only_run(tmp_path / name)) for name in ("one", "two")]
    assert len(logs[0]["charts/episodic_return"]) == 8  # of 50 steps each, 4 environments of 120 steps
    for tag in logs[0].keys() - {"charts/SPS"}:
        assert logs[0][tag] == logs[1][tag], tag


@pytest.mark.parametrize("overlap", [False, True])
def test_any_number_of_workers_gives_the_same_weights(tmp_path, monkeypatch, overlap):
    several = [
        weights_of(monkeypatch, script, arguments(tmp_path, num_workers=n, overlap=overlap))
        for n in ((1, 3) if overlap else (1, 2, 4))
    ]
    assert len(several[0]) == 3
    assert not several[0][0]["actor.bias"].equal(several[0][1]["actor.bias"])
    for other in several[1:]:
        assert_equal(other, several[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_the_rollout_is_of_weights_that_are_one_update_old(tmp_path, overlap):
    """The first minibatch is the only one here: without overlap its ratio is 1."""
    script.train(arguments(tmp_path, envs_per_shard=4, num_minibatches=1, overlap=overlap))
    divergences = [value for _, value in scalars(only_run(tmp_path))["losses/approx_kl"]]
    assert [value > 1e-7 for value in divergences] == [False, overlap, overlap]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_resumed_runs_random_streams_differ_unless_they_take_turns(tmp_path, monkeypatch, overlap):
    """Four shards and the learner; a generator's state holds its seed. Without overlap shard 0 draws as the learner."""
    script.train(arguments(tmp_path, total_timesteps=160, overlap=overlap))
    seeds, real = [], script.fetch

    def noting(ray, futures):
        answers = real(ray, futures)
        rollouts = [x for answer in answers if isinstance(answer, list) for x in answer]
        seeds.extend(script.torch.Generator().set_state(x["state"]).initial_seed() for x in rollouts)
        return answers

    monkeypatch.setattr(script, "fetch", noting)
    resume(script, monkeypatch, only_run(tmp_path), "--total-timesteps=320")
    assert len(seeds) == 4
    assert len({*seeds, script.torch.initial_seed()}) == 4 + overlap


# ----- Checkpoints -----
def test_a_run_goes_on_with_another_number_of_workers(tmp_path, monkeypatch, capsys):
    script.train(arguments(tmp_path / "one", total_timesteps=160))
    folders = [only_run(tmp_path / "one"), tmp_path / "other"]
    shutil.copytree(*folders)
    for folder, workers in zip(folders, (1, 4), strict=True):
        flags = ("--total-timesteps=480", f"--num-workers={workers}")
        resume(script, monkeypatch, folder, *flags)
        assert "\ngoing on, at step 160\n" in capsys.readouterr().out
    one, other = (load(folder) for folder in folders)
    assert one["counters"]["global_step"] == 480
    assert_equal(other["agent"], one["agent"])
    assert_equal(other["optimizer"], one["optimizer"])

    before = hashes(folders[0])
    monkeypatch.setitem(sys.modules, "ray", None)  # an evaluation needs no Ray
    command_line(script, monkeypatch, "--evaluate", str(folders[0]), "--no-cuda")
    assert re.search(r"\neval: mean=\S+ .* episodes=1 mean_length=50\n$", capsys.readouterr().out)
    assert hashes(folders[0]) == before


# ----- Ends and deaths -----
def test_a_signal_is_heard_although_all_workers_have_answered(monkeypatch):
    """As with --overlap, where they answer during the update."""
    monkeypatch.setattr(script, "signals", [signal.SIGINT])
    ray = SimpleNamespace(wait=lambda futures, **_: (futures, []), get=lambda futures: futures)
    with pytest.raises(SystemExit) as exit_info:
        script.fetch(ray, ["done"])
    assert exit_info.value.code == 128 + signal.SIGINT


@signals_are_heard
@pytest.mark.parametrize(("vector", "signum"), [("sync", signal.SIGINT), ("async", signal.SIGTERM)])
def test_a_signal_ends_a_run_in_order_and_no_process_is_left(tmp_path, vector, signum):
    backend = {"vector": vector, "backend": "ale" if vector == "sync" else "gymnasium"}
    process = start(arguments(tmp_path, envs_per_shard=2, num_workers=2, total_timesteps=10**7, **backend))
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [x for x in family if x.name().startswith("ray::Worker")]
    assert len(workers) >= 2
    ends = {x.laddr.ip for x in family for x in x.net_connections() if x.status == psutil.CONN_LISTEN}
    assert ends <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    process.send_signal(signum)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, out
    assert re.search(r"interrupted at step [\d,]+; go on with: ", out)
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert load(only_run(tmp_path))["counters"]["global_step"] % 160 == 0


@signals_are_heard
def test_nothing_is_left_of_a_run_that_was_killed(tmp_path):
    process = start(arguments(tmp_path, total_timesteps=10**7))
    family = psutil.Process(process.pid).children(recursive=True)
    # Ray's agents wait for an answer of the dead cluster for a minute, and end then.
    working = [x for x in family if not x.name().endswith("Agent")]
    process.kill()
    process.communicate(timeout=60)
    assert psutil.wait_procs(working, timeout=60)[1] == []


@signals_are_heard
def test_a_worker_that_was_killed_collects_its_part_again(tmp_path, monkeypatch, capsys):
    """One of two workers dies between the iterations 2 and 3."""

    def kill():
        workers = [x for x in psutil.Process().children(recursive=True) if x.name().startswith("ray::Worker")]
        max(workers, key=lambda x: x.pid).kill()

    at_iteration(monkeypatch, 2, kill)
    script.train(arguments(tmp_path, num_workers=2))
    lines = re.findall("a worker died: shards (.*) collected iteration (.) anew, in new games", capsys.readouterr().out)
    assert lines in ([("[0, 2]", "3")], [("[1, 3]", "3")])
    assert load(only_run(tmp_path))["counters"]["global_step"] == 480


@signals_are_heard
def test_a_worker_that_dies_within_a_rollout_collects_it_again(tmp_path, monkeypatch, capsys):
    """Its environments end their process at their 50th step: in iteration 2, and the new process's in iteration 3."""
    monkeypatch.setenv("SIGNAL_AT", "50:SIGKILL")
    script.train(arguments(tmp_path, env_id="small_envs:SignalAt-v0", envs_per_shard=2))
    lines = re.findall("a worker died: shards (.*) collected iteration (.) anew, in new games", capsys.readouterr().out)
    assert lines == [("[0, 1]", "2"), ("[0, 1]", "3")]
    # Episodes of 3 steps, which pay 1 each: 13 whole ones of each environment in 40 steps from a start.
    assert len(scalars(only_run(tmp_path))["charts/episodic_return"]) == 3 * 13 * 4


@signals_are_heard
def test_workers_that_die_at_every_start_end_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SIGNAL_AT", "1:SIGKILL")
    args = arguments(tmp_path, env_id="small_envs:SignalAt-v0", envs_per_shard=4)
    status, text = failed(script, monkeypatch, capsys, *flags_of(args))
    assert (status, text.startswith("error: Ray's workers failed: ")) == (1, True), text


@signals_are_heard
def test_two_nodes_give_the_same_weights_and_one_of_them_may_die(tmp_path, monkeypatch, capsys, cluster):
    expected = weights_of(monkeypatch, script, arguments(tmp_path / "one"))
    on_both = {"num_workers": 2, "ray_address": cluster.address}
    assert_equal(weights_of(monkeypatch, script, arguments(tmp_path / "two", **on_both)), expected)
    capsys.readouterr()
    (second,) = cluster.worker_nodes
    killed = []

    def kill():
        processes = psutil.Process(second.all_processes["raylet"][0].process.pid).children()
        if any(x.name().startswith("ray::Worker") for x in processes):
            cluster.remove_node(second, allow_graceful=False)
            # They end when they miss their node; until then a worker could still answer.
            killed.extend(psutil.wait_procs(processes, timeout=60)[0])

    # Ray may place both workers on the first node: then another run asks it again.
    for attempt in ("a", "b", "c", "d", "e", "f"):
        if not killed:
            with monkeypatch.context() as patch:
                at_iteration(patch, 2, kill)
                script.train(arguments(tmp_path / attempt, **on_both))
    # It may also start the lost worker again on the dying node, before it knows: then it dies twice.
    assert set(re.findall("a worker died: .* collected iteration (.) anew", capsys.readouterr().out)) == {"3"}
    assert {load(only_run(x))["counters"]["global_step"] for x in tmp_path.glob("[a-f]")} == {480}


@signals_are_heard
def test_the_head_may_die_and_the_run_goes_on_later(tmp_path, monkeypatch, capsys, cluster):
    process = start(arguments(tmp_path, num_workers=2, total_timesteps=10**7, ray_address=cluster.address))
    while not list(tmp_path.glob("*/latest.pt")):
        assert process.poll() is None
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    out, _ = process.communicate(timeout=120)
    # Ray itself ends a process that has lost its head, without a word.
    assert (process.returncode, "Traceback" in out) == (1, False), out
    folder = only_run(tmp_path)
    step = load(folder)["counters"]["global_step"]
    assert step >= 160
    capsys.readouterr()
    flags = ("--ray-address=local", "--num-workers=1", f"--total-timesteps={step + 160}")
    resume(script, monkeypatch, folder, *flags)
    assert f"\ngoing on, at step {step:,}\n" in capsys.readouterr().out


# ----- Wrong use -----
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-envs=8", "--envs-per-shard=3"], "--envs-per-shard 3 must divide --num-envs 8"),
        (["--num-envs=8", "--envs-per-shard=4", "--num-workers=3"], "--num-workers 3 must be at most 2"),
        (["--num-workers=0"], "--num-workers 0 must be between 1 and 10,000"),
        (["--ray-address=127.0.0.1:9"], "--ray-address 127.0.0.1:9: no cluster that fits: "),
        (["--ray-address=somewhere"], "--ray-address somewhere: no cluster that fits: "),
    ],
)
def test_wrong_use_is_told_in_one_line(tmp_path, monkeypatch, capsys, flags, message):
    status, text = failed(script, monkeypatch, capsys, f"--run-dir={tmp_path}", "--no-cuda", *flags)
    assert status == 2
    assert message in text
    assert list(tmp_path.iterdir()) == []


def test_without_ray_a_line_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    status, text = failed(script, monkeypatch, capsys, f"--run-dir={tmp_path}", "--no-cuda")
    assert (status, text) == (2, "error: this script needs Ray: pip install -r requirements-ray.txt\n")


def test_what_a_worker_meets_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    args = arguments(tmp_path, env_id="small_envs:NanLater-v0", num_steps=100, total_timesteps=800)
    status, text = failed(script, monkeypatch, capsys, *flags_of(args))
    assert status == 1
    assert "NanLater-v0 is not finite in a step" in text


def test_workers_that_lack_a_package_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    """A module that only the learner finds, as on a cluster without the packages."""
    (tmp_path / "only_here.py").write_text("from small_envs import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    args = arguments(tmp_path / "runs", env_id="only_here:Ramp3Term-v0")
    status, text = failed(script, monkeypatch, capsys, *flags_of(args))
    assert status == 1
    assert "Ray's workers failed: " in text
    assert "No module named 'only_here'" in text
    assert not (tmp_path / "runs").exists()
