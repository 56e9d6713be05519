"""What a look at a text depends on."""

from dataclasses import dataclass
from typing import Any, ClassVar

from regard.runs.config import Config, config_field

SMALLEST_PAGE = 0.3
"""Megabytes of a page with one look, at least: half of them are there without any number."""


def parse_heads(text: str) -> tuple[str, ...]:
    """Return the heads that a text lists as LAYER.HEAD, such as 3.5,4.0. Raises ValueError."""
    heads = [part.strip() for part in text.split(",")]
    if not all(head.count(".") == 1 and head.replace(".", "").isdecimal() for head in heads):
        raise ValueError(text)
    return tuple(f"{int(layer)}.{int(head)}" for layer, head in (head.split(".") for head in heads))


@dataclass(frozen=True, kw_only=True)
class LookConfig(Config):
    """Everything that a page of `regard look` depends on beside models and texts."""

    command: ClassVar[str] = "look"

    length: int = config_field(
        2048, "largest number of tokens that are read; the page says if the text has more", maximum=65_535
    )
    epsilon: float = config_field(
        0.3,
        "threshold of a sink: the mean attention that it gets from the queries that may see it",
        exclusive_minimum=0,
        exclusive_maximum=1,
    )
    minimum_queries: int = config_field(8, "a key can be a sink only if at least so many queries may see it")
    heads: tuple[str, ...] = config_field(
        (),
        "heads, as LAYER.HEAD, that keep most detail if a long text does not fit the page",
        parser=parse_heads,
        syntax="heads such as 3.5,4.0",
    )
    megabytes: float = config_field(
        4.8,
        "size of the page in megabytes; what does not fit is kept in less detail",
        minimum=SMALLEST_PAGE,
    )
    prompt: str = config_field(
        "Describe the image.", "text beside an image, for models that read both", metavar="TEXT", blank=True
    )
    part: str | None = config_field(
        None, "path of one part of the model, to look at it alone, such as model.language_model (default: all)"
    )
    skip_verification: bool = config_field(
        False, "do not compare a few tokens with the model's own attention first, as is done once for each model"
    )

    def check(self) -> None:
        for head in self.heads:
            try:
                parse_heads(head)
            except ValueError:
                from regard.errors import UserError

                raise UserError(f"heads: expected each as LAYER.HEAD, such as 3.5; got {head!r}") from None

    def share(self, looks: int) -> "LookConfig":
        """Return the options of each look of a page. Raises UserError if a share is too small for one."""
        if self.megabytes < looks * SMALLEST_PAGE:
            from regard.errors import UserError

            raise UserError(
                f"megabytes: expected at least {looks * SMALLEST_PAGE:g} for {looks} looks, {SMALLEST_PAGE:g} for "
                f"each; got {self.megabytes:g}"
            )
        return self.replace(megabytes=self.megabytes / looks)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "heads": list(self.heads)}
