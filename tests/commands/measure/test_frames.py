"""Images of several frames or pages, of which the first is read."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import regard as rg
from regard.commands.measure.result import MeasureResult
from regard.data import Images, read_images
from tests.tiny_vision import make_photos, make_vit

Regard = Callable[..., Any]


def make_frames(path: Path | io.BytesIO, count: int = 3, **options: Any) -> Any:
    """Write an animation of frames that are one color each: 0, 40, 80 …; return where."""
    frames = [Image.new("RGB", (16, 16), (40 * number,) * 3) for number in range(count)]
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "apng", "tiff"])
def test_an_image_of_several_frames_is_told_and_recorded(suffix: str, regard: Regard, tmp_path: Path) -> None:
    make_vit(tmp_path / "vit")
    make_photos(tmp_path / "photos")
    make_frames(tmp_path / "photos" / f"zz.{suffix}")
    several = r"images: 1 of 4 have several frames or pages, of which the first is read, as of "
    with pytest.warns(UserWarning, match=rf"{several}.*zz.{suffix} \(3\)$"):
        assert regard("measure", tmp_path / "vit", "--images", tmp_path / "photos", "--out", "run").code == 0
    assert MeasureResult.load(tmp_path / "run").metadata["data"]["first_frame_of"] == 1
    assert np.asarray(read_images([tmp_path / "photos" / f"zz.{suffix}"]).read(0)).max() == 0


@pytest.mark.filterwarnings("error")
def test_one_frame_is_not_told(tmp_path: Path) -> None:
    """Neither is the photo of a JPEG with previews behind it, nor a frame that was sought."""
    photo = make_frames(tmp_path / "photo.jpg", format="MPO")
    broken = tmp_path / "broken.gif"
    broken.write_bytes(b"GIF89a")
    with Image.open(make_frames(tmp_path / "moving.gif")) as sought:
        sought.seek(2)
        images = Images((photo, sought, str(broken), Image.new("RGB", (4, 4))), "given in Python")
        images.warn_of_frames()
        assert images.frames() == {}
        assert np.asarray(images.read(1)).max() == 80


def test_what_is_given_in_python_is_told(tmp_path: Path) -> None:
    file = make_frames(io.BytesIO(), format="GIF")
    with Image.open(make_frames(tmp_path / "a.gif", 2)) as opened:
        images = Images((opened, file), "given in Python")
        assert images.frames() == {"image 0": 2, "image 1": 3}
        assert np.asarray(images.read(1)).max() == 0
    make_vit(tmp_path / "vit")
    with pytest.warns(UserWarning, match=r"images: .*a.gif has 2 frames or pages, of which the first is read"):
        rg.look(str(tmp_path / "vit"), image=str(tmp_path / "a.gif"))
