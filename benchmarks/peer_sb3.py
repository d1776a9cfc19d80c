"""Trains stable-baselines3's PPO or DQN, so that our scripts can be compared with it on one machine.

Run:    python benchmarks/peer_sb3.py --algo ppo --env-id CartPole-v1 --seed 1 --total-timesteps 100000
Flags:  --hyperparameters zoo takes those that rl-baselines3-zoo publishes for the task, default leaves
        stable-baselines3's own. For the two PyBullet tasks of this repository nothing is published: they get the zoo's
        of CartPole-v1, since both are balanced in at most 500 steps at 1 or less each, too. The zoo's budgets are
        1e5 steps (PPO on CartPole-v1 and Pendulum-v1), 5e6 (PPO on BipedalWalker-v3) and 5e4 (DQN on CartPole-v1);
        schedules, DQN's exploration among them, stretch over --total-timesteps instead.
Steps:  are environment steps over all environments. Both algorithms collect whole rollouts, so the last may go
        beyond --total-timesteps; the closing step stands in args.json as global_step.
Folder: <run-dir>/<env-id>__sb3_<algo>__<seed>__<time>/ with args.json and stable-baselines3's own TensorBoard log.
        There are no checkpoints: a run that was cut off starts anew.
Scores: true returns of whole episodes with the most probable or mean action, statistics of observations frozen. During
        training stable-baselines3's EvalCallback writes eval/mean_reward; the closing line is of the last model.
        Evaluations step up to 10 environments at once, which is faster than the one that the callback makes by itself.
"""

import dataclasses
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.vec_env import VecEnv

ROOT = Path(__file__).resolve().parent.parent
EVAL_ENVS = 10
ZOO: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "CartPole-v1"): {
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "ent_coef": 0.0,
        "learning_rate": "lin_0.001",
        "clip_range": "lin_0.2",
    },
    ("ppo", "Pendulum-v1"): {
        "n_envs": 4,
        "n_steps": 1024,
        "gae_lambda": 0.95,
        "gamma": 0.9,
        "n_epochs": 10,
        "ent_coef": 0.0,
        "learning_rate": 1e-3,
        "clip_range": 0.2,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
    ("ppo", "BipedalWalker-v3"): {
        "normalize": True,
        "n_envs": 32,
        "n_steps": 2048,
        "batch_size": 64,
        "gae_lambda": 0.95,
        "gamma": 0.999,
        "n_epochs": 10,
        "ent_coef": 0.0,
        "learning_rate": 3e-4,
        "clip_range": 0.18,
    },
    ("dqn", "CartPole-v1"): {
        "learning_rate": 2.3e-3,
        "batch_size": 64,
        "buffer_size": 100_000,
        "learning_starts": 1_000,
        "gamma": 0.99,
        "target_update_interval": 10,
        "train_freq": 256,
        "gradient_steps": 128,
        "exploration_fraction": 0.16,
        "exploration_final_eps": 0.04,
        "policy_kwargs": {"net_arch": [256, 256]},
    },
}
"""hyperparams/ppo.yml and dqn.yml of https://github.com/DLR-RM/rl-baselines3-zoo; lin_x: from x linearly to 0"""
FLAGS_OF = {"BulletCartPole-v0": "CartPole-v1", "BalancingPlate-v0": "CartPole-v1"}
"""whose flags a task gets for which none are published"""


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


@dataclass(frozen=True)
class Args:
    """Trains stable-baselines3's PPO or DQN on the CPU, with published flags."""

    algo: Literal["ppo", "dqn"]
    """the algorithm, with a multilayer perceptron"""
    env_id: str
    """any id that gymnasium.make takes, package.module:Id-v0 included"""
    hyperparameters: Literal["zoo", "default"] = "zoo"
    """zoo: what rl-baselines3-zoo publishes for the task; default: stable-baselines3's own"""
    seed: int = 1
    """seeds python, numpy, torch, the environments and their action spaces"""
    threads: int = 1
    """CPU threads of torch"""
    run_dir: str = "runs"
    """parent folder of the run folders"""
    eval_every: int = 10_000
    """environment steps between evaluations during training; 0: only at the end"""
    eval_episodes: int = 10
    """episodes of each evaluation during training"""
    final_episodes: int = 100
    """episodes of the evaluation at the end"""
    total_timesteps: int = 100_000
    """environment steps of the whole run, over all environments"""

    def __post_init__(self) -> None:
        for name in ("threads", "eval_episodes", "final_episodes", "total_timesteps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        for name in ("seed", "eval_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 0")

    @property
    def exp_name(self) -> str:
        """Name of the experiment, part of the run folder's name."""
        return f"sb3_{self.algo}"


def hyperparameters(args: Args) -> dict[str, Any]:
    """Returns the algorithm's arguments in the zoo's notation, those of the environments among them.

    Raises:
        UsageError: the zoo has none for the task.
    """
    if args.hyperparameters == "default":
        return {}
    task = args.env_id.rpartition(":")[2]
    found = ZOO.get((args.algo, FLAGS_OF.get(task, task)))
    if found is None:
        known = [env_id for algo, env_id in ZOO if algo == args.algo]
        known += [env_id for env_id, source in FLAGS_OF.items() if source in known]
        raise UsageError(
            f"--env-id {args.env_id}: here are published flags of {args.algo} for {', '.join(known)} alone; "
            "--hyperparameters default takes any task"
        )
    return found


def scheduled(value: Any) -> Any:  # noqa: ANN401 (any argument of the algorithm)
    """Returns a value of the zoo as stable-baselines3 takes it: `lin_x` falls linearly from x to 0 over the run."""
    from stable_baselines3.common.utils import LinearSchedule

    if isinstance(value, str) and value.startswith("lin_"):
        return LinearSchedule(float(value.removeprefix("lin_")), 0.0, 1.0)
    return value


def make_envs(args: Args, settings: dict[str, Any], num_envs: int, seed: int, training: bool) -> "VecEnv":
    """Returns environments that step in this process, their returns recorded below all scaling.

    Raises:
        UsageError: the actions do not fit the algorithm.
    """
    from gymnasium.spaces import Discrete
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    envs = make_vec_env(args.env_id, num_envs, seed=seed, vec_env_cls=DummyVecEnv)
    if args.algo == "dqn" and not isinstance(envs.action_space, Discrete):
        raise UsageError(f"--env-id {args.env_id}: dqn wants Discrete actions, not {envs.action_space}")
    if settings.get("normalize"):
        # As in the zoo, rewards are scaled with the algorithm's discount.
        envs = VecNormalize(envs, training=training, norm_reward=training, gamma=settings["gamma"])
    return envs


def make_run_folder(args: Args) -> Path:
    """Makes a folder that no other run has.

    Raises:
        UsageError: it cannot be made.
    """
    env_id = args.env_id.replace("/", "-").replace(":", "-")
    name = f"{env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        folder = Path(args.run_dir) / (name + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"--run-dir {args.run_dir}: cannot make a folder there ({error.strerror})") from error
        return folder
    raise UsageError(f"--run-dir {args.run_dir}: 1000 runs called {name}")


def write_args_json(folder: Path, args: Args, settings: dict[str, Any], global_step: int) -> None:
    """Writes what the run was asked for, flags of the algorithm included, and where it stands."""
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    packages = ("torch", "gymnasium", "numpy", "stable-baselines3")
    content = {
        "args": {"exp_name": args.exp_name, **dataclasses.asdict(args), **settings},
        "global_step": global_step,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": {"python": platform.python_version()} | {x: importlib.metadata.version(x) for x in packages},
        "git_commit": commit,
        "device": "cpu",
    }
    (folder / "args.json").write_text(json.dumps(content, indent=2) + "\n")


def final_evaluation(model: "BaseAlgorithm", envs: "VecEnv", episodes: int) -> None:
    """Evaluates the last model, and prints the line that our scripts close with."""
    import numpy as np
    from stable_baselines3.common.evaluation import evaluate_policy

    scores, lengths = evaluate_policy(model, envs, episodes, deterministic=True, return_episode_rewards=True)
    pairs = {"mean": np.mean(scores), "std": np.std(scores), "min": min(scores), "max": max(scores)}
    pairs |= {"episodes": len(scores), "mean_length": np.mean(lengths)}
    print("eval:", *(f"{name}={round(float(value), 4):g}" for name, value in pairs.items()), flush=True)


def train(args: Args) -> None:
    """Trains and evaluates.

    Raises:
        UsageError: the task has no published flags, or does not fit the algorithm, or no folder can be made.
    """
    import torch
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import VecNormalize, sync_envs_normalization

    import envs as bullet_envs  # noqa: F401 (registers the PyBullet tasks)

    torch.set_num_threads(args.threads)
    settings = hyperparameters(args)
    num_envs = settings.get("n_envs", 1)
    not_algorithms = ("n_envs", "normalize")
    arguments = {name: scheduled(value) for name, value in settings.items() if name not in not_algorithms}
    num_eval_envs = min(args.eval_episodes, EVAL_ENVS)
    with ExitStack() as cleanup:
        envs = cleanup.enter_context(closing(make_envs(args, settings, num_envs, args.seed, True)))
        eval_envs, final_envs = (
            cleanup.enter_context(closing(make_envs(args, settings, n, args.seed + offset, False)))
            for n, offset in ((num_eval_envs, 10_000), (min(args.final_episodes, EVAL_ENVS), 20_000))
        )
        # PPO checks that its rollouts fit its minibatches, all check the spaces: before a folder is made.
        try:
            model = {"ppo": PPO, "dqn": DQN}[args.algo]("MlpPolicy", envs, seed=args.seed, device="cpu", **arguments)
        except (AssertionError, ValueError) as error:
            raise UsageError(f"stable-baselines3 refuses these: {' '.join(str(error).split())}") from error
        folder = make_run_folder(args)
        write_args_json(folder, args, settings, 0)
        model.set_logger(configure(str(folder), ["tensorboard"]))
        print(f"run folder: {folder}\nenvironment: {num_envs} x {args.env_id}", flush=True)
        callback = None
        if args.eval_every:
            # The callback counts steps of all environments together as one.
            every = max(args.eval_every // num_envs, 1)
            callback = EvalCallback(eval_envs, n_eval_episodes=args.eval_episodes, eval_freq=every, verbose=0)
        model.learn(args.total_timesteps, callback=callback)
        model.logger.close()
        if isinstance(envs, VecNormalize):
            sync_envs_normalization(envs, final_envs)
        final_evaluation(model, final_envs, args.final_episodes)
        write_args_json(folder, args, settings, model.num_timesteps)


def main() -> None:
    """Runs the command line: status 0 when done, 2 when the arguments are wrong."""
    args = tyro.cli(Args)
    # For envs, and for the modules of a user's own ids.
    sys.path[:0] = [str(ROOT)]
    sys.path.append(str(Path.cwd()))
    import gymnasium as gym

    try:
        train(args)
    except (UsageError, gym.error.Error, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
