"""`regard measure` on videos: folders of frames and animations, one sample each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from torch import Tensor

import regard as rg
from regard.commands.measure.result import MeasureResult
from regard.data import Videos, read_videos
from regard.errors import UserError
from tests.tiny_vision import (
    CROP,
    SIZES,
    llava_config,
    make_clips,
    make_frame,
    make_llava,
    make_photos,
    make_tokenizer,
    make_videomae,
    make_vit,
)  # fmt: skip

Regard = Callable[..., Any]
VIDEO = 9
"""The token that stands for a video, in a vocabulary of ten words."""


def numbers(frames: list[Image.Image]) -> list[int]:
    return [int(np.asarray(one)[0, 0, 0]) for one in frames]


def make_model(kind: str) -> tuple[Any, Any]:
    """A model of videos of four frames, and its processor."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "num_frames": 4, "initializer_range": 0.4}
    if kind == "vivit":
        patches = {name: value for name, value in sizes.items() if name != "patch_size"} | {"tubelet_size": [2, 4, 4]}
        return tf.VivitModel(tf.VivitConfig(**patches)), tf.VivitImageProcessor(**CROP)
    timesformer = tf.TimesformerConfig(**sizes, attention_type=kind)
    return tf.TimesformerModel(timesformer), tf.VideoMAEImageProcessorPil(**CROP)


@pytest.mark.sample(2)
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(
    "kind, tokens", [("videomae", 32), ("vivit", 33), ("joint_space_time", 65), ("space_only", 17)]
)
def test_a_video_is_a_sample_with_the_columns_of_its_eager_weights(
    kind: str, tokens: int, batch_size: int, regard: Regard, tmp_path: Path
) -> None:
    """TimeSformer of space alone reads each frame as a sequence of its own."""
    if kind == "videomae":
        make_videomae(tmp_path / "model")
        model = tf.VideoMAEModel.from_pretrained(tmp_path / "model")
        processor = tf.VideoMAEImageProcessorPil.from_pretrained(tmp_path / "model")
    else:
        model, processor = make_model(kind)
        model.save_pretrained(tmp_path / "model")
        processor.save_pretrained(tmp_path / "model")
    options = ("--dtype", "float64", "--statistics", "column_mass,entropy", "--batch-size", str(batch_size))
    clips = make_clips(tmp_path / "clips")
    ended = regard("measure", tmp_path / "model", "--videos", clips, *options, "--out", "run")
    assert (ended.code, ended.err) == (0, "")
    result = MeasureResult.load(tmp_path / "run")
    wanted = [[0, 1, 3, 4], [0, 2, 3, 5], [0, 1, 2, 3]]
    read = processor([[make_frame(number) for number in one] for one in wanted], return_tensors="pt").pixel_values
    model = model.eval().double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(read.double(), output_attentions=True).attentions)  # layer, sample, head, …
    assert weights.shape[-1] == tokens
    mass, entropy = weights.mean((1, 3)), -(weights * weights.log()).sum(-1).mean((1, 3))
    columns = result.frame("column_mass").dropna(subset=["layer", "head", "position"])
    values = [float(mass[row.layer, row.head, row.position]) for row in columns.itertuples()]
    assert columns["value"].tolist() == pytest.approx(values, rel=1e-6)
    assert len(columns) == mass.numel()
    assert set(columns["n"]) == {3 * (4 if kind == "space_only" else 1)}
    heads = result.frame("entropy").dropna(subset=["layer", "head"])
    heads = heads[heads["position"].isna()]
    assert heads["value"].tolist() == pytest.approx([float(entropy[r.layer, r.head]) for r in heads.itertuples()])
    data = result.metadata["data"]
    assert (data["input"], data["samples"], data["frames"], data["prompt"]) == ("videos", 3, 4, None)


class Joined:
    """Joins words with videos, each of whose frames is five tokens, as a processor with torchvision does."""

    video_processor, video_token, tokenizer = True, "birds", make_tokenizer()

    def __call__(self, *, text: list[str], videos: list[Any], do_sample_frames: bool, **_: Any) -> dict[str, Any]:
        assert not do_sample_frames
        assert text == ["birds Describe the image."] * len(videos)
        pixels = torch.stack([torch.tensor(np.stack([np.asarray(one) for one in video])) for video in videos])
        ids = torch.tensor([[1, *[VIDEO] * (5 * pixels.shape[1]), 5, 6, 7]] * len(videos))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values_videos": pixels.movedim(-1, 2).float() / 255,
        }


def test_a_model_of_videos_and_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    llava = llava_config()
    tower = llava.vision_config.to_dict() | {"image_size": 8, "initializer_range": 0.4}
    ids = {"image_token_index": 4, "video_token_index": VIDEO}
    config = tf.VideoLlavaConfig(vision_config=tower, text_config=llava.text_config, **ids)
    model = tf.VideoLlavaForConditionalGeneration._from_config(config, attn_implementation="eager").double().eval()
    videos = [[make_frame(n).resize((8, 8)) for n in range(3)], [make_frame(n).resize((8, 8)) for n in range(3, 6)]]
    result = rg.measure(
        model, Joined(), videos=videos, prompt="Describe the image.", statistics=["column_mass", "modality_mass"]
    )
    weights: list[Tensor] = []
    for video in videos:
        inputs = Joined()(text=["birds Describe the image."], videos=[video], do_sample_frames=False)
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"].double()
        with torch.no_grad():
            weights.append(torch.stack(model(**inputs, output_attentions=True).attentions)[:, 0])
    whole = torch.stack(weights, 1)  # layer, sample, head, query, key: <s>, 15 of the video, three words
    expected = 100 * whole[..., 16:, 1:16].sum(-1).mean((1, 3))
    rows = result.frame("modality_mass_text_to_video").dropna(subset=["layer", "head"])
    assert len(rows) == expected.numel()
    values = [float(expected[row.layer, row.head]) for row in rows.itertuples()]
    assert rows["value"].tolist() == pytest.approx(values, rel=1e-6)
    assert set(rows["n"]) == {2}
    assert set(result.frame("column_mass", site="encoder").dropna(subset=["position"])["n"]) == {6}  # frames
    assert result.metadata["data"]["frames"] == "all"


def test_frames_are_spread_evenly_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    videos = read_videos([make_clips(tmp_path / "clips")])
    assert [Path(video).name for video in videos.items] == ["a.webp", "b", "c"]
    assert [numbers(videos.read(index)) for index in range(3)] == [[*range(5)], [*range(6)], [*range(4)]]
    assert numbers(videos.read(1, 3)) == [0, 2, 5]  # frame8, frame10 and frame13
    assert numbers(videos.read(0, 2)) == [0, 4]
    assert numbers(videos.read(2, 1)) == [0]
    assert numbers(read_videos([tmp_path / "clips" / "c"]).read(0)) == [0, 1, 2, 3]
    array = np.stack([np.asarray(make_frame(number)) for number in range(3)])
    with Image.open(tmp_path / "clips" / "a.webp") as opened:
        given = Videos((array, opened, [make_frame(7), make_frame(9)]), "given in Python")
        assert [numbers(given.read(index, 2)) for index in range(3)] == [[0, 2], [0, 4], [7, 9]]
    with pytest.raises(UserError, match=r"videos: expected at least 5 frames, got .*c, which has 4"):
        videos.read(2, 5)
    for wrong, got in (
        (make_frame(0), "an image of one frame"),
        (array.astype(float), "got float64 of shape"),
        (7, "int"),
    ):
        with pytest.raises(UserError, match=rf"videos: expected .*{got}"):
            Videos((wrong,), "given in Python").read(0)


def test_a_folder_or_a_list_of_videos_is_no_video(tmp_path: Path) -> None:
    """Of each the first frame would be taken for a frame."""
    clips = make_clips(tmp_path / "clips")
    (tmp_path / "empty").mkdir()
    for given, message in (
        (clips, "expected a folder of frames, got .*clips, which has videos: pass each"),
        (str(clips), "expected a folder of frames, got .*clips, which has videos: pass each"),
        ([str(clips / "a.webp")] * 4, "images of one frame for the frames of video 0 of given in Python, got .*a.webp"),
        (tmp_path / "empty", "the folder .*empty has no video"),
        (tmp_path / "film.mp4", r"got the film .*film.mp4; mkdir FOLDER && ffmpeg"),
    ):
        with pytest.raises(UserError, match=f"videos: .*{message}"):
            Videos((given,), "given in Python").read(0)


def test_what_is_no_video_is_refused(regard: Regard, tmp_path: Path) -> None:
    make_videomae(tmp_path / "videomae")
    make_vit(tmp_path / "vit")
    make_llava(tmp_path / "llava")
    clips, photos = make_clips(tmp_path / "clips"), make_photos(tmp_path / "photos")
    (tmp_path / "film.mp4").write_bytes(b"film")
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "film.mov").write_bytes(b"film")
    (tmp_path / "empty").mkdir()
    make_clips(tmp_path / "mixed")
    make_frame(0).save(tmp_path / "mixed" / "still.png")
    make_clips(tmp_path / "both" / "c")
    (tmp_path / "both" / "c" / "a.webp").unlink()
    make_frame(0).save(tmp_path / "both" / "c" / "still.png")
    for arguments, message in (
        (("videomae", "--videos", "nowhere"), "videos: expected a file or a folder of videos, got nowhere"),
        (("videomae", "--videos", "film.mp4"), "got the file film.mp4; mkdir FOLDER && ffmpeg -i FILE"),
        (("videomae", "--videos", "films"), "got the file films/film.mov; mkdir FOLDER && ffmpeg -i FILE"),
        (("videomae", "--videos", "photos/0.png"), "got the file photos/0.png"),
        (("videomae", "--videos", "empty"), "the folder empty has no video"),
        (("videomae", "--videos", "mixed"), "animations alone, or frames alone, in mixed; got mixed/a.webp and"),
        (("videomae", "--videos", "both"), "frames alone, or folders alone, in both/c; got both/c/still.png"),
        (("videomae", "--videos", photos), "expected at least 4 frames, got " + f"{photos}, which has 3"),
        (("videomae", "--images", photos), "expected a model that reads them, got 'videomae', which reads videos"),
        (("vit", "--videos", clips), "expected one that reads videos, got 'vit'"),
        (("llava", "--videos", clips), "expected one that reads videos, got 'llava'"),
        (("vit", "--images", photos, "--frames", "4"), "frames: are of videos, expected none beside images; got 4"),
        (("vit", "--videos", clips, "--text", "t.txt"), "--videos cannot be used with --text"),
        (("vit", "--videos", clips, "--images", photos), "--images cannot be used with --videos: give one of them"),
    ):  # fmt: skip
        ended = regard("measure", *arguments, "--out", "run")
        assert ended.code == 2
        assert message in ended.err
        assert ended.err.count("\n") == 1
    model = tf.VideoMAEModel.from_pretrained(tmp_path / "videomae")
    processor = tf.VideoMAEImageProcessorPil.from_pretrained(tmp_path / "videomae")
    with pytest.raises(UserError, match=r"images: expected a model that reads them, .* reads videos"):
        rg.measure(model, processor, images=[make_frame(0)] * 4, batch_size=4)


def test_attention_of_space_and_time_by_turns_is_refused(tmp_path: Path) -> None:
    model, processor = make_model("divided_space_time")
    with pytest.raises(UserError, match="cannot observe TimesformerModel: its layers work on 1 and on 16 rows"):
        rg.measure(model, processor, videos=[[make_frame(number) for number in range(4)]])
