"""Block diffusion: the canvas, its noise, the sampler and the denoising step."""
