"""A run that was stopped while it was evaluated for the last time makes up for that when it is resumed."""

import signal

import pytest
import test_checkpoint
import test_continuous
import test_dqn
import test_plate
import test_ppo_cartpole
import test_reinforce
import test_scripts_agree
from short_runs import load, only_run, resume, scalars

import dqn_atari
import dqn_balancing_plate
import dqn_cartpole_vec
import ppo_atari
import ppo_cartpole
import ppo_continuous
import reinforce_bullet_cartpole
import rpo_continuous

SHORT = {
    dqn_atari: lambda folder, **flags: test_dqn.tiny(dqn_atari, folder, **flags),
    dqn_balancing_plate: test_plate.tiny,
    dqn_cartpole_vec: lambda folder, **flags: test_dqn.tiny(dqn_cartpole_vec, folder, **flags),
    ppo_atari: test_checkpoint.tiny,
    ppo_cartpole: test_ppo_cartpole.tiny,
    ppo_continuous: lambda folder, **flags: test_continuous.tiny(ppo_continuous, folder, **flags),
    reinforce_bullet_cartpole: test_reinforce.tiny,
    rpo_continuous: lambda folder, **flags: test_continuous.tiny(rpo_continuous, folder, **flags),
}


def test_every_script_is_tried():
    assert {script.__name__ for script in SHORT} == {path.stem for path in test_scripts_agree.SCRIPTS}


@pytest.mark.parametrize("every", [0, 10**9], ids=["only one", "last of several"])
@pytest.mark.parametrize("script", SHORT, ids=lambda script: script.__name__)
def test_an_evaluation_at_the_end_is_made_up_for(script, tmp_path, monkeypatch, every):
    evaluate = script.evaluate

    def signalling(*args):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*args)

    monkeypatch.setattr(script, "evaluate", signalling)
    with pytest.raises(script.Interrupted):
        script.train(SHORT[script](tmp_path, eval_every=every))
    monkeypatch.setattr(script, "evaluate", evaluate)
    folder = only_run(tmp_path)
    stopped = load(folder)["counters"]
    assert (stopped["evaluated"], stopped["best_eval"]) == (0, None)
    assert not (folder / "best.pt").exists()
    # The second time it is finished, and logs nothing.
    for _ in range(2):
        resume(script, monkeypatch, folder)
        best, latest = (load(folder, f"{name}.pt")["counters"] for name in ("best", "latest"))
        assert best == latest
        for name in ("global_step", "updates", "episodes"):
            assert latest[name] == stopped[name]
        steps = [step for step, _ in scalars(folder).get("eval/return_mean", [])]
        assert steps == ([stopped["global_step"]] if every else [])
