"""Inputs that tiny transformers of many kinds take."""

import torch


def steps(*shape: int) -> torch.Tensor:
    """Timesteps from 96 to 896, all different; one for each of two samples by default."""
    shape = torch.Size(shape or (2,))
    return torch.linspace(96, 896, shape.numel()).round().reshape(shape)


def token_places(height: int = 4, width: int = 4, text: int = 0, axes: int = 3) -> torch.Tensor:
    """[text + height * width, axes]: the second and third coordinates are row and column."""
    grid = torch.zeros(text + height * width, axes)
    grid[text:, 1] = torch.arange(height).repeat_interleave(width)
    grid[text:, 2] = torch.arange(width).repeat(height)
    return grid


def tokens(width: int = 16, **more) -> dict:
    """16 tokens with 8 of text."""
    states = {"hidden_states": torch.randn(2, 16, width), "encoder_hidden_states": torch.randn(2, 8, 16)}
    return {**states, "timestep": steps() / 1024, **more}
