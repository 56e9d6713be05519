"""`regard measure` on images: vision models, vision-language models, and what is refused."""

import functools
import re
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models

import regard
from regard.commands.measure import media
from regard.commands.measure.result import MeasureResult
from regard.data import Images, read_images
from regard.data.tokenizers import special_tokens
from regard.errors import UserError
from regard.hooks.modules import find_outside
from regard.models.model_files import Loaded
from regard.models.processors import image_inputs
from tests.tiny_vision import IMAGE, PATCHES, make_clip, make_llava, make_photos, make_tokenizer, make_vit

Regard = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    make_vit(folder / "vit")
    make_llava(folder / "llava")
    make_photos(folder / "photos")
    return folder


def eager_weights(folder: Path) -> tuple[Any, Any, list[Image.Image], torch.Tensor]:
    """A model with its processor, all photos, and its weights on them (layer, sample, head, query, key)."""
    model = transformers.ViTModel.from_pretrained(folder / "vit", attn_implementation="eager").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder / "vit")
    images = [Image.open(path) for path in sorted((folder / "photos").glob("*.png"))]
    with torch.no_grad():
        weights = model(**processor(images=images, return_tensors="pt"), output_attentions=True).attentions
    return model, processor, images, torch.stack(weights)


def test_a_vision_model_has_the_columns_of_its_eager_weights(folder: Path) -> None:
    model, processor, images, weights = eager_weights(folder)
    result = regard.measure(model, processor, images=images, statistics="column_mass", batch_size=2)
    mass = weights.mean(-2).mean(1)  # layer, head, key
    frame = result.frame("column_mass").dropna(subset=["layer", "head", "position"])
    assert len(frame) == mass.numel() == 2 * 4 * (PATCHES + 1)
    values = [float(mass[row.layer, row.head, row.position]) for row in frame.itertuples()]
    assert frame["value"].tolist() == pytest.approx(values, rel=1e-5)
    assert set(frame["n"]) == {3}
    assert result.metadata["data"] == {
        "source": "given in Python", "sha256": None, "input": "images", "prompt": None, "samples": 3,
    }  # fmt: skip


def test_how_far_images_decide_is_measured_at_their_own_length(folder: Path) -> None:
    """The reference is n / (n − 1) · (1 − Σ‖Ā‖² / mean Σ‖A‖²) of each head's eager weights, n samples."""
    model, processor, images, weights = eager_weights(folder)
    weights = weights.double()
    explained = weights.mean(1).square().sum((-2, -1)) / weights.square().sum((-2, -1)).mean(1)
    expected = len(images) / (len(images) - 1) * (1 - explained)
    result = regard.measure(model, processor, images=images, statistics="input_dependence")
    frame = result.frame("input_dependence").dropna(subset=["layer", "head"])
    measured = [float(expected[row.layer, row.head]) for row in frame.itertuples()]
    assert len(frame) == expected.numel()
    assert frame["value"].tolist() == pytest.approx(measured, abs=1e-5)
    with pytest.raises(UserError, match="length: is of windows of text; expected none beside images, got 16"):
        regard.measure(model, processor, images=images, length=16)
    with pytest.raises(UserError, match="statistics: input_dependence cannot be measured on these images"):
        regard.measure(model, processor, images=images[:1], statistics="input_dependence")


def test_a_tokenizer_beside_a_vision_model_is_not_needed(folder: Path, tmp_path: Path) -> None:
    both = shutil.copytree(folder / "vit", tmp_path / "both")
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "llava" / "tokenizer.json")).save_pretrained(both)
    results = [regard.measure(str(one), images=read_images([folder / "photos"])) for one in (folder / "vit", both)]
    assert results[1].metadata["data"]["prompt"] is None
    pd.testing.assert_frame_equal(results[0].frame(), results[1].frame())


@pytest.mark.exhaustive
def test_a_prompt_for_a_model_of_images_alone_is_refused(folder: Path, tmp_path: Path) -> None:
    make_clip(tmp_path / "clip")
    transformers.CLIPVisionModel.from_pretrained(tmp_path / "clip").save_pretrained(tmp_path / "vision")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "clip")
    processor.save_pretrained(tmp_path / "vision")
    photos = read_images([folder / "photos"])
    for name in (folder / "vit", tmp_path / "vision"):
        with pytest.raises(
            UserError, match=rf"prompt: expected none, for '.*{name.name}' is given images alone; got 'Hi'"
        ):
            regard.measure(str(name), images=photos, prompt="Hi")
    with pytest.raises(UserError, match="prompt: expected none"):
        regard.look(str(tmp_path / "vision"), image=str(folder / "photos" / "0.png"), prompt="Hi")
    assert regard.measure(str(tmp_path / "vision"), images=photos).metadata["data"]["prompt"] is None
    assert regard.measure(str(tmp_path / "clip"), images=photos, prompt="Count").metadata["data"]["prompt"] == "Count"


def test_the_command_reads_a_folder_with_a_prompt(folder: Path, regard: Regard, tmp_path: Path) -> None:
    options = ("--statistics", "column_mass,modality_mass,sink_tokens", "--prompt", "Count the birds", "--out", "run")
    ended = regard("measure", folder / "llava", "--images", folder / "photos", *options)
    assert (ended.code, ended.err) == (0, "")
    result = MeasureResult.load(tmp_path / "run")
    data = result.metadata["data"]
    assert data["prompt"] == "Count the birds"
    assert data["samples"] == 3
    assert data["sha256"] == read_images([folder / "photos"]).sha256
    decoder = result.frame("column_mass", site="decoder")
    assert decoder["position"].max() == PATCHES + 3  # <s>, the image, three words
    first = result.frame("modality_mass_text_to_first_image")
    parts = [result.frame(f"modality_mass_text_to_{name}")["value"] for name in ("text", "image", "special")]
    whole = sum(part.to_numpy() for part in parts)
    assert first["value"].between(0, 100).all()
    assert whole == pytest.approx(100.0, abs=1e-3)
    assert result.tokens is not None
    assert "<image>" in set(result.tokens["token"])
    assert "nan" not in ended.out
    shown = re.search(r"([\d.]+) %  text to first image", ended.out)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(first.dropna(subset=["head"])["value"].mean(), abs=0.06)


def test_labels_of_a_processor_are_not_passed(folder: Path) -> None:
    """Those of PaliGemma's are all -100: the loss was no number, and the images were refused."""

    class Labelling(transformers.LlavaProcessor):  # type: ignore[misc]
        def __call__(self, *args: Any, **options: Any) -> Any:
            inputs = super().__call__(*args, **options)
            return {**inputs, "labels": torch.full_like(inputs["input_ids"], -100)}

    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder / "llava")
    plain = transformers.LlavaProcessor.from_pretrained(folder / "llava")
    own = Labelling.from_pretrained(folder / "llava")
    photos = read_images([folder / "photos"])
    rows, expected = (
        regard.measure(model, processor, images=photos, statistics="modality_mass").frame()
        for processor in (own, plain)
    )
    pd.testing.assert_frame_equal(rows, expected)


def test_default_statistics_leave_out_what_needs_tokens(folder: Path) -> None:
    photos = [folder / "photos" / "0.png"]
    result = regard.measure(str(folder / "vit"), images=photos)
    assert "common_sink_ratio" not in result.metadata["statistics"]
    assert {"sink_rate", "entropy", "over_smoothing"} <= set(result.metadata["statistics"])
    with pytest.warns(UserWarning, match="input_dependence cannot be measured on these images"):
        regard.measure(str(folder / "vit"), images=photos, statistics="entropy,input_dependence")


def test_a_processor_that_says_itself_where_images_stand(folder: Path) -> None:
    class Prepending(transformers.LlavaProcessor):  # type: ignore[misc]
        def __call__(self, images: Any, text: list[str], **options: Any) -> Any:
            if not all(isinstance(image, list) for image in images) and len(images) > 1:
                raise ValueError("one list of images a text")
            if any("<image>" in part for part in text):
                raise ValueError("found 2 <image> tokens and 1 image")
            return super().__call__(images, text=[f"<image> {part}" for part in text], **options)

    model = transformers.AutoModel.from_pretrained(folder / "llava")
    plain = transformers.AutoProcessor.from_pretrained(folder / "llava")
    own = Prepending.from_pretrained(folder / "llava")
    options: dict[str, Any] = {"images": read_images([folder / "photos"]), "statistics": "entropy", "batch_size": 3}
    tables = [regard.measure(model, processor, **options).table for processor in (plain, own)]
    pd.testing.assert_frame_equal(*tables)


def test_two_towers_are_two_sites(folder: Path) -> None:
    make_clip(folder / "clip")
    result = regard.measure(str(folder / "clip"), images=read_images([folder / "photos"]), statistics="entropy")
    positions = result.table.groupby("site")["position"].max().to_dict()
    assert set(positions.values()) == {PATCHES, 3}, "patches and a class token; <s> and three words"


def test_images_that_the_model_does_not_take(folder: Path) -> None:
    make_vit(folder / "raw")
    transformers.ViTImageProcessorPil(do_resize=False).save_pretrained(folder / "raw")
    photos = read_images([folder / "photos"])
    with pytest.raises(UserError, match="images: ViTModel does not take what its processor makes of them: Input"):
        regard.measure(str(folder / "raw"), images=photos)
    with pytest.raises(UserError, match=r"images: ViTImageProcessor(Pil)? does not take them: .* Use --batch-size 1"):
        regard.measure(str(folder / "raw"), images=photos, batch_size=2)


@pytest.mark.exhaustive
def test_one_part_of_a_model_is_measured(folder: Path, regard: Regard, tmp_path: Path) -> None:
    words = ("--images", folder / "photos", "--statistics", "entropy,modality_mass", "--layer-ids", "1")
    ended = regard("measure", folder / "llava", *words, "--part", "language_model", "--out", tmp_path / "part")
    assert (ended.code, ended.err) == (0, "")
    whole = regard("measure", folder / "llava", *words, "--out", tmp_path / "whole")
    assert whole.code == 0
    part, all_parts = (MeasureResult.load(tmp_path / name).table for name in ("part", "whole"))
    assert set(all_parts["site"]) == {"encoder", "decoder"}
    pd.testing.assert_frame_equal(part, all_parts.query("site == 'decoder'").reset_index(drop=True))
    ended = regard("measure", folder / "llava", *words, "--part", "text", "--out", tmp_path / "none")
    assert ended.code == 2
    assert "part: expected one of vision_tower, language_model; got 'text'" in ended.err


def test_text_alone_goes_through_a_vision_language_model(folder: Path) -> None:
    """The table of positions of its vision tower does not limit the length of texts."""
    result = regard.measure(str(folder / "llava"), texts=["the " * 200], length=40, samples=2, statistics="entropy")
    assert set(result.table["site"]) == {"decoder"}


def test_some_images_of_many_are_chosen_by_the_seed(folder: Path) -> None:
    options: dict[str, Any] = {"images": read_images([folder / "photos"]), "samples": 2, "statistics": "entropy"}
    first, again, other = (regard.measure(str(folder / "vit"), **options, seed=seed).table for seed in (0, 0, 1))
    pd.testing.assert_frame_equal(first, again)
    assert not first.equals(other)
    assert set(first["n"]) == {2}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--images", "nowhere"), "images: expected a file or a folder of images, got nowhere, which does not exist"),
        (("--images", "empty"), "images: the folder empty has no image"),
        (("--images", "empty/../text.txt"), "cannot be read: "),
        (("--images", "photos", "--text", "text.txt"), "--images cannot be used with --text or --input"),
        (("--images", "photos", "--input", "random"), "--images cannot be used with --text or --input"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str, folder: Path, regard: Regard, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("no image")
    ended = regard("measure", folder / "vit", *arguments, "--out", "run")
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "run").exists()


def test_a_model_without_an_image_processor(tiny: Callable[[str], Path], folder: Path) -> None:
    photos = read_images([folder / "photos"])
    with pytest.raises(UserError, match="expected one that reads images, got"):
        regard.measure(str(tiny("llama")), images=photos)
    model = transformers.ViTModel.from_pretrained(folder / "vit")
    with pytest.raises(UserError, match="images: a model needs its image processor, got NoneType"):
        regard.measure(model, images=photos)
    with pytest.raises(UserError, match="images: expected a list of at least one, each of PIL"):
        regard.measure(model, images=[])
    with pytest.raises(UserError, match="images: expected neither texts nor another input"):
        regard.measure(model, images=photos, texts=["one"])


def test_a_chat_begins_with_one_token_of_beginning(folder: Path) -> None:
    """The template has it, and the tokenizer would add another."""
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder / "llava")
    processor = transformers.AutoProcessor.from_pretrained(folder / "llava")
    plain = image_inputs(
        Loaded(model, processor.tokenizer, "", None, processor=processor), [Image.new("RGB", (9, 9))], "Count"
    )
    processor.chat_template = "{{ bos_token }} <image> {{ messages[0]['content'][1]['text'] }}"
    chat = image_inputs(
        Loaded(model, processor.tokenizer, "", None, processor=processor), [Image.new("RGB", (9, 9))], "Count"
    )
    assert chat["input_ids"].tolist() == plain["input_ids"].tolist()
    assert chat["input_ids"][0, :2].tolist() == [1, IMAGE]


def test_special_tokens_are_those_with_a_role_and_those_added_as_special() -> None:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    tokenizer.add_tokens([AddedToken("<row_1>", special=True), AddedToken("word", special=False)])
    assert special_tokens(tokenizer) == {0, 1, 3}


def test_images_are_upright_and_keep_sixteen_bits(tmp_path: Path) -> None:
    turned = Image.new("L", (6, 3))
    turned.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it to the right to see it upright
    turned.save(tmp_path / "turned.png", exif=exif)
    ramp = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    Image.fromarray(ramp.astype(np.float32)).save(tmp_path / "real.tif")
    files = read_images([tmp_path / name for name in ("turned.png", "ramp.png", "real.tif")])
    upright = files.read(0)
    assert (upright.size, upright.getpixel((2, 0))) == ((3, 6), (255, 255, 255))
    assert np.asarray(files.read(1))[..., 0].reshape(-1).tolist() == list(range(0, 256, 17))
    with pytest.raises(UserError, match=r"expected 8 bits .*, or 16 without sign; .*real.tif is read in mode F"):
        files.read(2)


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_an_image_whose_exif_data_cannot_be_read_is_taken_as_it_lies(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bad.{suffix}"
    Image.new("RGB", (6, 3), (9, 99, 199)).save(path, exif=b"Exif\0\0garbagegarbage", lossless=True)
    with pytest.warns(UserWarning, match=f"images: the EXIF data of .*bad.{suffix} cannot be read"):
        image = read_images([path]).read(0)
    assert (image.size, image.getpixel((0, 0))) == ((6, 3), (9, 99, 199))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["InstructBlip", "Blip2"])
def test_a_model_behind_a_q_former_loads_by_its_folder(kind: str, tmp_path: Path) -> None:
    """InstructBLIP's weights are those of the class with a head; BLIP-2 over T5 has a decoder to feed as well."""
    torch.manual_seed(0)
    tokenizer, again = make_tokenizer(names_image=False), make_tokenizer(names_image=False)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    qformer = sizes | {"encoder_hidden_size": 16, "cross_attention_frequency": 1, "vocab_size": len(tokenizer)}
    text: dict[str, Any] = {"model_type": "llama", "vocab_size": len(tokenizer), **sizes, "num_key_value_heads": 2}
    if kind == "Blip2":
        text = {
            "model_type": "t5", "vocab_size": len(tokenizer), "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1,
            "num_heads": 2, "pad_token_id": 0,
        }  # fmt: skip
    vision = sizes | {"image_size": 16, "patch_size": 8}
    config = getattr(transformers, f"{kind}Config")(
        vision_config=vision, qformer_config=qformer, text_config=text, num_query_tokens=6, image_token_index=IMAGE
    )
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(tmp_path)
    images = transformers.BlipImageProcessorPil(size={"height": 16, "width": 16})
    parts = (images, tokenizer, again) if kind == "InstructBlip" else (images, tokenizer)
    getattr(transformers, f"{kind}Processor")(*parts, num_query_tokens=6).save_pretrained(tmp_path)
    result = regard.measure(
        str(tmp_path), images=[Image.new("RGB", (16, 16))], prompt="Count", statistics="column_mass"
    )
    sites = set(result.frame("column_mass")["site"])
    assert {"encoder", "encoder@qformer", "cross@encoder@qformer", "decoder"} <= sites
    mass = result.frame("column_mass", site="cross@encoder@qformer").groupby("head")["value"].sum()
    assert mass.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_arrays_are_no_images() -> None:
    with pytest.raises(UserError, match=r"images: expected paths, or images of PIL \(Image\.fromarray\), got ndarray"):
        Images((np.zeros((4, 4, 3), np.uint8),), "x").read(0)


def test_a_model_that_draws_in_evaluation_is_told(folder: Path) -> None:
    """ViLT puts patches in an order drawn by chance, also in evaluation mode; a vision transformer draws nothing."""
    config = transformers.ViltConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_attention_heads=4, num_hidden_layers=2, image_size=16,
        patch_size=4, max_image_length=-1,
    )  # fmt: skip
    images = transformers.ViltImageProcessorPil(size={"shortest_edge": 16}, size_divisor=4)
    processor = transformers.ViltProcessor(images, make_tokenizer(names_image=False))
    photos = [Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8))]
    with pytest.warns(UserWarning, match="ViltModel draws numbers by chance in evaluation: the order of its tokens"):
        regard.measure(transformers.ViltModel(config).eval(), processor, images=photos, statistics="entropy")


def test_a_draw_that_changes_nothing_is_not_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of layers that are left out by chance in training alone, for which some models draw in any case."""
    monkeypatch.setattr(transformers.ViTModel, "forward", _drawing(transformers.ViTModel.forward))
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, image_size=16, patch_size=8
    )
    model = transformers.ViTModel(config).eval()
    processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
    regard.measure(model, processor, images=[Image.new("RGB", (16, 16))], statistics="entropy")


def test_what_a_model_draws_on_its_own_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's generator stands still where a model on a GPU draws."""
    states = {"cuda:0": 0, "cuda:1": 0, "mps": 0}
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor(states["mps"]))
    module = types.SimpleNamespace(get_rng_state=lambda device: torch.tensor(states[str(device)]))
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    for name in states:
        places = [types.SimpleNamespace(device=torch.device(place)) for place in ("cpu", name, name)]
        model = types.SimpleNamespace(parameters=lambda places=places: places)
        before = media.random_states(model)
        states[name] += 1
        assert [torch.equal(*pair) for pair in zip(before, media.random_states(model), strict=True)] == [True, False]


def _drawing(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def draw(*args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return forward(*args, **kwargs)

    return draw


def test_attention_outside_of_all_stacks_is_named(tmp_path: Path) -> None:
    """Kosmos-2's latent queries attend to the image in one module between the tower and the text."""
    text = {"vocab_size": 20, "embed_dim": 16, "layers": 1, "ffn_dim": 16, "attention_heads": 4}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    config = transformers.Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=4)
    model = transformers.Kosmos2Model(config).eval()
    assert find_outside(model) == ["image_to_text_projection.x_attn"]
    make_clip(tmp_path)
    assert find_outside(transformers.AutoModel.from_pretrained(tmp_path)) == []
    ids = torch.arange(4, 12)[None]

    class Processor(transformers.CLIPImageProcessorPil):  # type: ignore[misc]
        def __call__(self, images: Any, **options: Any) -> Any:
            where = torch.zeros_like(ids).index_fill(1, torch.arange(1, 5), 1)
            return {**super().__call__(images, **options), "input_ids": ids, "image_embeds_position_mask": where}

    processor = Processor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    with pytest.warns(UserWarning, match=r"not observed: image_to_text_projection.x_attn, attention in no stack"):
        result = regard.measure(model, processor, images=[Image.new("RGB", (16, 16))], statistics="entropy")
    assert result.metadata["not_observed"] == ["image_to_text_projection.x_attn"]


def test_a_pooling_head_of_the_kind_of_pytorch_is_named() -> None:
    """SigLIP's attends by PyTorch's own module, behind the blocks of the same model."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
    for has_head, outside in ((True, ["head.attention"]), (False, [])):
        config = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8, vision_use_head=has_head)
        assert find_outside(transformers.SiglipVisionModel(config)) == outside
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    assert find_outside(torch.nn.TransformerEncoder(layer, 2)) == []


@pytest.mark.parametrize("sizes", [((16, 16), (16, 32)), ((16, 16), (32, 32))])
def test_images_that_are_padded_without_a_mask_are_refused(sizes: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    """YOLOS takes no notice of the mask that its processor makes; what shares a batch then changed the numbers."""
    torch.manual_seed(0)
    config = transformers.YolosConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=4, num_hidden_layers=2, image_size=[32, 32],
        patch_size=8, num_detection_tokens=4,
    )  # fmt: skip
    model = transformers.YolosModel(config).eval()
    processor = transformers.YolosImageProcessorPil(size={"shortest_edge": 16, "longest_edge": 32})
    images = [Image.new("RGB", size) for size in sizes]
    assert set(regard.measure(model, processor, images=images, statistics="entropy").frame()["n"]) <= {1, 2}
    if sizes[1] == (32, 32):  # of one size, once they are scaled
        regard.measure(model, processor, images=images, statistics="entropy", batch_size=2)
        return
    with pytest.raises(UserError, match="images: YolosModel takes no mask of padding; use --batch-size 1 for images"):
        regard.measure(model, processor, images=images, statistics="entropy", batch_size=2)


def test_a_detector_has_queries_of_its_own() -> None:
    """DETR is an encoder–decoder whose decoder reads no tokens, so that there is no start token."""
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"])
    heads = {f"{side}_{name}": 4 for side in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}
    config = transformers.DetrConfig(
        backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=1, num_queries=5, **heads
    )
    processor = transformers.DetrImageProcessorPil(size={"height": 64, "width": 64})
    images = [Image.new("RGB", (16, 16), (9, 99, 199))]
    result = regard.measure(transformers.DetrModel(config).eval(), processor, images=images, statistics="column_mass")
    assert "decoder_start_token" not in result.metadata["data"]
    mass = result.frame("column_mass").dropna(subset=["layer", "head"]).groupby(["site", "head"])["value"]
    assert mass.sum().tolist() == pytest.approx([1.0] * len(mass), abs=1e-5)
    assert any(site.startswith("cross") for site in result.table["site"])
