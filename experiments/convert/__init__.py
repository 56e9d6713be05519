"""What a conversion to another attention costs and gives, and at which learning rates."""
