"""How many steps a task of few rows needs at the scale `laptop`."""
