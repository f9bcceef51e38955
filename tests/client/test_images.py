"""What `dorad.images.from_processor` makes of a processor's result."""

import numpy as np
import pytest
from dorad.images import from_processor

IMAGE = 9


def test_patches_that_follow_each_other_are_split_by_their_grids():
    pixels = np.arange(12 * 3, dtype=np.float32).reshape(12, 3)
    inputs = {
        "input_ids": [[1, IMAGE, 2, IMAGE, IMAGE, 3]],
        "pixel_values": pixels,
        "image_grid_thw": [[1, 2, 2], [1, 2, 4]],
    }
    ids, images = from_processor(inputs, IMAGE)
    assert ids.tolist() == [1, IMAGE, 2, IMAGE, IMAGE, 3]
    assert [(i.offset, i.length, i.grid) for i in images] == [(1, 1, (1, 2, 2)), (3, 2, (1, 2, 4))]
    assert [i.data for i in images] == [pixels[:4].tobytes(), pixels[4:].tobytes()]


def padded():
    """Two images of one channel, of 2 x 4 and 4 x 2 pixels: patches of a pixel, tokens of four."""
    pixels = np.zeros((2, 1, 4, 4), np.float32)
    pixels[0, 0, :2] = [[1, 2, 3, 4], [5, 6, 7, 8]]
    pixels[1, 0, :, :2] = [[11, 12], [13, 14], [15, 16], [17, 18]]
    ids = [IMAGE, IMAGE, 1, 2, IMAGE, 3, IMAGE, 1]
    return {"input_ids": ids, "pixel_values": pixels, "image_sizes": [[2, 4], [4, 2]]}


def test_padded_images_are_cut_into_the_patches_of_tokens():
    _, images = from_processor(padded(), IMAGE, patch_size=1, merge_size=2)
    assert [(i.offset, i.length, i.grid) for i in images] == [(0, 2, (1, 2, 4)), (4, 2, (1, 4, 2))]
    patches = [np.frombuffer(i.data, np.float32).tolist() for i in images]
    assert patches == [[1, 2, 5, 6, 3, 4, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]]


def test_an_element_of_a_patch_is_found_by_channel_row_and_column():
    pixels = np.arange(2 * 2 * 2, dtype=np.float32).reshape(1, 2, 2, 2)
    inputs = {"input_ids": [IMAGE], "pixel_values": pixels, "image_sizes": [[2, 2]]}
    _, (image,) = from_processor(inputs, IMAGE, patch_size=2, merge_size=1)
    assert image.grid == (1, 1, 1)
    assert image.data == pixels.tobytes()


def test_padded_images_need_the_sizes_of_patches():
    with pytest.raises(ValueError, match="patch_size and merge_size"):
        from_processor(padded(), IMAGE)
    with pytest.raises(ValueError, match="2 x 4 pixels are no tokens of 3 x 3"):
        from_processor(padded(), IMAGE, patch_size=3, merge_size=1)


def test_placeholders_must_fit_the_images():
    with pytest.raises(ValueError, match="do not fit"):
        from_processor(padded() | {"input_ids": [IMAGE]}, IMAGE, patch_size=1, merge_size=2)
