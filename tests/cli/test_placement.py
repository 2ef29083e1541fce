"""What `up` decides before it starts anything: cores, ports, command lines."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.cli import up
from splitserve.cli.placement import Placement, place, place_another, usable_cores
from splitserve.cli.roles import ChildSpec, Model, Ports, Roles, router_spec, worker_spec
from splitserve.cli.roster import Roster
from splitserve.cli.setup import Setup
from splitserve.service.errors import InvalidRequest
from splitserve.service.ports import claim

PORTS = Ports(grpc=1, http=2, internal=3)
MODEL = Model(directory=Path("/m"), served_name="served")


@pytest.mark.parametrize(
    ("cores", "num_prefill", "num_decode", "prefill", "decode"),
    [
        ([0], 1, 1, [()], [()]),
        ([0, 1], 1, 1, [(0,)], [(1,)]),
        ([0, 1], 2, 3, [(0,), (0,)], [(1,), (1,), (1,)]),
        ([0, 1, 2], 1, 1, [(0, 1)], [(2,)]),
        ([4, 5, 6, 7], 1, 1, [(4, 5)], [(6, 7)]),
        ([0, 1, 2, 3, 4], 3, 1, [(0, 1), (2,), (3,)], [(4,)]),
        ([0, 1, 2, 3], 1, 5, [(0,)], [(2,), (3,), (2,), (3,), (2,)]),
        ([0, 1, 2], 0, 2, [], [(0, 1), (2,)]),
        ([0, 1], 0, 3, [], [(0,), (1,), (0,)]),
    ],
)
def test_cores_went_to_the_wrong_worker(
    cores: list[int], num_prefill: int, num_decode: int, prefill: list[tuple[int, ...]], decode: list[tuple[int, ...]]
) -> None:
    got_prefill, got_decode = place(cores, num_prefill, num_decode)
    assert [placement.cores for placement in got_prefill] == prefill
    assert [placement.cores for placement in got_decode] == decode


@given(st.integers(2, 64), st.integers(0, 8), st.integers(1, 8))
def test_prefill_and_decode_shared_a_core(num_cores: int, num_prefill: int, num_decode: int) -> None:
    prefill, decode = place(range(num_cores), num_prefill, num_decode)
    assert (len(prefill), len(decode)) == (num_prefill, num_decode)
    assert all(placement.threads == len(placement.cores) >= 1 for placement in prefill + decode)
    prefill_cores, decode_cores = ({core for one in group for core in one.cores} for group in (prefill, decode))
    assert prefill_cores.isdisjoint(decode_cores)
    if num_cores >= num_prefill + num_decode:
        assert sum(placement.threads for placement in prefill + decode) == num_cores


@pytest.mark.parametrize(
    ("cores", "alike", "others", "expected"),
    [
        ([0], [()], [()], ()),
        ([0, 1], [(1,)], [(0,)], (1,)),
        ([0, 1, 2, 3], [(2, 3)], [(0, 1)], (2,)),
        ([0, 1, 2, 3], [(2, 3), (2,)], [(0, 1)], (3,)),
        # Cores that nobody has, but not all of them.
        ([0, 1, 2, 3, 4, 5], [(2,)], [(0, 1)], (3, 4)),
        ([0, 1, 2, 3], [(3,)], [(0,), (1,)], (2,)),
        # The first of its role has none of its own.
        ([0, 1, 2, 3], [], [(0, 1), (2, 3)], (0,)),
        ([4, 5, 6, 7], [(6, 7)], [(4, 5)], (6,)),
    ],
)
def test_late_worker_took_the_other_roles_core(
    cores: list[int], alike: list[tuple[int, ...]], others: list[tuple[int, ...]], expected: tuple[int, ...]
) -> None:
    mine, theirs = ([Placement(cores=one, threads=max(1, len(one))) for one in group] for group in (alike, others))
    placement = place_another(cores, mine, theirs)
    assert placement.cores == expected
    assert placement.threads == max(1, len(expected))


@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 4), st.lists(st.booleans(), max_size=12))
def test_scaled_cluster_mixed_roles_or_names(
    num_cores: int, num_prefill: int, num_decode: int, steps: list[bool]
) -> None:
    """Whatever is added, no worker of one role computes where one of the other does, and no two have one name."""
    roster = Roster(
        num_prefill,
        num_decode,
        cores=range(num_cores),
        is_pinned=True,
        make_spec=lambda role, index, _: ChildSpec(f"{role}-{index}", ()),
    )
    for is_prefill in steps:
        member = roster.add("prefill" if is_prefill else "decode")
        assert member.placement.threads == max(1, len(member.placement.cores))
    cores = [{core for one in roster.members(role) for core in one.placement.cores} for role in ("prefill", "decode")]
    assert cores[0].isdisjoint(cores[1])
    names = [member.name for member in roster.members()]
    assert len(set(names)) == len(names) == num_prefill + num_decode + len(steps)


def test_number_of_a_worker_that_is_gone_was_lost_or_its_core_kept() -> None:
    def make_spec(role: str, index: int, placement: Placement) -> ChildSpec:
        return ChildSpec(f"{role}-{index}", (str(placement.cores),))

    roster = Roster(1, 3, cores=[0, 1, 2, 3], is_pinned=True, make_spec=make_spec)
    roster.remove(roster.members("decode")[1])
    back = roster.add("decode")
    assert (back.name, back.placement.cores) == ("decode-1", (2,))
    assert [member.name for member in roster.members("decode")] == ["decode-0", "decode-2", "decode-1"]
    shared = roster.add("decode")
    assert roster.describe_place(shared) == "on core 1, as decode-0"
    assert roster.describe_place(roster.members("prefill")[0]) == "on core 0"
    free = Roster(1, 1, cores=[0, 1, 2, 3], is_pinned=False, make_spec=make_spec)
    assert (free.add("decode").placement, free.members()[0].placement.threads) == (Placement((), 1), 2)


def test_core_that_is_not_here_was_accepted() -> None:
    available = sorted(os.sched_getaffinity(0))
    assert usable_cores("auto") == available
    assert usable_cores(f"{available[0]},{available[0]}") == [available[0]]
    for asked in ("100000", "x", ""):
        with pytest.raises(InvalidRequest):
            usable_cores(asked)


def test_free_ports_were_given_out_twice() -> None:
    ports = claim({"--a": 0, "--b": 0, "--c": 0})
    assert len(set(ports.values())) == 3


def test_same_port_for_two_purposes_was_accepted() -> None:
    port = claim({"--a": 0})["--a"]
    with pytest.raises(InvalidRequest, match=f"--b and --a are both {port}"):
        claim({"--a": port, "--b": port})


def test_command_line_lacks_what_a_process_needs() -> None:
    router = router_spec(Roles(), MODEL, PORTS)
    assert " ".join(router.argv) == (
        f"{sys.executable} -P -m router --model /m --served-model-name served --bind 127.0.0.1 --grpc-port 1 "
        "--http-port 2 --internal-port 3"
    )
    flags = {"block-size": 8, "allow-pickle": True, "trust-remote-code": False, "threads": 4}
    prefill = worker_spec(Roles(), MODEL, PORTS, flags, "prefill", 0, Placement((0,), 1))
    decode = worker_spec(Roles(), MODEL, PORTS, flags, "decode", 0, Placement((), 1))
    assert (prefill.name, decode.name) == ("prefill-0", "decode-0")
    assert " ".join(prefill.argv) == (
        f"{sys.executable} -P -m prefill_worker --model /m --served-model-name served --router 127.0.0.1:3 "
        "--bind 127.0.0.1 --http-port 0 --kv-port 0 --threads 4 --cores 0 --block-size 8 --allow-pickle"
    )
    assert "--cores" not in decode.argv


def test_prefix_cache_stayed_on_although_it_was_switched_off() -> None:
    flag = "--no-enable-prefix-caching"
    for words, is_off in (([], False), ([flag], True)):
        _, bound, _ = up.app.parse_args(words)
        _, *workers = Setup.of(bound.arguments.get("config", up.UpConfig()), Roles(), MODEL, PORTS, [0]).specs()
        assert [flag in worker.argv for worker in workers] == [is_off, is_off]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ""),
        (["--prefill", "0"], "--without-prefill local"),
        (["--split-threshold", "64"], "--split-threshold 64"),
        (["--split-threshold", "0", "--prefill", "0"], "--split-threshold 0 --without-prefill local"),
    ],
)
def test_cluster_without_prefill_workers_waits_for_them(words: list[str], expected: str) -> None:
    _, bound, _ = up.app.parse_args(words)
    config = bound.arguments.get("config", up.UpConfig())
    router, *workers = Setup.of(config, Roles(), MODEL, PORTS, [0]).specs()
    assert " ".join(router.argv[router.argv.index("--internal-port") + 2 :]) == expected
    assert [worker.name for worker in workers] == [*(["prefill-0"] if config.prefill else []), "decode-0"]


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "ERROR"), ("debug", "debug")])
def test_grpcs_own_log_was_mixed_into_the_output_or_could_not_be_had(
    set_by_user: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", set_by_user)
    assert up.child_environment()["GRPC_VERBOSITY"] == expected


def test_pasted_command_would_ask_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.chdir(Path(sys.executable).parent.parent)
    text = up.what_next(Ports(grpc=50051, http=8000, internal=50052))
    script = "bin/splitserve"
    assert f'{script} generate "Write a short introduction about the US capital city."\n' in text
    assert "curl http://127.0.0.1:8000/cluster\n" in text
    other = up.what_next(Ports(grpc=7, http=8, internal=9))
    assert f"{script} chat --target localhost:7\n" in other
    assert f"{script} status --url http://127.0.0.1:8\n" in other


def test_installation_that_cannot_serve_said_nothing_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.cli.up.find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(up.Unavailable, match=r"no torch.*pip install 'splitserve\[serve\]'"):
        up.locate_once(up.UpConfig())
