"""Reading files in parts: which parts, in which order, and every number of them."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from redcoast.core._iterate import map_in_threads
from redcoast.pretrained._lazy_tensor import split_box
from redcoast.pretrained._safetensors import MAPPED_BYTES, read_safetensors


def test_reading_what_no_mapping_may_hold_at_once(tmp_path):
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(3, MAPPED_BYTES // 4 + 5)).astype(np.float32)
    flat = rng.normal(size=2 * MAPPED_BYTES // 8 + 3)
    save_file({"wide": wide, "flat": flat, "one": np.array(2.5)}, tmp_path / "x.safetensors")
    stored = read_safetensors(tmp_path / "x.safetensors")
    for box in (np.s_[0:3, 0 : wide.shape[1]], np.s_[1:3, 7 : wide.shape[1] - 1], np.s_[2:3, 5:6]):
        np.testing.assert_array_equal(stored["wide"].take(box), wide[box])
    np.testing.assert_array_equal(stored["flat"].take((slice(3, len(flat)),)), flat[3:])
    assert stored["one"].take(()) == 2.5


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 11, 12, 23, 24, 100])
def test_boxes_of_one_shape_cover_an_array(most):
    covered = np.zeros((2, 3, 4), int)
    boxes = split_box((2, 3, 4), (2, 0, 1), most)
    for box in boxes:
        covered[box] += 1
    assert covered.min() == 1
    assert len({tuple(part.stop - part.start for part in box) for box in boxes}) == 1
    assert covered[boxes[0]].size <= most
    assert split_box((), (), most) == [()]


def test_reading_ahead_keeps_the_order_and_goes_no_further_than_its_workers():
    begun = []
    done = []
    square = lambda i: begun.append(i) or (i, i * i)
    for item, result in map_in_threads(square, range(20), workers=3, ahead=3, name="test"):
        assert result == item**2
        assert len(begun) <= item + 4
        done.append(item)
    assert done == list(range(20))
