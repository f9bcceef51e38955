"""Processors of texts and images for trainers, over lib.pictures' files: transformers' own, but for
the part that needs torchvision (videos)."""

from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from lib.pictures import GEMMA_LENGTH, GEMMA_NAMES, GEMMA_PROCESSOR, PROCESSOR


class Qwen3VL(Qwen3VLProcessor):
    attributes: ClassVar = ["image_processor", "tokenizer"]

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = (
            tokenizer.convert_tokens_to_ids(token) for token in (self.image_token, self.video_token)
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def get_attributes(cls):
        return cls.attributes


def qwen3_vl(folder: Path) -> Qwen3VL:
    """Of a model's folder that has lib.pictures' processor."""
    values = {k: v for k, v in PROCESSOR.items() if k != "image_processor_type"}
    return Qwen3VL(
        Qwen2VLImageProcessorPil(**values),
        PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            eos_token="</s>",
            pad_token="</s>",
            padding_side="left",  # as TRL loads it
        ),
        (folder / "chat_template.jinja").read_text(),
    )


def gemma3(folder: Path) -> Gemma3Processor:
    """As qwen3_vl."""
    values = {k: v for k, v in GEMMA_PROCESSOR.items() if k != "image_processor_type"}
    names = {k: v for k, v in GEMMA_NAMES.items() if k != "tokenizer_class"}
    return Gemma3Processor(
        Gemma3ImageProcessorPil(**values),
        PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), padding_side="left", **names
        ),
        (folder / "chat_template.jinja").read_text(),
        image_seq_length=GEMMA_LENGTH["image_seq_length"],
    )
