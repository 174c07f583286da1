"""When the learner rests for the model's sake, and when the model leaves it a core."""

from hypothesis import given
from hypothesis import strategies as st

from rlcore.records.engine_link import CaptureCounts, EngineReport
from server.cores import BUSY, CALM, LINGER, LONGEST_REST, RELIEF, CoreShare, share_cores
from server.model_cores import ModelCores


def reports(share: CoreShare, running: int, seconds: float, start: float = 0.0) -> list[bool]:
    seen = []
    for i in range(int(seconds)):
        share.observe(running, False, start + i)
        seen.append(share.resting)
    return seen


def test_a_few_requests_never_make_it_rest():
    assert not any(reports(CoreShare(), CALM, 3600))


def test_load_makes_it_rest_within_ten_reports_and_calm_ends_that():
    share = CoreShare()
    assert reports(share, 2 * BUSY, 10)[-1]
    assert not reports(share, 1, 10, 10.0)[-1]


def test_one_report_of_a_burst_changes_nothing():
    assert not reports(CoreShare(), 2 * BUSY, 1)[0]


def test_between_calm_and_busy_it_stays_as_it_is():
    between = (BUSY + CALM) // 2 + 1
    busy, calm = CoreShare(), CoreShare()
    reports(busy, 2 * BUSY, 10)
    assert all(reports(busy, between, 100, 10.0))
    assert not any(reports(calm, between, 100))


def test_load_without_an_end_leaves_it_some_time():
    seen = reports(CoreShare(), 4 * BUSY, 4 * (LONGEST_REST + RELIEF))
    assert 3 * RELIEF <= seen.count(False) <= 5 * RELIEF


def test_a_core_is_left_while_it_computes_and_a_while_after():
    share = CoreShare()
    share.observe(1, False, 0.0)
    assert share.spared == 0
    share.observe(1, True, 1.0)
    assert share.spared == 1
    share.observe(1, False, LINGER)
    assert share.spared == 1
    share.observe(1, False, 1.0 + LINGER)
    assert share.spared == 0


def test_under_load_the_core_comes_back_as_soon_as_it_has_stopped():
    share = CoreShare()
    for second in range(10):
        share.observe(4 * BUSY, True, float(second))
    assert share.resting
    assert share.spared == 1, "it has not stopped yet"
    share.observe(4 * BUSY, False, 10.0)
    assert share.spared == 0


@given(
    st.lists(st.tuples(st.integers(0, 100), st.booleans(), st.floats(0.1, 1000.0)), max_size=200)
)
def test_it_never_rests_longer_than_stated_and_never_loses_its_core_while_it_computes(steps):
    share, now, resting_since = CoreShare(), 0.0, None
    for running, computing, passed in steps:
        now += passed
        share.observe(running, computing, now)
        assert share.spared or not computing
        if share.resting:
            resting_since = now if resting_since is None else resting_since
            assert now - resting_since < LONGEST_REST
        else:
            resting_since = None


class Ends:
    """Stands for both links: what they were told, and reports at will."""

    def __init__(self) -> None:
        self.report: EngineReport | None = None
        self.computing = True
        self.on_report: list = []
        self.rests: list[bool] = []
        self.spared: list[int] = []

    def let_rest(self, rest: bool) -> None:
        self.rests.append(rest)

    def spare_cores(self, cores: int) -> None:
        self.spared.append(cores)

    def says(self, threads: int, running: int) -> None:
        self.report = EngineReport("1", 0, 3, [], CaptureCounts(), threads, running)
        for heard in self.on_report[1:]:
            heard(self.report)


def test_both_sides_are_told_with_each_report():
    ends = Ends()
    share_cores(ends, ends, ModelCores(2, 2))
    for _ in range(10):
        ends.says(threads=2, running=4 * BUSY)
    assert ends.spared == [1] * 10
    assert ends.rests[-1]


def test_a_learner_whose_core_is_not_the_models_never_rests():
    ends = Ends()
    share_cores(ends, ends, ModelCores(4, 2))
    for _ in range(10):
        ends.says(threads=2, running=4 * BUSY)
    assert ends.rests == [False] * 10


def test_where_the_threads_are_not_ours_nobody_is_told_anything():
    ends = Ends()
    share_cores(ends, ends, ModelCores(0, 0))
    for _ in range(10):
        ends.says(threads=0, running=4 * BUSY)
    assert ends.spared == []
    assert ends.rests == []
