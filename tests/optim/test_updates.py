"""How many threads update: the cores but one."""

from megatrain.optim.updates import update_threads


def test_one_thread_is_left_and_one_remains(monkeypatch):
    for processors, expected in ((1, 1), (2, 1), (16, 15)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, n=processors: set(range(n)), raising=False)
        assert update_threads() == expected
    assert update_threads(leave=0) == 16
    assert update_threads(leave=99) == 1
