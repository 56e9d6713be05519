"""Fine-tuning task after task: what all others are measured against."""

from regard.continual.method import Method


class Finetune(Method):
    """Everything is trained on each task as it comes, from where the last one left it."""

    supports_text = True
