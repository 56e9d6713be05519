"""Tiny models that read sounds, with their processors, and sounds."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

RATE = 16_000
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "<|AUDIO|>", "Describe", "the", "sound.", "Count", "birds")
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}


def make_tones(folder: Path, seconds: tuple[float, ...] = (0.3, 0.2, 0.25), rate: int = RATE, width: int = 2) -> Path:
    """Write sounds of two channels, which are alike, and a file that is none."""
    folder.mkdir(parents=True)
    for number, length in enumerate(seconds):
        time = np.arange(round(length * rate)) / rate
        tone = 0.5 * np.sin(2 * np.pi * (300 + 200 * number) * time) * np.linspace(0.2, 1, len(time))
        samples = np.repeat(np.round(tone * (2 ** (8 * width - 1) - 1)).astype(np.int64), 2)
        raw = (samples + 128).astype("<u1").tobytes() if width == 1 else b""
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(width)
            file.setframerate(rate)
            file.writeframes(raw or b"".join(int(one).to_bytes(width, "little", signed=True) for one in samples))
    (folder / "notes.txt").write_text("no sound")
    return folder


def make_wav2vec2(folder: Path, *, masks: bool = True) -> None:
    """Write an encoder of waveforms."""
    torch.manual_seed(0)
    norm = "layer" if masks else "group"
    config = tf.Wav2Vec2Config(
        **SIZES, conv_dim=(8, 8), conv_stride=(20, 16), conv_kernel=(20, 16), feat_extract_norm=norm,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, initializer_range=0.4, vocab_size=8,
    )  # fmt: skip
    tf.Wav2Vec2Model(config).save_pretrained(folder)
    tf.Wav2Vec2FeatureExtractor(return_attention_mask=masks, sampling_rate=RATE).save_pretrained(folder)


def make_whisper(folder: Path) -> None:
    """Write an encoder–decoder of spectrograms, which pads sounds to two seconds."""
    torch.manual_seed(0)
    config = tf.WhisperConfig(
        vocab_size=len(WORDS), num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_source_positions=100, max_target_positions=32, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, init_std=0.4,
    )  # fmt: skip
    tf.WhisperModel(config).save_pretrained(folder)
    extractor = tf.WhisperFeatureExtractor(feature_size=8, sampling_rate=RATE, chunk_length=2)
    tf.WhisperProcessor(extractor, _tokenizer()).save_pretrained(folder)


def make_qwen_audio(folder: Path) -> None:
    """Write a model of an audio tower and a text stack, whose audio tokens stand in one sequence with words."""
    torch.manual_seed(0)
    tower = {
        "model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 4,
        "encoder_ffn_dim": 16, "d_model": 16, "max_source_positions": 100,
    }  # fmt: skip
    text = SIZES | {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": len(WORDS), "pad_token_id": 0}
    config = tf.Qwen2AudioConfig(audio_config=tower, text_config=text, audio_token_index=WORDS.index("<|AUDIO|>"))
    tf.Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    extractor = tf.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=RATE, chunk_length=2, return_attention_mask=True
    )
    tf.Qwen2AudioProcessor(extractor, _tokenizer()).save_pretrained(folder)


def _tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    special = {"additional_special_tokens": ["<|AUDIO|>"]}
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, **named, **special)
