"""Output that cannot be written: printing goes on, and nothing is left for Python to write."""

import os
import sys

import pytest
from tqdm import tqdm

from redcoast.core._output import ForgivingStream, forgiving, forgiving_output, say


def full():
    return open("/dev/full", "w")


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def closed_file():
    stream = open(os.devnull, "w")  # noqa: SIM115
    stream.close()
    return stream


def closed_descriptor():
    stream = open(os.devnull, "w")  # noqa: SIM115
    os.close(stream.fileno())
    return stream


STREAMS = [full, broken_pipe, closed_file, closed_descriptor]


@pytest.mark.parametrize("make", STREAMS)
def test_lines_that_cannot_be_printed_are_one_warning(make, monkeypatch, caplog):
    stream = make()
    monkeypatch.setattr(sys, "stdout", stream)
    say("first")
    say("second")
    with forgiving_output():
        print("of the user", flush=True)
        sys.stdout.writelines(["more\n"])
    assert sys.stdout is stream
    assert ["cannot be written to" in message for message in caplog.messages] == [True]
    stream.close()  # as Python does at exit: a buffer that is not empty would raise here


@pytest.mark.parametrize("make", [full, broken_pipe, closed_file])
def test_a_bar_that_cannot_be_drawn(make, monkeypatch):
    of_bar, beside = make(), make()
    bar = tqdm(total=3, file=forgiving(of_bar), mininterval=0)
    bar.update()
    monkeypatch.setattr(sys, "stdout", beside)
    say("beside it")
    bar.close()
    for stream in (of_bar, beside):
        forgiving(stream).flush()
        stream.close()


def test_a_closed_descriptor_is_not_given_to_another_file(tmp_path, monkeypatch):
    """What is printed would be written into a checkpoint otherwise."""
    stream = closed_descriptor()
    number = stream.fileno()
    monkeypatch.setattr(sys, "stdout", stream)
    say("first")
    with (tmp_path / "file").open("w") as file:
        assert file.fileno() != number
        say("second")
    assert (tmp_path / "file").read_text() == ""
    stream.close()


def test_letters_that_an_encoding_lacks_are_escaped(tmp_path):
    with (tmp_path / "file").open("w", encoding="ascii") as stream:
        print("a × b", file=ForgivingStream(stream))
    assert (tmp_path / "file").read_text() == "a \\xd7 b\n"


def test_without_standard_output_nothing_is_printed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    say("nothing")


def test_output_that_works_is_as_before(capsys):
    with forgiving_output():
        say("a line")
        assert sys.stdout.encoding
        assert not sys.stdout.isatty()
    assert capsys.readouterr().out == "a line\n"


def test_output_that_was_replaced_meanwhile_stays(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as other:
        before = sys.stdout
        with forgiving_output():
            sys.stdout = other
        assert sys.stdout is other
        sys.stdout = before


def test_a_stream_that_a_logger_keeps_after_a_run_may_be_closed(monkeypatch, tmp_path, caplog):
    """A handler that was created in the run has it, and writes when the process ends."""
    with (tmp_path / "file").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with forgiving_output():
            kept = sys.stderr
        monkeypatch.undo()
    kept.write("a line")
    assert not caplog.messages
