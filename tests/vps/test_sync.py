"""Weight syncs between real processes on what they take for several hosts: each pair has the way that suits it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.vps.sync_ranks import NBYTES, TENSORS, VERSIONS, Got, run_rank

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.vps.sync_ranks"])
SMALL = 1500  # bytes: a message without what its reader knows


def sync(work: Path, senders: str, readers: str, verify: bool) -> dict[tuple[int, int], Got]:
    """(reader, version) -> what it got; a letter of ``senders`` and ``readers`` is the host of a rank."""
    places = {("sends", i): host for i, host in enumerate(senders)} | {
        ("reads", i): host for i, host in enumerate(readers)
    }
    sizes = {"sends": len(senders), "reads": len(readers)}
    queues, found = {place: FORK.Queue() for place in places}, FORK.Queue()
    processes = [
        FORK.Process(target=run_rank, args=(*place, host, sizes, queues, work, found, verify), daemon=True)
        for place, host in places.items()
    ]
    for process in processes:
        process.start()
    got = {}
    try:
        for _ in range(len(readers) * VERSIONS):
            rank, version, what = found.get(timeout=60)
            assert isinstance(what, Got), what
            got[rank, version] = what
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
    return got


@pytest.mark.parametrize(
    ("senders", "readers", "verify"), [("aa", "ab", True), ("ab", "abc", False), ("a", "aa", False), ("a", "b", True)]
)
def test_readers_on_a_host_map_its_memory_and_others_get_the_bytes_that_they_lack(
    tmp_path: Path, senders: str, readers: str, verify: bool
) -> None:
    got = sync(tmp_path, senders, readers, verify)
    assert all(each.right for each in got.values())
    share = NBYTES // len(senders)
    for (reader, version), each in got.items():
        away = [host != readers[reader] for host in senders]
        assert each.inline == away
        # Ranks that have a host in common put tensors together there, whatever goes to other hosts.
        if not any(away):
            assert each.whole == TENSORS
        told = TENSORS * 10 if verify else 0  # a digest for each piece
        for size, far in zip(each.sizes, away, strict=True):
            bytes_too = share if far else 0
            if version == 0:  # what lies where goes along once
                assert size > bytes_too + told + 2 * SMALL
            else:
                assert bytes_too < size < bytes_too + told + SMALL
