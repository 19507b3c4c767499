# Copyright © 2026 the mlx-lm-mtp authors

from .gemma4_assistant import Model, ModelArgs

__all__ = ["Model", "ModelArgs"]
