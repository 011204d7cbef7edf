"""The stage calibrate: input scales from the model's own denoising loop."""
