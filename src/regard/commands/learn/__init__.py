"""Learn one task after another."""
