"""`regard measure` on sounds: encoders, encoder–decoders, audio-language models, and what is refused."""

import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import regard
from regard.commands.measure.result import MeasureResult
from regard.data import read_sounds
from regard.data.sounds import Sounds
from regard.errors import UserError
from regard.models import processors
from tests.tiny_audio import RATE, make_qwen_audio, make_tones, make_wav2vec2, make_whisper
from tests.tiny_vision import make_tokenizer

Regard = Callable[..., Any]
SECONDS = (0.3, 0.2, 0.25)
MAKERS = {"wav2vec2": make_wav2vec2, "whisper": make_whisper, "qwen": make_qwen_audio}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio")
    for name, make in MAKERS.items():
        make(folder / name)
    make_tones(folder / "tones", SECONDS)
    return folder


def tone(seconds: float, number: int) -> np.ndarray[Any, Any]:
    time = np.arange(round(seconds * RATE)) / RATE
    return 0.5 * np.sin(2 * np.pi * (300 + 200 * number) * time) * np.linspace(0.2, 1, len(time))


def test_an_encoder_has_the_columns_of_its_eager_weights(folder: Path) -> None:
    model = transformers.Wav2Vec2Model.from_pretrained(folder / "wav2vec2", attn_implementation="eager").eval().double()
    processor = transformers.AutoFeatureExtractor.from_pretrained(folder / "wav2vec2")
    sounds = [{"array": tone(0.2, number), "sampling_rate": RATE} for number in range(2)]
    values = processor([sound["array"] for sound in sounds], sampling_rate=RATE, return_tensors="pt").input_values
    with torch.no_grad():
        weights = model(values.double(), output_attentions=True).attentions
    result = regard.measure(model, processor, audio=sounds, statistics="column_mass", batch_size=2)
    assert result.metadata["verified"] is True
    mass = torch.stack(weights).mean(-2).mean(1)  # layer, head, key
    frame = result.frame("column_mass").dropna(subset=["layer", "head", "position"])
    assert len(frame) == mass.numel()
    expected = [float(mass[row.layer, row.head, row.position]) for row in frame.itertuples()]
    assert frame["value"].tolist() == pytest.approx(expected, rel=1e-6)
    assert result.metadata["data"] == {
        "source": "given in Python", "sha256": None, "input": "audio", "prompt": None, "samples": 2,
    }  # fmt: skip


def test_a_feature_extractor_alone_reads_for_an_encoder_decoder(folder: Path) -> None:
    """Without a tokenizer there are no names of tokens, and the rest is as with it."""
    sounds = [{"array": tone(0.2, number), "sampling_rate": RATE} for number in range(2)]
    model = transformers.WhisperModel.from_pretrained(folder / "whisper").eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder / "whisper")
    result = regard.measure(model, extractor, audio=sounds)
    assert result.tokens is not None
    assert result.tokens["token"].isna().all()
    assert set(result.frame("column_mass")["site"]) == {"encoder", "decoder", "cross"}


def speecht5_config() -> Any:
    sizes = {"hidden_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "speech_decoder_prenet_units": 16}
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    front = {"conv_dim": (8, 8), "conv_stride": (20, 16), "conv_kernel": (20, 16), "num_conv_pos_embedding_groups": 2}
    return transformers.SpeechT5Config(
        vocab_size=20, **sizes, **layers, **front, num_conv_pos_embeddings=4, bos_token_id=0, pad_token_id=1,
        eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip


def test_an_extractor_that_calls_sounds_by_another_name() -> None:
    """SpeechT5's takes `audio`, EnCodec's `raw_audio`."""
    model = transformers.SpeechT5ForSpeechToText(speecht5_config()).eval()
    sounds = [{"array": tone(0.2, 0), "sampling_rate": RATE}]
    result = regard.measure(model, transformers.SpeechT5FeatureExtractor(), audio=sounds, statistics="entropy")
    assert set(result.frame("entropy")["site"]) == {"encoder", "decoder", "cross"}


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["SpeechToText", "SpeechToSpeech", "TextToSpeech"])
def test_of_speecht5_speech_to_text_is_measured(kind: str, tmp_path: Path) -> None:
    """Decoders of the others read spectrograms, which ended in a message of a linear layer."""
    model = getattr(transformers, f"SpeechT5For{kind}")(speecht5_config())
    extractor = transformers.SpeechT5FeatureExtractor()
    model.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    options: dict[str, Any] = {"audio": [{"array": tone(0.2, 0), "sampling_rate": RATE}], "statistics": "entropy"}
    if kind == "SpeechToText":
        assert set(regard.measure(str(tmp_path), **options).table["site"]) == {"encoder", "decoder", "cross"}
        return
    for arguments in ((str(tmp_path),), (model, extractor)):
        with pytest.raises(UserError, match=r"model: expected .* reads tokens, as SpeechT5ForSpeechToText; that of"):
            regard.measure(*arguments, **options)
    if kind == "TextToSpeech":
        with pytest.raises(UserError, match="that of SpeechT5ForTextToSpeech reads spectrograms"):
            regard.measure(model, make_tokenizer(), texts=["birds the " * 99], length=8, samples=2)


def test_a_tokenizer_without_a_vocabulary_is_refused(folder: Path) -> None:
    """WhisperTokenizer() makes nothing of a prompt, which then was recorded, and never read."""
    model = transformers.WhisperModel.from_pretrained(folder / "whisper").eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder / "whisper")
    processor = transformers.WhisperProcessor(extractor, transformers.WhisperTokenizer())
    with pytest.raises(UserError, match="tokenizer: expected one that makes tokens of the prompt 'Count'; WhisperTok"):
        regard.measure(model, processor, audio=read_sounds([folder / "tones"]), prompt="Count")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MAKERS)
def test_sounds_of_several_lengths_are_measured_together_as_alone(name: str, folder: Path) -> None:
    options: dict[str, Any] = {"audio": read_sounds([folder / "tones"]), "statistics": "column_mass,entropy,sink_rate"}
    alone, together = (regard.measure(str(folder / name), batch_size=size, **options).table for size in (1, 3))
    axes = ["statistic", "site", "layer", "head", "position", "epsilon"]
    both = alone.merge(together, on=axes, how="outer", suffixes=("", "_together"), indicator=True)
    assert (both["_merge"] == "both").all()
    assert both["n"].tolist() == both["n_together"].tolist()
    assert both["value_together"].tolist() == pytest.approx(both["value"].tolist(), rel=2e-4, abs=1e-4)


def test_the_command_reads_a_folder_with_a_prompt(folder: Path, regard: Regard, tmp_path: Path) -> None:
    options = ("--statistics", "column_mass,modality_mass", "--prompt", "Count the birds", "--out", "run")
    ended = regard("measure", folder / "qwen", "--audio", folder / "tones", *options)
    assert (ended.code, ended.err) == (0, "")
    result = MeasureResult.load(tmp_path / "run")
    assert result.metadata["data"]["prompt"] == "Count the birds"
    assert result.metadata["data"]["sha256"] == read_sounds([folder / "tones"]).sha256
    parts = [result.frame(f"modality_mass_text_to_{name}")["value"] for name in ("text", "audio", "special")]
    assert sum(part.to_numpy() for part in parts) == pytest.approx(100.0, abs=1e-3)
    assert parts[1].between(1, 100).all()
    assert "nan" not in ended.out


def test_a_decoder_reads_its_start_and_the_prompt(folder: Path) -> None:
    result = regard.measure(str(folder / "whisper"), audio=read_sounds([folder / "tones"]), statistics="entropy")
    assert result.table.groupby("site")["position"].max().to_dict() == {"encoder": 99, "decoder": 3, "cross": 3}
    assert result.metadata["data"]["prompt"] == "Describe the sound."


def test_a_sound_that_is_cut_is_told(folder: Path) -> None:
    sound = {"array": tone(2.5, 0), "sampling_rate": RATE}
    with pytest.warns(UserWarning, match=r"audio: a sound of 2\.5 s is cut to 2 s"):
        regard.measure(str(folder / "whisper"), audio=[sound], statistics="entropy")


def test_a_sound_that_is_cut_by_chance_is_refused(folder: Path) -> None:
    """As by CLAP's extractor, whose limit this one is given."""
    model = transformers.AutoModel.from_pretrained(folder / "wav2vec2")
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder / "wav2vec2")
    extractor.nb_max_samples = 4000
    options: dict[str, Any] = {"audio": read_sounds([folder / "tones"]), "statistics": "entropy"}
    with pytest.raises(UserError, match=r"a sound of 0\.3 s is cut to 0\.25 s at a place drawn by chance; cut it"):
        regard.measure(model, extractor, **options)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_are_those_of_the_file(width: int, tmp_path: Path) -> None:
    sounds = read_sounds([make_tones(tmp_path / "tones", (0.1,), width=width)])
    expected = tone(0.1, 0)
    assert np.abs(sounds.read(0, RATE) - expected).max() < 2.0 / 2 ** (8 * width - 1) + 1e-6


def test_another_rate_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    sounds = read_sounds([make_tones(tmp_path / "tones", (0.5,), rate=8000)])
    found = sounds.read(0, RATE)
    assert len(found) == 8000
    assert np.abs(found - tone(0.5, 0))[200:-200].max() < 0.01


def test_what_is_no_sound_is_refused(folder: Path, tmp_path: Path, regard: Regard) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise.wav").write_bytes(b"RIFF no sound at all")
    (tmp_path / "speech.mp3").write_bytes(b"ID3")
    model = folder / "wav2vec2"
    for arguments, message in (
        (("--audio", tmp_path / "empty"), r"has no sound (.wav)"),
        (("--audio", tmp_path / "none.wav"), "which does not exist"),
        (("--audio", tmp_path / "noise.wav"), "expected a .wav of whole numbers of 8 to 32 bits (PCM)"),
        (("--audio", tmp_path / "speech.mp3"), "expected a .wav file, got"),
        (("--audio", folder / "tones", "--images", folder), "--images cannot be used with --audio"),
        (("--audio", folder / "tones", "--input", "random"), "--audio cannot be used with --text or --input"),
    ):
        ended = regard("measure", model, *arguments)
        assert ended.code == 2
        assert message in ended.err
        assert ended.err.count("\n") == 1


def test_what_a_model_cannot_read_is_refused(folder: Path, tmp_path: Path) -> None:
    tones = read_sounds([folder / "tones"])
    make_wav2vec2(tmp_path / "group", masks=False)
    with pytest.raises(UserError, match=r"takes no mask of padding; use --batch-size 1"):
        regard.measure(str(tmp_path / "group"), audio=tones, statistics="entropy", batch_size=3)
    with pytest.raises(UserError, match=r'audio: expected paths of \.wav files, or \{"array": samples'):
        regard.measure(str(folder / "wav2vec2"), audio=[tone(0.1, 0)], statistics="entropy")
    with pytest.raises(UserError, match="audio: expected neither texts nor another input beside them"):
        regard.measure(str(folder / "wav2vec2"), audio=tones, texts=["a"])
    with pytest.raises(UserError, match="audio: a model needs its feature extractor, got NoneType"):
        regard.measure(transformers.AutoModel.from_pretrained(folder / "wav2vec2"), audio=tones)


def test_an_extractor_whose_processor_has_no_tokenizer_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks for WavLM's tokenizer in a ValueError, for Wav2Vec2's in a TypeError."""
    for error in (TypeError, ValueError):

        def fail(*_args: Any, failure: type[Exception] = error, **_options: Any) -> None:
            raise failure("no tokenizer")

        monkeypatch.setattr(processors.AutoProcessor, "from_pretrained", fail)
        extractor = processors.load_processor(folder / "wav2vec2", "wav2vec2", "audio", trust_remote_code=False)
        assert isinstance(extractor, transformers.Wav2Vec2FeatureExtractor)


@pytest.mark.parametrize(
    "kind, values", [("int16", [-32768, 16384]), ("int32", [-(2**31), 2**30]), ("uint8", [0, 192])]
)
def test_whole_numbers_are_pcm(kind: str, values: list[int]) -> None:
    sounds = Sounds(({"array": np.array(values, kind), "sampling_rate": 8000},), "here")
    assert sounds.read(0, 8000).tolist() == [-1.0, 0.5]
    swapped = np.array(values, kind).astype(np.dtype(kind).newbyteorder(">"))
    assert Sounds(({"array": swapped, "sampling_rate": 8000},), "here").read(0, 8000).tolist() == [-1.0, 0.5]
    with pytest.raises(UserError, match="expected samples as floats from -1 to 1, int16, int32 or uint8, got int64"):
        Sounds(({"array": np.array(values, "int64"), "sampling_rate": 8000},), "here").read(0, 8000)


def test_channels_are_averaged_whichever_axis_they_are() -> None:
    left, right = [0.5, -1.0, 0.25], [0.0, 0.5, 0.25]
    for array in (np.array([left, right]), np.array([left, right]).T):
        sounds = Sounds(({"array": array, "sampling_rate": 8000},), "here")
        assert sounds.read(0, 8000).tolist() == [0.25, -0.25, 0.25]


@pytest.mark.every_value
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_files_of_8_to_32_bits_hold_the_same_samples(width: int, tmp_path: Path) -> None:
    """Two channels, −1 and 0.5, then 0 and −0.5; of 8 bits alone numbers have no sign."""
    largest = 1 << (8 * width - 1)
    values = [-largest, largest // 2, 0, -largest // 2]
    numbers = [value + largest if width == 1 else value for value in values]
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(RATE)
        file.writeframes(b"".join(number.to_bytes(width, "little", signed=width > 1) for number in numbers))
    assert read_sounds([tmp_path / "sound.wav"]).read(0, RATE).tolist() == [-0.25, -0.25]


def stereo_of_100_samples(folder: Path) -> bytes:
    """The bytes of a .wav file with two channels of 16 bits."""
    with wave.open(str(folder / "whole.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(bytes(400))
    return (folder / "whole.wav").read_bytes()


def test_a_sound_that_ends_within_a_sample_is_refused(tmp_path: Path) -> None:
    """It was refused in NumPy's words, of an array that cannot be reshaped."""
    (tmp_path / "cut.wav").write_bytes(stereo_of_100_samples(tmp_path)[:-2])
    with pytest.raises(UserError, match=r"cut\.wav is cut off: expected 100 samples, as its header says; got 99$"):
        read_sounds([tmp_path / "cut.wav"]).read(0, RATE)


def test_a_sound_that_ends_before_its_header_says_is_refused(tmp_path: Path) -> None:
    """A copy that was interrupted was measured as a shorter sound. The header of a stream says no size."""
    whole = stereo_of_100_samples(tmp_path)
    (tmp_path / "cut.wav").write_bytes(whole[:-40])
    with pytest.raises(UserError, match=r"cut\.wav is cut off: expected 100 samples, as its header says; got 90$"):
        read_sounds([tmp_path / "cut.wav"]).read(0, RATE)
    unknown = b"\xff" * 4
    (tmp_path / "stream.wav").write_bytes(whole[:4] + unknown + whole[8:40] + unknown + whole[44:])
    assert len(read_sounds([tmp_path / "stream.wav"]).read(0, RATE)) == 100


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_sound_too_short_for_the_model_is_refused_by_its_name(
    batch_size: int, folder: Path, regard: Regard, tmp_path: Path
) -> None:
    """Kernels of 20 and 16 samples, 20 and 16 apart, need 15 * 20 + 20; in a batch all padding counted as frames."""
    options = ("--batch-size", str(batch_size), "--statistics", "entropy", "--out")
    for seconds, code in ((320 / RATE, 0), (319 / RATE, 2)):
        tones = make_tones(tmp_path / str(code), (0.3, seconds))
        ended = regard("measure", folder / "wav2vec2", "--audio", tones, *options, f"run{code}")
        assert ended.code == code
    needed = "expected at least 320 (20.0 ms) samples of 16,000 Hz, which Wav2Vec2Model needs; got 319 (19.9 ms)"
    assert ended.err.endswith(f"audio: {tones / '1.wav'} is too short: {needed}\n")


def test_the_shortest_sound_is_that_of_the_fewest_seconds(tmp_path: Path) -> None:
    make_tones(tmp_path / "slow", (0.3,), rate=800)
    one, two = ({"array": np.zeros(shape), "sampling_rate": rate} for shape, rate in (((2, 300), 1000), (200, 500)))
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF")
    assert Sounds((broken, two, one, tmp_path / "slow" / "0.wav"), "here").find_shortest() == 2
    assert Sounds((broken, two, tmp_path / "slow" / "0.wav"), "here").find_shortest() == 2
    assert Sounds((one, {"array": np.zeros(100), "sampling_rate": 500}), "here").find_shortest() == 1
    assert Sounds((broken, 7), "here").find_shortest() == 0


def test_sounds_that_the_model_does_not_take(folder: Path) -> None:
    """The comparison of layers reads the first; its refusal spoke of `example_inputs`, which measure does not have."""
    model = transformers.WhisperModel.from_pretrained(folder / "whisper")  # reads 2 seconds
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, sampling_rate=RATE, chunk_length=1)
    with pytest.raises(UserError, match=r"^audio: WhisperModel does not take what its processor makes of them: "):
        regard.measure(model, extractor, audio=[{"array": tone(1.0, 0), "sampling_rate": RATE}])
