"""Ranks hear of one that has failed or is gone, and end the group of their devices where no host comes by itself."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any

import pytest

from hf_batchllm.errors import GeneratorBusyError, RanksError
from hf_batchllm.parallel import rank_watch
from hf_batchllm.parallel.group import Group
from hf_batchllm.parallel.rank_watch import RankWatch

GRACE = 0.4


def two_watches() -> tuple[list[RankWatch], list[threading.Event]]:
    """Of two ranks in one process, and what is set where the group of each is ended."""
    barrier, given, made = threading.Barrier(2), {}, {}
    ended = [threading.Event(), threading.Event()]

    def make(rank: int) -> None:
        def exchange(mine: Any) -> list[Any]:
            given[rank] = mine
            barrier.wait(10)
            found = [given[0], given[1]]
            barrier.wait(10)
            return found

        made[rank] = RankWatch(rank, 2, exchange, ended[rank].set, GRACE)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [made[0], made[1]], ended


def test_a_failure_that_no_host_hears_of_ends_the_group_of_all() -> None:
    watches, ended = two_watches()
    with watches[0].during_a_call():
        watches[0].start()
        watches[1].tell("failed: no memory")
        assert all(each.wait(10) for each in ended)
    assert [each.failure for each in watches] == [(1, "failed: no memory")] * 2


def test_ranks_on_several_machines_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = iter(range(10))
    monkeypatch.setattr(rank_watch, "this_machine", lambda: f"machine {next(machines)}")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    watches, ended = two_watches()
    with watches[0].during_a_call():
        watches[0].start()
        watches[1].tell("failed")
        assert ended[0].wait(10)


def test_ranks_that_cannot_reach_each_other_say_so() -> None:
    with pytest.raises(RanksError, match=r"cannot reach each other: another one at 127.0.0.1, port 1: "):
        rank_watch._connection(["127.0.0.1"], 1)


@pytest.mark.parametrize("where", ["heard", "listening", "outside"])
def test_a_failure_that_all_hear_of_ends_no_group(where: str) -> None:
    """Also where the message is read late, in a call that goes on for longer than is waited."""
    watches, ended = two_watches()
    if where == "outside":
        watches[1].tell("failed")
        time.sleep(2 * GRACE)
    with watches[0].during_a_call():
        watches[0].start()
        if where == "heard":
            watches[1].tell("failed in the call before")
            watches[1].all_have_heard()
        if where == "listening":
            with watches[0].listening():
                watches[1].tell("failed")
                time.sleep(2 * GRACE)
        else:
            time.sleep(2 * GRACE)
    assert not any(each.is_set() for each in ended)
    assert [each.failure for each in watches] == [None, None]


@pytest.mark.parametrize("where", ["planning", "owner"])
def test_a_failure_waits_for_a_host_that_no_device_keeps(where: str) -> None:
    """It may plan for long, or its owner may read a result of a stream: it hears of the failure when it goes on."""
    watches, ended = two_watches()
    with watches[0].during_a_call():
        if where == "owner":
            watches[0].start()
        with watches[0].elsewhere() if where == "owner" else contextlib.nullcontext():
            watches[1].tell("failed")
            time.sleep(3 * GRACE)
        assert not any(each.is_set() for each in ended)
        watches[0].start()
        assert all(each.wait(10) for each in ended), "it did not come to hear of it"


def test_a_call_within_a_call_is_refused_and_leaves_the_outer_one_watched() -> None:
    watches, ended = two_watches()
    with watches[0].during_a_call():
        watches[0].start()
        with pytest.raises(GeneratorBusyError, match="another generator of this model"), watches[0].during_a_call():
            pass
        watches[1].tell("failed")
        assert all(each.wait(10) for each in ended)


def gone(watch: RankWatch) -> None:
    for peer in watch._peers.values():
        with socket.socket(fileno=os.dup(peer.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # as the system does when a process ends


def test_a_process_that_is_gone_ends_the_group_at_once() -> None:
    watches, ended = two_watches()
    with watches[0].during_a_call():
        watches[0]._grace = 1e6
        gone(watches[1])
        assert ended[0].wait(60)
    assert watches[0].failure == (1, "is gone: its process was killed, or has ended")


def test_a_process_that_is_gone_while_hosts_exchange_something_ends_the_group_later() -> None:
    """The host may come back from there to a device that waits."""
    watches, ended = two_watches()
    with watches[0].during_a_call():
        watches[0].start()
        with watches[0].listening():
            gone(watches[1])
            assert not ended[0].wait(GRACE / 2)
        assert ended[0].wait(10)


def test_hosts_that_find_one_gone_end_the_group_at_once() -> None:
    """The call is over for them then, and their devices still wait."""
    watches, ended = two_watches()
    group = Group(watches[0])
    watches[1].connections[0].close()
    with pytest.raises(RanksError, match="rank 1 of the 2 that run this model together is gone"):
        group.exchange("a step")
    assert ended[0].wait(10)
    with pytest.raises(RanksError, match=r"rank 1 of the 2 that run this .* is gone: .*start the processes"):
        group.check()
