"""Several samples of one prompt through real processes, as the Python client and gRPC have them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve.engine.sampling_params import SamplingParams
from splitserve.service.errors import InvalidRequest
from tests.cluster.harness import Cluster
from tests.cluster.test_exact import prompt_of
from tests.cluster.test_failover import busy
from tests.reference import greedy, sampled
from tests.tiny_models import EOS_TOKEN_ID

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def test_sample_set_differs_from_one_process(either_pair: Cluster, tiny: Tiny) -> None:
    """C65: three choices with their indices, each as if it were alone, ending when it likes."""
    prompt, params = (
        prompt_of(70),
        SamplingParams(max_tokens=40, temperature=1.0, seed=3, logit_bias=((EOS_TOKEN_ID, 3.0),)),
    )
    expected = [sampled(tiny("llama"), prompt, params, sample_index=index) for index in range(3)]
    assert len({len(text) for text in expected}) > 1
    options = {"n": 3, "max_tokens": 40, "temperature": 1.0, "seed": 3, "logit_bias": {EOS_TOKEN_ID: 3.0}}
    for _ in range(2):
        answer = either_pair.client.generate(prompt, **options)
        assert [list(sample.token_ids) for sample in answer.samples] == expected
    assert answer.completion_tokens == sum(map(len, expected))
    assert answer.prompt_tokens == len(prompt)
    either_pair.wait_drained()


def test_samples_are_sent_or_billed_once_each(either_pair: Cluster, tiny: Tiny) -> None:
    """One transfer carries the prompt for all samples, and the metrics count its tokens once."""
    costs = []
    for number, n in enumerate((1, 5)):
        prompt = prompt_of(90, 100 + number)
        names = ("splitserve_prompt_tokens_total", "splitserve_generation_tokens_total")
        before = (either_pair.kv_bytes(), [either_pair.metric(name) for name in names])
        answer = either_pair.client.generate(prompt, n=n, max_tokens=6, logprobs=0, prompt_logprobs=0, **GREEDY)
        assert [list(sample.token_ids) for sample in answer.samples] == [greedy(tiny("llama"), prompt, 6)] * n
        assert [len(sample.logprobs) for sample in answer.samples] == [6] * n
        assert len(answer.prompt_logprobs) == 90
        either_pair.wait_drained()
        after = (either_pair.kv_bytes(), [either_pair.metric(name) for name in names])
        assert [later - earlier for later, earlier in zip(after[1], before[1], strict=True)] == [90, 6 * n]
        costs.append([later - earlier for later, earlier in zip(after[0], before[0], strict=True)])
    assert costs[0] == costs[1]
    assert costs[0][0] > 0


def test_leaving_in_the_middle_leaves_samples_running(pair: Cluster) -> None:
    with pair.client.stream(prompt_of(40), n=4, max_tokens=900, **GREEDY) as stream:
        seen = {next(stream).index for _ in range(40)}
    assert seen == {0, 1, 2, 3}
    pair.wait_drained()


def test_sample_that_stops_takes_the_others_along(pair: Cluster) -> None:
    """A stop string is found at the router: decode ends that sample alone."""
    prompt, options = prompt_of(40), {"n": 3, "max_tokens": 60, "temperature": 1.0, "seed": 8, "ignore_eos": True}
    whole = pair.client.generate(prompt, **options)
    texts = [sample.text for sample in whole.samples]
    pieces = (texts[1][at : at + 4] for at in range(8, len(texts[1]) - 4))
    stop = next(piece for piece in pieces if piece not in texts[0] + texts[2] and "\ufffd" not in piece)
    stopped = pair.client.generate(prompt, stop=[stop], **options)
    assert [sample.text for sample in stopped.samples] == [texts[0], texts[1].split(stop)[0], texts[2]]
    assert [sample.finish_reason for sample in stopped.samples] == ["length", "stop", "length"]
    assert stopped.samples[1].matched_stop == stop
    assert stopped.completion_tokens < whole.completion_tokens
    pair.wait_drained()


def test_death_changes_or_repeats_samples(two_by_three: Cluster, tiny: Tiny) -> None:
    """The decode worker of three samples is killed after one of them has ended: the other two go on at the same time,
    and each text is that of an undisturbed run."""
    prompt = prompt_of(50)
    options = {"max_tokens": 250, "temperature": 1.0, "seed": 5}
    params = SamplingParams(logit_bias=((EOS_TOKEN_ID, 0.7),), **options)
    expected = [sampled(tiny("gemma2"), prompt, params, sample_index=index) for index in range(3)]
    assert [len(text) < 100 for text in expected] == [False, True, False]
    before = two_by_three.metric("splitserve_attempts_total")
    with two_by_three.client.stream(prompt, n=3, logit_bias={EOS_TOKEN_ID: 0.7}, **options) as stream:
        num_seen = [0, 0, 0]
        for chunk in stream:
            num_seen[chunk.index] += 1
            if min(num_seen[0], num_seen[2]) == len(expected[1]) + 10:
                busy(two_by_three, "decode").kill()
                break
        answer = stream.result()
    assert [list(sample.token_ids) for sample in answer.samples] == expected
    assert answer.attempts == 3
    assert two_by_three.metric("splitserve_attempts_total") - before == 3


def test_more_samples_than_there_is_room_for_wait(pair: Cluster) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pair.client.generate(prompt_of(40), n=128, max_tokens=4)
    assert caught.value.reason == "TOO_MANY_SAMPLES"
