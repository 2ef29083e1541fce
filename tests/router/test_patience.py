"""For how many steps a worker may owe an answer: one that could not answer yet is given up, or one that never will is
not."""

import pytest

from router.patience import Patience
from router.worker import LoadReport
from tests.router.cluster_fakes import Router


@pytest.mark.parametrize(
    ("looks", "is_over"),
    [
        ([(7, 0.0)], False),  # a single look shows no progress, and may just precede the answer
        ([(7, 0.5)] * 50, False),  # one long step
        ([(7, 0.5), (8, 0.5), (8, 0.5)], False),  # it ended in this moment, and the next one has begun
        ([(7, 0.5), (8, 0.0)], False),  # it ended in this moment, and the answer is on its way
        ([(7, 0.5), (8, 0.0), (8, 0.0)], True),  # it ended, and there was nothing more to do
        ([(7, 0.5), (8, 0.5), (9, 0.5)], True),
        ([(7, 0.5), (1007, 0.0)], True),
        ([(7, 0.0), (7, 0.0)], True),  # idle all the time
        ([(7, 0.0), (7, 0.5)], False),
    ],
)
async def test_worker_in_a_long_step_is_taken_for_one_that_forgot(
    looks: list[tuple[int, float]], is_over: bool
) -> None:
    (prefill,), _ = Router().pairs()
    patience = Patience(prefill.worker)
    verdicts = []
    for engine_steps, step_age_s in looks:
        prefill.worker.load = LoadReport(engine_steps=engine_steps, step_age_s=step_age_s)
        verdicts.append(patience.is_over())
    assert verdicts == [False] * (len(looks) - 1) + [is_over]
