"""Results that go to pipes and devices, where nothing is kept."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support_file_places import PATHS
from support_file_places import folder as folder  # fixtures, as are the next three
from support_file_places import given as given
from support_file_places import wanted as wanted
from support_file_places import whole as whole
from support_file_runs import answer, run, write_input

from hf_batchllm.errors import OutputFileError, OutputWriteError
from hf_batchllm.files.store.outputs import open_output


def stream(target: str, **options) -> subprocess.Popen:
    script = """
import sys, time
from support_file_runs import run
from hf_batchllm.errors import FilesError
try:
    run(sys.argv[1], sys.argv[2], batch=1, seed=7, fsync="always")
except FilesError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(1)
"""
    return subprocess.Popen([sys.executable, "-c", script, target[0], target[1]], env=PATHS, **options)


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_stdout(given, folder, name) -> None:
    expected = [answer(number, raw, seed=7) for number, raw in enumerate(Path(given).read_bytes().splitlines())]
    for to_file in (False, True):
        with open(folder / "redirected", "w+b") as file:
            file.write(b"before\n")
            file.flush()
            with stream((given, name), stdout=file if to_file else subprocess.PIPE, stderr=subprocess.PIPE) as process:
                out, err = process.communicate()
            assert process.returncode == 0, err
            if to_file:
                file.seek(0)
                out = file.read().removeprefix(b"before\n")
        assert sorted(out.splitlines()) == sorted(expected)
    assert sorted(os.listdir(folder)) == ["in.jsonl", "redirected"], "no run record beside a stream"


def test_what_is_read_is_not_written_to_through_a_descriptor_either(given) -> None:
    before = Path(given).read_bytes()
    with open(given, "r+b") as file:
        for target in ("-", f"/dev/fd/{file.fileno()}"):
            with stream((given, target), stdout=file, stderr=subprocess.PIPE, pass_fds=[file.fileno()]) as process:
                said = process.stderr.read().decode()
            assert "is the input" in said
    with open(given, "rb") as file, stream(("-", given), stdin=file, stderr=subprocess.PIPE) as process:
        assert b"stdin is the input" in process.stderr.read()
    assert Path(given).read_bytes() == before


def test_a_closed_pipe_and_a_full_device(given) -> None:
    write_input(given, 3000)
    with stream((given, "-"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 1
    assert said.startswith(
        "OutputWriteError stdout cannot be written to any more: whoever was reading it has closed it"
    )
    assert said.count("\n") == 1
    if os.path.exists("/dev/full"):
        with pytest.raises(OutputWriteError, match=r"/dev/full.*the disk is full. 0 results were written"):
            run(given, "/dev/full")
    run(given, "/dev/null")


def test_other_pipes_take_lines_too(given, folder) -> None:
    pipe = str(folder / "pipe.jsonl")
    os.mkfifo(pipe)
    with stream((given, pipe), stderr=subprocess.PIPE):
        found = Path(pipe).read_bytes()
    assert found.count(b"\n") == 30
    with pytest.raises(OutputFileError, match="takes JSON lines"):
        open_output("-", "csv")


def test_a_pipe_that_does_not_wait(given) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    write_input(given, 3000)
    with stream((given, f"/dev/fd/{writer}"), pass_fds=[writer], stderr=subprocess.PIPE) as process:
        os.close(writer)
        time.sleep(0.3)
        with open(reader, "rb") as file:
            assert file.read().count(b"\n") == 3000
    assert process.returncode == 0
