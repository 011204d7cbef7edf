"""Launch configurations are searched here, and products checked, on random operands in real shapes."""
