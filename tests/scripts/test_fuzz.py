"""scripts/fuzz.py: random cases equal `model.generate`, and a planted fault is found again by the printed command."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import replace

import pytest
import torch

import fuzz as script
from decode.accept import Acceptance
from decode.draft import Draft
from decode.step import State
from fuzz_cases import DOORS, DRAFTERS, draw_case
from medusa.backbone import Readout
from medusa.errors import RequestError, RunError
from tiny_models import RECURRENT, SUPPORTED

COMMAND = re.compile(r"^python scripts/fuzz\.py (--seed \d+ --case \d+)$", re.MULTILINE)


@pytest.mark.full
def test_random_cases_equal_generate(capsys: pytest.CaptureFixture) -> None:
    """The number of cases is fixed, so that the test takes the same time everywhere; CI runs more for two minutes."""
    count = 30
    assert script.main(["--cases", str(count), "--seed", "5"]) == 0
    shown = capsys.readouterr().out
    counted = re.search(rf"seed 5: {count} cases, (\d+) equal", shown)
    assert counted is not None
    assert int(counted[1]) >= 0.8 * count, "most cases must be compared, not refused"
    taus = [float(tau) for tau in re.findall(r"^\| steps \| .* \| ([\d.]+) \|$", shown, re.MULTILINE)]
    assert taus[0] > 1.2, "hardly any guess was accepted: no power"


@pytest.mark.full
def test_a_planted_fault_is_found_again_by_the_printed_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The cache keeps the first nodes of a draft instead of the accepted path; without the fault, nothing differs."""
    compact = State.compact

    def keep_first_nodes(self: State, draft: Draft, readout: Readout, accepted: Acceptance) -> None:
        first = torch.arange(accepted.path.shape[1]).expand_as(accepted.path)
        compact(self, draft, readout, accepted._replace(path=first))

    def is_telling(case: script.Case) -> bool:
        """Whether long paths at random nodes are accepted, and nothing but the length is asked for."""
        return case.drafter == "scripted" and len(case.options) == 1 and case.options.get("max_new_tokens", 0) > 20

    seed = next(str(seed) for seed in itertools.count() if is_telling(draw_case(seed, 0)))
    monkeypatch.setattr(script, "ATTEMPTS", 1)
    with monkeypatch.context() as planted:
        planted.setattr(State, "compact", keep_first_nodes)
        assert script.main(["--cases", "1", "--seed", seed]) == 1
        found = COMMAND.findall(capsys.readouterr().out)
        assert script.main(shlex.split(found[0])) == 1
        assert COMMAND.findall(capsys.readouterr().out) == found
    assert script.main(shlex.split(found[0])) == 0


def test_errors_of_other_kinds_are_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def ended(error: Exception) -> int:
        def decoded(*args: object) -> None:
            raise error

        monkeypatch.setattr(script, "decoded", decoded)
        monkeypatch.setattr(script, "ATTEMPTS", 0)
        return script.main(["--case", "1", "--seed", "5"])

    assert ended(RequestError("12 is too much")) == 0
    assert "refused, 1: N is too much" in capsys.readouterr().out
    assert ended(ValueError("broken")) == 1
    assert "raises: ValueError: broken (test_fuzz.py:" in capsys.readouterr().out


def test_a_run_that_compares_fewer_than_half_of_its_cases_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(kinds: str) -> int:
        outcomes = iter(kinds.split(", "))
        monkeypatch.setattr(script, "judge", lambda case: script.Outcome(next(outcomes)))
        return script.main(["--cases", str(kinds.count(",") + 1)])

    assert main("refused, equal, equal, no reference") == 0
    with pytest.raises(RunError, match="only 1 of 3 cases were compared"):
        main("refused, equal, no reference")


def test_missing_and_wrong_scores_are_differences() -> None:
    case = replace(draw_case(0, 0), door="generate", options={"max_new_tokens": 2, "output_scores": True})
    scores = {"scores": [[torch.zeros(3), torch.ones(3)]]}
    expected = script.Texts([[1, 2]], scores)
    assert script.difference(case, expected, script.Texts([[1, 2]], scores)) == ""
    assert script.difference(case, expected, script.Texts([[1, 2]])) == "row 0: no scores for each of 2 tokens"
    short = {"scores": [scores["scores"][0][:1]]}
    assert script.difference(case, expected, script.Texts([[1, 2]], short)) == "row 0: no scores for each of 2 tokens"
    wrong = {"scores": [[torch.zeros(3), torch.zeros(3)]]}
    assert script.difference(case, expected, script.Texts([[1, 2]], wrong)) == "row 0, token 1: other scores"


def test_a_failing_case_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the fault needs an EOS token and a prompt above 3, everything else goes."""

    def judge(case: script.Case) -> script.Outcome:
        fails = "eos_token_id" in case.options and any(len(prompt) > 3 for prompt in case.prompts)
        return script.Outcome("differs" if fails else "equal")

    drawn = (draw_case(0, number) for number in range(500))
    case = next(case for case in drawn if len(case.prompts) > 2 and case.model and judge(case).kind == "differs")
    monkeypatch.setattr(script, "judge", judge)
    monkeypatch.setattr(script, "ATTEMPTS", 1000)
    small = script.shrunk(case, "differs")
    assert set(small.options) - {"max_new_tokens", "max_length"} == {"eos_token_id"}
    assert [3 < len(prompt) < 8 for prompt in small.prompts] == [True]
    assert (small.form, small.model) == ("plain", {})


def test_draws_repeat_and_reach_everything() -> None:
    cases = [draw_case(3, number) for number in range(400)]
    assert cases == [draw_case(3, number) for number in range(400)]
    assert {case.family for case in cases} == {*SUPPORTED, *RECURRENT}
    assert {case.drafter.partition(":")[0] for case in cases} == set(DRAFTERS)
    assert {case.door for case in cases} == set(DOORS)
    shapes = {case.shape for case in cases}
    assert shapes >= {"topk", "dynamic", "drawn", "chain", "no choice", "mc_sim_7b_63"}
    assert {len(case.prompts) for case in cases} >= {1, 2, 5}
    assert max(len(prompt) for case in cases for prompt in case.prompts) > 40
