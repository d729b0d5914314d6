"""The lines of code that instructions of compiled HLO come from."""

import pytest

from redcoast.dryrun.hlo._source_lines import read_frames

TABLES = """HloModule jit_step

FileNames
1 "/code/train.py"
2 "/code/model.py"

FunctionNames
1 "main"
2 "loss"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=30 end_line=30 column=6 end_column=6}}
2 {{file_name_id=2 function_name_id=2 line=12 end_line=12 column=8 end_column=8}}

StackFrames
1 {{file_location_id=1 parent_frame_id={root}}}
2 {{file_location_id=2 parent_frame_id={parent}}}

ENTRY %main (x: f32[]) -> f32[] {{
}}
"""


@pytest.mark.parametrize(("root", "parent"), [(1, 2), (0, 1)])
def test_frames_are_read_from_tables_however_parents_are_numbered(root, parent):
    frames_of = read_frames(TABLES.format(root=root, parent=parent))
    inner = ("/code/model.py", 12)
    outer = ("/code/train.py", 30)
    assert frames_of('metadata={op_name="a" stack_frame_id=2}') == [inner, outer]
    assert frames_of('metadata={op_name="a" stack_frame_id=1}') == [outer]
    assert frames_of('metadata={op_name="a"}') == []


def test_frames_in_the_metadata_itself():
    frames_of = read_frames("HloModule jit_step\n")
    metadata = 'metadata={op_name="a" source_file="/code/model.py" source_line=7}'
    assert frames_of(metadata) == [("/code/model.py", 7)]


def test_tables_of_another_form_give_no_frames():
    frames_of = read_frames("FileNames\nno number\nStackFrames\n1 {parent_frame_id=1}\n")
    assert frames_of("stack_frame_id=9") == []
    assert frames_of("stack_frame_id=1") == [("", 0)]
