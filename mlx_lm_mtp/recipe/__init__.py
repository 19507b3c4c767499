"""How the pair in ``mlx_lm_mtp/demo`` was made, in PyTorch on a GPU.

``python -m mlx_lm_mtp.recipe --help``
"""
