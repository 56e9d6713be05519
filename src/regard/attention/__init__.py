"""The operator: tensors in, tensors out."""
