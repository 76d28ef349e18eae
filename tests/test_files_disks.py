"""Results on disks that are full or fail, in places that cannot be written to, on streams; and many of them."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_file_places import COUNT, PATHS, done_again, folder_of, numbers, program
from support_file_places import folder as folder  # fixtures, as are the next three
from support_file_places import given as given
from support_file_places import wanted as wanted
from support_file_places import whole as whole
from support_file_runs import answer, open_output, results, run, write_input

from hf_batchllm.errors import OutputFileError, OutputWriteError
from hf_batchllm.files.run_record import RunRecord
from hf_batchllm.files.sources import open_source

# -- disks -------------------------------------------------------------------------------------------------------------


def full_after(monkeypatch: pytest.MonkeyPatch, size: int, number: int = errno.ENOSPC) -> None:
    """The output takes ``size`` bytes in all."""
    real = os.write

    def write(descriptor: int, data: Any) -> int:
        room = size - os.fstat(descriptor).st_size
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) != "out.jsonl" or len(data) <= room:
            return real(descriptor, data)
        if room <= 0:
            raise OSError(number, os.strerror(number))
        return real(descriptor, bytes(data[:room]))

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the quota on this disk is used up"),
        (errno.EIO, "Input/output error"),
        (errno.EFBIG, "largest size allowed"),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 500, 777])
def test_a_write_that_fails_keeps_whole_lines(
    given: str, wanted: str, whole: bytes, number: int, said: str, size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        full_after(patch, size, number)
        with pytest.raises(OutputWriteError, match=rf"out.jsonl could not be written: .*{said}.*continues") as error:
            run(given, wanted, seed=7)
    content = Path(wanted).read_bytes() if error.value.kept else b""
    assert len(content) <= size and content[-1:] in (b"", b"\n")
    assert content.count(b"\n") == error.value.kept and (size < 300 or error.value.kept > 0)
    assert isinstance(error.value, OSError) and error.value.errno == number
    run(given, wanted, seed=7)
    assert Path(wanted).read_bytes() == whole


def test_a_writer_that_has_failed_stays_so(given: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_source(given) as source, open_output(wanted, source=source) as output:
        output.begin(RunRecord({}), np.arange(COUNT), source)
        output.start({})
        full_after(monkeypatch, 300)
        lines = [(n, answer(n, b"x" * 50)) for n in range(9)]
        acts: list[Callable[[], Any]] = [lambda: output.append(lines), lambda: output.append(lines), output.finish]
        for act in acts:
            with pytest.raises(OutputWriteError, match="disk is full"):
                act()
        with pytest.raises(ValueError, match="one line"):
            open_output(wanted.replace("out", "other"), records=1).journal.append([(0, b"{}\n")])  # type: ignore[union-attr]


def failing(number: int, suffix: str) -> Callable[[int], None]:
    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix):
            raise OSError(number, os.strerror(number))

    return fsync


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_no_room_for_the_last_step_keeps_the_results(given: str, folder: Path, name: str) -> None:
    wanted = str(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC, f"{name}.hf-batchllm.tmp"))
        with pytest.raises(OutputWriteError, match="disk is full") as error:
            run(given, wanted)
    assert error.value.kept == COUNT and not list(folder.glob("*.tmp"))
    assert done_again(given, wanted) == set()
    if name == "out.jsonl":
        assert numbers(wanted) == list(range(COUNT))
    assert set(folder_of(wanted)) - {f"{name}.part.jsonl"} == {"in.jsonl", name, f"{name}.run.json"}


def test_a_record_that_cannot_be_written_stops_the_run_before_its_first_result(
    given: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC, "run.json.hf-batchllm.tmp"))
    with pytest.raises(OutputWriteError, match=r"out.jsonl.run.json could not be written: the disk is full"):
        run(given, wanted)
    assert folder_of(wanted) == ["in.jsonl"]


LIMITED = """
import resource, sys
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


def test_a_full_disk_and_a_limit_on_files_for_real(folder: Path) -> None:
    """In a mount of its own where the system lets us, and with `ulimit -f`."""
    (folder / "small").mkdir()
    limited = program("-c", LIMITED, str(folder), "60000")
    assert "largest size allowed" in limited.stdout, limited.stderr
    mounted = f"mount -t tmpfs -o size=64k none {folder}/small && exec {sys.executable} -c '{LIMITED}' {folder} 0"
    with contextlib.suppress(FileNotFoundError):
        command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted]
        full = subprocess.run(command, capture_output=True, text=True, env=PATHS)
        if "Traceback" in full.stderr or full.returncode == 0:
            assert "the disk is full" in full.stdout, full.stderr


@pytest.mark.parametrize(("seconds", "times"), [(0.0, COUNT), (1000.0, 1)])
def test_how_often_results_are_brought_to_the_disk(
    given: str, wanted: str, monkeypatch: pytest.MonkeyPatch, seconds: float, times: int
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("hf_batchllm.files.journal.SYNC_EVERY", seconds)
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    run(given, wanted, batch=1)
    assert seen.count(wanted) == times, "always at the end"


def test_a_disk_that_cannot_sync_or_fails(given: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.files.journal.SYNC_EVERY", 0.0)
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL, ""))  # a file system without it
    run(given, wanted)
    assert len(results(wanted)) == COUNT
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, "other.jsonl"))
    with pytest.raises(OutputWriteError, match="Input/output error"):
        run(given, wanted.replace("out", "other"))


# -- places that cannot be written to ----------------------------------------------------------------------------------


def test_places_that_cannot_be(given: str, folder: Path) -> None:
    (folder / "place.jsonl").mkdir()
    (folder / "in2.jsonl").symlink_to(given)
    os.link(given, folder / "in3.jsonl")
    (folder / "circle.jsonl").symlink_to(folder / "circle.jsonl")
    before = Path(given).read_bytes()
    for name, said in {
        "place.jsonl": "is a folder",
        "none/out.jsonl": "there is no folder",
        "in.jsonl": "is the input",
        "in2.jsonl": "is the input",
        "in3.jsonl": "is the input",
        "circle.jsonl": "symbolic links",
        "out.txt": "its name does not say what it is",
        "out.jsonl.gz": "its name does not say what it is",
        "x" * 300 + ".jsonl": "too long",
    }.items():
        with open_source(given) as source, pytest.raises(OutputFileError, match=said):
            open_output(folder / name, source=source)
    (folder / "in.csv.part.jsonl").write_bytes(before)
    with open_source(folder / "in.csv.part.jsonl") as source, pytest.raises(OutputFileError, match="is the input"):
        open_output(folder / "in.csv", source=source)
    assert Path(given).read_bytes() == (folder / "in.csv.part.jsonl").read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="there are no other users")
def test_read_only_places_are_refused_before_anything_else(folder: Path) -> None:
    os.chmod(folder, 0o755)
    (folder / "shut").mkdir(mode=0o555)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "open" / "shut.jsonl").touch()
    (folder / "open" / "shut.jsonl").chmod(0o444)
    code = """
import numpy, os, sys, support_file_runs  # what is imported is found before the user is changed
from hf_batchllm.errors import OutputFileError
os.geteuid() or os.setresuid(65534, 65534, 65534)
for path in sys.argv[1:]:
    try:
        support_file_runs.open_output(path)
    except OutputFileError as error:
        print(error)
"""
    done = program("-c", code, *(str(folder / name) for name in ("shut/out.jsonl", "open/shut.jsonl")))
    assert done.stdout.count("cannot be written to: Permission denied") == 2, done.stderr


# -- many --------------------------------------------------------------------------------------------------------------


def test_many_results_are_read_again_and_put_in_order(folder: Path) -> None:
    given, wanted = str(folder / "in.jsonl"), str(folder / "out.jsonl")
    write_input(given, 20_000)
    run(given, wanted, batch=1000, stop_after=15_000)
    assert len(done_again(given, wanted, batch=1000)) == 5_000
    assert numbers(wanted) == list(range(20_000))


# -- streams -----------------------------------------------------------------------------------------------------------


STREAM = """
import sys
from support_file_runs import run
from hf_batchllm.errors import FilesError
try:
    run(sys.argv[1], sys.argv[2], batch=1, seed=7)
except FilesError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(1)
"""


def stream(given: str, target: str, **options: Any) -> Any:
    return subprocess.Popen([sys.executable, "-c", STREAM, given, target], env=PATHS, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_stdout(given: str, folder: Path, name: str) -> None:
    expected = [answer(number, raw, seed=7) for number, raw in enumerate(Path(given).read_bytes().splitlines())]
    with stream(given, name, stdout=subprocess.PIPE) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == sorted(expected)
    with open(folder / "redirected", "w+b") as file:
        file.write(b"before\n")
        file.flush()
        with stream(given, name, stdout=file) as process:
            process.communicate()
    assert sorted((folder / "redirected").read_bytes().splitlines()) == sorted([*expected, b"before"])
    assert sorted(os.listdir(folder)) == ["in.jsonl", "redirected"], "no run record beside a stream"


def test_what_is_read_is_not_written_to_through_a_descriptor_either(given: str) -> None:
    before = Path(given).read_bytes()
    with open(given, "r+b") as file, stream(given, "-", stdout=file) as process:
        assert b"is the input" in process.stderr.read()
    with open(given, "rb") as file, stream("-", given, stdin=file) as process:
        assert b"stdin is the input" in process.stderr.read()
    with open(given, "rb") as file, stream(given, "-", stdout=file) as process:
        assert b"stdout cannot be written to: " in process.stderr.read()
    assert Path(given).read_bytes() == before


def test_a_closed_pipe_and_a_full_device(given: str) -> None:
    write_input(given, 3000)
    with stream(given, "-", stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 1 and said.count("\n") == 1
    assert said.startswith("OutputWriteError stdout cannot be written to any more: its reader has closed it")
    if os.path.exists("/dev/full"):
        with pytest.raises(OutputWriteError, match=r"/dev/full.*the disk is full. 0 results were written"):
            run(given, "/dev/full")
    run(given, "/dev/null")
    with pytest.raises(OutputFileError, match="takes JSON lines"):
        open_output("-", "csv")


def test_other_pipes(given: str, folder: Path) -> None:
    os.mkfifo(pipe := str(folder / "pipe.jsonl"))
    with stream(given, pipe):
        assert Path(pipe).read_bytes().count(b"\n") == COUNT
