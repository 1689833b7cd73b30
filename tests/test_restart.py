"""Does a rank that asks for a restart in vain end with words? (That a restart works: tests/test_benchmark.py.)"""

import pytest
from support.accelerators import fresh_accelerate

from adaptiveload_hf import UserError, make_accelerator
from adaptiveload_hf.restart import all_ranks_restart_together


def test_a_rank_that_nobody_answers_ends_with_what_to_do(monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.restart._watch", lambda *_: None)
    monkeypatch.setattr("adaptiveload_hf.restart._PATIENCE_SECONDS", 0.01)
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        accelerator = make_accelerator()
        refused = pytest.raises(UserError, match=r"ran out of memory, and the main process does not answer")
        with refused, all_ranks_restart_together(accelerator, print) as restart:
            restart("note")


def test_nothing_restarts_where_nobody_asks():
    kept = []
    with fresh_accelerate(ACCELERATE_USE_CPU="true"), all_ranks_restart_together(make_accelerator(), kept.append):
        pass
    assert not kept
