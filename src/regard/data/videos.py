"""Videos to measure a model on: folders of frames, and animations."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence, UnidentifiedImageError

from regard.data.files import hash_files, list_files
from regard.data.images import SUFFIXES, Images, count_frames, make_rgb
from regard.data.media import MediaFiles
from regard.errors import UserError, describe_error

FILMS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")
_EXPECTED = "folders of frames, or animations (GIF, WebP, PNG)"
_ADVICE = "mkdir FOLDER && ffmpeg -i FILE FOLDER/%05d.png makes a folder of frames"


class Videos(MediaFiles):
    """Videos to measure a model on."""

    noun = "video"

    def read(self, index: int, count: int | None = None) -> list[Image.Image]:
        """Return frames of a video in RGB: all of them, or `count`, spread evenly from the first to the last.

        Raises:
            UserError: It cannot be read, or has fewer frames.
        """
        video, name = self.items[index], self.name(index)
        frames = _list_frames(video, name, is_checked=self.sha256 is not None)
        total = frames if isinstance(frames, int) else len(frames)
        if count is not None and total < count:
            raise UserError(f"videos: expected at least {count} frames, got {name}, which has {total}")
        chosen = np.linspace(0, total - 1, total if count is None else count).round().astype(int).tolist()
        if isinstance(frames, Images):
            return [frames.read(number) for number in chosen]
        if isinstance(frames, int):
            return _read_animation(video, name, chosen)
        return [Image.fromarray(frames[number]) for number in chosen]


def _list_frames(video: Any, name: str, *, is_checked: bool) -> Images | int | np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the frames of a video, or how many an animation has; `read_videos` has checked what folders hold."""
    if isinstance(video, str | Path) and Path(video).is_dir():
        if not is_checked and _find_videos(Path(video)) != [Path(video)]:
            raise UserError(f"videos: expected a folder of frames, got {name}, which has videos: pass each of them")
        return Images(tuple(_frame_files(Path(video))), name)
    if isinstance(video, str | Path | Image.Image):
        if (count := count_frames(video)) < 2:
            is_film = isinstance(video, str | Path) and Path(video).suffix.lower() in FILMS
            got = f"the film {name}; {_ADVICE}" if is_film else f"{name}, an image of one frame, or no image"
            raise UserError(f"videos: expected {_EXPECTED}, got {got}")
        return count
    if isinstance(video, np.ndarray):
        if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or not len(video):
            expected = "an array (frame, height, width, 3) of uint8"
            raise UserError(f"videos: expected {expected}, got {video.dtype} of shape {video.shape} for {name}")
        return video
    if isinstance(video, Sequence) and len(video):
        images = Images(tuple(video), name)
        if moving := images.frames():
            raise UserError(f"videos: expected images of one frame for the frames of {name}, got {next(iter(moving))}")
        return images
    raise UserError(
        f"videos: expected paths of {_EXPECTED}, lists of images, or arrays (frame, height, width, 3); got "
        f"{type(video).__name__} for {name}"
    )


def _read_animation(video: Any, name: str, numbers: Sequence[int]) -> list[Image.Image]:
    try:
        if isinstance(video, Image.Image):
            return _pick(video, name, numbers)
        with Image.open(video) as opened:
            return _pick(opened, name, numbers)
    except (OSError, EOFError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UserError(f"videos: {name} cannot be read: {describe_error(error)}; expected {_EXPECTED}") from error


def _pick(opened: Image.Image, name: str, numbers: Sequence[int]) -> list[Image.Image]:
    wanted = set(numbers)
    frames = {
        number: make_rgb(frame.copy(), name)
        for number, frame in enumerate(ImageSequence.Iterator(opened))
        if number in wanted
    }
    opened.seek(0)
    return [frames[number] for number in numbers]


def _frame_files(folder: Path) -> list[Path]:
    """Return the images that lie in a folder itself, in the order of the numbers in their names: 2 before 10."""
    files = [file for file in list_files(folder, SUFFIXES) if file.parent == folder]
    parts = {file: re.split(r"(\d+)", file.name) for file in files}  # words and numbers by turns, a word first
    return sorted(files, key=lambda file: [int(part) if part.isdecimal() else part for part in parts[file]])


def read_videos(paths: Sequence[str | Path]) -> Videos:
    """Find the videos of files and folders, in the order of their names.

    A folder of images, each of one frame, is one video. Each animation in a folder is a video, and each folder in it.

    Raises:
        UserError: There are none, or it is not clear what is one.
    """
    videos = [video for path in map(Path, paths) for video in _find_videos(path)]
    if not videos:
        raise UserError("videos: expected at least one file or folder, got none")
    files = [file for video in videos for file in (_frame_files(video) if video.is_dir() else [video])]
    return Videos(tuple(videos), ", ".join(map(str, paths)), hash_files(files))


def _find_videos(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix.lower() in FILMS or count_frames(path) < 2:
            raise UserError(f"videos: expected {_EXPECTED}, got the file {path}; {_ADVICE}")
        return [path]
    if not path.is_dir():
        raise UserError(f"videos: expected a file or a folder of videos, got {path}, which does not exist")
    files = _frame_files(path)
    films = [file for file in list_files(path, FILMS) if file.parent == path]
    if films:
        raise UserError(f"videos: expected {_EXPECTED}, got the file {films[0]}; {_ADVICE}")
    moving = [file for file in files if count_frames(file) > 1]
    if files and not moving:
        if folders := _folders(path):
            raise UserError(
                f"videos: expected frames alone, or folders alone, in {path}; got {files[0]} and {folders[0]}"
            )
        return [path]
    if len(moving) < len(files):
        still = next(file for file in files if file not in moving)
        raise UserError(f"videos: expected animations alone, or frames alone, in {path}; got {moving[0]} and {still}")
    inside = [video for folder in _folders(path) for video in _find_videos(folder)]
    if not moving and not inside:
        raise UserError(f"videos: the folder {path} has no video; expected {_EXPECTED}")
    return [*moving, *inside]


def _folders(path: Path) -> list[Path]:
    """Return the folders in a folder that hold images or films, at any depth, by name."""
    folders = (inside for inside in path.iterdir() if inside.is_dir() and not inside.name.startswith("."))
    return sorted(folder for folder in folders if list_files(folder, (*SUFFIXES, *FILMS)))
