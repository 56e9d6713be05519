"""What a prompt that is too long should lose."""
