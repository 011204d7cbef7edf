"""What every launch rests on: a device's abilities, chained launches, functions that kernels share."""
