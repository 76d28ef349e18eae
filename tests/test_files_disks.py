"""Disks that are full or fail, and places that cannot be written to."""

import contextlib
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support_file_places import PATHS, program
from support_file_places import folder as folder  # fixtures, as are the next three
from support_file_places import given as given
from support_file_places import wanted as wanted
from support_file_places import whole as whole
from support_file_runs import answer, open_output, results, run

from hf_batchllm.errors import ConfigError, OutputFileError, OutputWriteError
from hf_batchllm.files.store import syncing
from hf_batchllm.files.store.run_record import RunRecord
from hf_batchllm.files.store.sources import open_source

# Disks


def full_after(monkeypatch, size: int, number: int = errno.ENOSPC, name: str = "out.jsonl") -> None:
    """Files with this name take ``size`` bytes in all."""
    real = os.write

    def write(descriptor: int, data) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        room = size - os.fstat(descriptor).st_size
        if os.path.basename(path) != name or len(data) <= room:
            return real(descriptor, data)
        if room <= 0:
            raise OSError(number, os.strerror(number))
        return real(descriptor, bytes(data[:room]))

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full. .* Make room there"),
        (errno.EDQUOT, "the quota on this disk is used up"),
        (errno.EIO, "the disk reports an error"),
        (errno.EFBIG, "largest size allowed .* Raise the limit"),
        (errno.ESTALE, "stale"),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 500, 777])
def test_a_write_that_fails_keeps_whole_lines(given, wanted, whole, number, said, size) -> None:
    with pytest.MonkeyPatch.context() as patch:
        full_after(patch, size, number)
        with pytest.raises(
            OutputWriteError, match=rf"out.jsonl could not be written: .*{said}.*same command continues"
        ) as error:
            run(given, wanted, seed=7)
    assert error.value.kept == (len(results(wanted)) if os.path.exists(wanted) else 0)  # nothing kept: no file
    content = Path(wanted).read_bytes() if error.value.kept else b""
    assert len(content) <= size
    assert content == b"" or content.endswith(b"\n")
    assert size < 300 or error.value.kept > 0
    assert isinstance(error.value, OSError) and error.value.errno == number
    run(given, wanted, seed=7)
    assert Path(wanted).read_bytes() == whole


def test_a_writer_that_has_failed_stays_so(given, wanted, monkeypatch) -> None:
    with open_source(given) as source, open_output(wanted, source=source) as output:
        output.begin(RunRecord({}), source)
        full_after(monkeypatch, 300)
        with contextlib.suppress(OutputWriteError):
            output.append([(n, answer(n, b"x" * 50)) for n in range(9)])
        for act in (lambda: output.append([(9, answer(9, b"x"))]), output.finish):
            with pytest.raises(OutputWriteError, match="disk is full"):
                act()


def test_no_room_to_put_it_in_order_leaves_it_as_it_is(given, wanted, monkeypatch) -> None:
    full_after(monkeypatch, 400, name="out.jsonl.hf-batchllm.tmp")
    notes = run(given, wanted)
    assert "stay in the order in which they finished" in notes[0]
    assert sorted(each["index"] for each in results(wanted)) == list(range(30))
    assert sorted(os.listdir(os.path.dirname(wanted))) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]
    monkeypatch.undo()
    run(given, wanted)
    assert [each["index"] for each in results(wanted)] == list(range(30)), "the next run does it"


def test_a_record_that_cannot_be_written_stops_the_run_before_its_first_result(given, wanted, monkeypatch) -> None:
    full_after(monkeypatch, 10, name="out.jsonl.run.json.hf-batchllm.tmp")
    with pytest.raises(OutputWriteError, match=r"out.jsonl.run.json could not be written: the disk is full"):
        run(given, wanted)
    assert os.listdir(os.path.dirname(wanted)) == ["in.jsonl"]


def test_a_full_disk_and_a_limit_on_files_for_real(folder) -> None:
    """In a mount of its own where the system lets us, and with `ulimit -f`."""
    script = """
import resource, signal, sys
from support_file_runs import run, write_input
from hf_batchllm.errors import OutputWriteError
place, limit = sys.argv[1], int(sys.argv[2])
write_input(place + "/in.jsonl", 900)
try:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    run(place + "/in.jsonl", place + "/small/out.jsonl", seed=7)
except OutputWriteError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    data = open(place + "/small/out.jsonl", "rb").read()
    assert data.endswith(b"\\n") and data.count(b"\\n") == error.kept > 100, (len(data), error.kept)
    print(error)
"""
    (folder / "small").mkdir()
    limited = program("-c", script, str(folder), "60000")
    assert "largest size allowed" in limited.stdout, limited.stderr
    mounted = f"mount -t tmpfs -o size=64k none {folder}/small && exec {sys.executable} -c '{script}' {folder} 0"
    with contextlib.suppress(FileNotFoundError):
        full = subprocess.run(
            ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted], capture_output=True, text=True, env=PATHS
        )
        if "Traceback" in full.stderr or full.returncode == 0:
            assert "the disk is full" in full.stdout, full.stderr


def syncs(monkeypatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return seen


@pytest.mark.parametrize(("policy", "times"), [("always", 3), ("never", 0), ("1000s", 0), (1000, 0)])
def test_how_often_results_are_brought_to_the_disk(given, wanted, monkeypatch, policy, times) -> None:
    with open_source(given) as source, open_output(wanted, source=source, fsync=policy) as output:
        output.begin(RunRecord({}), source)
        seen = syncs(monkeypatch)
        for number in range(3):
            output.append([(number, answer(number, b"x"))])
        assert seen.count(wanted) == times
    assert (wanted in seen) == (policy != "never"), "at the end too"


def test_results_that_come_seldom_reach_the_disk_in_time(given, wanted, monkeypatch) -> None:
    with open_source(given) as source, open_output(wanted, source=source, fsync="0.01s") as output:
        output.begin(RunRecord({}), source)
        seen = syncs(monkeypatch)
        for count in (1, 2):
            output.append([(count, answer(count, b"x"))])
            for _ in range(1000):
                if seen.count(wanted) >= count:
                    break
                time.sleep(0.005)
            assert seen.count(wanted) == count, "without another append"


def test_a_disk_that_fails_in_the_background_is_told_with_the_next_result(given, wanted, monkeypatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with open_source(given) as source, open_output(wanted, source=source, fsync="0.001s") as output:
        output.begin(RunRecord({}), source)
        monkeypatch.setattr(os, "fsync", fsync)

        def appended(number: int) -> None:
            output.append([(number, answer(number, b"x"))])
            time.sleep(0.01)

        with pytest.raises(OutputWriteError, match="the disk reports an error"):
            list(map(appended, range(1000)))


def test_a_file_system_that_cannot_sync_is_none_the_worse(given, wanted, monkeypatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    run(given, wanted, fsync="always")
    assert len(results(wanted)) == 30


@pytest.mark.parametrize("policy", ["sometimes", "", "5m", -1, True, None])
def test_other_policies_are_refused(wanted, policy) -> None:
    with pytest.raises(ConfigError, match="`always`, `never`, or seconds"):
        open_output(wanted, fsync=policy)
    assert syncing.seconds_between_syncs("2.5") == 2.5
    assert not os.path.exists(wanted)


# Places that cannot be written to


def test_places_that_cannot_be(given, folder) -> None:
    (folder / "place.jsonl").mkdir()
    (folder / "in2.jsonl").symlink_to(given)
    os.link(given, folder / "in3.jsonl")
    (folder / "circle.jsonl").symlink_to(folder / "circle.jsonl")
    before = Path(given).read_bytes()
    for path, said in [
        (folder / "place.jsonl", "is a folder"),
        (folder / "none" / "out.jsonl", "there is no folder"),
        (given, "is the input"),
        (folder / "in2.jsonl", "is the input"),
        (folder / "in3.jsonl", "is the input"),
        (folder / "circle.jsonl", "circle"),
        (folder / "out.txt", "a .txt cannot hold: name it .jsonl or .csv"),
        (folder / "out.jsonl.gz", "results cannot be added to a compressed file: leave .gz out"),
        (folder / ("x" * 300 + ".jsonl"), "too long"),
    ]:
        with open_source(given) as source, pytest.raises(OutputFileError, match=said):
            open_output(path, source=source)
    journal = folder / "in.csv.part.jsonl"
    journal.write_bytes(before)
    with open_source(str(journal)) as source, pytest.raises(OutputFileError, match="is the input"):
        open_output(folder / "in.csv", source=source)
    assert Path(given).read_bytes() == before
    assert journal.read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="there are no other users")
def test_read_only_places_are_refused_before_anything_else(given, folder) -> None:
    os.chmod(folder, 0o755)
    (folder / "shut").mkdir(mode=0o555)
    (folder / "shut.jsonl").touch(mode=0o444)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "open" / "shut.jsonl").touch()
    (folder / "open" / "shut.jsonl").chmod(0o444)
    script = """
import sys
from hf_batchllm.errors import OutputFileError
from support_file_runs import open_output
for path in sys.argv[1:]:
    try:
        open_output(path)
    except OutputFileError as error:
        print(error)
"""
    places = [str(folder / "shut" / "out.jsonl"), str(folder / "open" / "shut.jsonl"), "/proc/out.jsonl"]
    code = f"import os\nos.geteuid() or os.setresuid(65534, 65534, 65534)\n{script}"
    # What is imported is found before the user is changed.
    code = "import numpy, support_file_runs\n" + code
    done = program("-c", code, *places)
    said = done.stdout.splitlines()
    assert len(said) == 3, done.stderr
    assert all("cannot be written to" in each for each in said), said
