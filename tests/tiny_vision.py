"""Tiny models that read images or videos, with their processors, and images and videos."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "<image>", "Describe", "the", "image.", "Count", "birds")
IMAGE = WORDS.index("<image>")
PATCHES = 16
CROP: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}


def make_photos(folder: Path, sizes: tuple[tuple[int, int], ...] = ((20, 16), (16, 16), (30, 40))) -> Path:
    """Write images of these widths and heights, and a file that is none."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number, (width, height) in enumerate(sizes):
        pixels = random.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "notes.txt").write_text("no image")
    return folder


def make_frame(number: int) -> Image.Image:
    """A noisy image whose first pixel is `number`."""
    pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    pixels[0, 0] = number
    return Image.fromarray(pixels)


def make_clips(folder: Path) -> Path:
    """Write a folder of six frames, whose names are not in the order of letters, one of four, and an animation."""
    for name, count in (("b", 6), ("c", 4)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            make_frame(number).save(folder / name / f"frame{8 + number}.png")
    make_frame(0).save(
        folder / "a.webp", save_all=True, append_images=[make_frame(n) for n in range(1, 5)], lossless=True
    )
    (folder / "notes.txt").write_text("no video")
    return folder


def make_videomae(folder: Path) -> None:
    """Write a model of videos of four frames."""
    torch.manual_seed(0)
    config = tf.VideoMAEConfig(**SIZES, num_hidden_layers=2, num_frames=4, tubelet_size=2, initializer_range=0.4)
    tf.VideoMAEModel(config).save_pretrained(folder)
    tf.VideoMAEImageProcessorPil(**CROP).save_pretrained(folder)


def make_vit(folder: Path) -> None:
    """Write a vision transformer."""
    torch.manual_seed(0)
    config = tf.ViTConfig(**SIZES, num_hidden_layers=2, initializer_range=0.4)
    tf.ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    tf.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)


def make_clip(folder: Path) -> None:
    """Write a model of two towers, of images and of text."""
    torch.manual_seed(0)
    text = {
        "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    config = tf.CLIPConfig(vision_config=SIZES | {"num_hidden_layers": 2}, text_config=text, projection_dim=8)
    tf.CLIPModel(config).save_pretrained(folder)
    tf.CLIPProcessor(_image_processor(), make_tokenizer()).save_pretrained(folder)


def llava_config() -> Any:
    """The configuration of a model of three vision layers and two text layers."""
    vision = SIZES | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 16}
    text = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(WORDS), "max_position_embeddings": 64,
        "pad_token_id": 0, "initializer_range": 0.4,
    }  # fmt: skip
    return tf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)


def make_llava(folder: Path) -> None:
    """Write a vision-language model, whose image tokens are the patches of its image."""
    torch.manual_seed(0)
    tf.LlavaForConditionalGeneration(llava_config()).save_pretrained(folder)
    tf.LlavaProcessor(
        image_processor=_image_processor(),
        tokenizer=make_tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def _image_processor() -> Any:
    return tf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


def make_tokenizer(*, names_image: bool = True) -> Any:
    """Return a tokenizer of whole words, one of which is the image token, as it says itself or not."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    extra = {"image_token": "<image>"} if names_image else {}
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=extra, **named)


def make_captioner(folder: Path, decoder: str = "roberta") -> None:
    """Write a decoder of text behind a vision transformer, with an image processor and a tokenizer, no processor."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": len(WORDS)}
    text: Any
    if decoder == "roberta":
        text = tf.RobertaConfig(
            **sizes, intermediate_size=16, max_position_embeddings=34, pad_token_id=0, initializer_range=0.4,
            is_decoder=True, add_cross_attention=True,
        )  # fmt: skip
    else:
        text = tf.GPT2Config(**sizes, n_positions=32, bos_token_id=1, eos_token_id=2, add_cross_attention=True)
    config = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        tf.ViTConfig(**SIZES, num_hidden_layers=2, initializer_range=0.4), text
    )
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    tf.VisionEncoderDecoderModel(config).save_pretrained(folder)
    tf.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    make_tokenizer(names_image=False).save_pretrained(folder)
