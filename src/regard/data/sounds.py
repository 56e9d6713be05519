"""Sounds to measure a model on."""

import math
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.files import find_files, hash_files
from regard.data.media import MediaFiles
from regard.errors import UserError, describe_error

SUFFIXES = (".wav",)
UNKNOWN_SIZE = 0x7FFF0000
"""Bytes from which on the size in a header is none: of a stream, whose writer could not go back to it."""
_EXPECTED = 'paths of .wav files, or {"array": samples, "sampling_rate": Hz} as the library datasets gives them'


class Sounds(MediaFiles):
    """Sounds to measure a model on."""

    noun = "sound"

    def find_shortest(self) -> int:
        """Return the index of the sound of the fewest seconds; what cannot be read is left to `read`."""
        return min(range(len(self)), key=lambda index: _count_seconds(self.items[index]))

    def read(self, index: int, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the samples of a sound from −1 to 1, the mean of its channels, at a rate in Hz. Raises UserError."""
        sound = self.items[index]
        if isinstance(sound, Mapping) and {"array", "sampling_rate"} <= set(sound):
            samples, own_rate = _scale(np.asarray(sound["array"])), int(sound["sampling_rate"])
            samples = samples.mean(int(np.argmin(samples.shape))) if samples.ndim == 2 else samples
        elif isinstance(sound, str | Path):
            samples, own_rate = _read_wave(Path(sound))
        else:
            raise UserError(f"audio: expected {_EXPECTED}; got {type(sound).__name__}")
        if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
            raise UserError(f"audio: {self.name(index)} has no finite samples of one or two dimensions")
        return samples if own_rate == rate else _resample(samples, own_rate, rate)


def read_sounds(paths: Sequence[str | Path]) -> Sounds:
    """Find the sounds of files and folders, in the order of their names within a folder. Raises UserError."""
    files = find_files(paths, SUFFIXES, option="audio", noun="sound")
    return Sounds(tuple(files), ", ".join(map(str, paths)), hash_files(files))


def _count_seconds(sound: Any) -> float:
    """Return the seconds of a sound, as its header says; infinite if nothing says so."""
    try:
        if isinstance(sound, Mapping):
            return max(np.shape(sound["array"])) / float(sound["sampling_rate"])
        with wave.open(str(sound), "rb") as opened:
            return opened.getnframes() / opened.getframerate()
    except (OSError, EOFError, ValueError, TypeError, KeyError, ZeroDivisionError, wave.Error):
        return math.inf


def _scale(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return samples from −1 to 1; integers are PCM of 8 bits without sign, or of 16 or 32 bits."""
    if samples.dtype.kind not in "iu":
        return np.asarray(samples, dtype=np.float32)
    samples = samples.astype(samples.dtype.newbyteorder("="))
    if samples.dtype not in (np.uint8, np.int16, np.int32):
        raise UserError(f"audio: expected samples as floats from -1 to 1, int16, int32 or uint8, got {samples.dtype}")
    middle, largest = (128, 128.0) if samples.dtype == np.uint8 else (0, -float(np.iinfo(samples.dtype).min))
    return np.asarray((samples.astype(np.float64) - middle) / largest, dtype=np.float32)


def _read_wave(path: Path) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"audio: expected a .wav file, got {path}; ffmpeg -i FILE FILE.wav makes one")
    try:
        with wave.open(str(path), "rb") as opened:
            width, channels, rate = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
            stated, read = opened.getnframes(), opened.readframes(opened.getnframes())
            whole = len(read) - len(read) % (width * channels)  # a file may end within a sample
            frames = np.frombuffer(read[:whole], dtype=np.uint8).reshape(-1, width * channels)
    except (OSError, EOFError, ValueError, wave.Error) as error:
        advice = "whole numbers of 8 to 32 bits (PCM); ffmpeg -i FILE -c:a pcm_s16le NEW.wav makes one"
        raise UserError(
            f"audio: {path} cannot be read: {describe_error(error)}; expected a .wav of {advice}"
        ) from error
    if len(frames) < stated and stated * width * channels < UNKNOWN_SIZE:
        raise UserError(
            f"audio: {path} is cut off: expected {stated:,} samples, as its header says; got {len(frames):,}"
        )
    raw = frames.reshape(-1, width)
    padded = np.zeros((len(raw), 4), dtype=np.uint8)
    padded[:, 4 - width :] = raw if width > 1 else raw ^ 128  # of 8 bits alone they are without sign
    samples = padded.view("<i4").astype(np.float32).reshape(-1, channels) / 2**31
    return samples.mean(1), rate


def _resample(samples: Any, own_rate: int, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        from scipy.signal import resample_poly
    except ImportError:
        problem = f"the model reads sounds of {rate} Hz, these are of {own_rate} Hz"
        raise UserError(f"audio: {problem}; pip install 'regard[audio]' converts") from None
    common = math.gcd(own_rate, rate)
    return np.asarray(resample_poly(samples, rate // common, own_rate // common), dtype=np.float32)
