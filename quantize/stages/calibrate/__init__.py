"""The stage calibrate: finds input scales in the model's own denoising loop."""
